/* The weights as a backend holds them, and how they get there. */
#ifndef TD_MODEL_WEIGHTS_H
#define TD_MODEL_WEIGHTS_H

#include "common/model/model.h"
#include "kernels/device.h"

/* What one rank of a tensor-parallel group holds. Sharded: attention by KV heads with their queries, experts by width
 * (ep 1) or whole (ep = tp), the unembedding by vocabulary rows. Replicated: norms, router, what is added once after
 * the sum over ranks, and the embedding, whose shards would cost an all-reduce to save 2 V H bytes. */
struct td_shard {
    uint32_t rank, tp, ep;
    uint32_t n_heads, n_kv_heads, first_kv_head;
    uint32_t first_unit, n_units;     /* of I: slices that are whole pieces of down's sum (kernels/args.h) */
    uint32_t first_piece, n_pieces;   /* of TD_EXPERT_PIECES */
    uint32_t first_expert, n_experts; /* the others' have no data here */
    uint32_t first_vocab, n_vocab;
};
void td_shard_of(const struct td_model_config *c, uint32_t tp, uint32_t ep, uint32_t rank, struct td_shard *out);

/* Pointers are device memory; the arrays of structs are host memory. Sizes with a rank's Nq, Nkv, I, V. */
struct td_layer_weights {
    const float *input_norm, *post_norm; /* [H] */
    const float *sinks;                  /* [Nq] */
    struct td_weight qkv;                /* [(Nq + 2 Nkv) D, H] with bias */
    struct td_weight o;                  /* [H, Nq D] */
    const float *o_bias;                 /* [H] */
    struct td_weight router;             /* [E, H] with bias */
    struct td_weight *gate_up;           /* [E] of [2I, H] with bias; data NULL: another rank's */
    struct td_weight *down;              /* [E] of [H, I] */
    const float *down_bias;              /* [E, H] */
};

struct td_weights {
    struct td_shard shard;
    const uint16_t *embed; /* [V, H] bf16, all of V */
    const float *final_norm;
    struct td_weight lm_head;
    const float *rope_freqs; /* [D / 2] */
    float rope_factor;
    struct td_layer_weights *layers; /* [L] */
    uint32_t n_layers;
    uint64_t n_bytes, n_sharded_bytes; /* of device memory; those of them that are this rank's share */
    struct td_device *device;
    void **blocks; /* what was allocated there */
    uint32_t n_blocks, cap_blocks;
};

/* Bytes of device memory that a rank's weights take. */
uint64_t td_weights_bytes(const struct td_model_config *c, const struct td_shard *s, const struct td_device *d);

struct td_safetensors;
/* One rank's; tp and ep have passed td_model_check_ranks. files NULL: weights made up from the seed. Checks name, type
 * and shape of every tensor the configuration calls for; the error names file and tensor. On failure *out is empty. */
enum td_status td_weights_load(const struct td_model_config *c, const struct td_shard *shard,
                               const struct td_safetensors *files, uint64_t dummy_seed, struct td_device *device,
                               struct td_weights *out, struct td_err *err);
void td_weights_free(struct td_weights *w); /* zero-initialised is fine */

const struct td_weights *td_model_weights_of(const struct td_model *m); /* rank 0's */
const struct td_weights *td_model_rank_weights(const struct td_model *m, uint32_t rank);
struct td_device *td_model_device_of(const struct td_model *m);

#endif
