/* tandem-bench kernels: the CUDA ops, each row a shape of gpt-oss, with the floor (bytes over the read bandwidth or
 * operations over the tensor rate) and the ratio; then the same shapes by cuBLAS and PyTorch's attention, in the same
 * run (kernels_peer.py). A row is a graph of many launches over buffers that rotate through more than the L2, launched
 * again and again; the median is printed. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/bench.h"
#include "tests/kernels/pair.h"

#define TB_S       4.31 /* measured: sum over 4 GiB */
#define BF16_FLOPS 750e12
#define L2_BYTES   (256u << 20) /* rotate through at least this */
#define MAX_TURNS  64u

static const char *prefix = ""; /* of every row */
static int is_fp8;              /* pages of the attention rows */
static int is_short;            /* only the rows that show what a mode costs */

static void must(struct pair *p, enum td_status st, const char *what)
{
    if (st == TD_OK) return;
    printf("tandem-bench: %s: %s %s\n", what, td_status_name(st), td_device_last_error(p->gpu));
    exit(1);
}

struct call {
    enum td_status (*run)(struct pair *p, void *args, uint32_t turn);
    void *args;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Median seconds of one call. n_turns: different buffers; n: calls in a graph, a multiple of it. */
static int is_profile; /* a few bare calls, for a profiler that counts launches */

static double time_of(struct pair *p, struct call c, uint32_t n_turns, uint32_t n)
{
    for (uint32_t i = 0; i < 3 && is_profile; i++) must(p, c.run(p, c.args, i % n_turns), "call");
    if (is_profile) {
        must(p, td_stream_sync(p->gpu_stream), "call");
        return 1;
    }
    struct td_graph *g = NULL;
    double t[9];
    for (uint32_t i = 0; i < n_turns; i++) must(p, c.run(p, c.args, i), "warm-up");
    must(p, td_stream_sync(p->gpu_stream), "warm-up");
    must(p, td_graph_begin(p->gpu_stream), "capture");
    for (uint32_t i = 0; i < n; i++) must(p, c.run(p, c.args, i % n_turns), "capture");
    must(p, td_graph_end(p->gpu_stream, &g), "capture");
    for (int k = -2; k < 9; k++) {
        double begun = td_bench_now();
        must(p, td_graph_launch(p->gpu_stream, g), "graph");
        must(p, td_stream_sync(p->gpu_stream), "graph");
        if (k >= 0) t[k] = (td_bench_now() - begun) / n;
    }
    td_graph_destroy(p->gpu, g);
    qsort(t, 9, sizeof t[0], by_value);
    return t[4];
}

static void row_bytes(const char *what, double s, double bytes)
{
    double floor_s = bytes / (TB_S * 1e12);
    printf("%s%-52s %9.2f us  floor %8.2f us  %5.1f %%  %6.2f TB/s\n", prefix, what, s * 1e6, floor_s * 1e6,
           100 * floor_s / s, bytes / s * 1e-12);
    fflush(stdout);
}

static void row_flops(const char *what, double s, double flops)
{
    printf("%s%-52s %9.1f us  floor %8.1f us  %5.1f %%  %6.1f TFLOP/s\n", prefix, what, s * 1e6,
           flops / BF16_FLOPS * 1e6, 100 * flops / BF16_FLOPS / s, flops / s * 1e-12);
    fflush(stdout);
}

static void *gpu_values(struct pair *p, size_t n_bf16)
{
    void *out;
    static uint16_t block[1 << 20];
    if (block[0] == 0)
        for (size_t i = 0; i < sizeof block / 2; i++) {
            float f = pair_random(p);
            uint32_t bits;
            memcpy(&bits, &f, 4);
            block[i] = (uint16_t)(bits >> 16 | 1);
        }
    must(p, td_device_alloc(p->gpu, n_bf16 * 2, &out), "memory");
    for (size_t at = 0; at < n_bf16; at += sizeof block / 2) {
        size_t m = n_bf16 - at < sizeof block / 2 ? n_bf16 - at : sizeof block / 2;
        must(p, td_device_upload(p->gpu, (uint16_t *)out + at, block, m * 2), "upload");
    }
    return out;
}

static uint32_t turns_for(double bytes)
{
    double n = ceil(L2_BYTES / bytes);
    return n < 1 ? 1 : n > MAX_TURNS ? MAX_TURNS : (uint32_t)n;
}

/* ---- attention ---- */

struct attn {
    struct td_attention_args a;
    size_t q_step, layers; /* turns walk the layers of the pool */
};

static enum td_status run_attn(struct pair *p, void *args, uint32_t turn)
{
    struct attn *t = args;
    struct td_attention_args a = t->a;
    a.kv.layer = turn;
    return p->gpu_ops->attention(p->gpu_stream, &a);
}

static double bench_attn(struct pair *p, uint32_t n_seqs, uint32_t ctx, uint32_t rows, uint32_t window, uint32_t turns,
                         uint32_t n)
{
    enum { NQ = 64, NKV = 8, P = 64 };
    uint32_t n_blocks = (ctx + P - 1) / P, n_pages = n_blocks * n_seqs;
    struct td_kv_group_layout l = {.n_layers = turns,
                                   .n_pages = n_pages,
                                   .n_heads = NKV,
                                   .head_dim = 64,
                                   .page_tokens = P,
                                   .dtype = is_fp8 ? TD_E4M3 : TD_BF16};
    struct td_seq_rows *seqs = calloc(n_seqs, sizeof *seqs);
    uint32_t *pages = malloc(n_pages * sizeof *pages);
    for (uint32_t i = 0; i < n_pages; i++) pages[i] = (uint32_t)(((uint64_t)i * 7919 + 11) % n_pages);
    if (n_pages % 7919 == 0) exit(1);
    for (uint32_t i = 0; i < n_seqs; i++)
        seqs[i] = (struct td_seq_rows){
            .row = i * rows, .n_rows = rows, .start = ctx - rows, .pages = i * n_blocks, .fresh = ctx - rows};
    float sinks[NQ];
    for (uint32_t i = 0; i < NQ; i++) sinks[i] = pair_random(p);
    void *d_seqs, *d_pages, *d_sinks, *out;
    must(p, td_device_alloc(p->gpu, n_seqs * sizeof *seqs, &d_seqs), "memory");
    must(p, td_device_alloc(p->gpu, n_pages * 4ul, &d_pages), "memory");
    must(p, td_device_alloc(p->gpu, sizeof sinks, &d_sinks), "memory");
    must(p, td_device_alloc(p->gpu, (size_t)n_seqs * rows * NQ * 64 * 2, &out), "memory");
    td_device_upload(p->gpu, d_seqs, seqs, n_seqs * sizeof *seqs);
    td_device_upload(p->gpu, d_pages, pages, n_pages * 4ul);
    td_device_upload(p->gpu, d_sinks, sinks, sizeof sinks);
    struct attn t = {.a = {.kv = {.layout = l},
                           .seqs = d_seqs,
                           .pages = d_pages,
                           .n_seqs = n_seqs,
                           .n_rows = n_seqs * rows,
                           .n_single = rows == 1 ? n_seqs : 0,
                           .sinks = d_sinks,
                           .out = out,
                           .n_heads = NQ,
                           .n_kv_heads = NKV,
                           .head_dim = 64,
                           .window = window,
                           .scale = 0.125f}};
    void *q = gpu_values(p, (size_t)n_seqs * rows * NQ * 64);
    t.a.q = q;
    t.a.kv.pool = gpu_values(p, td_kv_pool_bytes(&l) / 2);
    double s = time_of(p, (struct call){run_attn, &t}, turns, n);
    td_device_free(p->gpu, t.a.kv.pool);
    td_device_free(p->gpu, q);
    td_device_free(p->gpu, out);
    td_device_free(p->gpu, d_seqs);
    td_device_free(p->gpu, d_pages);
    td_device_free(p->gpu, d_sinks);
    free(seqs);
    free(pages);
    return s;
}

static void bench_attention(struct pair *p)
{
    char what[96];
    static const uint32_t lengths[] = {2048, 8192, 32768};
    double full_8k = 0;
    for (int i = 0; i < 3 && !is_short; i++) {
        double t = lengths[i], s = bench_attn(p, 1, lengths[i], lengths[i], 0, 4, i == 2 ? 4 : 12);
        snprintf(what, sizeof what, "prefill attention, full, %u tokens", lengths[i]);
        row_flops(what, s, 2.0 * t * (t + 1) * 64 * 64);
        if (i == 1) full_8k = s;
    }
    double s = is_short ? 0 : bench_attn(p, 1, 8192, 8192, 128, 4, 12);
    if (!is_short)
        printf("%-52s %9.1f us  %.1f %% of the full layer's\n", "prefill attention, window, 8192 tokens", s * 1e6,
               100 * s / full_8k);
    static const uint32_t shapes[][2] = {{1, 1024},  {1, 8192},   {1, 32768}, {8, 8192},
                                         {32, 8192}, {128, 8192}, {32, 1024}, {128, 1024}};
    for (int i = is_short ? 6 : 0; i < 8; i++) {
        double bytes = (double)shapes[i][0] * shapes[i][1] * 2048;
        uint32_t turns = turns_for(bytes);
        snprintf(what, sizeof what, "decode attention, full, %u x %u", shapes[i][0], shapes[i][1]);
        row_bytes(
            what,
            bench_attn(p, shapes[i][0], shapes[i][1], 1, 0, turns, turns < 20 ? 20 / turns * turns + turns : turns),
            bytes);
    }
    for (int i = 2; i < 8 && !is_short; i++) {
        double bytes = (double)shapes[i][0] * shapes[i][1] * 1024;
        uint32_t turns = turns_for(bytes), n = turns < 20 ? 20 / turns * turns + turns : turns;
        is_fp8 = 1;
        snprintf(what, sizeof what, "decode attention, FP8 pages, %u x %u", shapes[i][0], shapes[i][1]);
        row_bytes(what, bench_attn(p, shapes[i][0], shapes[i][1], 1, 0, turns, n), bytes);
        is_fp8 = 0;
    }
    static const uint32_t batches[] = {1, 32, 128};
    for (int i = 0; i < 3; i++) {
        double bytes = (double)batches[i] * 128 * 2048;
        snprintf(what, sizeof what, "decode attention, window, %u x 1000", batches[i]);
        row_bytes(what, bench_attn(p, batches[i], 1000, 1, 128, 16, 32), bytes);
    }
}

/* ---- products ---- */

struct dense {
    struct td_qkv_args qkv;
    struct td_lm_head_args head;
    struct td_weight w[MAX_TURNS];
    uint32_t which; /* 0 qkv, 1 plain */
};

static enum td_status run_dense(struct pair *p, void *args, uint32_t turn)
{
    struct dense *d = args;
    if (d->which == 0) {
        struct td_qkv_args a = d->qkv;
        a.w = d->w[turn];
        return p->gpu_ops->qkv(p->gpu_stream, &a);
    }
    struct td_lm_head_args a = d->head;
    a.w = d->w[turn];
    return p->gpu_ops->lm_head(p->gpu_stream, &a);
}

static void bench_dense(struct pair *p)
{
    static const struct {
        const char *name;
        uint32_t n_out, n_in, which;
    } shapes[] = {{"QKV", 5120, 2880, 0},
                  {"O", 2880, 4096, 1},
                  {"router, 128 experts", 128, 2880, 1},
                  {"LM head", 201088, 2880, 1}};
    static const uint32_t rows[] = {1, 8, 16, 32, 64, 128, 2048, 8192};
    for (int k = 0; k < 4; k++) {
        struct dense d = {.which = shapes[k].which};
        size_t n = (size_t)shapes[k].n_out * shapes[k].n_in;
        uint32_t turns = turns_for((double)n * 2), most = k == 3 ? 128 : 8192;
        float *bias;
        void *b;
        must(p, td_device_alloc(p->gpu, shapes[k].n_out * 4ul, &b), "memory");
        bias = calloc(shapes[k].n_out, 4);
        td_device_upload(p->gpu, b, bias, shapes[k].n_out * 4ul);
        free(bias);
        for (uint32_t i = 0; i < turns; i++)
            d.w[i] = (struct td_weight){
                .data = gpu_values(p, n), .bias = b, .n_out = shapes[k].n_out, .n_in = shapes[k].n_in};
        void *x = gpu_values(p, (size_t)most * shapes[k].n_in), *y, *cs = NULL, *pos = NULL, *page = NULL, *pool = NULL;
        must(p, td_device_alloc(p->gpu, (size_t)most * shapes[k].n_out * 4, &y), "memory");
        if (k == 0) {
            uint32_t *h = malloc(most * 4ul);
            for (uint32_t i = 0; i < most; i++) h[i] = i % 64;
            must(p, td_device_alloc(p->gpu, most * 4ul, &pos), "memory");
            td_device_upload(p->gpu, pos, h, most * 4ul);
            for (uint32_t i = 0; i < most; i++) h[i] = i / 64;
            must(p, td_device_alloc(p->gpu, most * 4ul, &page), "memory");
            td_device_upload(p->gpu, page, h, most * 4ul);
            free(h);
            cs = gpu_values(p, most * 64ul);
            struct td_kv_group_layout l = {
                .n_layers = 1, .n_pages = most / 64, .n_heads = 8, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};
            must(p, td_device_alloc(p->gpu, td_kv_pool_bytes(&l), &pool), "memory");
            d.qkv = (struct td_qkv_args){.x = x,
                                         .cos = cs,
                                         .sin = cs,
                                         .positions = pos,
                                         .row_page = page,
                                         .kv = {.layout = l, .pool = pool},
                                         .q = y,
                                         .n_heads = 64,
                                         .n_kv_heads = 8,
                                         .head_dim = 64,
                                         .parts = TD_QKV_Q | TD_QKV_KV};
        }
        d.head = (struct td_lm_head_args){.x = x, .logits = y};
        for (int r = 0; r < 8 && rows[r] <= most; r++) {
            char what[96];
            if (is_short && rows[r] != 1 && rows[r] != 32 && rows[r] != 128) continue;
            d.qkv.n_rows = d.head.n_rows = rows[r];
            uint32_t calls = rows[r] > 1000 ? turns : (24 / turns + 1) * turns;
            double s = time_of(p, (struct call){run_dense, &d}, turns, calls);
            snprintf(what, sizeof what, "%s, %u rows", shapes[k].name, rows[r]);
            if (rows[r] > 1000)
                row_flops(what, s, 2.0 * rows[r] * (double)n);
            else
                row_bytes(what, s, 2.0 * (double)n);
        }
        for (uint32_t i = 0; i < turns; i++) td_device_free(p->gpu, (void *)(uintptr_t)d.w[i].data);
        td_device_free(p->gpu, b);
        td_device_free(p->gpu, x);
        td_device_free(p->gpu, y);
        td_device_free(p->gpu, cs);
        td_device_free(p->gpu, pos);
        td_device_free(p->gpu, page);
        td_device_free(p->gpu, pool);
    }
}

/* ---- rows ---- */

struct rows {
    struct td_add_norm_args a;
    struct td_moe_add_norm_args m;
    int is_moe;
};

static enum td_status run_rows(struct pair *p, void *args, uint32_t turn)
{
    struct rows *r = args;
    (void)turn;
    return r->is_moe ? p->gpu_ops->moe_add_norm(p->gpu_stream, &r->m) : p->gpu_ops->add_norm(p->gpu_stream, &r->a);
}

static void bench_rows(struct pair *p)
{
    enum { T = 8192, H = 2880 };
    void *x = gpu_values(p, (size_t)T * H * 2), *y = gpu_values(p, (size_t)T * 4 * H * 2), *w = gpu_values(p, H * 2),
         *b = gpu_values(p, 32 * H * 2), *t = gpu_values(p, (size_t)T * H), *ids, *wt = gpu_values(p, T * 4 * 2);
    must(p, td_device_alloc(p->gpu, T * 4 * 4ul, &ids), "memory");
    uint32_t *h = malloc(T * 4 * 4ul);
    for (uint32_t i = 0; i < T * 4; i++) h[i] = i % 32;
    td_device_upload(p->gpu, ids, h, T * 4 * 4ul);
    free(h);
    struct rows r = {.a = {.x = x, .y = y, .bias = w, .w = w, .t = t, .dim = H, .eps = 1e-5f},
                     .m = {.x = x,
                           .y = y,
                           .ids = ids,
                           .weights = wt,
                           .down_bias = b,
                           .w = w,
                           .t = t,
                           .dim = H,
                           .top_k = 4,
                           .eps = 1e-5f}};
    static const uint32_t rows[] = {1, 128, 8192};
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 3; i++) {
            char what[96];
            r.is_moe = m;
            r.a.n_rows = r.m.n_rows = rows[i];
            double s = time_of(p, (struct call){run_rows, &r}, 1, 40);
            snprintf(what, sizeof what, "%s, %u rows", m ? "moe_add_norm" : "add_norm", rows[i]);
            row_bytes(what, s, (double)rows[i] * H * (m ? 26.0 : 14.0));
        }
    td_device_free(p->gpu, x), td_device_free(p->gpu, y), td_device_free(p->gpu, w), td_device_free(p->gpu, b);
    td_device_free(p->gpu, t), td_device_free(p->gpu, ids), td_device_free(p->gpu, wt);
}

