/* The inner loops themselves, included by micro_scalar.c, micro_avx2.c and micro_avx512.c after lanes_int.h's choice
 * was defined. A float of the result never depends on how many rows or panels a kernel call holds. */
#include "kernels/cpu/lanes_int.h"

/* ---- exp ------------------------------------------------------------------------------------------------------------
 */

/* exp(x) to about 1 ulp: x = n ln 2 + r, exp(r) = 1 + r + r^2 q(r) with q of degree 4 (minimax on |r| <= 0.35, relative
 * error 3.3e-9), times 2^n in two factors so that results underflow and overflow as they should. exp(0) = 1 and
 * exp(-inf) = 0 exactly; NaN stays NaN. */
INLINE vf v_exp(vf x)
{
    x = v_max(v_set(-105.0f), v_min(v_set(90.0f), x));
    vf t = v_fma(x, v_set(0x1.715476p+0f), v_set(0x1.8p+23f)); /* nearest integer by adding 1.5 * 2^23 */
    vf n = v_sub(t, v_set(0x1.8p+23f));
    vf r = v_fma(n, v_set(-0x1.62e430p-1f), x);
    r = v_fma(n, v_set(0x1.05c610p-29f), r);
    vf q = v_set(0x1.6a1a78p-10f);
    q = v_fma(q, r, v_set(0x1.123fb8p-7f));
    q = v_fma(q, r, v_set(0x1.555916p-5f));
    q = v_fma(q, r, v_set(0x1.55548ap-3f));
    q = v_fma(q, r, v_set(0x1.fffffcp-2f));
    vf p = v_add(v_fma(v_mul(r, r), q, r), v_set(1.0f)), a, b;
    v_pow2_halves(t, &a, &b);
    return v_mul(v_mul(p, a), b);
}

/* 2^x for x <= 0 and a little above: x = n + r, 2^r = 1 + r q(r) with q of degree 4 (minimax on |r| <= 1/2, relative
 * error 1e-7), n added to the exponent. 0 below -126, where that would not do; 2^0 = 1 and 2^-inf = 0 exactly; NaN
 * stays NaN. */
INLINE vf v_exp2_falling(vf x)
{
    vf t = v_add(x, v_set(0x1.8p+23f));
    vf r = v_sub(x, v_sub(t, v_set(0x1.8p+23f)));
    vf q = v_set(0x1.5bba14p-10f);
    q = v_fma(q, r, v_set(0x1.3cea88p-7f));
    q = v_fma(q, r, v_set(0x1.c6b752p-5f));
    q = v_fma(q, r, v_set(0x1.ebf9bcp-3f));
    q = v_fma(q, r, v_set(0x1.62e42ap-1f));
    return v_zero_below(x, v_set(-126.0f), v_scale_pow2(v_fma(q, r, v_set(1.0f)), t));
}

static void exp_n(float *y, const float *x, uint32_t n)
{
    float in[TD_LANES] = {0}, out[TD_LANES];
    for (uint32_t i = 0; i < n; i += TD_LANES) {
        uint32_t m = n - i < TD_LANES ? n - i : TD_LANES;
        memcpy(in, x + i, m * sizeof *x);
        v_store(out, v_exp(v_load(in)));
        memcpy(y + i, out, m * sizeof *y);
    }
}

/* ---- matrix product
 * --------------------------------------------------------------------------------------------------- */

/* One kernel a shape, R rows by P panels, with every accumulator a named variable so that it lives in a register. */
#define ROWS_1(F, X)   F(0, X)
#define ROWS_2(F, X)   ROWS_1(F, X) F(1, X)
#define ROWS_3(F, X)   ROWS_2(F, X) F(2, X)
#define ROWS_4(F, X)   ROWS_3(F, X) F(3, X)
#define ROWS_5(F, X)   ROWS_4(F, X) F(4, X)
#define ROWS_6(F, X)   ROWS_5(F, X) F(5, X)
#define PANELS_1(F, r) F(r, 0)
#define PANELS_2(F, r) PANELS_1(F, r) F(r, 1)
#define PANELS_3(F, r) PANELS_2(F, r) F(r, 2)
#define PANELS_4(F, r) PANELS_3(F, r) F(r, 3)

