#include "kernels/cpu/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/mem.h"

#define MAX_THREADS 256u
/* Long enough to bridge the serial bits between two ops of a layer, short enough that an idle worker is idle: about 30
 * us. */
#define SPINS 1000u

/* One loop at a time. `ticket` is epoch << 32 | next index: a helper that is late for a loop sees another epoch and
 * takes nothing, so body, ctx and n are only read by those who hold an index of the current loop. */
struct td_pool {
    _Atomic uint64_t ticket;
    _Atomic uint32_t wake; /* futex word: the epoch, low bits */
    _Atomic uint32_t n_asleep;
    _Atomic uint32_t n_done;
    _Atomic bool is_stopping;
    td_pool_body *_Atomic body;
    void *_Atomic ctx;
    _Atomic uint32_t n;
    uint32_t n_threads, n_started;
    struct helper {
        struct td_pool *pool;
        pthread_t thread;
        uint32_t number;
    } helpers[];
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value)
{
    return syscall(SYS_futex, (uint32_t *)word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Works on the loop of `epoch` until it has no index left. */
static void work(struct td_pool *p, uint32_t epoch, uint32_t thread)
{
    for (;;) {
        uint64_t t = atomic_load(&p->ticket);
        uint32_t n = atomic_load(&p->n);
        do {
            if ((uint32_t)(t >> 32) != epoch || (uint32_t)t >= n) return;
        } while (!atomic_compare_exchange_weak(&p->ticket, &t, t + 1));
        /* Holding an index of this epoch keeps the loop open, so these belong to it. */
        td_pool_body *body = atomic_load(&p->body);
        body(atomic_load(&p->ctx), (uint32_t)t, thread);
        if (atomic_fetch_add(&p->n_done, 1) + 1 == n) return;
    }
}

static void *helper_main(void *arg)
{
    struct helper *h = arg;
    struct td_pool *p = h->pool;
    uint32_t seen = 0;
    while (!atomic_load(&p->is_stopping)) {
        uint32_t now = atomic_load(&p->wake);
        for (uint32_t i = 0; now == seen && i < SPINS; i++) {
            pause_cpu();
            now = atomic_load(&p->wake);
        }
        if (now == seen) {
            atomic_fetch_add(&p->n_asleep, 1);
            futex(&p->wake, FUTEX_WAIT, seen); /* returns at once if wake moved on in between */
            atomic_fetch_sub(&p->n_asleep, 1);
            continue;
        }
        seen = now;
        if (!atomic_load(&p->is_stopping)) work(p, seen, h->number);
    }
    return NULL;
}

static uint32_t usable_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

enum td_status td_pool_create(uint32_t n_threads, struct td_pool **out)
{
    if (n_threads == 0) n_threads = usable_cpus();
    if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    struct td_pool *p = td_calloc(1, sizeof *p + (n_threads - 1) * sizeof p->helpers[0]);
    if (p == NULL) return TD_E_NO_MEMORY;
    p->n_threads = n_threads;
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        struct helper *h = &p->helpers[i];
        h->pool = p;
        h->number = i + 1;
        if (pthread_create(&h->thread, NULL, helper_main, h) != 0) {
            td_pool_destroy(p);
            return TD_E_NO_MEMORY;
        }
        char name[16];
        snprintf(name, sizeof name, "td-cpu-%u", i + 1);
        pthread_setname_np(h->thread, name);
        p->n_started++;
    }
    *out = p;
    return TD_OK;
}

void td_pool_destroy(struct td_pool *p)
{
    if (p == NULL) return;
    atomic_store(&p->is_stopping, true);
    atomic_fetch_add(&p->wake, 1);
    futex(&p->wake, FUTEX_WAKE, INT_MAX);
    for (uint32_t i = 0; i < p->n_started; i++) pthread_join(p->helpers[i].thread, NULL);
    free(p);
}

uint32_t td_pool_n_threads(const struct td_pool *p) { return p->n_threads; }

void td_pool_run(struct td_pool *p, td_pool_body *body, void *ctx, uint32_t n)
{
    if (n == 0) return;
    if (p->n_threads == 1 || n == 1) {
        for (uint32_t i = 0; i < n; i++) body(ctx, i, 0);
        return;
    }
    uint32_t epoch = atomic_load(&p->wake) + 1;
    /* Nobody holds an index now, and none can be taken before the ticket is of the new epoch. */
    atomic_store(&p->n, 0);
    atomic_store(&p->ticket, (uint64_t)epoch << 32);
    atomic_store(&p->body, body);
    atomic_store(&p->ctx, ctx);
    atomic_store(&p->n_done, 0);
    atomic_store(&p->n, n);
    atomic_store(&p->wake, epoch);
    if (atomic_load(&p->n_asleep) > 0) futex(&p->wake, FUTEX_WAKE, INT_MAX);
    work(p, epoch, 0);
    /* Others may still work on their last index. Give the processor away after a while: one of them may wait for it. */
    for (uint32_t i = 0; atomic_load(&p->n_done) < n; i++) {
        if (i < SPINS)
            pause_cpu();
        else
            sched_yield();
    }
}
