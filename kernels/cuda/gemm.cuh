/* Y = X W^T for many rows, bf16 in, f32 sums: tiles of BM rows by BN columns. A producer warp streams boxes of X and W
 * through a ring of stages with the copy engine; warpgroups multiply 64 rows each. For few rows, tiles of 32 columns:
 * two thread blocks a multiprocessor, so that reading W keeps all of them busy. Every output is one chain over k in
 * steps of 16, whatever the tile: rows do not depend on their company.
 *
 * Grouped: a list of tiles, each some rows of one expert, whose matrix lies `expert` times w_rows further down. */
#ifndef TD_KERNELS_CUDA_GEMM_CUH
#define TD_KERNELS_CUDA_GEMM_CUH

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/tune/product.h"

#define GEMM_BM 128 /* of grouped tiles */
#define GEMM_BK 64

struct gemm_tile {
    uint32_t expert, first, n; /* rows first .. first + n - 1 of X; n 0: nothing */
};

struct gemm_shape {
    uint32_t n_rows, k;
    uint32_t w_begin, n_cols;      /* rows of W: the columns of Y */
    uint32_t w_rows;               /* of one expert's matrix */
    const struct gemm_tile *tiles; /* NULL: one matrix */
    uint32_t n_row_tiles, n_col_tiles;
    uint32_t x_box; /* rows of X in a box: fewer than GEMM_BM where there are fewer, since rows outside cost time */
};

template <int BM, int BN, int STAGES> struct gemm_smem {
    alignas(1024) uint8_t x[STAGES][BM * GEMM_BK * 2];
    alignas(1024) uint8_t w[STAGES][BN * GEMM_BK * 2];
    uint64_t full[STAGES], empty[STAGES];
};

/* A warpgroup's 64 rows of a tile that has n rows from row `first` of Y on, and columns from col on. first_col: where a
 * tile of 32 columns begins that has 16 of each half of a head. */
template <int BN, class Epilogue>
static __device__ __forceinline__ void gemm_store(const Epilogue &store, const float (&d)[BN / 2], uint32_t first,
                                                  uint32_t n, uint32_t wg, uint32_t col, uint32_t first_col,
                                                  uint32_t expert)
{
    constexpr bool is_split = BN == 32 && Epilogue::pairs == PAIRS_HEAD;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = wg * 64 + warp * 16 + lane / 4 + h * 8;
        if (row >= n) continue;
        const uint32_t r = first + row, c = col + lane % 4 * 2;
        if constexpr (Epilogue::pairs == PAIRS_NEXT) {
#pragma unroll
            for (int i = 0; i < BN / 8; i++) store(r, c + i * 8, d[4 * i + 2 * h], d[4 * i + 2 * h + 1], expert);
        } else if constexpr (is_split) {
            const auto at = store.row(r, first_col % 64 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 2; i++)
                store.two(at, i, first_col + lane % 4 * 2 + i * 8, make_float2(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]),
                          make_float2(d[4 * (i + 2) + 2 * h], d[4 * (i + 2) + 2 * h + 1]));
        } else {
            const auto at = store.row(r, lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < BN / 8; i++) {
                if (i % 8 >= 4) continue;
                store.two(at, i % 8, c + i * 8, make_float2(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]),
                          make_float2(d[4 * (i + 4) + 2 * h], d[4 * (i + 4) + 2 * h + 1]));
            }
        }
    }
}

