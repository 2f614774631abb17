/* Slots sorted by expert into tiles of few rows, each of one expert: the order in which the FP8 products take them. Within
 * an expert slots rise. Experts count from e_begin, this rank's first; others' slots are left out. */
#ifndef TD_KERNELS_CUDA_MOE_SORT_CUH
#define TD_KERNELS_CUDA_MOE_SORT_CUH

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_route.cuh"
#include "kernels/cuda/moe_scratch.h"

static __device__ __forceinline__ void write_tiles(const struct sorted &out, uint32_t tile, uint32_t expert, uint32_t n,
                                                   uint32_t tile_rows)
{
    for (uint32_t i = 0; i < n; i += tile_rows) out.tiles[tile++] = {expert, min(n - i, tile_rows)};
}

/* ---- few rows ---- */

/* Router logits of few rows: 16 rows by all experts, a slice of k a block, so that some dozen multiprocessors share the reading.
 * A warp has eight of the experts, a lane one of those and one row or two. Lanes read 16 bytes in a row: the order of k inside a step of 32 is free as
 * long as both operands agree. */
static __global__ void __launch_bounds__(512)
    router_slices(const td_bf16 *x, const td_bf16 *w, uint32_t n_rows, uint32_t n_experts, uint32_t k, float *out)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    const uint32_t steps = (k + 31) / 32, first = blockIdx.y * steps / MOE_ROUTER_SLICES,
                   end = (blockIdx.y + 1) * steps / MOE_ROUTER_SLICES, row = blockIdx.x * 16 + gr;
    let_next();
    before();
    const td_bf16 *rows[2] = {x + (size_t)min(row, n_rows - 1) * k, x + (size_t)min(row + 8, n_rows - 1) * k};
    auto load = [&](const td_bf16 *from, uint32_t step) {
        uint32_t at = step * 32 + t * 8;
        return at < k ? *(const uint4 *)(from + at) : make_uint4(0, 0, 0, 0);
    };
    const uint32_t e = warp * 8;
    const td_bf16 *expert = w + (size_t)min(e + gr, n_experts - 1) * k;
    float d[4] = {};
#pragma unroll 5
    for (uint32_t step = first; step < end; step++) {
        uint4 a = load(rows[0], step), b = load(rows[1], step), c = load(expert, step);
        mma_bf16(d, a.x, b.x, a.y, b.y, c.x, c.y);
        mma_bf16(d, a.z, b.z, a.w, b.w, c.z, c.w);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t r = row + i / 2 * 8, c = e + t * 2 + i % 2;
        if (r < n_rows && c < n_experts) out[((size_t)blockIdx.y * n_rows + r) * n_experts + c] = d[i];
    }
}

