/* Attention of single rows over a window: decode in sliding layers. A window is so short that nothing is gained by cutting it
 * over thread blocks, and what counts is how soon its loads are on their way: a thread block of three warps has one (sequence,
 * KV head), each warp three groups of 16 keys, and a lane asks for all its share of K and V at once, into registers, before
 * it waits for the kernel ahead. Keys are rows of the tensor-core tiles and the query heads its columns, so no lane works
 * for heads that do not exist and a lane ends with 8 components of two heads in a row.
 *
 * Keys outside the window are not read: their logits are -inf and their values zero. The first warp adds the parts in order
 * and counts the sink. A result depends on its own sequence alone. */
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"

#define WARPS  3
#define GROUPS 3 /* of 16 keys, a warp */
#define BLOCKS 5 /* a multiprocessor: the compiler's limit of registers */

struct window_args {
    const td_bf16 *q;
    const struct td_seq_rows *seqs;
    const uint32_t *pages;
    const float *sinks;
    td_bf16 *out;
    const td_bf16 *pool; /* of the layer */
    uint32_t n_heads, n_kv_heads, group, window, page_tokens;
    float scale_log2;
};

static __device__ __forceinline__ uint4 load_row(const td_bf16 *from, bool is_seen)
{
    return is_seen ? __ldcg((const uint4 *)from) : make_uint4(0, 0, 0, 0); /* once: L1 is no help */
}

/* 16 keys of a lane 4g + t: K of keys g, g + 8 at components 8t .. and 32 + 8t ..; V of keys 2t, 2t + 1, 2t + 8, 2t + 9 at
 * components 8g .. */
struct keys16 {
    uint4 k[2][2], v[4];
};

static __device__ __forceinline__ void load_keys(keys16 &to, const window_args &a, uint32_t page, uint32_t head,
                                                 uint32_t key, uint32_t lo, uint32_t hi)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const td_bf16 *k = a.pool + ((((size_t)page * a.n_kv_heads + head) * 2) * a.page_tokens + key % a.page_tokens) * 64;
    const td_bf16 *v = k + a.page_tokens * 64;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t at = g + 8 * i;
        const bool is_seen = key + at >= lo && key + at <= hi;
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) to.k[i][j] = load_row(k + at * 64 + j * 32 + t * 8, is_seen);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = t * 2 + i % 2 + i / 2 * 8;
        to.v[i] = load_row(v + at * 64 + g * 8, key + at >= lo && key + at <= hi);
    }
}

static __device__ __forceinline__ void multiply(float (&z)[4], const keys16 &x, const uint4 (&q)[2])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint4 a = x.k[0][j], b = x.k[1][j];
        mma_bf16(z, a.x, b.x, a.y, b.y, q[j].x, q[j].y);
        mma_bf16(z, a.z, b.z, a.w, b.w, q[j].z, q[j].w);
    }
}

static __device__ __forceinline__ void mix(float (&o)[4][4], const keys16 &x, uint32_t p0, uint32_t p1)
{
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const uint32_t v0 = (&x.v[0].x)[m], v1 = (&x.v[1].x)[m], v2 = (&x.v[2].x)[m], v3 = (&x.v[3].x)[m];
        mma_bf16(o[m], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                 __byte_perm(v2, v3, 0x7632), p0, p1);
    }
}

