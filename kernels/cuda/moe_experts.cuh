/* Y^T = W X^T of routed experts in FP8: W's rows are the tensor core's rows, tokens its columns, so that a tile of few
 * tokens is as good a shape as one of many. A tile is 128 rows of W by N tokens of one expert; a producer thread streams
 * contiguous tiles of W and X (expert_format.h) through a ring of stages, two warpgroups take 64 rows of W each. A stage is
 * 128 of k: the tensor core starts from zero, and its sum times both scales is added in f32 to what began as the bias. W in
 * MXFP4 is widened in registers on its way.
 *
 * Each block has a run of row tiles of its own, so that multiprocessors do not ask for the same bytes at once. One width for
 * every batch, where rows must not depend on their company; few tokens an expert: moe_few.cuh, many: moe_many.cuh, which share
 * helpers of this file.
 *
 * The lists of tiles were written two kernels earlier at least, so they and W are read before before(). */
#ifndef TD_KERNELS_CUDA_MOE_EXPERTS_CUH
#define TD_KERNELS_CUDA_MOE_EXPERTS_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_scratch.h"
#include "kernels/cuda/traps.cuh"
#include "kernels/cuda/wgmma_fp8.cuh"

/* Two warpgroups cover a tile's rows; a third, of which one thread copies, gives its registers to them. */
#define EXPERT_CONSUMERS 256
#define EXPERT_THREADS   (EXPERT_CONSUMERS + 128)

struct expert_gemm {
    const uint8_t *w; /* of the first expert; expert e's lies e * w_bytes further */
    size_t w_bytes, scales_at;
    const float *bias; /* [E][n_rows] in packed order; NULL: none */
    uint32_t n_rows, row_tiles, k_tiles;
    const uint8_t *x; /* [tile][k_tiles][N][128] E4M3, swizzled */
    const float *sx;  /* [tile][k_tiles][N] */
    const struct slot_tile *tiles;
    const uint32_t *n_tiles;
    uint32_t pieces; /* of k; several only for an epilogue that keeps them apart */
};

/* gate * sigmoid(alpha * gate) * (up + 1), clamped first. A NaN stays one. IS_FAST: the division by a reciprocal. */
template <bool IS_FAST = false>
static __device__ __forceinline__ float activate(float gate, float up, float alpha, float limit)
{
    const float plus = TRAP(FP8_NO_PLUS_ONE) ? 0.0f : 1.0f;
    const float high = TRAP(FP8_NO_CLAMP) ? INFINITY : limit, gate_high = TRAP(FP8_CLAMP_LATE) ? INFINITY : high;
    gate = gate > gate_high ? gate_high : gate;
    if (TRAP(FP8_CLAMP_BELOW)) gate = fmaxf(gate, -limit);
    up = up > high ? high : up < -high ? -high : up;
    const float below = 1.0f + __expf(-alpha * gate);
    float act = IS_FAST ? __fdividef(gate, below) : gate / below;
    if (TRAP(FP8_CLAMP_LATE)) act = fminf(act, limit);
    return act * (up + plus);
}

static __device__ __forceinline__ uint32_t two_codes(float lo, float hi)
{
    uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
    return out;
}

/* The activation in f16, which holds it to 2^-12. */
struct expert_up {
    __half *u; /* [padded row][n_units] */
    uint32_t n_units;
    float alpha, limit;

    __device__ __forceinline__ void operator()(uint32_t padded_row, uint32_t, uint32_t w_row, float gate, float up) const
    {
        uint32_t unit = w_row / 16 * 8 + w_row % 8;
        if (unit < n_units)
            u[(size_t)padded_row * n_units + unit] = __float2half_rn(activate(gate, up, alpha, limit));
    }
};

struct expert_down {
    float *y; /* [slot][n_cols] */
    const uint32_t *slot_of;
    uint32_t n_cols;

