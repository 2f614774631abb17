/* Attention of many rows: prefill, and chunks of it. A block takes 64 N query rows, that is 64 N / group positions times the
 * `group` query heads that share a KV head, and walks the keys these can see in blocks of 128. A producer warp copies K
 * and V from the pages through a ring of stages; each of N warpgroups has 64 rows of its own:
 *   S = Q K^T, issued with the last block's O += P V, online softmax in f32, P rounded to bf16.
 * The warpgroups take turns at the tensor cores, so that one computes products while the others are in their softmax.
 * A thread block takes tile after tile, and the producer is a tile ahead. Tiles are dealt longest first, to and fro, so that
 * every thread block gets about the same number of keys.
 *
 * The sink starts each row's sum: max = sink, sum = 1. Keys outside a row's view are masked in the blocks that hold any;
 * values that nobody may have written, beyond the sequence or before the window, are zeroed first, because such memory may
 * hold NaN and 0 NaN is NaN. What a stage holds from an earlier block is always finite. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/traps.cuh"

#define KEYS 128

/* One shape of the kernel: warpgroups, stages of the ring, thread blocks a multiprocessor. A row gets the same bits from each. */
template <int N_, int STAGES_, int BLOCKS_, int REGS_> struct shape {
    static constexpr int N = N_, STAGES = STAGES_, BLOCKS = BLOCKS_, REGS = REGS_, ROWS = 64 * N, THREADS = 128 * (N + 1);
};
using many_rows = shape<3, 3, 1, 160>;
using single_rows = shape<1, 2, 2, 208>; /* where these may not go to attn_decode */

struct prefill_args {
    const struct td_seq_rows *seqs;
    const uint32_t *pages;
    const float *sinks;
    td_bf16 *out;
    uint32_t n_seqs, n_heads, n_kv_heads, group, window, page_tokens, box;
    uint32_t least, most; /* rows of the sequences that are ours */
    float scale_log2;
};

struct tile_info {
    td_seq_rows seq;
    uint32_t first, kv_head, is_end; /* first: row of the sequence at which the tile begins */
};

template <class S> struct prefill_smem {
    alignas(1024) uint8_t q[2][S::ROWS * 128];
    alignas(1024) uint8_t k[S::STAGES][KEYS * 128];
    alignas(1024) uint8_t v[S::STAGES][KEYS * 128];
    uint64_t q_full[2], q_empty[2], k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES], v_empty[S::STAGES];
    tile_info tiles[2]; /* with q */
};

/* Keys that a tile's rows see: of positions from .. last, keys seen .. last. */
struct span {
    uint32_t from, last, seen, n_pos;
};
static __device__ __forceinline__ uint32_t window_of(const prefill_args &a)
{
    return a.window == 0 ? 0 : a.window + TRAP(PREFILL_WINDOW_129) - TRAP(PREFILL_WINDOW_127);
}
template <class S> static __device__ __forceinline__ span span_of(const prefill_args &a, const tile_info &t)
{
    span s;
    s.n_pos = min(S::ROWS / a.group, t.seq.n_rows - t.first);
    s.from = t.seq.start + t.first;
    s.last = s.from + s.n_pos - 1;
    s.seen = a.window != 0 && s.from + 1 > window_of(a) ? s.from + 1 - window_of(a) : 0;
    return s;
}

template <class S> static __device__ __forceinline__ uint32_t tiles_of(const prefill_args &a, uint32_t seq)
{
    uint32_t n = seq < a.n_seqs ? a.seqs[seq].n_rows : 0, positions = S::ROWS / a.group;
    return n >= a.least && n <= a.most ? (n + positions - 1) / positions : 0;
}

/* Tile `want` of all, numbered over the sequences; a whole warp. */
template <class S> static __device__ tile_info find_tile(const prefill_args &a, uint32_t want)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t seen = 0;
    tile_info t = {};
    for (uint32_t base = 0; base < a.n_seqs; base += 32) {
        uint32_t n = tiles_of<S>(a, base + lane), up_to = n;
#pragma unroll
        for (int j = 1; j < 32; j *= 2) {
            uint32_t other = __shfl_up_sync(~0u, up_to, j);
            if (lane >= (uint32_t)j) up_to += other;
        }
        uint32_t at = __ballot_sync(~0u, want < seen + up_to);
        if (at != 0) {
            int holder = __ffs(at) - 1;
            t.seq = a.seqs[base + holder];
            t.first = (want - seen - __shfl_sync(~0u, up_to - n, holder)) * (S::ROWS / a.group);
            break;
        }
        seen += __shfl_sync(~0u, up_to, 31);
    }
    return t;
}

