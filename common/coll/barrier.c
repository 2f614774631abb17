#include "common/coll/barrier.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/check.h"

/* About 50 us: longer than the ranks of a small step drift apart, far shorter than a scheduler's slice. */
#define SPINS 2000u

void td_barrier_init(struct td_barrier *b, uint32_t n, bool spin)
{
    TD_CHECK(n > 0);
    *b = (struct td_barrier){.n = n, .n_spins = spin ? SPINS : 0};
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value)
{
    return syscall(SYS_futex, (uint32_t *)word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Somebody who loads the new round before he sleeps does not sleep; one who sleeps is counted. */
static void next_round(struct td_barrier *b)
{
    atomic_fetch_add(&b->round, 1);
    if (atomic_load(&b->n_asleep) > 0) futex(&b->round, FUTEX_WAKE, INT_MAX);
}

enum td_status td_barrier_wait(struct td_barrier *b)
{
    uint32_t seen = atomic_load(&b->round);
    enum td_status st = td_barrier_status(b);
    if (st != TD_OK) return st;
    if (atomic_fetch_add(&b->n_arrived, 1) + 1 == b->n) {
        atomic_store(&b->n_arrived, 0);
        next_round(b);
        return td_barrier_status(b);
    }
    for (uint32_t i = 0; atomic_load(&b->round) == seen && td_barrier_status(b) == TD_OK; i++) {
        if (i < b->n_spins) {
            pause_cpu();
            continue;
        }
        atomic_fetch_add(&b->n_asleep, 1);
        if (td_barrier_status(b) == TD_OK) futex(&b->round, FUTEX_WAIT, seen); /* returns at once in a new round */
        atomic_fetch_sub(&b->n_asleep, 1);
    }
    return td_barrier_status(b);
}

void td_barrier_break(struct td_barrier *b, enum td_status st)
{
    uint32_t whole = TD_OK;
    TD_CHECK(st != TD_OK);
    if (atomic_compare_exchange_strong(&b->broken, &whole, (uint32_t)st)) next_round(b);
}
