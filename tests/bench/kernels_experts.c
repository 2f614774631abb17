#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/expert_format.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static bool is_wanted(const char *row) { return td_bench_mode.row == NULL || strstr(row, td_bench_mode.row) != NULL; }

enum { DIM = 2880, K = 4, MAX_E = 128, MOST_ROWS = 8192, TURNS = 8 };

struct layer {
    enum td_expert_form form;
    bool is_bf16; /* its activations, of experts in fewer bits */
    uint32_t n_experts;
    struct td_weight up[MAX_E], down[MAX_E];
    void *up_data, *up_bias, *down_data, *router, *router_bias, *x, *ids, *weights, *y, *scratch;
};

struct run {
    const struct layer *l;
    uint32_t n_rows;
    bool is_routing_only;
};

static void *room(struct pair *p, size_t bytes)
{
    void *out;
    td_bench_gpu_must(p, td_device_alloc(p->gpu, bytes, &out), "memory");
    return out;
}

/* Random MXFP4, packed twice; the other experts are copies of these two. */
static void load_matrices(struct pair *p, struct layer *l, bool is_up)
{
    const uint32_t n_out = is_up ? 2 * DIM : DIM;
    const size_t groups = (size_t)n_out * DIM / 32;
    const enum td_row_order order = is_up ? TD_ROWS_GATE_UP : TD_ROWS_DOWN;
    size_t bias_bytes, bytes = td_device_packed_bytes(p->gpu, n_out, DIM, order, &bias_bytes);
    uint8_t *blocks = malloc(groups * 17), *scales = blocks + groups * 16;
    float *bias = calloc(n_out, sizeof *bias);
    char *data = room(p, bytes * l->n_experts), *biases = is_up ? room(p, bias_bytes * l->n_experts) : NULL;
    if (blocks == NULL || bias == NULL) exit(1);
    for (uint32_t e = 0; e < l->n_experts; e++) {
        struct td_pack_weight_args a = {.source = TD_SRC_MXFP4,
                                        .order = order,
                                        .data = blocks,
                                        .scales = scales,
                                        .ld = DIM,
                                        .n_out = n_out,
                                        .n_in = DIM,
                                        .bias = is_up ? bias : NULL,
                                        .out = data + e * bytes,
                                        .bias_out = is_up ? (float *)(void *)(biases + e * bias_bytes) : NULL};
        if (e < 2) {
            uint64_t v = e + 1;
            for (size_t i = 0; i < groups * 16; i++) {
                v = v * 6364136223846793005u + 1442695040888963407u;
                blocks[i] = (uint8_t)(v >> 40);
            }
            for (size_t i = 0; i < groups; i++) scales[i] = (uint8_t)(127 - 11 + blocks[i] % 7);
            for (uint32_t i = 0; i < n_out && is_up; i++) bias[i] = pair_random(p);
            td_bench_gpu_must(p, p->gpu_ops->pack_weight(p->gpu_stream, &a), "pack_weight");
        } else {
            td_bench_gpu_must(p, td_stream_copy(p->gpu_stream, a.out, data + e % 2 * bytes, bytes), "copy");
            if (is_up)
                td_bench_gpu_must(p, td_stream_copy(p->gpu_stream, a.bias_out, biases + e % 2 * bias_bytes, bias_bytes),
                                  "copy");
        }
        (is_up ? l->up : l->down)[e] =
            (struct td_weight){.data = a.out, .bias = a.bias_out, .n_out = n_out, .n_in = DIM};
    }
    td_bench_gpu_must(p, td_stream_sync(p->gpu_stream), "copy");
    free(blocks), free(bias);
    if (is_up)
        l->up_data = data, l->up_bias = biases;
    else
        l->down_data = data;
}

/* Logits of random weights differ by about 2.7 from one expert to the next; skewed: their biases do so, too. */
static void route(struct pair *p, struct layer *l, bool is_skewed)
{
    float bias[MAX_E];
    for (uint32_t e = 0; e < l->n_experts; e++) bias[e] = is_skewed ? 2.7f * pair_random(p) : 0;
    td_bench_gpu_must(p, td_device_upload(p->gpu, l->router_bias, bias, l->n_experts * sizeof *bias), "upload");
}

