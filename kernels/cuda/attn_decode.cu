/* Attention of single rows: decode. Work is blocks of 64 keys of (sequence, KV head) units, laid end to end and dealt evenly
 * to thread blocks, so ragged batches balance; which thread block has what follows from the batch alone and is computed on
 * the device, so a graph holds for any lengths. A producer warp copies K and V from the pages through a ring; four warps
 * take 16 keys of each block, with max, sum and output of their own, added when a unit ends. The query heads of a KV head
 * are rows of one tensor-core tile.
 *
 * A short unit goes to one thread block whole: cuts that fall into it move to its nearer end.
 *
 * A unit that several thread blocks share: each leaves its part in memory; the last to arrive adds the parts in order and
 * counts the sink, once. Nothing waits. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/traps.cuh"

#define KEYS     64
#define WARPS    4
#define THREADS  (32 * (WARPS + 1))
#define MAX_SEQS 512
#define MIN_SHARE 2u /* blocks of keys a thread block should have: fewer would cost more in adding parts */
#define ADD_AT_ONCE 18

struct decode_args {
    const td_bf16 *q;
    const struct td_seq_rows *seqs;
    const uint32_t *pages;
    const float *sinks;
    td_bf16 *out;
    float *parts;
    uint32_t *counters;
    uint32_t n_seqs, n_heads, n_kv_heads, group, window, page_tokens, box;
    float scale_log2;
};

/* One shape of the kernel: stages of the ring, thread blocks a multiprocessor, pages of FP8. */
template <int STAGES_, int BLOCKS_, bool IS_FP8_> struct shape {
    static constexpr int STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr bool IS_FP8 = IS_FP8_;
    static constexpr uint32_t ROW = IS_FP8 ? 64 : 128; /* bytes of a key */
};
using bf16_shape = shape<5, 2, false>; /* for windows too: <3, 3> took 20.8 us for 128 of them where this takes 16.1 */
using fp8_shape = shape<8, 2, true>;

template <class S> struct decode_smem {
    static constexpr int STAGES = S::STAGES;
    alignas(1024) uint8_t k[STAGES][KEYS * S::ROW];
    alignas(1024) uint8_t v[STAGES][KEYS * S::ROW];
    float o[WARPS][8][64 + 4], max[WARPS][8], sum[WARPS][8];
    uint64_t full[STAGES], empty[STAGES];
    uint32_t warp_sums[THREADS / 32], is_last;
    uint32_t blocks_before[MAX_SEQS + 1]; /* of one KV head */
    td_seq_rows seqs[MAX_SEQS];
};

/* What a sequence's row sees. */
struct view {
    uint32_t lo, hi, first, n; /* keys lo .. hi, in blocks first .. first + n - 1 */
};
static __device__ __forceinline__ view view_of(const decode_args &a, const td_seq_rows &q)
{
    view v;
    v.hi = q.start;
    const uint32_t window = a.window + TRAP(DECODE_WINDOW_129) - TRAP(DECODE_WINDOW_127);
    v.lo = a.window != 0 && q.start + 1 > window ? q.start + 1 - window : 0;
    v.first = v.lo / KEYS;
    v.n = q.n_rows == 1 ? v.hi / KEYS - v.first + 1 : 0;
    return v;
}

/* A stretch of one unit's blocks. */
struct stretch {
    uint32_t seq, head, begin, end, n; /* blocks begin .. end - 1 of n */
};
template <class S>
static __device__ __forceinline__ stretch stretch_at(const decode_smem<S> &sm, uint32_t n_seqs, uint32_t n_heads,
                                                     uint32_t at, uint32_t end)
{
    uint32_t lo = 0, hi = n_seqs - 1; /* the last sequence that begins at or before `at`; those without work are passed over */
    while (lo < hi) {
        uint32_t mid = (lo + hi + 1) / 2;
        if (sm.blocks_before[mid] * n_heads <= at)
            lo = mid;
        else
            hi = mid - 1;
    }
    stretch s;
    s.seq = lo;
    s.n = sm.blocks_before[lo + 1] - sm.blocks_before[lo];
    uint32_t in = at - sm.blocks_before[lo] * n_heads;
    s.head = in / s.n;
    s.begin = in % s.n;
    s.end = min(s.n, s.begin + (end - at));
    return s;
}