/* ---- experts ---- */

struct moe {
    struct td_moe_args a;
};

static enum td_status run_moe(struct pair *p, void *args, uint32_t turn)
{
    (void)turn;
    return p->gpu_ops->moe(p->gpu_stream, &((struct moe *)args)->a);
}

static void bench_moe(struct pair *p)
{
    enum { H = 2880, I = 2880, E = 32, K = 4, T = 8192 };
    struct td_weight up[E], down[E];
    uint16_t *u = gpu_values(p, (size_t)E * 2 * I * H), *d = gpu_values(p, (size_t)E * H * I);
    float *bias = gpu_values(p, (size_t)E * 2 * I * 2);
    for (uint32_t e = 0; e < E; e++) {
        up[e] = (struct td_weight){
            .data = u + (size_t)e * 2 * I * H, .bias = bias + (size_t)e * 2 * I, .n_out = 2 * I, .n_in = H};
        down[e] = (struct td_weight){.data = d + (size_t)e * H * I, .n_out = H, .n_in = I};
    }
    struct td_scratch_shape shape = {.n_rows = T, .top_k = K, .n_experts = E, .intermediate = I, .hidden = H};
    struct moe m = {.a = {.router = {.data = gpu_values(p, E * H), .bias = bias, .n_out = E, .n_in = H},
                          .gate_up = up,
                          .down = down,
                          .hidden = H,
                          .intermediate = I,
                          .n_experts = E,
                          .top_k = K,
                          .alpha = 1.702f,
                          .limit = 7.0f}};
    void *ids, *weights, *y, *scratch, *x = gpu_values(p, (size_t)T * H);
    must(p, td_device_alloc(p->gpu, T * K * 4ul, &ids), "memory");
    must(p, td_device_alloc(p->gpu, T * K * 4ul, &weights), "memory");
    must(p, td_device_alloc(p->gpu, (size_t)T * K * H * 4, &y), "memory");
    must(p, td_device_alloc(p->gpu, td_device_scratch_bytes(p->gpu, &shape), &scratch), "memory");
    m.a.x = x, m.a.ids = ids, m.a.weights = weights, m.a.y = y, m.a.scratch = scratch;
    static const uint32_t rows[] = {1, 8, 32, 128, 2048, 8192};
    for (int i = 0; i < (is_short ? 4 : 6); i++) {
        char what[96];
        m.a.n_rows = rows[i];
        double s = time_of(p, (struct call){run_moe, &m}, 1, 8), t = rows[i];
        snprintf(what, sizeof what, "bf16 experts, 32, %u rows", rows[i]);
        if (t > 1000)
            row_flops(what, s, 2.0 * t * K * 3 * H * I);
        else
            row_bytes(what, s, E * (1 - pow(1 - 4.0 / E, t)) * 6.0 * H * I);
    }
    td_device_free(p->gpu, u), td_device_free(p->gpu, d), td_device_free(p->gpu, bias), td_device_free(p->gpu, y);
    td_device_free(p->gpu, scratch), td_device_free(p->gpu, x), td_device_free(p->gpu, ids),
        td_device_free(p->gpu, weights);
    td_device_free(p->gpu, (void *)(uintptr_t)m.a.router.data);
}