    __device__ __forceinline__ void operator()(uint32_t padded_row, uint32_t, uint32_t w_row, float a, float b) const
    {
        float *to = y + (size_t)slot_of[padded_row] * n_cols;
        if (w_row < n_cols) to[w_row] = a;
        if (w_row + 8 < n_cols) to[w_row + 8] = b;
    }
};

template <int N, td_expert_form FORM> struct expert_ring {
    static constexpr int w_bytes = FORM == TD_EXPERTS_FP8 ? TD_XT * TD_XT_FP8 : TD_XT / 16 * TD_XT_MXFP4;
    /* Nearly all of the shared memory: a second block on the multiprocessor would leave another one without. */
    static constexpr int stages = 208 * 1024 / (w_bytes + N * 132);
    static constexpr size_t x_at = 0, w_at = x_at + (size_t)stages * N * 128, sx_at = w_at + (size_t)stages * w_bytes,
                            bars_at = sx_at + (size_t)stages * N * 4, tables_at = bars_at + 16 * stages,
                            bytes = tables_at + 32 * 8 + 1024;
};

static __device__ __forceinline__ void copy_bytes(void *to, const void *from, uint32_t n, uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_addr(to)),
                 "l"(from), "r"(n), "r"(smem_addr(bar))
                 : "memory");
}

static __device__ __forceinline__ uint32_t permute_bytes(uint32_t lo, uint32_t hi, uint32_t which)
{
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(lo), "r"(hi), "r"(which));
    return out;
}