/* Copies the queries of every tile of this thread block, and K and V of the blocks each walks. A lane has a box of a block,
 * some rows of one page. */
template <class S>
static __device__ void produce(const prefill_args &a, const CUtensorMap *q_map, const CUtensorMap *kv_map, prefill_smem<S> &sm)
{
    constexpr uint32_t STAGES = S::STAGES;
    const uint32_t lane = threadIdx.x % 32, n_boxes = KEYS / a.box;
    uint32_t n_tiles = 0, i = 0;
    for (uint32_t seq = lane; seq < (a.n_seqs + 31) / 32 * 32; seq += 32) n_tiles += tiles_of<S>(a, seq);
    n_tiles = __reduce_add_sync(~0u, n_tiles);
    const uint32_t n_work = n_tiles * a.n_kv_heads;
    for (uint32_t turn = 0;; turn++) {
        const uint32_t slot = turn % 2;
        const uint32_t work = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        barrier_wait(&sm.q_empty[slot], (turn / 2 & 1) ^ 1);
        if (work >= n_work) { /* the last round may leave some without */
            if (lane == 0) {
                sm.tiles[slot].is_end = 1;
                barrier_arrive(&sm.q_full[slot]);
            }
            return;
        }
        tile_info t = find_tile<S>(a, n_tiles - 1 - work / a.n_kv_heads);
        t.kv_head = work % a.n_kv_heads;
        const td_seq_rows q = t.seq;
        const span s = span_of<S>(a, t);
        if (lane == 0) {
            sm.tiles[slot] = t;
            barrier_expect(&sm.q_full[slot], S::ROWS * 128);
            copy_box_3d(sm.q[slot], q_map, &sm.q_full[slot], 0, (int)(t.kv_head * a.group), (int)(q.row + t.first));
        }
        for (uint32_t b = s.seen / KEYS; b <= s.last / KEYS; b++, i++) {
            const uint32_t st = i % STAGES, round = i / STAGES, key = b * KEYS + lane * a.box;
            bool is_there = lane < n_boxes && key + a.box > s.seen && key < q.start + q.n_rows;
            uint32_t row = 0;
            if (is_there) {
                uint32_t block = key / a.page_tokens - q.first_block;
                uint32_t page = a.pages != nullptr ? a.pages[q.pages + block] : block; /* widened ones lie in order */
                row = ((page * a.n_kv_heads + t.kv_head) * 2) * a.page_tokens + key % a.page_tokens;
            }
            uint32_t bytes = __popc(__ballot_sync(~0u, is_there)) * a.box * 128;
            barrier_wait(&sm.k_empty[st], (round & 1) ^ 1);
            if (lane == 0) barrier_expect(&sm.k_full[st], bytes);
            __syncwarp();
            if (is_there) copy_box_2d(sm.k[st] + lane * a.box * 128, kv_map, &sm.k_full[st], 0, (int)row);
            barrier_wait(&sm.v_empty[st], (round & 1) ^ 1);
            if (lane == 0) barrier_expect(&sm.v_full[st], bytes);
            __syncwarp();
            if (is_there)
                copy_box_2d(sm.v[st] + lane * a.box * 128, kv_map, &sm.v_full[st], 0, (int)(row + a.page_tokens));
        }
    }
}

/* One row of a lane: half h of its accumulators. */
struct row_state {
    float max, sum;
};

/* tile_desc in its lower word, which alone changes: whole descriptors would be computed in pairs of registers. */
static __device__ __forceinline__ uint32_t desc_of(const void *p) { return (smem_addr(p) & 0x3ffff) >> 4 | 1u << 16; }
static __device__ __forceinline__ uint64_t desc_at(uint32_t low)
{
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(1u << 30 | 1024 >> 4));
    return d;
}
#define STAGE_STEP (KEYS * 128 >> 4) /* of a descriptor */

static __device__ __forceinline__ void scores(float (&s)[64], uint32_t q, uint32_t k)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_ss(s, desc_at(q + i * 2), desc_at(k + i * 2), i == 0);
    wgmma_commit();
}

