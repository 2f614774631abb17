/* What loading a rank's weights is made of: tensors by name and shape, device memory, lanes, progress. */
#ifndef TD_MODEL_LOADER_INT_H
#define TD_MODEL_LOADER_INT_H

#include "common/model/lanes_int.h"
#include "common/model/weights.h"

struct td_loader {
    const struct td_model_config *c;
    const struct td_safetensors *files; /* NULL: dummy */
    uint64_t dummy_seed;
    struct td_lanes *lanes;
    struct td_weights *w;
    float *floats; /* small tensors, widened */
    size_t n_floats;
    uint64_t n_read, n_total, begun_ns, said_ns; /* bytes as stored; of device memory in the end */
    uint64_t n_inexact;                          /* elements of experts that were rounded */
    struct td_err *err;
};

struct td_want {
    enum td_tensor_type type;
    bool or_f32; /* norms, biases and sinks: some converters write F32 */
    uint32_t n_dims;
    uint64_t shape[4];
};

/* All of these set l->err when they fail, with the tensor's name. */
enum td_status td_loader_no_memory(struct td_loader *l, const char *name);
/* The tensor called for; a made-up one has no data. */
enum td_status td_loader_find(struct td_loader *l, const char *name, const struct td_want *want, struct td_tensor *out);
/* A small tensor as host f32, valid until the next call. */
enum td_status td_loader_floats(struct td_loader *l, const char *name, const struct td_want *want, const float **out);
/* Device memory that the weights own. */
enum td_status td_loader_alloc(struct td_loader *l, size_t bytes, const char *name, bool is_sharded, void **out);
/* Lanes (lanes_int.h). */
enum td_status td_loader_turn(struct td_loader *l, const char *name, struct td_stream **out);
enum td_status td_loader_bytes(struct td_loader *l, const struct td_tensor *t, uint64_t at, uint64_t n,
                               const uint8_t **out);
enum td_status td_loader_put(struct td_loader *l, const char *name, const void *from, size_t n, const void **out);
/* Comes back before the device is done: what is wrong with the values shows when the tensor is finished. */
enum td_status td_loader_pack(struct td_loader *l, struct td_stream *stream, const char *name,
                              const struct td_pack_weight_args *a);
enum td_status td_loader_finish(struct td_loader *l, const char *name);

#endif
