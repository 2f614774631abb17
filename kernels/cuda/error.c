#include "kernels/cuda/error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char first[256];

enum td_status td_cuda_status(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return TD_OK;
    pthread_mutex_lock(&lock);
    if (first[0] == '\0')
        snprintf(first, sizeof first, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
    pthread_mutex_unlock(&lock);
    if (e != cudaErrorMemoryAllocation) return TD_E_DEVICE;
    cudaGetLastError(); /* not sticky: the next launch is not to blame */
    return TD_E_NO_MEMORY;
}

const char *td_cuda_last_error(void) { return first; }

enum td_status td_cuda_err(struct td_err *err, enum td_status st, const char *fmt, ...)
{
    if (err == NULL) return st;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    return st;
}
