/* x += y + bias, then t = rmsnorm(x). A block a row. */
#include <cuda_fp16.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/traps.cuh"

static __device__ __forceinline__ float4 as_f16(float4 v)
{
    const float2 a = __half22float2(__floats2half2_rn(v.x, v.y)), b = __half22float2(__floats2half2_rn(v.z, v.w));
    return make_float4(a.x, a.y, b.x, b.y);
}

static __global__ void __launch_bounds__(NORM_THREADS)
    add_norm(float *x, const float *y, const float *bias, const float *w, td_bf16 *t, uint32_t dim, float eps)
{
    let_next();
    before();
    float *row = x + (size_t)blockIdx.x * dim;
    const float *add = y + (size_t)blockIdx.x * dim;
    float4 v[NORM_QUADS];
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) {
        const uint32_t i = q * NORM_THREADS + threadIdx.x;
        const float4 r = quad_or_0(row, i, dim), d = quad_or_0(add, i, dim), b = quad_or_0(bias, i, dim);
        v[q] = make_float4(r.x + (d.x + b.x), r.y + (d.y + b.y), r.z + (d.z + b.z), r.w + (d.w + b.w));
        if (TRAP(RESIDUAL_F16)) v[q] = as_f16(v[q]);
    }
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) {
        const uint32_t i = q * NORM_THREADS + threadIdx.x;
        if (4 * i < dim) ((float4 *)row)[i] = v[q];
    }
    norm_row(v, w, t + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_add_norm(struct td_stream *s, const struct td_add_norm_args *a)
{
    if (a->dim % 4 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(add_norm, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->y, a->bias,
                                 a->w, (td_bf16 *)a->t, a->dim, a->eps),
                          "add_norm");
}