/* Where the work of thread block c begins; of n thread blocks. */
template <class S>
static __device__ uint32_t cut_at(const decode_args &a, const decode_smem<S> &sm, uint32_t c, uint32_t n, uint32_t total)
{
    uint32_t at = (uint32_t)((uint64_t)c * total / n);
    if (at == 0 || at >= total) return at;
    stretch s = stretch_at(sm, a.n_seqs, a.n_kv_heads, at, at + 1);
    if (s.begin == 0 || s.n > max(4u, total / n / 3)) return at;
    return s.begin * 2 <= s.n ? at - s.begin : at - s.begin + s.n;
}

/* blocks_before by a scan of the batch; returns the total of one head. */
template <class S> static __device__ uint32_t scan(const decode_args &a, decode_smem<S> &sm)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t before = 0;
    for (uint32_t base = 0; base < a.n_seqs; base += THREADS) {
        uint32_t i = base + threadIdx.x, n = 0;
        if (i < a.n_seqs) {
            td_seq_rows q = a.seqs[i];
            sm.seqs[i] = q;
            n = view_of(a, q).n;
        }
        uint32_t up_to = n;
#pragma unroll
        for (int j = 1; j < 32; j *= 2) {
            uint32_t other = __shfl_up_sync(~0u, up_to, j);
            if (lane >= (uint32_t)j) up_to += other;
        }
        if (lane == 31) sm.warp_sums[warp] = up_to;
        __syncthreads();
        uint32_t all = 0;
#pragma unroll
        for (uint32_t j = 0; j < THREADS / 32; j++) {
            if (j < warp) up_to += sm.warp_sums[j];
            all += sm.warp_sums[j];
        }
        if (i < a.n_seqs) sm.blocks_before[i] = before + up_to - n;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) sm.blocks_before[a.n_seqs] = before;
    __syncthreads();
    return before;
}

/* Blocks whose pages the lanes of a warp look up at once: of one stretch, block b + lane / n_boxes. */
struct lookup {
    uint32_t n;  /* blocks */
    uint32_t row; /* of the pool: this lane's box, if it is_there */
    bool is_there;
    uint32_t n_old; /* blocks of them that no kernel of this pass writes */
};

template <class S>
static __device__ void produce(const decode_args &a, const CUtensorMap *map, decode_smem<S> &sm, uint32_t at, uint32_t end)
{
    constexpr uint32_t STAGES = S::STAGES;
    const uint32_t lane = threadIdx.x % 32, n_boxes = KEYS / a.box, at_once = 32 / n_boxes;
    stretch s = stretch_at(sm, a.n_seqs, a.n_kv_heads, at, end);
    uint32_t b = s.begin, i = 0;
    auto look = [&]() {
        const td_seq_rows &q = sm.seqs[s.seq];
        const view v = view_of(a, q);
        const uint32_t key = (v.first + b) * KEYS + lane * a.box;
        lookup l = {min(at_once, s.end - b), 0, b + lane / n_boxes < s.end && key + a.box > v.lo && key <= v.hi, 0};
        l.n_old = max(q.fresh / KEYS, v.first + b) - (v.first + b);
        if (l.is_there) {
            uint32_t page = a.pages[q.pages + (key / a.page_tokens - q.first_block)];
            l.row = ((page * a.n_kv_heads + s.head) * 2) * a.page_tokens + key % a.page_tokens;
        }
        return l;
    };
    lookup l = look();
    bool has_waited = false;
    while (l.n != 0) {
        const lookup now = l;
        b += now.n;
        if (b == s.end) {
            at += s.end - s.begin;
            if (at < end) {
                s = stretch_at(sm, a.n_seqs, a.n_kv_heads, at, end);
                b = s.begin;
            }
        }
        l.n = 0;
        if (at < end) l = look(); /* on its way while these are copied */
        for (uint32_t j = 0; j < now.n; j++, i++) {
            uint32_t st = i % STAGES, box = (lane % n_boxes) * a.box * S::ROW;
            bool is_mine = now.is_there && lane / n_boxes == j;
            uint32_t bytes = __popc(__ballot_sync(~0u, is_mine)) * a.box * S::ROW * 2;
            if (j >= now.n_old && !has_waited) {
                before();
                has_waited = true;
            }
            barrier_wait(&sm.empty[st], (i / STAGES & 1) ^ 1);
            if (lane == 0) barrier_expect(&sm.full[st], bytes);
            __syncwarp();
            if (is_mine) {
                copy_box_2d(sm.k[st] + box, map, &sm.full[st], 0, (int)now.row);
                copy_box_2d(sm.v[st] + box, map, &sm.full[st], 0, (int)(now.row + a.page_tokens));
            }
        }
    }
}

