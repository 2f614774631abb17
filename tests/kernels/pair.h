/* The CPU's device and the GPU's side by side: an op runs on both with the same inputs, and what comes out is compared.
 * Buffers on the GPU lie between guard bands and begin as NaN, so writing beyond the end and leaving something out both
 * show. Activations are f32 on one side and bf16 on the other; inputs are values that both have. */
#ifndef TESTS_KERNELS_PAIR_H
#define TESTS_KERNELS_PAIR_H

#include "kernels/device.h"
#include "kernels/expert_format.h"

/* To the nearest, ties to even; finite values. */
static inline uint16_t to_bf16(float v)
{
    uint32_t bits = td_f32_bits(v);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
static inline float from_bf16(uint16_t v) { return td_bits_f32((uint32_t)v << 16); }

enum kind { F32, ACT, U32, RAW };

struct both { /* one buffer on each side */
    enum kind kind;
    size_t n; /* elements; bytes for RAW */
    void *cpu;
    char *gpu; /* inside its guards */
};

struct pair {
    struct td_device *cpu, *gpu;
    struct td_stream *cpu_stream, *gpu_stream;
    const struct td_ops *cpu_ops, *gpu_ops;
    uint64_t seed;
    double kl_slack; /* the small checkpoint's logits may diverge so many times as far; 0: once */
    int is_e4m3;     /* weights of order DENSE are values that FP8 has exactly */
    uint32_t n_checks, n_failed;
    bool is_quiet;        /* failures are expected: count them only */
    double worst;         /* share of the allowance, of the current op */
    struct both list[64]; /* open buffers */
    uint32_t n_list;
};

int pair_open(struct pair *p); /* 0: there is no GPU to use; the reason is printed */
int pair_open_as(struct pair *p, const struct td_device_options *gpu);
void pair_close(struct pair *p);

float pair_random(struct pair *p); /* about normal */
/* A buffer of random values times scale, with one in 256 eight times as large. */
struct both pair_values(struct pair *p, enum kind kind, size_t n, float scale);
/* A buffer that an op writes: NaN on both sides. */
struct both pair_out(struct pair *p, enum kind kind, size_t n);
struct both pair_u32(struct pair *p, const uint32_t *values, size_t n);
struct both pair_raw(struct pair *p, const void *host, size_t bytes);
/* A matrix of bf16 values on both sides, packed; bias if has_bias. */
void pair_weight(struct pair *p, uint32_t n_out, uint32_t n_in, enum td_row_order order, int has_bias, float scale,
                 struct td_weight *cpu, struct td_weight *gpu);
void pair_free_all(struct pair *p);

/* The two sides of b differ by at most `allowed` of the CPU's norm (L2), a row of dim elements by twice that, an
 * element by 16 times that of the row's largest; guards are whole. */
void pair_compare(struct pair *p, const struct both *b, uint32_t dim, double allowed, const char *what);
/* The opposite, for planted mistakes: fails if `what` would have passed. */
void pair_differs(struct pair *p, const struct both *b, uint32_t dim, double allowed, const char *mistake,
                  const char *what);
void pair_same(struct pair *p, const struct both *b, const char *what); /* U32, RAW: equal */
void pair_fail(struct pair *p, const char *format, ...);                /* counts a failure and prints it */
void pair_status(struct pair *p, enum td_status cpu, enum td_status gpu, const char *what);
void pair_report(struct pair *p, const char *op); /* a line for the op; resets worst */

#endif