static __device__ __forceinline__ void mix(float (&o)[32], const uint32_t (&p)[32], uint32_t v)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++)
        wgmma_rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], desc_at(v + i * (2048 >> 4)));
    wgmma_commit();
}

/* The value of lane 0, which every lane has: so the compiler keeps it in a register of the warp. */
static __device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

/* Warpgroups take turns at issuing products: barrier 2 + wg opens for wg. */
template <class S> static __device__ __forceinline__ void turn_wait(uint32_t wg)
{
    if constexpr (S::N > 1) asm volatile("bar.sync %0, 256;" ::"r"(2 + wg) : "memory");
}
template <class S> static __device__ __forceinline__ void turn_pass(uint32_t wg)
{
    if constexpr (S::N > 1) asm volatile("bar.arrive %0, 256;" ::"r"(2 + (wg + 1 == S::N ? 0 : wg + 1)) : "memory");
}

/* s becomes exp2(s scale - max) and both rows' max and sum move on; alpha: what the old sums and outputs shrink by. */
static __device__ __forceinline__ void softmax(float (&s)[64], row_state (&r)[2], float (&alpha)[2], float scale)
{
    float at[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = -INFINITY;
#pragma unroll
        for (int i = 0; i < 16; i++) m = fmaxf(m, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        at[h] = m * scale;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = fmaxf(r[h].max, at[h]);
        at[h] = top == -INFINITY ? 0 : top;
        alpha[h] = exp2_fast(r[h].max - at[h]);
        r[h].max = top;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float p = exp2_fast(fmaf(s[4 * i + 2 * h + j], scale, -at[h]));
                s[4 * i + 2 * h + j] = p;
                sum += p;
            }
        r[h].sum = r[h].sum * alpha[h] + sum;
    }
}

static __device__ __forceinline__ void pack(uint32_t (&p)[32], const float (&s)[64])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        p[4 * i] = pack_bf16(s[8 * i], s[8 * i + 1]);
        p[4 * i + 1] = pack_bf16(s[8 * i + 2], s[8 * i + 3]);
        p[4 * i + 2] = pack_bf16(s[8 * i + 4], s[8 * i + 5]);
        p[4 * i + 3] = pack_bf16(s[8 * i + 6], s[8 * i + 7]);
    }
}

/* Keys base .. base + 127 for two rows that see [lo, hi]; has_lo: some may lie before lo. */
static __device__ __forceinline__ void mask(float (&s)[64], uint32_t base, const int (&lo)[2], const int (&hi)[2], bool has_lo)
{
    const int at = (int)(base + threadIdx.x % 4 * 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int most = hi[h] - at;
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (8 * i + j > most) s[4 * i + 2 * h + j] = -INFINITY;
    }
    if (!has_lo) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int least = lo[h] - at;
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (8 * i + j < least) s[4 * i + 2 * h + j] = -INFINITY;
    }
}

/* Zeroes the values of a block's keys outside [seen, end). All warpgroups come here with the same block. */
template <class S> static __device__ __forceinline__ void clean(uint8_t *v, uint32_t base, uint32_t seen, uint32_t end)
{
    if (base >= seen && base + KEYS <= end) return;
    for (uint32_t w = threadIdx.x - 128; w < KEYS * 8; w += S::N * 128) {
        uint32_t key = base + w / 8;
        if (key < seen || key >= end) ((uint4 *)v)[w] = make_uint4(0, 0, 0, 0);
    }
    fence_async();
    named_barrier<1, S::N * 128>();
}

