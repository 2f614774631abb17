/* What replies look like on the terminal and as JSON. */
#ifndef TD_CTL_REPORT_H
#define TD_CTL_REPORT_H

#include "common/base/bytes.h"
#include "proto/inference.pb-c.h"

const char *td_report_finish(Tandem__V1__FinishReason reason); /* "stop", "length", "none" */
/* As JSON values; NULL messages give null. */
void td_report_usage(const Tandem__V1__Usage *u, struct td_buf *out);
void td_report_timing(const Tandem__V1__Timing *t, struct td_buf *out);
void td_report_logprobs(const Tandem__V1__PositionLogprobs *p, struct td_buf *out);
void td_report_ids(const uint32_t *ids, size_t n, struct td_buf *out);
/* One line for people: time to first token, tokens a second, KV moved and how. */
void td_report_summary(const Tandem__V1__Usage *u, const Tandem__V1__Timing *t, uint32_t reasoning_tokens,
                       Tandem__V1__FinishReason reason, struct td_buf *out);

#endif
