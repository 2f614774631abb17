/* Y = X W^T for many rows of one matrix. A cluster of two thread blocks takes 256 rows of X and 128 of W: each block
 * its own 128 rows of X, and half of W, which the copy engine writes into both. Each walks over tiles, and its two
 * warpgroups take turns: one multiplies while the other stores. Every output is one chain over k in steps of 16, as in
 * gemm.cuh: the same bits. */
#ifndef TD_KERNELS_CUDA_GEMM_PAIRS_CUH
#define TD_KERNELS_CUDA_GEMM_PAIRS_CUH

#include "kernels/cuda/gemm.cuh"

#define PAIRS_BM      128 /* rows of a block */
#define PAIRS_BN      TD_PRODUCT_PAIRS_BN
#define PAIRS_STAGES  6
#define PAIRS_THREADS 384

struct pairs_smem {
    alignas(1024) uint8_t x[PAIRS_STAGES][PAIRS_BM * GEMM_BK * 2];
    alignas(1024) uint8_t w[PAIRS_STAGES][PAIRS_BN * GEMM_BK * 2];
    uint64_t full[PAIRS_STAGES], empty[PAIRS_STAGES];
};

static __device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ __forceinline__ void cluster_sync_all()
{
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
/* The same barrier of block `rank` of the cluster. Not .release.cluster: each would wait for all of the thread's memory
 * accesses, and nothing but the tensor core's reads, which are over, must come before it. */
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *bar, uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(smem_addr(bar)),
                 "r"(rank)
                 : "memory");
}
/* Into the same place, and for the same barrier, of both blocks. */
static __device__ __forceinline__ void copy_box_2d_to_both(void *to, const CUtensorMap *map, uint64_t *bar, int x,
                                                           int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3, %4}], [%2], %5;" ::"r"(smem_addr(to)),
                 "l"(map), "r"(smem_addr(bar)), "r"(x), "r"(y), "h"((uint16_t)3)
                 : "memory");
}

/* Two warpgroups take turns: one waits for its turn, the other passes it on. */
static __device__ __forceinline__ void turn_wait(uint32_t whose)
{
    asm volatile("bar.sync %0, 256;" ::"r"(whose + 1) : "memory");
}
static __device__ __forceinline__ void turn_pass(uint32_t to)
{
    asm volatile("bar.arrive %0, 256;" ::"r"(to + 1) : "memory");
}

/* v[i] of lane t of four: element (i, t) -> (t, i). */
static __device__ __forceinline__ void transpose_quad(uint32_t (&v)[4])
{
    const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
#pragma unroll
    for (int m = 0; m < 4; m += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, is_odd ? v[m] : v[m + 1], 1);
        v[m] = is_odd ? got : v[m];
        v[m + 1] = is_odd ? v[m + 1] : got;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const uint32_t got = __shfl_xor_sync(~0u, is_high ? v[e] : v[e + 2], 2);
        v[e] = is_high ? got : v[e];
        v[e + 2] = is_high ? v[e + 2] : got;
    }
}

/* A warpgroup's 64 rows of a tile; row: this lane's first, the other lies 8 further on. */
template <int BN, class Epilogue>
static __device__ __forceinline__ void pairs_store(const Epilogue &store, const float (&d)[BN / 2], uint32_t row,
                                                   uint32_t col, uint32_t n_rows, uint32_t n_cols)
{
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t r = row + h * 8;
        const bool is_row = r < n_rows;
        if constexpr (Epilogue::pairs == PAIRS_NEXT) {
#pragma unroll
            for (int j = 0; j < BN / 8; j++)
                if (is_row) store(r, col + j * 8 + t * 2, d[4 * j + 2 * h], d[4 * j + 2 * h + 1], 0);
        } else {
            const auto at = store.row(is_row ? r : n_rows - 1, t * 2);
#pragma unroll
            for (int head = 0; head < BN / 64; head++) {
                uint32_t lo[4], hi[4];
                const uint32_t c = col + head * 64;
                if (c >= n_cols) continue; /* all lanes alike */
                const bool is_packed = store.is_bf16(c);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int a = 4 * (head * 8 + j) + 2 * h;
                    const float2 x = make_float2(d[a], d[a + 1]), y = make_float2(d[a + 16], d[a + 17]);
                    if (is_packed)
                        store.rotate(at, j, c + t * 2 + j * 8, x, y, lo[j], hi[j]);
                    else if (is_row)
                        store.two(at, j, c + t * 2 + j * 8, x, y);
                }
                if (!is_packed) continue;
                transpose_quad(lo); /* eight components of a row to a lane: whole sectors are written */
                transpose_quad(hi);
                if (is_row) store.eight(at, c, t, lo, hi);
            }
        }
    }
}

