/* What it costs to compute a prompt, in microseconds of waiting, at a prefill worker and at the decode worker itself:
 * by what workers measure and report. The model is told in cost.c. Pure. */
#ifndef TD_ROUTER_COST_H
#define TD_ROUTER_COST_H

#include "router/fleet.h"

struct td_cost_query {
    uint32_t n_remote, n_local; /* tokens to compute at the prefill worker, at the decode worker */
    uint32_t n_behind;          /* requests that wait for their turn in the router */
};

/* TD_COST_UNKNOWN: nothing was measured yet. */
#define TD_COST_UNKNOWN UINT64_MAX
uint64_t td_cost_remote_us(const struct td_fleet *f, const struct td_worker *prefill, const struct td_cost_query *q);
/* prefill: whose pace is taken if decode has computed no prompt yet; may be NULL. */
uint64_t td_cost_local_us(const struct td_worker *decode, const struct td_worker *prefill,
                          const struct td_cost_query *q);

#endif
