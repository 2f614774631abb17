/* Every op on the GPU against the same op on the CPU, then the small checkpoint's recorded outputs through the engine.
 * Run from the folder that holds tests/tiny. Exit status 1 if anything is off or there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "kernels/e4m3.h"
#include "tests/kernels/ahead.h"
#include "tests/kernels/draws.h"
#include "tests/kernels/golden.h"
#include "tests/kernels/invariance.h"
#include "tests/kernels/moves.h"
#include "tests/kernels/pair.h"
#include "tests/kernels/planted.h"
#include "tests/kernels/traps.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* Relative L2 of a row: outputs rounded to bf16 (2^-8 at most, less than half of that on average), sums of f32. */
#define ROUNDED 2.5e-3
#define SUMMED  2e-5

static char *name_of(char *out, size_t n, const char *what, uint32_t a, uint32_t b)
{
    snprintf(out, n, "%s, %u x %u", what, a, b);
    return out;
}

/* ---- rows ---- */

static void check_rows(struct pair *p, uint32_t n_rows, uint32_t dim)
{
    char what[96];
    const float eps = 1e-5f;
    struct both x = pair_values(p, F32, (size_t)n_rows * dim, 3), w = pair_values(p, F32, dim, 1),
                y = pair_out(p, ACT, (size_t)n_rows * dim);
    struct td_rmsnorm_args a = {.x = x.cpu, .w = w.cpu, .y = y.cpu, .n_rows = n_rows, .dim = dim, .eps = eps}, g = a;
    g.x = (float *)(void *)x.gpu, g.w = (float *)(void *)w.gpu, g.y = (float *)(void *)y.gpu;
    pair_status(p, p->cpu_ops->rmsnorm(p->cpu_stream, &a), p->gpu_ops->rmsnorm(p->gpu_stream, &g), "rmsnorm");
    pair_compare(p, &y, dim, ROUNDED, name_of(what, sizeof what, "rmsnorm", n_rows, dim));

    struct both add = pair_values(p, F32, (size_t)n_rows * dim, 1), bias = pair_values(p, F32, dim, 1),
                t = pair_out(p, ACT, (size_t)n_rows * dim);
    struct td_add_norm_args an = {.x = x.cpu,
                                  .y = add.cpu,
                                  .bias = bias.cpu,
                                  .w = w.cpu,
                                  .t = t.cpu,
                                  .n_rows = n_rows,
                                  .dim = dim,
                                  .eps = eps},
                            gn = an;
    gn.x = (float *)(void *)x.gpu, gn.y = (float *)(void *)add.gpu, gn.bias = (float *)(void *)bias.gpu;
    gn.w = (float *)(void *)w.gpu, gn.t = (float *)(void *)t.gpu;
    pair_status(p, p->cpu_ops->add_norm(p->cpu_stream, &an), p->gpu_ops->add_norm(p->gpu_stream, &gn), "add_norm");
    pair_compare(p, &x, dim, SUMMED, name_of(what, sizeof what, "add_norm x", n_rows, dim));
    pair_compare(p, &t, dim, ROUNDED, name_of(what, sizeof what, "add_norm t", n_rows, dim));

    enum { E = 8, K = 4 };
    uint32_t *ids = malloc((size_t)n_rows * K * sizeof *ids);
    for (uint32_t i = 0; i < n_rows * K; i++) ids[i] = (i * 5 + i / 4) % E;
    struct both slots = pair_values(p, F32, (size_t)n_rows * K * dim, 1), id = pair_u32(p, ids, (size_t)n_rows * K),
                weights = pair_values(p, F32, (size_t)n_rows * K, 0.3f), down = pair_values(p, F32, (size_t)E * dim, 1),
                t2 = pair_out(p, ACT, (size_t)n_rows * dim);
    free(ids);
    struct td_moe_add_norm_args m = {.x = x.cpu,
                                     .y = slots.cpu,
                                     .ids = id.cpu,
                                     .weights = weights.cpu,
                                     .down_bias = down.cpu,
                                     .w = w.cpu,
                                     .t = t2.cpu,
                                     .n_rows = n_rows,
                                     .dim = dim,
                                     .top_k = K,
                                     .eps = eps},
                                gm = m;
    gm.x = (float *)(void *)x.gpu, gm.y = (float *)(void *)slots.gpu, gm.ids = (uint32_t *)(void *)id.gpu;
    gm.weights = (float *)(void *)weights.gpu, gm.down_bias = (float *)(void *)down.gpu, gm.w = (float *)(void *)w.gpu;
    gm.t = (float *)(void *)t2.gpu;
    pair_status(p, p->cpu_ops->moe_add_norm(p->cpu_stream, &m), p->gpu_ops->moe_add_norm(p->gpu_stream, &gm),
                "moe_add_norm");
    pair_compare(p, &x, dim, SUMMED, name_of(what, sizeof what, "moe_add_norm x", n_rows, dim));
    pair_compare(p, &t2, dim, ROUNDED, name_of(what, sizeof what, "moe_add_norm t", n_rows, dim));

    uint32_t rows[3] = {n_rows - 1, 0, n_rows / 2};
    struct both which = pair_u32(p, rows, 3), picked = pair_out(p, F32, 3 * (size_t)dim);
    struct td_gather_args ga = {.x = x.cpu, .rows = which.cpu, .y = picked.cpu, .n_rows = 3, .dim = dim}, gg = ga;
    gg.x = (float *)(void *)x.gpu, gg.rows = (uint32_t *)(void *)which.gpu, gg.y = (float *)(void *)picked.gpu;
    pair_status(p, p->cpu_ops->gather(p->cpu_stream, &ga), p->gpu_ops->gather(p->gpu_stream, &gg), "gather");
    pair_compare(p, &picked, dim, SUMMED, "gather");
    pair_free_all(p);
}

