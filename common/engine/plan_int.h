/* A batch as arrays of rows. */
#ifndef TD_ENGINE_PLAN_INT_H
#define TD_ENGINE_PLAN_INT_H

#include "common/engine/forward.h"

/* Fills the PLAN buffers and n_rows, n_tail, and copies them to the device. The batch has passed td_forward_check. */
enum td_status td_plan_make(struct td_forward *f, const struct td_batch *b);

#endif
