/* Both products of routed experts for few tokens an expert: one kernel whose blocks, one a multiprocessor, stream W from the
 * first byte to the last. Y^T = W X^T in E4M3: W's rows are the tensor core's rows, tokens its columns.
 *
 * An item is 256 rows of W by the N tokens of a tile, so that the first product's item is just one group of 128 units: its
 * epilogue activates and quantises what the second product reads. A stage is 128 of k; the tensor core starts each from zero,
 * and its sum times both scales is added in f32 to what began as the bias. W in MXFP4 is widened in registers on its way.
 *
 * All stages lie in one row: tiles, their items, k; a block has a run of them, equal by bytes. A run that begins inside an
 * item leaves its sums as a carry to whoever began the item, who adds carries in their order: results depend on nothing but
 * the inputs. Between the products all blocks meet; meanwhile their rings fill with W of the second.
 *
 * Blocks wait for each other, so all have to be resident: one a multiprocessor, and one such kernel at a time on a device.
 * Lists of tiles were written two kernels earlier at least, so they and W are read before before(). */
#ifndef TD_KERNELS_CUDA_MOE_FEW_CUH
#define TD_KERNELS_CUDA_MOE_FEW_CUH

#include "kernels/cuda/moe_experts.cuh"

#define FEW_CONSUMERS 512 /* a warp has 16 rows of an item */
#define FEW_THREADS   (FEW_CONSUMERS + 32)
#define FEW_ROWS      256u
#define FEW_RING      (222 * 1024)

struct few_product {
    const uint8_t *w; /* of the first expert; expert e's lies e * w_bytes further */
    size_t w_bytes, scales_at;
    const float *bias; /* [E][n_rows] in packed order; NULL: none */
    uint32_t n_rows, k_tiles, n_items; /* items of an expert */
    const uint8_t *x;                  /* [tile][k_tiles][N][128] E4M3, swizzled */
    const float *sx;                   /* [tile][k_tiles][N] */
};

struct few_experts {
    few_product up, down;
    const struct slot_tile *tiles;
    const uint32_t *n_tiles, *slot_of;
    uint8_t *u_codes; /* down.x, down.sx */
    float *su;
    uint32_t n_units;
    float alpha, limit;
    float *y; /* [slot][n_cols] */
    uint32_t n_cols;
    float *carries;  /* [2][blocks][N / 2][FEW_CONSUMERS] */
    uint32_t *flags; /* [2][blocks] carries that are there; then how many blocks are done with up. Zero before */
};

template <int N, td_expert_form FORM> struct few_ring {
    static constexpr uint32_t tile_bytes = FORM == TD_EXPERTS_FP8 ? TD_XT * TD_XT_FP8 : TD_XT / 16 * TD_XT_MXFP4;
    static constexpr uint32_t w_bytes = 2 * tile_bytes;
    static constexpr uint32_t stages = FEW_RING / (w_bytes + N * 132);
    static constexpr uint32_t x_at = 0, w_at = x_at + stages * N * 128, sx_at = w_at + stages * w_bytes,
                              bars_at = sx_at + stages * N * 4, most_at = bars_at + 16 * stages,
                              /* 32 of 8 bytes: rows beyond the matrix hold what was left there. */
                              tables_at = most_at + 2 * FEW_CONSUMERS / 32 * N * 4, bytes = tables_at + 256 + 1024;
};

/* The stage where a block's run begins: bytes before it are the block's share. */
static __device__ __forceinline__ uint32_t few_first(const few_product &p, uint32_t n_tiles, uint32_t block)
{
    const uint32_t units = p.n_rows / 16, whole = FEW_ROWS / 16 * p.k_tiles, each = units * p.k_tiles;
    const uint32_t at = n_tiles * each * block / gridDim.x;
    const uint32_t tile = at / each, item = at % each / whole;
    return (tile * p.n_items + item) * p.k_tiles + at % each % whole / min(units - item * (FEW_ROWS / 16), FEW_ROWS / 16);
}

static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void add_release(uint32_t *p, uint32_t n)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}
/* Ordinary accesses on one side, the copy engine's on the other. */
static __device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

/* ---- one thread: copies ---- */

