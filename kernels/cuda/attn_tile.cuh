/* A warp's part of decode attention: 64 keys in shared memory against the query heads of a KV head, with what was seen so far.
 * Keys are rows of the tensor-core tiles and heads their columns, so no tile is empty; lane 4g + t ends with heads 2t, 2t + 1.
 * bf16 as it is; FP8 keys and values as halves, which are exact and cost one conversion for two. */
#ifndef TD_KERNELS_CUDA_ATTN_TILE_CUH
#define TD_KERNELS_CUDA_ATTN_TILE_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/mma.cuh"

#define TILE_KEYS   64
#define TILE_SLICES 4 /* of the output: 16 components of all heads */

/* 16 bytes of row `row`, chunk `chunk` of 8, in a swizzled tile. */
static __device__ __forceinline__ uint32_t chunk_addr(const uint8_t *tile, uint32_t row, uint32_t chunk)
{
    return smem_addr(tile) + row * 128 + ((chunk ^ (row & 7)) << 4);
}

/* The same in a tile of rows of 64 bytes, chunk of 4. */
static __device__ __forceinline__ uint32_t chunk_addr_fp8(const uint8_t *tile, uint32_t row, uint32_t chunk)
{
    return smem_addr(tile) + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

/* Products of halves, as mma_bf16. */
static __device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                               uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ uint32_t pack_f16(float lo, float hi)
{
    __half2 v = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}
/* Codes 0, 1 and 2, 3 of a word as halves: one instruction each, and exact. */
static __device__ __forceinline__ uint2 halves_of(uint32_t w)
{
    uint2 r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(r.x), "=r"(r.y)
        : "r"(w));
    return r;
}
/* An 8 x 8 tile of halves, a row of two to each lane's register, transposed. */
static __device__ __forceinline__ uint32_t transposed(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Queries of a unit as the tiles' columns: lane 4g + t has head g at 16 components; and what a product of heads 2t, 2t + 1
 * is worth in powers of two. */
struct queries {
    uint32_t f[4][2];
    float scale[2];
};

/* For FP8 keys queries become halves: as E4M3 they would lose more than the keys did. A power of two a head keeps them in
 * range. The products' order over a head is free, so a lane's components are 16 bytes of a key in a row. */
static __device__ __forceinline__ void as_halves(queries &q, float scale_log2)
{
    const uint32_t t = threadIdx.x % 4;
    float top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t w = q.f[i / 2][i % 2];
        top = fmaxf(top, fmaxf(fabsf(__uint_as_float(w << 16)), fabsf(__uint_as_float(w & 0xffff0000u))));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const uint32_t exponent = min(max(__float_as_uint(top) >> 23, 1u), 253u); /* the top becomes 1 .. 2 */
    const float down = __uint_as_float((254 - exponent) << 23), up = __uint_as_float(exponent << 23);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t &w = q.f[i / 2][i % 2];
        w = pack_f16(__uint_as_float(w << 16) * down, __uint_as_float(w & 0xffff0000u) * down);
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) q.scale[j] = scale_log2 * __shfl_sync(~0u, up, (int)(2 * t + j) * 4);
}

/* Of a warp: lane 4g + t has heads 2t, 2t + 1 of every slice at two components. */
struct state {
    float o[TILE_SLICES][4], max[2], sum[2];
};