/* ---- draws ---- */

static enum td_status run_sample(struct pair *p, void *args, uint32_t turn)
{
    (void)turn;
    return td_stream_sample(p->gpu_stream, args);
}

static void bench_sample(struct pair *p)
{
    enum { V = 201088, N = 128 };
    static const struct {
        const char *name;
        struct td_sample_row row;
    } kinds[] = {
        {"greedy or by temperature", {.temperature = 1, .top_p = 1}},
        {"top-k 50", {.temperature = 1, .top_p = 1, .top_k = 50, .is_filtered = 1}},
        {"top-p 0.95", {.temperature = 1, .top_p = 0.95f, .is_filtered = 1}},
        {"top-k 50, top-p 0.95", {.temperature = 1, .top_p = 0.95f, .top_k = 50, .is_filtered = 1}},
        {"top-p 0.95, 20 likeliest listed", {.temperature = 1, .top_p = 0.95f, .n_top = 20, .is_filtered = 1}},
    };
    struct td_sample_row rows[N];
    uint32_t filtered[N];
    void *x = gpu_values(p, (size_t)N * V * 2), *in, *out, *top, *parts, *list;
    must(p, td_device_alloc(p->gpu, sizeof rows, &in), "memory");
    must(p, td_device_alloc(p->gpu, sizeof filtered, &list), "memory");
    must(p, td_device_alloc(p->gpu, N * sizeof(struct td_sampled), &out), "memory");
    must(p, td_device_alloc(p->gpu, N * TD_SAMPLE_TOPS * sizeof(struct td_sample_top), &top), "memory");
    must(p, td_device_alloc(p->gpu, (size_t)N * TD_SAMPLE_PARTS * 16, &parts), "memory");
    /* About normal, once as wide as a model's logits are, once much flatter than any. */
    float *h = malloc((size_t)N * V * sizeof *h);
    for (int wide = 1; wide >= 0; wide--) {
        for (size_t i = 0; i < (size_t)N * V; i++) h[i] = pair_random(p) * (wide ? 3.0f : 1.0f);
        td_device_upload(p->gpu, x, h, (size_t)N * V * sizeof *h);
        for (uint32_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
            for (uint32_t i = 0; i < N; i++) {
                rows[i] = kinds[k].row;
                rows[i].u = (double)i / N;
                rows[i].mask = TD_SAMPLE_NO_MASK;
                rows[i].repetition = 1;
                if (k == 0) rows[i].temperature = i % 2 ? 1.0f : 0.0f;
                filtered[i] = i;
            }
            td_device_upload(p->gpu, in, rows, sizeof rows);
            td_device_upload(p->gpu, list, filtered, sizeof filtered);
            struct td_sample_args a = {.logits = x,
                                       .rows = in,
                                       .filtered = list,
                                       .out = out,
                                       .top = top,
                                       .parts = parts,
                                       .vocab = V,
                                       .n_ids = 200019};
            static const uint32_t batches[] = {1, 32, 128};
            for (int i = 0; i < 3; i++) {
                char what[96];
                a.n_rows = batches[i];
                a.n_filtered = kinds[k].row.is_filtered ? a.n_rows : 0;
                snprintf(what, sizeof what, "draws, %s, %s, %u rows", kinds[k].name, wide ? "s 3" : "s 1", batches[i]);
                row_bytes(what, time_of(p, (struct call){run_sample, &a}, 1, 20), (double)batches[i] * V * 4);
            }
        }
    }
    free(h);
    td_device_free(p->gpu, x), td_device_free(p->gpu, in), td_device_free(p->gpu, out), td_device_free(p->gpu, parts);
    td_device_free(p->gpu, top), td_device_free(p->gpu, list);
}

