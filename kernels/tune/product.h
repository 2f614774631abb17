/* Which kernel multiplies: plain C, so that it is tested without a GPU. */
#ifndef TD_KERNELS_TUNE_PRODUCT_H
#define TD_KERNELS_TUNE_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

enum td_product_tile {
#define X(bm, bn, stages, most_rows, most_k, least_fill, most_fill) TD_PRODUCT_##bm##x##bn,
#include "kernels/tune/product.def"
#undef X
    TD_PRODUCT_N_TILES
};

/* Rows up to which the kernel that reads W once for 8 rows at a time wins: of one matrix, and of experts, which have a
 * few of the batch's rows each. */
#define TD_PRODUCT_SKINNY_ROWS    8u
#define TD_PRODUCT_SKINNY_GROUPED 64u

struct td_product_row {
    uint32_t bm, bn, stages, most_rows, most_k, least_fill, most_fill;
};
static const struct td_product_row td_product_rows[] = {
#define X(bm, bn, stages, most_rows, most_k, least_fill, most_fill)                                                    \
    {bm, bn, stages, most_rows, most_k, least_fill, most_fill},
#include "kernels/tune/product.def"
#undef X
};

/* n_row_tiles: of grouped rows, in tiles of 128; 0: one matrix, n_rows rows. */
static inline enum td_product_tile td_product_pick(uint32_t n_rows, uint32_t n_row_tiles, uint32_t n_cols, uint32_t k,
                                                   uint32_t n_sms)
{
    for (uint32_t i = 0; i + 1 < TD_PRODUCT_N_TILES; i++) {
        const struct td_product_row *r = &td_product_rows[i];
        if (n_row_tiles != 0 && r->bm != 128) continue;
        uint64_t row_tiles = n_row_tiles != 0 ? n_row_tiles : (n_rows + r->bm - 1) / r->bm;
        uint64_t fill = 100 * row_tiles * ((n_cols + r->bn - 1) / r->bn) / n_sms;
        if (n_rows <= r->most_rows && k <= r->most_k && fill >= r->least_fill && fill <= r->most_fill)
            return (enum td_product_tile)i;
    }
    return (enum td_product_tile)(TD_PRODUCT_N_TILES - 1);
}

/* How many thread blocks divide k among them (gemm_split.cuh), tiles of 64 x 64; 1: whole tiles are better. No more
 * than one block a multiprocessor, give or take a few: clusters of a size that is no power of two do not fill the rest.
 */
#define TD_PRODUCT_SPLIT_ROWS 128u
static inline uint32_t td_product_split(uint32_t n_rows, uint32_t n_cols, uint32_t k, uint32_t n_sms,
                                        bool is_batch_invariant)
{
    static const uint32_t splits[] = {6, 3, 2};
    uint32_t tiles = ((n_rows + 63) / 64) * ((n_cols + 63) / 64);
    if (is_batch_invariant || n_rows > TD_PRODUCT_SPLIT_ROWS || k < 1024) return 1;
    for (uint32_t i = 0; i < sizeof splits / sizeof splits[0]; i++)
        if (tiles * splits[i] <= n_sms + n_sms / 32) return splits[i];
    return 1;
}

/* Of a few rows of one matrix (few.cuh): columns a thread block takes, so that there is about one a multiprocessor; 0:
 * another kernel is better. */
static inline uint32_t td_product_few(uint32_t n_rows, uint32_t n_cols, uint32_t k, uint32_t n_sms,
                                      bool is_batch_invariant)
{
    uint32_t groups = (n_cols + 8 * n_sms - 1) / (8 * n_sms);
    if (is_batch_invariant || n_rows > 8 || n_cols % 8 != 0 || k % 8 != 0 || groups > 5) return 0;
    if (groups > 3) return k <= 3072 ? 40 : 0;
    return k > 4096 ? 0 : groups > 1 ? 24 : 8;
}

/* Many rows of one matrix: pairs of thread blocks (gemm_pairs.cuh), which pay off where there are enough columns for
 * all. */
#define TD_PRODUCT_PAIRS_BN 128
static inline bool td_product_is_paired(uint32_t n_rows, uint32_t n_cols) { return n_rows > 128 && n_cols >= 1024; }

/* W in FP8: columns a thread block of the kernel for a few rows, or rows and columns of a tile. */
enum td_fp8_kernel { TD_FP8_FEW_24, TD_FP8_FEW_40, TD_FP8_64x32, TD_FP8_64x128, TD_FP8_128x128 };
static inline enum td_fp8_kernel td_product_fp8(uint32_t n_rows, uint32_t n_cols, uint32_t k, uint32_t n_sms,
                                                bool is_batch_invariant)
{
    if (!is_batch_invariant && n_rows <= 8 && n_cols % 8 == 0 && k <= 4096)
        return n_cols > 24 * n_sms && k <= 3072 ? TD_FP8_FEW_40 : TD_FP8_FEW_24;
    if (n_rows > 64) return TD_FP8_128x128;
    return n_cols >= 256 * n_sms ? TD_FP8_64x128 : TD_FP8_64x32;
}
static inline const char *td_fp8_kernel_name(enum td_fp8_kernel k)
{
    static const char *const names[] = {"few columns_a_block=24", "few columns_a_block=40", "fp8w tile=64x32 stages=6",
                                        "fp8w tile=64x128 stages=3", "fp8w tile=128x128 stages=5"};
    return names[k];
}

static inline bool td_product_is_skinny(uint32_t n_rows, bool is_grouped, uint32_t n_cols, bool is_batch_invariant)
{
    return !is_batch_invariant && n_cols % 2 == 0 &&
           n_rows <= (is_grouped ? TD_PRODUCT_SKINNY_GROUPED : TD_PRODUCT_SKINNY_ROWS);
}

#endif
