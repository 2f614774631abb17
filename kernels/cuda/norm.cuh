/* A block normalises a row that its threads hold in registers: what rmsnorm, add_norm and moe_add_norm end with. */
#ifndef TD_KERNELS_CUDA_NORM_CUH
#define TD_KERNELS_CUDA_NORM_CUH

#include <cuda_bf16.h>

#include "kernels/cuda/warp.cuh"

#define NORM_THREADS 512
#define NORM_PAIRS   4 /* a thread's; rows up to NORM_THREADS * NORM_PAIRS * 2 = 4096 wide */
#define NORM_MAX_DIM (NORM_THREADS * NORM_PAIRS * 2u)

/* v: this thread's pairs, pair p is elements 2 (p * NORM_THREADS + thread) and the next; those past dim are 0. */
static __device__ __forceinline__ void norm_row(const float2 (&v)[NORM_PAIRS], const float *w, __nv_bfloat16 *y,
                                                uint32_t dim, float eps)
{
    __shared__ float sums[NORM_THREADS / 32];
    float sum = 0;
    float2 g[NORM_PAIRS];
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) { /* on their way while the block adds up */
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        g[p] = 2 * i < dim ? ((const float2 *)w)[i] : make_float2(0, 0);
    }
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) sum += v[p].x * v[p].x + v[p].y * v[p].y;
    float inv = rsqrtf(block_sum<NORM_THREADS / 32>(sum, sums) / (float)dim + eps);
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) {
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        if (2 * i >= dim) break;
        ((__nv_bfloat162 *)y)[i] = __floats2bfloat162_rn(v[p].x * inv * g[p].x, v[p].y * inv * g[p].y);
    }
}

#endif
