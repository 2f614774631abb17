/* The experts' products for many rows: Y^T = W X^T as in moe_experts.cuh, in tiles of 256 rows of W by up to 128
 * tokens, so that a byte from the L2 is used often: that is what limits smaller tiles. Each of two warpgroups has 128
 * rows, one block of scales, as two blocks of 64 that take turns in one set of partial sums; while one warpgroup adds
 * up in f32 the other keeps the tensor core at work. An expert's last tile takes only as many columns as it has tokens,
 * in steps of 32. */
#ifndef TD_KERNELS_CUDA_MOE_MANY_CUH
#define TD_KERNELS_CUDA_MOE_MANY_CUH

#include "kernels/cuda/moe_many_out.cuh"

#define MANY_GROUP   8u /* token tiles whose blocks run together */
#define MANY_THREADS (MANY_CONSUMERS + 128u)
#define MANY_HEADS   8u /* items that may be under way, whatever k */

struct many_gemm {
    const uint8_t *w; /* of the first expert; expert e's lies e * w_bytes further */
    size_t w_bytes, scales_at;
    const float *bias;                               /* [E][n_rows] in packed order; NULL: none */
    uint32_t n_rows, row_tiles, k_tiles, last_steps; /* of 32 in the last k tile */
    const uint8_t *x;                                /* [tile][k_tiles][128][128] E4M3, swizzled */
    const float *sx;                                 /* [tile][k_tiles][128] */
    const struct slot_tile *tiles;
    const uint32_t *n_tiles;
};

struct many_work {
    uint32_t item, end, n_tiles;

    __device__ __forceinline__ void start(const many_gemm &g)
    {
        n_tiles = *g.n_tiles;
        item = blockIdx.x;
        end = n_tiles * ((g.row_tiles + 1) / 2);
    }
    __device__ __forceinline__ bool is_open() const { return item < end; }
    __device__ __forceinline__ void next() { item += gridDim.x; }
    /* Eight or so token tiles by all rows at a time; the rows at the end, which are fewer, of all tiles last, so that
     * the multiprocessors end together. */
    __device__ __forceinline__ void where(const many_gemm &g, uint32_t *tile, uint32_t *row_tile) const
    {
        const uint32_t n_full = g.n_rows / MANY_CONSUMERS;
        if (item >= n_tiles * n_full) {
            *tile = item - n_tiles * n_full;
            *row_tile = n_full;
            return;
        }
        const uint32_t first = item / (MANY_GROUP * n_full) * MANY_GROUP, n = min(n_tiles - first, MANY_GROUP);
        const uint32_t i = item - first * n_full;
        *tile = first + i % n;
        *row_tile = i / n;
    }
};

static __device__ __forceinline__ uint32_t many_columns(uint32_t n) { return (n + 31) / 32 * 32; }

template <td_expert_form FORM, class Out> struct many_ring {
    static constexpr uint32_t w_tile = FORM == TD_EXPERTS_FP8 ? TD_XT * TD_XT_FP8 : TD_XT / 16 * TD_XT_MXFP4,
                              w_bytes = 2 * w_tile, x_bytes = MANY_TOKENS * 128,
                              stages = FORM == TD_EXPERTS_FP8 ? Out::fp8_stages : Out::mxfp4_stages;
    /* Scales as they come; times both of W's, as a lane takes them. */
    static constexpr uint32_t x_at = 0, w_at = x_at + stages * x_bytes, sx_at = w_at + stages * w_bytes,
                              both_at = sx_at + stages * MANY_TOKENS * 4,
                              bars_at = both_at + 2 * stages * MANY_TOKENS * 4, tables_at = bars_at + 256,
                              heads_at = tables_at + 256,
                              out_at = heads_at + MANY_HEADS * (16 + (Out::has_bias ? MANY_CONSUMERS * 4 : 0)),
                              bytes = out_at + Out::bytes + 1024;
};