/* A tile. st: the stage of its first block, on return of the next tile's; parity: of the stages' barriers in this round. */
template <class S>
static __device__ __forceinline__ void consume(const prefill_args &a, prefill_smem<S> &sm, const uint8_t *q_tile,
                                               const tile_info &t, uint32_t &st, uint32_t &parity)
{
    constexpr uint32_t STAGES = S::STAGES;
    const uint32_t wg = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32;
    const uint32_t row = wg * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const span sp = span_of<S>(a, t);
    const uint32_t seen = sp.seen, end = uniform(sp.last / KEYS + 1), n_keys = t.seq.start + t.seq.n_rows;
    uint32_t b = uniform(seen / KEYS);
    row_state r[2];
    int lo[2], hi[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t pos = sp.from + (row + 8 * h) / a.group;
        float sink = a.sinks[t.kv_head * a.group + (row + 8 * h) % a.group] * 1.44269504f;
        if (TRAP(PREFILL_SINK_SCALED)) sink /= 8;
        if (TRAP(PREFILL_SINK_NONE)) sink = -INFINITY;
        r[h].max = sink;
        /* The four lanes of a row are added at the end. */
        r[h].sum = (lane % 4 == 0 || TRAP(PREFILL_SINK_PER_LANE)) && sink != -INFINITY ? 1.0f : 0.0f;
        hi[h] = (int)pos;
        lo[h] = a.window != 0 && pos + 1 > window_of(a) ? (int)(pos + 1 - window_of(a)) : 0;
    }
    /* Of the warpgroup's rows, for the choice of blocks to mask. */
    const uint32_t low = sp.from + wg * 64 / a.group, high = sp.from + (wg * 64 + 63) / a.group;
    const uint32_t high_lo = a.window != 0 && high + 1 > window_of(a) ? high + 1 - window_of(a) : 0;

    float s[64], o[32], alpha[2];
    uint32_t p[32];
#pragma unroll
    for (int j = 0; j < 32; j++) o[j] = 0;
    const uint32_t qd = uniform(desc_of(q_tile + wg * 64 * 128)), kd = uniform(desc_of(sm.k[0])), vd = uniform(desc_of(sm.v[0]));
    barrier_wait(&sm.k_full[st], parity);
    turn_wait<S>(wg);
    scores(s, qd, kd + st * STAGE_STEP);
    turn_pass<S>(wg);
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(&sm.k_empty[st]);
    if (b * KEYS + KEYS - 1 > low || b * KEYS < high_lo) mask(s, b * KEYS, lo, hi, b * KEYS < high_lo);
    softmax(s, r, alpha, a.scale_log2);
    pack(p, s);

    /* The next block's scores and this one's mix are issued together. No branch comes between the two: the compiler would
     * put a wait there. */
    for (; b + 1 < end; b++) {
        const uint32_t next = st + 1 == STAGES ? 0 : st + 1, next_parity = next == 0 ? parity ^ 1 : parity, base = b * KEYS;
        barrier_wait(&sm.v_full[st], parity);
        clean<S>(sm.v[st], base, seen, n_keys);
        barrier_wait(&sm.k_full[next], next_parity);
        turn_wait<S>(wg);
        scores(s, qd, kd + next * STAGE_STEP);
        mix(o, p, vd + st * STAGE_STEP);
        turn_pass<S>(wg);
        wgmma_wait<1>();
        if (threadIdx.x % 128 == 0) barrier_arrive(&sm.k_empty[next]);
        if (base + 2 * KEYS - 1 > low || base + KEYS < high_lo) mask(s, base + KEYS, lo, hi, base + KEYS < high_lo);
        softmax(s, r, alpha, a.scale_log2);
        wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(&sm.v_empty[st]);
#pragma unroll
        for (int j = 0; j < 32; j++) o[j] *= alpha[j / 2 % 2];
        pack(p, s);
        st = next, parity = next_parity;
    }
    barrier_wait(&sm.v_full[st], parity);
    clean<S>(sm.v[st], b * KEYS, seen, n_keys);
    mix(o, p, vd + st * STAGE_STEP);
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) barrier_arrive(&sm.v_empty[st]);
    if (++st == STAGES) st = 0, parity ^= 1;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = r[h].sum;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float inv = 1.0f / sum;
        uint32_t pos = (row + 8 * h) / a.group;
        if (pos >= sp.n_pos) continue;
        td_bf16 *to = a.out + ((size_t)(t.seq.row + t.first + pos) * a.n_heads + t.kv_head * a.group + (row + 8 * h) % a.group) * 64;
