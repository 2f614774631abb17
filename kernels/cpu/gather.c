/* y[i] = x[rows[i]]. */
#include <string.h>

#include "kernels/cpu/cpu_int.h"

enum td_status td_cpu_gather(struct td_stream *s, const struct td_gather_args *a)
{
    (void)s;
    for (uint32_t i = 0; i < a->n_rows; i++)
        memcpy(a->y + (size_t)i * a->dim, a->x + (size_t)a->rows[i] * a->dim, a->dim * sizeof *a->y);
    return TD_OK;
}
