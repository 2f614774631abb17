/* The table of ops of a backend, made from ops.def. Every op enqueues on a stream and returns; buffers stay in use
 * until the stream passes that point (the CPU backend has done the work on return). Pointers are device memory unless
 * args.h says "host". Errors: UNSUPPORTED for shapes a backend has no kernel for, DEVICE when the device failed. */
#ifndef TD_KERNELS_OPS_H
#define TD_KERNELS_OPS_H

#include "common/base/status.h"
#include "kernels/args.h"

struct td_stream;

struct td_ops {
#define X(op, meaning) enum td_status (*op)(struct td_stream * s, const struct td_##op##_args *a);
#include "kernels/ops.def"
#undef X
};

#endif
