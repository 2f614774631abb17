#ifndef TD_MODEL_DUMMY_INT_H
#define TD_MODEL_DUMMY_INT_H

#include "common/model/safetensors.h"

/* Fills a tensor of this name, type (BF16 or U8) and shape with values that depend on seed and name alone: random, of
 * the size a trained model's have, norms near 1, router biases 0, so that activations stay finite and experts share
 * evenly. */
void td_dummy_tensor(uint64_t seed, const char *name, enum td_tensor_type type, const uint64_t *shape, uint32_t n_dims,
                     uint8_t *out);

#endif