static void check_embed_and_rope(struct pair *p)
{
    enum { V = 97, H = 288, N = 13, HALF = 32 };
    uint32_t tokens[N], positions[N] = {0, 1, 63, 64, 127, 128, 4095, 4096, 20000, 65535, 100000, 131070, 131071};
    uint16_t table[V * H];
    float freqs[HALF];
    for (uint32_t i = 0; i < N; i++) tokens[i] = (i * 31 + 96) % V;
    for (uint32_t i = 0; i < V * H; i++) table[i] = (uint16_t)(0x3c00 + i % 0x3ff);
    for (uint32_t i = 0; i < HALF; i++) freqs[i] = powf(150000.0f, -(float)i / HALF);
    struct both tok = pair_u32(p, tokens, N), tab = pair_raw(p, table, sizeof table), x = pair_out(p, F32, N * H);
    struct td_embed_args a = {.tokens = tok.cpu, .table = tab.cpu, .x = x.cpu, .n_rows = N, .dim = H}, g = a;
    g.tokens = (uint32_t *)(void *)tok.gpu, g.table = (uint16_t *)(void *)tab.gpu, g.x = (float *)(void *)x.gpu;
    pair_status(p, p->cpu_ops->embed(p->cpu_stream, &a), p->gpu_ops->embed(p->gpu_stream, &g), "embed");
    pair_compare(p, &x, H, 1e-9, "embed");

    struct both pos = pair_u32(p, positions, N), f = pair_raw(p, freqs, sizeof freqs), c = pair_out(p, F32, N * HALF),
                s = pair_out(p, F32, N * HALF);
    struct td_rope_args r = {.positions = pos.cpu,
                             .freqs = f.cpu,
                             .factor = 1.3465736f,
                             .cos = c.cpu,
                             .sin = s.cpu,
                             .n_rows = N,
                             .half = HALF},
                        gr = r;
    gr.positions = (uint32_t *)(void *)pos.gpu, gr.freqs = (float *)(void *)f.gpu;
    gr.cos = (float *)(void *)c.gpu, gr.sin = (float *)(void *)s.gpu;
    pair_status(p, p->cpu_ops->rope(p->cpu_stream, &r), p->gpu_ops->rope(p->gpu_stream, &gr), "rope");
    pair_compare(p, &c, HALF, 1e-6, "rope cos");
    pair_compare(p, &s, HALF, 1e-6, "rope sin");
}

/* ---- products ---- */

static void check_linear(struct pair *p, uint32_t n_out, uint32_t n_in, const uint32_t *rows, size_t n, double allowed)
{
    char what[96];
    struct td_weight w, gw;
    pair_weight(p, n_out, n_in, TD_ROWS_DENSE, 0, 0.05f, &w, &gw);
    for (size_t i = 0; i < n; i++) {
        uint32_t n_rows = rows[i];
        struct both x = pair_values(p, ACT, (size_t)n_rows * n_in, 1), y = pair_out(p, F32, (size_t)n_rows * n_out);
        struct td_lm_head_args a = {.x = x.cpu, .w = w, .logits = y.cpu, .n_rows = n_rows};
        struct td_o_proj_args g = {.x = (float *)(void *)x.gpu, .w = gw, .y = (float *)(void *)y.gpu, .n_rows = n_rows};
        pair_status(p, p->cpu_ops->lm_head(p->cpu_stream, &a), p->gpu_ops->o_proj(p->gpu_stream, &g), "o_proj");
        snprintf(what, sizeof what, "product of %u rows, %u -> %u", n_rows, n_in, n_out);
        pair_compare(p, &y, n_out, allowed, what);
    }
    pair_free_all(p);
}

struct kv_shape {
    uint32_t n_heads, n_kv_heads, page_tokens, is_fp8;
};

static enum td_dtype dtype_of(struct kv_shape k) { return k.is_fp8 ? TD_E4M3 : TD_BF16; }