/* Streams tiles of W and X: one thread. */
template <class Ring>
static __device__ __forceinline__ void many_copy(const many_gemm &g, uint8_t *base, td_expert_form form)
{
    constexpr uint32_t STAGES = Ring::stages;
    uint64_t *full = reinterpret_cast<uint64_t *>(base + Ring::bars_at), *empty = full + STAGES;
    many_work work;
    uint32_t n = 0;
    bool is_first = true;
    for (work.start(g); work.is_open(); work.next()) {
        uint32_t tile, row_tile;
        work.where(g, &tile, &row_tile);
        const struct slot_tile slots = g.tiles[tile];
        const uint32_t columns = many_columns(slots.n);
        row_tile *= 2;
        const uint32_t rows_lo = min(g.n_rows - row_tile * TD_XT, TD_XT),
                       rows_hi = row_tile + 1 < g.row_tiles ? min(g.n_rows - (row_tile + 1) * TD_XT, TD_XT) : 0;
        const uint32_t lo = (uint32_t)td_expert_rows_bytes(form, rows_lo),
                       hi = (uint32_t)td_expert_rows_bytes(form, rows_hi);
        const uint8_t *w_lo = g.w + slots.expert * g.w_bytes + (size_t)row_tile * g.k_tiles * Ring::w_tile,
                      *w_hi = w_lo + (size_t)g.k_tiles * Ring::w_tile,
                      *x = g.x + (size_t)tile * g.k_tiles * (MANY_TOKENS * 128);
        const float *sx = g.sx + (size_t)tile * g.k_tiles * MANY_TOKENS;
        auto copy_w = [&](uint32_t k, uint32_t st) {
            barrier_expect(&full[st], lo + hi + columns * 132);
            copy_bytes(base + Ring::w_at + st * Ring::w_bytes, w_lo + (size_t)k * lo, lo, &full[st]);
            if (hi != 0)
                copy_bytes(base + Ring::w_at + st * Ring::w_bytes + Ring::w_tile, w_hi + (size_t)k * hi, hi, &full[st]);
        };
        auto copy_x = [&](uint32_t k, uint32_t st) {
            copy_bytes(base + Ring::x_at + st * Ring::x_bytes, x + (size_t)k * (MANY_TOKENS * 128), columns * 128,
                       &full[st]);
            copy_bytes(base + Ring::sx_at + st * (MANY_TOKENS * 4), sx + (size_t)k * MANY_TOKENS, columns * 4,
                       &full[st]);
        };
        uint32_t k = 0;
        if (is_first) { /* W is nobody's output */
            const uint32_t n_early = min(STAGES, g.k_tiles);
            for (uint32_t i = 0; i < n_early; i++) copy_w(i, i);
            before();
            let_next();
            for (; n < n_early; n++) copy_x(k++, n);
            is_first = false;
        }
        for (; k < g.k_tiles; k++, n++) {
            const uint32_t st = n % STAGES;
            barrier_wait(&empty[st], (n / STAGES & 1) ^ 1);
            copy_w(k, st);
            copy_x(k, st);
        }
    }
}

/* Says where items lie, what their sums start from, and what a stage's sums are to be multiplied by, so that the
 * warpgroups neither wait for global memory nor keep registers for it: one warp. */
template <class Ring, bool HAS_BIAS>
static __device__ __forceinline__ void many_prepare(const many_gemm &g, uint8_t *base)
{
    constexpr uint32_t STAGES = Ring::stages;
    uint64_t *full = reinterpret_cast<uint64_t *>(base + Ring::bars_at), *empty = full + STAGES,
             *ready = empty + STAGES;
    const uint32_t lane = threadIdx.x % 32, base_at = smem_addr(base);
    /* Of tokens 4 lane .. + 3 the first two's place: in 16 tokens a lane's (4 g + t) four are neighbours. */
    const uint32_t place = (lane / 4 * 16 + lane % 2 * 8 + lane / 2 % 2 * 2) * 4;
    many_work work;
    uint32_t n = 0, n_items = 0;
    work.start(g);
    for (; work.is_open(); work.next(), n_items++) {
        uint32_t tile, row_tile;
        work.where(g, &tile, &row_tile);
        const struct slot_tile slots = g.tiles[tile];
        const float *scales =
            reinterpret_cast<const float *>(g.w + slots.expert * g.w_bytes + g.scales_at) + row_tile * 2 * g.k_tiles;
        const float lo = lane < g.k_tiles ? scales[lane] : 0,
                    hi = lane < g.k_tiles && row_tile * 2 + 1 < g.row_tiles ? scales[g.k_tiles + lane] : 0;
        const uint32_t head = base_at + Ring::heads_at + n_items % MANY_HEADS * 16;
        if (lane == 0)
            store_four(head,
                       make_float4(__uint_as_float(tile), __uint_as_float(row_tile), __uint_as_float(slots.n), 0));
        if constexpr (HAS_BIAS) {
            const uint32_t to =
                base_at + Ring::heads_at + MANY_HEADS * 16 + n_items % MANY_HEADS * (MANY_CONSUMERS * 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t row = row_tile * MANY_CONSUMERS + h * 128 + lane * 4;
                store_four(to + (h * 128 + lane * 4) * 4,
                           row < g.n_rows ? *(const float4 *)(g.bias + (size_t)slots.expert * g.n_rows + row)
                                          : make_float4(0, 0, 0, 0));
            }
        }
        for (uint32_t k = 0; k < g.k_tiles; k++, n++) {
            const uint32_t st = n % STAGES;
            barrier_wait(&full[st], n / STAGES & 1);
            const float4 v = load_floats(base_at + Ring::sx_at + st * (MANY_TOKENS * 4) + lane * 16);
            const float a = __shfl_sync(~0u, lo, k), b = __shfl_sync(~0u, hi, k);
            const uint32_t to = base_at + Ring::both_at + st * (2 * MANY_TOKENS * 4) + place;
            store_two(to, v.x * a, v.y * a);
            store_two(to + 16, v.z * a, v.w * a);
            store_two(to + MANY_TOKENS * 4, v.x * b, v.y * b);
            store_two(to + MANY_TOKENS * 4 + 16, v.z * b, v.w * b);
            __syncwarp();
            if (lane == 0) barrier_arrive(&ready[st]);
        }
    }
    if (lane == 0) {
        barrier_wait(&empty[n % STAGES], (n / STAGES & 1) ^ 1);
        store_four(base_at + Ring::heads_at + n_items % MANY_HEADS * 16, make_float4(0, 0, 0, 0));
        barrier_arrive(&ready[n % STAGES]);
    }
}