/* What --batch-invariant costs: rows to hold beside those without it. */
static void bench_invariant(void)
{
    struct pair p;
    if (!pair_open_as(&p, &(struct td_device_options){.backend = "cuda", .is_batch_invariant = true})) return;
    prefix = "invariant: ";
    is_short = 1;
    bench_attention(&p);
    bench_dense(&p);
    bench_moe(&p);
    prefix = "";
    is_short = 0;
    pair_close(&p);
}

/* The peers' program lies beside the sources, or at the top of a tree of `make dist`. */
static void beside_peers(const char *python)
{
    static const char *const places[] = {"tests/bench/kernels_peer.py", "kernels_peer.py"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        if (access(places[i], R_OK) != 0) continue;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            execlp(python, python, places[i], (char *)NULL);
            _exit(127);
        }
        int status = 1;
        if (pid > 0) waitpid(pid, &status, 0);
        if (status != 0)
            printf("peers: %s with PyTorch and Triton did not run (--python chooses the interpreter)\n", python);
        return;
    }
    printf("peers: kernels_peer.py is not in tests/bench of this directory, nor in it\n");
}

int td_bench_kernels(int argc, char **argv)
{
    static const struct option options[] = {
        {"only", required_argument, NULL, 'o'}, {"python", required_argument, NULL, 'p'}, {NULL, 0, NULL, 0}};
    static const struct {
        const char *name;
        void (*run)(struct pair *p);
    } parts[] = {{"attention", bench_attention},
                 {"dense", bench_dense},
                 {"rows", bench_rows},
                 {"sample", bench_sample},
                 {"experts", bench_moe}};
    const char *only = "", *python = "python3";
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'o': only = optarg; break;
        case 'p': python = optarg; break;
        default: return 2;
        }
    struct pair p;
    if (!pair_open(&p)) return 1;
    int n_run = 0;
    if (strcmp(only, "profile") == 0) {
        is_profile = n_run = 1;
        bench_attn(&p, 128, 1000, 1, 128, 16, 32);
        bench_attn(&p, 1, 32768, 1, 0, 4, 4);
        bench_attn(&p, 1, 8192, 8192, 0, 2, 2);
        is_short = 1;
        bench_dense(&p);
        bench_rows(&p);
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (only[0] == '\0' || strcmp(only, parts[i].name) == 0) {
            parts[i].run(&p);
            n_run++;
        }
    pair_close(&p);
    if (only[0] == '\0' || strcmp(only, "invariant") == 0) {
        bench_invariant();
        n_run++;
    }
    if (only[0] == '\0' || strcmp(only, "peers") == 0) {
        beside_peers(python);
        n_run++;
    }
    if (n_run != 0) return 0;
    fprintf(stderr,
            "tandem-bench kernels: --only: \"%s\" is none of attention, dense, rows, sample, experts, invariant, "
            "peers, profile\n",
            only);
    return 2;
}
