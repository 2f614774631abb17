/* What happens to a finished piece of a product. Both kernels (gemm.cuh, skinny.cuh) hand over pairs (a, b) of one row:
 * which two columns make a pair is the epilogue's to say, so that whatever must meet (the halves of a rotated head,
 * gate and up) meets in one thread. Pair p of a weight matrix: columns col_a(p) and col_b(p). */
#ifndef TD_KERNELS_CUDA_EPILOGUE_CUH
#define TD_KERNELS_CUDA_EPILOGUE_CUH

#include <cuda_fp8.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"
#include "kernels/e4m3.h"

#define PAIRS_NEXT 0 /* columns 2p and 2p + 1 */
#define PAIRS_HEAD 1 /* columns j and j + 32 of a head of 64 */

/* f32 rows: y[row][col]. With an order, row r goes to row order[r]. */
struct store_f32 {
    static constexpr int pairs = PAIRS_NEXT;
    float *y;
    const uint32_t *order;
    uint32_t n_cols;

    __device__ __forceinline__ void operator()(uint32_t row, uint32_t col, float a, float b, uint32_t) const
    {
        if (col >= n_cols) return;
        uint32_t r = order != nullptr ? order[row] : row;
        float *to = y + (size_t)r * n_cols + col;
        if (n_cols % 2 == 0)
            *(float2 *)to = make_float2(a, b);
        else {
            to[0] = a;
            if (col + 1 < n_cols) to[1] = b;
        }
    }
};

/* u = gate * sigmoid(alpha * gate) * (up + 1), clamped first. A NaN stays one. */
struct store_swiglu {
    static constexpr int pairs = PAIRS_NEXT;
    td_bf16 *u;
    const float *bias; /* [E][n_cols] */
    uint32_t n_cols;   /* 2 I */
    float alpha, limit;

    __device__ __forceinline__ void operator()(uint32_t row, uint32_t col, float a, float b, uint32_t expert) const
    {
        if (col >= n_cols) return;
        float2 add = *(const float2 *)(bias + (size_t)expert * n_cols + col);
        float gate = a + add.x, up = b + add.y;
        const float plus = TRAP(NO_PLUS_ONE) ? 0.0f : 1.0f;
        const float high = TRAP(NO_CLAMP) ? INFINITY : limit, gate_high = TRAP(CLAMP_LATE) ? INFINITY : high;
        gate = gate > gate_high ? gate_high : gate;
        if (TRAP(CLAMP_BELOW)) gate = fmaxf(gate, -limit);
        up = up > high ? high : up < -high ? -high : up;
        float act = gate / (1.0f + __expf(-alpha * gate));
        if (TRAP(CLAMP_LATE)) act = fminf(act, limit);
        float v = act * (up + plus);
        u[(size_t)row * (n_cols / 2) + col / 2] = __float2bfloat16_rn(v);
    }
};

/* Bias, rotation, then q to its buffer and K, V to their pages. Columns count from the matrix's first head. */
struct store_qkv {
    static constexpr int pairs = PAIRS_HEAD;
    td_bf16 *q;
    td_bf16 *pool; /* of the layer */
    const float *bias, *cos, *sin;
    const uint32_t *positions, *row_page;
    uint32_t n_heads, n_kv_heads, page_tokens, n_cols;
    unsigned long long *n_saturated; /* not NULL: pages are FP8 */

    /* Two components of K or V as FP8, and a count of those beyond its range. */
    __device__ __forceinline__ uint16_t to_fp8(float a, float b) const
    {
        const float most = TD_E4M3_SATURATES_ABOVE;
        const int n = (fabsf(a) > most) + (fabsf(b) > most);
        if (n != 0) atomicAdd_system(n_saturated, (unsigned long long)n);
        return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    }

    /* Where the row's head lies. */
    __device__ __forceinline__ td_bf16 *place(uint32_t row, uint32_t head) const
    {
        if (head < n_heads) return q + ((size_t)row * n_heads + head) * 64;
        bool is_v = head >= n_heads + n_kv_heads;
        size_t h = head - n_heads - (is_v ? n_kv_heads : 0), page = row_page[row], pos = positions[row] % page_tokens;
        return pool + ((((page * n_kv_heads + h) * 2 + is_v) * page_tokens + pos) * 64);
    }

    __device__ __forceinline__ void operator()(uint32_t row, uint32_t col, float a, float b, uint32_t) const
    {
        if (col >= n_cols) return;
        uint32_t head = col / 64, j = col % 64;
        a += bias[col];
        b += bias[col + 32];
        if (head < n_heads + (TRAP(KEYS_NOT_ROTATED) ? 0 : n_kv_heads)) {
            float c = cos[(size_t)row * 32 + j], s = sin[(size_t)row * 32 + j], lo = a;
            if (TRAP(ROTATED_BACK)) s = -s;
            a = lo * c - b * s;
            b = b * c + lo * s;
        }
        if (n_saturated != nullptr && head >= n_heads) {
            const uint16_t both = to_fp8(a, b);
            uint8_t *to = (uint8_t *)pool + (place(row, head) - pool);
            to[j] = (uint8_t)both;
            to[j + 32] = (uint8_t)(both >> 8);
            return;
        }
        td_bf16 *to = place(row, head);
        to[j] = __float2bfloat16_rn(a);
        to[j + 32] = __float2bfloat16_rn(b);
    }

