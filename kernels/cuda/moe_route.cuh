/* Routing: the top k of a row's logits, and slots sorted by expert. All counts stay on the device. */
#ifndef TD_KERNELS_CUDA_MOE_ROUTE_CUH
#define TD_KERNELS_CUDA_MOE_ROUTE_CUH

#include <cuda_fp8.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"

#define MAX_EXPERTS  512u
#define SORT_THREADS 1024

/* One row, a warp. The highest logit first, the lower expert on a tie; a NaN comes last. Lane k < top_k returns the k-th
 * expert and its weight. Experts up to 32 * PER. A logit is the sum of n_slices, slice_step apart, and the bias. */
template <int PER>
static __device__ __forceinline__ void choose_experts(const float *logits, uint32_t n_slices, size_t slice_step,
                                                      const float *bias, uint32_t n_experts, uint32_t top_k, uint32_t lane,
                                                      uint32_t *id_out, float *weight_out)
{
    float z[PER];
    uint32_t taken = 0;
#pragma unroll
    for (uint32_t i = 0; i < PER; i++) {
        uint32_t e = i * 32 + lane;
        z[i] = 0;
        if (e >= n_experts) continue;
#pragma unroll 18
        for (uint32_t s = 0; s < n_slices; s++) z[i] += logits[s * slice_step + e];
        z[i] += bias[e];
        if (TRAP(LOGITS_FP8)) z[i] = (float)__nv_fp8_e4m3(z[i]);
    }
    float first = 0, sum = 0, mine = 0;
    uint32_t my_id = 0;
    for (uint32_t k = 0; k < top_k; k++) {
        /* A key that orders as wanted: sign-flipped bits of the logit, then the expert, inverted. */
        uint64_t best = 0;
#pragma unroll
        for (uint32_t i = 0; i < PER; i++) {
            uint32_t e = i * 32 + lane;
            if (e >= n_experts || (taken >> i & 1)) continue;
            uint32_t bits = __float_as_uint(z[i] + 0.0f); /* -0 and 0 are equal */
            bits = z[i] != z[i] ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
            uint64_t key = (uint64_t)bits << 32 | (0xffffffffu - e);
            best = key > best ? key : best;
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) {
            uint64_t other = __shfl_xor_sync(~0u, best, i);
            best = other > best ? other : best;
        }
        uint32_t e = 0xffffffffu - (uint32_t)best;
        float v = 0;
#pragma unroll
        for (uint32_t i = 0; i < PER; i++)
            if (i == e / 32) {
                v = z[i];
                if (lane == e % 32) taken |= 1u << i;
            }
        v = __shfl_sync(~0u, v, e % 32);
        if (k == 0) first = v;
        float w = expf(v - first);
        sum += w;
        if (lane == k) {
            mine = w;
            my_id = e;
        }
    }
    if (TRAP(SOFTMAX_OF_ALL)) {
        sum = 0;
        for (uint32_t i = 0; i < PER; i++) sum += i * 32 + lane < n_experts ? expf(z[i] - first) : 0;
        for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    }
    *id_out = my_id;
    *weight_out = mine / sum;
}

/* A warp a row. */
template <int PER>
static __global__ void route(const float *logits, uint32_t n_slices, size_t slice_step, const float *bias, uint32_t n_rows, uint32_t n_experts, uint32_t top_k,
                             uint32_t *ids, float *weights)
{
    let_next();
    before();
    uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, id;
    if (row >= n_rows) return;
    float weight;
    choose_experts<PER>(logits + (size_t)row * n_experts, n_slices, slice_step, bias, n_experts, top_k, lane, &id, &weight);
    if (lane >= top_k) return;
    ids[(size_t)row * top_k + lane] = id;
    weights[(size_t)row * top_k + lane] = weight;
}

static cudaError_t launch_route(cudaStream_t s, const float *logits, const float *bias, uint32_t n_rows,
                                uint32_t n_experts, uint32_t top_k, uint32_t *ids, float *weights)
{
    auto kernel = n_experts <= 32 ? route<1> : n_experts <= 128 ? route<4> : route<MAX_EXPERTS / 32>;
    return launch(kernel, td_ceil_div(n_rows, 4), 128, 0, s, logits, 1u, (size_t)0, bias, n_rows, n_experts, top_k, ids, weights);
}

/* -0.0 where another rank has the slot's expert. */
static __global__ void fill_absent(const uint32_t *ids, float *y, uint32_t hidden, uint32_t e_begin, uint32_t n_experts)
{
    let_next();
    before();
    if (ids[blockIdx.x] - e_begin < n_experts) return;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) y[(size_t)blockIdx.x * hidden + i] = -0.0f;
}

#endif
