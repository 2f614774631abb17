#include "tests/kernels/experts_modes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/experts_layer.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static uint16_t *random_rows(uint32_t n_rows, uint32_t hidden)
{
    uint16_t *x = experts_grab((size_t)n_rows * hidden * sizeof *x);
    for (size_t i = 0; i < (size_t)n_rows * hidden; i++) x[i] = to_bf16(experts_random());
    return x;
}

/* How far y [n_rows, EXPERTS_K, hidden] is from float64 with exact activations, over n_sampled rows. */
static double off_by(const struct experts_layer *m, const uint16_t *x, uint32_t n_rows, const uint32_t *ids,
                     const float *y, uint32_t n_sampled)
{
    double off = 0, size = 0, *want = experts_grab(m->hidden * sizeof *want);
    uint32_t step = n_rows > n_sampled ? n_rows / n_sampled : 1;
    for (uint32_t e = 0; e < m->n_experts; e++) {
        struct td_pack_weight_args a = experts_args(m, true, e), b = experts_args(m, false, e);
        float *up = NULL, *down = NULL;
        for (uint32_t row = 0; row < n_rows; row += step)
            for (uint32_t k = 0; k < EXPERTS_K; k++) {
                size_t slot = (size_t)row * EXPERTS_K + k;
                if (ids[slot] != e) continue;
                if (up == NULL) up = experts_widened(&a), down = experts_widened(&b);
                experts_reference(m, up, down, m->up_bias + (size_t)e * 2 * m->intermediate,
                                  x + (size_t)row * m->hidden, false, NULL, NULL, NULL, want);
                for (uint32_t i = 0; i < m->hidden; i++) {
                    double d = y[slot * m->hidden + i] - want[i];
                    off += d * d;
                    size += want[i] * want[i];
                }
            }
        free(up), free(down);
    }
    free(want);
    return sqrt(off / fmax(size, 1e-60));
}

/* ---- bf16 activations ---- */

static void check_bf16_shape(uint32_t hidden, uint32_t intermediate, uint32_t n_experts, uint32_t n_rows,
                             uint32_t n_sampled)
{
    char what[128];
    struct experts_layer m = experts_make(hidden, intermediate, n_experts, hidden < 1000 ? 14 : 6);
    uint16_t *x = random_rows(n_rows, hidden);
    struct experts_result r[3];
    for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++) {
        struct experts_gpu g;
        struct experts_loaded w;
        if (!experts_open(&g, f)) exit(1);
        experts_load(&g, &m, n_experts, 0, n_experts, &w);
        r[f] = experts_run(&g, &m, &w, x, n_rows);
        experts_unload(&g, &w);
        experts_close(&g);
    }
    size_t n_differ = 0;
    for (size_t i = 0; i < (size_t)n_rows * EXPERTS_K * hidden; i++) n_differ += memcmp(&r[1].y[i], &r[2].y[i], 4) != 0;
    snprintf(what, sizeof what, "bf16 activations, %u x %u, %u experts, %u rows", hidden, intermediate, n_experts,
             n_rows);
    experts_check(n_differ == 0, what, "forms differ", (double)n_differ, 0.5);
    double off = off_by(&m, x, n_rows, r[1].ids, r[1].y, n_sampled);
    experts_check(off <= 4e-3, what, "fp8", off, 4e-3);
    printf("%-62s off %8.2g\n", what, off);
    experts_free_result(&r[1]), experts_free_result(&r[2]);
    free(x);
    experts_free(&m);
}

void check_bf16_activations(bool is_few)
{
    static const uint32_t shapes[][5] = {{288, 320, 8, 9, 9},     {96, 32, 8, 1, 1},      {320, 1440, 32, 64, 8},
                                         {288, 352, 8, 65, 12},   {288, 320, 8, 2000, 9}, {288, 288, 128, 130, 9},
                                         {2880, 2880, 4, 1, 1},   {2880, 2880, 4, 6, 2},  {2880, 2880, 8, 32, 2},
                                         {2880, 2880, 4, 200, 2}, {2880, 360, 4, 33, 2},  {2880, 736, 4, 3, 2}};
    experts_options.has_bf16_activations = true;
    for (size_t i = 0; i < (is_few ? 2 : COUNT(shapes)); i++) {
        const uint32_t *s = shapes[i];
        /* Stored groups are whole. */
        check_bf16_shape(s[0], s[1] / 32 * 32, s[2], s[3], s[4]);
    }
    experts_options.has_bf16_activations = false;
}

