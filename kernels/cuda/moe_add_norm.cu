/* x += sum over slots, in slot order, of weight * (y + bias of the slot's expert); then t = rmsnorm(x). A block a row. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/traps.cuh"

/* K: slots of a row, so that all their loads are under way at once; 0: top_k. */
template <int K>
static __global__ void __launch_bounds__(NORM_THREADS)
    moe_add_norm(float *x, const float *y, const uint32_t *ids, const float *weights, const float *down_bias,
                 const float *w, td_bf16 *t, uint32_t dim, uint32_t top_k, float eps)
{
    let_next();
    before();
    constexpr int AT_ONCE = K == 0 ? 1 : K;
    const size_t first = (size_t)blockIdx.x * top_k;
    float2 *row = (float2 *)(x + (size_t)blockIdx.x * dim);
    float2 v[NORM_PAIRS], was[NORM_PAIRS];
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) {
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        v[p] = make_float2(0, 0);
        was[p] = 2 * i < dim ? row[i] : make_float2(0, 0);
    }
    for (uint32_t k0 = 0; k0 < top_k; k0 += AT_ONCE) {
        float2 d[AT_ONCE][NORM_PAIRS], b[AT_ONCE][NORM_PAIRS];
        float weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const float2 *add = (const float2 *)(y + (first + k0 + k) * dim);
            const float2 *bias = (const float2 *)(down_bias + (size_t)ids[first + k0 + k] * dim);
            weight[k] = weights[first + k0 + k];
#pragma unroll
            for (int p = 0; p < NORM_PAIRS; p++) {
                uint32_t i = p * NORM_THREADS + threadIdx.x;
                d[k][p] = 2 * i < dim ? add[i] : make_float2(0, 0);
                b[k][p] = 2 * i < dim ? bias[i] : make_float2(0, 0);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int p = 0; p < NORM_PAIRS; p++) {
                v[p].x += weight[k] * (d[k][p].x + b[k][p].x);
                v[p].y += weight[k] * (d[k][p].y + b[k][p].y);
                if (TRAP(BIAS_NOT_WEIGHTED)) {
                    v[p].x += (1 - weight[k]) * b[k][p].x;
                    v[p].y += (1 - weight[k]) * b[k][p].y;
                }
            }
    }
#pragma unroll
    for (int p = 0; p < NORM_PAIRS; p++) {
        uint32_t i = p * NORM_THREADS + threadIdx.x;
        if (2 * i >= dim) continue;
        v[p].x += was[p].x;
        v[p].y += was[p].y;
        row[i] = v[p];
    }
    norm_row(v, w, t + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_moe_add_norm(struct td_stream *s, const struct td_moe_add_norm_args *a)
{
    if (a->dim % 2 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    auto kernel = a->top_k == 4 ? moe_add_norm<4> : moe_add_norm<0>;
    return td_cuda_status(launch(kernel, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->y, a->ids,
                                 a->weights, a->down_bias, a->w, (td_bf16 *)a->t, a->dim, a->top_k, a->eps),
                          "moe_add_norm");
}
