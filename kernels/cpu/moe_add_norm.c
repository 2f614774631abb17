/* x += sum over slots in slot order of weight * (y + bias of the slot's expert), then t = rmsnorm(x). The slots' sum is
 * formed first, from zero, and added to x last. */
#include <string.h>

#include "kernels/cpu/cpu_int.h"

struct job {
    const struct td_micro *micro;
    const struct td_moe_add_norm_args *a;
};

static void rows(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct job *j = ctx;
    const struct td_moe_add_norm_args *a = j->a;
    uint32_t end = td_min_u32((index + 1) * TD_ROW_BLOCK, a->n_rows);
    for (uint32_t r = index * TD_ROW_BLOCK; r < end; r++) {
        float *x = a->x + (size_t)r * a->dim, *t = a->t + (size_t)r * a->dim;
        memset(t, 0, a->dim * sizeof *t);
        for (uint32_t k = 0; k < a->top_k; k++) {
            size_t slot = (size_t)r * a->top_k + k;
            j->micro->add_weighted(t, a->y + slot * a->dim, a->down_bias + (size_t)a->ids[slot] * a->dim,
                                   a->weights[slot], a->dim);
        }
        for (uint32_t i = 0; i < a->dim; i++) x[i] += t[i];
        j->micro->norm(t, x, a->w, a->dim, a->eps);
    }
}

enum td_status td_cpu_moe_add_norm(struct td_stream *s, const struct td_moe_add_norm_args *a)
{
    struct job j = {.micro = td_cpu_stream(s)->micro, .a = a};
    td_pool_run(td_cpu_stream(s)->pool, rows, &j, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    return TD_OK;
}
