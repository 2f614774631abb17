/* Where the FP8 experts keep what lies between their kernels, and how batches are cut into tiles. Plain C: tests look
 * at it too. */
#ifndef TD_KERNELS_CUDA_MOE_SCRATCH_H
#define TD_KERNELS_CUDA_MOE_SCRATCH_H

#include "kernels/expert_format.h"

/* Some rows of one expert, in the padded order: tile i's rows are those from i * tile_rows on. */
struct slot_tile {
    uint32_t expert, n;
};

struct sorted {
    uint32_t *slot_of;       /* [tiles * tile_rows] the slot at a padded row; nothing where a tile has no row */
    uint32_t *padded_of;     /* [slots] where a slot is in that order, if its expert is here; may be NULL */
    struct slot_tile *tiles; /* [n_tiles] */
    uint32_t *n_tiles;
};

struct moe_scratch {
    float *logits; /* [T, E]; of few rows, one such a slice */
    struct sorted sorted;
    uint8_t *x, *u_codes; /* [tiles][k_tiles][tile_rows][128] E4M3, swizzled */
    float *sx, *su;       /* [tiles][k_tiles][tile_rows] */
    uint16_t *u;          /* [tiles * tile_rows][I] f16; of fixed tiles */
    float *carries;       /* of small tiles: sums that blocks leave for others, and what blocks tell each other */
    uint32_t *flags;
    uint32_t tile_rows, n_tiles;
    size_t bytes;
};

#define MOE_SMALLEST_TILE 8u
#define MOE_MANY_TILE     128u
#define MOE_FIXED_TILE    64u /* of every batch, where rows must not depend on their company */
#define MOE_BF16_FEW      16u /* the two tiles of bf16 activations */
#define MOE_BF16_MANY     64u
#define MOE_FEW_ROWS      128u /* and up to MOE_FEW_SLOTS slots: one block routes and sorts */
#define MOE_FEW_SLOTS     1024u
#define MOE_ROUTER_SLICES 18u /* of k, whose logits it adds */
#define MOE_FEW_TILE      32u /* up to here one kernel makes both products */
#define MOE_FEW_BLOCKS    144u
#define MOE_FEW_FLAGS     (2 * MOE_FEW_BLOCKS + 1)

/* Tokens of a tile, for a batch whose experts have n_rows * top_k / n_experts rows on average: enough for most experts
 * to need one tile, as few as can be, since they all cost. */
static inline uint32_t moe_tile_rows(uint32_t n_rows, uint32_t top_k, uint32_t n_experts)
{
    static const struct {
        uint32_t per_expert, tile_rows;
    } regimes[] = {{5, 16}, {18, 32}, {UINT32_MAX, MOE_MANY_TILE}};
    if (n_rows <= MOE_SMALLEST_TILE) return MOE_SMALLEST_TILE; /* an expert has each row once at most */
    uint32_t per_expert = (n_rows * top_k + n_experts - 1) / n_experts, i = 0;
    while (per_expert > regimes[i].per_expert) i++;
    return regimes[i].tile_rows;
}

/* Every expert may leave one tile part empty. */
static inline uint32_t moe_tiles_max(uint32_t slots, uint32_t n_experts, uint32_t tile_rows)
{
    uint32_t partial = slots < n_experts ? slots : n_experts;
    return (slots - partial) / tile_rows + partial;
}

static inline void *moe_take(char *base, size_t *at, size_t bytes)
{
    void *p = base + *at;
    *at += (bytes + 1023) / 1024 * 1024;
    return p;
}

