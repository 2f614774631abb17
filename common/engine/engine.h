/* The engine executes batches: forward pass, sampling. It knows no requests and no policy: each daemon's sched.c, on
 * the loop thread, decides what the next batch is (and owns kv_pages), so that policies can run on a virtual clock.
 * Rank threads do the work; results come back as mail. At most TD_ENGINE_DEPTH batches may be in flight, executed in
 * the order submitted, so a scheduler can have the next one waiting while one runs. */
#ifndef TD_ENGINE_ENGINE_H
#define TD_ENGINE_ENGINE_H

#include "common/base/status.h"
#include "common/engine/batch.h"
#include "common/loop/loop.h"
#include "common/model/model.h"

#define TD_ENGINE_DEPTH 2u

struct td_engine;

/* Steps of nothing but decode as recorded launches, where the device can: when they are recorded. */
enum td_graphs { TD_GRAPHS_LAZY, TD_GRAPHS_START, TD_GRAPHS_OFF };

struct td_engine_options {
    uint32_t max_batch_tokens; /* of all segments of a batch: sizes the workspace */
    uint32_t max_batch_segments;
    uint32_t max_context_tokens;
    uint32_t
        n_threads; /* CPU backend, of all ranks together (each has one at least); 0: as many as the process may use */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS]; /* of a rank */
    /* Pools, allocated through common/transfer: of rank 0, and of the model's other ranks from 1 on. */
    void *kv_base[TD_KV_N_GROUPS];
    void *more_kv_base[TD_MAX_RANKS - 1][TD_KV_N_GROUPS];
    enum td_graphs graphs;
    uint32_t layer_delay_ms;     /* tests: sleep after each layer */
    /* If not NULL: called on the rank's thread when a layer's KV is in its pages, before on_layer: for pools whose bytes
     * travel from a copy. The device rests meanwhile. Not OK: the pass ends with it, and nobody hears of the layer. */
    enum td_status (*stage)(void *user, const struct td_batch *b, uint32_t layer);
    void *stage_user;
    /* If not NULL: of each batch that a device ran while the host went on, how long it computed, and how long it had
     * not since the batch before (0: unknown). The rank's thread. */
    void (*timed)(void *user, const struct td_batch *b, double busy_us, double gap_us);
    void *timed_user;
};

static inline void **td_engine_kv_base(struct td_engine_options *o, uint32_t rank)
{
    return rank == 0 ? o->kv_base : o->more_kv_base[rank - 1];
}

struct td_engine_handlers {
    void (*on_layer)(struct td_engine *e, struct td_batch *b, uint32_t layer,
                     void *user); /* loop thread; only if want_layers */
    void (*on_done)(struct td_engine *e, struct td_batch *b, enum td_status st,
                    void *user); /* loop thread, exactly once a batch */
};

/* model and loop outlive the engine. */
enum td_status td_engine_create(struct td_model *model, const struct td_engine_options *o, struct td_loop *loop,
                                const struct td_engine_handlers *h, void *user, struct td_engine **out,
                                struct td_err *err);
void td_engine_destroy(struct td_engine *e); /* waits for the batch that runs; batches not done get no callback */
/* BUSY: TD_ENGINE_DEPTH batches in flight. INVALID: over the limits above, or a token out of vocabulary. The batch and
 * all it points to stay untouched until on_done. */
enum td_status td_engine_submit(struct td_engine *e, struct td_batch *b);
/* Age of the batch that runs now, 0 if none: a hung device shows here. Any thread. */
uint64_t td_engine_step_age_ns(const struct td_engine *e);
/* The same work at once on the calling thread, for tools and tests that have no loop. */
enum td_status td_engine_run_now(struct td_engine *e, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                                 void *user);

#endif
