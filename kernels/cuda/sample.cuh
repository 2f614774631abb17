/* What both kinds of draws share. */
#ifndef TD_KERNELS_CUDA_SAMPLE_CUH
#define TD_KERNELS_CUDA_SAMPLE_CUH

#include <cfloat>

/* As the definition has it: NaN is -inf, and no infinity above. */
static __device__ __forceinline__ float tame(float x)
{
    return !(x > -INFINITY) ? -INFINITY : fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

/* 1 / temperature, finite: 0 times it is 0. */
static __device__ __forceinline__ float inverse(float temperature)
{
    return temperature == 0 ? 0 : fminf(1 / temperature, FLT_MAX);
}

#endif
