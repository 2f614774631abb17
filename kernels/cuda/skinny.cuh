/* Y = X W^T for few rows, bound by reading W once. W is the tensor core's first operand, 16 of its rows (8 pairs, see
 * epilogue.cuh) at a time; X the second, 8 rows at a time. k is dealt to lanes so that each reads 16 bytes in a row: the
 * order of a dot product's terms inside one step of 32 is free, as long as W and X agree. The warps of a block share a
 * tile and split k; their sums are added in warp order.
 *
 * Grouped: block y takes the y-th expert that has rows; X's rows come in the sorted order. */
#ifndef TD_KERNELS_CUDA_SKINNY_CUH
#define TD_KERNELS_CUDA_SKINNY_CUH

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/mma.cuh"

#define SKINNY_UNROLL   2 /* steps of 32 a lane loads at once, of two sets: one arrives while the other is multiplied */

struct skinny_shape {
    const td_bf16 *x, *w;
    uint32_t n_rows, k;
    uint32_t w_begin, n_cols;
    uint32_t w_rows;
    const uint32_t *begin;  /* [E + 1] rows of each expert; NULL: one matrix */
    const uint32_t *active; /* [..] experts that have rows, then E */
    uint32_t n_experts;
    const uint32_t *from; /* row r of the sorted order is row from[r] / from_div of x; NULL: r itself */
    uint32_t from_div;
};

static __device__ __forceinline__ uint4 load_stream(const td_bf16 *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <int PAIRS> static __device__ __forceinline__ uint32_t col_of(uint32_t pair, int second)
{
    return PAIRS == PAIRS_NEXT ? 2 * pair + second : pair / 32 * 64 + pair % 32 + 32 * second;
}

/* A tile of 16 columns of Y, 8 rows at a time. */
template <int WARPS, class Epilogue>
static __global__ void __launch_bounds__(WARPS * 32, 24 / WARPS) skinny(const skinny_shape g, const Epilogue store)
{
    constexpr uint32_t STEP = WARPS * 32 * SKINNY_UNROLL;
    __shared__ float sums[WARPS][16][8 + 1];
    uint32_t expert = 0, row0 = 0, row_end = g.n_rows;
    let_next();
    if (g.begin != nullptr) {
        before();
        expert = g.active[blockIdx.y];
        if (expert >= g.n_experts) return;
        row0 = g.begin[expert];
        row_end = g.begin[expert + 1];
    }
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    const uint32_t pair0 = blockIdx.x * 8, first = warp * 32; /* steps are the warp's, t's 16 bytes lie in them */
    const td_bf16 *w[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t c = min(col_of<Epilogue::pairs>(pair0 + gr, i), g.n_cols - 1);
        w[i] = g.w + ((size_t)expert * g.w_rows + g.w_begin + c) * g.k;
    }

    uint4 even[SKINNY_UNROLL][2], odd[SKINNY_UNROLL][2], x_even[SKINNY_UNROLL], x_odd[SKINNY_UNROLL];
    auto load = [&](uint4(&a)[SKINNY_UNROLL][2], uint32_t k0) {
#pragma unroll
        for (int u = 0; u < SKINNY_UNROLL; u++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t k = k0 + u * WARPS * 32 + t * 8;
                a[u][i] = k < g.k ? load_stream(w[i] + k) : make_uint4(0, 0, 0, 0);
            }
    };
    load(even, first); /* W is nobody's output */
    load(odd, first + STEP);
    before();

    for (bool is_first = true; row0 < row_end; row0 += 8, is_first = false) {
        uint32_t r = min(row0 + gr, row_end - 1);
        if (g.from != nullptr) r = g.from[r] / g.from_div;
        const td_bf16 *x = g.x + (size_t)r * g.k;
        float d[4] = {};
        auto load_x = [&](uint4(&b)[SKINNY_UNROLL], uint32_t k0) {
#pragma unroll
            for (int u = 0; u < SKINNY_UNROLL; u++) {
                uint32_t k = k0 + u * WARPS * 32 + t * 8;
                b[u] = k < g.k ? *(const uint4 *)(x + k) : make_uint4(0, 0, 0, 0);
            }
        };
        auto multiply = [&](const uint4(&a)[SKINNY_UNROLL][2], const uint4(&b)[SKINNY_UNROLL]) {
#pragma unroll
            for (int u = 0; u < SKINNY_UNROLL; u++) {
                mma_bf16(d, a[u][0].x, a[u][1].x, a[u][0].y, a[u][1].y, b[u].x, b[u].y);
                mma_bf16(d, a[u][0].z, a[u][1].z, a[u][0].w, a[u][1].w, b[u].z, b[u].w);
            }
        };
        if (!is_first) {
            load(even, first);
            load(odd, first + STEP);
        }
        load_x(x_even, first);
        load_x(x_odd, first + STEP);
        for (uint32_t k0 = first; k0 < g.k; k0 += 2 * STEP) {
            multiply(even, x_even);
            load(even, k0 + 2 * STEP);
            load_x(x_even, k0 + 2 * STEP);
            multiply(odd, x_odd);
            load(odd, k0 + 3 * STEP);
            load_x(x_odd, k0 + 3 * STEP);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][gr + i / 2 * 8][t * 2 + i % 2] = d[i];
        __syncthreads();
        if (threadIdx.x < 64) {
            uint32_t pair = threadIdx.x % 8, n = threadIdx.x / 8;
            float lo = 0, hi = 0;
#pragma unroll
            for (int j = 0; j < WARPS; j++) {
                lo += sums[j][pair][n];
                hi += sums[j][pair + 8][n];
            }
            if (row0 + n < row_end) store(row0 + n, col_of<Epilogue::pairs>(pair0 + pair, 0), lo, hi, expert);
        }
        __syncthreads();
    }
}

template <class Epilogue>
static enum td_status skinny_run(const struct td_cuda_stream *s, const skinny_shape &g, uint32_t n_groups,
                                 const Epilogue &store, const char *what)
{
    if (g.k % 8 != 0 || g.n_cols % 2 != 0) return TD_E_UNSUPPORTED;
    dim3 grid(td_ceil_div(g.n_cols, 16), n_groups);
    /* Few tiles: more warps each, so that enough is in flight on every multiprocessor. */
    if (grid.x * grid.y <= (uint32_t)s->n_sms)
        return td_cuda_status(launch(skinny<16, Epilogue>, grid, 16 * 32, 0, s->s, g, store), what);
    return td_cuda_status(launch(skinny<8, Epilogue>, grid, 8 * 32, 0, s->s, g, store), what);
}

#endif
