/* Y = X W^T for up to 8 rows of one matrix, bound by reading W once. A thread block takes GROUPS x 8 columns of Y, so
 * many that there are about as many blocks as multiprocessors; its warps divide k. A lane copies the very 16 bytes of W
 * into shared memory that it multiplies later, so no thread waits for another's copy; as in skinny.cuh the order of k
 * inside 32 is free. Its share of X it keeps in registers, all of it asked for at once: what has to wait for the kernel
 * ahead is one trip to the L2. Warps' sums are added in their order: a row's bits do not depend on the number of rows.
 *
 * A block has half of a multiprocessor's shared memory and registers: the next product's W is on its way while this one
 * ends. */
#ifndef TD_KERNELS_CUDA_FEW_CUH
#define TD_KERNELS_CUDA_FEW_CUH

#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/skinny.cuh"
#include "kernels/dense_format.h"

#define FEW_WARPS 8

static __device__ __forceinline__ void copy_16(void *to, const void *from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_addr(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}
static __device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* The tensor core's B is 8 rows of W; its A the rows of X, half of it empty. TURNS: of 32 in k a warp, at most; of 64
 * where W is FP8 (kernels/dense_format.h), which is widened to bf16, exactly, on the way from shared memory. */
template <int GROUPS, int TURNS, int STAGES, bool IS_FP8, class Epilogue>
static __global__ void __launch_bounds__(FEW_WARPS * 32, 2) few(const skinny_shape g, const Epilogue store)
{
    constexpr int COLS = GROUPS * 8, LINE = COLS + 2, K = IS_FP8 ? 64 : 32, W_BYTES = IS_FP8 ? 1 : 2;
    extern __shared__ __align__(16) uint8_t raw[];
    auto &ring = *reinterpret_cast<uint4(*)[STAGES][GROUPS][FEW_WARPS * 32]>(raw);
    static_assert(sizeof(ring) >= FEW_WARPS * 8 * LINE * sizeof(float));
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    const uint32_t pair0 = blockIdx.x * GROUPS * 4;
    let_next();

    /* Two turns of a warp make the 128 bytes of a line; the next two lie behind the other warps'. */
    auto k_of = [&](int i) { return ((i / 2 * FEW_WARPS + warp) * 2 + i % 2) * K + t * (K / 4); };
    const uint32_t row_bytes = IS_FP8 ? td_dense_fp8_row_bytes(g.k) : g.k * 2;
    auto row_of = [&](uint32_t col) {
        return (const uint8_t *)g.w + (size_t)(g.w_begin + min(col, g.n_cols - 1)) * row_bytes;
    };
    const uint8_t *w[GROUPS];
    const td_bf16 *x = g.x + (size_t)gr * g.k;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) w[j] = row_of(col_of<Epilogue::pairs>(pair0 + j * 4 + gr / 2, gr % 2));
    auto copy_w = [&](int i) {
        const uint32_t k = k_of(i);
        if (i < TURNS)
#pragma unroll
            for (int j = 0; j < GROUPS; j++)
                copy_16(&ring[i % STAGES][j][threadIdx.x], k < g.k ? w[j] + k * W_BYTES : w[j], k < g.k);
        copies_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) copy_w(i); /* W is nobody's output; what lies behind k is zeros */
    before();
    uint4 a[TURNS][K / 32];
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
        for (int j = 0; j < K / 32; j++)
            a[i][j] = k_of(i) < g.k && gr < g.n_rows ? *(const uint4 *)(x + k_of(i) + j * 8) : make_uint4(0, 0, 0, 0);

    float d[GROUPS][4] = {};
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        copies_wait<STAGES - 1>();
        uint4 b[GROUPS];
#pragma unroll
        for (int j = 0; j < GROUPS; j++) b[j] = ring[i % STAGES][j][threadIdx.x];
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if constexpr (IS_FP8) {
                const uint2 v0 = widen_e4m3(b[j].x), v1 = widen_e4m3(b[j].y), v2 = widen_e4m3(b[j].z),
                            v3 = widen_e4m3(b[j].w);
                mma_bf16(d[j], a[i][0].x, 0, a[i][0].y, 0, v0.x, v0.y);
                mma_bf16(d[j], a[i][0].z, 0, a[i][0].w, 0, v1.x, v1.y);
                mma_bf16(d[j], a[i][K / 32 - 1].x, 0, a[i][K / 32 - 1].y, 0, v2.x, v2.y);
                mma_bf16(d[j], a[i][K / 32 - 1].z, 0, a[i][K / 32 - 1].w, 0, v3.x, v3.y);
            } else {
                mma_bf16(d[j], a[i][0].x, 0, a[i][0].y, 0, b[j].x, b[j].y);
                mma_bf16(d[j], a[i][0].z, 0, a[i][0].w, 0, b[j].z, b[j].w);
            }
        }
        copy_w(i + STAGES);
    }
    copies_wait<0>();
    __syncthreads();

    float *sums = (float *)raw; /* [warps][8][LINE] */
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
        *(float2 *)&sums[(warp * 8 + gr) * LINE + j * 8 + t * 2] = make_float2(d[j][0], d[j][1]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < g.n_rows * (COLS / 2); i += FEW_WARPS * 32) {
        const uint32_t row = i / (COLS / 2), pair = i % (COLS / 2);
        float a = 0, b = 0;
#pragma unroll
        for (int j = 0; j < FEW_WARPS; j++) {
            const float2 v = *(const float2 *)&sums[(j * 8 + row) * LINE + pair * 2];
            a += v.x;
            b += v.y;
        }
        if constexpr (IS_FP8) {
            const uint32_t at = td_dense_fp8_scale_at(g.k);
            a *= *(const float *)(row_of(col_of<Epilogue::pairs>(pair0 + pair, 0)) + at);
            b *= *(const float *)(row_of(col_of<Epilogue::pairs>(pair0 + pair, 1)) + at);
        }
        store(row, col_of<Epilogue::pairs>(pair0 + pair, 0), a, b, 0);
    }
}

template <int GROUPS, int TURNS, int STAGES, bool IS_FP8 = false, class Epilogue>
static enum td_status few_start(const struct td_cuda_stream *s, const skinny_shape &g, const Epilogue &store,
                                const char *what)
{
    auto kernel = few<GROUPS, TURNS, STAGES, IS_FP8, Epilogue>;
    const size_t bytes = (size_t)STAGES * GROUPS * FEW_WARPS * 32 * sizeof(uint4);
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e == cudaSuccess) e = launch(kernel, td_ceil_div(g.n_cols, GROUPS * 8), FEW_WARPS * 32, bytes, s->s, g, store);
    return td_cuda_status(e, what);
}

#endif