/* At an item's start the second warpgroup waits until the first's first products are done, and stays behind by that
 * much: in step, both would be in the tensor core together and then both out of it. */
static __device__ __forceinline__ void come_later()
{
    asm volatile("bar.sync 4, %0;" ::"n"(MANY_CONSUMERS) : "memory");
}
static __device__ __forceinline__ void let_come()
{
    asm volatile("bar.arrive 4, %0;" ::"n"(MANY_CONSUMERS) : "memory");
}

template <td_expert_form FORM, class Out>
static __global__ void __launch_bounds__(MANY_THREADS, 1) experts_many(const many_gemm g, const Out out)
{
    using ring = many_ring<FORM, Out>;
    constexpr uint32_t STAGES = ring::stages;
    extern __shared__ uint8_t raw[];
    uint8_t *base = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    uint32_t base_at = smem_addr(base);
    asm volatile("" : "+r"(base_at)); /* else it is worked out again and again */
    uint64_t *full = reinterpret_cast<uint64_t *>(base + ring::bars_at), *empty = full + STAGES,
             *ready = empty + STAGES;

    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], MANY_CONSUMERS / 32);
            barrier_init(&ready[i], 1);
        }
        barrier_init_fence();
    }
    if (FORM == TD_EXPERTS_MXFP4 && threadIdx.x < 32) {
        uint64_t v = threadIdx.x < TD_X_TABLES ? td_expert_table_bytes(threadIdx.x) : 0;
        reinterpret_cast<uint2 *>(base + ring::tables_at)[threadIdx.x] = make_uint2((uint32_t)v, (uint32_t)(v >> 32));
    }
    out.start(base_at + ring::out_at);
    __syncthreads();

    /* The same in all lanes, and the compiler knows. */
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == MANY_CONSUMERS / 128) {
        regs_less<24>(); /* 24 and twice 240 are what the launch has */
        if (threadIdx.x == MANY_CONSUMERS) many_copy<ring>(g, base, FORM);
        if (threadIdx.x / 32 == MANY_CONSUMERS / 32 + 1) many_prepare<ring, Out::has_bias>(g, base);
        return;
    }

    regs_more<240>();
    const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    before();
    uint32_t st = 0, phase = 0, n_stored = 0;
    auto work = [&]<int N>(const many_head &head, uint32_t rows, uint32_t bias_at) {
        constexpr int R = N / 2;
        float acc[2][R], part[R];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            float lo = 0, hi = 0;
            if (Out::has_bias) lo = load_float(bias_at + b * 256), hi = load_float(bias_at + b * 256 + 32);
#pragma unroll
            for (int i = 0; i < R; i++) acc[b][i] = i % 4 < 2 ? lo : hi;
        }