static void open_layer(struct pair *p, struct layer *l, enum td_expert_form form, uint32_t n_experts)
{
    *l = (struct layer){.form = form, .n_experts = n_experts};
    load_matrices(p, l, true);
    load_matrices(p, l, false);
    size_t n_router = (size_t)n_experts * DIM;
    uint16_t *router = malloc(n_router * sizeof *router), *x = malloc((size_t)MOST_ROWS * DIM * sizeof *x);
    if (router == NULL || x == NULL) exit(1);
    for (size_t i = 0; i < n_router; i++) router[i] = to_bf16(pair_random(p) * 0.05f);
    for (size_t i = 0; i < (size_t)MOST_ROWS * DIM; i++) x[i] = to_bf16(pair_random(p));
    l->router = room(p, n_router * 2);
    l->router_bias = room(p, n_experts * sizeof(float));
    l->x = room(p, (size_t)MOST_ROWS * DIM * 2);
    td_bench_gpu_must(p, td_device_upload(p->gpu, l->router, router, n_router * 2), "upload");
    td_bench_gpu_must(p, td_device_upload(p->gpu, l->x, x, (size_t)MOST_ROWS * DIM * 2), "upload");
    free(router), free(x);
    struct td_scratch_shape shape = {
        .n_rows = MOST_ROWS, .top_k = K, .n_experts = n_experts, .intermediate = DIM, .hidden = DIM};
    l->ids = room(p, MOST_ROWS * K * sizeof(uint32_t));
    l->weights = room(p, MOST_ROWS * K * sizeof(float));
    l->y = room(p, (size_t)MOST_ROWS * K * DIM * sizeof(float));
    l->scratch = room(p, td_device_scratch_bytes(p->gpu, &shape));
}

static void close_layer(struct pair *p, struct layer *l)
{
    void *const all[] = {l->up_data, l->up_bias, l->down_data, l->router, l->router_bias,
                         l->x,       l->ids,     l->weights,   l->y,      l->scratch};
    for (size_t i = 0; i < COUNT(all); i++) td_device_free(p->gpu, all[i]);
}

/* Few rows touch few experts: turns take other rows, and so other experts. */
static enum td_status run_experts(struct pair *p, void *args, uint32_t turn)
{
    const struct run *r = args;
    const struct layer *l = r->l;
    struct td_moe_args a = {.x = (const float *)(const void *)((const uint16_t *)l->x + (size_t)turn * r->n_rows * DIM),
                            .router = {.data = l->router, .bias = l->router_bias, .n_out = l->n_experts, .n_in = DIM},
                            .gate_up = l->up,
                            .down = l->down,
                            .n_rows = r->n_rows,
                            .hidden = DIM,
                            .intermediate = DIM,
                            .n_experts = l->n_experts,
                            .top_k = K,
                            .alpha = 1.702f,
                            .limit = 7.0f,
                            .ids = l->ids,
                            .weights = l->weights,
                            .y = l->y,
                            .scratch = l->scratch,
                            .is_routing_only = r->is_routing_only};
    return p->gpu_ops->moe(p->gpu_stream, &a);
}

/* Experts touched by a call, and the load of the fullest over the mean; means over the turns. */
static void look(struct pair *p, struct run *r, uint32_t turns, double *touched, double *fullest)
{
    const uint32_t slots = r->n_rows * K, n = r->l->n_experts;
    uint32_t *ids = malloc(slots * sizeof *ids);
    *touched = *fullest = 0;
    for (uint32_t k = 0; k < turns; k++) {
        uint32_t count[MAX_E] = {0}, n_touched = 0, most = 0;
        td_bench_gpu_must(p, run_experts(p, r, k), "moe");
        td_bench_gpu_must(p, td_stream_sync(p->gpu_stream), "moe");
        td_bench_gpu_must(p, td_device_download(p->gpu, ids, r->l->ids, slots * sizeof *ids), "download");
        for (uint32_t i = 0; i < slots; i++) n_touched += count[ids[i]]++ == 0;
        for (uint32_t e = 0; e < n; e++) most = count[e] > most ? count[e] : most;
        *touched += (double)n_touched / turns;
        *fullest += (double)most * n / slots / turns;
    }
    free(ids);
}

