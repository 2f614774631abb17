/* cos and sin of position * frequency. The angle is an f32 product, as on the CPU; cos and sin of it in double, with full
 * range reduction: the work is nothing beside a pass. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/traps.cuh"

static __global__ void rope(const uint32_t *positions, const float *freqs, float factor, float *cos_out, float *sin_out,
                            uint32_t n_rows, uint32_t half)
{
    let_next();
    before();
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_rows * half) return;
    float angle = (float)positions[i / half] * freqs[i % half];
    if (TRAP(ROPE_PLAIN)) angle = (float)positions[i / half] * powf(150000, -(float)(i % half) / (float)half);
    if (TRAP(ROPE_TRUNCATED)) { /* 8 .. 18 instead of 8.09 .. 17.40 */
        float e = powf(150000, -(float)(i % half) / (float)half), r = fminf(fmaxf(((float)(i % half) - 8) / 10, 0), 1);
        angle = (float)positions[i / half] * (e / 32 * r + e * (1 - r));
    }
    if (TRAP(ROPE_NO_FACTOR)) factor = 1;
    double c, s;
    sincos((double)angle, &s, &c);
    if (TRAP(ROPE_FAST_SINE)) c = __cosf(angle), s = __sinf(angle);
    cos_out[i] = (float)(c * (double)factor);
    sin_out[i] = (float)(s * (double)factor);
}

enum td_status td_cuda_rope(struct td_stream *s, const struct td_rope_args *a)
{
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(rope, td_ceil_div(a->n_rows * a->half, 128), 128, 0, td_cuda_stream_of(s)->s,
                                 a->positions, a->freqs, a->factor, a->cos, a->sin, a->n_rows, a->half),
                          "rope");
}
