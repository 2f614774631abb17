/* The least time a pass can take on one GPU: what must be read over the read bandwidth, what must be multiplied over
 * the tensor cores' rate. Formulas of one H200, measured: 4.31 TB/s, 750 TFLOP/s in bf16, 1,307 in FP8. */
#ifndef TESTS_BENCH_FLOORS_H
#define TESTS_BENCH_FLOORS_H

#include "common/model/model.h"
#include "kernels/device.h"

#define TD_BENCH_READ_BYTES_S 4.31e12
#define TD_BENCH_BF16_FLOP_S  750e12
#define TD_BENCH_FP8_FLOP_S   1307e12

/* What a pass costs at least, in seconds, an op (all layers together). */
struct td_bench_floors {
    double qkv, attention, o_proj, moe, lm_head;
    double total;
};

/* One step of n_seqs sequences, each with n_ctx tokens in its cache, the new one included: bytes. Of E experts a batch
 * touches E (1 - (1 - k / E)^n_seqs). kv: type of the full layers' pages; a sliding layer's are bf16. */
void td_bench_decode_floors(const struct td_model_config *c, enum td_expert_form form, enum td_dtype kv,
                            uint32_t n_seqs, uint32_t n_ctx, struct td_bench_floors *out);

/* A prompt of n tokens, from an empty cache: operations. Experts in bf16 count with the rest. */
void td_bench_prefill_floors(const struct td_model_config *c, enum td_expert_form form, uint32_t n,
                             struct td_bench_floors *out);

#endif
