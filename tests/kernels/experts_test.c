/* Experts in FP8 and MXFP4 on the GPU. Packing against the definition, byte for byte; one MoE layer against float64,
 * with exact activations and with the same E4M3 codes at both products; the two forms against each other, bit for bit;
 * what modes and slices change (experts_modes.c); the small checkpoint's recorded outputs. "experts_test few" runs a
 * little of all for a sanitizer. Exit status 1 if anything is off or there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "tests/kernels/experts_layer.h"
#include "tests/kernels/experts_modes.h"
#include "tests/kernels/golden.h"
#include "tests/kernels/planted.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static void check_packing(uint32_t n_out, uint32_t n_in, bool is_up)
{
    char what[128];
    struct experts_layer m = experts_make(is_up ? n_in : n_out, is_up ? n_out / 2 : n_in, 2, 14);
    if (is_up) m.up_scales[3] = 90; /* some that are not exact */
    for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++) {
        struct experts_gpu g;
        struct experts_loaded w;
        if (!experts_open(&g, f)) exit(1);
        experts_load(&g, &m, 2, 0, 2, &w);
        uint64_t want_inexact = 0;
        size_t first_wrong = SIZE_MAX, bytes = 0;
        for (uint32_t e = 0; e < 2 && first_wrong == SIZE_MAX; e++) {
            struct td_pack_weight_args a = experts_args(&m, is_up, e);
            struct td_expert_layout l = td_expert_layout(f, a.n_out, a.n_in);
            uint64_t n;
            uint8_t *want = experts_grab(l.bytes), *have = experts_grab(l.bytes);
            td_expert_pack(f, &a, want, &n);
            want_inexact += n;
            experts_must(&g, td_device_download(g.d, have, (is_up ? w.up : w.down)[e].data, l.bytes), "download");
            bytes = l.scales_at + (size_t)l.row_tiles * l.k_tiles * 4;
            size_t codes = td_expert_rows_bytes(f, l.n_rows) * l.k_tiles;
            for (size_t i = 0; i < bytes; i++)
                if ((i < codes || i >= l.scales_at) && have[i] != want[i]) {
                    first_wrong = i;
                    if (!experts_tally.is_quiet)
                        printf("  packing: expert %u byte %zu: %02x, want %02x\n", e, i, have[i], want[i]);
                    break;
                }
            free(want), free(have);
        }
        /* w counted both matrices. */
        struct td_pack_weight_args other[2] = {experts_args(&m, !is_up, 0), experts_args(&m, !is_up, 1)};
        for (int e = 0; e < 2; e++) {
            uint64_t n;
            struct td_expert_layout l = td_expert_layout(f, other[e].n_out, other[e].n_in);
            uint8_t *p = experts_grab(l.bytes);
            td_expert_pack(f, &other[e], p, &n);
            want_inexact += n;
            free(p);
        }
        snprintf(what, sizeof what, "packing %u x %u%s: %llu inexact", n_out, n_in, is_up ? ", gate and up" : "",
                 (unsigned long long)w.n_inexact);
        experts_check(first_wrong == SIZE_MAX && w.n_inexact == want_inexact, what, experts_form_names[f],
                      first_wrong != SIZE_MAX, 0.5);
        experts_unload(&g, &w);
        experts_close(&g);
    }
    experts_free(&m);
}

enum input { USUAL, ZERO_ROWS, OUTLIERS, TINY, AT_CLAMP, LOW_LIMIT };

struct shape {
    uint32_t hidden, intermediate, n_experts, n_rows, absent;
    bool is_skewed;
    enum input input;
};

