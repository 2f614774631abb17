/* y = x / sqrt(mean(x^2) + eps) * w, the mean in double. */
#include <math.h>

#include "kernels/cpu/cpu_int.h"

/* Eight sums side by side keep the adders busy; their order is fixed, so a row's bits depend on the row alone. */
void td_cpu_norm_row(const float *x, const float *w, float *y, uint32_t dim, float eps)
{
    double sum[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= dim; i += 8)
        for (uint32_t j = 0; j < 8; j++) sum[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < dim; i++) sum[0] += (double)x[i] * (double)x[i];
    double all = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    float inv = (float)(1.0 / sqrt(all / dim + (double)eps));
    for (i = 0; i < dim; i++) y[i] = x[i] * inv * w[i];
}

static void rows(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct td_rmsnorm_args *a = ctx;
    uint32_t end = td_min_u32((index + 1) * TD_ROW_BLOCK, a->n_rows);
    for (uint32_t t = index * TD_ROW_BLOCK; t < end; t++)
        td_cpu_norm_row(a->x + (size_t)t * a->dim, a->w, a->y + (size_t)t * a->dim, a->dim, a->eps);
}

enum td_status td_cpu_rmsnorm(struct td_stream *s, const struct td_rmsnorm_args *a)
{
    td_pool_run(td_cpu_stream(s)->pool, rows, (void *)(uintptr_t)a, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    return TD_OK;
}
