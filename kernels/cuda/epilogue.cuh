/* What happens to a finished piece of a product. Both kernels (gemm.cuh, skinny.cuh) hand over pairs (a, b) of one row:
 * which two columns make a pair is the epilogue's to say, so that whatever must meet (the halves of a rotated head, gate
 * and up) meets in one thread. Pair p of a weight matrix: columns col_a(p) and col_b(p). */
#ifndef TD_KERNELS_CUDA_EPILOGUE_CUH
#define TD_KERNELS_CUDA_EPILOGUE_CUH

#include "kernels/cuda/cuda_int.h"

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
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        float v = gate / (1.0f + __expf(-alpha * gate)) * (up + 1.0f);
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
        if (head < n_heads + n_kv_heads) {
            float c = cos[(size_t)row * 32 + j], s = sin[(size_t)row * 32 + j], lo = a;
            a = lo * c - b * s;
            b = b * c + lo * s;
        }
        td_bf16 *to = place(row, head);
        to[j] = __float2bfloat16_rn(a);
        to[j + 32] = __float2bfloat16_rn(b);
    }

    /* The same for col and col + 1, col even. */
    __device__ __forceinline__ void two(uint32_t row, uint32_t col, float2 a, float2 b) const
    {
        if (col >= n_cols) return;
        uint32_t head = col / 64, j = col % 64;
        float2 x = *(const float2 *)(bias + col), y = *(const float2 *)(bias + col + 32);
        a = make_float2(a.x + x.x, a.y + x.y);
        b = make_float2(b.x + y.x, b.y + y.y);
        if (head < n_heads + n_kv_heads) {
            float2 c = *(const float2 *)(cos + (size_t)row * 32 + j), s = *(const float2 *)(sin + (size_t)row * 32 + j);
            float2 lo = a;
            a = make_float2(lo.x * c.x - b.x * s.x, lo.y * c.y - b.y * s.y);
            b = make_float2(b.x * c.x + lo.x * s.x, b.y * c.y + lo.y * s.y);
        }
        td_bf16 *to = place(row, head);
        *(__nv_bfloat162 *)(to + j) = __floats2bfloat162_rn(a.x, a.y);
        *(__nv_bfloat162 *)(to + j + 32) = __floats2bfloat162_rn(b.x, b.y);
    }
};

#endif
