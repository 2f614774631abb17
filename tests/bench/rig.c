#include "tests/bench/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "tests/bench/bench.h"
#include "tests/bench/shape.h"

#define PAGE_TOKENS 64u
#define SPARE_BYTES (6ull << 30) /* of the device: workspace, graphs, the libraries' own */
#define NOISE_BYTES (16u << 20)

/* ---- ops between marks: even numbers before, odd ones behind ---- */

const char *const td_bench_op_names[TD_BENCH_N_OPS] = {
#define X(op, meaning) [TD_BENCH_OP_##op] = #op,
#include "kernels/ops.def"
#undef X
};

#define FIRST_MARK 0u /* of the pass: before the embedding */
#define LAST_MARK  1u /* behind the logits */
#define HEAD_MARK  2u /* the logits', which may not be in the graph with the rest */
#define EMPTY_MARK 3u /* right behind FIRST_MARK: what two marks cost */
#define OPS_MARK   4u

static struct {
    const struct td_ops *real;
    bool each_op, has_head;
    uint32_t n; /* marks of the pass recorded last */
    uint8_t op[TD_FORWARD_FIRST_MARK];
} trace;

static enum td_status before(struct td_stream *s, enum td_bench_op op)
{
    if (op == TD_BENCH_OP_embed) {
        trace.n = OPS_MARK;
        trace.has_head = false;
        enum td_status st = td_stream_mark(s, FIRST_MARK);
        return st == TD_OK && trace.each_op ? td_stream_mark(s, EMPTY_MARK) : st;
    }
    if (op == TD_BENCH_OP_pack_weight || !trace.each_op) return TD_OK;
    if (op == TD_BENCH_OP_lm_head) {
        trace.has_head = true;
        return td_stream_mark(s, HEAD_MARK);
    }
    if (trace.n + 2 > TD_FORWARD_FIRST_MARK) return TD_OK;
    trace.op[trace.n] = (uint8_t)op;
    return td_stream_mark(s, trace.n);
}

static enum td_status behind(struct td_stream *s, enum td_bench_op op)
{
    if (op == TD_BENCH_OP_lm_head) return td_stream_mark(s, LAST_MARK);
    if (op == TD_BENCH_OP_embed || op == TD_BENCH_OP_pack_weight || !trace.each_op) return TD_OK;
    if (trace.n + 2 > TD_FORWARD_FIRST_MARK) return TD_OK;
    trace.n += 2;
    return td_stream_mark(s, trace.n - 1);
}

