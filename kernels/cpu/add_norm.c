/* x += y + bias, then t = rmsnorm(x). */
#include "kernels/cpu/cpu_int.h"

static void rows(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct td_add_norm_args *a = ctx;
    uint32_t end = td_min_u32((index + 1) * TD_ROW_BLOCK, a->n_rows);
    for (uint32_t r = index * TD_ROW_BLOCK; r < end; r++) {
        float *x = a->x + (size_t)r * a->dim;
        const float *y = a->y + (size_t)r * a->dim;
        for (uint32_t i = 0; i < a->dim; i++) x[i] += y[i] + a->bias[i];
        td_cpu_norm_row(x, a->w, a->t + (size_t)r * a->dim, a->dim, a->eps);
    }
}

enum td_status td_cpu_add_norm(struct td_stream *s, const struct td_add_norm_args *a)
{
    td_pool_run(td_cpu_stream(s)->pool, rows, (void *)(uintptr_t)a, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    return TD_OK;
}
