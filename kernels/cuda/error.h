/* CUDA's status codes become ours here and nowhere else. */
#ifndef TD_KERNELS_CUDA_ERROR_H
#define TD_KERNELS_CUDA_ERROR_H

#include <cuda_runtime_api.h>

#include "common/base/status.h"

#ifdef __CUDACC__
extern "C" {
#endif

/* NO_MEMORY for cudaErrorMemoryAllocation, DEVICE for every other failure. The first failure's text, with `what`, is
 * kept for td_cuda_last_error. Any thread. */
enum td_status td_cuda_status(cudaError_t e, const char *what);
/* The first failure since the plug-in was loaded, "" if none: CUDA's sticky errors make the first the cause. */
const char *td_cuda_last_error(void);
/* td_err_set, which lives in the program and not in the plug-in. */
enum td_status td_cuda_err(struct td_err *err, enum td_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#ifdef __CUDACC__
}
#endif

#endif
