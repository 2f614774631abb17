/* A matrix as stored becomes row-major bf16 [n_out, n_in] on the device, or FP8 rows; MXFP4 is widened there, exactly. The
 * stored matrix lies in the stream's staging memory meanwhile, which grows to the largest. */
#include <cfloat>

#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"
#include "kernels/dense_format.h"

static __global__ void transpose(const td_bf16 *from, td_bf16 *to, uint32_t n_out, uint32_t n_in)
{
    __shared__ td_bf16 tile[32][33];
    uint32_t row = blockIdx.y * 32, col = blockIdx.x * 32; /* of `from`, [n_in][n_out] */
    for (uint32_t i = threadIdx.y; i < 32; i += blockDim.y)
        if (row + i < n_in && col + threadIdx.x < n_out)
            tile[i][threadIdx.x] = from[(size_t)(row + i) * n_out + col + threadIdx.x];
    __syncthreads();
    for (uint32_t i = threadIdx.y; i < 32; i += blockDim.y)
        if (col + i < n_out && row + threadIdx.x < n_in)
            to[(size_t)(col + i) * n_in + row + threadIdx.x] = tile[threadIdx.x][i];
}

/* A thread widens one byte, elements 2i and 2i + 1 of a row. groups: of a stored row. */
static __global__ void widen(const uint8_t *blocks, const uint8_t *scales, uint32_t groups, uint32_t col_begin,
                             uint32_t n_out, uint32_t n_in, td_bf16 *to, struct td_cuda_found *found)
{
    const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)n_out * n_in) return;
    size_t row = i / n_in, col = col_begin + i % n_in, group = row * groups + col / 32;
    uint8_t byte = blocks[group * 16 + col % 32 / 2], code = col % 2 == TRAP(NIBBLES_SWAPPED) ? byte & 15 : byte >> 4,
            scale = scales[TRAP(GROUPS_OF_OUTPUTS) ? row / 32 * groups + row % groups : group];
    float v = ldexpf(magnitude[code & 7], (int)scale - 127);
    if (scale == 255 || isinf(v)) found->is_bad = 1;
    to[i] = __float2bfloat16_rn(code & 8 ? -v : v);
}

/* A row a block: the largest magnitude, then codes of the rest over it. */
static __global__ void __launch_bounds__(256) quantise(const td_bf16 *from, uint8_t *to, uint32_t n_in)
{
    __shared__ uint32_t most; /* the bits of a magnitude order as it does */
    const td_bf16 *row = from + (size_t)blockIdx.x * n_in;
    uint8_t *out = to + (size_t)blockIdx.x * td_dense_fp8_row_bytes(n_in);
    const uint32_t scale_at = td_dense_fp8_scale_at(n_in);
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    float mine = 0;
    for (uint32_t i = threadIdx.x; i < n_in; i += 256) mine = fmaxf(mine, fabsf(__bfloat162float(row[i])));
    atomicMax(&most, __float_as_uint(mine));
    __syncthreads();
    const float scale = __uint_as_float(most) / TD_DENSE_FP8_MOST;
    const bool is_usable = scale > 0 && scale <= FLT_MAX;
    for (uint32_t i = threadIdx.x; i < scale_at; i += 256)
        out[i] = i < n_in && is_usable ? td_e4m3_encode(__bfloat162float(row[i]) / scale) : 0;
    if (threadIdx.x < TD_DENSE_FP8_PAD / 4) ((float *)(out + scale_at))[threadIdx.x] = threadIdx.x == 0 ? scale : 0;
}

static cudaError_t copy_dense(const struct td_pack_weight_args *a, void *staging, cudaStream_t s)
{
    const uint16_t *from = (const uint16_t *)a->data + (size_t)a->row_begin * a->ld + a->col_begin;
    cudaError_t e = cudaMemcpy2DAsync(staging, (size_t)a->n_in * 2, from, (size_t)a->ld * 2, (size_t)a->n_in * 2, a->n_out,
                                      cudaMemcpyHostToDevice, s);
    if (e != cudaSuccess) return e;
    quantise<<<a->n_out, 256, 0, s>>>((const td_bf16 *)staging, (uint8_t *)a->out, a->n_in);
    return cudaPeekAtLastError();
}

static cudaError_t copy_rows(const struct td_pack_weight_args *a, cudaStream_t s)
{
    const uint16_t *from = (const uint16_t *)a->data + (size_t)a->row_begin * a->ld + a->col_begin;
    return cudaMemcpy2DAsync(a->out, (size_t)a->n_in * 2, from, (size_t)a->ld * 2, (size_t)a->n_in * 2, a->n_out,
                             cudaMemcpyHostToDevice, s);
}

static cudaError_t copy_cols(const struct td_pack_weight_args *a, void *staging, cudaStream_t s)
{
    const uint16_t *from = (const uint16_t *)a->data + (size_t)a->col_begin * a->ld + a->row_begin;
    cudaError_t e = cudaMemcpy2DAsync(staging, (size_t)a->n_out * 2, from, (size_t)a->ld * 2, (size_t)a->n_out * 2,
                                      a->n_in, cudaMemcpyHostToDevice, s);
    if (e != cudaSuccess) return e;
    dim3 grid(td_ceil_div(a->n_out, 32), td_ceil_div(a->n_in, 32));
    transpose<<<grid, dim3(32, 8), 0, s>>>((const td_bf16 *)staging, (td_bf16 *)a->out, a->n_out, a->n_in);
    return cudaPeekAtLastError();
}