static float widen(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Element i of a pool. */
static float kv_value(const void *pool, size_t i, enum td_dtype type)
{
    return widen(type == TD_E4M3 ? td_e4m3_to_bf16(((const uint8_t *)pool)[i]) : ((const uint16_t *)pool)[i]);
}

static void check_qkv(struct pair *p, struct kv_shape k, uint32_t hidden, uint32_t n_rows, uint32_t parts)
{
    char what[96];
    enum { LAYERS = 2, PAGES = 37 };
    struct td_kv_group_layout l = {.n_layers = LAYERS,
                                   .n_pages = PAGES,
                                   .n_heads = k.n_kv_heads,
                                   .head_dim = 64,
                                   .page_tokens = k.page_tokens,
                                   .dtype = dtype_of(k)};
    struct td_weight w, gw;
    pair_weight(p, (k.n_heads + 2 * k.n_kv_heads) * 64, hidden, TD_ROWS_DENSE, 1, 0.05f, &w, &gw);
    uint32_t *pos = malloc(n_rows * sizeof *pos), *page = malloc(n_rows * sizeof *page);
    for (uint32_t i = 0; i < n_rows; i++) { /* each row has a place of its own */
        pos[i] = 1000 * (i % 3) / k.page_tokens * k.page_tokens + i % k.page_tokens;
        page[i] = (i / k.page_tokens * 7 + 5) % PAGES;
    }
    size_t half = (size_t)n_rows * 32, pool_bytes = td_kv_pool_bytes(&l);
    struct both x = pair_values(p, ACT, (size_t)n_rows * hidden, 1), c = pair_values(p, F32, half, 1),
                s = pair_values(p, F32, half, 1), ps = pair_u32(p, pos, n_rows), pg = pair_u32(p, page, n_rows),
                pool = pair_out(p, RAW, pool_bytes), q = pair_out(p, ACT, (size_t)n_rows * k.n_heads * 64);
    struct td_qkv_args a = {.x = x.cpu,
                            .w = w,
                            .cos = c.cpu,
                            .sin = s.cpu,
                            .positions = ps.cpu,
                            .row_page = pg.cpu,
                            .kv = {.layout = l, .pool = pool.cpu, .layer = 1},
                            .q = q.cpu,
                            .n_rows = n_rows,
                            .n_heads = k.n_heads,
                            .n_kv_heads = k.n_kv_heads,
                            .head_dim = 64,
                            .parts = parts},
                       g = a;
    g.x = (float *)(void *)x.gpu, g.w = gw, g.cos = (float *)(void *)c.gpu, g.sin = (float *)(void *)s.gpu;
    g.positions = (uint32_t *)(void *)ps.gpu, g.row_page = (uint32_t *)(void *)pg.gpu;
    g.kv.pool = pool.gpu, g.q = (float *)(void *)q.gpu;
    pair_status(p, p->cpu_ops->qkv(p->cpu_stream, &a), p->gpu_ops->qkv(p->gpu_stream, &g), "qkv");
    snprintf(what, sizeof what, "qkv: q of %u rows, hidden %u", n_rows, hidden);
    if (parts & TD_QKV_Q) pair_compare(p, &q, 64, ROUNDED, what);

    /* The pool as floats: written places agree, the others are NaN still on both sides. */
    size_t n = pool_bytes / td_dtype_bytes(l.dtype);
    uint16_t *have = malloc(pool_bytes);
    if (td_stream_sync(p->gpu_stream) != TD_OK || td_device_download(p->gpu, have, pool.gpu, pool_bytes) != TD_OK) {
        printf("  qkv: %s\n", td_device_last_error(p->gpu));
        exit(1);
    }
    double num = 0, den = 0;
    size_t n_written = 0, n_wrong = 0;
    for (size_t i = 0; i < n; i++) {
        float wf = kv_value(pool.cpu, i, l.dtype), hf = kv_value(have, i, l.dtype);
        if (isnan(wf) != isnan(hf)) n_wrong++;
        if (isnan(wf) || isnan(hf)) continue;
        num += ((double)hf - wf) * ((double)hf - wf);
        den += (double)wf * wf;
        n_written++;
    }
    size_t expected = parts & TD_QKV_KV ? (size_t)n_rows * k.n_kv_heads * 128 : 0;
    /* FP8: sums a hair apart may round to neighbours, seldom. */
    double off = den > 0 ? sqrt(num / den) / (k.is_fp8 ? 4 * ROUNDED : ROUNDED) : 0;
    if (off > p->worst) p->worst = off;
    p->n_checks++;
    if (n_wrong != 0 || n_written != expected || !(off <= 1)) {
        pair_fail(p, "qkv: pages of %u rows: %zu places wrong, %zu of %zu written, off by %.3g of the allowance",
                  n_rows, n_wrong, n_written, expected, off);
    }
    free(have);
    free(pos);
    free(page);
    pair_free_all(p);
}

/* Dense weights in FP8: exactly the products of bf16 where FP8 has the weights, and near them where it rounds. */
static int check_dense_fp8(struct pair *main_pair, int is_short)
{
    static const uint32_t rows[] = {1, 3, 8, 9, 32, 64, 65, 128, 129, 300}, few[] = {1, 40}, fewer[] = {8, 9, 129};
    struct pair p;
    if (!pair_open_as(&p, &(struct td_device_options){.backend = "cuda", .is_dense_fp8 = true})) return 0;
    p.is_e4m3 = 1;
    if (is_short) {
        check_linear(&p, 288, 1024, fewer, COUNT(fewer), SUMMED);
        for (size_t i = 0; i < COUNT(fewer); i++)
            check_qkv(&p, (struct kv_shape){16, 8, 64, 0}, 288, fewer[i], TD_QKV_Q | TD_QKV_KV);
        goto out;
    }
    check_linear(&p, 288, 1024, rows, COUNT(rows), SUMMED);
    check_linear(&p, 2048, 288, rows, COUNT(rows), SUMMED);
    check_linear(&p, 2880, 4096, rows, COUNT(rows), SUMMED);
    check_linear(&p, 40, 368, rows, COUNT(rows), SUMMED);
    check_linear(&p, 33920, 288, few, COUNT(few), SUMMED);
    for (size_t i = 0; i < COUNT(rows); i++) {
        check_qkv(&p, (struct kv_shape){16, 8, 64, 0}, 288, rows[i], TD_QKV_Q | TD_QKV_KV);
        check_qkv(&p, (struct kv_shape){64, 8, 64, 0}, 2880, rows[i], TD_QKV_Q | TD_QKV_KV);
        check_qkv(&p, (struct kv_shape){64, 8, 48, 1}, 288, rows[i], TD_QKV_KV);
        check_qkv(&p, (struct kv_shape){16, 8, 16, 0}, 288, rows[i], TD_QKV_Q);
    }
    p.is_e4m3 = 0;
    check_linear(&p, 2880, 4096, rows, COUNT(rows), 3e-2);
    p.kl_slack = 4; /* of rounded weights; 2.5 was seen */
    check_goldens(&p);
    pair_report(&p, "dense weights in FP8");
out:
    main_pair->n_checks += p.n_checks;
    main_pair->n_failed += p.n_failed;
    pair_close(&p);
    return 1;
}

/* ---- experts ---- */

struct moe_shape {
    uint32_t hidden, intermediate, n_experts, n_rows, absent; /* absent: experts 0 .. absent - 1 are another rank's */
    int is_skewed;                                            /* every row to the same experts */
};

enum moe_trap { NO_MOE_TRAP, NO_CLAMP, CLAMP_LATE, ALPHA_ONE, BIAS_NONE, ROUTER_BIAS_NONE, N_MOE_TRAPS };
static const char *const moe_trap_names[N_MOE_TRAPS] = {
    "", "no clamp", "clamp at 8", "sigmoid without 1.702", "no bias of gate and up", "no bias of the router"};

static void check_moe(struct pair *p, struct moe_shape m, enum moe_trap trap)
{
    char what[128];
    enum { K = 4, MAX_E = 128 };
    struct td_weight router, g_router, up[MAX_E] = {0}, g_up[MAX_E] = {0}, down[MAX_E] = {0}, g_down[MAX_E] = {0};
    pair_weight(p, m.n_experts, m.hidden, TD_ROWS_PLAIN, 1, 0.05f, &router, &g_router);
    if (m.is_skewed) /* a bias no logit can beat */
        for (uint32_t side = 0; side < 2; side++) {
            float bias[MAX_E];
            for (uint32_t e = 0; e < m.n_experts; e++) bias[e] = e % 2 ? 1000.0f - (float)e : -(float)e;
            td_device_upload(side ? p->gpu : p->cpu, (void *)(uintptr_t)(side ? g_router.bias : router.bias), bias,
                             m.n_experts * sizeof *bias);
        }
    /* Experts in one run of memory, as the loader lays them out: one packed matrix of all their rows. */
    uint32_t n_here = m.n_experts - m.absent;
    struct td_weight all_up, g_all_up, all_down, g_all_down;
    pair_weight(p, n_here * 2 * m.intermediate, m.hidden, TD_ROWS_GATE_UP, 1, m.hidden < 1000 ? 0.25f : 0.08f, &all_up,
                &g_all_up);
    pair_weight(p, n_here * m.hidden, m.intermediate, TD_ROWS_PLAIN, 0, 0.05f, &all_down, &g_all_down);
    size_t up_step, down_step,
        cpu_up_bytes = td_device_packed_bytes(p->cpu, 2 * m.intermediate, m.hidden, TD_ROWS_GATE_UP, &up_step);
    size_t cpu_down_bytes = td_device_packed_bytes(p->cpu, m.hidden, m.intermediate, TD_ROWS_PLAIN, &down_step);
    for (uint32_t e = 0; e < n_here; e++) {
        struct td_weight *u = &up[m.absent + e], *gu = &g_up[m.absent + e];
        struct td_weight *d = &down[m.absent + e], *gd = &g_down[m.absent + e];
        *u = all_up, *gu = g_all_up, *d = all_down, *gd = g_all_down;
        u->n_out = gu->n_out = 2 * m.intermediate;
        d->n_out = gd->n_out = m.hidden;
        u->data = (const char *)all_up.data + e * cpu_up_bytes;
        u->bias = (const float *)(const void *)((const char *)all_up.bias + e * up_step);
        d->data = (const char *)all_down.data + e * cpu_down_bytes;
        gu->data = (const char *)g_all_up.data + (size_t)e * gu->n_out * m.hidden * 2;
        gu->bias = g_all_up.bias + (size_t)e * gu->n_out;
        gd->data = (const char *)g_all_down.data + (size_t)e * m.hidden * m.intermediate * 2;
    }
    struct td_scratch_shape shape = {
        .n_rows = m.n_rows, .top_k = K, .n_experts = m.n_experts, .intermediate = m.intermediate, .hidden = m.hidden};
    size_t cpu_scratch = td_device_scratch_bytes(p->cpu, &shape), gpu_scratch = td_device_scratch_bytes(p->gpu, &shape);
    size_t slots = (size_t)m.n_rows * K;
    struct both x = pair_values(p, ACT, (size_t)m.n_rows * m.hidden, 1), ids = pair_out(p, U32, slots),
                weights = pair_out(p, F32, slots), y = pair_out(p, F32, slots * m.hidden),
                scratch = pair_out(p, RAW, cpu_scratch > gpu_scratch ? cpu_scratch : gpu_scratch);
    struct td_moe_args a = {.x = x.cpu,
                            .router = router,
                            .gate_up = up,
                            .down = down,
                            .n_rows = m.n_rows,
                            .hidden = m.hidden,
                            .intermediate = m.intermediate,
                            .n_experts = m.n_experts,
                            .top_k = K,
                            .alpha = 1.702f,
                            .limit = 7.0f,
                            .ids = ids.cpu,
                            .weights = weights.cpu,
                            .y = y.cpu,
                            .scratch = scratch.cpu},
                       g = a;
    td_pieces_init(&a.pieces, m.intermediate, TD_EXPERT_PIECES, 0, TD_EXPERT_PIECES);
    g.x = (float *)(void *)x.gpu, g.router = g_router, g.gate_up = g_up, g.down = g_down;
    g.ids = (uint32_t *)(void *)ids.gpu, g.weights = (float *)(void *)weights.gpu, g.y = (float *)(void *)y.gpu;
    g.scratch = scratch.gpu;
    float zeros[2 * MAX_E * 16] = {0};
    if (trap == NO_CLAMP) g.limit = 1e30f;
    if (trap == CLAMP_LATE) g.limit = 8;
    if (trap == ALPHA_ONE) g.alpha = 1;
    if (trap == ROUTER_BIAS_NONE)
        td_device_upload(p->gpu, (void *)(uintptr_t)g_router.bias, zeros, m.n_experts * sizeof(float));
    for (uint32_t e = m.absent; e < m.n_experts && trap == BIAS_NONE; e++)
        td_device_upload(p->gpu, (void *)(uintptr_t)g_up[e].bias, zeros, 2 * m.intermediate * sizeof(float));
    if (trap != NO_MOE_TRAP) {
        pair_status(p, p->cpu_ops->moe(p->cpu_stream, &a), p->gpu_ops->moe(p->gpu_stream, &g), "moe");
        pair_differs(p, &y, m.hidden, 5e-3, moe_trap_names[trap], "experts");
    } else {
        pair_status(p, p->cpu_ops->moe(p->cpu_stream, &a), p->gpu_ops->moe(p->gpu_stream, &g), "moe");
        snprintf(what, sizeof what, "moe: %u rows, %u experts, %u -> %u%s", m.n_rows, m.n_experts, m.hidden,
                 m.intermediate, m.is_skewed ? ", skewed" : "");
        pair_same(p, &ids, what);
        pair_compare(p, &weights, K, 1e-4, what);
        pair_compare(p, &y, m.hidden, 5e-3, what);
    }
    pair_free_all(p);
}

/* ---- attention ---- */

struct seq {
    uint32_t start, n_rows; /* context is start + n_rows */
};

/* Mistakes that a kernel could make, made through its arguments: the comparison must see each. */
enum trap {
    NO_TRAP,
    WINDOW_MORE,
    WINDOW_LESS,
    WINDOW_NONE,
    SINK_NONE,
    SINK_SCALED,
    SINK_TWICE,
    SCALE_TWICE,
    LAYER_OTHER,
    N_TRAPS,
    PLANTED /* in the device code: everything is there for it, and the comparison is the usual one */
};
static const char *const trap_names[N_TRAPS] = {
    "",         "window 129",         "window 127",          "no window",           "no sink",
    "sink / 8", "sink counted twice", "logits scaled twice", "another layer's keys"};

static void set_trap(enum trap trap, struct td_attention_args *g, float *sinks, uint32_t n)
{
    if (trap == WINDOW_MORE) g->window++;
    if (trap == WINDOW_LESS) g->window--;
    if (trap == WINDOW_NONE) g->window = 0;
    if (trap == SCALE_TWICE) g->scale *= 1.3466f;
    if (trap == LAYER_OTHER) g->kv.layer = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (trap == SINK_NONE) sinks[i] = -INFINITY;
        if (trap == SINK_SCALED) sinks[i] /= 8;
        if (trap == SINK_TWICE) sinks[i] += logf(2);
    }
}