#define X(op, meaning)                                                                                                 \
    static enum td_status traced_##op(struct td_stream *s, const struct td_##op##_args *a)                             \
    {                                                                                                                  \
        enum td_status st = before(s, TD_BENCH_OP_##op);                                                               \
        if (st == TD_OK) st = trace.real->op(s, a);                                                                    \
        return st == TD_OK ? behind(s, TD_BENCH_OP_##op) : st;                                                         \
    }
#include "kernels/ops.def"
#undef X

static const struct td_ops traced = {
#define X(op, meaning) .op = traced_##op,
#include "kernels/ops.def"
#undef X
};

static double us_between(const struct td_bench_rig *r, uint32_t from, uint32_t to)
{
    double us = 0;
    return td_stream_mark_us(r->forward.stream, from, to, &us) == TD_OK ? us : 0;
}

void td_bench_rig_add_ops(struct td_bench_rig *r, double us[TD_BENCH_N_OPS], uint32_t calls[TD_BENCH_N_OPS])
{
    const double empty = us_between(r, FIRST_MARK, EMPTY_MARK);
    for (uint32_t i = OPS_MARK; i < trace.n; i += 2) {
        us[trace.op[i]] += us_between(r, i, i + 1) - empty;
        calls[trace.op[i]]++;
    }
    if (!trace.has_head) return;
    us[TD_BENCH_OP_lm_head] += us_between(r, HEAD_MARK, LAST_MARK) - empty;
    calls[TD_BENCH_OP_lm_head]++;
}

/* ---- life ---- */

static uint32_t next_random(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

/* About normal in bf16; in FP8 codes between 2^-5 and 2^-1. */
static void fill_noise(struct td_bench_rig *r, int g, void *pool)
{
    struct td_err none = {{0}};
    size_t bytes = td_kv_pool_bytes(&r->o.kv[g]), first = bytes < NOISE_BYTES ? bytes : NOISE_BYTES;
    uint16_t *noise = malloc(NOISE_BYTES);
    uint32_t state = 7;
    TD_CHECK(noise != NULL);
    for (size_t i = 0; i < NOISE_BYTES / 2; i++) {
        if (r->o.kv[g].dtype == TD_E4M3) {
            uint32_t x = next_random(&state);
            noise[i] = (uint16_t)((x & 0x9f9f) | 0x1010);
            continue;
        }
        float v = -6;
        for (int k = 0; k < 3; k++) v += (float)(next_random(&state) & 0xffff) / 16384.0f;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        noise[i] = (uint16_t)(bits >> 16);
    }
    td_bench_must(td_device_upload(r->device, pool, noise, first), &none);
    free(noise);
    for (size_t n = first; n < bytes;) {
        size_t more = bytes - n < n ? bytes - n : n;
        td_bench_must(td_stream_copy(r->forward.stream, (char *)pool + n, pool, more), &none);
        n += more;
    }
    td_bench_must(td_stream_sync(r->forward.stream), &none);
}

static void open_model(const struct td_bench_rig_options *o, struct td_bench_rig *r)
{
    struct td_err err = {{0}};
    char dir[] = "/tmp/tandem-bench-XXXXXX";
    struct td_device_options d = {.backend = o->device, .experts = o->form};
    td_bench_must(td_device_open(&d, &r->device, &err), &err);
    struct td_model_options m = {.use_dummy_weights = o->model == NULL, .dummy_seed = 1, .tp = 1, .device = r->device};
    if (o->model == NULL) {
        TD_CHECK(mkdtemp(dir) != NULL);
        td_bench_must(td_bench_shape_write(o->config, 0, dir, NULL, &err), &err);
    }
    double begun = td_bench_now();
    enum td_status st = td_model_load(o->model != NULL ? o->model : dir, &m, &r->model, &err);
    r->load_s = td_bench_now() - begun;
    if (o->model == NULL) td_bench_shape_remove(dir);
    td_bench_must(st, &err);
    r->c = td_model_config_of(r->model);
    r->weight_bytes = td_model_weight_bytes(r->model);
}

static uint32_t gcd(uint32_t a, uint32_t b) { return b == 0 ? a : gcd(b, a % b); }

/* Every page once, neighbours far apart. */
static uint32_t *scattered(uint32_t n)
{
    uint32_t *ids = malloc(n * sizeof *ids), stride = (uint32_t)(n * 0.618) | 1;
    TD_CHECK(ids != NULL);
    while (gcd(stride, n) != 1) stride += 2;
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)((uint64_t)i * stride % n);
    return ids;
}

static void lay_out(const struct td_bench_rig_options *o, struct td_bench_rig *r)
{
    uint64_t n_free = 0, total = 0, wanted = (o->n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
    const uint32_t window_pages = (r->c->window - 1) / PAGE_TOKENS + 2;
    uint32_t n_sliding = o->n_seqs * window_pages, n_pass = o->chunk / PAGE_TOKENS + window_pages;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        r->o.kv[g] = (struct td_kv_group_layout){.n_layers = r->c->n_group_layers[g],
                                                 .n_pages = n_sliding > n_pass ? n_sliding : n_pass,
                                                 .n_heads = r->c->n_kv_heads,
                                                 .head_dim = r->c->head_dim,
                                                 .page_tokens = PAGE_TOKENS,
                                                 .dtype = g == TD_KV_FULL ? o->kv : TD_BF16};
    struct td_kv_group_layout *full = &r->o.kv[TD_KV_FULL];
    if (td_device_memory(r->device, &n_free, &total) == TD_OK) {
        uint64_t spare = SPARE_BYTES + td_kv_pool_bytes(&r->o.kv[TD_KV_SLIDING]),
                 fits = n_free > spare ? (n_free - spare) / (full->n_layers * td_kv_page_bytes(full)) : 0;
        if (wanted > fits) wanted = fits;
    }
    full->n_pages = wanted > 0 ? (uint32_t)wanted : 1;
    r->o.max_batch_tokens = o->chunk > o->n_seqs ? o->chunk : o->n_seqs;
    r->o.max_batch_segments = o->n_seqs;
    r->o.max_context_tokens = o->n_ctx;
}

void td_bench_rig_open(const struct td_bench_rig_options *o, struct td_bench_rig *out)
{
    struct td_err err = {{0}};
    *out = (struct td_bench_rig){.is_cpu = strcmp(o->device, "cpu") == 0};
    open_model(o, out);
    lay_out(o, out);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        size_t bytes = td_kv_pool_bytes(&out->o.kv[g]);
        td_bench_must(td_device_alloc(out->device, bytes, &out->o.kv_base[g]), &err);
        out->pool_bytes += bytes;
        out->pages[g] = scattered(out->o.kv[g].n_pages);
    }
    out->tokens = malloc(o->n_ctx * sizeof *out->tokens);
    TD_CHECK(out->tokens != NULL);
    for (uint32_t i = 0, state = 3; i < o->n_ctx; i++) out->tokens[i] = next_random(&state) % out->c->n_token_ids;
    td_bench_rig_trace(out, false);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) fill_noise(out, g, out->o.kv_base[g]);
}

void td_bench_rig_trace(struct td_bench_rig *r, bool each_op)
{
    struct td_err err = {{0}};
    td_forward_free(&r->forward);
    td_bench_must(td_forward_create(r->model, &r->o, &r->forward, &err), &err);
    trace.real = r->forward.ops;
    trace.each_op = each_op;
    trace.n = OPS_MARK;
    r->forward.ops = &traced;
}

void td_bench_rig_close(struct td_bench_rig *r)
{
    td_forward_free(&r->forward);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        td_device_free(r->device, r->o.kv_base[g]);
        free(r->pages[g]);
    }
    free(r->tokens);
    td_model_destroy(r->model);
    td_device_close(r->device);
}

