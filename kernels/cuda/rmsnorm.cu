/* y = x / sqrt(mean(x^2) + eps) * w, one rounding at the end. A block a row. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/norm.cuh"

static __global__ void __launch_bounds__(NORM_THREADS)
    rmsnorm(const float *x, const float *w, td_bf16 *y, uint32_t dim, float eps)
{
    let_next();
    before();
    const float *row = x + (size_t)blockIdx.x * dim;
    float4 v[NORM_QUADS];
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) v[q] = quad_or_0(row, q * NORM_THREADS + threadIdx.x, dim);
    norm_row(v, w, y + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_rmsnorm(struct td_stream *s, const struct td_rmsnorm_args *a)
{
    if (a->dim % 4 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(rmsnorm, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->w,
                                 (td_bf16 *)a->y, a->dim, a->eps),
                          "rmsnorm");
}
