/* x = table[token], widened. */
#include "kernels/cuda/cuda_int.h"

static __global__ void embed(const uint32_t *tokens, const uint32_t *fed, const td_sampled *drawn,
                             const td_bf16 *table, float *x, uint32_t dim)
{
    let_next();
    before();
    uint32_t id = tokens[blockIdx.x];
    if (fed != NULL && fed[blockIdx.x] != TD_NOT_FED) id = drawn[fed[blockIdx.x]].token;
    if (id == 0xffffffffu) id = 0;
    const __nv_bfloat162 *from = (const __nv_bfloat162 *)(table + (size_t)id * dim);
    float2 *to = (float2 *)(x + (size_t)blockIdx.x * dim);
    for (uint32_t i = threadIdx.x; i < dim / 2; i += blockDim.x) to[i] = __bfloat1622float2(from[i]);
}

enum td_status td_cuda_embed(struct td_stream *s, const struct td_embed_args *a)
{
    if (a->dim % 2 != 0) return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    return td_cuda_status(launch(embed, a->n_rows, 256, 0, td_cuda_stream_of(s)->s, a->tokens, a->fed,
                                 a->drawn, (const td_bf16 *)a->table, a->x, a->dim),
                          "embed");
}
