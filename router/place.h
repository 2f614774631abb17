/* Which decode worker and which prefill worker a request gets. A pure choice from what the fleet reports and what this
 * router has given out; the rule is told in place.c. */
#ifndef TD_ROUTER_PLACE_H
#define TD_ROUTER_PLACE_H

#include "router/fleet.h"

/* Requests at one prefill worker that have not brought their first token: one computes, one waits. The rest of the
 * queue stays in the router, so that reserved pages do not idle behind it. */
#define TD_PLACE_PREFILL_DEPTH 2u

struct td_place_query {
    /* A retry names the pair that failed; 0: first try. */
    uint64_t failed_decode, failed_prefill;
    bool decode_failed; /* whose failure it looked like */
    bool same_ok;       /* the same pair may do better later */
};
struct td_place {
    struct td_worker *decode, *prefill;
};

/* OK; BUSY: there are workers, none has room now; UNAVAILABLE: nobody can take it, err says why. */
enum td_status td_place_choose(struct td_fleet *f, const struct td_place_query *q, struct td_place *out,
                               struct td_err *err);

#endif
