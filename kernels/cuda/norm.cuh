/* A block normalises a row that its threads hold in registers: what rmsnorm, add_norm and moe_add_norm end with. */
#ifndef TD_KERNELS_CUDA_NORM_CUH
#define TD_KERNELS_CUDA_NORM_CUH

#include <cuda_bf16.h>

#include "kernels/cuda/warp.cuh"

#define NORM_THREADS 384
#define NORM_QUADS   3 /* a thread's; 2,880 takes two of them, and whole warps skip the third */
#define NORM_MAX_DIM (NORM_THREADS * NORM_QUADS * 4u)

static __device__ __forceinline__ float4 quad_or_0(const float *row, uint32_t i, uint32_t dim)
{
    return 4 * i < dim ? ((const float4 *)row)[i] : make_float4(0, 0, 0, 0);
}

/* v: this thread's quads, quad q is elements 4 (q * NORM_THREADS + thread) and the next three; those past dim are 0. */
static __device__ __forceinline__ void norm_row(const float4 (&v)[NORM_QUADS], const float *w, __nv_bfloat16 *y,
                                                uint32_t dim, float eps)
{
    __shared__ float sums[NORM_THREADS / 32];
    float sum = 0;
    float4 g[NORM_QUADS];
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++)
        g[q] = quad_or_0(w, q * NORM_THREADS + threadIdx.x, dim); /* while the block adds up */
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++)
        sum += (v[q].x * v[q].x + v[q].y * v[q].y) + (v[q].z * v[q].z + v[q].w * v[q].w);
    const float inv = rsqrtf(block_sum<NORM_THREADS / 32>(sum, sums) / (float)dim + eps);
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) {
        const uint32_t i = q * NORM_THREADS + threadIdx.x;
        if (4 * i >= dim) break;
        __nv_bfloat162 out[2] = {__floats2bfloat162_rn(v[q].x * inv * g[q].x, v[q].y * inv * g[q].y),
                                 __floats2bfloat162_rn(v[q].z * inv * g[q].z, v[q].w * inv * g[q].w)};
        ((uint2 *)y)[i] = *(uint2 *)out;
    }
}

#endif
