/* FP8 E4M3 ("FN": no infinity, 0x7f and 0xff are NaN, 448 is the largest), as KV pages and experts store it. For the
 * host and for kernels. */
#ifndef TD_KERNELS_E4M3_H
#define TD_KERNELS_E4M3_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define TD_BOTH_SIDES static __host__ __device__ inline
#else
#define TD_BOTH_SIDES static inline
#endif

/* Beyond this a value becomes 448: 464 lies between 448 and what would be the next code, and ties go to the even one.
 */
#define TD_E4M3_SATURATES_ABOVE 464.0f

TD_BOTH_SIDES uint32_t td_f32_bits(float v)
{
    uint32_t b;
    memcpy(&b, &v, sizeof b);
    return b;
}
TD_BOTH_SIDES float td_bits_f32(uint32_t b)
{
    float v;
    memcpy(&v, &b, sizeof v);
    return v;
}

/* Nearest, ties to even, saturating; a NaN stays one. */
TD_BOTH_SIDES uint8_t td_e4m3_encode(float v)
{
    uint32_t bits = td_f32_bits(v), sign = bits >> 24 & 0x80, mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint8_t)(sign | 0x7f);
    if (td_bits_f32(mag) >= TD_E4M3_SATURATES_ABOVE) return (uint8_t)(sign | 0x7e);
    if (mag < 0x3c800000u) return (uint8_t)(sign | (uint32_t)rintf(td_bits_f32(mag) * 512.0f)); /* steps of 2^-9 */
    mag += 0x7ffffu + (mag >> 20 & 1);
    return (uint8_t)(sign | ((mag >> 20) - (120u << 3)));
}

/* Exact, in bf16 as well. */
TD_BOTH_SIDES float td_e4m3_decode(uint8_t c)
{
    uint32_t e = c >> 3 & 15, m = c & 7;
    float v = e == 0 ? (float)m * 0.001953125f : td_bits_f32((e + 120) << 23 | m << 20);
    if ((c & 0x7f) == 0x7f) v = td_bits_f32(0x7fc00000u);
    return c & 0x80 ? -v : v;
}
TD_BOTH_SIDES uint16_t td_e4m3_to_bf16(uint8_t c) { return (uint16_t)(td_f32_bits(td_e4m3_decode(c)) >> 16); }

#endif
