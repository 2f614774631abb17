/* Attention of single rows: decode. Work is blocks of 64 keys of (sequence, KV head) units, laid end to end and dealt evenly
 * to thread blocks, so ragged batches balance; which thread block has what follows from the batch alone and is computed on
 * the device, so a graph holds for any lengths. A producer warp copies K and V from the pages through a ring; consumer warps
 * take the ring's blocks in turn, each a whole one, with max, sum and output of its own, added when a unit ends. Keys are
 * rows of the tensor-core tiles and the query heads of a KV head their columns: none of a tile is empty.
 *
 * A short unit goes to one thread block whole: cuts that fall into it move to its nearer end.
 *
 * A unit that several thread blocks share: each leaves its part in memory, in four slices; whoever arrives last at a slice
 * adds the parts in order and counts the sink, once. Nothing waits. */
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"

#define KEYS     TILE_KEYS
#define SLICES   TILE_SLICES
#define MAX_SEQS 512
#define MIN_SHARE 2u /* blocks of keys a thread block should have: fewer would cost more in adding parts */
#define ADD_AT_ONCE 9

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

/* One shape of the kernel: consumer warps, stages of the ring, pages of FP8. Stages are a multiple of the warps, so each
 * belongs to one: a warp that waited for another's stage could be a lap behind, and a barrier's parity would lie to it. */
template <int WARPS_, int STAGES_, bool IS_FP8_> struct shape {
    static constexpr int WARPS = WARPS_, STAGES = STAGES_, THREADS = 32 * (WARPS + 1);
    static constexpr bool IS_FP8 = IS_FP8_;
    static constexpr uint32_t ROW = IS_FP8 ? 64 : 128; /* bytes of a key */
    static_assert(STAGES % WARPS == 0 && WARPS >= SLICES);
};
using bf16_shape = shape<4, 8, false>;
using fp8_shape = shape<4, 16, true>;

