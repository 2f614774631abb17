/* Logits: one chain over the residual width a vocabulary row, no bias. */
#include "kernels/cpu/cpu_int.h"

enum td_status td_cpu_lm_head(struct td_stream *s, const struct td_lm_head_args *a)
{
    td_cpu_matmul(td_cpu_stream(s), a->x, &a->w, NULL, a->logits, a->n_rows);
    return TD_OK;
}
