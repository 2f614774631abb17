#ifndef TD_MODEL_FINGERPRINT_INT_H
#define TD_MODEL_FINGERPRINT_INT_H

#include "common/model/model.h"
#include "common/model/safetensors.h"

/* 128-bit xxHash over the configuration, every tensor's name, type and shape, and samples of its contents; 32 hex
 * digits. files NULL: dummy weights of that seed. */
void td_model_fingerprint_make(const struct td_model_config *c, const struct td_safetensors *files, uint64_t dummy_seed,
                               char out[33]);

#endif
