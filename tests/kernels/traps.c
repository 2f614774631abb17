#include "tests/kernels/traps.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/model.h"

static void *room(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (p == NULL) {
        fprintf(stderr, "cuda_test: no memory\n");
        exit(1);
    }
    return p;
}

/* n bf16 values as floats. */
static float *values(struct pair *p, size_t n, float scale)
{
    float *v = room(n, sizeof *v);
    for (size_t i = 0; i < n; i++) v[i] = from_bf16(to_bf16(pair_random(p) * scale));
    return v;
}

/* ---- experts ---- */

enum { H = 288, I = 320, E = 8, K = 4, T = 5 };

enum mistake { NONE, HALVES, NO_PLUS_ONE, CLAMP_BELOW, CLAMP_AFTER, SOFTMAX_OF_ALL, BIAS_OUTSIDE, N_MISTAKES };
static const char *const mistake_names[N_MISTAKES] = {"",
                                                      "gate and up taken as halves",
                                                      "up without + 1",
                                                      "gate clamped below",
                                                      "clamp after the sigmoid",
                                                      "softmax over all experts",
                                                      "bias of down not weighted"};

struct experts {
    float *router, *router_bias, *up, *up_bias, *down, *down_bias, *x, *residual;
    double limit;
};

static double clamp(double v, double lo, double hi) { return v < lo ? lo : v > hi ? hi : v; }

static double activation(double gate, double up, double limit, enum mistake m)
{
    if (m == CLAMP_AFTER) {
        double v = clamp(gate / (1 + exp(-1.702 * gate)), -INFINITY, limit);
        return v * (clamp(up, -limit, limit) + 1);
    }
    gate = clamp(gate, m == CLAMP_BELOW ? -limit : -INFINITY, limit);
    up = clamp(up, -limit, limit);
    return gate / (1 + exp(-1.702 * gate)) * (up + (m == NO_PLUS_ONE ? 0 : 1));
}

/* y [T, K, H], ids and weights [T, K], and what moe_add_norm leaves in the residual [T, H]. */
static void reference(const struct experts *e, enum mistake m, float *y, uint32_t *ids, float *weights, float *x_out)
{
    double logits[E], u[I];
    for (uint32_t t = 0; t < T; t++) {
        const float *x = e->x + t * H;
        for (uint32_t i = 0; i < E; i++) {
            logits[i] = e->router_bias[i];
            for (uint32_t k = 0; k < H; k++) logits[i] += (double)e->router[i * H + k] * x[k];
        }
        uint32_t taken = 0;
        double sum = 0, all = 0, first = 0;
        for (uint32_t k = 0; k < K; k++) {
            uint32_t best = E;
            for (uint32_t i = 0; i < E; i++)
                if (!(taken >> i & 1) && (best == E || logits[i] > logits[best])) best = i;
            taken |= 1u << best;
            ids[t * K + k] = best;
            if (k == 0) first = logits[best];
            sum += exp(logits[best] - first);
        }
        for (uint32_t i = 0; i < E; i++) all += exp(logits[i] - first);
        for (uint32_t h = 0; h < H; h++) x_out[t * H + h] = e->residual[t * H + h];
        for (uint32_t k = 0; k < K; k++) {
            uint32_t id = ids[t * K + k];
            double w = exp(logits[id] - first) / (m == SOFTMAX_OF_ALL ? all : sum);
            weights[t * K + k] = (float)w;
            for (uint32_t i = 0; i < I; i++) {
                uint32_t gate = m == HALVES ? i : 2 * i, up = m == HALVES ? I + i : 2 * i + 1;
                double a = e->up_bias[id * 2 * I + gate], b = e->up_bias[id * 2 * I + up];
                for (uint32_t j = 0; j < H; j++) {
                    a += (double)e->up[((size_t)id * 2 * I + gate) * H + j] * x[j];
                    b += (double)e->up[((size_t)id * 2 * I + up) * H + j] * x[j];
                }
                u[i] = activation(a, b, e->limit, m);
            }
            for (uint32_t h = 0; h < H; h++) {
                double v = 0, bias = e->down_bias[id * H + h];
                for (uint32_t i = 0; i < I; i++) v += (double)e->down[((size_t)id * H + h) * I + i] * u[i];
                y[((size_t)t * K + k) * H + h] = (float)v;
                x_out[t * H + h] += (float)(m == BIAS_OUTSIDE ? w * v + bias : w * (v + bias));
            }
        }
    }
}

