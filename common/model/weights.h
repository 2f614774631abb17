/* The weights as a backend holds them, and how they get there. */
#ifndef TD_MODEL_WEIGHTS_H
#define TD_MODEL_WEIGHTS_H

#include "common/model/model.h"
#include "kernels/device.h"

/* Pointers are device memory; the arrays of structs are host memory. */
struct td_layer_weights {
    const float *input_norm, *post_norm; /* [H] */
    const float *sinks;                  /* [Nq] */
    struct td_weight qkv;                /* [(Nq + 2 Nkv) D, H] with bias */
    struct td_weight o;                  /* [H, Nq D] */
    const float *o_bias;                 /* [H] */
    struct td_weight router;             /* [E, H] with bias */
    struct td_weight *gate_up;           /* [E] of [2I, H] with bias */
    struct td_weight *down;              /* [E] of [H, I] */
    const float *down_bias;              /* [E, H] */
};

struct td_weights {
    const uint16_t *embed; /* [V, H] bf16 */
    const float *final_norm;
    struct td_weight lm_head;
    const float *rope_freqs; /* [D / 2] */
    float rope_factor;
    struct td_layer_weights *layers; /* [L] */
    uint32_t n_layers;
    uint64_t n_bytes; /* of device memory */
    struct td_device *device;
    void **blocks; /* what was allocated there */
    uint32_t n_blocks, cap_blocks;
};

struct td_safetensors;
/* files NULL: weights made up from the seed. Checks name, type and shape of every tensor the
 * configuration calls for; the error names file and tensor. On failure *out is empty. */
enum td_status td_weights_load(const struct td_model_config *c, const struct td_safetensors *files, uint64_t dummy_seed,
                               struct td_device *device, struct td_weights *out, struct td_err *err);
void td_weights_free(struct td_weights *w); /* zero-initialised is fine */

const struct td_weights *td_model_weights_of(const struct td_model *m);
struct td_device *td_model_device_of(const struct td_model *m);

#endif