/* A block's: thread i has slot i, of expert id (from e_begin), UINT32_MAX beyond the last. */
template <int PER>
static __device__ __forceinline__ void sort_in_block(uint32_t mine, uint32_t n_slots, uint32_t n_mine, uint32_t tile_rows,
                                                     uint16_t (&of_warp)[SORT_THREADS / 32][PER * 32],
                                                     const struct sorted &out)
{
    __shared__ uint32_t count[PER * 32], tile_of[PER * 32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t same = __match_any_sync(~0u, mine);
    uint32_t rank = __popc(same & ((1u << lane) - 1));
    if (mine < n_mine && rank == 0) of_warp[warp][mine] = (uint16_t)__popc(same);
    __syncthreads();
    if (mine < n_mine)
        for (uint32_t w = 0; w < warp; w++) rank += of_warp[w][mine];
    for (uint32_t e = threadIdx.x; e < n_mine; e += SORT_THREADS) {
        uint32_t n = 0;
        for (uint32_t w = 0; w * 32 < n_slots; w++) n += of_warp[w][e];
        count[e] = n;
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t total = 0;
        for (uint32_t base = 0; base < n_mine; base += 32) {
            uint32_t e = base + lane, n = e < n_mine ? (count[e] + tile_rows - 1) / tile_rows : 0, sum = n;
#pragma unroll
            for (int i = 1; i < 32; i *= 2) {
                uint32_t other = __shfl_up_sync(~0u, sum, i);
                if (lane >= (uint32_t)i) sum += other;
            }
            if (e < n_mine) tile_of[e] = total + sum - n;
            total += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) *out.n_tiles = total;
    }
    __syncthreads();
    if (mine < n_mine) {
        const uint32_t p = tile_of[mine] * tile_rows + rank;
        out.slot_of[p] = threadIdx.x;
        if (out.padded_of != nullptr) out.padded_of[threadIdx.x] = p;
    }
    for (uint32_t e = threadIdx.x; e < n_mine; e += SORT_THREADS) write_tiles(out, tile_of[e], e, count[e], tile_rows);
}

/* A row a warp. */
template <int PER>
static __global__ void __launch_bounds__(SORT_THREADS)
    route_and_sort(const float *logits, const float *bias, uint32_t n_rows, uint32_t n_experts, uint32_t top_k,
                   uint32_t *ids, float *weights, uint32_t e_begin, uint32_t n_mine, uint32_t tile_rows,
                   const struct sorted out)
{
    __shared__ uint32_t id_of[SORT_THREADS];
    __shared__ uint16_t of_warp[SORT_THREADS / 32][PER * 32]; /* slots of an expert among a warp's */
    const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32, n_slots = n_rows * top_k;
    let_next();
    for (uint32_t i = threadIdx.x; i < SORT_THREADS * PER; i += SORT_THREADS) (&of_warp[0][0])[i] = 0;
    before();
    if (row < n_rows) {
        uint32_t id;
        float weight;
        choose_experts<PER>(logits + (size_t)row * n_experts, MOE_ROUTER_SLICES, (size_t)n_rows * n_experts, bias, n_experts,
                            top_k, lane, &id, &weight);
        if (lane < top_k) {
            ids[row * top_k + lane] = id;
            weights[row * top_k + lane] = weight;
            id_of[row * top_k + lane] = id;
        }
    }
    __syncthreads();
    sort_in_block<PER>(threadIdx.x < n_slots ? id_of[threadIdx.x] - e_begin : UINT32_MAX, n_slots, n_mine, tile_rows,
                       of_warp, out);
}

template <int PER>
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_few(const uint32_t *ids, uint32_t n_slots, uint32_t e_begin, uint32_t n_mine, uint32_t tile_rows,
             const struct sorted out)
{
    __shared__ uint16_t of_warp[SORT_THREADS / 32][PER * 32];
    let_next();
    for (uint32_t i = threadIdx.x; i < SORT_THREADS * PER; i += SORT_THREADS) (&of_warp[0][0])[i] = 0;
    before();
    __syncthreads();
    sort_in_block<PER>(threadIdx.x < n_slots ? ids[threadIdx.x] - e_begin : UINT32_MAX, n_slots, n_mine, tile_rows, of_warp,
                       out);
}

/* ---- many rows ---- */

/* Block e writes what concerns expert e. Every block counts all slots itself: cheaper than another launch. A thread has a run
 * of slots, so that their order within the expert needs one sum over the block. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_tiles(const uint32_t *ids, uint32_t n_slots, uint32_t e_begin, uint32_t n_mine, uint32_t tile_rows,
               const struct sorted out)
{
    __shared__ uint32_t count[MAX_EXPERTS], of_warp[SORT_THREADS / 32], first_tile;
    const uint32_t e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t per = (n_slots + 4 * SORT_THREADS - 1) / (4 * SORT_THREADS) * 4;
    const uint32_t begin = min(threadIdx.x * per, n_slots), end = min(begin + per, n_slots);
    let_next();
    for (uint32_t i = threadIdx.x; i < n_mine; i += SORT_THREADS) count[i] = 0;
    if (threadIdx.x == 0) first_tile = 0;
    __syncthreads();
    before();
    uint32_t n = 0;
    auto each = [&](auto f) {
#pragma unroll 4
        for (uint32_t i = begin; i < end; i += 4) {
            if (i + 4 <= end) {
                uint4 v = *(const uint4 *)(ids + i);
                f(i, v.x), f(i + 1, v.y), f(i + 2, v.z), f(i + 3, v.w);
            } else
                for (uint32_t j = i; j < end; j++) f(j, ids[j]);
        }
    };
    each([&](uint32_t, uint32_t id) {
        id -= e_begin;
        if (id < n_mine) atomicAdd(&count[id], 1);
        n += id == e;
    });
    uint32_t sum = n; /* up to this thread's in its warp, then in the block */
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        uint32_t other = __shfl_up_sync(~0u, sum, i);
        if (lane >= (uint32_t)i) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < e; i += SORT_THREADS) atomicAdd(&first_tile, (count[i] + tile_rows - 1) / tile_rows);
    uint32_t rank = sum - n;
    for (uint32_t w = 0; w < warp; w++) rank += of_warp[w];
    __syncthreads();
    const uint32_t tile = first_tile, row = tile * tile_rows;
    if (threadIdx.x == 0) {
        write_tiles(out, tile, e, count[e], tile_rows);
        if (e + 1 == n_mine) *out.n_tiles = tile + (count[e] + tile_rows - 1) / tile_rows;
    }
    if (n != 0)
        each([&](uint32_t slot, uint32_t id) {
            if (id - e_begin != e) return;
            if (out.padded_of != nullptr) out.padded_of[slot] = row + rank;
            out.slot_of[row + rank++] = slot;
        });
}

#endif
