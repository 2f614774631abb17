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
    float *row = x + (size_t)blockIdx.x * dim;
    float4 v[NORM_QUADS], was[NORM_QUADS];
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) {
        v[q] = make_float4(0, 0, 0, 0);
        was[q] = quad_or_0(row, q * NORM_THREADS + threadIdx.x, dim);
    }
    for (uint32_t k0 = 0; k0 < top_k; k0 += AT_ONCE) {
        float4 d[AT_ONCE][NORM_QUADS], b[AT_ONCE][NORM_QUADS];
        const float *bias[AT_ONCE];
        float weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) { /* biases wait for the ids; the rest does not */
            bias[k] = down_bias + (size_t)ids[first + k0 + k] * dim;
            weight[k] = weights[first + k0 + k];
#pragma unroll
            for (int q = 0; q < NORM_QUADS; q++)
                d[k][q] = quad_or_0(y + (first + k0 + k) * dim, q * NORM_THREADS + threadIdx.x, dim);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int q = 0; q < NORM_QUADS; q++) b[k][q] = quad_or_0(bias[k], q * NORM_THREADS + threadIdx.x, dim);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int q = 0; q < NORM_QUADS; q++) {
                v[q].x += weight[k] * (d[k][q].x + b[k][q].x);
                v[q].y += weight[k] * (d[k][q].y + b[k][q].y);
                v[q].z += weight[k] * (d[k][q].z + b[k][q].z);
                v[q].w += weight[k] * (d[k][q].w + b[k][q].w);
                if (TRAP(BIAS_NOT_WEIGHTED)) {
                    v[q].x += (1 - weight[k]) * b[k][q].x;
                    v[q].y += (1 - weight[k]) * b[k][q].y;
                    v[q].z += (1 - weight[k]) * b[k][q].z;
                    v[q].w += (1 - weight[k]) * b[k][q].w;
                }
            }
    }
#pragma unroll
    for (int q = 0; q < NORM_QUADS; q++) {
        const uint32_t i = q * NORM_THREADS + threadIdx.x;
        v[q] = make_float4(v[q].x + was[q].x, v[q].y + was[q].y, v[q].z + was[q].z, v[q].w + was[q].w);
        if (4 * i < dim) ((float4 *)row)[i] = v[q];
    }
    norm_row(v, w, t + (size_t)blockIdx.x * dim, dim, eps);
}

enum td_status td_cuda_moe_add_norm(struct td_stream *s, const struct td_moe_add_norm_args *a)
{
    if (a->dim % 4 != 0 || a->dim > NORM_MAX_DIM) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    auto kernel = a->top_k == 4 ? moe_add_norm<4> : moe_add_norm<0>;
    return td_cuda_status(launch(kernel, a->n_rows, NORM_THREADS, 0, td_cuda_stream_of(s)->s, a->x, a->y, a->ids,
                                 a->weights, a->down_bias, a->w, (td_bf16 *)a->t, a->dim, a->top_k, a->eps),
                          "moe_add_norm");
}
