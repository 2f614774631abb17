/* The loop's timers: a pairing heap (Fredman et al., 1986) threaded through the timers themselves, so that starting one
 * allocates nothing. start is O(1), stop and take are O(log n) amortised. Knows no clock and no libuv. */
#ifndef TD_LOOP_TIMERS_INT_H
#define TD_LOOP_TIMERS_INT_H

#include <stdint.h>

#include "common/base/env.h"

struct td_timers {
    struct td_timer *root; /* earliest; NULL: none */
    uint64_t n_started;    /* numbers the starts: equal due times fire in this order */
};

void td_timers_start(struct td_timers *ts, struct td_timer *t, uint64_t due_ns); /* restarts if armed */
void td_timers_stop(struct td_timers *ts, struct td_timer *t);                   /* also when not armed */
/* Fires every timer that is due at now_ns and was started before this call. */
void td_timers_fire(struct td_timers *ts, uint64_t now_ns);

#endif