static __device__ __forceinline__ uint32_t load_word(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
static __device__ __forceinline__ uint2 load_two(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
static __device__ __forceinline__ uint4 load_words(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* Eight FP4 of a row become E4M3: columns 4t .. 4t + 3 of a step of 32, and those 16 further. */
static __device__ __forceinline__ void widen_word(uint32_t word, uint2 table, uint32_t *near, uint32_t *far)
{
    uint32_t m = word & 0x77777777u;
    *near = permute_bytes(table.x, table.y, m) | (word & 0x80808080u);
    *far = permute_bytes(table.x, table.y, m >> 16) | (word << 4 & 0x80808080u);
}

/* What a block works on, in the order it does. */
struct expert_work {
    uint32_t item, end, tile, row_tile, piece, k, k_end;
    struct slot_tile slots;

    __device__ __forceinline__ bool open(const expert_gemm &g)
    {
        if (item >= end) return false;
        piece = item % g.pieces;
        uint32_t i = item / g.pieces;
        row_tile = i % g.row_tiles;
        tile = i / g.row_tiles;
        slots = g.tiles[tile];
        k = piece * g.k_tiles / g.pieces;
        k_end = (piece + 1) * g.k_tiles / g.pieces;
        return true;
    }
    __device__ __forceinline__ bool start(const expert_gemm &g)
    {
        const uint32_t n = *g.n_tiles * g.row_tiles * g.pieces;
        item = (uint32_t)((uint64_t)n * blockIdx.x / gridDim.x);
        end = (uint32_t)((uint64_t)n * (blockIdx.x + 1) / gridDim.x);
        return open(g);
    }
    __device__ __forceinline__ bool next(const expert_gemm &g)
    {
        item++;
        return open(g);
    }
    __device__ __forceinline__ bool next_k(const expert_gemm &g) { return ++k < k_end || next(g); }
};

template <int N, td_expert_form FORM, class Epilogue>
static __global__ void __launch_bounds__(EXPERT_THREADS, 1)
    experts(const expert_gemm g, const Epilogue store)
{
    using ring = expert_ring<N, FORM>;
    constexpr int STAGES = ring::stages, R = N / 2;
    extern __shared__ uint8_t raw[];
    uint8_t *base = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    uint32_t base_at = smem_addr(base);
    asm volatile("" : "+r"(base_at)); /* else it is worked out again and again */
    uint64_t *full = reinterpret_cast<uint64_t *>(base + ring::bars_at), *empty = full + STAGES;
    uint2 *tables = reinterpret_cast<uint2 *>(base + ring::tables_at);
    const uint32_t tables_at = base_at + (uint32_t)ring::tables_at;
    auto x_of = [&](uint32_t st) { return base + ring::x_at + (size_t)st * N * 128; };
    auto w_of = [&](uint32_t st) { return base + ring::w_at + (size_t)st * ring::w_bytes; };
    auto sx_of = [&](uint32_t st) { return reinterpret_cast<float *>(base + ring::sx_at) + st * N; };

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], EXPERT_CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    if (FORM == TD_EXPERTS_MXFP4 && threadIdx.x < 32) {
        uint64_t t = threadIdx.x < TD_X_TABLES ? td_expert_table_bytes(threadIdx.x) : 0;
        tables[threadIdx.x] = make_uint2((uint32_t)t, (uint32_t)(t >> 32));
    }
    __syncthreads();

    expert_work at;
    bool is_open = at.start(g);
    if (threadIdx.x >= EXPERT_CONSUMERS) {
        regs_less<40>();
        if (threadIdx.x != EXPERT_CONSUMERS) return;
        auto rows_of = [&](const auto &a) { return min(g.n_rows - a.row_tile * TD_XT, TD_XT); };
        auto copy_w = [&](const auto &a, uint32_t st) {
            uint32_t rows = rows_of(a), bytes = (uint32_t)td_expert_rows_bytes(FORM, rows);
            barrier_expect(&full[st], bytes + N * 132);
            copy_bytes(w_of(st),
                       g.w + a.slots.expert * g.w_bytes + (size_t)a.row_tile * g.k_tiles * ring::w_bytes +
                           (size_t)a.k * bytes,
                       bytes, &full[st]);
        };
        auto copy_x = [&](const auto &a, uint32_t st) {
            size_t at_x = ((size_t)a.tile * g.k_tiles + a.k) * N;
            copy_bytes(x_of(st), g.x + at_x * 128, N * 128, &full[st]);
            copy_bytes(sx_of(st), g.sx + at_x, N * 4, &full[st]);
        };
        auto early = at;
        bool early_open = is_open;
        uint32_t n = 0;
        for (; is_open && n < STAGES; n++) { /* W is nobody's output */
            copy_w(at, n);
            is_open = at.next_k(g);
        }
        before();
        let_next();
        for (uint32_t i = 0; early_open && i < n; i++) {
            copy_x(early, i);
            early_open = early.next_k(g);
        }
        for (; is_open; n++) {
            uint32_t st = n % STAGES;
            barrier_wait(&empty[st], (n / STAGES & 1) ^ 1);
            copy_w(at, st);
            copy_x(at, st);
            is_open = at.next_k(g);
        }
        return;
    }

    regs_more<232>();
    const uint32_t wg = threadIdx.x % EXPERT_CONSUMERS / 128;
    const uint32_t warp = threadIdx.x % EXPERT_CONSUMERS / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    before();
    uint32_t n_before = 0; /* stages of items that are done */
    for (; is_open; n_before += at.k_end - at.k, is_open = at.next(g)) {
        const uint32_t w_row = at.row_tile * TD_XT + warp * 16 + gr; /* and + 8 */
        const bool is_idle = at.row_tile * TD_XT + wg * 64 >= g.n_rows;
        const float *scales = reinterpret_cast<const float *>(g.w + at.slots.expert * g.w_bytes + g.scales_at) +
                              (size_t)at.row_tile * g.k_tiles;
        const float my_scale = lane < g.k_tiles ? scales[lane] : 0;
        float acc[R], part[R];
        float lo = 0, hi = 0;
        if (g.bias != nullptr && at.k == 0) {
            const float *bias = g.bias + (size_t)at.slots.expert * g.n_rows;
            if (w_row < g.n_rows) lo = bias[w_row], hi = bias[w_row + 8];
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            acc[i] = i % 4 < 2 ? lo : hi;
            part[i] = 0;
        }
        uint32_t a[4][4], a_next[4][4]; /* MXFP4: W as the tensor core takes it */
        auto widen = [&](uint32_t st, uint32_t(&to)[4][4]) {
            const uint32_t rows = base_at + (uint32_t)ring::w_at + st * ring::w_bytes + warp * TD_XT_MXFP4;
            const uint4 near = load_words(rows + lane * 16), far = load_words(rows + 512 + lane * 16);
            const uint32_t which_near = load_word(rows + 1024 + gr * 4), which_far = load_word(rows + 1056 + gr * 4);
            const uint32_t words[4][2] = {{near.x, far.x}, {near.y, far.y}, {near.z, far.z}, {near.w, far.w}};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                /* Masked: rows beyond the matrix hold what was left there. */
                widen_word(words[s][0], load_two(tables_at + (which_near >> 8 * s & 31) * 8), &to[s][0], &to[s][2]);
                widen_word(words[s][1], load_two(tables_at + (which_far >> 8 * s & 31) * 8), &to[s][1], &to[s][3]);
            }
        };
        if constexpr (FORM == TD_EXPERTS_MXFP4) {
            if (at.k < at.k_end && !is_idle) {
                barrier_wait(&full[n_before % STAGES], n_before / STAGES & 1);
                widen(n_before % STAGES, a);
            }
        }
        for (uint32_t k = at.k; k < at.k_end; k++) {
            const uint32_t n = n_before + k - at.k, st = n % STAGES, next = n + 1;
            if (is_idle) {
                barrier_wait(&full[st], n / STAGES & 1);
                if (lane == 0) barrier_arrive(&empty[st]);
                continue;
            }
            const uint64_t x = tile_desc(x_of(st));
            if constexpr (FORM == TD_EXPERTS_FP8) barrier_wait(&full[st], n / STAGES & 1);
            keep(part);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) {
                if constexpr (FORM == TD_EXPERTS_FP8)
                    fp8_ss(part, tile_desc(w_of(st) + wg * 64 * TD_XT_FP8) + s * 2, x + s * 2, s == 0);
                else
                    fp8_rs(part, a[s], x + s * 2, s == 0);
            }
            wgmma_commit();
            keep(part);
            const float scale = __shfl_sync(~0u, my_scale, k);
            const uint32_t sx = base_at + (uint32_t)ring::sx_at + st * N * 4 + t * 8;
            float2 both[N / 8];
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                uint2 v = load_two(sx + i * 32);
                both[i] = make_float2(__uint_as_float(v.x) * scale, __uint_as_float(v.y) * scale);
            }
            if constexpr (FORM == TD_EXPERTS_MXFP4) {
                if (k + 1 < at.k_end) { /* while the tensor core works */
                    barrier_wait(&full[next % STAGES], next / STAGES & 1);
                    widen(next % STAGES, a_next);
                }
            }
            wgmma_wait<0>();
            keep(part);
            __syncwarp();
            if (lane == 0) barrier_arrive(&empty[st]);
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                acc[4 * i] += part[4 * i] * both[i].x;
                acc[4 * i + 1] += part[4 * i + 1] * both[i].y;
                acc[4 * i + 2] += part[4 * i + 2] * both[i].x;
                acc[4 * i + 3] += part[4 * i + 3] * both[i].y;
            }
            if constexpr (FORM == TD_EXPERTS_MXFP4) {
#pragma unroll
                for (int s = 0; s < 4; s++)
#pragma unroll
                    for (int j = 0; j < 4; j++) a[s][j] = a_next[s][j];
            }
        }
        if (is_idle) continue;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint32_t col = i * 8 + t * 2 + c;
                if (col < at.slots.n) store(at.tile * N + col, at.piece, w_row, acc[4 * i + c], acc[4 * i + 2 + c]);
            }
    }
}

#endif