/* ---- passes ---- */

static uint32_t blocks_of(uint32_t n_ctx) { return (n_ctx + PAGE_TOKENS - 1) / PAGE_TOKENS; }

bool td_bench_rig_fits(const struct td_bench_rig *r, uint32_t n_seqs, uint32_t n_ctx)
{
    return n_seqs <= r->o.max_batch_segments && n_ctx <= r->o.max_context_tokens &&
           (uint64_t)n_seqs * blocks_of(n_ctx) <= r->o.kv[TD_KV_FULL].n_pages;
}

/* Sequence i owns the next pages of each list. */
static struct td_segment segment(const struct td_bench_rig *r, uint32_t i, uint32_t start, uint32_t n)
{
    static const struct td_sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    const uint32_t end = blocks_of(start + n),
                   first = start >= r->c->window ? (start - r->c->window + 1) / PAGE_TOKENS : 0;
    struct td_segment s = {
        .tokens = r->tokens + start, .n_tokens = n, .start = start, .want_token = true, .sampling = &plain};
    s.table[TD_KV_FULL] = (struct td_page_table){.pages = r->pages[TD_KV_FULL] + (size_t)i * end, .n_blocks = end};
    s.table[TD_KV_SLIDING] = (struct td_page_table){
        .pages = r->pages[TD_KV_SLIDING] + (size_t)i * (end - first), .first_block = first, .n_blocks = end - first};
    return s;
}

static double run(struct td_bench_rig *r, struct td_segment *s, uint32_t n)
{
    struct td_err err = {{0}};
    struct td_batch b = {.segments = s, .n_segments = n};
    td_bench_must(td_forward_check(&r->forward, &b), &err);
    double begun = td_bench_now();
    enum td_status st = td_forward_run(&r->forward, &b, NULL, NULL);
    double took = td_bench_now() - begun;
    if (st != TD_OK) td_err_set(&err, st, "a pass failed: %s", td_device_last_error(r->device));
    td_bench_must(st, &err);
    return took;
}

#define MAX_SEQS 1024u
#define WARM_UP  3u

struct steps {
    struct td_bench_rig *r;
    struct td_segment s[2][MAX_SEQS];
    struct td_batch b[2];
    uint32_t n_seqs, n_ctx, n_made;
};

static struct td_batch *next_step(struct steps *x)
{
    uint32_t turn = x->n_made % 2;
    for (uint32_t i = 0; i < x->n_seqs; i++) {
        struct td_segment *s = &x->s[turn][i];
        *s = segment(x->r, i, x->n_ctx - 1, 1);
        /* Other tokens in every step and row: other experts. */
        s->tokens = x->r->tokens + (uint64_t)(x->n_made * x->n_seqs + i) * 37u % x->n_ctx;
        s->draw_index = x->n_made;
    }
    x->n_made++;
    x->b[turn] = (struct td_batch){.segments = x->s[turn], .n_segments = x->n_seqs};
    return &x->b[turn];
}