/* The definition in float64, into out (f32): one query at a time over all keys it sees. */
static void oracle(const struct td_attention_args *a, const struct seq *list, uint32_t n)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    uint32_t group = a->n_heads / a->n_kv_heads, row = 0, longest = 0;
    for (uint32_t i = 0; i < n; i++)
        if (list[i].start + list[i].n_rows > longest) longest = list[i].start + list[i].n_rows;
    double *z = malloc(longest * sizeof *z);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < list[i].n_rows; r++, row++)
            for (uint32_t h = 0; h < a->n_heads; h++) {
                const float *q = a->q + ((size_t)row * a->n_heads + h) * 64;
                float *out = a->out + ((size_t)row * a->n_heads + h) * 64;
                uint32_t at = list[i].start + r, from = a->window != 0 && at + 1 > a->window ? at + 1 - a->window : 0;
                double max = a->sinks[h], sum = 0, o[64] = {0};
                size_t kv[2];
#define FIND(c)                                                                                                        \
    for (int v = 0; v < 2; v++)                                                                                        \
    kv[v] = td_kv_offset(l, a->kv.layer, a->pages[a->seqs[i].pages + (c) / l->page_tokens - a->seqs[i].first_block],   \
                         h / group, v, (c) % l->page_tokens) /                                                         \
            td_dtype_bytes(l->dtype)
                for (uint32_t c = from; c <= at; c++) {
                    FIND(c);
                    z[c] = 0;
                    for (int d = 0; d < 64; d++)
                        z[c] += (double)q[d] * kv_value(a->kv.pool, kv[0] + (size_t)d, l->dtype);
                    z[c] *= (double)a->scale;
                    if (z[c] > max) max = z[c];
                }
                for (uint32_t c = from; c <= at; c++) {
                    FIND(c);
                    double w = exp(z[c] - max);
                    sum += w;
                    for (int d = 0; d < 64; d++) o[d] += w * kv_value(a->kv.pool, kv[1] + (size_t)d, l->dtype);
                }
#undef FIND
                if (a->sinks[h] > -INFINITY) sum += exp(a->sinks[h] - max);
                for (int d = 0; d < 64; d++) out[d] = (float)(o[d] / sum);
            }
    free(z);
}

