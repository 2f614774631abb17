/* y[i] = x[rows[i]]. */
#include "kernels/cuda/cuda_int.h"

static __global__ void gather(const float *x, const uint32_t *rows, float *y, uint32_t dim)
{
    let_next();
    before();
    const float *from = x + (size_t)rows[blockIdx.x] * dim;
    float *to = y + (size_t)blockIdx.x * dim;
    for (uint32_t i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}

enum td_status td_cuda_gather(struct td_stream *s, const struct td_gather_args *a)
{
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(gather, a->n_rows, 256, 0, td_cuda_stream_of(s)->s, a->x, a->rows, a->y, a->dim),
                          "gather");
}
