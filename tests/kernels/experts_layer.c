#include "tests/kernels/experts_layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const experts_form_names[] = {"bf16", "fp8", "mxfp4"};
static uint64_t seed = 1;
struct experts_tally experts_tally;
struct td_device_options experts_options = {.backend = "cuda"};

static uint32_t random_u32(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}
float experts_random(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(random_u32() >> 7) / 16777216.0f - 0.5f;
    return sum * 1.7f;
}

void *experts_grab(size_t bytes)
{
    void *p = malloc(bytes + 64);
    if (p == NULL) exit(1);
    return p;
}

/* ---- a layer ---- */

static void stored(uint8_t **blocks, uint8_t **scales, size_t n_groups, int low, int spread)
{
    *blocks = experts_grab(n_groups * 16);
    *scales = experts_grab(n_groups);
    for (size_t i = 0; i < n_groups * 4; i++) {
        uint32_t v = random_u32() << 1 ^ random_u32();
        memcpy(*blocks + i * 4, &v, 4);
    }
    for (size_t i = 0; i < n_groups; i++)
        (*scales)[i] = (uint8_t)(127 + low + (int)(random_u32() % (uint32_t)(spread + 1)));
}

/* Groups' exponents span `spread`. Random routing needs no more than random weights. */
struct experts_layer experts_make(uint32_t hidden, uint32_t intermediate, uint32_t n_experts, int spread)
{
    struct experts_layer m = {
        .hidden = hidden, .intermediate = intermediate, .n_experts = n_experts, .units = intermediate, .limit = 7};
    stored(&m.up_blocks, &m.up_scales, (size_t)n_experts * 2 * intermediate * hidden / 32, -5 - spread, spread);
    stored(&m.down_blocks, &m.down_scales, (size_t)n_experts * hidden * intermediate / 32, -5 - spread, spread);
    m.up_bias = experts_grab((size_t)n_experts * 2 * intermediate * 4);
    m.router_bias = experts_grab(n_experts * 4);
    m.router = experts_grab((size_t)n_experts * hidden * 2);
    for (size_t i = 0; i < (size_t)n_experts * 2 * intermediate; i++)
        m.up_bias[i] = from_bf16(to_bf16(experts_random()));
    for (uint32_t i = 0; i < n_experts; i++) m.router_bias[i] = from_bf16(to_bf16(experts_random() * 0.1f));
    for (size_t i = 0; i < (size_t)n_experts * hidden; i++) m.router[i] = to_bf16(experts_random() * 0.05f);
    return m;
}

void experts_free(struct experts_layer *m)
{
    free(m->up_blocks), free(m->up_scales), free(m->down_blocks), free(m->down_scales);
    free(m->up_bias), free(m->router_bias), free(m->router);
}

struct td_pack_weight_args experts_args(const struct experts_layer *m, bool is_up, uint32_t e)
{
    uint32_t n_in = is_up ? m->hidden : m->intermediate;
    size_t groups = (size_t)(is_up ? 2 * m->intermediate : m->hidden) * n_in / 32;
    return (struct td_pack_weight_args){.source = TD_SRC_MXFP4,
                                        .order = is_up ? TD_ROWS_GATE_UP : TD_ROWS_DOWN,
                                        .data = (is_up ? m->up_blocks : m->down_blocks) + e * groups * 16,
                                        .scales = (is_up ? m->up_scales : m->down_scales) + e * groups,
                                        .ld = n_in,
                                        .row_begin = is_up ? 2 * m->first : 0,
                                        .col_begin = is_up ? 0 : m->first,
                                        .n_out = is_up ? 2 * m->units : m->hidden,
                                        .n_in = is_up ? m->hidden : m->units,
                                        .bias = is_up ? m->up_bias + (size_t)e * 2 * m->intermediate + 2ul * m->first
                                                      : NULL};
}

/* ---- on the GPU ---- */

void experts_must(const struct experts_gpu *g, enum td_status st, const char *what)
{
    if (st == TD_OK) return;
    printf("experts_test: %s: %s %s\n", what, td_status_name(st), td_device_last_error(g->d));
    exit(1);
}

int experts_open(struct experts_gpu *g, enum td_expert_form form)
{
    struct td_err err = {0};
    struct td_device_options o = experts_options;
    o.experts = form;
    if (td_device_open(&o, &g->d, &err) != TD_OK) {
        fprintf(stderr, "experts_test: %s\n", err.text);
        return 0;
    }
    g->form = form;
    experts_must(g, td_stream_create(g->d, 0, &g->s), "stream");
    g->ops = td_device_ops(g->d);
    return 1;
}

void experts_close(struct experts_gpu *g)
{
    td_stream_destroy(g->s);
    td_device_close(g->d);
}

static void *place(const struct experts_gpu *g, const void *from, size_t bytes)
{
    void *p;
    experts_must(g, td_device_alloc(g->d, bytes, &p), "memory");
    if (from != NULL) experts_must(g, td_device_upload(g->d, p, from, bytes), "upload");
    return p;
}

