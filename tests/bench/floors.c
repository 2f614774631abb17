#include "tests/bench/floors.h"

#include <math.h>

static double expert_elements(const struct td_model_config *c) { return 3.0 * c->hidden * c->intermediate; }

static double qkv_elements(const struct td_model_config *c)
{
    return (c->n_heads + 2.0 * c->n_kv_heads) * c->head_dim * c->hidden;
}

static double o_elements(const struct td_model_config *c) { return (double)c->n_heads * c->head_dim * c->hidden; }

static void add_up(struct td_bench_floors *f) { f->total = f->qkv + f->attention + f->o_proj + f->moe + f->lm_head; }

void td_bench_decode_floors(const struct td_model_config *c, enum td_expert_form form, enum td_dtype kv,
                            uint32_t n_seqs, uint32_t n_ctx, struct td_bench_floors *out)
{
    /* MXFP4: four bits, and a scale of eight for 32 of them. */
    const double bytes = form == TD_EXPERTS_MXFP4 ? 17.0 / 32 : form == TD_EXPERTS_FP8 ? 1 : 2;
    const double touched = c->n_experts * (1 - pow(1 - (double)c->top_k / c->n_experts, n_seqs));
    const double token_kv = 2.0 * c->n_kv_heads * c->head_dim; /* elements in a layer */
    const uint32_t seen = n_ctx < c->window ? n_ctx : c->window;
    const double full = (double)c->n_group_layers[TD_KV_FULL] * n_ctx * token_kv * td_dtype_bytes(kv),
                 sliding = (double)c->n_group_layers[TD_KV_SLIDING] * seen * token_kv * 2;
    *out = (struct td_bench_floors){
        .qkv = c->n_layers * qkv_elements(c) * 2 / TD_BENCH_READ_BYTES_S,
        .attention = n_seqs * (full + sliding) / TD_BENCH_READ_BYTES_S,
        .o_proj = c->n_layers * o_elements(c) * 2 / TD_BENCH_READ_BYTES_S,
        .moe = c->n_layers * touched * expert_elements(c) * bytes / TD_BENCH_READ_BYTES_S,
        .lm_head = (double)c->vocab * c->hidden * 2 / TD_BENCH_READ_BYTES_S,
    };
    add_up(out);
}

void td_bench_prefill_floors(const struct td_model_config *c, enum td_expert_form form, uint32_t n,
                             struct td_bench_floors *out)
{
    const double moe_rate = form == TD_EXPERTS_BF16 ? TD_BENCH_BF16_FLOP_S : TD_BENCH_FP8_FLOP_S;
    /* Keys that a query sees, summed over the queries. */
    const double w = c->window, full = (double)n * n / 2, sliding = n <= w ? full : w * w / 2 + (n - w) * w;
    const double pairs = c->n_group_layers[TD_KV_FULL] * full + c->n_group_layers[TD_KV_SLIDING] * sliding;
    *out = (struct td_bench_floors){
        .qkv = 2.0 * n * c->n_layers * qkv_elements(c) / TD_BENCH_BF16_FLOP_S,
        .attention = 4.0 * c->n_heads * c->head_dim * pairs / TD_BENCH_BF16_FLOP_S,
        .o_proj = 2.0 * n * c->n_layers * o_elements(c) / TD_BENCH_BF16_FLOP_S,
        .moe = 2.0 * n * c->top_k * c->n_layers * expert_elements(c) / moe_rate,
        .lm_head = 2.0 * c->vocab * c->hidden / TD_BENCH_BF16_FLOP_S,
    };
    add_up(out);
}