/* The same in a tile of rows of 64 bytes, chunk of 4. */
static __device__ __forceinline__ uint32_t chunk_addr_fp8(const uint8_t *tile, uint32_t row, uint32_t chunk)
{
    return smem_addr(tile) + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

/* 16 bytes of row `row`, chunk `chunk` of 8, in a swizzled tile. */
static __device__ __forceinline__ uint32_t chunk_addr(const uint8_t *tile, uint32_t row, uint32_t chunk)
{
    return smem_addr(tile) + row * 128 + ((chunk ^ (row & 7)) << 4);
}

/* Output, max and sum of 8 heads by 64; thread i of 128 has head i / 16, 4 components. */
struct part {
    float4 o;
    float max, sum;
};
static __device__ __forceinline__ void add_part(part &p, float4 o, float max, float sum)
{
    float top = fmaxf(p.max, max), at = top == -INFINITY ? 0 : top, x = exp2_fast(p.max - at), y = exp2_fast(max - at);
    p.o.x = p.o.x * x + o.x * y;
    p.o.y = p.o.y * x + o.y * y;
    p.o.z = p.o.z * x + o.z * y;
    p.o.w = p.o.w * x + o.w * y;
    p.sum = p.sum * x + sum * y;
    p.max = top;
}

static __device__ __forceinline__ void finish(const decode_args &a, const part &p, uint32_t row, uint32_t kv_head,
                                              float sink)
{
    const uint32_t head = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
    if (head >= a.group) return;
    part all = p;
    add_part(all, make_float4(0, 0, 0, 0), sink, sink == -INFINITY ? 0 : 1);
    float inv = 1.0f / all.sum;
    uint2 v = make_uint2(pack_bf16(all.o.x * inv, all.o.y * inv), pack_bf16(all.o.z * inv, all.o.w * inv));
    *(uint2 *)(a.out + ((size_t)row * a.n_heads + kv_head * a.group + head) * 64 + col) = v;
}

template <class S>
static __device__ void consume(const decode_args &a, decode_smem<S> &sm, uint32_t at, uint32_t end, uint32_t total,
                               uint32_t n)
{
    constexpr uint32_t STAGES = S::STAGES;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t key0 = warp * 16;
    uint32_t i = 0, qf[4][2], q_next[4][2];
    auto load_q = [&](uint32_t(&to)[4][2], const stretch &of) {
        const td_bf16 *row = a.q + ((size_t)sm.seqs[of.seq].row * a.n_heads + of.head * a.group + g) * 64;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                /* FP8: the products' order over a head is free; so that a lane's keys are 16 bytes in a row. */
                to[k][j] = g < a.group ? *(const uint32_t *)(row + (S::IS_FP8 ? t * 16 + k * 4 + j * 2 : k * 16 + j * 8 + t * 2))
                                       : 0;
    };
    stretch s = stretch_at(sm, a.n_seqs, a.n_kv_heads, at, end), next = s;
    load_q(qf, s);
    while (at < end) {
        const td_seq_rows q = sm.seqs[s.seq];
        const view v = view_of(a, q);
        const uint32_t then = at + s.end - s.begin;
        if (then < end) { /* the next unit's queries arrive while this one is worked on */
            next = stretch_at(sm, a.n_seqs, a.n_kv_heads, then, end);
            load_q(q_next, next);
        }
        float o[8][4] = {}, max = -INFINITY, sum = 0;
        float sink = threadIdx.x / 16 < a.group ? a.sinks[s.head * a.group + threadIdx.x / 16] * 1.44269504f : 0;
        if (TRAP(DECODE_SINK_SCALED)) sink /= 8;
        if (TRAP(DECODE_SINK_NONE)) sink = -INFINITY;

        for (uint32_t b = s.begin; b < s.end; b++, i++) {
            uint32_t st = i % STAGES, base = (v.first + b) * KEYS + key0;
            barrier_wait(&sm.full[st], i / STAGES & 1);
            bool is_cut = base < v.lo || base + 15 > v.hi;
            if (is_cut) { /* memory nobody wrote may hold NaN, and 0 NaN is NaN */
                constexpr uint32_t WORDS = S::ROW / 16;
                for (uint32_t w = lane; w < 16 * WORDS; w += 32) {
                    uint32_t key = base + w / WORDS;
                    if (key < v.lo || key > v.hi) ((uint4 *)sm.v[st])[key0 * WORDS + w] = make_uint4(0, 0, 0, 0);
                }
                fence_async(); /* before the copy engine overwrites it */
                __syncwarp();
            }
            float z[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if constexpr (S::IS_FP8) {
                    uint32_t kw[4];
                    load_shared(kw, chunk_addr_fp8(sm.k[st], key0 + n * 8 + g, t));
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const uint2 kf = widen_e4m3(kw[k]);
                        mma_bf16(z[n], qf[k][0], 0, qf[k][1], 0, kf.x, kf.y);
                    }
                } else {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        uint32_t kf[4];
                        ldmatrix_x4(kf, chunk_addr(sm.k[st], key0 + n * 8 + lane % 8, h * 4 + lane / 8));
                        mma_bf16(z[n], qf[2 * h][0], 0, qf[2 * h][1], 0, kf[0], kf[1]);
                        mma_bf16(z[n], qf[2 * h + 1][0], 0, qf[2 * h + 1][1], 0, kf[2], kf[3]);
                    }
                }
            }
            if (is_cut) {
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        uint32_t key = base + n * 8 + t * 2 + j;
                        if (key < v.lo || key > v.hi) z[n][j] = -INFINITY;
                    }
            }
            float top = fmaxf(fmaxf(z[0][0], z[0][1]), fmaxf(z[1][0], z[1][1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = fmaxf(max, top * a.scale_log2);
            float zero_at = top == -INFINITY ? 0 : top, alpha = exp2_fast(max - zero_at);
            max = top;
            float p[2][2];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) p[n][j] = exp2_fast(fmaf(z[n][j], a.scale_log2, -zero_at));
            sum = sum * alpha + ((p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
            uint32_t p0 = pack_bf16(p[0][0], p[0][1]), p1 = pack_bf16(p[1][0], p[1][1]);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                o[d][0] *= alpha;
                o[d][1] *= alpha;
            }
            if constexpr (S::IS_FP8) {
#pragma unroll
                for (int c = 0; c < 4; c += 2) { /* chunks of 16 components: even ones, odd ones */
                    uint32_t vf[4];
                    ldmatrix_x4_trans(vf, chunk_addr_fp8(sm.v[st], key0 + lane % 16, c + lane / 16));
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const uint2 lo = widen_e4m3_pairs(vf[2 * j]), hi = widen_e4m3_pairs(vf[2 * j + 1]);
                        mma_bf16(o[2 * (c + j)], p0, 0, p1, 0, lo.x, hi.x);
                        mma_bf16(o[2 * (c + j) + 1], p0, 0, p1, 0, lo.y, hi.y);
                    }
                }
            } else {
#pragma unroll
                for (int d = 0; d < 4; d++) { /* 16 components: keys 0-7, 8-15 of each 8 */
                    uint32_t vf[4];
                    ldmatrix_x4_trans(vf, chunk_addr(sm.v[st], key0 + lane % 16, d * 2 + lane / 16));
                    mma_bf16(o[2 * d], p0, 0, p1, 0, vf[0], vf[1]);
                    mma_bf16(o[2 * d + 1], p0, 0, p1, 0, vf[2], vf[3]);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&sm.empty[st]);
        }

        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            if constexpr (S::IS_FP8) {
                if (d % 2 == 0)
                    *(float4 *)&sm.o[warp][g][d * 8 + t * 4] = make_float4(o[d][0], o[d + 1][0], o[d][1], o[d + 1][1]);
            } else
                *(float2 *)&sm.o[warp][g][d * 8 + t * 2] = make_float2(o[d][0], o[d][1]);
        }
        if (t == 0) {
            sm.max[warp][g] = max;
            sm.sum[warp][g] = sum;
        }
        named_barrier<1, WARPS * 32>();
        const uint32_t head = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
        part all = {make_float4(0, 0, 0, 0), -INFINITY, 0};
#pragma unroll
        for (int w = 0; w < WARPS; w++) add_part(all, *(const float4 *)&sm.o[w][head][col], sm.max[w][head], sm.sum[w][head]);

        if (s.begin == 0 && s.end == s.n) {
            finish(a, all, q.row, s.head, sink);
        } else {
            /* A thread block has at most two parts: of the unit it begins inside, and of the one it ends inside. */
            const uint32_t slot = s.begin != 0 ? 0 : 1;
            float *to = a.parts + ((size_t)blockIdx.x * 2 + slot) * TD_CUDA_PART_FLOATS;
            *(float4 *)(to + head * 64 + col) = all.o;
            if (col == 0) {
                to[512 + head] = all.max;
                to[520 + head] = all.sum;
            }
            named_barrier<1, WARPS * 32>();
            /* Thread block c has blocks c total / n up to (c + 1) total / n. */
            const uint32_t unit_at = at - s.begin;
            const uint32_t c_first = (uint32_t)((((uint64_t)unit_at + 1) * n - 1) / total);
            const uint32_t c_last = (uint32_t)((((uint64_t)unit_at + s.n) * n - 1) / total);
            if (threadIdx.x == 0) {
                uint32_t *counter = &a.counters[s.seq * a.n_kv_heads + s.head];
                uint32_t n_here; /* what the barrier gathered is seen by whoever counts later */
                asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(n_here) : "l"(counter) : "memory");
                sm.is_last = n_here == c_last - c_first;
                if (sm.is_last) *counter = 0;
            }
            named_barrier<1, WARPS * 32>();
            if (sm.is_last) {
                part sum_of = {make_float4(0, 0, 0, 0), -INFINITY, 0};
                for (uint32_t c = c_first; c <= c_last; c += ADD_AT_ONCE) {
                    float4 o_of[ADD_AT_ONCE];
                    float max_of[ADD_AT_ONCE], add[ADD_AT_ONCE];
#pragma unroll
                    for (uint32_t j = 0; j < ADD_AT_ONCE; j++) {
                        uint32_t part_of = min(c + j, c_last); /* the first one began inside its thread block's work */
                        const float *from =
                            a.parts + ((size_t)part_of * 2 + (part_of == c_first ? 1 : 0)) * TD_CUDA_PART_FLOATS;
                        o_of[j] = __ldcg((const float4 *)(from + head * 64 + col));
                        max_of[j] = __ldcg(from + 512 + head);
                        add[j] = __ldcg(from + 520 + head);
                    }
#pragma unroll
                    for (uint32_t j = 0; j < ADD_AT_ONCE; j++)
                        if (c + j <= c_last) add_part(sum_of, o_of[j], max_of[j], add[j]);
                    for (uint32_t j = 0; TRAP(DECODE_SINK_PER_SPLIT) && j < ADD_AT_ONCE && c + j <= c_last; j++)
                        add_part(sum_of, make_float4(0, 0, 0, 0), sink, sink == -INFINITY ? 0 : 1);
                }
                finish(a, sum_of, q.row, s.head, sink);
            }
        }
        named_barrier<1, WARPS * 32>(); /* sm.o is free again */
        at = then;
        s = next;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 2; j++) qf[k][j] = q_next[k][j];
    }
}

