/* The router's queue: who waits for a pair of workers, in what order, and how many at most. First come, first served,
 * except that requests which had their turn before (their worker failed or had no room) wait in front. Pure; loop
 * thread only. */
#ifndef TD_ROUTER_ADMIT_H
#define TD_ROUTER_ADMIT_H

#include "router/place.h"
#include "router/request.h"

struct td_admit {
    struct td_fleet *fleet;
    struct td_env *env;
    struct td_list queue;
    uint32_t n_waiting, n_max;
    enum td_prefill_on prefill_on; /* set after init; default: auto */
    uint32_t n_tokenizing;         /* accepted, their prompt is being made: they count against n_max too */
    struct td_timer pump;
};

void td_admit_init(struct td_admit *a, struct td_env *env, struct td_fleet *fleet, uint32_t n_max);
void td_admit_deinit(struct td_admit *a);
/* May another request come in? BUSY: as many are waiting as may. UNAVAILABLE: nobody could serve it. */
enum td_status td_admit_check(const struct td_admit *a, struct td_err *err);
/* OK: workers claimed; IN_PROGRESS: it waits; else refused. As td_router_ports.place. */
enum td_status td_admit_place(struct td_admit *a, struct td_request *r, struct td_err *err);
void td_admit_remove(struct td_admit *a, struct td_request *r); /* also of one that is not in the queue */
/* Something changed that may give somebody a place: looked at soon, from a timer, never from within. */
void td_admit_kick(struct td_admit *a);

#endif