#pragma unroll
        for (int i = 0; i < R; i++) part[i] = 0;
        auto stage = [&]<int BLOCKS, int STEPS, bool IS_FIRST>() {
            barrier_wait(&full[st], phase);
            const uint64_t x = tile_desc(base + ring::x_at + st * ring::x_bytes);
            const uint32_t both =
                base_at + ring::both_at + st * (2 * MANY_TOKENS * 4) + group * (MANY_TOKENS * 4) + t * 16;
            float4 s[N / 16];
            auto scales = [&]() {
#pragma unroll
                for (int i = 0; i < N / 16; i++) s[i] = load_floats(both + i * 64);
            };
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                keep(part);
                if constexpr (FORM == TD_EXPERTS_FP8) {
                    const uint64_t w =
                        tile_desc(base + ring::w_at + st * ring::w_bytes + (group * 2 + b) * 64 * TD_XT_FP8);
                    if (IS_FIRST && b == 0 && group == 1) come_later();
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < STEPS; i++) fp8_ss(part, w + 2 * i, x + 2 * i, i == 0);
                } else {
                    uint32_t a[4][4];
                    const uint32_t from =
                        base_at + ring::w_at + st * ring::w_bytes + ((group * 2 + b) * 4 + warp) * TD_XT_MXFP4;
                    const uint32_t tables = base_at + ring::tables_at;
                    const uint4 near = load_words(from + lane * 16), far = load_words(from + 512 + lane * 16);
                    const uint32_t which_near = load_word(from + 1024 + gr * 4),
                                   which_far = load_word(from + 1056 + gr * 4);
                    const uint32_t words[4][2] = {{near.x, far.x}, {near.y, far.y}, {near.z, far.z}, {near.w, far.w}};
#pragma unroll
                    for (int i = 0; i < STEPS; i++) {
                        /* Masked: rows beyond the matrix hold what was left there. */
                        widen_word(words[i][0], load_two(tables + (which_near >> 8 * i & 31) * 8), &a[i][0], &a[i][2]);
                        widen_word(words[i][1], load_two(tables + (which_far >> 8 * i & 31) * 8), &a[i][1], &a[i][3]);
                    }
                    if (IS_FIRST && b == 0 && group == 1) come_later();
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < STEPS; i++) fp8_rs(part, a[i], x + 2 * i, i == 0);
                }
                wgmma_commit();
                keep(part);
                if (b == 0) barrier_wait(&ready[st], phase);
                if (b == 0 && FORM == TD_EXPERTS_FP8) scales();
                wgmma_wait<0>();
                keep(part);
                if (IS_FIRST && b == 0 && group == 0) let_come();
                if (FORM != TD_EXPERTS_FP8) scales();
                if (b + 1 == BLOCKS) {
                    __syncwarp();
                    if (FORM == TD_EXPERTS_FP8 && lane == 0) barrier_arrive(&empty[st]);
                }
#pragma unroll
                for (int i = 0; i < N / 16; i++) {
                    acc[b][8 * i] += part[8 * i] * s[i].x;
                    acc[b][8 * i + 1] += part[8 * i + 1] * s[i].y;
                    acc[b][8 * i + 2] += part[8 * i + 2] * s[i].x;
                    acc[b][8 * i + 3] += part[8 * i + 3] * s[i].y;
                    acc[b][8 * i + 4] += part[8 * i + 4] * s[i].z;
                    acc[b][8 * i + 5] += part[8 * i + 5] * s[i].w;
                    acc[b][8 * i + 6] += part[8 * i + 6] * s[i].z;
                    acc[b][8 * i + 7] += part[8 * i + 7] * s[i].w;
                }
                if (FORM != TD_EXPERTS_FP8 && b + 1 == BLOCKS) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&empty[st]);
                }
            }
            if (++st == STAGES) st = 0, phase ^= 1;
        };
        const uint32_t n_whole = g.k_tiles - (g.last_steps <= 2);
        if (rows == 0) {
            for (uint32_t k = 0; k < g.k_tiles; k++) {
                barrier_wait(&ready[st], phase);
                if (lane == 0) barrier_arrive(&empty[st]);
                if (++st == STAGES) st = 0, phase ^= 1;
            }
        } else if (rows <= 64) {
            for (uint32_t k = 0; k < g.k_tiles; k++) stage.template operator()<1, 4, false>();
        } else {
            uint32_t k = 0;
            /* Both have all of their rows, and neither can be an item ahead. */
            if (head.row_tile * MANY_CONSUMERS + 192 < g.n_rows && g.k_tiles > 2 * STAGES) {
                stage.template operator()<2, 4, true>();
                k = 1;
            }
            for (; k < n_whole; k++) stage.template operator()<2, 4, false>();
            if (n_whole < g.k_tiles) stage.template operator()<2, 2, false>();
        }
        out.template store<N>(head, n_stored, base_at + ring::out_at, rows, acc);
    };
    for (uint32_t n_items = 0;; n_items++) {
        barrier_wait(&ready[st], phase);
        const uint4 v = load_words(base_at + ring::heads_at + n_items % MANY_HEADS * 16);
        const many_head head = {v.x, v.y, v.z};
        if (head.n == 0) break;
        const uint32_t row = head.row_tile * MANY_CONSUMERS + group * TD_XT,
                       rows = row < g.n_rows ? min(g.n_rows - row, TD_XT) : 0;
        const uint32_t bias_at = base_at + ring::heads_at + MANY_HEADS * 16 +
                                 n_items % MANY_HEADS * (MANY_CONSUMERS * 4) + (group * TD_XT + warp * 16 + gr) * 4;
        switch (many_columns(head.n) / 32) {
        case 1: work.template operator()<32>(head, rows, bias_at); break;
        case 2: work.template operator()<64>(head, rows, bias_at); break;
        case 3: work.template operator()<96>(head, rows, bias_at); break;
        default: work.template operator()<128>(head, rows, bias_at);
        }
    }
    store_done();
}

#endif
