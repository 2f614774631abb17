/* A batch as arrays of rows. */
#ifndef TD_ENGINE_PLAN_INT_H
#define TD_ENGINE_PLAN_INT_H

#include "common/engine/forward.h"

/* Fills the PLAN buffers and the counts of the batch. The batch has passed td_forward_check. before: the pass whose
 * draws feed it. */
void td_plan_make(struct td_forward *f, const struct td_batch *b, const struct td_pass *before);
/* Copies the PLAN buffers and the counts that `from` made (f itself, or the leader of its group) to f's device. */
enum td_status td_plan_take(struct td_forward *f, const struct td_forward *from);

#endif