static __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attn_window(const window_args a)
{
    __shared__ float4 parts[WARPS - 1][5][32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t head = blockIdx.x % a.n_kv_heads;
    let_next();
    const td_seq_rows s = a.seqs[blockIdx.x / a.n_kv_heads];
    if (s.n_rows != 1) return;
    const uint32_t window = a.window + TRAP(DECODE_WINDOW_129) - TRAP(DECODE_WINDOW_127);
    const uint32_t hi = s.start, lo = hi + 1 > window ? hi + 1 - window : 0;
    const uint32_t first = (lo / 16 + warp * GROUPS) * 16;
    uint32_t page = 0;
    if (lane < GROUPS && first + lane * 16 <= hi)
        page = __ldg(a.pages + s.pages + ((first + lane * 16) / a.page_tokens - s.first_block));
    float sink[2] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
        if (2 * t + j < a.group) {
            sink[j] = a.sinks[head * a.group + 2 * t + j] * 1.44269504f;
            if (TRAP(DECODE_SINK_SCALED)) sink[j] /= 8;
            if (TRAP(DECODE_SINK_NONE)) sink[j] = -INFINITY;
        }

    keys16 keys[GROUPS];
#pragma unroll
    for (uint32_t i = 0; i < GROUPS; i++) {
        const uint32_t key = first + i * 16, at = __shfl_sync(~0u, page, (int)i);
        if (key + 16 <= s.fresh || key > hi) load_keys(keys[i], a, at, head, key, lo, hi);
    }
    before();
    uint4 q[2] = {};
    if (g < a.group)
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
            q[j] = *(const uint4 *)(a.q + ((size_t)s.row * a.n_heads + head * a.group + g) * 64 + j * 32 + t * 8);
#pragma unroll
    for (uint32_t i = 0; i < GROUPS; i++) {
        const uint32_t key = first + i * 16, at = __shfl_sync(~0u, page, (int)i);
        if (!(key + 16 <= s.fresh || key > hi)) load_keys(keys[i], a, at, head, key, lo, hi);
    }

    float z[GROUPS][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[4][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < GROUPS; i++) {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) z[i][j] = 0;
        multiply(z[i], keys[i], q);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t key = first + i * 16 + g + j / 2 * 8;
            if (key < lo || key > hi) z[i][j] = -INFINITY;
            max[j % 2] = fmaxf(max[j % 2], z[i][j]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
#pragma unroll
        for (int by = 4; by < 32; by *= 2) max[j] = fmaxf(max[j], __shfl_xor_sync(~0u, max[j], by));
        max[j] *= a.scale_log2;
    }
    const float zero_at[2] = {max[0] == -INFINITY ? 0 : max[0], max[1] == -INFINITY ? 0 : max[1]};
#pragma unroll
    for (uint32_t i = 0; i < GROUPS; i++) {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            z[i][j] = exp2_fast(fmaf(z[i][j], a.scale_log2, -zero_at[j % 2]));
            sum[j % 2] += z[i][j];
        }
        mix(o, keys[i], transposed(pack_bf16(z[i][0], z[i][1])), transposed(pack_bf16(z[i][2], z[i][3])));
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
#pragma unroll
        for (int by = 4; by < 32; by *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], by);

    if (warp > 0) {
        float4(&to)[5][32] = parts[warp - 1];
#pragma unroll
        for (int m = 0; m < 4; m++) to[m][lane] = make_float4(o[m][0], o[m][1], o[m][2], o[m][3]);
        to[4][lane] = make_float4(max[0], max[1], sum[0], sum[1]);
    }
    __syncthreads();
    if (warp > 0) return;
    float top[2], weight[2], total[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        top[j] = fmaxf(sink[j], max[j]);
#pragma unroll
        for (int w = 0; w < WARPS - 1; w++) top[j] = fmaxf(top[j], (&parts[w][4][lane].x)[j]);
        weight[j] = exp2_fast(max[j] - top[j]);
        total[j] = exp2_fast(sink[j] - top[j]) + sum[j] * weight[j];
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[m][j] *= weight[j % 2];
#pragma unroll
    for (int w = 0; w < WARPS - 1; w++) {
        const float4 about = parts[w][4][lane];
        weight[0] = exp2_fast(about.x - top[0]);
        weight[1] = exp2_fast(about.y - top[1]);
        total[0] += about.z * weight[0];
        total[1] += about.w * weight[1];
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float4 v = parts[w][m][lane];
            o[m][0] = fmaf(v.x, weight[0], o[m][0]);
            o[m][1] = fmaf(v.y, weight[1], o[m][1]);
            o[m][2] = fmaf(v.z, weight[0], o[m][2]);
            o[m][3] = fmaf(v.w, weight[1], o[m][3]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        if (2 * t + j >= a.group) continue;
        const float inv = 1.0f / total[j];
        *(uint4 *)(a.out + ((size_t)s.row * a.n_heads + head * a.group + 2 * t + j) * 64 + g * 8) =
            make_uint4(pack_bf16(o[0][j] * inv, o[0][j + 2] * inv), pack_bf16(o[1][j] * inv, o[1][j + 2] * inv),
                       pack_bf16(o[2][j] * inv, o[2][j + 2] * inv), pack_bf16(o[3][j] * inv, o[3][j + 2] * inv));
    }
}

bool td_cuda_window_fits(uint32_t window) { return window != 0 && window + 15 <= WARPS * GROUPS * 16; }

enum td_status td_cuda_attn_window(struct td_cuda_stream *s, const struct td_attention_args *a)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    window_args p = {};
    p.q = (const td_bf16 *)a->q;
    p.seqs = a->seqs;
    p.pages = a->pages;
    p.sinks = a->sinks;
    p.out = (td_bf16 *)a->out;
    p.pool = (const td_bf16 *)((const char *)a->kv.pool + td_kv_offset(l, a->kv.layer, 0, 0, false, 0));
    p.n_heads = a->n_heads;
    p.n_kv_heads = a->n_kv_heads;
    p.group = a->n_heads / a->n_kv_heads;
    p.window = a->window;
    p.page_tokens = l->page_tokens;
    p.scale_log2 = a->scale * 1.44269504f;
    return td_cuda_status(launch(attn_window, a->n_seqs * a->n_kv_heads, 32 * WARPS, 0, s->s, p), "attn_window");
}
