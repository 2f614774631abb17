/* Shared by the files of this folder. */
#ifndef TD_METRICS_METRICS_INT_H
#define TD_METRICS_METRICS_INT_H

#include "common/base/bytes.h"

void td_metrics_put_number(struct td_buf *out, double v);
void td_metrics_put_process(struct td_buf *out); /* process_* under their customary names */

#endif
