/* Y = X W^T for any number of rows, W in FP8 with a scale a row (kernels/dense_format.h), X in bf16: the weights'
 * rounding is the only one. A warp streams X and W's codes through a ring, a warpgroup widens a step's codes to bf16
 * (exactly) in a second ring, and the others multiply as in gemm.cuh. Scales meet the sums before the epilogue. Every
 * output is one chain over k in steps of 16, whatever the tile: rows do not depend on their company. */
#ifndef TD_KERNELS_CUDA_GEMM_FP8W_CUH
#define TD_KERNELS_CUDA_GEMM_FP8W_CUH

#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/dense_format.h"

#define FP8W_WIDE     3 /* stages of widened codes */
#define FP8W_WIDENERS 128

template <int BM, int BN, int STAGES> struct fp8w_smem {
    alignas(1024) uint8_t x[STAGES][BM * GEMM_BK * 2];
    alignas(1024) uint8_t wide[FP8W_WIDE][BN * GEMM_BK * 2];
    alignas(1024) uint8_t codes[STAGES][BN * GEMM_BK];
    float scales[BN];
    uint64_t full[STAGES], empty[STAGES], wide_full[FP8W_WIDE], wide_empty[FP8W_WIDE];
};

template <int BM, int BN, int STAGES, class Epilogue>
static __global__ void __launch_bounds__(BM * 2 + FP8W_WIDENERS + 32, BM == 64 ? 2 : 1)
    gemm_fp8w(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const uint8_t *w,
              const gemm_shape g, const Epilogue store)
{
    using smem = fp8w_smem<BM, BN, STAGES>;
    extern __shared__ uint8_t raw[];
    auto &sm = *reinterpret_cast<smem *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    const uint32_t group = 16, per_group = group * g.n_col_tiles, in = blockIdx.x % per_group;
    const uint32_t first_tile = blockIdx.x / per_group * group, n_in = min(group, g.n_row_tiles - first_tile);
    const uint32_t first = (first_tile + in % n_in) * BM, col = in / n_in * BN;
    constexpr bool is_split = BN == 32 && Epilogue::pairs == PAIRS_HEAD; /* 16 of each half of a head */
    const uint32_t first_col = is_split ? col / 64 * 64 + col % 64 / 2 : col;
    const uint32_t n_steps = (g.k + GEMM_BK - 1) / GEMM_BK;
    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], BM / 64 + FP8W_WIDENERS / 32);
        }
        for (int i = 0; i < FP8W_WIDE; i++) {
            barrier_init(&sm.wide_full[i], FP8W_WIDENERS / 32);
            barrier_init(&sm.wide_empty[i], BM / 64);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= BM * 2 + FP8W_WIDENERS) { /* copies */
        if (threadIdx.x != BM * 2 + FP8W_WIDENERS) return;
        const int w_row = (int)(g.w_begin + first_col);
        const uint32_t bytes = g.x_box * GEMM_BK * 2 + BN * GEMM_BK, n_early = min(n_steps, (uint32_t)STAGES);
        auto copy_w = [&](uint32_t st, uint32_t step) {
            copy_box_2d(sm.codes[st], &w_map, &sm.full[st], (int)(step * GEMM_BK), w_row);
            if (is_split) copy_box_2d(sm.codes[st] + 16 * 64, &w_map, &sm.full[st], (int)(step * GEMM_BK), w_row + 32);
        };
        for (uint32_t i = 0; i < n_early; i++) { /* W is nobody's output */
            barrier_expect(&sm.full[i], bytes);
            copy_w(i, i);
        }
        before();
        for (uint32_t i = 0; i < n_early; i++)
            copy_box_2d(sm.x[i], &x_map, &sm.full[i], (int)(i * GEMM_BK), (int)first);
        for (uint32_t i = n_early; i < n_steps; i++) {
            const uint32_t st = i % STAGES;
            barrier_wait(&sm.empty[st], (i / STAGES & 1) ^ 1);
            barrier_expect(&sm.full[st], bytes);
            copy_box_2d(sm.x[st], &x_map, &sm.full[st], (int)(i * GEMM_BK), (int)first);
            copy_w(st, i);
        }
        return;
    }
    if (threadIdx.x >= BM * 2) { /* widens */
        const uint32_t thread = threadIdx.x - BM * 2;
        for (uint32_t c = thread; c < BN; c += FP8W_WIDENERS) {
            const uint32_t row = is_split ? first_col + c % 16 + c / 16 * 32 : first_col + c;
            const uint32_t at = td_dense_fp8_scale_at(g.k);
            sm.scales[c] =
                row < g.n_cols ? *(const float *)(w + (size_t)(g.w_begin + row) * (at + TD_DENSE_FP8_PAD) + at) : 0;
        }
        for (uint32_t i = 0; i < n_steps; i++) {
            const uint32_t st = i % STAGES, to = i % FP8W_WIDE;
            barrier_wait(&sm.full[st], i / STAGES & 1);
            barrier_wait(&sm.wide_empty[to], (i / FP8W_WIDE & 1) ^ 1);
            for (uint32_t u = thread; u < BN * 4; u += FP8W_WIDENERS) { /* 16 codes; both sides are swizzled */
                const uint32_t row = u % BN, piece = u / BN;
                uint32_t c[4];
                load_shared(c, smem_addr(sm.codes[st] + row * 64 + (piece ^ (row / 2 % 4)) * 16));
                uint2 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = widen_e4m3(c[j]);
                uint8_t *line = sm.wide[to] + row * 128;
                *(uint4 *)(line + ((2 * piece) ^ (row % 8)) * 16) = make_uint4(v[0].x, v[0].y, v[1].x, v[1].y);
                *(uint4 *)(line + ((2 * piece + 1) ^ (row % 8)) * 16) = make_uint4(v[2].x, v[2].y, v[3].x, v[3].y);
            }
            fence_async();
            __syncwarp();
            if (thread % 32 == 0) {
                barrier_arrive(&sm.wide_full[to]);
                barrier_arrive(&sm.empty[st]);
            }
        }
        return;
    }

    const uint32_t wg = threadIdx.x / 128, lane = threadIdx.x % 32;
    float d[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; i++) d[i] = 0;
    auto release = [&](uint32_t i) {
        if (threadIdx.x % 128 != 0) return;
        barrier_arrive(&sm.empty[i % STAGES]);
        barrier_arrive(&sm.wide_empty[i % FP8W_WIDE]);
    };
    for (uint32_t i = 0; i < n_steps; i++) {
        const uint32_t st = i % STAGES, from = i % FP8W_WIDE;
        barrier_wait(&sm.full[st], i / STAGES & 1);
        barrier_wait(&sm.wide_full[from], i / FP8W_WIDE & 1);
        const uint64_t x = tile_desc(sm.x[st] + wg * 64 * GEMM_BK * 2), b = tile_desc(sm.wide[from]);
        keep(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < GEMM_BK / 16; k++) wgmma_ss(d, x + k * 2, b + k * 2, false);
        wgmma_commit();
        keep(d);
        wgmma_wait<1>();
        if (i > 0) release(i - 1);
    }
    wgmma_wait<0>();
    keep(d);
    before();