static struct td_weight on_gpu(struct pair *p, const float *w, uint32_t n_out, uint32_t n_in, const float *bias)
{
    size_t n = (size_t)n_out * n_in;
    uint16_t *bits = room(n, sizeof *bits);
    for (size_t i = 0; i < n; i++) bits[i] = to_bf16(w[i]);
    struct both b = pair_raw(p, bits, n * 2), c = {0};
    if (bias != NULL) c = pair_raw(p, bias, n_out * sizeof *bias);
    free(bits);
    return (struct td_weight){.data = b.gpu, .bias = (const float *)(const void *)c.gpu, .n_out = n_out, .n_in = n_in};
}

static struct both act(struct pair *p, const float *v, size_t n)
{
    uint16_t *bits = room(n, sizeof *bits);
    for (size_t i = 0; i < n; i++) bits[i] = to_bf16(v[i]);
    struct both b = pair_raw(p, bits, n * 2);
    free(bits);
    return b;
}

void check_expert_traps(struct pair *p)
{
    /* So low a limit that every clamp bites: in real weights some of them hardly show. */
    struct experts e = {.router = values(p, E * H, 0.05f),
                        .router_bias = values(p, E, 1),
                        .up = values(p, (size_t)E * 2 * I * H, 0.1f),
                        .up_bias = values(p, E * 2 * I, 1),
                        .down = values(p, (size_t)E * H * I, 0.05f),
                        .down_bias = values(p, E * H, 1),
                        .x = values(p, T * H, 1),
                        .residual = values(p, T * H, 1),
                        .limit = 1};
    struct td_weight router = on_gpu(p, e.router, E, H, e.router_bias), up[E], down[E],
                     all_up = on_gpu(p, e.up, E * 2 * I, H, e.up_bias), all_down = on_gpu(p, e.down, E * H, I, NULL);
    for (uint32_t i = 0; i < E; i++) {
        up[i] = (struct td_weight){.data = (const uint16_t *)all_up.data + (size_t)i * 2 * I * H,
                                   .bias = all_up.bias + (size_t)i * 2 * I,
                                   .n_out = 2 * I,
                                   .n_in = H};
        down[i] =
            (struct td_weight){.data = (const uint16_t *)all_down.data + (size_t)i * H * I, .n_out = H, .n_in = I};
    }
    struct td_scratch_shape shape = {.n_rows = T, .top_k = K, .n_experts = E, .intermediate = I, .hidden = H};
    float ones[H];
    for (uint32_t i = 0; i < H; i++) ones[i] = 1;
    struct both x = act(p, e.x, T * H), ids = pair_out(p, U32, T * K), weights = pair_out(p, F32, T * K),
                y = pair_out(p, F32, T * K * H), scratch = pair_out(p, RAW, td_device_scratch_bytes(p->gpu, &shape)),
                residual = pair_raw(p, e.residual, T * H * 4), bias = pair_raw(p, e.down_bias, E * H * 4),
                norm = pair_raw(p, ones, sizeof ones), t = pair_out(p, ACT, T * H);
    struct td_moe_args a = {.x = (float *)(void *)x.gpu,
                            .router = router,
                            .gate_up = up,
                            .down = down,
                            .n_rows = T,
                            .hidden = H,
                            .intermediate = I,
                            .n_experts = E,
                            .top_k = K,
                            .alpha = 1.702f,
                            .limit = 1,
                            .ids = (uint32_t *)(void *)ids.gpu,
                            .weights = (float *)(void *)weights.gpu,
                            .y = (float *)(void *)y.gpu,
                            .scratch = scratch.gpu};
    struct td_moe_add_norm_args n = {.x = (float *)(void *)residual.gpu,
                                     .y = a.y,
                                     .ids = a.ids,
                                     .weights = a.weights,
                                     .down_bias = (float *)(void *)bias.gpu,
                                     .w = (float *)(void *)norm.gpu,
                                     .t = (float *)(void *)t.gpu,
                                     .n_rows = T,
                                     .dim = H,
                                     .top_k = K,
                                     .eps = 1e-5f};
    pair_status(p, TD_OK, p->gpu_ops->moe(p->gpu_stream, &a), "moe");
    pair_status(p, TD_OK, p->gpu_ops->moe_add_norm(p->gpu_stream, &n), "moe_add_norm");
    /* As floats for the comparison. */
    struct both out = residual;
    out.kind = F32;
    out.n = T * H;
    for (enum mistake m = NONE; m < N_MISTAKES; m++) {
        reference(&e, m, y.cpu, ids.cpu, weights.cpu, out.cpu);
        if (m == NONE) {
            pair_same(p, &ids, "experts against float64: which");
            pair_compare(p, &weights, K, 1e-4, "experts against float64: weights");
            pair_compare(p, &y, H, 5e-3, "experts against float64");
            pair_compare(p, &out, H, 5e-3, "experts against float64, added up");
        } else
            pair_differs(p, &out, H, 5e-3, mistake_names[m], "experts");
    }
    free(e.router), free(e.router_bias), free(e.up), free(e.up_bias), free(e.down), free(e.down_bias), free(e.x);
    free(e.residual);
    pair_free_all(p);
}