#define DECLARE(r, p)          vf c##r##p = v_zero();
#define ZERO(r, p)             c##r##p = v_zero();
#define LOAD_C(r, p)           c##r##p = v_load(c[r] + (p)*TD_LANES);
#define FMA(r, p)              c##r##p = v_fma(x##r, w##p, c##r##p);
#define STORE(r, p)            v_store(to[r] + (p)*TD_LANES, c##r##p);
#define PUSH(r, p)             top[(r)*WIDTH + (p)] = c##r##p;
#define POP_ADD(r, p)          c##r##p = v_add(top[(r)*WIDTH + (p)], c##r##p);
#define ROW_PTR(r, _)          const float *a##r = g->a[row + (r)];
#define ROW_X(r, _)            vf x##r = v_set(a##r[k]);
#define FMA_ROW(r, PANELS)     PANELS(FMA, r)
#define DECLARE_ROW(r, PANELS) PANELS(DECLARE, r)
#define ZERO_ROW(r, PANELS)    PANELS(ZERO, r)
#define LOAD_C_ROW(r, PANELS)  PANELS(LOAD_C, r)
#define STORE_ROW(r, PANELS)   PANELS(STORE, r)
#define PUSH_ROW(r, PANELS)    PANELS(PUSH, r)
#define POP_ADD_ROW(r, PANELS) PANELS(POP_ADD, r)
#define XFMA_ROW(r, PANELS)    ROW_X(r, _) FMA_ROW(r, PANELS)

/* Measured on Zen 3: 94 % of the peak instead of 80. */
#if defined(__clang__)
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_8 _Pragma("unroll 8")
#else
#define UNROLL_4 _Pragma("GCC unroll 4")
#define UNROLL_8 _Pragma("GCC unroll 8")
#endif

#define PANEL_PTR(_, p) const W_TYPE *b##p = w + (size_t)(p)*panel;
#define LOAD_W(_, p)    vf w##p = W_LOAD(b##p + (size_t)k * TD_LANES);

/* to: rows to store into; c: the same rows, read when accumulating. The stack of the halving tree is at most log2(64)
 * deep. */
