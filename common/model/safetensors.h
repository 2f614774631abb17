/* Safetensors files, read-only: 8 bytes little-endian header length n, n bytes JSON (name -> dtype, shape, data_offsets
 * relative to byte 8 + n), raw data. Everything in a header is checked against the file's size before the data is
 * mapped: bounds, overlap, shape times element size, known types. The index (model.safetensors.index.json) is trusted
 * for names only. A file that is cut short after opening is out of scope (reading it then raises SIGBUS). */
#ifndef TD_MODEL_SAFETENSORS_H
#define TD_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_TENSOR_MAX_DIMS 8u

enum td_tensor_type {
    TD_T_BOOL,
    TD_T_U8,
    TD_T_I8,
    TD_T_F8_E4M3,
    TD_T_F8_E5M2,
    TD_T_U16,
    TD_T_I16,
    TD_T_F16,
    TD_T_BF16,
    TD_T_U32,
    TD_T_I32,
    TD_T_F32,
    TD_T_U64,
    TD_T_I64,
    TD_T_F64,
    TD_T_N
};
const char *td_tensor_type_name(enum td_tensor_type t); /* "BF16" */
uint32_t td_tensor_type_bytes(enum td_tensor_type t);

struct td_tensor {
    const char *name;
    const char *file; /* path, for messages */
    enum td_tensor_type type;
    uint32_t n_dims;
    uint64_t shape[TD_TENSOR_MAX_DIMS];
    const uint8_t *data; /* maybe unaligned: headers of any length occur */
    uint64_t n_bytes;
};

struct td_safetensors;
/* All tensors of a model directory: those of the index, else those of model.safetensors. */
enum td_status td_safetensors_open(const char *dir, struct td_safetensors **out, struct td_err *err);
void td_safetensors_close(struct td_safetensors *s); /* NULL is fine; tensors go with it */
uint32_t td_safetensors_count(const struct td_safetensors *s);
const struct td_tensor *td_safetensors_at(const struct td_safetensors *s, uint32_t i); /* by rising name */
const struct td_tensor *td_safetensors_find(const struct td_safetensors *s, const char *name);

/* A file's content (for tests): header checks only, no data is touched. */
enum td_status td_safetensors_check(const uint8_t *bytes, size_t n, struct td_err *err);

#endif