static void time_experts(struct pair *p, const struct layer *l, uint32_t n_rows, bool is_skewed)
{
    static const char *const names[] = {"bf16", "fp8", "mxfp4"};
    static const double bytes_of[] = {49766400.0, 24883200.0, 13219200.0};
    const double bytes_each = bytes_of[l->form],
                 rate = l->form == TD_EXPERTS_BF16 || l->is_bf16 ? TD_BENCH_BF16_FLOPS : TD_BENCH_FP8_FLOPS;
    struct run r = {.l = l, .n_rows = n_rows};
    const uint32_t turns = n_rows <= 128 ? TURNS : 1, n = n_rows <= 128 ? 3 * turns : 2;
    char what[96];
    snprintf(what, sizeof what, "%s experts, %u%s%s, %u rows", names[l->form], l->n_experts,
             l->is_bf16 ? ", bf16 activations" : "", is_skewed ? ", skewed" : "", n_rows);
    if (!is_wanted(what)) return;
    double touched, fullest;
    look(p, &r, turns, &touched, &fullest);
    double s = td_bench_time(p, (struct td_bench_call){run_experts, &r}, turns, n),
           flops = 2.0 * n_rows * K * 3 * DIM * DIM;
    double bytes_s = touched * bytes_each / (TD_BENCH_TB_S * 1e12), flops_s = flops / rate;
    double floor_s = fmax(bytes_s, flops_s);
    printf(
        "%s%-52s %9.2f us  floor %8.2f us (%s)  %5.1f %%  %5.2f TB/s  %6.1f TFLOP/s  touched %.1f, fullest %.2f of the "
        "mean\n",
        td_bench_mode.prefix, what, s * 1e6, floor_s * 1e6, bytes_s > flops_s ? "bytes" : "flops", 100 * floor_s / s,
        touched * bytes_each / s * 1e-12, flops / s * 1e-12, touched, fullest);
    fflush(stdout);
}

/* Router, top 4, the order by expert, and rows in that order as the first product takes them. */
static void time_routing(struct pair *p, const struct layer *l, uint32_t n_rows)
{
    struct run r = {.l = l, .n_rows = n_rows, .is_routing_only = true};
    const uint32_t turns = n_rows <= 128 ? TURNS : 1;
    char what[96];
    snprintf(what, sizeof what, "routing and permutation, %u, %u rows", l->n_experts, n_rows);
    if (!is_wanted(what)) return;
    double s = td_bench_time(p, (struct td_bench_call){run_experts, &r}, turns, 24);
    /* Rows once, the router's matrix, a code a slot and element. */
    td_bench_row_bytes(what, s, (double)n_rows * DIM * 2 + (double)l->n_experts * DIM * 2 + (double)n_rows * K * DIM);
}

/* Random routing, and skewed unless a mode alone is timed. */
static void bench_form(const struct td_device_options *o, uint32_t n_experts, bool is_one_routing)
{
    static const uint32_t rows[] = {1, 8, 32, 128, 2048, 8192};
    struct pair p;
    struct layer l;
    if (!pair_open_as(&p, o)) return;
    open_layer(&p, &l, o->experts, n_experts);
    l.is_bf16 = o->has_bf16_activations;
    for (int is_skewed = 0; is_skewed < (is_one_routing ? 1 : 2); is_skewed++) {
        route(&p, &l, is_skewed);
        for (size_t k = 0; k < COUNT(rows); k++) time_experts(&p, &l, rows[k], is_skewed);
        if (is_skewed || l.is_bf16 || l.form != TD_EXPERTS_FP8) continue;
        time_routing(&p, &l, 128);
        time_routing(&p, &l, 8192);
    }
    close_layer(&p, &l);
    pair_close(&p);
}

void td_bench_experts(bool is_batch_invariant)
{
    struct td_device_options o = {.backend = "cuda", .is_batch_invariant = is_batch_invariant};
    for (uint32_t n_experts = 32; n_experts <= (is_batch_invariant ? 32 : 128); n_experts *= 4)
        for (int form = n_experts == 32 ? TD_EXPERTS_BF16 : TD_EXPERTS_FP8; form <= TD_EXPERTS_MXFP4; form++) {
            o.experts = form;
            bench_form(&o, n_experts, is_batch_invariant);
        }
    o.has_bf16_activations = true;
    for (int form = TD_EXPERTS_FP8; form <= TD_EXPERTS_MXFP4 && !is_batch_invariant; form++) {
        o.experts = form;
        bench_form(&o, 32, true);
    }
}