template <class S> struct decode_smem {
    alignas(1024) uint8_t k[S::STAGES][KEYS * S::ROW];
    alignas(1024) uint8_t v[S::STAGES][KEYS * S::ROW];
    float4 o[S::WARPS][SLICES][32]; /* as the warps' lanes hold them */
    float2 about[S::WARPS][8];      /* max and sum of each head */
    uint64_t full[S::STAGES], empty[S::STAGES];
    uint32_t warp_sums[S::THREADS / 32];
    uint32_t blocks_before[MAX_SEQS + 1]; /* of one KV head */
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
    for (uint32_t base = 0; base < a.n_seqs; base += S::THREADS) {
        uint32_t i = base + threadIdx.x, n = 0;
        if (i < a.n_seqs) {
            n = view_of(a, a.seqs[i]).n;
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
        for (uint32_t j = 0; j < S::THREADS / 32; j++) {
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
        const td_seq_rows q = a.seqs[s.seq];
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

template <class S>
static __device__ __forceinline__ void load_queries(queries &to, const decode_args &a, const stretch &of)
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const td_bf16 *row = a.q + ((size_t)a.seqs[of.seq].row * a.n_heads + of.head * a.group + g) * 64;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            to.f[k][j] = g < a.group ? *(const uint32_t *)(row + (S::IS_FP8 ? t * 16 + k * 4 + j * 2 : k * 16 + j * 8 + t * 2)) : 0;
}

template <class S>
static __device__ __forceinline__ void finish(const decode_args &a, part p, uint32_t row, uint32_t kv_head, uint32_t slice,
                                              const float (&sink)[2])
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    add_part(p, make_float4(0, 0, 0, 0), make_float2(sink[0], sink[0] == -INFINITY ? 0 : 1),
             make_float2(sink[1], sink[1] == -INFINITY ? 0 : 1));
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        if (2 * t + j >= a.group) continue;
        const float inv = 1.0f / p.about[j].y, one = (j == 0 ? p.o.x : p.o.y) * inv, two = (j == 0 ? p.o.z : p.o.w) * inv;
        td_bf16 *to = a.out + ((size_t)row * a.n_heads + kv_head * a.group + 2 * t + j) * 64 + slice * 16;
        if constexpr (S::IS_FP8) {
            *(uint32_t *)(to + 2 * g) = pack_bf16(one, two);
        } else {
            to[g] = __float2bfloat16_rn(one);
            to[g + 8] = __float2bfloat16_rn(two);
        }
    }
}

/* A warp's slice of a unit's stretch: added over the warps, then finished or, if other thread blocks have the rest, left for
 * the last of them. c_first .. c_last: those thread blocks. */
template <class S>
static __device__ void leave(const decode_args &a, const decode_smem<S> &sm, const stretch &s, uint32_t row, uint32_t slice,
                             uint32_t c_first, uint32_t c_last)
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float sink[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
        if (2 * t + j < a.group) {
            sink[j] = a.sinks[s.head * a.group + 2 * t + j] * 1.44269504f;
            if (TRAP(DECODE_SINK_SCALED)) sink[j] /= 8;
            if (TRAP(DECODE_SINK_NONE)) sink[j] = -INFINITY;
        }
    part all = no_part();
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) add_part(all, sm.o[w][slice][lane], sm.about[w][2 * t], sm.about[w][2 * t + 1]);
    if (s.begin == 0 && s.end == s.n) {
        finish<S>(a, all, row, s.head, slice, sink);
        return;
    }
    /* A thread block has at most two parts: of the unit it begins inside, and of the one it ends inside. A slice of a part:
     * 32 lanes' shares, then the heads' max and sum. */
    constexpr uint32_t SLICE_FLOATS = TD_CUDA_PART_FLOATS / SLICES;
    static_assert(SLICE_FLOATS >= 128 + 16);
    auto place = [&](uint32_t c, uint32_t which) {
        return a.parts + ((size_t)c * 2 + which) * TD_CUDA_PART_FLOATS + slice * SLICE_FLOATS;
    };
    float *to = place(blockIdx.x, s.begin != 0 ? 0 : 1);
    __stcg((float4 *)to + lane, all.o);
    if (lane < 4) __stcg((float4 *)(to + 128) + t, make_float4(all.about[0].x, all.about[0].y, all.about[1].x, all.about[1].y));
    __syncwarp();
    uint32_t n_here = 0; /* what the warp stored is seen by whoever counts later */
    uint32_t *counter = &a.counters[(s.seq * a.n_kv_heads + s.head) * SLICES + slice];
    if (lane == 0) {
        asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(n_here) : "l"(counter) : "memory");
        if (n_here == c_last - c_first) *counter = 0;
    }
    n_here = __shfl_sync(~0u, n_here, 0);
    if (n_here != c_last - c_first) return;
    all = no_part();
    for (uint32_t c = c_first; c <= c_last; c += ADD_AT_ONCE) {
        float4 o_of[ADD_AT_ONCE], about[ADD_AT_ONCE];
#pragma unroll
        for (uint32_t j = 0; j < ADD_AT_ONCE; j++) {
            const uint32_t part_of = min(c + j, c_last); /* the first one began inside its thread block's work */
            const float *from = place(part_of, part_of == c_first ? 1 : 0);
            o_of[j] = __ldcg((const float4 *)from + lane);
            about[j] = __ldcg((const float4 *)(from + 128) + t);
        }
#pragma unroll
        for (uint32_t j = 0; j < ADD_AT_ONCE; j++)
            if (c + j <= c_last) add_part(all, o_of[j], make_float2(about[j].x, about[j].y), make_float2(about[j].z, about[j].w));
        for (uint32_t j = 0; TRAP(DECODE_SINK_PER_SPLIT) && j < ADD_AT_ONCE && c + j <= c_last; j++)
            add_part(all, make_float4(0, 0, 0, 0), make_float2(sink[0], 1), make_float2(sink[1], 1));
    }
    finish<S>(a, all, row, s.head, slice, sink);
}