/* Experts absent .. n - 1; copies: expert e is stored expert e % copies. */
void experts_load(const struct experts_gpu *g, const struct experts_layer *m, uint32_t n, uint32_t absent,
                  uint32_t copies, struct experts_loaded *w)
{
    memset(w, 0, sizeof *w);
    for (int is_up = 0; is_up < 2; is_up++) {
        struct td_pack_weight_args first = experts_args(m, is_up, 0);
        size_t bias_bytes, bytes = td_device_packed_bytes(g->d, first.n_out, first.n_in, first.order, &bias_bytes);
        char *data = place(g, NULL, bytes * (n - absent)),
             *bias = is_up ? place(g, NULL, bias_bytes * (n - absent)) : NULL;
        for (uint32_t e = absent; e < n; e++) {
            struct td_pack_weight_args a = experts_args(m, is_up, e % copies);
            a.out = data + (e - absent) * bytes;
            a.bias_out = is_up ? (float *)(void *)(bias + (e - absent) * bias_bytes) : NULL;
            a.n_inexact = &w->n_inexact;
            experts_must(g, g->ops->pack_weight(g->s, &a), "pack_weight");
            (is_up ? w->up : w->down)[e] =
                (struct td_weight){.data = a.out, .bias = a.bias_out, .n_out = a.n_out, .n_in = a.n_in};
        }
        if (is_up)
            w->up_data = data, w->up_bias = bias;
        else
            w->down_data = data;
    }
    w->router = place(g, m->router, (size_t)n * m->hidden * 2);
    w->router_bias = place(g, m->router_bias, n * 4ul);
}

void experts_unload(const struct experts_gpu *g, struct experts_loaded *w)
{
    td_device_free(g->d, w->up_data), td_device_free(g->d, w->up_bias), td_device_free(g->d, w->down_data);
    td_device_free(g->d, w->router), td_device_free(g->d, w->router_bias);
}

void experts_free_result(struct experts_result *r)
{
    free(r->ids), free(r->weights), free(r->y), free(r->scratch), free(r->padded);
}

/* What the kernels took for a row: its codes times their scales. */
void experts_codes(const struct experts_result *r, const uint8_t *codes, const float *scales, uint32_t p, uint32_t n,
                   float *to)
{
    uint32_t rows = r->at.tile_rows, k_tiles = (n + 127) / 128;
    for (uint32_t i = 0; i < n; i++) {
        size_t at = ((size_t)(p / rows) * k_tiles + i / 128) * rows;
        to[i] = td_e4m3_decode(codes[at * 128 + td_expert_fp8_at(p % rows, i % 128)]) * scales[at + p % rows];
    }
}

/* E4M3 activations: the codes that the kernels left, and which padded row each slot is. */
static void look_into(const struct experts_gpu *g, struct experts_result *r, const struct experts_layer *m,
                      uint32_t n_rows, const void *scratch)
{
    const size_t slots = (size_t)n_rows * EXPERTS_K;
    r->at = moe_lay_out(NULL, n_rows, EXPERTS_K, m->n_experts, m->hidden, m->units);
    r->scratch = experts_grab(r->at.bytes);
    experts_must(g, td_device_download(g->d, r->scratch, scratch, r->at.bytes), "download");
    r->at = moe_lay_out(r->scratch, n_rows, EXPERTS_K, m->n_experts, m->hidden, m->units);
    for (uint32_t t = 0; t < *r->at.sorted.n_tiles; t++)
        for (uint32_t i = 0; i < r->at.sorted.tiles[t].n; i++) {
            uint32_t p = t * r->at.tile_rows + i, slot = r->at.sorted.slot_of[p];
            if (slot < slots) r->padded[slot] = p;
        }
}

struct experts_result experts_run(const struct experts_gpu *g, const struct experts_layer *m,
                                  const struct experts_loaded *w, const uint16_t *x, uint32_t n_rows)
{
    size_t slots = (size_t)n_rows * EXPERTS_K, y_bytes = slots * m->hidden * 4;
    struct td_scratch_shape shape = {
        .n_rows = n_rows, .top_k = EXPERTS_K, .n_experts = m->n_experts, .intermediate = m->units, .hidden = m->hidden};
    size_t scratch_bytes = td_device_scratch_bytes(g->d, &shape);
    struct experts_result r = {
        .ids = experts_grab(slots * 4), .weights = experts_grab(slots * 4), .y = experts_grab(y_bytes)};
    void *poison = experts_grab(scratch_bytes > y_bytes ? scratch_bytes : y_bytes);
    memset(poison, 0xff, scratch_bytes > y_bytes ? scratch_bytes : y_bytes);
    void *dx = place(g, x, (size_t)n_rows * m->hidden * 2), *ids = place(g, poison, slots * 4),
         *weights = place(g, poison, slots * 4), *y = place(g, poison, y_bytes),
         *scratch = place(g, poison, scratch_bytes);
    struct td_moe_args a = {
        .x = dx,
        .router = {.data = w->router, .bias = w->router_bias, .n_out = m->n_experts, .n_in = m->hidden},
        .gate_up = w->up,
        .down = w->down,
        .n_rows = n_rows,
        .hidden = m->hidden,
        .intermediate = m->units,
        .n_experts = m->n_experts,
        .top_k = EXPERTS_K,
        .alpha = 1.702f,
        .limit = m->limit,
        .ids = ids,
        .weights = weights,
        .y = y,
        .scratch = scratch};
    td_pieces_init(&a.pieces, m->units, TD_EXPERT_PIECES, 0, TD_EXPERT_PIECES);
    experts_must(g, g->ops->moe(g->s, &a), "moe");
    experts_must(g, td_stream_sync(g->s), "moe");
    experts_must(g, td_device_download(g->d, r.ids, ids, slots * 4), "download");
    experts_must(g, td_device_download(g->d, r.weights, weights, slots * 4), "download");
    experts_must(g, td_device_download(g->d, r.y, y, y_bytes), "download");
    r.padded = experts_grab(slots * 4);
    memset(r.padded, 0xff, slots * 4);
    if (!experts_options.has_bf16_activations && !experts_options.is_batch_invariant)
        look_into(g, &r, m, n_rows, scratch);
    td_device_free(g->d, dx), td_device_free(g->d, ids), td_device_free(g->d, weights), td_device_free(g->d, y);
    td_device_free(g->d, scratch);
    free(poison);
    return r;
}

