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

#define SKINNY_WARPS    8
#define SKINNY_UNROLL   4
#define SKINNY_MAX_ROWS 8u /* beyond, reading X costs as much as reading W */

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

/* MT tiles of 16 columns of Y and NT tiles of 8 rows. */
template <int MT, int NT, class Epilogue>
static __global__ void __launch_bounds__(SKINNY_WARPS * 32) skinny(const skinny_shape g, const Epilogue store)
{
    __shared__ float sums[SKINNY_WARPS][MT * 16][NT * 8 + 1];
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
    const uint32_t pair0 = blockIdx.x * MT * 8;
    const td_bf16 *w[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t c = min(col_of<Epilogue::pairs>(pair0 + m * 8 + gr, i), g.n_cols - 1);
            w[m][i] = g.w + ((size_t)expert * g.w_rows + g.w_begin + c) * g.k;
        }

    uint4 a[SKINNY_UNROLL][MT][2];
    auto load_w = [&](uint32_t k0) {
#pragma unroll
        for (int u = 0; u < SKINNY_UNROLL; u++) {
            uint32_t k = k0 + u * SKINNY_WARPS * 32 + t * 8;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    a[u][m][i] = k < g.k ? load_stream(w[m][i] + k) : make_uint4(0, 0, 0, 0);
        }
    };
    load_w(warp * 32); /* W is nobody's output */
    before();

    for (bool is_first = true; row0 < row_end; row0 += NT * 8, is_first = false) {
        const td_bf16 *x[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint32_t r = min(row0 + n * 8 + gr, row_end - 1);
            if (g.from != nullptr) r = g.from[r] / g.from_div;
            x[n] = g.x + (size_t)r * g.k;
        }
        float d[MT][NT][4] = {};
        for (uint32_t k0 = warp * 32; k0 < g.k; k0 += SKINNY_WARPS * 32 * SKINNY_UNROLL) {
            uint4 b[SKINNY_UNROLL][NT];
            if (!is_first || k0 != warp * 32) load_w(k0);
#pragma unroll
            for (int u = 0; u < SKINNY_UNROLL; u++) {
                uint32_t k = k0 + u * SKINNY_WARPS * 32 + t * 8;
#pragma unroll
                for (int n = 0; n < NT; n++)
                    b[u][n] = k < g.k ? *(const uint4 *)(x[n] + k) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int u = 0; u < SKINNY_UNROLL; u++)
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        mma_bf16(d[m][n], a[u][m][0].x, a[u][m][1].x, a[u][m][0].y, a[u][m][1].y, b[u][n].x, b[u][n].y);
                        mma_bf16(d[m][n], a[u][m][0].z, a[u][m][1].z, a[u][m][0].w, a[u][m][1].w, b[u][n].z, b[u][n].w);
                    }
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[warp][m * 16 + gr + i / 2 * 8][n * 8 + t * 2 + i % 2] = d[m][n][i];
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < MT * 8 * NT * 8; i += SKINNY_WARPS * 32) {
            uint32_t pair = i % (MT * 8), n = i / (MT * 8), at = pair / 8 * 16 + pair % 8;
            float lo = 0, hi = 0;
#pragma unroll
            for (int j = 0; j < SKINNY_WARPS; j++) {
                lo += sums[j][at][n];
                hi += sums[j][at + 8][n];
            }
            if (row0 + n < row_end) store(row0 + n, col_of<Epilogue::pairs>(pair0 + pair, 0), lo, hi, expert);
        }
        __syncthreads();
    }
}

template <int MT, int NT, class Epilogue>
static enum td_status skinny_start(const struct td_cuda_stream *s, const skinny_shape &g, uint32_t n_groups,
                                   const Epilogue &store, const char *what)
{
    dim3 grid(td_ceil_div(g.n_cols, MT * 16), n_groups);
    return td_cuda_status(launch(skinny<MT, NT, Epilogue>, grid, SKINNY_WARPS * 32, 0, s->s, g, store), what);
}

template <class Epilogue>
static enum td_status skinny_run(const struct td_cuda_stream *s, const skinny_shape &g, uint32_t n_groups,
                                 const Epilogue &store, const char *what)
{
    if (g.k % 8 != 0 || g.n_cols % 2 != 0) return TD_E_UNSUPPORTED;
    return skinny_start<1, 1>(s, g, n_groups, store, what);
}

#endif
