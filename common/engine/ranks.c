#include "common/engine/ranks.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/mem.h"

struct td_ranks {
    uint32_t n, n_created, n_threads; /* n_threads: running */
    struct td_forward forward[TD_MAX_RANKS];
    struct td_forward_group group;
    pthread_t threads[TD_MAX_RANKS]; /* from 1 on */
    /* of the pass that runs */
    _Atomic uint32_t n_stored[TD_MAX_LAYERS]; /* ranks whose KV of the layer is in its pages */
    void (*on_layer)(uint32_t layer, void *user);
    void *user;
};

static uint32_t usable_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

static void *follower_main(void *arg)
{
    while (td_forward_follow(arg)) {
    }
    return NULL;
}

static enum td_status start_followers(struct td_ranks *r, struct td_err *err)
{
    for (uint32_t i = 1; i < r->n; i++) {
        if (pthread_create(&r->threads[i], NULL, follower_main, &r->forward[i]) != 0)
            return td_err_set(err, TD_E_NO_MEMORY, "the thread of rank %u cannot be created", i);
        char name[24]; /* the compiler thinks of ten digits; there are at most two */
        snprintf(name, sizeof name, "td-rank-%u", i % 100); /* fits the kernel's 16 bytes */
        pthread_setname_np(r->threads[i], name);
        r->n_threads++;
    }
    return TD_OK;
}

/* They have been told to leave, or have left because the group is broken. */
static void join_followers(struct td_ranks *r)
{
    for (uint32_t i = 1; i <= r->n_threads; i++) pthread_join(r->threads[i], NULL);
    r->n_threads = 0;
}

enum td_status td_ranks_create(struct td_model *model, const struct td_engine_options *o, struct td_ranks **out,
                               struct td_err *err)
{
    enum td_status st;
    struct td_ranks *r = td_calloc(1, sizeof *r);
    if (r == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the engine");
    r->n = td_model_n_ranks(model);
    if (r->n == 1) {
        TD_TRY(td_forward_create(model, o, &r->forward[0], err));
        r->n_created = 1;
    } else {
        uint32_t cpus = usable_cpus(), n_threads = o->n_threads == 0 ? cpus : o->n_threads;
        struct td_engine_options each = *o;
        each.n_threads = n_threads / r->n > 0 ? n_threads / r->n : 1;
        TD_TRY(td_coll_create(&td_coll_local, r->n, r->n * each.n_threads <= cpus, &r->group.coll, err));
        r->group.leader = &r->forward[0];
        for (; r->n_created < r->n; r->n_created++)
            TD_TRY(td_forward_create_rank(model, &each, r->n_created, &r->group, &r->forward[r->n_created], err));
        TD_TRY(start_followers(r, err));
    }
    *out = r;
    r = NULL;
    st = TD_OK;
out:
    td_ranks_destroy(r);
    return st;
}

void td_ranks_destroy(struct td_ranks *r)
{
    if (r == NULL) return;
    if (r->n_threads > 0) {
        if (r->n_threads + 1 == r->n)
            td_forward_end_group(&r->forward[0]);
        else /* not all were started: those that were wait for a pass that cannot come */
            td_coll_fail(r->group.coll, TD_E_CANCELED);
        join_followers(r);
    }
    for (uint32_t i = 0; i < r->n_created; i++) td_forward_free(&r->forward[i]);
    td_coll_destroy(r->group.coll);
    free(r);
}

struct td_forward *td_ranks_leader(struct td_ranks *r) { return &r->forward[0]; }

struct td_forward *td_ranks_alone(struct td_ranks *r) { return r->n == 1 ? &r->forward[0] : NULL; }

static void on_stored(uint32_t layer, void *user)
{
    struct td_ranks *r = user;
    if (atomic_fetch_add(&r->n_stored[layer], 1) + 1 == r->n) r->on_layer(layer, r->user);
}

enum td_status td_ranks_run(struct td_ranks *r, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                            void *user)
{
    if (r->n == 1) return td_forward_run(&r->forward[0], b, on_layer, user);
    for (uint32_t i = 0; i < TD_MAX_LAYERS; i++) atomic_store_explicit(&r->n_stored[i], 0, memory_order_relaxed);
    r->on_layer = on_layer;
    r->user = user;
    enum td_status st = td_forward_run(&r->forward[0], b, on_layer != NULL ? on_stored : NULL, r);
    if (st != TD_OK && st != TD_E_CANCELED) join_followers(r); /* the batch is the caller's again: nobody reads it */
    return st;
}
