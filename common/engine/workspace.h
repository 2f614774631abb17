/* The buffers of a forward pass, one table (workspace.def): allocated once, so that a step allocates nothing. */
#ifndef TD_ENGINE_WORKSPACE_H
#define TD_ENGINE_WORKSPACE_H

#include "common/base/status.h"
#include "kernels/device.h"

#define TD_WORKSPACE_EDITS 65536u /* of a turn of draws; what has more is drawn on the host */

struct td_workspace_shape {
    size_t T, S, H, Q, C, K, V, G, P, R, D, scratch_bytes;
};

struct td_workspace {
    struct td_device *device;
#define X(where, type, name, count, shape)                                                                             \
    struct {                                                                                                           \
        type *host, *dev;                                                                                              \
        size_t n;                                                                                                      \
    } name;
#include "common/engine/workspace.def"
#undef X
    size_t device_bytes, host_bytes;
};

/* On failure err says which buffer there was no memory for, and how large it would have been. */
enum td_status td_workspace_create(struct td_device *d, const struct td_workspace_shape *s, struct td_workspace *out,
                                   struct td_err *err);
void td_workspace_free(struct td_workspace *w); /* zero-initialised is fine */
/* A line per buffer at debug level, the totals at info. */
void td_workspace_log(const struct td_workspace *w);

#endif