template <int N, td_expert_form FORM> struct few_producer {
    using ring = few_ring<N, FORM>;
    uint8_t *base;
    uint64_t *full, *empty;
    uint32_t st, parity;

    struct cursor {
        uint32_t s, end, k, item, tile, x_rows;
        size_t w; /* of the expert */
    };

    static __device__ __forceinline__ void open_tile(const few_experts &g, const few_product &p, cursor *c)
    {
        const struct slot_tile t = g.tiles[c->tile];
        c->x_rows = (t.n + 7) / 8 * 8;
        c->w = t.expert * p.w_bytes;
    }
    static __device__ __forceinline__ void next(const few_experts &g, const few_product &p, cursor *c)
    {
        c->s++;
        if (++c->k < p.k_tiles) return;
        c->k = 0;
        if (++c->item < p.n_items) return;
        c->item = 0;
        c->tile++;
        if (c->s < c->end) open_tile(g, p, c);
    }
    __device__ __forceinline__ void step()
    {
        if (++st == ring::stages) st = 0, parity ^= 1;
    }
    __device__ __forceinline__ void copy_w(const few_product &p, const cursor &c)
    {
        const uint32_t row = c.item * FEW_ROWS, left = p.n_rows - row, rows = min(left, TD_XT),
                       more = left > TD_XT ? min(left - TD_XT, TD_XT) : 0;
        const uint32_t bytes = (uint32_t)td_expert_rows_bytes(FORM, rows), more_bytes = (uint32_t)td_expert_rows_bytes(FORM, more);
        uint8_t *to = base + ring::w_at + st * ring::w_bytes;
        const uint8_t *from = p.w + c.w + (size_t)c.item * 2 * p.k_tiles * ring::tile_bytes;
        barrier_wait(&empty[st], parity);
        barrier_expect(&full[st], bytes + more_bytes + c.x_rows * 132);
        copy_bytes(to, from + (size_t)c.k * bytes, bytes, &full[st]);
        if (more != 0)
            copy_bytes(to + ring::tile_bytes, from + (size_t)p.k_tiles * ring::tile_bytes + (size_t)c.k * more_bytes, more_bytes,
                       &full[st]);
    }
    __device__ __forceinline__ void copy_x(const few_product &p, const cursor &c, uint32_t to)
    {
        const size_t at = ((size_t)c.tile * p.k_tiles + c.k) * N;
        copy_bytes(base + ring::x_at + to * (N * 128), p.x + at * 128, c.x_rows * 128, &full[to]);
        copy_bytes(base + ring::sx_at + to * (N * 4), p.sx + at, c.x_rows * 4, &full[to]);
    }
    /* wait: until X is there. */
    template <class Wait> __device__ __forceinline__ void run(const few_experts &g, const few_product &p, Wait wait)
    {
        const uint32_t n_tiles = *g.n_tiles;
        cursor c;
        c.s = few_first(p, n_tiles, blockIdx.x);
        c.end = few_first(p, n_tiles, blockIdx.x + 1);
        c.k = c.s % p.k_tiles;
        c.item = c.s / p.k_tiles % p.n_items;
        c.tile = c.s / p.k_tiles / p.n_items;
        if (c.s < c.end) open_tile(g, p, &c);
        cursor early = c;
        uint32_t early_st = st, n = 0;
        for (; n < ring::stages && c.s < c.end; n++) {
            copy_w(p, c);
            step();
            next(g, p, &c);
        }
        wait();
        for (uint32_t i = 0; i < n; i++) {
            copy_x(p, early, early_st);
            if (++early_st == ring::stages) early_st = 0;
            next(g, p, &early);
        }
        for (; c.s < c.end;) {
            copy_w(p, c);
            copy_x(p, c, st);
            step();
            next(g, p, &c);
        }
    }
};

/* ---- the others: products ---- */

/* Eight FP4 in a word become E4M3 as the tensor core takes them, with the table of their group. */
static __device__ __forceinline__ void widen_groups(uint32_t rows, uint32_t lane, uint32_t tables_at, uint32_t (&to)[4][4])
{
    const uint4 near = load_words(rows + lane * 16), far = load_words(rows + 512 + lane * 16);
    /* Indices become offsets of tables, all four at once. */
    const uint32_t which_near = load_word(rows + 1024 + lane / 4 * 4) << 3 & 0xf8f8f8f8u,
                   which_far = load_word(rows + 1056 + lane / 4 * 4) << 3 & 0xf8f8f8f8u;
    const uint32_t words[4][2] = {{near.x, far.x}, {near.y, far.y}, {near.z, far.z}, {near.w, far.w}};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        widen_word(words[s][0], load_two(tables_at + permute_bytes(which_near, 0, 0x4440 + s)), &to[s][0], &to[s][2]);
        widen_word(words[s][1], load_two(tables_at + permute_bytes(which_far, 0, 0x4440 + s)), &to[s][1], &to[s][3]);
    }
}

template <int N, td_expert_form FORM> struct few_consumer {
    using ring = few_ring<N, FORM>;
    static constexpr int R = N / 2;
    uint8_t *base;
    uint32_t base_at, st, parity, n_epilogues;
    uint64_t *full, *empty;

    /* The sum over the block's 128 units is one group of the second product's X. */
    __device__ __forceinline__ void quantise_units(const few_experts &g, uint32_t tile, uint32_t item, uint32_t n, const float (&acc)[R])
    {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
        const bool is_there = item * TD_XT + warp * 8 + gr < g.n_units;
        float *all = reinterpret_cast<float *>(base + ring::most_at) + n_epilogues++ % 2 * (FEW_CONSUMERS / 32 * N);
        float v[N / 4], most[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int at = i / 2 * 4 + i % 2;
            v[i] = is_there ? activate(acc[at], acc[at + 2], g.alpha, g.limit) : 0;
            most[i] = fabsf(v[i]);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], d));
        }
        if (gr == 0)