#pragma unroll
    for (int i = 0; i < BN / 8; i++) {
        const float2 s = *(const float2 *)&sm.scales[i * 8 + lane % 4 * 2];
        d[4 * i] *= s.x, d[4 * i + 1] *= s.y, d[4 * i + 2] *= s.x, d[4 * i + 3] *= s.y;
    }
    gemm_store<BN>(store, d, first, min((uint32_t)BM, g.n_rows - first), wg, col, first_col, 0);
}

template <int BM, int BN, int STAGES, class Epilogue>
static enum td_status fp8w_start(const struct td_cuda_stream *s, const void *x, const struct td_weight *w, gemm_shape g,
                                 const Epilogue &store, const char *what)
{
    CUtensorMap x_map, w_map;
    g.x_box = g.n_rows >= BM ? BM : td_ceil_div(g.n_rows, 8) * 8;
    enum td_status st = td_cuda_map_rows(&x_map, x, g.n_rows, g.k, g.k, g.x_box);
    if (st == TD_OK)
        st = td_cuda_map_codes(&w_map, w->data, w->n_out, g.k, td_dense_fp8_row_bytes(g.k),
                               BN == 32 && Epilogue::pairs == PAIRS_HEAD ? 16 : BN);
    if (st != TD_OK) return st;
    g.n_row_tiles = td_ceil_div(g.n_rows, BM);
    g.n_col_tiles = td_ceil_div(g.n_cols, BN);
    const int bytes = sizeof(fp8w_smem<BM, BN, STAGES>) + 1024;
    auto kernel = gemm_fp8w<BM, BN, STAGES, Epilogue>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e == cudaSuccess)
        e = launch(kernel, g.n_row_tiles * g.n_col_tiles, BM * 2 + FP8W_WIDENERS + 32, bytes, s->s, x_map, w_map,
                   (const uint8_t *)w->data, g, store);
    return td_cuda_status(e, what);
}

#endif
