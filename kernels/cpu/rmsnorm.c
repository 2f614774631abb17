/* y = x / sqrt(mean(x^2) + eps) * w, the mean in double. */
#include "kernels/cpu/cpu_int.h"

struct job {
    const struct td_micro *micro;
    const struct td_rmsnorm_args *a;
};

static void rows(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct job *j = ctx;
    const struct td_rmsnorm_args *a = j->a;
    uint32_t end = td_min_u32((index + 1) * TD_ROW_BLOCK, a->n_rows);
    for (uint32_t t = index * TD_ROW_BLOCK; t < end; t++)
        j->micro->norm(a->y + (size_t)t * a->dim, a->x + (size_t)t * a->dim, a->w, a->dim, a->eps);
}

enum td_status td_cpu_rmsnorm(struct td_stream *s, const struct td_rmsnorm_args *a)
{
    struct job j = {.micro = td_cpu_stream(s)->micro, .a = a};
    td_pool_run(td_cpu_stream(s)->pool, rows, &j, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    return TD_OK;
}