static void check_layer(const struct shape *c, uint32_t n_sampled)
{
    struct experts_layer m = experts_make(c->hidden, c->intermediate, c->n_experts, 6);
    if (c->is_skewed)
        for (uint32_t e = 0; e < c->n_experts; e++) m.router_bias[e] = e % 2 ? 1000.0f - (float)e : -(float)e;
    if (c->input == LOW_LIMIT) m.limit = 1; /* so that every clamp bites */
    uint16_t *x = experts_grab((size_t)c->n_rows * c->hidden * 2);
    for (size_t i = 0; i < (size_t)c->n_rows * c->hidden; i++) {
        float v = experts_random();
        uint32_t row = (uint32_t)(i / c->hidden), col = (uint32_t)(i % c->hidden);
        if (c->input == ZERO_ROWS && (row % 2 == 0 || col < 200)) v = 0;
        if (c->input == OUTLIERS && col == 17) v *= 1000;
        if (c->input == TINY) v *= 1e-30f;
        if (c->input == AT_CLAMP) v *= 20;
        x[i] = to_bf16(v);
    }
    struct experts_result r[3];
    for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++) {
        struct experts_gpu g;
        struct experts_loaded w;
        if (!experts_open(&g, f)) exit(1);
        experts_load(&g, &m, c->n_experts, c->absent, c->n_experts, &w);
        r[f] = experts_run(&g, &m, &w, x, c->n_rows);
        experts_unload(&g, &w);
        experts_close(&g);
    }
    char name[128], what[160];
    snprintf(name, sizeof name, "%u x %u, %u experts%s, %u rows%s%s", c->hidden, c->intermediate, c->n_experts,
             c->absent ? ", some elsewhere" : "", c->n_rows, c->is_skewed ? ", skewed" : "",
             c->input == ZERO_ROWS   ? ", zeros"
             : c->input == OUTLIERS  ? ", outliers"
             : c->input == TINY      ? ", tiny"
             : c->input == AT_CLAMP  ? ", at the clamp"
             : c->input == LOW_LIMIT ? ", limit 1"
                                     : "");
    size_t n_differ = 0, y_n = (size_t)c->n_rows * EXPERTS_K * c->hidden;
    for (size_t i = 0; i < y_n; i++) n_differ += memcmp(&r[1].y[i], &r[2].y[i], 4) != 0;
    snprintf(what, sizeof what, "%s: forms differ in", name);
    experts_check(n_differ == 0, what, "both", (double)n_differ, 0.5);

    /* Sampled rows, grouped by expert so that each is widened once. */
    double off[3][2] = {{0}}, size[2] = {0};
    double u_off[3] = {0}, u_size[3] = {0};
    float *given = experts_grab((c->hidden > c->intermediate ? c->hidden : c->intermediate) * 4ul),
          *t = experts_grab(c->hidden * 4ul);
    size_t wrong_codes = 0, wrong_routes = 0, first_bad[3] = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
    uint32_t step = c->n_rows / n_sampled > 0 ? c->n_rows / n_sampled : 1;
    double *y = experts_grab(c->hidden * 8ul);
    for (uint32_t e = 0; e < c->n_experts; e++) {
        float *up = NULL, *down = NULL;
        for (uint32_t row = 0; row < c->n_rows; row += step)
            for (uint32_t k = 0; k < EXPERTS_K; k++) {
                size_t slot = (size_t)row * EXPERTS_K + k;
                if (r[1].ids[slot] != e) continue;
                if (e < c->absent) {
                    for (uint32_t i = 0; i < c->hidden; i++)
                        for (int f = 1; f <= 2; f++)
                            wrong_routes += td_f32_bits(r[f].y[slot * c->hidden + i]) != 0x80000000u;
                    continue;
                }
                if (up == NULL) {
                    struct td_pack_weight_args a = experts_args(&m, true, e), b = experts_args(&m, false, e);
                    up = experts_widened(&a), down = experts_widened(&b);
                }
                for (uint32_t i = 0; i < c->hidden; i++) t[i] = from_bf16(x[(size_t)row * c->hidden + i]);
                experts_quantise(t, c->hidden);
                for (int q = 0; q < 3; q++) { /* exact; the first form's codes; the second's */
                    const struct experts_result *of = &r[q == 0 ? 1 : q];
                    if (q > 0) {
                        if (of->padded[slot] == UINT32_MAX) {
                            wrong_routes++;
                            continue;
                        }
                        experts_codes(of, of->at.x, of->at.sx, of->padded[slot], c->hidden, given);
                        for (uint32_t i = 0; i < c->hidden; i++) wrong_codes += given[i] != t[i];
                        experts_codes(of, of->at.u_codes, of->at.su, of->padded[slot], c->intermediate, given);
                    }
                    experts_reference(&m, up, down, m.up_bias + (size_t)e * 2 * c->intermediate,
                                      x + (size_t)row * c->hidden, q > 0, q > 0 ? given : NULL, &u_off[q], &u_size[q],
                                      y);
                    double row_size = 0;
                    for (uint32_t i = 0; i < c->hidden; i++) row_size += y[i] * y[i];
                    if (q < 2) size[q] += row_size;
                    for (int f = 1; f <= 2; f++) {
                        if (q > 0 && q != f) continue;
                        double row_off = 0;
                        for (uint32_t i = 0; i < c->hidden; i++) {
                            double d = r[f].y[slot * c->hidden + i] - y[i];
                            row_off += d * d;
                        }
                        off[f][q > 0] += row_off;
                        if (q > 0 && !(row_off <= row_size * 0.01) && first_bad[f] == SIZE_MAX &&
                            !experts_tally.is_quiet) {
                            first_bad[f] = slot;
                            printf("  slot %zu expert %u form %s:", slot, e, experts_form_names[f]);
                            for (uint32_t i = 0; i < 12; i++)
                                printf(" %.4g/%.4g", (double)r[f].y[slot * c->hidden + i], y[i]);
                            printf("\n");
                        }
                    }
                }
            }
        free(up), free(down);
    }
    free(y), free(given), free(t);
    /* Routing: the four highest logits in float64, unless two are close. */
    for (uint32_t row = 0; row < c->n_rows; row += step) {
        double z[EXPERTS_MAX];
        bool is_taken[EXPERTS_MAX] = {0};
        for (uint32_t e = 0; e < c->n_experts; e++) {
            z[e] = m.router_bias[e];
            for (uint32_t i = 0; i < c->hidden; i++)
                z[e] +=
                    (double)from_bf16(m.router[(size_t)e * c->hidden + i]) * from_bf16(x[(size_t)row * c->hidden + i]);
        }
        for (uint32_t k = 0; k < EXPERTS_K; k++) {
            uint32_t best = UINT32_MAX, id = r[1].ids[row * EXPERTS_K + k];
            for (uint32_t e = 0; e < c->n_experts; e++)
                if (!is_taken[e] && (best == UINT32_MAX || z[e] > z[best])) best = e;
            if (id >= c->n_experts || is_taken[id] || z[best] - z[id] > 1e-3 || r[2].ids[row * EXPERTS_K + k] != id)
                wrong_routes++;
            else
                is_taken[id] = true;
        }
    }
    snprintf(what, sizeof what, "%s: routes", name);
    if (wrong_routes != 0) experts_check(false, what, "both", (double)wrong_routes, 0);
    snprintf(what, sizeof what, "%s: input codes", name);
    experts_check(wrong_codes == 0, what, "both", (double)wrong_codes, 0.5);
    for (int f = 1; f <= 2; f++) {
        double exact = sqrt(off[f][0] / fmax(size[0], 1e-60)), same = sqrt(off[f][1] / fmax(size[1], 1e-60));
        double u = sqrt(u_off[f] / fmax(u_size[f], 1e-60));
        snprintf(what, sizeof what, "%s: activation", name);
        experts_check(u <= 1.5e-2, what, experts_form_names[f], u,
                      1.5e-2); /* a few codes at near-ties are neighbours */
        snprintf(what, sizeof what, "%s: same codes", name);
        experts_check(same <= 5e-3, what, experts_form_names[f], same, 5e-3);
        snprintf(what, sizeof what, "%s: exact activations", name);
        /* A row's group with one value far above the rest, or all of it tiny, is not what the bound is for. */
        double allowed = c->input == USUAL ? 5e-2 : c->input == AT_CLAMP || c->input == LOW_LIMIT ? 6e-2 : 0.5;
        experts_check(exact <= allowed, what, experts_form_names[f], exact, allowed);
        if (f == 1 && !experts_tally.is_quiet) printf("%-62s off %8.2g, exact activations %8.2g\n", name, same, exact);
    }
    experts_free_result(&r[1]), experts_free_result(&r[2]);
    free(x);
    experts_free(&m);
}

