/* Sums and maxima over a warp and a block. Their order is fixed, so a result depends on the values alone. */
#ifndef TD_KERNELS_CUDA_WARP_CUH
#define TD_KERNELS_CUDA_WARP_CUH

#include <cstdint>

static __device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

/* Sum over a block of N warps; every thread gets it. shared: N floats that nobody else uses meanwhile. */
template <int N> static __device__ __forceinline__ float block_sum(float v, float *shared)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) sum += shared[i];
    return sum;
}

#endif
