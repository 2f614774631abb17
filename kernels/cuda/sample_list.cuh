/* A short list of a row's likeliest ids in a thread block's shared memory: sorting it, and drawing from it. Weights are
 * counted in units of 2^-32 where a cut depends on them, so that sums do not depend on their order. */
#ifndef TD_KERNELS_CUDA_SAMPLE_LIST_CUH
#define TD_KERNELS_CUDA_SAMPLE_LIST_CUH

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sample.cuh"

#define THREADS       512u
#define WARPS         (THREADS / 32)
#define BINS          THREADS
#define LIST          (2 * THREADS)
#define NOTHING       0x007fffffu /* key of -inf */
#define SORT_BY_COUNT 256u
#define TOO_SHORT     0xfffffffeu

struct list_smem {
    uint64_t warps[WARPS][3];
    uint64_t list[LIST]; /* key, inverted id */
    uint32_t n_list, n_in, n_found;
};

struct scaled {
    float max, scale; /* weights are 2^((x - max) scale) */
};

struct cut {
    uint32_t key, id;
};

/* Ordered as the logits are; -0 and 0 are equal. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t b = __float_as_uint(x + 0.0f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
static __device__ __forceinline__ float value_of(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct sum_of {
    static __device__ __forceinline__ uint64_t of(uint64_t a, uint64_t b) { return a + b; }
};
struct max_of {
    static __device__ __forceinline__ uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
};
struct min_of {
    static __device__ __forceinline__ uint64_t of(uint64_t a, uint64_t b) { return a < b ? a : b; }
};
struct dsum_of {
    static __device__ __forceinline__ uint64_t of(uint64_t a, uint64_t b)
    {
        return (uint64_t)__double_as_longlong(__longlong_as_double((long long)a) + __longlong_as_double((long long)b));
    }
};

/* Sum over the block's threads before this one; total_out: of all. */
template <class Sum> static __device__ uint64_t scan_block(list_smem &sm, uint64_t v, uint64_t &total_out)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t up_to = v;
#pragma unroll
    for (int j = 1; j < 32; j *= 2) {
        uint64_t other = __shfl_up_sync(~0u, up_to, j);
        if (lane >= (uint32_t)j) up_to = Sum::of(other, up_to);
    }
    uint64_t before = __shfl_up_sync(~0u, up_to, 1);
    if (lane == 0) before = 0;
    __syncthreads();
    if (lane == 31) sm.warps[warp][0] = up_to;
    __syncthreads();
    uint64_t all = lane < WARPS ? sm.warps[lane][0] : 0;
#pragma unroll
    for (int j = 1; j < (int)WARPS; j *= 2) {
        uint64_t other = __shfl_up_sync(~0u, all, j);
        if (lane >= (uint32_t)j) all = Sum::of(other, all);
    }
    total_out = __shfl_sync(~0u, all, WARPS - 1);
    uint64_t warps_before = __shfl_sync(~0u, all, (int)(warp == 0 ? 0 : warp - 1));
    return warp == 0 ? before : Sum::of(warps_before, before);
}

static __device__ __forceinline__ float weight_of(const scaled &c, float x) { return exp2_fast((x - c.max) * c.scale); }

/* In multiples of 2^-32; 1 is one unit less. */
static __device__ __forceinline__ uint32_t units_of(const scaled &c, float x)
{
    return __float2uint_rz(weight_of(c, x) * 4294967296.0f); /* saturates */
}

static __device__ __forceinline__ uint64_t entry_of(uint32_t key, uint32_t id)
{
    return (uint64_t)key << 32 | (0xffffffffu - id);
}
static __device__ __forceinline__ float entry_value(uint64_t e) { return value_of((uint32_t)(e >> 32)); }
static __device__ __forceinline__ uint32_t entry_id(uint64_t e) { return 0xffffffffu - (uint32_t)e; }

static __device__ __forceinline__ void push(list_smem &sm, uint64_t entry)
{
    const uint32_t to = atomicAdd(&sm.n_list, 1);
    if (to < LIST) sm.list[to] = entry;
}

/* Falling; entries differ. Few take their places by counting those ahead of them, else a bitonic network sorts the next
 * power of two, with zeros behind n. */
