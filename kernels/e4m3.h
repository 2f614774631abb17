/* FP8 E4M3 ("FN": no infinity, 0x7f and 0xff are NaN, 448 is the largest) as KV pages store it. */
#ifndef TD_KERNELS_E4M3_H
#define TD_KERNELS_E4M3_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Beyond this a value becomes 448: 464 lies between 448 and what would be the next code, and ties go to the even one.
 */
#define TD_E4M3_SATURATES_ABOVE 464.0f

/* Nearest, ties to even, saturating; a NaN stays one. */
static inline uint8_t td_e4m3_encode(float v)
{
    uint8_t sign = signbit(v) ? 0x80 : 0;
    float a = fabsf(v);
    if (isnan(v)) return sign | 0x7f;
    if (a > TD_E4M3_SATURATES_ABOVE) return sign | 0x7e;
    int e;
    frexpf(a, &e);                                   /* a = m 2^e, m in [1/2, 1) */
    int step = a < 0.015625f ? -9 : e - 4;           /* of the last mantissa bit: subnormals share one */
    uint32_t n = (uint32_t)lrintf(ldexpf(a, -step)); /* in the default rounding mode: to nearest, ties to even */
    if (a < 0.015625f) return sign | (uint8_t)n;     /* 8: the smallest normal number, by the code's design */
    if (n == 16) n = 8, step++;
    uint8_t code = (uint8_t)((uint32_t)(step + 3 + 7) << 3 | (n - 8));
    return sign | (code > 0x7e ? 0x7e : code);
}

/* Exact. */
static inline uint16_t td_e4m3_to_bf16(uint8_t c)
{
    float v;
    uint32_t bits, exponent = c >> 3 & 15, mantissa = c & 7;
    if ((c & 0x7f) == 0x7f) return (uint16_t)((c & 0x80) << 8 | 0x7fc0);
    v = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), (int)exponent - 10);
    memcpy(&bits, &v, sizeof bits);
    return (uint16_t)(bits >> 16 | (uint32_t)(c & 0x80) << 8);
}

#endif