#pragma unroll
        for (int j = 0; j < 8; j++)
            *(uint32_t *)(to + 8 * j + lane % 4 * 2) = pack_bf16(o[4 * j + 2 * h] * inv, o[4 * j + 2 * h + 1] * inv);
    }
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attn_prefill(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                 const prefill_args a)
{
    extern __shared__ uint8_t raw[];
    constexpr int STAGES = S::STAGES, THREADS = S::THREADS;
    auto &sm = *reinterpret_cast<prefill_smem<S> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    let_next();
    if (threadIdx.x == 0) {
        map_prefetch(&q_map);
        map_prefetch(&kv_map);
        for (int i = 0; i < 2; i++) {
            barrier_init(&sm.q_full[i], 1);
            barrier_init(&sm.q_empty[i], S::N * 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&sm.k_full[i], 1);
            barrier_init(&sm.v_full[i], 1);
            barrier_init(&sm.k_empty[i], S::N);
            barrier_init(&sm.v_empty[i], S::N);
        }
        barrier_init_fence();
    }
    for (uint32_t i = threadIdx.x; i < STAGES * KEYS * 8; i += THREADS) ((uint4 *)sm.v)[i] = make_uint4(0, 0, 0, 0);
    fence_async();
    __syncthreads();
    before();
    if (threadIdx.x < 128) {
        regs_less<32>();
        if (threadIdx.x < 32) produce(a, &q_map, &kv_map, sm);
    } else {
        regs_more<S::REGS>();
        uint32_t st = 0, parity = 0;
        if (threadIdx.x < 256) turn_pass<S>(S::N - 1); /* the first warpgroup opens its own */
        for (uint32_t turn = 0;; turn++) {
            const uint32_t slot = turn % 2;
            barrier_wait(&sm.q_full[slot], turn / 2 & 1);
            const tile_info &t = sm.tiles[slot];
            if (t.is_end) break;
            consume(a, sm, sm.q[slot], t, st, parity);
            __syncwarp(); /* each warp for itself: its lanes read `t` to the end */
            if (threadIdx.x % 32 == 0) barrier_arrive(&sm.q_empty[slot]);
        }
    }
}

template <class S>
static enum td_status start(struct td_cuda_stream *s, const struct td_attention_args *a, prefill_args p, uint32_t n_rows,
                            uint32_t n_seqs)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    CUtensorMap q_map, kv_map;
    const void *layer = (const char *)a->kv.pool + td_kv_offset(l, a->kv.layer, 0, 0, false, 0);
    enum td_status st = td_cuda_map_heads(&q_map, a->q, a->n_rows, a->n_heads, p.group, S::ROWS / p.group);
    if (st == TD_OK)
        st = td_cuda_map_rows(&kv_map, layer, (uint64_t)l->n_pages * l->n_heads * 2 * l->page_tokens, 64, 64, p.box);
    if (st != TD_OK) return st;
    const int bytes = sizeof(prefill_smem<S>) + 1024;
    cudaError_t e = cudaFuncSetAttribute(attn_prefill<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return td_cuda_status(e, "attn_prefill");
    /* At most so many tiles: each sequence's last one may be partly empty. */
    const uint32_t n_tiles = n_rows / (S::ROWS / p.group) + n_seqs;
    const uint32_t grid = td_min_u32(n_tiles * a->n_kv_heads, S::BLOCKS * (uint32_t)s->n_sms);
    return td_cuda_status(launch(attn_prefill<S>, grid, S::THREADS, bytes, s->s, q_map, kv_map, p), "attn_prefill");
}

enum td_status td_cuda_attn_prefill(struct td_cuda_stream *s, const struct td_attention_args *a)
{
    const uint32_t page_tokens = a->kv.layout.page_tokens;
    prefill_args p = {};
    p.seqs = a->seqs;
    p.pages = a->pages;
    p.sinks = a->sinks;
    p.out = (td_bf16 *)a->out;
    p.n_seqs = a->n_seqs;
    p.n_heads = a->n_heads;
    p.n_kv_heads = a->n_kv_heads;
    p.group = a->n_heads / a->n_kv_heads;
    p.window = a->window;
    p.page_tokens = page_tokens;
    p.box = td_min_u32(page_tokens & (~page_tokens + 1), 64);
    p.scale_log2 = a->scale * 1.44269504f;
    enum td_status st = TD_OK;
    if (s->is_batch_invariant && a->n_single > 0) {
        p.least = p.most = 1;
        st = start<single_rows>(s, a, p, a->n_single, a->n_single);
    }
    if (st != TD_OK || a->n_single == a->n_seqs) return st;
    p.least = 2;
    p.most = UINT32_MAX;
    return start<many_rows>(s, a, p, a->n_rows - a->n_single, a->n_seqs - a->n_single);
}
