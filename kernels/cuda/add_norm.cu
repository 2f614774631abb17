/* x += y + bias, then t = rmsnorm(x). A block a row. */
#include <cuda_fp16.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/traps.cuh"

static __global__ void __launch_bounds__(NORM_THREADS)
    add_norm(float *x, const float *y, const float *bias, const float *w, td_bf16 *t, uint32_t dim, float eps)
{
    let_next();
    before();
    float2 *row = (float2 *)(x + (size_t)blockIdx.x * dim);
    const float2 *add = (const float2 *)(y + (size_t)blockIdx.x * dim);
    float2 v[NORM_PAIRS];
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) {
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        v[p] = make_float2(0, 0);
        if (2 * i >= dim) continue;
        float2 r = row[i], d = add[i], b = ((const float2 *)bias)[i];
        v[p] = make_float2(r.x + (d.x + b.x), r.y + (d.y + b.y));
        if (TRAP(RESIDUAL_F16)) v[p] = __half22float2(__float22half2_rn(v[p]));
        row[i] = v[p];
    }
    norm_row(v, w, t + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_add_norm(struct td_stream *s, const struct td_add_norm_args *a)
{
    if (a->dim % 2 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(add_norm, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->y, a->bias,
                                 a->w, (td_bf16 *)a->t, a->dim, a->eps),
                          "add_norm");
}