template <class S>
static __device__ void consume(const decode_args &a, decode_smem<S> &sm, uint32_t at, uint32_t end, uint32_t total, uint32_t n)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    stretch s = stretch_at(sm, a.n_seqs, a.n_kv_heads, at, end), next = s;
    queries q, q_next;
    load_queries<S>(q, a, s);
    q.scale[0] = q.scale[1] = a.scale_log2;
    q_next = q;
    uint32_t i = warp, first = 0; /* blocks: this warp's next, the stretch's first; both of all this thread block has */
    while (at < end) {
        if constexpr (S::IS_FP8) as_halves(q, a.scale_log2);
        const td_seq_rows seq = a.seqs[s.seq];
        const view v = view_of(a, seq);
        const uint32_t n_blocks = s.end - s.begin, then = at + n_blocks;
        if (then < end) { /* the next unit's queries arrive while this one is worked on */
            next = stretch_at(sm, a.n_seqs, a.n_kv_heads, then, end);
            load_queries<S>(q_next, a, next);
        }
        state x = {{}, {-INFINITY, -INFINITY}, {}};
        for (; i < first + n_blocks; i += S::WARPS) {
            const uint32_t st = i % S::STAGES;
            barrier_wait(&sm.full[st], i / S::STAGES & 1);
            attend<S>(x, q, sm.k[st], sm.v[st], (v.first + s.begin + i - first) * KEYS, v.lo, v.hi);
            __syncwarp();
            if (lane == 0) barrier_arrive(&sm.empty[st]);
        }
        first += n_blocks;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int by = 4; by < 32; by *= 2) x.sum[j] += __shfl_xor_sync(~0u, x.sum[j], by);
#pragma unroll
        for (int m = 0; m < SLICES; m++) sm.o[warp][m][lane] = make_float4(x.o[m][0], x.o[m][1], x.o[m][2], x.o[m][3]);
        if (lane < 4) {
            sm.about[warp][2 * t] = make_float2(x.max[0], x.sum[0]);
            sm.about[warp][2 * t + 1] = make_float2(x.max[1], x.sum[1]);
        }
        named_barrier<1, S::WARPS * 32>();
        if (warp < SLICES) {
            /* Thread block c has blocks c total / n up to (c + 1) total / n. */
            const uint32_t unit_at = at - s.begin;
            leave(a, sm, s, seq.row, warp, (uint32_t)((((uint64_t)unit_at + 1) * n - 1) / total),
                  (uint32_t)((((uint64_t)unit_at + s.n) * n - 1) / total));
        }
        named_barrier<1, S::WARPS * 32>(); /* sm.o is free again */
        at = then;
        s = next;
        q = q_next;
    }
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, 1)
    attn_decode(const __grid_constant__ CUtensorMap kv_map, const decode_args a)
{
    extern __shared__ uint8_t raw[];
    auto &sm = *reinterpret_cast<decode_smem<S> *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    let_next();
    if (threadIdx.x == 0) {
        map_prefetch(&kv_map);
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(&sm.full[i], 1);
            barrier_init(&sm.empty[i], 1);
        }
        barrier_init_fence();
    }
    const uint32_t total = scan(a, sm) * a.n_kv_heads;
    const uint32_t n = min(gridDim.x, (total + MIN_SHARE - 1) / MIN_SHARE);
    if (blockIdx.x >= n) return;
    const uint32_t at = cut_at(a, sm, blockIdx.x, n, total), end = cut_at(a, sm, blockIdx.x + 1, n, total);
    if (at >= end) return;
    if (threadIdx.x >= S::WARPS * 32) {
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
    cudaError_t e = cudaFuncSetAttribute(attn_decode<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return td_cuda_status(e, "attn_decode");
    return td_cuda_status(
        launch(attn_decode<S>, (uint32_t)s->n_sms, S::THREADS, bytes, s->s, kv_map, p), "attn_decode");
}

enum td_status td_cuda_attn_decode(struct td_cuda_stream *s, const struct td_attention_args *a)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    if (a->n_seqs > MAX_SEQS || (uint64_t)a->n_seqs * a->n_kv_heads * SLICES > TD_CUDA_MAX_UNITS) return TD_E_UNSUPPORTED;
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