static __device__ void sort_falling(list_smem &sm, uint32_t n)
{
    if (n <= SORT_BY_COUNT) {
        __syncthreads();
        const uint64_t mine = threadIdx.x < n ? sm.list[threadIdx.x] : 0;
        uint32_t ahead = 0;
        for (uint32_t i = 0; i < n && threadIdx.x < n; i++) ahead += sm.list[i] > mine;
        __syncthreads();
        if (threadIdx.x < n) sm.list[ahead] = mine;
        __syncthreads();
        return;
    }
    uint32_t m = 2;
    while (m < n) m *= 2;
    for (uint32_t i = n + threadIdx.x; i < m; i += THREADS) sm.list[i] = 0;
    __syncthreads();
    for (uint32_t k = 2; k <= m; k *= 2)
        for (uint32_t j = k / 2; j > 0; j /= 2) {
            if (threadIdx.x < m / 2) {
                const uint32_t i = (threadIdx.x / j) * 2 * j + threadIdx.x % j;
                const uint64_t a = sm.list[i], b = sm.list[i + j];
                if ((a < b) == ((i & k) == 0)) {
                    sm.list[i] = b;
                    sm.list[i + j] = a;
                }
            }
            __syncthreads();
        }
}

/* What a row is drawn by, once its logits are final. */
struct wish {
    uint32_t top_k, n_top; /* 0: none */
    float top_p, min_p;
    double u;
};

/* A thread block alone, on a list of the n most likely ids. total: units of all ids, for a top-p without a top-k.
 * TOO_SHORT: the list ends before what top-p keeps. */
static __device__ uint32_t draw_from_list(list_smem &sm, const scaled &c, const wish &r, uint32_t n, uint64_t total,
                                          td_sample_top *top)
{
    uint64_t e[2], sum;
    sort_falling(sm, n);
    if (threadIdx.x < r.n_top) top[threadIdx.x] = {entry_value(sm.list[threadIdx.x]), entry_id(sm.list[threadIdx.x])};
    uint32_t kept = r.top_k != 0 ? min(n, r.top_k) : n;
    if (r.top_p < 1) {
        uint32_t units[2];
        for (int j = 0; j < 2; j++) {
            const uint32_t i = threadIdx.x * 2 + j;
            units[j] = i < kept ? units_of(c, entry_value(sm.list[i])) : 0;
        }
        uint64_t before = scan_block<sum_of>(sm, (uint64_t)units[0] + units[1], sum);
        if (r.top_k != 0) total = sum;
        const uint64_t want = max((uint64_t)1, (uint64_t)ceil((double)r.top_p * (double)total));
        if (want > sum) return TOO_SHORT;
        if (threadIdx.x == 0) sm.n_in = kept;
        __syncthreads();
        for (int j = 0; j < 2; before += units[j], j++)
            if (before < want && want <= before + units[j]) sm.n_in = threadIdx.x * 2 + j + 1;
        __syncthreads();
        kept = sm.n_in;
    }
    /* The kept in rising order of ids, each with its weight; inverted, so that the same sort serves. */
    for (int j = 0; j < 2; j++) {
        const uint32_t i = threadIdx.x * 2 + j;
        e[j] = LIST - 1 - i; /* nothing: behind every weight, and no two alike */
        if (i >= kept) continue;
        const float w = weight_of(c, entry_value(sm.list[i]));
        if (w > 0 && w >= r.min_p) e[j] = ~((uint64_t)entry_id(sm.list[i]) << 32 | __float_as_uint(w));
    }
    __syncthreads();
    for (int j = 0; j < 2; j++)
        if (threadIdx.x * 2 + j < n) sm.list[threadIdx.x * 2 + j] = e[j];
    sort_falling(sm, n);
    double w[2];
    for (int j = 0; j < 2; j++) {
        const uint32_t i = threadIdx.x * 2 + j;
        e[j] = i < n && sm.list[i] >= LIST ? sm.list[i] : 0;
        w[j] = e[j] != 0 ? (double)__uint_as_float((uint32_t)~e[j]) : 0;
    }
    double at =
        __longlong_as_double((long long)scan_block<dsum_of>(sm, (uint64_t)__double_as_longlong(w[0] + w[1]), sum));
    const double target = r.u * __longlong_as_double((long long)sum);
    if (threadIdx.x == 0) sm.n_in = 0xffffffffu, sm.n_found = 0;
    __syncthreads();
    for (int j = 0; j < 2; at += w[j], j++) {
        if (e[j] == 0) continue;
        const uint32_t id = (uint32_t)(~e[j] >> 32);
        atomicMax(&sm.n_found, id);
        if (at + w[j] > target) atomicMin(&sm.n_in, id);
    }
    __syncthreads();
    return sm.n_in != 0xffffffffu ? sm.n_in : sm.n_found;
}

#endif