/* The check that must see a mistake planted in the device code. */
static bool run_planted(void *user, const char *name)
{
    (void)user;
    if (strcmp(name, "form") == 0) {
        check_packing(64, 32, true);
        return true;
    }
    if (strcmp(name, "fp8") != 0) return false;
    check_layer(&(struct shape){288, 320, 8, 5, 0, false, LOW_LIMIT}, 5);
    check_layer(&(struct shape){288, 320, 8, 130, 0, false, OUTLIERS}, 5);
    return true;
}

static void check_planted(void)
{
    struct experts_gpu g; /* loads the plug-in */
    struct experts_tally before = experts_tally;
    uint32_t n_seen, n_missed = 1;
    experts_options.backend = PLANTED_BACKEND;
    if (experts_open(&g, TD_EXPERTS_FP8)) {
        experts_close(&g);
        experts_tally.is_quiet = true;
        n_missed = planted_run(run_planted, NULL, &experts_tally.n_failed, &n_seen);
        printf("mistakes planted in the device code: %u seen\n", n_seen);
    }
    experts_options.backend = "cuda";
    before.n_checks = experts_tally.n_checks;
    before.n_failed += n_missed;
    experts_tally = before;
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : "";
    td_log_open("experts_test", TD_LOG_ERROR);
    check_packing(64, 32, true);
    check_packing(288, 320, false);
    static const struct shape small[] = {
        {288, 320, 8, 1, 0, false, USUAL},       {96, 32, 8, 3, 0, false, USUAL},
        {288, 320, 8, 8, 0, true, USUAL},        {288, 320, 8, 9, 3, false, USUAL},
        {320, 1440, 32, 64, 0, false, USUAL},    {288, 320, 8, 65, 0, true, USUAL},
        {288, 320, 8, 130, 2, false, ZERO_ROWS}, {288, 288, 128, 130, 0, false, USUAL},
        {288, 320, 8, 300, 0, false, OUTLIERS},  {288, 320, 8, 200, 0, false, TINY},
        {288, 320, 8, 5, 0, false, AT_CLAMP},    {288, 320, 8, 40, 0, false, LOW_LIMIT},
        {288, 360, 16, 33, 0, false, USUAL}};
    uint32_t n_small = strcmp(only, "few") == 0 ? 4 : COUNT(small);
    for (uint32_t i = 0; i < n_small; i++) {
        struct shape s = small[i];
        if (s.intermediate % 32 != 0) s.intermediate = 352; /* MXFP4 keeps whole groups */
        check_layer(&s, 12);
    }
    if (strcmp(only, "few") != 0) {
        static const struct shape large[] = {{2880, 2880, 4, 1, 0, false, USUAL},
                                             {2880, 2880, 4, 6, 0, false, USUAL},
                                             {2880, 2880, 8, 32, 0, false, USUAL},
                                             {2880, 2880, 4, 30, 0, false, USUAL},
                                             {2880, 2880, 4, 200, 0, false, USUAL}};
        for (uint32_t i = 0; i < COUNT(large); i++) check_layer(&large[i], 2);
        check_layer(&(struct shape){288, 320, 32, 20000, 0, false, USUAL}, 20);
        check_layer(&(struct shape){288, 320, 8, 4000, 0, true, USUAL}, 20);
        check_slices();
        check_company();
        check_planted();
        for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++)
            for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
                struct pair p;
                struct td_device_options o = {.backend = "cuda", .experts = f, .has_bf16_activations = is_bf16};
                if (!pair_open_as(&p, &o)) return 1;
                check_goldens(&p);
                pair_report(&p, experts_form_names[f]);
                experts_tally.n_checks += p.n_checks, experts_tally.n_failed += p.n_failed;
                pair_close(&p);
            }
    }
    check_bf16_activations(strcmp(only, "few") == 0);
    printf("experts: %u checks, %u failed\n", experts_tally.n_checks, experts_tally.n_failed);
    return experts_tally.n_failed != 0;
}