/* A block of 64 keys from `base`, of which lo .. hi are seen. */
template <class S>
static __device__ __forceinline__ void attend(state &x, const queries &q, const uint8_t *k_tile, uint8_t *v_tile, uint32_t base,
                                              uint32_t lo, uint32_t hi)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool is_cut = base < lo || base + TILE_KEYS - 1 > hi;
    if (is_cut) { /* memory nobody wrote may hold NaN, and 0 NaN is NaN */
        constexpr uint32_t WORDS = S::ROW / 16;
        for (uint32_t w = lane; w < TILE_KEYS * WORDS; w += 32) {
            uint32_t key = base + w / WORDS;
            if (key < lo || key > hi) ((uint4 *)v_tile)[w] = make_uint4(0, 0, 0, 0);
        }
        fence_async(); /* before the copy engine overwrites it */
        __syncwarp();
    }
    float z[4][4] = {}; /* of groups of 16 keys: keys g, g + 8 for each head */
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if constexpr (S::IS_FP8) {
            uint32_t even[4], odd[4];
            load_shared(even, chunk_addr_fp8(k_tile, n * 16 + g, t));
            load_shared(odd, chunk_addr_fp8(k_tile, n * 16 + 8 + g, t));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint2 e = halves_of(even[k]), o = halves_of(odd[k]);
                mma_f16(z[n], e.x, o.x, e.y, o.y, q.f[k][0], q.f[k][1]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t f[4];
                ldmatrix_x4(f, chunk_addr(k_tile, n * 16 + lane % 16, k * 2 + lane / 16));
                mma_bf16(z[n], f[0], f[1], f[2], f[3], q.f[k][0], q.f[k][1]);
            }
        }
    }
    if (is_cut) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t key = base + n * 16 + g + j / 2 * 8;
                if (key < lo || key > hi) z[n][j] = -INFINITY;
            }
    }
    float at[2], alpha[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float top = fmaxf(z[0][j], z[0][j + 2]);
#pragma unroll
        for (int n = 1; n < 4; n++) top = fmaxf(top, fmaxf(z[n][j], z[n][j + 2]));
#pragma unroll
        for (int by = 4; by < 32; by *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
        top = fmaxf(x.max[j], top * q.scale[j]);
        at[j] = top == -INFINITY ? 0 : top;
        alpha[j] = exp2_fast(x.max[j] - at[j]);
        x.max[j] = top;
        x.sum[j] *= alpha[j];
    }
#pragma unroll
    for (int m = 0; m < TILE_SLICES; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) x.o[m][j] *= alpha[j % 2];
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            z[n][j] = exp2_fast(fmaf(z[n][j], q.scale[j % 2], -at[j % 2]));
            x.sum[j % 2] += z[n][j];
        }
        if constexpr (S::IS_FP8) {
            const uint32_t p0 = transposed(pack_f16(z[n][0], z[n][1])), p1 = transposed(pack_f16(z[n][2], z[n][3]));
#pragma unroll
            for (int c = 0; c < 4; c += 2) { /* two slices: keys 0-7, 8-15 of each */
                uint32_t f[4];
                ldmatrix_x4_trans(f, chunk_addr_fp8(v_tile, n * 16 + lane % 16, c + lane / 16));
#pragma unroll
                for (int j = 0; j < 2; j++) { /* a register has components 2g, 2g + 1 of two keys */
                    const uint2 e = halves_of(__byte_perm(f[2 * j], 0, 0x3120)), o = halves_of(__byte_perm(f[2 * j + 1], 0, 0x3120));
                    mma_f16(x.o[c + j], e.x, e.y, o.x, o.y, p0, p1);
                }
            }
        } else {
            const uint32_t p0 = transposed(pack_bf16(z[n][0], z[n][1])), p1 = transposed(pack_bf16(z[n][2], z[n][3]));
#pragma unroll
            for (int m = 0; m < TILE_SLICES; m++) {
                uint32_t f[4];
                ldmatrix_x4_trans(f, chunk_addr(v_tile, n * 16 + lane / 16 * 8 + lane % 8, m * 2 + lane / 8 % 2));
                mma_bf16(x.o[m], f[0], f[1], f[2], f[3], p0, p1);
            }
        }
    }
}

/* A lane's share of a slice: heads 2t, 2t + 1 (x and y, z and w) with their max and sum. */
struct part {
    float4 o;
    float2 about[2];
};
static __device__ __forceinline__ void add_part(part &p, float4 o, float2 x, float2 y)
{
    const float2 of[2] = {x, y};
    float keep[2], add[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float top = fmaxf(p.about[j].x, of[j].x), at = top == -INFINITY ? 0 : top;
        keep[j] = exp2_fast(p.about[j].x - at);
        add[j] = exp2_fast(of[j].x - at);
        p.about[j].y = p.about[j].y * keep[j] + of[j].y * add[j];
        p.about[j].x = top;
    }
    p.o.x = p.o.x * keep[0] + o.x * add[0];
    p.o.y = p.o.y * keep[1] + o.y * add[1];
    p.o.z = p.o.z * keep[0] + o.z * add[0];
    p.o.w = p.o.w * keep[1] + o.w * add[1];
}
static __device__ __forceinline__ part no_part()
{
    const float2 none = make_float2(-INFINITY, 0);
    return {make_float4(0, 0, 0, 0), {none, none}};
}

#endif