static void must_run(struct td_bench_rig *r, enum td_status st)
{
    struct td_err err = {{0}};
    if (st != TD_OK) td_err_set(&err, st, "a step failed: %s", td_device_last_error(r->device));
    td_bench_must(st, &err);
}

void td_bench_rig_decode(struct td_bench_rig *r, uint32_t n_seqs, uint32_t n_ctx, uint32_t n_steps, double *wall_out,
                         double *gap_out)
{
    static struct steps x; /* one caller */
    struct td_forward *f = &r->forward;
    TD_CHECK(td_bench_rig_fits(r, n_seqs, n_ctx) && n_seqs <= MAX_SEQS);
    x = (struct steps){.r = r, .n_seqs = n_seqs, .n_ctx = n_ctx};
    struct td_batch *b = next_step(&x);
    must_run(r, td_forward_check(f, b));
    if (!td_forward_may_begin(f, b)) { /* a device that works while the host waits */
        for (uint32_t i = 0; i < WARM_UP + n_steps; i++) {
            double begun = td_bench_now();
            must_run(r, td_forward_run(f, next_step(&x), NULL, NULL));
            if (i >= WARM_UP) wall_out[i - WARM_UP] = td_bench_now() - begun, gap_out[i - WARM_UP] = 0;
        }
        return;
    }
    f->takes_times = true;
    must_run(r, td_forward_begin(f, b));
    double last = 0;
    for (uint32_t i = 0; i < WARM_UP + n_steps; i++) {
        double busy_us = 0, gap_us = 0;
        must_run(r, td_forward_begin(f, next_step(&x)));
        must_run(r, td_forward_end(f));
        double now = td_bench_now();
        must_run(r, td_forward_times(f, &busy_us, &gap_us));
        if (i >= WARM_UP) wall_out[i - WARM_UP] = now - last, gap_out[i - WARM_UP] = gap_us / 1e6;
        last = now;
    }
    must_run(r, td_forward_end(f));
}

double td_bench_rig_prefill(struct td_bench_rig *r, uint32_t start, uint32_t n, bool is_last)
{
    struct td_segment s = segment(r, 0, start, n);
    s.want_token = is_last;
    return run(r, &s, 1);
}

/* ---- balance ---- */

struct balance {
    struct td_bench_rig *r;
    uint32_t n_layers;
    double fullest[TD_MAX_LAYERS];
};

static void on_layer(void *user, int32_t layer, const float *x, uint32_t n_rows, const uint32_t *ids)
{
    (void)x;
    struct balance *b = user;
    const struct td_model_config *c = b->r->c;
    if (ids == NULL || layer < 0 || layer + 1 >= (int32_t)c->n_layers) return; /* the last has few rows */
    struct td_err err = {{0}};
    size_t n = (size_t)n_rows * c->top_k;
    uint32_t *host = malloc(n * sizeof *host), *load = calloc(c->n_experts, sizeof *load), fullest = 0;
    TD_CHECK(host != NULL && load != NULL);
    td_bench_must(td_stream_sync(b->r->forward.stream), &err);
    td_bench_must(td_device_download(b->r->device, host, ids, n * sizeof *host), &err);
    for (size_t i = 0; i < n; i++)
        if (host[i] < c->n_experts) load[host[i]]++;
    for (uint32_t e = 0; e < c->n_experts; e++)
        if (load[e] > fullest) fullest = load[e];
    b->fullest[b->n_layers++] = fullest * (double)c->n_experts / (double)n;
    free(host);
    free(load);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

void td_bench_rig_balance(struct td_bench_rig *r, uint32_t n, double *middle_out, double *worst_out)
{
    struct balance b = {.r = r};
    r->forward.probe = on_layer;
    r->forward.probe_user = &b;
    td_bench_rig_prefill(r, 0, n, true);
    r->forward.probe = NULL;
    TD_CHECK(b.n_layers > 0);
    qsort(b.fullest, b.n_layers, sizeof b.fullest[0], by_value);
    *middle_out = b.fullest[b.n_layers / 2];
    *worst_out = b.fullest[b.n_layers - 1];
}
