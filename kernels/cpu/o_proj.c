/* This rank's heads back to the residual width: one piece a KV head, added as a tree. */
#include "kernels/cpu/cpu_int.h"

enum td_status td_cpu_o_proj(struct td_stream *s, const struct td_o_proj_args *a)
{
    td_cpu_matmul(td_cpu_stream(s), a->x, &a->w, &a->pieces, a->y, a->n_rows);
    return TD_OK;
}
