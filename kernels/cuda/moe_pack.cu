/* An expert's matrix as stored becomes FP8 or MXFP4 tiles on the device (expert_format.h). The stored matrix
 * lies in the stream's staging memory meanwhile. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"
#include "kernels/expert_format.h"

#define PACK_THREADS 256

/* A block a tile. */
static __global__ void __launch_bounds__(PACK_THREADS)
    pack_tile(const struct td_pack_weight_args a, const struct td_expert_layout l, uint8_t *out,
              struct td_cuda_found *found)
{
    __shared__ uint32_t top;
    const uint32_t k = blockIdx.x, t = blockIdx.y, rows = td_expert_tile_rows(&l, t);
    if (threadIdx.x == 0) top = 0;
    __syncthreads();
    /* Half a row a thread. */
    const uint32_t r = threadIdx.x / 2, first = threadIdx.x % 2 * 64, p = t * TD_XT + r,
                   from = TRAP(FP8_HALVES) && a.order == TD_ROWS_GATE_UP ? p / 16 * 8 + p % 8 + p % 16 / 8 * (a.n_out / 2)
                                                                         : td_expert_row(a.order, p);
    uint32_t rank = 0;
    bool is_bad = false;
    for (uint32_t c = first; c < first + 64; c++) {
        struct td_expert_element x = td_expert_element(&a, from, k * TD_XT + c);
        rank = max(rank, x.rank);
        is_bad |= x.is_bad;
    }
    atomicMax(&top, rank);
    if (is_bad) found->is_bad = 1;
    __syncthreads();
    const int s = td_expert_scale(a.source, top);
    uint8_t *tile = out + td_expert_tile_at(&l, t, k);
    if (threadIdx.x == 0) ((float *)(out + l.scales_at))[t * l.k_tiles + k] = ldexpf(1, s);

    unsigned long long n_inexact = 0;
    if (r < rows) {
        for (uint32_t c = first; c < first + 64; c += 16) {
            uint32_t words[4] = {};
#pragma unroll
            for (uint32_t i = 0; i < 16; i++) {
                bool is_exact;
                struct td_expert_element x = td_expert_element(&a, from, k * TD_XT + c + (i ^ TRAP(FP8_NIBBLES_SWAPPED)));
                words[i / 4] |= (uint32_t)td_expert_code(&x, s, &is_exact) << i % 4 * 8;
                n_inexact += !is_exact;
            }
            if (l.form == TD_EXPERTS_FP8)
                *(uint4 *)(tile + td_expert_fp8_at(r, c)) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    if (n_inexact != 0) atomicAdd(&found->n_inexact, n_inexact);
    if (l.form == TD_EXPERTS_FP8) return;

    for (uint32_t i = threadIdx.x; i < rows / 16 * 64; i += PACK_THREADS) {
        const uint32_t group = i / 64, plane = i % 64 / 32, lane = i % 32;
        uint32_t w[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            w[j] = td_expert_word(&a, t * TD_XT + group * 16, k * TD_XT, plane, lane, j);
        *(uint4 *)(tile + group * TD_XT_MXFP4 + (plane * 32 + lane) * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    for (uint32_t i = threadIdx.x; i < rows * 4; i += PACK_THREADS) {
        const uint32_t row = i / 4, group = i % 4;
        int e = td_expert_element(&a, td_expert_row(a.order, t * TD_XT + row), k * TD_XT + TD_X_GROUP * group).e;
        tile[row / 16 * TD_XT_MXFP4 + 1024 + row % 16 * 4 + group] = (uint8_t)td_expert_table(e, s);
    }
}

/* What is needed of the stored matrix, on the device: `to` becomes the same window of that. */
static cudaError_t stage(const struct td_pack_weight_args *a, uint8_t *staging, cudaStream_t s, struct td_pack_weight_args *to)
{
    *to = *a;
    to->row_begin = 0;
    to->data = staging;
    if (a->source == TD_SRC_MXFP4) {
        size_t groups = a->ld / TD_X_GROUP, n = (size_t)a->n_out * groups, first = (size_t)a->row_begin * groups;
        to->scales = staging + n * 16;
        cudaError_t e = cudaMemcpyAsync(staging, (const uint8_t *)a->data + first * 16, n * 16, cudaMemcpyHostToDevice, s);
        if (e == cudaSuccess)
            e = cudaMemcpyAsync(staging + n * 16, a->scales + first, n, cudaMemcpyHostToDevice, s);
        return e;
    }
    const bool is_cols = a->source == TD_SRC_BF16_COLS;
    const size_t outer = is_cols ? a->n_in : a->n_out, inner = is_cols ? a->n_out : a->n_in;
    const size_t begin = is_cols ? (size_t)a->col_begin * a->ld + a->row_begin : (size_t)a->row_begin * a->ld + a->col_begin;
    to->col_begin = 0;
    to->ld = (uint32_t)inner;
    return cudaMemcpy2DAsync(staging, inner * 2, (const uint16_t *)a->data + begin, (size_t)a->ld * 2, inner * 2, outer,
                             cudaMemcpyHostToDevice, s);
}

/* In the packed rows' order, padding 0. */
static __global__ void order_bias(const float *from, enum td_row_order order, uint32_t n_out, uint32_t n_rows, float *to)
{
    uint32_t p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= n_rows) return;
    uint32_t r = td_expert_row(order, p);
    to[p] = r < n_out ? from[r] : 0;
}

enum td_status td_cuda_pack_expert(struct td_stream *base, enum td_expert_form form, const struct td_pack_weight_args *a)
{
    if (!td_expert_can_pack(form, a)) return TD_E_UNSUPPORTED;
    const struct td_expert_layout l = td_expert_layout(form, a->n_out, a->n_in);
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    size_t bytes = a->source == TD_SRC_MXFP4 ? (size_t)a->n_out * (a->ld / TD_X_GROUP) * 17 : (size_t)a->n_out * a->n_in * 2;
    bytes = TD_X_ROUND(bytes, (size_t)256);
    struct td_pack_weight_args here;
    cudaError_t e = td_cuda_pack_begin(s, bytes + a->n_out * sizeof *a->bias);
    if (e == cudaSuccess) e = stage(a, s->staging, s->s, &here);
    if (e == cudaSuccess) {
        pack_tile<<<dim3(l.k_tiles, l.row_tiles), PACK_THREADS, 0, s->s>>>(here, l, (uint8_t *)a->out, s->found);
        e = cudaPeekAtLastError();
    }
    if (e == cudaSuccess && a->bias != NULL) {
        float *bias = (float *)(s->staging + bytes);
        e = cudaMemcpyAsync(bias, a->bias, a->n_out * sizeof *bias, cudaMemcpyHostToDevice, s->s);
        if (e == cudaSuccess) {
            order_bias<<<td_ceil_div(l.n_rows, 256), 256, 0, s->s>>>(bias, a->order, a->n_out, l.n_rows, a->bias_out);
            e = cudaPeekAtLastError();
        }
    }
    return td_cuda_pack_end(s, e, a);
}
