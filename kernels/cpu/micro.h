/* The inner loops of the CPU backend, once per instruction set. All sets give the same bits: the same operations on 16
 * lanes in the same order (micro_body_int.h is compiled for each), only wider or narrower. */
#ifndef TD_KERNELS_CPU_MICRO_H
#define TD_KERNELS_CPU_MICRO_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/args.h"

#define TD_LANES    16u /* columns of a panel */
#define TD_KEYS     64u /* keys of an attention block; absolute, part of the definition of the result */
#define TD_HEAD_MAX 256u

/* Where column c of a bf16 panel is among the 16 of a row: columns c and c + 8 share 32 bits, so that widening them
 * takes one shift and one mask. Panels of f32 are in order. */
static inline uint32_t td_panel_slot(uint32_t c) { return c % 8 * 2 + c / 8; }

/* c[i][0..n_cols) = sum over k of a[i][k] w[k][..]: for each element a chain of fused multiply-adds in rising k, cut
 * into pieces if pieces is not NULL. w holds ceil(n_cols / 16) panels [k][16], bf16 or f32. */
struct td_gemm {
    const float *const *a; /* [m] rows of k */
    float *const *c;       /* [m] rows of n_cols */
    const void *w;
    uint32_t m, n_cols, k;
    uint32_t panel_k; /* k of a whole panel, if the product takes only some of it; 0: k */
    const struct td_pieces *pieces;
    bool accumulate; /* the chain starts from c instead of 0; without pieces */
};

/* One block of online softmax for m rows. s[i][j] becomes exp(scale s - max), 0 outside [lo[i], hi[i]) and where that
 * is below 2^-126; o[i] is rescaled. */
struct td_softmax_block {
    float *s; /* [m][TD_KEYS] */
    const uint32_t *lo, *hi;
    float *max, *sum; /* [m] */
    float *o;         /* [m][dim] */
    uint32_t m, dim;
    float scale;
};

struct td_micro {
    const char *name;
    void (*gemm_bf16)(const struct td_gemm *g);
    void (*gemm_f32)(const struct td_gemm *g);
    void (*softmax_block)(const struct td_softmax_block *b);
    void (*divide)(float *y, const float *x, float by, uint32_t n);
    void (*exp)(float *y, const float *x, uint32_t n);
    /* h: n rows of pairs of panels (16 gates, 16 ups), bias alike; u[i]: n_units values. */
    void (*swiglu)(float *const *u, const float *h, uint32_t ld, const float *bias, uint32_t m, uint32_t n_units,
                   float alpha, float limit);
    /* v += bias, then, unless cos is NULL, half-split rotation: component j pairs with j + dim / 2. dim: multiple
     * of 16. */
    void (*bias_rotate)(float *v, const float *bias, const float *cos, const float *sin, uint32_t dim);
    /* y = x / sqrt(mean(x^2) + eps) * w, the mean in double. */
    void (*norm)(float *y, const float *x, const float *w, uint32_t dim, float eps);
    /* x += y + bias; x += weight * (y + bias). */
    void (*add)(float *x, const float *y, const float *bias, uint32_t n);
    void (*add_weighted)(float *x, const float *y, const float *bias, float weight, uint32_t n);
    /* n values (a multiple of 16) in a page's type. */
    void (*store)(void *to, const float *v, uint32_t n, enum td_dtype type);
    /* rows[n] of dim elements as stored. Keys become panels [dim][16] of 16 keys, missing ones of the last panel 0;
     * values become panels [n][16] of 16 dims. */
    void (*pack_keys)(float *to, const void *const *rows, uint32_t n, uint32_t dim, enum td_dtype type);
    void (*pack_values)(float *to, const void *const *rows, uint32_t n, uint32_t dim, enum td_dtype type);
};

extern const struct td_micro td_micro_scalar;
#if defined(__x86_64__)
extern const struct td_micro td_micro_avx2, td_micro_avx512;
#endif

/* name NULL: the best one this processor runs. NULL: there is none of that name, or the processor lacks it. */
const struct td_micro *td_micro_find(const char *name);

static inline float td_bf16_to_f32(uint16_t v)
{
    union {
        uint32_t u;
        float f;
    } x = {.u = (uint32_t)v << 16};
    return x.f;
}

/* Nearest, ties to even; NaN stays NaN. */
static inline uint16_t td_f32_to_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } x = {.f = f};
    if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40u);
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16);
}

#endif