static void check_attention_of(struct pair *p, struct kv_shape k, uint32_t window, const struct seq *list, uint32_t n,
                               const char *name, enum trap trap)
{
    char what[128];
    uint32_t n_rows = 0, n_pages = 0, n_single = 0, max_pages = 0;
    for (uint32_t i = 0; i < n; i++) max_pages += (list[i].start + list[i].n_rows) / k.page_tokens + 2;
    struct td_kv_group_layout l = {.n_layers = 2,
                                   .n_pages = max_pages + 3,
                                   .n_heads = k.n_kv_heads,
                                   .head_dim = 64,
                                   .page_tokens = k.page_tokens,
                                   .dtype = dtype_of(k)};
    if (l.n_pages % 7 == 0) l.n_pages++; /* so that a stride of 7 meets each page once */
    size_t pool_bytes = td_kv_pool_bytes(&l);
    uint16_t *pool = malloc(pool_bytes);
    struct td_seq_rows *seqs = calloc(n, sizeof *seqs);
    uint32_t *pages = malloc(max_pages * sizeof *pages);
    memset(pool, 0xff, pool_bytes); /* NaN where nobody wrote */
    for (uint32_t i = 0; i < n; i++) {
        /* A mistaken kernel may look further back, so then everything is there. */
        bool is_cut = trap == NO_TRAP && window != 0 && list[i].start + 1 > window;
        uint32_t seen = is_cut ? list[i].start + 1 - window : 0;
        uint32_t first = seen / k.page_tokens, end = (list[i].start + list[i].n_rows - 1) / k.page_tokens + 1;
        seqs[i] = (struct td_seq_rows){.row = n_rows,
                                       .n_rows = list[i].n_rows,
                                       .start = list[i].start,
                                       .pages = n_pages,
                                       .first_block = first,
                                       .fresh = list[i].start};
        for (uint32_t b = first; b < end; b++, n_pages++) pages[n_pages] = (n_pages * 7 + 3) % l.n_pages;
        for (uint32_t c = seen; c < list[i].start + list[i].n_rows; c++)
            for (uint32_t h = 0; h < k.n_kv_heads; h++)
                for (int v = 0; v < 2; v++) {
                    uint32_t page = pages[seqs[i].pages + c / k.page_tokens - first];
                    size_t at = td_kv_offset(&l, 1, page, h, v, c % k.page_tokens) / td_dtype_bytes(l.dtype);
                    float scale = c % 97 == 5 ? 6.0f : 1.0f; /* some keys stand out */
                    for (uint32_t d = 0; d < 64; d++) {
                        float f = pair_random(p) * scale;
                        uint32_t bits;
                        memcpy(&bits, &f, 4);
                        if (k.is_fp8)
                            ((uint8_t *)pool)[at + d] = td_e4m3_encode(f);
                        else
                            pool[at + d] = (uint16_t)((bits + 0x8000u) >> 16);
                    }
                }
        n_rows += list[i].n_rows;
        n_single += list[i].n_rows == 1;
    }
    float *sinks = malloc(k.n_heads * sizeof *sinks);
    for (uint32_t h = 0; h < k.n_heads; h++)
        sinks[h] = h == 3 ? -INFINITY : -10.0f + 20.0f * (float)h / (float)(k.n_heads - 1);
    size_t n_out = (size_t)n_rows * k.n_heads * 64;
    struct both q = pair_values(p, ACT, n_out, 1), out = pair_out(p, ACT, n_out), kv = pair_raw(p, pool, pool_bytes),
                sq = pair_raw(p, seqs, n * sizeof *seqs), pg = pair_u32(p, pages, n_pages),
                sk = pair_raw(p, sinks, k.n_heads * sizeof *sinks),
                scratch = pair_out(p, RAW, k.is_fp8 ? max_pages * td_kv_page_bytes(&l) * 2 : 16);
    struct td_attention_args a = {.q = q.cpu,
                                  .kv = {.layout = l, .pool = kv.cpu, .layer = 1},
                                  .seqs = sq.cpu,
                                  .pages = pg.cpu,
                                  .n_seqs = n,
                                  .n_rows = n_rows,
                                  .n_single = n_single,
                                  .sinks = sk.cpu,
                                  .out = out.cpu,
                                  .n_heads = k.n_heads,
                                  .n_kv_heads = k.n_kv_heads,
                                  .head_dim = 64,
                                  .window = window,
                                  .scale = 0.125f},
                             g = a;
    g.q = (float *)(void *)q.gpu, g.kv.pool = kv.gpu, g.seqs = (struct td_seq_rows *)(void *)sq.gpu;
    g.seqs_host = seqs, g.scratch = scratch.gpu, g.scratch_bytes = scratch.n;
    g.pages = (uint32_t *)(void *)pg.gpu, g.sinks = (float *)(void *)sk.gpu, g.out = (float *)(void *)out.gpu;
    if (trap != NO_TRAP && trap != PLANTED) {
        set_trap(trap, &g, sinks, k.n_heads);
        if (td_device_upload(p->gpu, sk.gpu, sinks, k.n_heads * sizeof *sinks) != TD_OK) exit(1);
    }
    pair_status(p, p->cpu_ops->attention(p->cpu_stream, &a), p->gpu_ops->attention(p->gpu_stream, &g), "attention");
    snprintf(what, sizeof what, "attention %s, %u:%u heads, window %u, pages of %u%s", name, k.n_heads, k.n_kv_heads,
             window, k.page_tokens, k.is_fp8 ? ", FP8" : "");
    if (trap != NO_TRAP && trap != PLANTED)
        pair_differs(p, &out, 64, 5e-3, trap_names[trap], what);
    else if (strncmp(name, "float64", 7) == 0) {
        oracle(&a, list, n);
        pair_compare(p, &out, 64, 5e-3, what);
    } else
        pair_compare(p, &out, 64, 5e-3, what);
    free(pool);
    free(seqs);
    free(pages);
    free(sinks);
    pair_free_all(p);
}

