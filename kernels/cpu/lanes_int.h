/* 16 floats, as the instruction set holds them. The includer defines one of TD_LANES_AVX512, TD_LANES_AVX2,
 * TD_LANES_SCALAR. max(a, b) is "a > b ? a : b" and min likewise, so a NaN in b comes through. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/micro.h"

#if defined(TD_LANES_AVX512) || defined(TD_LANES_AVX2)
#include <immintrin.h>
#endif

#if defined(TD_LANES_SCALAR) && (defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__))
#define INLINE static __attribute__((noinline, unused)) /* inlined, gcc takes ten minutes over the checks it adds */
#elif defined(TD_LANES_SCALAR)
#define INLINE static inline __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline, unused))
#endif

#if defined(TD_LANES_AVX512)
typedef __m512 vf;
INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}
INLINE vf v_load_panel(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256 lo = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    __m256 hi = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)));
    return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
}
INLINE __m256 v_low(vf x) { return _mm512_castps512_ps256(x); }
INLINE __m256 v_high(vf x) { return _mm512_extractf32x8_ps(x, 1); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
/* 2^(i >> 1) and 2^(i - (i >> 1)) of the integer in the low bits of t, which is 1.5 * 2^23 + i. */
INLINE void v_pow2_halves(vf t, vf *a, vf *b)
{
    __m512i i = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(0x4b400000));
    __m512i h = _mm512_srai_epi32(i, 1), one = _mm512_set1_epi32(127);
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(h, one), 23));
    *b = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(i, h), one), 23));
}
/* a 2^i, i in the low bits of t as above; the result must be a normal number. */
INLINE vf v_scale_pow2(vf a, vf t)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
/* x < limit ? 0 : a */
INLINE vf v_zero_below(vf x, vf limit, vf a)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}