#pragma unroll
            for (int i = 0; i < N / 8; i++)
                *reinterpret_cast<float2 *>(all + warp * N + i * 8 + t * 2) = make_float2(most[2 * i], most[2 * i + 1]);
        named_barrier<1, FEW_CONSUMERS>();
        const size_t to = ((size_t)tile * g.down.k_tiles + item) * N;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            float2 m = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < FEW_CONSUMERS / 32; w++) {
                float2 o = *reinterpret_cast<const float2 *>(all + w * N + i * 8 + t * 2);
                m.x = fmaxf(m.x, o.x), m.y = fmaxf(m.y, o.y);
            }
            const float sx = TRAP(FP8_ONE_SCALE) ? 4 / 448.0f : fmaxf(m.x, 1e-4f) / 448.0f,
                        sy = TRAP(FP8_ONE_SCALE) ? 4 / 448.0f : fmaxf(m.y, 1e-4f) / 448.0f;
            const uint32_t col = i * 8 + t * 2;
            uint32_t codes = two_codes(v[2 * i] * (1.0f / sx), v[2 * i + 1] * (1.0f / sy)); /* a unit's, two tokens */
            codes |= __shfl_down_sync(~0u, codes, 4) << 16;
            const uint32_t far = __shfl_down_sync(~0u, codes, 8);
            if (gr % 4 == 0) {
                uint8_t *tokens = g.u_codes + to * TD_XT;
                if (col < n) *(uint32_t *)(tokens + td_expert_fp8_at(col, warp * 8 + gr)) = permute_bytes(codes, far, 0x6420);
                if (col + 1 < n)
                    *(uint32_t *)(tokens + td_expert_fp8_at(col + 1, warp * 8 + gr)) = permute_bytes(codes, far, 0x7531);
            }
            if (warp == 0 && gr == 0) {
                if (col < n) g.su[to + col] = sx;
                if (col + 1 < n) g.su[to + col + 1] = sy;
            }
        }
    }

    __device__ __forceinline__ void put_rows(const few_experts &g, uint32_t tile, uint32_t w_row, uint32_t n, const float (&acc)[R])
    {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const uint32_t col = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, at = i / 2 * 4 + i % 2;
            if (col >= n) continue;
            float *to = g.y + (size_t)g.slot_of[tile * N + col] * g.n_cols;
            if (w_row < g.n_cols) to[w_row] = acc[at];
            if (w_row + 8 < g.n_cols) to[w_row + 8] = acc[at + 2];
        }
    }

    template <bool IS_UP> __device__ __forceinline__ void run(const few_experts &g)
    {
        const few_product &p = IS_UP ? g.up : g.down;
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4, n_k = p.k_tiles;
        const uint32_t n_tiles = *g.n_tiles, end = few_first(p, n_tiles, blockIdx.x + 1);
        float *carries = g.carries + (IS_UP ? 0 : (size_t)gridDim.x * R * FEW_CONSUMERS) + threadIdx.x;
        uint32_t *flags = g.flags + (IS_UP ? 0 : gridDim.x);
        for (uint32_t s = few_first(p, n_tiles, blockIdx.x), k_end; s < end; s += k_end - s % n_k) {
            const uint32_t k_begin = s % n_k, item = s / n_k % p.n_items, tile = s / n_k / p.n_items;
            k_end = min(n_k, k_begin + end - s);
            const struct slot_tile slots = g.tiles[tile];
            const uint32_t w_row = item * FEW_ROWS + warp * 16 + gr; /* and + 8 */
            const bool is_idle = item * FEW_ROWS + warp / 4 * 64 >= p.n_rows;
            const float *scales = reinterpret_cast<const float *>(p.w + slots.expert * p.w_bytes + p.scales_at) +
                                  (size_t)(item * 2 + warp / 8) * n_k;
            const float my_scale = !is_idle && lane < n_k ? scales[lane] : 0;
            float acc[R], part[R];
            float lo = 0, hi = 0;
            if (p.bias != nullptr && k_begin == 0 && w_row < p.n_rows) {
                const float *bias = p.bias + (size_t)slots.expert * p.n_rows + w_row;
                lo = bias[0], hi = bias[8];
            }
#pragma unroll
            for (int i = 0; i < R; i++) {
                acc[i] = i % 4 < 2 ? lo : hi;
                part[i] = 0;
            }
            for (uint32_t k = k_begin; k < k_end; k++) {
                barrier_wait(&full[st], parity);
                if (!is_idle) {
                    const uint64_t x = tile_desc(base + ring::x_at + st * (N * 128));
                    const uint32_t w_at = base_at + ring::w_at + st * ring::w_bytes;
                    uint32_t a[4][4];
                    if constexpr (FORM == TD_EXPERTS_MXFP4)
                        widen_groups(w_at + warp * TD_XT_MXFP4, lane, base_at + ring::tables_at, a);
                    keep(part);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if constexpr (FORM == TD_EXPERTS_FP8)
                            fp8_ss(part, tile_desc(base + ring::w_at + st * ring::w_bytes + warp / 4 * 64 * TD_XT_FP8) + i * 2,
                                   x + i * 2, i == 0);
                        else
                            fp8_rs(part, a[i], x + i * 2, i == 0);
                    }
                    wgmma_commit();
                    keep(part);
                    const float scale = __shfl_sync(~0u, my_scale, k);
                    const uint32_t sx = base_at + ring::sx_at + st * (N * 4) + t * 8;
                    float2 both[N / 8];
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
                        uint2 v = load_two(sx + i * 32);
                        both[i] = make_float2(__uint_as_float(v.x) * scale, __uint_as_float(v.y) * scale);
                    }
                    wgmma_wait<0>();
                    keep(part);
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
                        acc[4 * i] += part[4 * i] * both[i].x;
                        acc[4 * i + 1] += part[4 * i + 1] * both[i].y;
                        acc[4 * i + 2] += part[4 * i + 2] * both[i].x;
                        acc[4 * i + 3] += part[4 * i + 3] * both[i].y;
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&empty[st]);
                if (++st == ring::stages) st = 0, parity ^= 1;
            }
            if (k_begin != 0) {
                float *mine = carries + (size_t)blockIdx.x * R * FEW_CONSUMERS;
#pragma unroll
                for (int i = 0; i < R; i++) __stcg(mine + i * FEW_CONSUMERS, acc[i]);
                __threadfence();
                named_barrier<1, FEW_CONSUMERS>();
                if (threadIdx.x == 0) add_release(&flags[blockIdx.x], 1);
                continue;
            }
            if (k_end < n_k) {
                const uint32_t item_end = s + n_k;
                for (uint32_t b = blockIdx.x + 1, from = end; from < item_end; b++) {
                    const uint32_t to = few_first(p, n_tiles, b + 1);
                    if (to == from) continue; /* a block without work */
                    from = to;
                    while (load_acquire(&flags[b]) == 0) {}
                    const float *theirs = carries + (size_t)b * R * FEW_CONSUMERS;
#pragma unroll
                    for (int i = 0; i < R; i++) acc[i] += __ldcg(theirs + i * FEW_CONSUMERS);
                }
            }
            if constexpr (IS_UP)
                quantise_units(g, tile, item, slots.n, acc);
            else if (!is_idle)
                put_rows(g, tile, w_row, slots.n, acc);
        }
    }
};

