/* x += sum over slots, in slot order, of weight * (y + bias of the slot's expert); then t = rmsnorm(x). A block a row. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/norm.cuh"

static __global__ void __launch_bounds__(NORM_THREADS)
    moe_add_norm(float *x, const float *y, const uint32_t *ids, const float *weights, const float *down_bias,
                 const float *w, td_bf16 *t, uint32_t dim, uint32_t top_k, float eps)
{
    let_next();
    before();
    float2 *row = (float2 *)(x + (size_t)blockIdx.x * dim);
    float2 v[NORM_PAIRS];
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) v[p] = make_float2(0, 0);
#pragma unroll 4
    for (uint32_t k = 0; k < top_k; k++) {
        size_t slot = (size_t)blockIdx.x * top_k + k;
        const float2 *add = (const float2 *)(y + slot * dim);
        const float2 *bias = (const float2 *)(down_bias + (size_t)ids[slot] * dim);
        float weight = weights[slot];
#pragma unroll
        for (int p = 0; p < NORM_PAIRS; p++) {
            uint32_t i = p * NORM_THREADS + threadIdx.x;
            if (2 * i >= dim) continue;
            float2 d = add[i], b = bias[i];
            v[p].x += weight * (d.x + b.x);
            v[p].y += weight * (d.y + b.y);
        }
    }
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) {
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        if (2 * i >= dim) continue;
        float2 r = row[i];
        v[p].x += r.x;
        v[p].y += r.y;
        row[i] = v[p];
    }
    norm_row(v, w, t + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_moe_add_norm(struct td_stream *s, const struct td_moe_add_norm_args *a)
{
    if (a->dim % 2 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(moe_add_norm, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->y, a->ids,
                                 a->weights, a->down_bias, a->w, (td_bf16 *)a->t, a->dim, a->top_k, a->eps),
                          "moe_add_norm");
}
