/* What becomes of the experts' sums of many rows (moe_many.cuh). A tile's gate and up rows make 128 units, which is a
 * group of the second product's input: clamped, activated and quantised here. The second's sums are stored a slot's
 * row. */
#ifndef TD_KERNELS_CUDA_MOE_MANY_OUT_CUH
#define TD_KERNELS_CUDA_MOE_MANY_OUT_CUH

#include "kernels/cuda/moe_experts.cuh"

#define MANY_TOKENS    128u
#define MANY_CONSUMERS 256u

/* An item: 256 rows of W by the tokens of a tile. The last has no tokens. */
struct many_head {
    uint32_t tile, row_tile, n;
};

static __device__ __forceinline__ void store_bulk(void *to, uint32_t from, uint32_t n)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(n) : "memory");
}
static __device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* All but the last N groups of this thread's have read their shared memory. */
template <int N> static __device__ __forceinline__ void store_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void store_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

static __device__ __forceinline__ void store_word(uint32_t at, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
static __device__ __forceinline__ void store_byte(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
static __device__ __forceinline__ float load_float(uint32_t at) { return __uint_as_float(load_word(at)); }
static __device__ __forceinline__ float4 load_floats(uint32_t at)
{
    uint4 v = load_words(at);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
static __device__ __forceinline__ void store_two(uint32_t at, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
static __device__ __forceinline__ void store_four(uint32_t at, float4 v)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

/* The greater of two lanes' values: one keeps the upper half of them, the other the lower. */
template <int HALF, int BIT, int N> static __device__ __forceinline__ void halve(float (&v)[N], uint32_t lane)
{
    const bool is_upper = lane & BIT;
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        float away = is_upper ? v[j] : v[j + HALF], mine = is_upper ? v[j + HALF] : v[j];
        v[j] = fmaxf(mine, __shfl_xor_sync(~0u, away, BIT));
    }
}

/* Two codes, the lower value's in the lower byte. */
static __device__ __forceinline__ uint32_t two_e4m3(float lo, float hi)
{
    uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
    return out;
}
/* Of a group whose largest magnitude is most. */
static __device__ __forceinline__ float group_scale(float most)
{
    return TRAP(FP8_ONE_SCALE) ? 4 / 448.0f : fmaxf(most, 1e-4f) / 448.0f;
}

/* threadIdx.x, read anew: what follows from it then takes no registers before. */
static __device__ __forceinline__ uint32_t this_thread()
{
    uint32_t i;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
}

/* ---- epilogues: a warpgroup's sums of 128 rows of W, from row, by N tokens; acc[b] of rows 64 b .. ---- */

struct many_up {
    uint8_t *codes; /* [tile][k_tiles][128][128] E4M3, swizzled */
    float *scales;  /* [tile][k_tiles][128] */
    uint32_t n_units, k_tiles;
    float alpha, limit;

    static constexpr bool has_bias = true;
    static constexpr uint32_t fp8_stages = 4, mxfp4_stages = 5;
    static constexpr uint32_t codes_at = 0, most_at = MANY_TOKENS * 128, inv_at = most_at + 2 * MANY_TOKENS * 4,
                              bytes = inv_at + MANY_TOKENS * 4;

    __device__ __forceinline__ void start(uint32_t out) const
    {
        if (threadIdx.x < 2 * MANY_TOKENS) store_word(out + most_at + threadIdx.x * 4, 0);
    }
    template <int N>
    __device__ __forceinline__ void store(const many_head &at, uint32_t &n_items, uint32_t out, uint32_t rows,
                                          float (&acc)[2][N / 2]) const
    {
        const uint32_t thread = this_thread(), wg = thread / 128, warp = thread % 128 / 32, lane = thread % 32,
                       gr = lane / 4, t = lane % 4;
        const uint32_t first = wg * 64 + warp * 8 + gr; /* units in the group: this, and 32 further */
        const uint32_t most = out + most_at + n_items % 2 * (MANY_TOKENS * 4),
                       other = out + most_at + (n_items + 1) % 2 * (MANY_TOKENS * 4);
        float u[2][N / 4];
        if (rows != 0) {
            float top[N / 4];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const bool is_in = at.row_tile * 128 + first + b * 32 < n_units;
#pragma unroll
                for (int j = 0; j < N / 4; j++) {
                    float v = activate<true>(acc[b][j / 2 * 4 + j % 2], acc[b][j / 2 * 4 + 2 + j % 2], alpha, limit);
                    u[b][j] = is_in ? v : 0;
                }
            }
#pragma unroll
            for (int j = 0; j < N / 4; j++) top[j] = fmaxf(fabsf(u[0][j]), fabsf(u[1][j]));
            /* Over the eight rows of lanes, each time half the columns kept. */
            halve<N / 8, 16>(top, lane);
            halve<N / 16, 8>(top, lane);
            halve<N / 32, 4>(top, lane);
#pragma unroll
            for (int j = 0; j < N / 32; j++) {
                const uint32_t c =
                    (lane >> 4 & 1) * (N / 8) + (lane >> 3 & 1) * (N / 16) + (lane >> 2 & 1) * (N / 32) + j;
                asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(most + (c / 2 * 8 + t * 2 + c % 2) * 4),
                             "r"(__float_as_uint(top[j]))
                             : "memory");
            }
        } else
#pragma unroll
            for (int j = 0; j < N / 4; j++) u[0][j] = u[1][j] = 0;
        n_items++;
        if (thread == 0) store_read<0>();
        named_barrier<1, MANY_CONSUMERS>();
        if (thread < MANY_TOKENS) {
            const float scale = group_scale(load_float(most + thread * 4));
            store_word(out + inv_at + thread * 4, 1.0f / scale);
            store_word(other + thread * 4, 0);
            if (thread < at.n) scales[((size_t)at.tile * k_tiles + at.row_tile) * MANY_TOKENS + thread] = scale;
        }
        named_barrier<1, MANY_CONSUMERS>();
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint2 v = load_two(out + inv_at + (i * 8 + t * 2) * 4);
            const float inv[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const uint32_t two = two_e4m3(u[b][2 * i] * inv[0], u[b][2 * i + 1] * inv[1]);
                const uint32_t unit = first + b * 32, token = i * 8 + t * 2;
                store_byte(out + codes_at + td_expert_fp8_at(token, unit), two & 0xff);
                store_byte(out + codes_at + td_expert_fp8_at(token + 1, unit), two >> 8);
            }
        }
        fence_async();
        named_barrier<1, MANY_CONSUMERS>();
        if (thread == 0) {
            store_bulk(codes + ((size_t)at.tile * k_tiles + at.row_tile) * (MANY_TOKENS * 128), out + codes_at,
                       at.n * 128);
            store_commit();
        }
    }
};

