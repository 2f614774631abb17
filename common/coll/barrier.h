/* A barrier of threads that may have fewer processors than there are of them: who waits sleeps in the kernel, after a
 * short spin if there are processors to spare. It can be broken for good, so that nobody waits for one who failed. */
#ifndef TD_COLL_BARRIER_H
#define TD_COLL_BARRIER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_barrier {
    uint32_t n, n_spins;
    _Atomic uint32_t n_arrived, n_asleep;
    _Atomic uint32_t round;  /* futex word */
    _Atomic uint32_t broken; /* enum td_status; OK: whole */
};

void td_barrier_init(struct td_barrier *b, uint32_t n, bool spin);
/* Returns when all n have called it, OK; or at once, with that status, when it is broken. */
enum td_status td_barrier_wait(struct td_barrier *b);
void td_barrier_break(struct td_barrier *b, enum td_status st);
static inline enum td_status td_barrier_status(const struct td_barrier *b)
{
    return (enum td_status)atomic_load(&b->broken);
}

#endif
