/* The in-process twin of the transfer, for tests and simulations: the same contract between td_xfer objects of one
 * process. Nothing happens but through the timers of a struct td_env, so a virtual clock drives it; everything random
 * comes from one seed, so a run repeats exactly. All of it on one thread. Objects opened in one process reach each
 * other by address. */
#ifndef TD_TRANSFER_MEMORY_H
#define TD_TRANSFER_MEMORY_H

#include "common/base/env.h"
#include "common/transfer/xfer.h"

/* All zero: everything arrives, in order, after a zero-length timer. */
struct td_xfer_memory_trouble {
    uint64_t delay_min_ns, delay_max_ns;   /* of each put, flush and message on its way; drawn evenly */
    uint64_t notice_min_ns, notice_max_ns; /* from a peer's death to on_lost */
    uint32_t lose_message_ppm;   /* messages lost without a trace, in millionths (a real peer loses them only by dying,
                                  * or when it has no memory) */
    uint32_t double_message_ppm; /* messages that arrive a second time, any time later (no real transport does that) */
    uint32_t hang_put_ppm;       /* puts and flushes to a dead peer that hang until it is noticed; the others "succeed",
                                  * as direct stores into a dead process's memory do */
};

/* Like td_xfer_memory.open, with a clock and trouble of one's own. trouble may be NULL. env outlives the object. */
enum td_status td_xfer_memory_open_env(struct td_env *env, uint64_t seed, const struct td_xfer_memory_trouble *trouble,
                                       const struct td_xfer_options *o, const struct td_xfer_handlers *h, void *user,
                                       struct td_xfer **out, struct td_err *err);

/* The process behind x dies now: none of its callbacks run any more, those of its puts that are on their way arrive or
 * not, peers notice later. x is left to be destroyed (its address and keys are dead at once). */
void td_xfer_memory_kill(struct td_xfer *x);
/* The process behind x stops (SIGSTOP): nothing that is due to it is handed over until it goes on. Puts into its pools
 * land all the same. */
void td_xfer_memory_pause(struct td_xfer *x, bool is_paused);
void td_xfer_memory_set_trouble(struct td_xfer *x, const struct td_xfer_memory_trouble *trouble);
/* fn sees each piece of a put just before it is written into one of x's pools: n bytes of data, to at; from: the
 * sender's incarnation. NULL turns it off. */
typedef void td_xfer_memory_land_fn(struct td_xfer *x, uint64_t from, void *at, size_t n, const void *data, void *user);
void td_xfer_memory_watch(struct td_xfer *x, td_xfer_memory_land_fn *fn, void *user);

#endif