static void check_attention(struct pair *p)
{
    static const struct kv_shape shapes[] = {{64, 8, 64, 0},  {16, 8, 64, 0}, {64, 8, 16, 0}, {64, 8, 48, 0},
                                             {16, 8, 256, 0}, {8, 8, 64, 0},  {8, 1, 64, 0},  {64, 8, 64, 1},
                                             {16, 8, 16, 1},  {8, 1, 48, 1}};
    static const uint32_t edges[] = {1,   2,   15,  16,  17,  63,  64,  65,  127,  128,
                                     129, 130, 191, 192, 193, 255, 256, 257, 1000, 4095};
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (uint32_t window = 0; window <= 128; window += 128) {
            struct seq list[64];
            uint32_t n = 0;
            if (window != 0 && shapes[i].is_fp8) continue; /* windows stay bf16 */
            for (size_t e = 0; e < COUNT(edges); e++) list[n++] = (struct seq){edges[e] - 1, 1};
            check_attention_of(p, shapes[i], window, list, n, "of single rows", NO_TRAP);
            check_attention_of(p, shapes[i], window, list + n - 1, 1, "of one row", NO_TRAP);
            check_attention_of(p, shapes[i], window, list, 1, "of a first token", NO_TRAP);
            n = 0;
            for (size_t e = 0; e < COUNT(edges) - 2; e++) list[n++] = (struct seq){0, edges[e]};
            check_attention_of(p, shapes[i], window, list, n, "of whole prompts", NO_TRAP);
            n = 0;
            for (size_t e = 0; e < COUNT(edges); e++) {
                list[n++] = (struct seq){edges[e], e % 3 == 0 ? 1 : 5 + (uint32_t)e * 3};
                if (e % 2) list[n++] = (struct seq){edges[e] + 60, 70};
            }
            check_attention_of(p, shapes[i], window, list, n, "of chunks and single rows", NO_TRAP);
        }
    /* Against float64: every edge again, and chunks whose rows cross them. */
    static const struct kv_shape exact[] = {{64, 8, 64, 0}, {16, 8, 64, 0}, {64, 8, 64, 1}};
    for (size_t i = 0; i < COUNT(exact); i++)
        for (uint32_t window = 0; window <= 128; window += 128) {
            struct seq list[64];
            if (window != 0 && exact[i].is_fp8) continue;
            uint32_t n = 0;
            for (size_t e = 0; e < COUNT(edges); e++) list[n++] = (struct seq){edges[e] - 1, 1};
            check_attention_of(p, exact[i], window, list, n, "float64, of single rows", NO_TRAP);
            static const struct seq chunks[] = {{0, 130}, {63, 3}, {120, 20}, {1000, 30}, {4094, 4}, {0, 1}};
            check_attention_of(p, exact[i], window, chunks, COUNT(chunks), "float64, of chunks", NO_TRAP);
        }
    struct seq many[200];
    for (uint32_t i = 0; i < COUNT(many); i++) many[i] = (struct seq){i * 37 % 911, 1};
    many[100].start = 9000;
    check_attention_of(p, shapes[0], 0, many, COUNT(many), "of 200 ragged rows", NO_TRAP);
    check_attention_of(p, shapes[0], 128, many, COUNT(many), "of 200 ragged rows", NO_TRAP);
    check_attention_of(p, shapes[7], 0, many, COUNT(many), "of 200 ragged rows", NO_TRAP);
    check_attention_of(p, shapes[0], 200, many, COUNT(many), "of 200 ragged rows",
                       NO_TRAP); /* longer windows than the model's */
    check_attention_of(p, shapes[3], 47, many, COUNT(many), "of 200 ragged rows", NO_TRAP);
}