#define KERNEL(R, P)                                                                                                   \
    static void NAME(kernel_##R##x##P)(const struct td_gemm *g, uint32_t row, const W_TYPE *w, float *const *to)       \
    {                                                                                                                  \
        size_t panel = (size_t)(g->panel_k != 0 ? g->panel_k : g->k) * TD_LANES;                                       \
        ROWS_##R(ROW_PTR, _) PANELS_##P(PANEL_PTR, _) ROWS_##R(DECLARE_ROW, PANELS_##P) if (g->pieces == NULL)         \
        {                                                                                                              \
            float *const *c = to;                                                                                      \
            if (g->accumulate) {                                                                                       \
                ROWS_##R(LOAD_C_ROW, PANELS_##P)                                                                       \
            }                                                                                                          \
            UNROLL_4 for (uint32_t k = 0; k < g->k; k++) { PANELS_##P(LOAD_W, _) ROWS_##R(XFMA_ROW, PANELS_##P) }      \
        }                                                                                                              \
        else                                                                                                           \
        {                                                                                                              \
            enum { WIDTH = (P) };                                                                                      \
            vf stack[8][(R) * (P)], *top = stack[0];                                                                   \
            uint32_t k = 0, depth = 0;                                                                                 \
            for (uint32_t i = 0;; i++) {                                                                               \
                UNROLL_4 for (uint32_t end = g->pieces->end[i]; k < end; k++)                                          \
                {                                                                                                      \
                    PANELS_##P(LOAD_W, _) ROWS_##R(XFMA_ROW, PANELS_##P)                                               \
                }                                                                                                      \
                for (uint32_t j = 0; j < g->pieces->merges[i]; j++) {                                                  \
                    top = stack[--depth];                                                                              \
                    ROWS_##R(POP_ADD_ROW, PANELS_##P)                                                                  \
                }                                                                                                      \
                if (i + 1 == g->pieces->n) break;                                                                      \
                top = stack[depth++];                                                                                  \
                ROWS_##R(PUSH_ROW, PANELS_##P) ROWS_##R(ZERO_ROW, PANELS_##P)                                          \
            }                                                                                                          \
        }                                                                                                              \
        ROWS_##R(STORE_ROW, PANELS_##P)                                                                                \
    }

#define W_TYPE  uint16_t
#define W_LOAD  v_load_panel
#define NAME(x) x##_bf16
#include "kernels/cpu/gemm_body_int.h"
#undef W_TYPE
#undef W_LOAD
#undef NAME

#define W_TYPE  float
#define W_LOAD  v_load
#define NAME(x) x##_f32
#include "kernels/cpu/gemm_body_int.h"
#undef W_TYPE
#undef W_LOAD
#undef NAME

/* ---- softmax
 * ------------------------------------------------------------------------------------------------------------ */

static void softmax_block(const struct td_softmax_block *b)
{
    const float log2_e = 0x1.715476p+0f;
    vf scale = v_set(b->scale * log2_e);
    for (uint32_t i = 0; i < b->m; i++) {
        float *s = b->s + (size_t)i * TD_KEYS;
        uint32_t lo = b->lo[i], hi = b->hi[i];
        if (lo >= hi) { /* nothing visible: exp would give 0, and the rescaling 1 */
            memset(s, 0, TD_KEYS * sizeof *s);
            continue;
        }
        for (uint32_t j = 0; j < lo; j++) s[j] = -INFINITY;
        for (uint32_t j = hi; j < TD_KEYS; j++) s[j] = -INFINITY;
        vf z0 = v_load(s), z1 = v_load(s + 16), z2 = v_load(s + 32), z3 = v_load(s + 48);
        float top = v_reduce_max(v_max(v_max(z0, z1), v_max(z2, z3))) * b->scale, old = b->max[i];
        if (old > top || top != top) top = old;
        float base = top == -INFINITY ? 0.0f : top; /* -inf - -inf is not what is meant */
        vf down = v_set(-base * log2_e);
        z0 = v_exp2_falling(v_fma(z0, scale, down));
        z1 = v_exp2_falling(v_fma(z1, scale, down));
        z2 = v_exp2_falling(v_fma(z2, scale, down));
        z3 = v_exp2_falling(v_fma(z3, scale, down));
        v_store(s, z0);
        v_store(s + 16, z1);
        v_store(s + 32, z2);
        v_store(s + 48, z3);
        float sum = v_reduce_add(v_add(v_add(z0, z1), v_add(z2, z3)));
        if (old != top) { /* equal: the factor is 1 */
            float f[TD_LANES], *o = b->o + (size_t)i * b->dim;
            vf shrink = v_exp2_falling(v_set((old - base) * log2_e));
            v_store(f, shrink);
            b->sum[i] *= f[0];
            for (uint32_t j = 0; j < b->dim; j += TD_LANES) v_store(o + j, v_mul(v_load(o + j), shrink));
            b->max[i] = top;
        }
        b->sum[i] += sum;
    }
}

static void divide(float *y, const float *x, float by, uint32_t n)
{
    uint32_t i = 0;
    for (; i + TD_LANES <= n; i += TD_LANES) v_store(y + i, v_div(v_load(x + i), v_set(by)));
    for (; i < n; i++) y[i] = x[i] / by;
}

/* ---- activation
 * ----------------------------------------------------------------------------------------------------------- */

/* gate * sigmoid(alpha gate) * (up + 1) after clamping; a NaN passes both clamps. */
static void swiglu(float *const *u, const float *h, uint32_t ld, const float *bias, uint32_t m, uint32_t n_units,
                   float alpha, float limit)
{
    vf lim = v_set(limit), neg_lim = v_set(-limit), neg_alpha = v_set(-alpha), one = v_set(1.0f);
    for (uint32_t i = 0; i < m; i++) {
        const float *p = h + (size_t)i * ld;
        for (uint32_t j = 0; j < n_units; j += TD_LANES) {
            vf gate = v_min(lim, v_add(v_load(p + 2 * j), v_load(bias + 2 * j)));
            vf up = v_add(v_load(p + 2 * j + TD_LANES), v_load(bias + 2 * j + TD_LANES));
            up = v_max(neg_lim, v_min(lim, up));
            vf sig = v_div(one, v_add(one, v_exp(v_mul(neg_alpha, gate))));
            vf r = v_mul(v_mul(gate, sig), v_add(up, one));
            if (n_units - j >= TD_LANES) {
                v_store(u[i] + j, r);
            } else {
                float f[TD_LANES];
                v_store(f, r);
                memcpy(u[i] + j, f, (n_units - j) * sizeof *f);
            }
        }
    }
}

/* ---- rows
 * ---------------------------------------------------------------------------------------------------------------- */

/* Eight sums side by side keep the adders busy; their order is fixed, so a row's bits depend on the row alone. */
static void norm(float *y, const float *x, const float *w, uint32_t dim, float eps)
{
    double sum[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8)
        for (uint32_t j = 0; j < 8; j++) sum[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < dim; i++) sum[0] += (double)x[i] * (double)x[i];
    double all = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    float inv = (float)(1.0 / sqrt(all / dim + (double)eps));
    for (i = 0; i + TD_LANES <= dim; i += TD_LANES)
        v_store(y + i, v_mul(v_mul(v_load(x + i), v_set(inv)), v_load(w + i)));
    for (; i < dim; i++) y[i] = x[i] * inv * w[i];
}

static void add(float *x, const float *y, const float *bias, uint32_t n)
{
    uint32_t i = 0;
    for (; i + TD_LANES <= n; i += TD_LANES)
        v_store(x + i, v_add(v_load(x + i), v_add(v_load(y + i), v_load(bias + i))));
    for (; i < n; i++) x[i] += y[i] + bias[i];
}

static void add_weighted(float *x, const float *y, const float *bias, float weight, uint32_t n)
{
    uint32_t i = 0;
    for (; i + TD_LANES <= n; i += TD_LANES)
        v_store(x + i, v_add(v_load(x + i), v_mul(v_set(weight), v_add(v_load(y + i), v_load(bias + i)))));
    for (; i < n; i++) x[i] += weight * (y[i] + bias[i]);
}

/* ---- heads
 * --------------------------------------------------------------------------------------------------------------- */

static void bias_rotate(float *v, const float *bias, const float *cos, const float *sin, uint32_t dim)
{
    uint32_t half = dim / 2, j = 0;
    for (uint32_t i = 0; i < dim; i += TD_LANES) v_store(v + i, v_add(v_load(v + i), v_load(bias + i)));
    if (cos == NULL) return;
    for (; j + TD_LANES <= half; j += TD_LANES) {
        vf lo = v_load(v + j), hi = v_load(v + j + half), c = v_load(cos + j), s = v_load(sin + j);
        v_store(v + j, v_sub(v_mul(lo, c), v_mul(hi, s)));
        v_store(v + j + half, v_add(v_mul(hi, c), v_mul(lo, s)));
    }
    for (; j < half; j++) {
        float lo = v[j], hi = v[j + half];
        v[j] = lo * cos[j] - hi * sin[j];
        v[j + half] = hi * cos[j] + lo * sin[j];
    }
}

static void store(void *to, const float *v, uint32_t n, enum td_dtype type)
{
    for (uint32_t i = 0; i < n; i += TD_LANES)
        if (type == TD_F32)
            v_store((float *)to + i, v_load(v + i));
        else
            v_store_bf16((uint16_t *)to + i, v_load(v + i));
}

/* ---- pages into panels
 * ------------------------------------------------------------------------------------------------------ */

#if defined(TD_LANES_SCALAR)
INLINE float element(const void *row, uint32_t i, enum td_dtype type)
{
    return type == TD_F32 ? ((const float *)row)[i] : td_bf16_to_f32(((const uint16_t *)row)[i]);
}
#endif

#if defined(TD_LANES_AVX512) || defined(TD_LANES_AVX2)
/* r[i][j] becomes r[j][i]. */
INLINE void transpose8x8(__m256 r[8])
{
    __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
    __m256 a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
    __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
    __m256 a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
    __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
    __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
    __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    r[0] = _mm256_permute2f128_ps(b0, b4, 0x20);
    r[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
    r[2] = _mm256_permute2f128_ps(b2, b6, 0x20);
    r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
    r[4] = _mm256_permute2f128_ps(b0, b4, 0x31);
    r[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
    r[6] = _mm256_permute2f128_ps(b2, b6, 0x31);
    r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
}

/* to[d][0..8) = rows[0..8)[d], d from 0 to dim. Of bf16, pairs of dimensions travel as one element and part at the end.
 */
INLINE void transpose8(float *to, const void *const *rows, uint32_t dim, enum td_dtype type)
{
    uint32_t per = type == TD_F32 ? 1 : 2; /* dimensions in 32 bits */
    for (uint32_t d = 0; d < dim; d += 8 * per) {
        __m256 r[8];
        UNROLL_8 for (uint32_t i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)rows[i] + d / per);
        transpose8x8(r);
        UNROLL_8 for (uint32_t i = 0; i < 8; i++)
        {
            float *at = to + (size_t)(d + i * per) * TD_LANES;
            __m256i x = _mm256_castps_si256(r[i]);
            if (type == TD_F32) {
                _mm256_storeu_ps(at, r[i]);
            } else {
                _mm256_storeu_ps(at, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)));
                _mm256_storeu_ps(at + TD_LANES,
                                 _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u))));
            }
        }
    }
}
#endif