static inline struct moe_scratch moe_lay_out_tiles(char *base, uint32_t tile_rows, uint32_t n_rows, uint32_t top_k,
                                                   uint32_t n_experts, uint32_t hidden, uint32_t intermediate)
{
    struct moe_scratch z;
    uint32_t slots = n_rows * top_k;
    size_t at = 0, kh = (hidden + TD_XT - 1) / TD_XT, ki = (intermediate + TD_XT - 1) / TD_XT;
    z.tile_rows = tile_rows;
    z.n_tiles = moe_tiles_max(slots, n_experts, z.tile_rows);
    bool is_small = z.tile_rows <= MOE_FEW_TILE;
    size_t rows = (size_t)z.n_tiles * z.tile_rows;
    z.x = (uint8_t *)moe_take(base, &at, rows * kh * TD_XT);
    z.u_codes = (uint8_t *)moe_take(base, &at, rows * ki * TD_XT);
    z.sx = (float *)moe_take(base, &at, rows * kh * sizeof(float));
    z.su = (float *)moe_take(base, &at, rows * ki * sizeof(float));
    z.u = (uint16_t *)moe_take(base, &at,
                               is_small || z.tile_rows == MOE_MANY_TILE ? 0 : rows * intermediate * sizeof(uint16_t));
    z.logits = (float *)moe_take(
        base, &at, (size_t)n_rows * n_experts * sizeof(float) * (n_rows > MOE_FEW_ROWS ? 1 : MOE_ROUTER_SLICES));
    z.sorted.slot_of = (uint32_t *)moe_take(base, &at, rows * sizeof(uint32_t));
    z.sorted.padded_of = (uint32_t *)moe_take(base, &at, slots * sizeof(uint32_t));
    z.sorted.tiles = (struct slot_tile *)moe_take(base, &at, z.n_tiles * sizeof(struct slot_tile));
    z.sorted.n_tiles = (uint32_t *)moe_take(base, &at, sizeof(uint32_t));
    z.carries =
        (float *)moe_take(base, &at, is_small ? (size_t)2 * MOE_FEW_BLOCKS * z.tile_rows * 256 * sizeof(float) : 0);
    z.flags = (uint32_t *)moe_take(base, &at, MOE_FEW_FLAGS * sizeof(uint32_t));
    z.bytes = at;
    return z;
}

static inline struct moe_scratch moe_lay_out(char *base, uint32_t n_rows, uint32_t top_k, uint32_t n_experts,
                                             uint32_t hidden, uint32_t intermediate)
{
    return moe_lay_out_tiles(base, moe_tile_rows(n_rows, top_k, n_experts), n_rows, top_k, n_experts, hidden,
                             intermediate);
}

static inline uint32_t moe_bf16_tile_rows(bool is_fixed, uint32_t n_rows, uint32_t top_k, uint32_t n_experts)
{
    return !is_fixed && moe_tile_rows(n_rows, top_k, n_experts) <= MOE_BF16_FEW ? MOE_BF16_FEW : MOE_BF16_MANY;
}

/* With bf16 activations: x and u_codes are bf16, [tiles][2 k_tiles][tile_rows][64], as moe_bf16.cu says; the rest that
 * belongs to FP8 is not there. */
static inline struct moe_scratch moe_lay_out_bf16(char *base, bool is_fixed, uint32_t n_rows, uint32_t top_k,
                                                  uint32_t n_experts, uint32_t hidden, uint32_t intermediate)
{
    struct moe_scratch z;
    size_t at = 0, kh = (hidden + TD_XT - 1) / TD_XT, ki = (intermediate + TD_XT - 1) / TD_XT;
    memset(&z, 0, sizeof z);
    z.tile_rows = moe_bf16_tile_rows(is_fixed, n_rows, top_k, n_experts);
    z.n_tiles = moe_tiles_max(n_rows * top_k, n_experts, z.tile_rows);
    size_t rows = (size_t)z.n_tiles * z.tile_rows;
    z.x = (uint8_t *)moe_take(base, &at, rows * kh * TD_XT * 2);
    z.u_codes = (uint8_t *)moe_take(base, &at, rows * ki * TD_XT * 2);
    z.logits = (float *)moe_take(
        base, &at, (size_t)n_rows * n_experts * sizeof(float) * (n_rows > MOE_FEW_ROWS ? 1 : MOE_ROUTER_SLICES));
    z.sorted.slot_of = (uint32_t *)moe_take(base, &at, rows * sizeof(uint32_t));
    z.sorted.tiles = (struct slot_tile *)moe_take(base, &at, z.n_tiles * sizeof(struct slot_tile));
    z.sorted.n_tiles = (uint32_t *)moe_take(base, &at, sizeof(uint32_t));
    z.bytes = at;
    return z;
}

#endif