/* ---- the reference, in float64 ---- */

/* All of a stored expert, rows as stored. */
float *experts_widened(const struct td_pack_weight_args *a)
{
    float *w = experts_grab((size_t)a->n_out * a->n_in * 4);
    const uint8_t *blocks = a->data;
    float value[16];
    for (uint32_t c = 0; c < 16; c++) value[c] = td_fp4_magnitude(c & 7) * (c & 8 ? -1.0f : 1.0f);
    for (size_t i = 0; i < (size_t)a->n_out * a->n_in / 32; i++) {
        float scale = ldexpf(1, a->scales[i] - 127);
        for (uint32_t j = 0; j < 16; j++) {
            w[i * 32 + 2 * j] = value[blocks[i * 16 + j] & 15] * scale;
            w[i * 32 + 2 * j + 1] = value[blocks[i * 16 + j] >> 4] * scale;
        }
    }
    return w;
}

/* x becomes what its E4M3 codes stand for. */
void experts_quantise(float *x, uint32_t n)
{
    for (uint32_t k = 0; k < n; k += 128) {
        float most = 0;
        for (uint32_t i = k; i < n && i < k + 128; i++) most = fmaxf(most, fabsf(x[i]));
        float scale = fmaxf(most, 1e-4f) / 448.0f, inv = 1.0f / scale;
        for (uint32_t i = k; i < n && i < k + 128; i++) x[i] = td_e4m3_decode(td_e4m3_encode(x[i] * inv)) * scale;
    }
}

static void product(const float *w, const float *x, const float *bias, uint32_t n_out, uint32_t n_in, double *y)
{
    for (uint32_t r = 0; r < n_out; r++) {
        double sum[8] = {0};
        const float *row = w + (size_t)r * n_in;
        for (uint32_t k = 0; k < n_in; k += 8)
            for (uint32_t j = 0; j < 8; j++) sum[j] += (double)row[k + j] * (double)x[k + j];
        y[r] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])) +
               (bias != NULL ? (double)bias[r] : 0);
    }
}

/* One row through one expert. given: the second product's input, if it is not to be what the first gives; then *u_off
 * tells how far that is, squared, and *u_size how large it is. */
void experts_reference(const struct experts_layer *m, const float *up, const float *down, const float *up_bias,
                       const uint16_t *x, bool is_quantised, const float *given, double *u_off, double *u_size,
                       double *y)
{
    uint32_t units = m->intermediate;
    float *t = experts_grab(m->hidden * 4ul), *u = experts_grab(units * 4ul);
    double *h = experts_grab(2ul * units * 8);
    for (uint32_t i = 0; i < m->hidden; i++) t[i] = from_bf16(x[i]);
    if (is_quantised) experts_quantise(t, m->hidden);
    product(up, t, up_bias, 2 * units, m->hidden, h);
    for (uint32_t i = 0; i < units; i++) {
        double gate = fmin(h[2 * i], m->limit), lin = fmax(fmin(h[2 * i + 1], m->limit), -m->limit);
        u[i] = (float)(gate / (1 + exp(-1.702 * gate)) * (lin + 1));
    }
    if (is_quantised) experts_quantise(u, units);
    for (uint32_t i = 0; given != NULL && i < units; i++) {
        *u_off += ((double)u[i] - given[i]) * ((double)u[i] - given[i]);
        *u_size += (double)u[i] * u[i];
        u[i] = given[i];
    }
    product(down, u, NULL, m->hidden, units, y);
    free(t), free(u), free(h);
}

/* ---- checks ---- */

void experts_check(bool is_good, const char *what, const char *form, double have, double allowed)
{
    experts_tally.n_checks++;
    if (is_good) return;
    if (!experts_tally.is_quiet) printf("  %s, %s: %.3g, allowed %.1g\n", what, form, have, allowed);
    fflush(stdout);
    experts_tally.n_failed++;
}