#elif defined(TD_LANES_AVX2)
typedef struct {
    __m256 a, b;
} vf;
INLINE vf v_zero(void) { return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE vf v_set(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf v_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE __m256 widen8(const uint16_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)), 16));
}
INLINE vf v_load_bf16(const uint16_t *p) { return (vf){widen8(p), widen8(p + 8)}; }
INLINE vf v_load_panel(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)))};
}
INLINE __m256 v_low(vf x) { return x.a; }
INLINE __m256 v_high(vf x) { return x.b; }
INLINE vf v_add(vf x, vf y) { return (vf){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE vf v_sub(vf x, vf y) { return (vf){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE vf v_mul(vf x, vf y) { return (vf){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE vf v_div(vf x, vf y) { return (vf){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE vf v_fma(vf x, vf y, vf z) { return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE vf v_max(vf x, vf y) { return (vf){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE vf v_min(vf x, vf y) { return (vf){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE void pow2_halves8(__m256 t, __m256 *a, __m256 *b)
{
    __m256i i = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
    __m256i h = _mm256_srai_epi32(i, 1), one = _mm256_set1_epi32(127);
    *a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(h, one), 23));
    *b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, h), one), 23));
}
INLINE void v_pow2_halves(vf t, vf *a, vf *b)
{
    pow2_halves8(t.a, &a->a, &b->a);
    pow2_halves8(t.b, &a->b, &b->b);
}
INLINE __m256 scale_pow2_8(__m256 a, __m256 t)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
INLINE vf v_scale_pow2(vf x, vf t) { return (vf){scale_pow2_8(x.a, t.a), scale_pow2_8(x.b, t.b)}; }
INLINE vf v_zero_below(vf x, vf limit, vf y)
{
    return (vf){_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
                _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
}

#else /* TD_LANES_SCALAR: fmaf rounds once, in hardware or in software */
typedef struct {
    float f[TD_LANES];
} vf;
#define EACH(expr)                                                                                                     \
    do {                                                                                                               \
        vf r_;                                                                                                         \
        for (uint32_t i = 0; i < TD_LANES; i++) r_.f[i] = (expr);                                                      \
        return r_;                                                                                                     \
    } while (0)
INLINE vf v_zero(void) { EACH(0.0f); }
INLINE vf v_set(float x) { EACH(x); }
INLINE vf v_load(const float *p) { EACH(p[i]); }
INLINE void v_store(float *p, vf a) { memcpy(p, a.f, sizeof a.f); }
INLINE vf v_load_bf16(const uint16_t *p) { EACH(td_bf16_to_f32(p[i])); }
INLINE vf v_load_panel(const uint16_t *p) { EACH(td_bf16_to_f32(p[td_panel_slot(i)])); }
INLINE vf v_add(vf a, vf b) { EACH(a.f[i] + b.f[i]); }
INLINE vf v_sub(vf a, vf b) { EACH(a.f[i] - b.f[i]); }
INLINE vf v_mul(vf a, vf b) { EACH(a.f[i] * b.f[i]); }
INLINE vf v_div(vf a, vf b) { EACH(a.f[i] / b.f[i]); }
INLINE vf v_fma(vf a, vf b, vf c) { EACH(fmaf(a.f[i], b.f[i], c.f[i])); }
INLINE vf v_max(vf a, vf b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE vf v_min(vf a, vf b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE void v_pow2_halves(vf t, vf *a, vf *b)
{
    for (uint32_t k = 0; k < TD_LANES; k++) {
        uint32_t bits;
        memcpy(&bits, &t.f[k], sizeof bits);
        uint32_t i = bits - 0x4b400000u, h = (i >> 1) | (i & 0x80000000u);
        uint32_t lo = (h + 127u) << 23, hi = (i - h + 127u) << 23;
        memcpy(&a->f[k], &lo, sizeof lo);
        memcpy(&b->f[k], &hi, sizeof hi);
    }
}
INLINE vf v_scale_pow2(vf a, vf t)
{
    for (uint32_t k = 0; k < TD_LANES; k++) {
        uint32_t bits, by;
        memcpy(&bits, &a.f[k], sizeof bits);
        memcpy(&by, &t.f[k], sizeof by);
        bits += by << 23;
        memcpy(&a.f[k], &bits, sizeof bits);
    }
    return a;
}
INLINE vf v_zero_below(vf x, vf limit, vf a) { EACH(x.f[i] < limit.f[i] ? 0.0f : a.f[i]); }
INLINE float v_reduce_add(vf x)
{
    for (uint32_t w = TD_LANES / 2; w > 0; w /= 2)
        for (uint32_t i = 0; i < w; i++) x.f[i] += x.f[i + w];
    return x.f[0];
}
INLINE float v_reduce_max(vf x)
{
    for (uint32_t w = TD_LANES / 2; w > 0; w /= 2)
        for (uint32_t i = 0; i < w; i++) x.f[i] = x.f[i] > x.f[i + w] ? x.f[i] : x.f[i + w];
    return x.f[0];
}
INLINE void v_store_bf16(uint16_t *p, vf x)
{
    for (uint32_t i = 0; i < TD_LANES; i++) p[i] = td_f32_to_bf16(x.f[i]);
}
#endif

#if defined(TD_LANES_AVX512) || defined(TD_LANES_AVX2)
INLINE float v_reduce_add(vf x)
{
    __m256 e = _mm256_add_ps(v_low(x), v_high(x));
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}
INLINE float v_reduce_max(vf x)
{
    __m256 e = _mm256_max_ps(v_low(x), v_high(x));
    __m128 f = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_max_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_max_ss(f, _mm_movehdup_ps(f)));
}
/* Nearest, ties to even, in the upper half of each element; a NaN stays one. */
INLINE __m256i bf16_bits8(__m256 x)
{
    __m256i i = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(i, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(i, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_srli_epi32(_mm256_blendv_epi8(r, nan, _mm256_castps_si256(is_nan)), 16);
}
INLINE void v_store_bf16(uint16_t *p, vf x)
{
    __m256i both = _mm256_packus_epi32(bf16_bits8(v_low(x)), bf16_bits8(v_high(x)));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(both, 0xd8));
}
#endif