/* Panels past the last row are left alone. */
INLINE void pack_keys_as(float *to, const void *const *rows, uint32_t n, uint32_t dim, enum td_dtype type)
{
    static const float zeros[TD_HEAD_MAX];
    for (uint32_t first = 0; first < n; first += TD_LANES) {
        float *panel = to + (size_t)first * dim;
        const void *all[TD_LANES];
        for (uint32_t j = 0; j < TD_LANES; j++) all[j] = first + j < n ? rows[first + j] : zeros;
#if defined(TD_LANES_AVX512) || defined(TD_LANES_AVX2)
        transpose8(panel, all, dim, type);
        transpose8(panel + 8, all + 8, dim, type);
#else
        for (uint32_t j = 0; j < TD_LANES; j++)
            for (uint32_t d = 0; d < dim; d++) panel[(size_t)d * TD_LANES + j] = element(all[j], d, type);
#endif
    }
}

static void pack_keys(float *to, const void *const *rows, uint32_t n, uint32_t dim, enum td_dtype type)
{
    if (type == TD_F32)
        pack_keys_as(to, rows, n, dim, TD_F32);
    else
        pack_keys_as(to, rows, n, dim, TD_BF16);
}

static void pack_values(float *to, const void *const *rows, uint32_t n, uint32_t dim, enum td_dtype type)
{
    for (uint32_t d = 0; d < dim; d += TD_LANES) {
        float *panel = to + (size_t)d * n;
        if (type == TD_F32)
            for (uint32_t j = 0; j < n; j++) v_store(panel + (size_t)j * TD_LANES, v_load((const float *)rows[j] + d));
        else
            for (uint32_t j = 0; j < n; j++)
                v_store(panel + (size_t)j * TD_LANES, v_load_bf16((const uint16_t *)rows[j] + d));
    }
}

const struct td_micro MICRO_TABLE = {
    .name = MICRO_NAME,
    .gemm_bf16 = gemm_bf16,
    .gemm_f32 = gemm_f32,
    .softmax_block = softmax_block,
    .divide = divide,
    .exp = exp_n,
    .swiglu = swiglu,
    .bias_rotate = bias_rotate,
    .norm = norm,
    .add = add,
    .add_weighted = add_weighted,
    .store = store,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
};