template <int N, td_expert_form FORM>
static __global__ void __launch_bounds__(FEW_THREADS, 1) few_experts_kernel(const few_experts g)
{
    using ring = few_ring<N, FORM>;
    extern __shared__ uint8_t raw[];
    uint8_t *base = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    uint32_t base_at = smem_addr(base);
    asm volatile("" : "+r"(base_at)); /* else it is worked out again and again */
    uint64_t *full = reinterpret_cast<uint64_t *>(base + ring::bars_at), *empty = full + ring::stages;
    uint32_t *n_done = g.flags + 2 * gridDim.x;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < ring::stages; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], FEW_CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    if (FORM == TD_EXPERTS_MXFP4 && threadIdx.x < 32) {
        uint64_t t = threadIdx.x < TD_X_TABLES ? td_expert_table_bytes(threadIdx.x) : 0;
        reinterpret_cast<uint2 *>(base + ring::tables_at)[threadIdx.x] = make_uint2((uint32_t)t, (uint32_t)(t >> 32));
    }
    __syncthreads();
    if (threadIdx.x >= FEW_CONSUMERS) {
        if (threadIdx.x != FEW_CONSUMERS) return;
        few_producer<N, FORM> p = {base, full, empty, 0, 1};
        p.run(g, g.up, [] {
            before();
            let_next();
        });
        p.run(g, g.down, [&] {
            while (load_acquire(n_done) != gridDim.x) {}
            fence_copies();
        });
        return;
    }
    before();
    few_consumer<N, FORM> c = {base, base_at, 0, 0, 0, full, empty};
    c.template run<true>(g);
    fence_copies();
    __threadfence();
    named_barrier<1, FEW_CONSUMERS>();
    if (threadIdx.x == 0) add_release(n_done, 1);
    c.template run<false>(g);
}

#endif
