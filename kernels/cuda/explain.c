/* --explain-kernels: which row of kernels/tune each op takes for the model's shapes, and what the other ops do. */
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/moe_scratch.h"
#include "kernels/tune/product.h"

struct out {
    void (*line)(void *user, const char *text);
    void *user;
};

static void product(const struct td_device *d, const struct out *o, const char *op, uint32_t n_cols, uint32_t k,
                    bool is_grouped, const struct td_explain_shape *s)
{
    static const uint32_t rows[] = {1, 8, 9, 32, 64, 65, 128, 512, 2048, 8192};
    const struct td_cuda_device *c = (const struct td_cuda_device *)(const void *)d;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[160];
        const bool is_dense = !is_grouped && strcmp(op, "router") != 0;
        uint32_t slots = rows[i] * s->top_k, tiles = is_grouped ? slots / 128 + s->n_experts : 0;
        int n = snprintf(text, sizeof text, "op=%s rows=%u columns=%u k=%u kernel=", op, rows[i], n_cols, k);
        const uint32_t few =
            is_grouped ? 0 : td_product_few(rows[i], n_cols, k, (uint32_t)c->n_sms, c->is_batch_invariant);
        if (is_dense && c->is_dense_fp8) {
            snprintf(text + n, sizeof text - (size_t)n, "%s weights=fp8",
                     td_fp8_kernel_name(td_product_fp8(rows[i], n_cols, k, (uint32_t)c->n_sms, c->is_batch_invariant)));
        } else if (few != 0) {
            snprintf(text + n, sizeof text - (size_t)n, "few columns_a_block=%u", few);
        } else if (!is_grouped && td_product_is_paired(rows[i], n_cols)) {
            snprintf(text + n, sizeof text - (size_t)n, "pairs tile=256x%u stages=6", TD_PRODUCT_PAIRS_BN);
        } else if (td_product_is_skinny(rows[i], is_grouped, n_cols, c->is_batch_invariant)) {
            snprintf(text + n, sizeof text - (size_t)n, "skinny columns_a_block=16");
        } else if (!is_grouped && td_product_split(rows[i], n_cols, k, (uint32_t)c->n_sms, c->is_batch_invariant) > 1) {
            snprintf(text + n, sizeof text - (size_t)n, "split tile=64x64 stages=6 blocks_a_tile=%u",
                     td_product_split(rows[i], n_cols, k, (uint32_t)c->n_sms, c->is_batch_invariant));
        } else {
            const struct td_product_row *r =
                &td_product_rows[td_product_pick(is_grouped ? slots : rows[i], tiles, n_cols, k, (uint32_t)c->n_sms)];
            snprintf(text + n, sizeof text - (size_t)n, "gemm tile=%ux%u stages=%u", r->bm, r->bn, r->stages);
        }
        o->line(o->user, text);
    }
}

/* Experts in FP8 or MXFP4: both products take the same tiles. */
static void experts(const struct td_cuda_device *c, const struct out *o, const struct td_explain_shape *s)
{
    static const uint32_t rows[] = {1, 8, 9, 32, 64, 65, 128, 512, 2048, 8192};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[160];
        uint32_t tile = moe_tile_rows(rows[i], s->top_k, s->n_experts);
        if (c->has_bf16_activations)
            tile = moe_bf16_tile_rows(c->is_batch_invariant, rows[i], s->top_k, s->n_experts);
        else if (c->is_batch_invariant)
            tile = MOE_FIXED_TILE;
        snprintf(text, sizeof text, "op=experts rows=%u kernel=%s activations=%s tile=128x%u", rows[i],
                 c->experts == TD_EXPERTS_FP8 ? "fp8" : "mxfp4", c->has_bf16_activations ? "bf16" : "e4m3", tile);
        o->line(o->user, text);
    }
}

void td_cuda_explain(const struct td_device *d, const struct td_explain_shape *s,
                     void (*line)(void *user, const char *text), void *user)
{
    const struct td_cuda_device *c = (const struct td_cuda_device *)(const void *)d;
    const struct out o = {line, user};
    product(d, &o, "qkv", (s->n_heads + 2 * s->n_kv_heads) * s->head_dim, s->hidden, false, s);
    product(d, &o, "o_proj", s->hidden, s->n_heads * s->head_dim, false, s);
    product(d, &o, "router", s->n_experts, s->hidden, false, s);
    if (c->experts == TD_EXPERTS_BF16) {
        product(d, &o, "gate_up", 2 * s->intermediate, s->hidden, true, s);
        product(d, &o, "down", s->hidden, s->intermediate, true, s);
    } else
        experts(c, &o, s);
    product(d, &o, "lm_head", s->vocab, s->hidden, false, s);
    line(user, "op=attention rows=many kernel=prefill keys=128 stages=3 warpgroups=3");
    line(user, c->is_batch_invariant
                   ? "op=attention rows=single kernel=prefill: --batch-invariant"
                   : "op=attention rows=single kernel=decode keys=64 stages=8 warps=4; windows: kernel=window warps=3 keys_a_warp=48");
}