    /* What all columns of a row share: its place in the pages, and cos and sin of components j + 8 i and the next, the
     * same for every head. */
    struct of_row {
        td_bf16 *q, *page; /* page: K of the first KV head at the row's position */
        float2 cos[4], sin[4];
    };
    __device__ __forceinline__ of_row row(uint32_t r, uint32_t j) const
    {
        of_row o;
        const uint32_t pos = positions != nullptr ? positions[r] % page_tokens : 0;
        const size_t page = row_page != nullptr ? row_page[r] : 0;
        o.q = q + (size_t)r * n_heads * 64;
        o.page = pool + (page * n_kv_heads * 2 * page_tokens + pos) * 64;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t at = r * 32 + min(j + 8 * i, 30u);
            o.cos[i] = *(const float2 *)(cos + at);
            o.sin[i] = *(const float2 *)(sin + at);
        }
        return o;
    }

    /* Components j and j + 1 of a head, and those 32 further on, with bias and rotation; i of the row's four. */
    __device__ __forceinline__ void finish(const of_row &o, int i, uint32_t col, float2 &a, float2 &b) const
    {
        float2 x = *(const float2 *)(bias + col), y = *(const float2 *)(bias + col + 32);
        a = make_float2(a.x + x.x, a.y + x.y);
        b = make_float2(b.x + y.x, b.y + y.y);
        if (col / 64 < n_heads + (TRAP(KEYS_NOT_ROTATED) ? 0 : n_kv_heads)) {
            const float2 c = o.cos[i], lo = a;
            float2 s = o.sin[i];
            if (TRAP(ROTATED_BACK)) s = make_float2(-s.x, -s.y);
            a = make_float2(lo.x * c.x - b.x * s.x, lo.y * c.y - b.y * s.y);
            b = make_float2(b.x * c.x + lo.x * s.x, b.y * c.y + lo.y * s.y);
        }
    }
    /* Where the head of column col lies, were it bf16. */
    __device__ __forceinline__ td_bf16 *head_of(const of_row &o, uint32_t col) const
    {
        const uint32_t head = col / 64;
        const bool is_v = head >= n_heads + n_kv_heads;
        const size_t h = head - n_heads - (is_v ? n_kv_heads : 0);
        return head < n_heads ? o.q + head * 64 : o.page + (h * 2 + is_v) * page_tokens * 64;
    }
    __device__ __forceinline__ bool is_bf16(uint32_t col) const { return n_saturated == nullptr || col / 64 < n_heads; }

    /* The same for col and col + 1, col even. */
    __device__ __forceinline__ void two(const of_row &o, int i, uint32_t col, float2 a, float2 b) const
    {
        if (col >= n_cols) return;
        const uint32_t j = col % 64;
        finish(o, i, col, a, b);
        td_bf16 *to = head_of(o, col);
        if (!is_bf16(col)) {
            uint8_t *byte = (uint8_t *)pool + (to - pool); /* as many elements, of one byte */
            *(uint16_t *)(byte + j) = to_fp8(a.x, a.y);
            *(uint16_t *)(byte + j + 32) = to_fp8(b.x, b.y);
            return;
        }
        *(__nv_bfloat162 *)(to + j) = __floats2bfloat162_rn(a.x, a.y);
        *(__nv_bfloat162 *)(to + j + 32) = __floats2bfloat162_rn(b.x, b.y);
    }

    /* In two steps, for columns that are bf16: packed; then, once lane t of four has components 8 t .. 8 t + 7 of both
     * halves of the head that begins at col, written. */
    __device__ __forceinline__ void rotate(const of_row &o, int i, uint32_t col, float2 a, float2 b, uint32_t &lo,
                                           uint32_t &hi) const
    {
        finish(o, i, col, a, b);
        __nv_bfloat162 x = __floats2bfloat162_rn(a.x, a.y), y = __floats2bfloat162_rn(b.x, b.y);
        lo = *(uint32_t *)&x;
        hi = *(uint32_t *)&y;
    }
    __device__ __forceinline__ void eight(const of_row &o, uint32_t col, uint32_t t, const uint32_t (&lo)[4],
                                          const uint32_t (&hi)[4]) const
    {
        td_bf16 *to = head_of(o, col) + t * 8;
        *(uint4 *)to = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        *(uint4 *)(to + 32) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    }
};

#endif