template <class S>
static __global__ void __launch_bounds__(THREADS, S::BLOCKS)
    attn_decode(const __grid_constant__ CUtensorMap kv_map, const decode_args a)
{
    extern __shared__ uint8_t raw[];
    auto &sm = *reinterpret_cast<decode_smem<S> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    let_next();
    if (threadIdx.x == 0) {
        map_prefetch(&kv_map);
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], WARPS);
        }
        barrier_init_fence();
    }
    const uint32_t total = scan(a, sm) * a.n_kv_heads;
    const uint32_t n = min(gridDim.x, (total + MIN_SHARE - 1) / MIN_SHARE);
    if (blockIdx.x >= n) return;
    const uint32_t at = cut_at(a, sm, blockIdx.x, n, total), end = cut_at(a, sm, blockIdx.x + 1, n, total);
    if (at >= end) return;
    if (threadIdx.x >= WARPS * 32) {
        produce(a, &kv_map, sm, at, end); /* what earlier passes stored needs no wait */
    } else {
        before();
        consume(a, sm, at, end, total, n);
    }
}

template <class S>
static enum td_status start(struct td_cuda_stream *s, const CUtensorMap &kv_map, const decode_args &p)
{
    const int bytes = sizeof(decode_smem<S>) + 1024;
    static_assert(S::BLOCKS <= TD_CUDA_PART_BLOCKS);
    cudaError_t e = cudaFuncSetAttribute(attn_decode<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return td_cuda_status(e, "attn_decode");
    return td_cuda_status(
        launch(attn_decode<S>, S::BLOCKS * (uint32_t)s->n_sms, THREADS, bytes, s->s, kv_map, p), "attn_decode");
}

enum td_status td_cuda_attn_decode(struct td_cuda_stream *s, const struct td_attention_args *a)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    if (a->n_seqs > MAX_SEQS || (uint64_t)a->n_seqs * a->n_kv_heads > TD_CUDA_MAX_UNITS) return TD_E_UNSUPPORTED;
    decode_args p = {};
    p.q = (const td_bf16 *)a->q;
    p.seqs = a->seqs;
    p.pages = a->pages;
    p.sinks = a->sinks;
    p.out = (td_bf16 *)a->out;
    p.parts = s->parts;
    p.counters = s->counters;
    p.n_seqs = a->n_seqs;
    p.n_heads = a->n_heads;
    p.n_kv_heads = a->n_kv_heads;
    p.group = a->n_heads / a->n_kv_heads;
    p.window = a->window;
    p.page_tokens = l->page_tokens;
    /* Small boxes keep a window's edges from costing whole blocks. */
    p.box = td_min_u32(l->page_tokens & (~l->page_tokens + 1), a->window != 0 ? 16 : KEYS);
    p.scale_log2 = a->scale * 1.44269504f;
    CUtensorMap kv_map;
    const void *layer = (const char *)a->kv.pool + td_kv_offset(l, a->kv.layer, 0, 0, false, 0);
    const uint64_t rows = (uint64_t)l->n_pages * l->n_heads * 2 * l->page_tokens;
    enum td_status st = l->dtype == TD_E4M3 ? td_cuda_map_bytes(&kv_map, layer, rows, p.box)
                                            : td_cuda_map_rows(&kv_map, layer, rows, 64, 64, p.box);
    if (st != TD_OK) return st;
    return l->dtype == TD_E4M3 ? start<fp8_shape>(s, kv_map, p) : start<bf16_shape>(s, kv_map, p);
}
