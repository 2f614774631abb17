/* Y = X W^T for some rows, more than a handful and fewer than what fills the card with whole tiles: a cluster of SPLIT thread
 * blocks shares a tile of 64 x 64 and divides k; block 0 adds their sums in order. Reads W once, on all multiprocessors.
 * The order of a sum depends on SPLIT, hence on the number of rows: not for --batch-invariant. */
#ifndef TD_KERNELS_CUDA_GEMM_SPLIT_CUH
#define TD_KERNELS_CUDA_GEMM_SPLIT_CUH

#include <cooperative_groups.h>

#include "kernels/cuda/gemm.cuh"

#define SPLIT_TILE   64
#define SPLIT_STAGES 6

template <int SPLIT, class Epilogue>
static __global__ void __launch_bounds__(256, 2)
    gemm_split(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const gemm_shape g,
               const Epilogue store)
{
    using smem = gemm_smem<SPLIT_TILE, SPLIT_TILE, SPLIT_STAGES>;
    static_assert(sizeof(smem) >= (SPLIT - 1) * SPLIT_TILE * SPLIT_TILE * sizeof(float));
    extern __shared__ uint8_t raw[];
    auto cluster = cooperative_groups::this_cluster();
    auto &sm = *reinterpret_cast<smem *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    const uint32_t rank = cluster.block_rank(), tile = blockIdx.x / SPLIT;
    const uint32_t first = tile / g.n_col_tiles * SPLIT_TILE, col = tile % g.n_col_tiles * SPLIT_TILE;
    const uint32_t n_steps = (g.k + GEMM_BK - 1) / GEMM_BK, begin = rank * n_steps / SPLIT,
                   end = (rank + 1) * n_steps / SPLIT, n = end - begin;
    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SPLIT_STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], 1);
        }
        barrier_init_fence();
        map_prefetch(&x_map);
        map_prefetch(&w_map);
    }
    __syncthreads();

    float d[SPLIT_TILE / 2];
#pragma unroll
    for (int i = 0; i < SPLIT_TILE / 2; i++) d[i] = 0;
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) {
            const int w_row = (int)(g.w_begin + col);
            const uint32_t bytes = (g.x_box + SPLIT_TILE) * GEMM_BK * 2, n_early = min(n, (uint32_t)SPLIT_STAGES);
            for (uint32_t i = 0; i < n_early; i++) { /* W is nobody's output */
                barrier_expect(&sm.full[i], bytes);
                copy_box_2d(sm.w[i], &w_map, &sm.full[i], (int)((begin + i) * GEMM_BK), w_row);
            }
            before();
            for (uint32_t i = 0; i < n_early; i++)
                copy_box_2d(sm.x[i], &x_map, &sm.full[i], (int)((begin + i) * GEMM_BK), (int)first);
            for (uint32_t i = n_early; i < n; i++) {
                const uint32_t st = i % SPLIT_STAGES;
                barrier_wait(&sm.empty[st], (i / SPLIT_STAGES & 1) ^ 1);
                barrier_expect(&sm.full[st], bytes);
                copy_box_2d(sm.x[st], &x_map, &sm.full[st], (int)((begin + i) * GEMM_BK), (int)first);
                copy_box_2d(sm.w[st], &w_map, &sm.full[st], (int)((begin + i) * GEMM_BK), w_row);
            }
        }
    } else {
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t st = i % SPLIT_STAGES;
            barrier_wait(&sm.full[st], i / SPLIT_STAGES & 1);
            const uint64_t x = tile_desc(sm.x[st]), w = tile_desc(sm.w[st]);
            keep(d);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < GEMM_BK / 16; k++) wgmma_ss(d, x + k * 2, w + k * 2, false);
            wgmma_commit();
            keep(d);
            wgmma_wait<1>();
            if (i > 0 && threadIdx.x == 128) barrier_arrive(&sm.empty[(i - 1) % SPLIT_STAGES]);
        }
        wgmma_wait<0>();
        keep(d);
    }

    /* The others' sums go where block 0's stages were. */
    const uint32_t thread = threadIdx.x % 128;
    cluster.sync();
    if (threadIdx.x >= 128 && rank != 0) {
        float *to = (float *)cluster.map_shared_rank(raw, 0) + (rank - 1) * SPLIT_TILE * SPLIT_TILE + thread;
#pragma unroll
        for (int i = 0; i < SPLIT_TILE / 2; i++) to[i * 128] = d[i];
    }
    cluster.sync();
    if (threadIdx.x < 128 || rank != 0) return;
#pragma unroll
    for (int r = 0; r + 1 < SPLIT; r++) {
        const float *from = (const float *)raw + r * SPLIT_TILE * SPLIT_TILE + thread;
#pragma unroll
        for (int i = 0; i < SPLIT_TILE / 2; i++) d[i] += from[i * 128];
    }
    before();

    const uint32_t lane = threadIdx.x % 32, warp = thread / 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t r = first + warp * 16 + lane / 4 + h * 8, c = col + lane % 4 * 2;
        if (r >= g.n_rows) continue;
        if constexpr (Epilogue::pairs == PAIRS_NEXT) {
#pragma unroll
            for (int i = 0; i < SPLIT_TILE / 8; i++) store(r, c + i * 8, d[4 * i + 2 * h], d[4 * i + 2 * h + 1], 0);
        } else {
            const auto at = store.row(r, lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
                store.two(at, i, c + i * 8, make_float2(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]),
                          make_float2(d[4 * (i + 4) + 2 * h], d[4 * (i + 4) + 2 * h + 1]));
        }
    }
}

template <int SPLIT, class Epilogue>
static enum td_status gemm_split_start(const struct td_cuda_stream *s, const void *x, const void *w, uint64_t w_rows_all,
                                       gemm_shape g, const Epilogue &store, const char *what)
{
    CUtensorMap x_map, w_map;
    if (g.k % 8 != 0) return TD_E_UNSUPPORTED;
    g.x_box = g.n_rows >= SPLIT_TILE ? SPLIT_TILE : td_ceil_div(g.n_rows, 8) * 8;
    enum td_status st = td_cuda_map_rows(&x_map, x, g.n_rows, g.k, g.k, g.x_box);
    if (st == TD_OK) st = td_cuda_map_rows(&w_map, w, w_rows_all, g.k, g.k, SPLIT_TILE);
    if (st != TD_OK) return st;
    g.n_row_tiles = td_ceil_div(g.n_rows, SPLIT_TILE);
    g.n_col_tiles = td_ceil_div(g.n_cols, SPLIT_TILE);
    const int bytes = sizeof(gemm_smem<SPLIT_TILE, SPLIT_TILE, SPLIT_STAGES>) + 1024;
    auto kernel = gemm_split<SPLIT, Epilogue>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return td_cuda_status(e, what);
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim = {SPLIT, 1, 1};
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(g.n_row_tiles * g.n_col_tiles * SPLIT);
    c.blockDim = dim3(256);
    c.dynamicSmemBytes = (size_t)bytes;
    c.stream = s->s;
    c.attrs = how;
    c.numAttrs = 2;
    return td_cuda_status(cudaLaunchKernelEx(&c, kernel, x_map, w_map, g, store), what);
}

#endif
