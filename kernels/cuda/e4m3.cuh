/* FP8 E4M3 as tensor cores take bf16: exact for every finite code; 0x7f (NaN) reads as 480. */
#ifndef TD_KERNELS_CUDA_E4M3_CUH
#define TD_KERNELS_CUDA_E4M3_CUH

#include <cuda_bf16.h>

#include <cstdint>

/* Two codes in the upper bytes of two halves: the exponent moves to the low end of bf16's, and 2^120 makes up for the
 * difference of the biases, subnormals included. */
static __device__ __forceinline__ uint32_t widen_e4m3_halves(uint32_t x)
{
    const uint32_t y = (x & 0x80008000u) | (x >> 4 & 0x07f007f0u), factor = 0x7b807b80u;
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(y), "r"(factor));
    return r;
}
/* Codes 0, 1 and 2, 3 of a word, the lower one in the lower half. */
static __device__ __forceinline__ uint2 widen_e4m3(uint32_t w)
{
    return make_uint2(widen_e4m3_halves(__byte_perm(w, 0, 0x1404)), widen_e4m3_halves(__byte_perm(w, 0, 0x3424)));
}

static __device__ __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

#endif