/* ---- rotation ---- */

static void frequencies(const char *scaling, float *f, float *factor)
{
    static const char text[] =
        "{\"architectures\":[\"GptOssForCausalLM\"],\"model_type\":\"gpt_oss\",\"num_hidden_layers\":2,"
        "\"num_local_experts\":8,\"num_experts_per_tok\":4,\"hidden_size\":288,\"intermediate_size\":320,"
        "\"num_attention_heads\":16,\"num_key_value_heads\":8,\"head_dim\":64,\"sliding_window\":128,"
        "\"rms_norm_eps\":1e-05,\"rope_theta\":150000,\"max_position_embeddings\":131072,\"vocab_size\":2048,"
        "\"eos_token_id\":2,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,"
        "\"beta_slow\":1.0,\"original_max_position_embeddings\":4096,\"truncate\":%s}}";
    char json[sizeof text + 16];
    int n = snprintf(json, sizeof json, text, scaling);
    struct td_model_config c;
    struct td_err err = {0};
    if (td_model_config_parse(json, (size_t)n, &c, &err) != TD_OK) {
        fprintf(stderr, "cuda_test: config of the rotation check: %s\n", err.text);
        exit(1);
    }
    td_model_rope(&c, f, factor);
}

void check_rotation_traps(struct pair *p)
{
    enum { HALF = 32, N = 6, HEADS = 3 };
    static const uint32_t positions[N] = {1, 127, 500, 4096, 30000, 131071};
    static const char *const names[] = {"plain RoPE frequencies", "truncated YaRN bounds", "YaRN without its factor"};
    float right[HALF], wrong[HALF], factor, f;
    frequencies("false", right, &factor);
    for (int m = -1; m < 3; m++) {
        memcpy(wrong, right, sizeof wrong);
        f = factor;
        if (m == 0)
            for (int j = 0; j < HALF; j++) wrong[j] = (float)pow(150000, -j / 32.0);
        if (m == 1) frequencies("true", wrong, &f);
        if (m == 2) f = 1;
        struct both pos = pair_u32(p, positions, N), fr = pair_raw(p, wrong, sizeof wrong),
                    c = pair_out(p, F32, N * HALF), s = pair_out(p, F32, N * HALF);
        struct td_rope_args g = {.positions = (uint32_t *)(void *)pos.gpu,
                                 .freqs = (float *)(void *)fr.gpu,
                                 .factor = f,
                                 .cos = (float *)(void *)c.gpu,
                                 .sin = (float *)(void *)s.gpu,
                                 .n_rows = N,
                                 .half = HALF};
        pair_status(p, TD_OK, p->gpu_ops->rope(p->gpu_stream, &g), "rope");
        for (uint32_t i = 0; i < N * HALF; i++) {
            double angle = (double)((float)positions[i / HALF] * right[i % HALF]);
            ((float *)c.cpu)[i] = (float)(cos(angle) * (double)factor);
            ((float *)s.cpu)[i] = (float)(sin(angle) * (double)factor);
        }
        if (m < 0) {
            pair_compare(p, &c, HALF, 1e-6, "rope against float64");
            pair_compare(p, &s, HALF, 1e-6, "rope against float64");
        } else
            pair_differs(p, &c, HALF, 1e-6, names[m], "rope");
        pair_free_all(p);
    }

    /* Which components turn together: queries against a host rotation of the same products. */
    float *w = values(p, (size_t)HEADS * 64 * H, 0.05f), *x = values(p, N * H, 1), cs[N * HALF], sn[N * HALF],
          bias[HEADS * 64] = {0};
    for (uint32_t i = 0; i < N * HALF; i++) {
        double angle = (double)positions[i / HALF] * right[i % HALF];
        cs[i] = (float)cos(angle), sn[i] = (float)sin(angle);
    }
    for (int n_rows = N; n_rows <= 9; n_rows += 3) { /* both kernels: the second with rows to spare */
        for (int is_interleaved = 0; is_interleaved < 2; is_interleaved++) {
            uint32_t pos[9] = {0}, page[9];
            for (int i = 0; i < 9; i++) page[i] = (uint32_t)i;
            struct td_kv_group_layout l = {
                .n_layers = 1, .n_pages = 9, .n_heads = 1, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};
            float xs[9 * H], c9[9 * HALF], s9[9 * HALF];
            for (int i = 0; i < 9; i++) {
                memcpy(xs + i * H, x + i % N * H, H * sizeof *xs);
                memcpy(c9 + i * HALF, cs + i % N * HALF, HALF * sizeof *cs);
                memcpy(s9 + i * HALF, sn + i % N * HALF, HALF * sizeof *sn);
            }
            struct both in = act(p, xs, 9 * H), c = pair_raw(p, c9, sizeof c9), s = pair_raw(p, s9, sizeof s9),
                        ps = pair_u32(p, pos, 9), pg = pair_u32(p, page, 9),
                        pool = pair_out(p, RAW, td_kv_pool_bytes(&l)), q = pair_out(p, ACT, (size_t)n_rows * 64);
            struct td_qkv_args g = {.x = (float *)(void *)in.gpu,
                                    .w = on_gpu(p, w, HEADS * 64, H, bias),
                                    .cos = (float *)(void *)c.gpu,
                                    .sin = (float *)(void *)s.gpu,
                                    .positions = (uint32_t *)(void *)ps.gpu,
                                    .row_page = (uint32_t *)(void *)pg.gpu,
                                    .kv = {.layout = l, .pool = pool.gpu},
                                    .q = (float *)(void *)q.gpu,
                                    .n_rows = (uint32_t)n_rows,
                                    .n_heads = 1,
                                    .n_kv_heads = 1,
                                    .head_dim = 64,
                                    .parts = TD_QKV_Q | TD_QKV_KV};
            pair_status(p, TD_OK, p->gpu_ops->qkv(p->gpu_stream, &g), "qkv");
            for (int r = 0; r < n_rows; r++) {
                double v[64];
                for (int d = 0; d < 64; d++) {
                    v[d] = 0;
                    for (int k = 0; k < H; k++) v[d] += (double)w[d * H + k] * xs[r * H + k];
                }
                for (int j = 0; j < HALF; j++) {
                    int lo = is_interleaved ? 2 * j : j, hi = is_interleaved ? 2 * j + 1 : j + 32;
                    double co = c9[r * HALF + j], si = s9[r * HALF + j];
                    ((float *)q.cpu)[r * 64 + lo] = (float)(v[lo] * co - v[hi] * si);
                    ((float *)q.cpu)[r * 64 + hi] = (float)(v[hi] * co + v[lo] * si);
                }
            }
            if (is_interleaved)
                pair_differs(p, &q, 64, 2.5e-3, "interleaved rotation", "qkv");
            else
                pair_compare(p, &q, 64, 2.5e-3, "qkv's rotation against float64");
            pair_free_all(p);
        }
    }
    free(w);
    free(x);
}