template <int BM, int BN, int STAGES, class Epilogue>
static __global__ void __launch_bounds__(128 + BM * 2, BN == 32 ? 2 : 1)
    gemm(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const gemm_shape g,
         const Epilogue store)
{
    extern __shared__ uint8_t raw[];
    auto &sm =
        *reinterpret_cast<gemm_smem<BM, BN, STAGES> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    /* Blocks that run together share rows and columns: groups of 16 row tiles, columns inside. */
    const uint32_t group = 16, per_group = group * g.n_col_tiles, in = blockIdx.x % per_group;
    const uint32_t first_tile = blockIdx.x / per_group * group, n_in = min(group, g.n_row_tiles - first_tile);
    const uint32_t row_tile = first_tile + in % n_in, col = in / n_in * BN;
    let_next();
    /* A tile of 32 columns has 16 of each half of a head, where those are the pairs. */
    constexpr bool is_split = BN == 32 && Epilogue::pairs == PAIRS_HEAD;
    const uint32_t first_col = is_split ? col / 64 * 64 + col % 64 / 2 : col;
    gemm_tile tile = {0, row_tile * BM, g.n_rows - row_tile * BM};
    if (g.tiles != nullptr) {
        before();
        tile = g.tiles[row_tile];
    }
    if (tile.n == 0) return;
    const uint32_t n_steps = (g.k + GEMM_BK - 1) / GEMM_BK;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], BM / 64);
        }
        barrier_init_fence();
        map_prefetch(&x_map);
        map_prefetch(&w_map);
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        if constexpr (BN != 32) regs_less<40>();
        if (threadIdx.x == 0) {
            const int w_row = (int)(tile.expert * g.w_rows + g.w_begin + first_col);
            auto copy_w = [&](uint32_t st, uint32_t step) {
                copy_box_2d(sm.w[st], &w_map, &sm.full[st], (int)(step * GEMM_BK), w_row);
                if (is_split) copy_box_2d(sm.w[st] + 16 * 128, &w_map, &sm.full[st], (int)(step * GEMM_BK), w_row + 32);
            };
            const uint32_t bytes = (g.x_box + BN) * GEMM_BK * 2, n_early = min(n_steps, (uint32_t)STAGES);
            for (uint32_t i = 0; i < n_early; i++) { /* W is nobody's output */
                barrier_expect(&sm.full[i], bytes);
                copy_w(i, i);
            }
            before();
            for (uint32_t i = 0; i < n_early; i++)
                copy_box_2d(sm.x[i], &x_map, &sm.full[i], (int)(i * GEMM_BK), (int)tile.first);
            for (uint32_t i = n_early; i < n_steps; i++) {
                uint32_t st = i % STAGES, round = i / STAGES;
                barrier_wait(&sm.empty[st], (round & 1) ^ 1);
                barrier_expect(&sm.full[st], bytes);
                copy_box_2d(sm.x[st], &x_map, &sm.full[st], (int)(i * GEMM_BK), (int)tile.first);
                copy_w(st, i);
            }
        }
        return;
    }
    if constexpr (BN != 32) regs_more<232>();
    const uint32_t wg = threadIdx.x / 128 - 1;
    float d[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; i++) d[i] = 0;
    for (uint32_t i = 0; i < n_steps; i++) {
        uint32_t st = i % STAGES, round = i / STAGES;
        barrier_wait(&sm.full[st], round & 1);
        uint64_t x = tile_desc(sm.x[st] + wg * 64 * GEMM_BK * 2), w = tile_desc(sm.w[st]);
        keep(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < GEMM_BK / 16; k++) wgmma_ss(d, x + k * 2, w + k * 2, false);
        wgmma_commit();
        keep(d);
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x % 128 == 0) barrier_arrive(&sm.empty[(i - 1) % STAGES]);
    }
    wgmma_wait<0>();
    keep(d);
    before();

    gemm_store<BN>(store, d, tile.first, tile.n, wg, col, first_col, tile.expert);
}

template <int BM, int BN, int STAGES, class Epilogue>
static enum td_status gemm_start(const struct td_cuda_stream *s, const void *x, uint64_t x_rows, const void *w,
                                 uint64_t w_rows_all, gemm_shape g, const Epilogue &store, const char *what)
{
    CUtensorMap x_map, w_map;
    g.x_box = g.tiles != nullptr || g.n_rows >= BM ? BM : td_ceil_div(g.n_rows, 8) * 8;
    enum td_status st = td_cuda_map_rows(&x_map, x, x_rows, g.k, g.k, g.x_box);
    if (st == TD_OK)
        st = td_cuda_map_rows(&w_map, w, w_rows_all, g.k, g.k, BN == 32 && Epilogue::pairs == PAIRS_HEAD ? 16 : BN);
    if (st != TD_OK) return st;
    if (g.tiles == nullptr) g.n_row_tiles = td_ceil_div(g.n_rows, BM);
    g.n_col_tiles = td_ceil_div(g.n_cols, BN);
    const int bytes = sizeof(gemm_smem<BM, BN, STAGES>) + 1024;
    auto kernel = gemm<BM, BN, STAGES, Epilogue>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e == cudaSuccess)
        e = launch(kernel, g.n_row_tiles * g.n_col_tiles, 128 + BM * 2, bytes, s->s, x_map, w_map, g, store);
    return td_cuda_status(e, what);
}

/* x [x_rows, k]; w: the first expert's matrix, of w_rows_all rows in all. The tile is kernels/tune/product.def's
 * choice. */
template <class Epilogue>
static enum td_status gemm_run(const struct td_cuda_stream *s, const void *x, uint64_t x_rows, const void *w,
                               uint64_t w_rows_all, const gemm_shape &g, const Epilogue &store, const char *what)
{
    if (g.k % 8 != 0) return TD_E_UNSUPPORTED;
    switch (td_product_pick(g.n_rows, g.tiles != nullptr ? g.n_row_tiles : 0, g.n_cols, g.k, (uint32_t)s->n_sms)) {
#if TD_TUNE_ONE /* a quick build: the general row alone */
    default: return gemm_start<128, 64, 8>(s, x, x_rows, w, w_rows_all, g, store, what);
#else
#define X(bm, bn, stages, most_rows, most_k, least_fill, most_fill)                                                    \
    case TD_PRODUCT_##bm##x##bn:                                                                                       \
        return gemm_start<bm, bn, stages>(s, x, x_rows, w, w_rows_all, g, store, what);
#include "kernels/tune/product.def"
#undef X
    default: return TD_E_UNSUPPORTED;
#endif
    }
}

#endif