template <class Epilogue>
static __global__ void __launch_bounds__(PAIRS_THREADS, 1)
    gemm_pairs(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const gemm_shape g,
               const Epilogue store)
{
    constexpr int BN = PAIRS_BN, STAGES = PAIRS_STAGES;
    extern __shared__ uint8_t raw[];
    auto &sm = *reinterpret_cast<pairs_smem *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    const uint32_t rank = cluster_rank(), n_steps = (g.k + GEMM_BK - 1) / GEMM_BK;
    const uint32_t n_tiles = g.n_row_tiles * g.n_col_tiles, n_clusters = gridDim.x / 2;
    /* Clusters that run together share rows and columns: groups of 8 row tiles, columns inside. */
    auto place = [&](uint32_t tile, uint32_t &row, uint32_t &col) {
        const uint32_t group = 8, per_group = group * g.n_col_tiles, in = tile % per_group;
        const uint32_t first = tile / per_group * group, n_in = min(group, g.n_row_tiles - first);
        row = ((first + in % n_in) * 2 + rank) * PAIRS_BM;
        col = in / n_in * BN;
    };
    let_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], 2); /* a warpgroup of either block */
        }
        barrier_init_fence();
    }
    cluster_sync_all();

    if (threadIdx.x < 128) {
        regs_less<40>();
        if (threadIdx.x == 0) {
            before();
            uint32_t i = 0;
            for (uint32_t tile = blockIdx.x / 2; tile < n_tiles; tile += n_clusters) {
                uint32_t row, col;
                place(tile, row, col);
                for (uint32_t step = 0; step < n_steps; step++, i++) {
                    const uint32_t st = i % STAGES;
                    barrier_wait(&sm.empty[st], (i / STAGES & 1) ^ 1);
                    barrier_expect(&sm.full[st], (PAIRS_BM + BN) * GEMM_BK * 2);
                    copy_box_2d(sm.x[st], &x_map, &sm.full[st], (int)(step * GEMM_BK), (int)row);
                    copy_box_2d_to_both(sm.w[st] + rank * (BN / 2) * GEMM_BK * 2, &w_map, &sm.full[st],
                                        (int)(step * GEMM_BK), (int)(g.w_begin + col + rank * (BN / 2)));
                }
            }
        }
    } else {
        regs_more<232>();
        before();
        const uint32_t wg = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        float d[2][BN / 2]; /* of 64 rows each */
        auto release = [&](uint32_t stage) {
            if (threadIdx.x % 128 < 2) barrier_arrive_at(&sm.empty[stage], threadIdx.x % 128);
        };
        uint32_t i = wg * n_steps;
        for (uint32_t tile = blockIdx.x / 2 + wg * n_clusters; tile < n_tiles; tile += 2 * n_clusters, i += n_steps) {
            uint32_t first, col;
            place(tile, first, col);
#pragma unroll
            for (int j = 0; j < BN / 2; j++) d[0][j] = d[1][j] = 0;
            /* Only one multiplies at a time: a barrier's parity tells this lap from the last one, not from the one
             * before. */
            if (tile >= n_clusters) turn_wait(wg);
            for (uint32_t step = 0; step < n_steps; step++, i++) {
                const uint32_t st = i % STAGES;
                barrier_wait(&sm.full[st], i / STAGES & 1);
                const uint64_t x = tile_desc(sm.x[st]), w = tile_desc(sm.w[st]);
                keep(d[0]);
                keep(d[1]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < GEMM_BK / 16; k++) {
                    wgmma_ss(d[0], x + k * 2, w + k * 2, false);
                    wgmma_ss(d[1], x + (64 * GEMM_BK * 2 >> 4) + k * 2, w + k * 2, false);
                }
                wgmma_commit();
                keep(d[0]);
                keep(d[1]);
                if (step + 1 == n_steps && tile + n_clusters < n_tiles) turn_pass(wg ^ 1);
                wgmma_wait<1>();
                if (step > 0) release((i - 1) % STAGES);
            }
            wgmma_wait<0>();
            keep(d[0]);
            keep(d[1]);
            release((i - 1) % STAGES);
            pairs_store<BN>(store, d[0], first + warp * 16 + lane / 4, col, g.n_rows, g.n_cols);
            pairs_store<BN>(store, d[1], first + 64 + warp * 16 + lane / 4, col, g.n_rows, g.n_cols);
        }
    }
    cluster_sync_all(); /* nobody leaves while the other may still write into it */
}

/* x [n_rows, k]. */
template <class Epilogue>
static enum td_status pairs_start(const struct td_cuda_stream *s, const void *x, const void *w, uint64_t w_rows,
                                  gemm_shape g, const Epilogue &store, const char *what)
{
    CUtensorMap x_map, w_map;
    enum td_status st = td_cuda_map_rows(&x_map, x, g.n_rows, g.k, g.k, PAIRS_BM);
    if (st == TD_OK) st = td_cuda_map_rows(&w_map, w, w_rows, g.k, g.k, PAIRS_BN / 2);
    if (st != TD_OK) return st;
    g.n_row_tiles = td_ceil_div(g.n_rows, 2 * PAIRS_BM);
    g.n_col_tiles = td_ceil_div(g.n_cols, PAIRS_BN);
    const int bytes = sizeof(pairs_smem) + 1024;
    auto kernel = gemm_pairs<Epilogue>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return td_cuda_status(e, what);
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(td_min_u32(g.n_row_tiles * g.n_col_tiles, (uint32_t)s->n_sms / 2) * 2);
    c.blockDim = dim3(PAIRS_THREADS);
    c.dynamicSmemBytes = (size_t)bytes;
    c.stream = s->s;
    c.attrs = how;
    c.numAttrs = 2;
    return td_cuda_status(cudaLaunchKernelEx(&c, kernel, x_map, w_map, g, store), what);
}

#endif