static void check_traps(struct pair *p)
{
    static const struct seq single[] = {{126, 1}, {127, 1}, {128, 1}, {300, 1}, {2000, 1}},
                            prompt[] = {{0, 300}, {100, 150}};
    for (enum trap t = NO_TRAP + 1; t < N_TRAPS; t++) {
        check_attention_of(p, (struct kv_shape){64, 8, 64, 0}, 128, single, COUNT(single), "of single rows", t);
        check_attention_of(p, (struct kv_shape){64, 8, 64, 0}, 128, prompt, COUNT(prompt), "of prompts", t);
        check_attention_of(p, (struct kv_shape){16, 8, 64, 0}, 128, prompt, COUNT(prompt), "of prompts", t);
    }
    for (enum moe_trap t = NO_MOE_TRAP + 1; t < N_MOE_TRAPS; t++)
        for (uint32_t rows = 5; rows <= 100; rows += 95) check_moe(p, (struct moe_shape){288, 320, 8, rows, 0, 0}, t);
}

/* The check that must see a mistake planted in the device code. */
static bool run_planted(void *user, const char *name)
{
    static const struct seq single[] = {{126, 1}, {127, 1}, {128, 1}, {300, 1}, {4000, 1}},
                            prompt[] = {{0, 300}, {100, 150}};
    static const struct kv_shape heads = {64, 8, 64, 0};
    struct pair *p = user;
    if (strcmp(name, "rope") == 0)
        check_rotation_traps(p);
    else if (strcmp(name, "qkv") == 0)
        for (uint32_t rows = 1; rows <= 129; rows += 128)
            check_qkv(p, (struct kv_shape){16, 8, 64, 0}, 288, rows, TD_QKV_Q | TD_QKV_KV);
    else if (strcmp(name, "decode") == 0)
        for (uint32_t window = 0; window <= 128; window += 128)
            check_attention_of(p, heads, window, single, COUNT(single), "of single rows", PLANTED);
    else if (strcmp(name, "prefill") == 0)
        for (uint32_t window = 0; window <= 128; window += 128)
            check_attention_of(p, heads, window, prompt, COUNT(prompt), "of prompts", PLANTED);
    else if (strcmp(name, "rows") == 0)
        check_residual_traps(p);
    else if (strcmp(name, "moe") == 0)
        check_expert_traps(p);
    else if (strcmp(name, "pack") == 0)
        check_pack(p);
    else
        return false;
    return true;
}

static void check_planted(struct pair *p)
{
    struct pair q;
    uint32_t n_seen;
    if (!pair_open_as(&q, &(struct td_device_options){.backend = PLANTED_BACKEND})) {
        p->n_failed++;
        return;
    }
    q.is_quiet = true;
    p->n_failed += planted_run(run_planted, &q, &q.n_failed, &n_seen);
    p->n_checks += q.n_checks;
    printf("  mistakes planted in the device code: %u seen\n", n_seen);
    pair_close(&q);
}