static cudaError_t copy_mxfp4(const struct td_pack_weight_args *a, struct td_cuda_stream *c)
{
    cudaStream_t s = c->s;
    uint32_t groups = a->ld / 32;
    size_t n = (size_t)a->n_out * groups, first = (size_t)a->row_begin * groups;
    uint8_t *scales = c->staging + n * 16;
    cudaError_t e = cudaMemcpyAsync(c->staging, (const uint8_t *)a->data + first * 16, n * 16, cudaMemcpyHostToDevice, s);
    if (e == cudaSuccess) e = cudaMemcpyAsync(scales, a->scales + first, n, cudaMemcpyHostToDevice, s);
    if (e != cudaSuccess) return e;
    size_t n_elements = (size_t)a->n_out * a->n_in;
    widen<<<(uint32_t)((n_elements + 255) / 256), 256, 0, s>>>(c->staging, scales, groups, a->col_begin, a->n_out, a->n_in,
                                                              (td_bf16 *)a->out, c->found);
    return cudaPeekAtLastError();
}

cudaError_t td_cuda_pack_begin(struct td_cuda_stream *s, size_t staging_bytes)
{
    cudaError_t e = cudaSetDevice(td_cuda_device_of(s->base.device)->index);
    if (e == cudaSuccess && s->found == NULL) {
        e = cudaMalloc((void **)&s->found, sizeof *s->found);
        if (e == cudaSuccess) e = cudaMemsetAsync(s->found, 0, sizeof *s->found, s->s);
    }
    if (e != cudaSuccess || staging_bytes <= s->staging_bytes) return e;
    e = cudaStreamSynchronize(s->s);
    if (e == cudaSuccess) e = cudaFree(s->staging);
    s->staging = NULL;
    s->staging_bytes = 0;
    if (e == cudaSuccess) e = cudaMalloc((void **)&s->staging, staging_bytes);
    if (e == cudaSuccess) s->staging_bytes = staging_bytes;
    return e;
}

enum td_status td_cuda_packed(struct td_stream *base, uint64_t *n_inexact_out)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    struct td_cuda_found found = {};
    cudaError_t e = cudaSetDevice(td_cuda_device_of(base->device)->index);
    if (e == cudaSuccess && s->found != NULL) {
        e = cudaMemcpyAsync(&found, s->found, sizeof found, cudaMemcpyDeviceToHost, s->s);
        if (e == cudaSuccess) e = cudaMemsetAsync(s->found, 0, sizeof found, s->s);
    }
    cudaError_t synced = cudaStreamSynchronize(s->s);
    if (e == cudaSuccess) e = synced;
    *n_inexact_out = found.n_inexact;
    if (e != cudaSuccess) return td_cuda_status(e, "pack_weight");
    return found.is_bad ? TD_E_INVALID : TD_OK;
}

enum td_status td_cuda_pack_end(struct td_cuda_stream *s, cudaError_t e, const struct td_pack_weight_args *a)
{
    uint64_t n_inexact = 0;
    if (e == cudaSuccess && a->may_defer) return TD_OK;
    enum td_status st = td_cuda_packed(&s->base, &n_inexact);
    if (e != cudaSuccess) return td_cuda_status(e, "pack_weight");
    if (a->n_inexact != NULL) *a->n_inexact += n_inexact;
    return st;
}

enum td_status td_cuda_pack_weight(struct td_stream *base, const struct td_pack_weight_args *a)
{
    enum td_expert_form form = td_cuda_device_of(base->device)->experts;
    if (form != TD_EXPERTS_BF16 && td_is_expert_order(a->order)) return td_cuda_pack_expert(base, form, a);
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    size_t staging_bytes = 0;
    const bool is_fp8 = a->order == TD_ROWS_DENSE && td_cuda_device_of(base->device)->is_dense_fp8;
    if (is_fp8 && a->source != TD_SRC_BF16_ROWS) return TD_E_UNSUPPORTED;
    if (a->source == TD_SRC_BF16_COLS || is_fp8) staging_bytes = (size_t)a->n_out * a->n_in * 2;
    if (a->source == TD_SRC_MXFP4) staging_bytes = (size_t)a->n_out * (a->ld / 32) * 17;
    cudaError_t e = td_cuda_pack_begin(s, staging_bytes);
    if (e == cudaSuccess) {
        switch (a->source) {
        case TD_SRC_BF16_ROWS: e = is_fp8 ? copy_dense(a, s->staging, s->s) : copy_rows(a, s->s); break;
        case TD_SRC_BF16_COLS: e = copy_cols(a, s->staging, s->s); break;
        case TD_SRC_MXFP4: e = copy_mxfp4(a, s); break;
        }
    }
    if (e == cudaSuccess && a->bias != NULL)
        e = cudaMemcpyAsync(a->bias_out, a->bias, a->n_out * sizeof *a->bias, cudaMemcpyHostToDevice, s->s);
    return td_cuda_pack_end(s, e, a);
}