/* ---- slices ---- */

static void check_slice_sum(const struct experts_layer *whole, enum td_expert_form form, uint32_t n_ranks,
                            const uint16_t *x, uint32_t n_rows)
{
    char what[128];
    struct experts_gpu g;
    struct experts_result first = {0};
    size_t n = (size_t)n_rows * EXPERTS_K * whole->hidden;
    uint32_t n_units = 0, n_ids_wrong = 0;
    if (!experts_open(&g, form)) exit(1);
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        struct experts_layer m = *whole;
        struct experts_loaded w;
        td_expert_slice(form, whole->intermediate, n_ranks, rank, &m.first, &m.units);
        n_units += m.first == n_units ? m.units : UINT32_MAX / 2; /* they follow one another */
        experts_load(&g, &m, m.n_experts, 0, m.n_experts, &w);
        struct experts_result r = experts_run(&g, &m, &w, x, n_rows);
        experts_unload(&g, &w);
        if (rank == 0) {
            first = r;
            continue;
        }
        for (size_t i = 0; i < n; i++) first.y[i] += r.y[i];
        for (uint32_t i = 0; i < n_rows * EXPERTS_K; i++) n_ids_wrong += r.ids[i] != first.ids[i];
        experts_free_result(&r);
    }
    snprintf(what, sizeof what, "slices of %u ranks, %s activations, %u rows", n_ranks,
             experts_options.has_bf16_activations ? "bf16" : "fp8", n_rows);
    experts_check(n_units == whole->intermediate, what, "units", n_units, whole->intermediate);
    experts_check(n_ids_wrong == 0, what, "routes", n_ids_wrong, 0);
    double off = off_by(whole, x, n_rows, first.ids, first.y, 2),
           allowed = experts_options.has_bf16_activations ? 4e-3 : 5e-2;
    experts_check(off <= allowed, what, experts_form_names[form], off, allowed);
    printf("%-55s %-6s off %8.2g\n", what, experts_form_names[form], off);
    experts_free_result(&first);
    experts_close(&g);
}

void check_slices(void)
{
    enum { ROWS = 40 };
    struct experts_layer m = experts_make(2880, 2880, 4, 6);
    uint16_t *x = random_rows(ROWS, 2880);
    for (uint32_t n_ranks = 2; n_ranks <= 8; n_ranks *= 2)
        for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++)
            for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
                experts_options.has_bf16_activations = is_bf16;
                check_slice_sum(&m, f, n_ranks, x, n_ranks == 4 ? ROWS : 5);
            }
    experts_options.has_bf16_activations = false;
    free(x);
    experts_free(&m);
}

/* ---- company ---- */

void check_company(void)
{
    enum { MOST = 600, H = 2880, I = 960 };
    static const uint32_t rows[] = {2, 5, 9, 64, 65, 128, 129, MOST};
    char what[96];
    struct experts_layer m = experts_make(H, I, 8, 6);
    uint16_t *x = random_rows(MOST, H);
    experts_options.is_batch_invariant = true;
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++)
        for (int f = TD_EXPERTS_FP8; f <= TD_EXPERTS_MXFP4; f++) {
            struct experts_gpu g;
            struct experts_loaded w;
            experts_options.has_bf16_activations = is_bf16;
            if (!experts_open(&g, f)) exit(1);
            experts_load(&g, &m, m.n_experts, 0, m.n_experts, &w);
            struct experts_result alone = experts_run(&g, &m, &w, x, 1);
            for (size_t i = 0; i < COUNT(rows); i++) {
                struct experts_result r = experts_run(&g, &m, &w, x, rows[i]);
                bool is_same = memcmp(r.y, alone.y, EXPERTS_K * H * sizeof *r.y) == 0 &&
                               memcmp(r.weights, alone.weights, EXPERTS_K * sizeof *r.weights) == 0;
                snprintf(what, sizeof what, "batch-invariant, %s activations, in company of %u",
                         is_bf16 ? "bf16" : "fp8", rows[i]);
                experts_check(is_same, what, experts_form_names[f], !is_same, 0);
                experts_free_result(&r);
            }
            experts_free_result(&alone);
            experts_unload(&g, &w);
            experts_close(&g);
        }
    experts_options.has_bf16_activations = experts_options.is_batch_invariant = false;
    free(x);
    experts_free(&m);
}