int main(int argc, char **argv)
{
    struct pair p;
    const char *only = argc > 1 ? argv[1] : "";
    if (!pair_open(&p)) return 1;
    td_log_open("cuda_test", TD_LOG_WARN);
#define WANTED(name) (only[0] == '\0' || strcmp(only, name) == 0)
    if (WANTED("rows")) {
        static const uint32_t dims[] = {288, 2880, 4096};
        for (size_t d = 0; d < COUNT(dims); d++) {
            check_rows(&p, 1, dims[d]);
            check_rows(&p, 3, dims[d]);
            check_rows(&p, 129, dims[d]);
        }
        check_embed_and_rope(&p);
        pair_report(&p, "rows, embed, rope");
    }
    if (WANTED("product")) {
        static const uint32_t rows[] = {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 200},
                              few[] = {1, 5, 40};
        check_linear(&p, 288, 1024, rows, COUNT(rows), SUMMED);
        check_linear(&p, 2048, 288, rows, COUNT(rows), SUMMED);
        check_linear(&p, 2880, 4096, rows, COUNT(rows), SUMMED);
        check_linear(&p, 40, 360, rows, COUNT(rows), SUMMED);
        check_linear(&p, 201088, 2880, few, COUNT(few), SUMMED);
        static const uint32_t lots[] = {4500};
        check_linear(&p, 5120, 288, lots, 1, SUMMED); /* the widest tiles */
        pair_report(&p, "products");
    }
    if (WANTED("moves")) {
        check_moves(&p);
        pair_report(&p, "moves beside the ops");
    }
    if (WANTED("qkv")) {
        static const uint32_t rows[] = {1, 8, 9, 17, 32, 33, 64, 129, 300};
        for (size_t i = 0; i < COUNT(rows); i++) {
            check_qkv(&p, (struct kv_shape){16, 8, 64, 0}, 288, rows[i], TD_QKV_Q | TD_QKV_KV);
            check_qkv(&p, (struct kv_shape){64, 8, 64, 0}, 2880, rows[i], TD_QKV_Q | TD_QKV_KV);
            check_qkv(&p, (struct kv_shape){64, 8, 48, 0}, 288, rows[i], TD_QKV_KV);
            check_qkv(&p, (struct kv_shape){16, 8, 16, 0}, 288, rows[i], TD_QKV_Q);
            check_qkv(&p, (struct kv_shape){8, 1, 64, 0}, 2880, rows[i], TD_QKV_Q | TD_QKV_KV);
            check_qkv(&p, (struct kv_shape){64, 8, 64, 1}, 288, rows[i], TD_QKV_Q | TD_QKV_KV);
            check_qkv(&p, (struct kv_shape){16, 8, 48, 1}, 2880, rows[i], TD_QKV_KV);
        }
        check_qkv(&p, (struct kv_shape){64, 8, 256, 0}, 288, 4500, TD_QKV_Q | TD_QKV_KV);
        pair_report(&p, "qkv");
    }
    if (WANTED("dense_fp8") && !check_dense_fp8(&p, 0)) return 1;
    if (WANTED("moe")) {
        static const uint32_t rows[] = {1, 2, 8, 9, 32, 33, 64, 65, 200};
        for (size_t i = 0; i < COUNT(rows); i++) {
            check_moe(&p, (struct moe_shape){288, 320, 8, rows[i], 0, 0}, NO_MOE_TRAP);
            check_moe(&p, (struct moe_shape){288, 320, 128, rows[i], 0, 0}, NO_MOE_TRAP);
            check_moe(&p, (struct moe_shape){288, 336, 32, rows[i], 0, 1}, NO_MOE_TRAP);
            check_moe(&p, (struct moe_shape){288, 320, 8, rows[i], 3, 0}, NO_MOE_TRAP);
        }
        check_moe(&p, (struct moe_shape){2880, 2880, 8, 5, 0, 0}, NO_MOE_TRAP);
        check_moe(&p, (struct moe_shape){2880, 2880, 8, 70, 0, 0}, NO_MOE_TRAP);
        check_moe(&p, (struct moe_shape){288, 320, 8, 4000, 0, 0}, NO_MOE_TRAP);
        pair_report(&p, "experts");
    }
    if (WANTED("attention")) {
        check_attention(&p);
        pair_report(&p, "attention");
    }
    if (WANTED("traps")) {
        check_traps(&p);
        check_expert_traps(&p);
        check_rotation_traps(&p);
        check_residual_traps(&p);
        check_pack(&p);
        pair_report(&p, "planted mistakes are seen");
    }
    if (WANTED("planted")) {
        check_planted(&p);
        pair_report(&p, "planted in the device code");
    }
    if (WANTED("invariant")) {
        check_invariance(&p);
        pair_report(&p, "batch-invariant");
    }
    if (WANTED("sample")) {
        check_draws(&p);
        pair_report(&p, "draws");
    }
    if (WANTED("golden")) {
        check_goldens(&p);
        pair_report(&p, "small checkpoint");
    }
    if (WANTED("ahead")) {
        check_ahead(&p);
        pair_report(&p, "steps ahead");
    }
    if (strcmp(only, "few") == 0) { /* a little of everything, for a sanitizer */
        static const uint32_t rows[] = {1, 8, 9, 129};
        static const struct seq single[] = {{0, 1}, {127, 1}, {300, 1}, {1000, 1}},
                                mixed[] = {{0, 130}, {190, 1}, {100, 40}};
        check_rows(&p, 3, 288);
        check_embed_and_rope(&p);
        check_linear(&p, 288, 1024, rows, COUNT(rows), SUMMED);
        for (size_t i = 0; i < COUNT(rows); i++) {
            check_qkv(&p, (struct kv_shape){16, 8, 64, 0}, 288, rows[i], TD_QKV_Q | TD_QKV_KV);
            check_moe(&p, (struct moe_shape){288, 320, 8, rows[i], 0, 0}, NO_MOE_TRAP);
        }
        for (uint32_t window = 0; window <= 128; window += 128) {
            check_attention_of(&p, (struct kv_shape){64, 8, 64, 0}, window, single, COUNT(single), "of single rows",
                               NO_TRAP);
            check_attention_of(&p, (struct kv_shape){16, 8, 16, 0}, window, mixed, COUNT(mixed), "of both", NO_TRAP);
            if (window == 0)
                check_attention_of(&p, (struct kv_shape){16, 8, 16, 1}, 0, mixed, COUNT(mixed), "of both", NO_TRAP);
        }
        check_few_draws(&p);
        if (!check_dense_fp8(&p, 1)) return 1;
        pair_report(&p, "a few of all");
    }
    printf("%u checks, %u failed\n", p.n_checks, p.n_failed);
    uint32_t n_failed = p.n_failed;
    pair_close(&p);
    return n_failed != 0;
}
