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
        type *host, *dev; /* host: the copy whose turn it is */                                                        \
        type *turns[2];                                                                                                \
        size_t n;                                                                                                      \
    } name;
#include "common/engine/workspace.def"
#undef X
    void *plan_host[2], *plan_dev; /* all of PLAN, one behind another */
    size_t device_bytes, host_bytes;
};

/* On failure err says which buffer there was no memory for, and how large it would have been. */
enum td_status td_workspace_create(struct td_device *d, const struct td_workspace_shape *s, struct td_workspace *out,
                                   struct td_err *err);
void td_workspace_free(struct td_workspace *w); /* zero-initialised is fine */
/* From here on host is copy 0 or 1 of what has two. */
void td_workspace_turn(struct td_workspace *w, uint32_t turn);
/* Of the plan from its start on, with that many pages. */
size_t td_workspace_plan_bytes(const struct td_workspace *w, size_t n_pages);
/* A line per buffer at debug level, the totals at info. */
void td_workspace_log(const struct td_workspace *w);

#endif