struct many_down {
    float *y; /* [slot][n_cols] */
    const uint32_t *slot_of;
    uint32_t n_cols;

    static constexpr bool has_bias = false;
    static constexpr uint32_t fp8_stages = 4, mxfp4_stages = 5;
    static constexpr uint32_t pitch = TD_XT * 4 + 16, piece = 8 * pitch, bytes = 2 * 2 * piece;

    __device__ __forceinline__ void start(uint32_t) const {}
    template <int N>
    __device__ __forceinline__ void store(const many_head &at, uint32_t &, uint32_t, uint32_t rows,
                                          float (&acc)[2][N / 2]) const
    {
        const uint32_t thread = this_thread(), wg = thread / 128, warp = thread % 128 / 32, lane = thread % 32,
                       gr = lane / 4, t = lane % 4;
        const uint32_t row = at.row_tile * MANY_CONSUMERS + wg * TD_XT + warp * 16 + gr;
        if (rows == 0) return;
        uint32_t slots[N / 32] = {};
#pragma unroll
        for (int j = 0; j < N / 32; j++)
            if (j * 32 + lane < at.n) slots[j] = slot_of[at.tile * MANY_TOKENS + j * 32 + lane];
        float *const first = y + row;
        const bool is_in[4] = {row < n_cols, row + 8 < n_cols, row + 64 < n_cols, row + 72 < n_cols};
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint32_t token = i * 8 + t * 2 + c, slot = __shfl_sync(~0u, slots[i / 4], token % 32);
                float *to = first + (size_t)slot * n_cols;
                if (token >= at.n) continue;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (is_in[j]) to[j / 2 * 64 + j % 2 * 8] = acc[j / 2][4 * i + c + j % 2 * 2];
            }
    }
};

#endif
