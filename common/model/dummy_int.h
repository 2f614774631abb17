#ifndef TD_MODEL_DUMMY_INT_H
#define TD_MODEL_DUMMY_INT_H

#include "common/model/safetensors.h"

/* Bytes [at, at + n) of a made-up tensor of t's name, type (BF16 or U8) and shape: values that depend on seed, name and
 * place alone, so that threads may make parts of it. Random, of the size a trained model's have, norms near 1, router
 * biases 0, so that activations stay finite and experts share evenly. at and n: whole elements. */
void td_dummy_bytes(uint64_t seed, const struct td_tensor *t, uint64_t at, uint64_t n, uint8_t *out);

#endif