/* ---- packing ---- */

static float widened(uint8_t code, uint8_t scale)
{
    static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float v = ldexpf(magnitude[code & 7], (int)scale - 127);
    return code & 8 ? -v : v;
}

enum { ROWS = 70, LD = 160, OUT = 41, IN = 96, ROW0 = 7, COL0 = 32 };

static void pack(struct pair *p, enum td_weight_source source, const void *data, const uint8_t *scales, uint32_t ld,
                 const uint16_t *want, const char *mistake, enum td_status expected)
{
    struct both out = pair_out(p, RAW, OUT * IN * 2);
    memcpy(out.cpu, want, OUT * IN * 2);
    struct td_pack_weight_args a = {.source = source,
                                    .data = data,
                                    .scales = scales,
                                    .ld = ld,
                                    .row_begin = ROW0,
                                    .col_begin = COL0,
                                    .n_out = OUT,
                                    .n_in = IN,
                                    .out = out.gpu};
    enum td_status st = p->gpu_ops->pack_weight(p->gpu_stream, &a);
    p->n_checks++;
    if (st != expected) {
        pair_fail(p, "pack_weight: %s, not %s", td_status_name(st), td_status_name(expected));
    }
    if (expected == TD_OK && mistake == NULL) pair_same(p, &out, "pack_weight");
    if (mistake != NULL) {
        uint16_t have[OUT * IN];
        if (td_device_download(p->gpu, have, out.gpu, sizeof have) != TD_OK) exit(1);
        if (memcmp(have, want, sizeof have) == 0) pair_fail(p, "pack_weight: a planted mistake passes: %s", mistake);
    }
    pair_free_all(p);
}

