/* Which decode worker and which prefill worker a request gets, if any: the decode worker can compute the prompt itself.
 * A pure choice from what the fleet reports and what this router has given out; the rule is told in place.c. */
#ifndef TD_ROUTER_PLACE_H
#define TD_ROUTER_PLACE_H

#include "router/fleet.h"

/* Requests at one prefill worker that have not brought their first token: one computes, one waits. The rest of the
 * queue stays in the router, so that reserved pages do not idle behind it. */
#define TD_PLACE_PREFILL_DEPTH 2u

/* --prefill-on: where prompts are computed. Without prefill workers decode workers do it all the same. */
enum td_prefill_on { TD_PREFILL_ON_AUTO, TD_PREFILL_ON_PREFILL, TD_PREFILL_ON_DECODE };

/* Whose failure it looked like. PREFILL: or that of the hand-off; the decode worker by itself is well. */
enum td_blame { TD_BLAME_NONE, TD_BLAME_DECODE, TD_BLAME_PREFILL };

struct td_place_query {
    uint32_t n_tokens;     /* whose KV is to be made */
    const uint64_t *names; /* of their blocks */
    uint32_t n_names;
    bool is_back; /* gave its pages up before: comes back only where it has room to grow */
    /* A retry names the pair that failed; 0: first try. */
    uint64_t failed_decode, failed_prefill;
    enum td_blame blame;
    bool same_ok;     /* the same pair may do better later */
    bool is_last_try; /* no further failure is forgiven: as few workers as can do it */
    enum td_prefill_on on;
    uint32_t n_behind; /* requests that wait for their turn */
};
struct td_place {
    struct td_worker *decode, *prefill; /* prefill NULL: decode computes the prompt */
    uint32_t n_compute;                 /* tokens that are not in the cache of who computes it, as far as is known */
};

/* "auto", "prefill", "decode"; false: something else. */
bool td_place_parse_on(const char *word, enum td_prefill_on *out);
/* OK; BUSY: there are workers, none has room now; UNAVAILABLE: nobody can take it, err says why. */
enum td_status td_place_choose(struct td_fleet *f, const struct td_place_query *q, struct td_place *out,
                               struct td_err *err);

#endif
