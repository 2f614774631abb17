/* x = table[token], widened. No scaling factor. */
#include "kernels/cpu/cpu_int.h"

enum td_status td_cpu_embed(struct td_stream *s, const struct td_embed_args *a)
{
    (void)s;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        uint32_t id = a->tokens[t];
        if (a->fed != NULL && a->fed[t] != TD_NOT_FED) id = a->drawn[a->fed[t]].token;
        if (id == UINT32_MAX) id = 0;
        const uint16_t *from = a->table + (size_t)id * a->dim;
        float *x = a->x + (size_t)t * a->dim;
        for (uint32_t i = 0; i < a->dim; i++) x[i] = td_bf16_to_f32(from[i]);
    }
    return TD_OK;
}