void check_pack(struct pair *p)
{
    uint16_t rows[ROWS * LD], cols[LD * ROWS], want[OUT * IN];
    uint8_t blocks[ROWS * LD / 2], swapped[ROWS * LD / 2], scales[ROWS * LD / 32];
    for (uint32_t i = 0; i < ROWS * LD; i++) rows[i] = to_bf16(pair_random(p));
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t c = 0; c < LD; c++) cols[c * ROWS + r] = rows[r * LD + c];
    for (uint32_t r = 0; r < OUT; r++)
        for (uint32_t c = 0; c < IN; c++) want[r * IN + c] = rows[(r + ROW0) * LD + c + COL0];
    pack(p, TD_SRC_BF16_ROWS, rows, NULL, LD, want, NULL, TD_OK);
    pack(p, TD_SRC_BF16_COLS, cols, NULL, ROWS, want, NULL, TD_OK);

    for (uint32_t i = 0; i < sizeof blocks; i++) { /* every pair of nibbles */
        blocks[i] = (uint8_t)(i * 37 + i / 256);
        swapped[i] = (uint8_t)(blocks[i] << 4 | blocks[i] >> 4);
    }
    for (uint32_t i = 0; i < sizeof scales; i++) scales[i] = i == 50 ? 1 : i == 51 ? 250 : (uint8_t)(110 + i % 30);
    for (uint32_t r = 0; r < OUT; r++)
        for (uint32_t c = 0; c < IN; c++) {
            uint32_t at = (r + ROW0) * LD + c + COL0;
            want[r * IN + c] = to_bf16(widened(at % 2 ? blocks[at / 2] >> 4 : blocks[at / 2] & 15, scales[at / 32]));
        }
    pack(p, TD_SRC_MXFP4, blocks, scales, LD, want, NULL, TD_OK);
    pack(p, TD_SRC_MXFP4, swapped, scales, LD, want, "nibbles swapped", TD_OK);
    uint8_t turned[ROWS * LD / 32]; /* groups along the outputs */
    for (uint32_t i = 0; i < sizeof turned; i++) turned[i] = scales[i % (LD / 32) * ROWS + i / (LD / 32)];
    pack(p, TD_SRC_MXFP4, blocks, turned, LD, want, "scales along the other axis", TD_OK);
    scales[(ROW0 + 3) * (LD / 32) + 2] = 255;
    pack(p, TD_SRC_MXFP4, blocks, scales, LD, want, NULL, TD_E_INVALID);
}

/* ---- the residual ---- */

void check_residual_traps(struct pair *p)
{
    enum { N = 3 };
    float ones[H], zeros[H] = {0};
    for (uint32_t i = 0; i < H; i++) ones[i] = 1;
    float *x = values(p, N * H, 1), *y = values(p, N * H, 1);
    for (uint32_t r = 0; r < N; r++) { /* a few channels far larger than the rest, beyond what f16 holds */
        x[r * H + 7] = 60000;
        y[r * H + 7] = 50000;
        x[r * H + 200] = -90000;
    }
    struct both bx = pair_raw(p, x, N * H * 4), by = pair_raw(p, y, N * H * 4), w = pair_raw(p, ones, sizeof ones),
                b = pair_raw(p, zeros, sizeof zeros), t = pair_out(p, ACT, N * H);
    struct td_add_norm_args g = {.x = (float *)(void *)bx.gpu,
                                 .y = (float *)(void *)by.gpu,
                                 .bias = (float *)(void *)b.gpu,
                                 .w = (float *)(void *)w.gpu,
                                 .t = (float *)(void *)t.gpu,
                                 .n_rows = N,
                                 .dim = H,
                                 .eps = 1e-5f};
    pair_status(p, TD_OK, p->gpu_ops->add_norm(p->gpu_stream, &g), "add_norm");
    struct both out = bx;
    out.kind = F32;
    out.n = N * H;
    for (int is_f16 = 0; is_f16 < 2; is_f16++) {
        for (uint32_t i = 0; i < N * H; i++) {
            float v = x[i] + y[i];
            if (is_f16) v = v > 65504 ? 65504 : v < -65504 ? -65504 : v;
            ((float *)out.cpu)[i] = v;
        }
        if (is_f16)
            pair_differs(p, &out, H, 2e-5, "a residual of f16", "add_norm");
        else
            pair_compare(p, &out, H, 2e-5, "add_norm with large channels");
    }
    free(x);
    free(y);
    pair_free_all(p);
}
