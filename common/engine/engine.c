/* The thread of rank 0 and its two sides: a queue of batches in, mail to the loop out. The other ranks are ranks.c's.
 *
 * Mail outlives the engine: what was posted but not delivered when the engine is destroyed still lies in the loop's
 * inbox. So slots and their mails live in a mailbox of their own, which the last mail to be delivered frees. */
#include "common/engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/ranks.h"

struct slot;
struct layer_mail {
    struct td_mail mail;
    struct slot *slot;
    uint32_t layer;
};

struct slot { /* a batch in flight */
    struct mailbox *box;
    struct td_batch *batch; /* NULL: free; loop thread */
    enum td_status st;
    struct td_mail done;
    struct layer_mail *layers; /* [L] */
};

struct mailbox {
    struct td_engine *engine;   /* NULL once it is gone; loop thread */
    _Atomic uint32_t n_pending; /* posted, not delivered */
    struct slot slots[TD_ENGINE_DEPTH];
    struct td_list orphan_link;
};

struct td_engine {
    struct td_ranks *ranks;
    struct td_loop *loop;
    struct td_engine_handlers handlers;
    void *user;
    struct mailbox *box;
    uint32_t layer_delay_ms;
    enum td_status (*stage)(void *user, const struct td_batch *b, uint32_t layer);
    void *stage_user;
    void (*timed)(void *user, const struct td_batch *b, double busy_us, double gap_us);
    void *timed_user;
    _Atomic uint64_t step_start_ns; /* 0: none runs */

    pthread_mutex_t run_lock; /* the rank thread's passes, or run_now's */
    pthread_mutex_t lock;     /* of what follows */
    pthread_cond_t wake;
    struct slot *queue[TD_ENGINE_DEPTH]; /* the first n_begun of them run on the device */
    uint32_t n_queued, n_begun;          /* n_begun: the rank thread's */
    bool is_stopping;
    bool has_thread;
    pthread_t thread;
};

/* ---- mail
 * ----------------------------------------------------------------------------------------------------------------- */

/* Mailboxes that wait for their last mail. If the loop is never run again that mail does not come; the list keeps such
 * a box findable instead of lost. */
static pthread_mutex_t orphans_lock = PTHREAD_MUTEX_INITIALIZER;
static struct td_list orphans = {&orphans, &orphans};

static void mailbox_free(struct mailbox *box)
{
    for (uint32_t i = 0; i < TD_ENGINE_DEPTH; i++) free(box->slots[i].layers);
    free(box);
}

static void mailbox_orphan(struct mailbox *box)
{
    box->engine = NULL;
    if (atomic_load(&box->n_pending) == 0) {
        mailbox_free(box);
        return;
    }
    pthread_mutex_lock(&orphans_lock);
    td_list_push_back(&orphans, &box->orphan_link);
    pthread_mutex_unlock(&orphans_lock);
}

/* One mail less; false: the engine is gone. */
static bool mailbox_received(struct mailbox *box)
{
    uint32_t left = atomic_fetch_sub(&box->n_pending, 1) - 1;
    if (box->engine != NULL) return true;
    if (left == 0) {
        pthread_mutex_lock(&orphans_lock);
        td_list_remove(&box->orphan_link);
        pthread_mutex_unlock(&orphans_lock);
        mailbox_free(box);
    }
    return false;
}

static void deliver_layer(struct td_mail *m)
{
    struct layer_mail *l = TD_CONTAINER_OF(m, struct layer_mail, mail);
    struct td_engine *e = l->slot->box->engine;
    struct td_batch *b = l->slot->batch;
    uint32_t layer = l->layer;
    if (mailbox_received(l->slot->box) && e->handlers.on_layer != NULL) e->handlers.on_layer(e, b, layer, e->user);
}

static void deliver_done(struct td_mail *m)
{
    struct slot *s = TD_CONTAINER_OF(m, struct slot, done);
    struct td_engine *e = s->box->engine;
    struct td_batch *b = s->batch;
    enum td_status st = s->st;
    s->batch = NULL;
    /* Last, and touching nothing of ours after it: the handler may submit, or destroy the engine. */
    if (mailbox_received(s->box)) e->handlers.on_done(e, b, st, e->user);
}

static void post(struct td_engine *e, struct td_mail *m)
{
    atomic_fetch_add(&e->box->n_pending, 1);
    td_loop_post(e->loop, m);
}

/* ---- rank 0's thread
 * -------------------------------------------------------------------------------------------------------- */

static void sleep_ms(uint32_t ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&t, &t) != 0) {
    }
}

struct layer_call {
    struct td_engine *engine;
    struct slot *slot; /* NULL: call the function instead */
    void (*on_layer)(uint32_t layer, void *user);
    void *user;
    enum td_status staged; /* not OK: a copy failed */
};

/* Maybe on another rank's thread or the device's, but before the pass ends. */
static void on_layer(uint32_t layer, void *user)
{
    struct layer_call *c = user;
    if (c->engine->stage != NULL && c->slot != NULL && c->staged == TD_OK)
        c->staged = c->engine->stage(c->engine->stage_user, c->slot->batch, layer);
    if (c->staged != TD_OK) return;
    if (c->slot != NULL && c->slot->batch->want_layers) post(c->engine, &c->slot->layers[layer].mail);
    if (c->on_layer != NULL) c->on_layer(layer, c->user);
    if (c->engine->layer_delay_ms != 0) sleep_ms(c->engine->layer_delay_ms);
}

static bool wants_layers(const struct td_engine *e, const struct td_batch *b, const struct layer_call *call)
{
    return (call->slot != NULL && b->want_layers) || call->on_layer != NULL || e->layer_delay_ms != 0 ||
           (e->stage != NULL && call->slot != NULL);
}

static void log_failure(const struct td_batch *b, enum td_status st)
{
    if (st != TD_OK && st != TD_E_CANCELED)
        TD_ERROR("step_failed", "status=%s segments=%u", td_status_name(st), b->n_segments);
}

static enum td_status run(struct td_engine *e, struct td_batch *b, struct layer_call *call)
{
    pthread_mutex_lock(&e->run_lock);
    atomic_store(&e->step_start_ns, td_clock_ns());
    enum td_status st = td_ranks_run(e->ranks, b, wants_layers(e, b, call) ? on_layer : NULL, call);
    atomic_store(&e->step_start_ns, 0);
    pthread_mutex_unlock(&e->run_lock);
    if (st == TD_OK) st = call->staged;
    log_failure(b, st);
    return st;
}

/* The first batch is done, and its slot the loop's. */
static void finish_first(struct td_engine *e, enum td_status st)
{
    pthread_mutex_lock(&e->lock);
    struct slot *s = e->queue[0];
    e->n_queued--;
    for (uint32_t i = 0; i < e->n_queued; i++) e->queue[i] = e->queue[i + 1];
    pthread_mutex_unlock(&e->lock);
    s->st = st;
    post(e, &s->done);
}

/* The first of those that run on the device. */
static void end_first(struct td_engine *e, struct td_forward *f)
{
    const struct td_batch *b = e->queue[0]->batch;
    double busy_us, gap_us;
    enum td_status st = td_forward_end(f);
    e->n_begun--;
    if (st == TD_OK && e->timed != NULL && td_forward_times(f, &busy_us, &gap_us) == TD_OK)
        e->timed(e->timed_user, b, busy_us, gap_us);
    atomic_store(&e->step_start_ns, e->n_begun > 0 ? td_clock_ns() : 0);
    if (e->n_begun == 0) pthread_mutex_unlock(&e->run_lock);
    log_failure(b, st);
    finish_first(e, st);
}

static bool may_begin(struct td_engine *e, struct td_forward *f, struct slot *s)
{
    struct layer_call call = {.engine = e, .slot = s};
    return f != NULL && !wants_layers(e, s->batch, &call) && td_forward_may_begin(f, s->batch);
}

/* Puts a batch behind those that run. */
static void begin(struct td_engine *e, struct td_forward *f, struct slot *s)
{
    bool is_alone = e->n_begun == 0;
    if (is_alone) {
        pthread_mutex_lock(&e->run_lock);
        atomic_store(&e->step_start_ns, td_clock_ns());
    }
    enum td_status st = td_forward_begin(f, s->batch);
    if (st == TD_OK) {
        e->n_begun++;
        return;
    }
    while (e->n_begun > 0) end_first(e, f); /* in order */
    if (is_alone) {
        atomic_store(&e->step_start_ns, 0);
        pthread_mutex_unlock(&e->run_lock);
    }
    log_failure(s->batch, st);
    finish_first(e, st);
}

static void relax(void)
{
    for (int i = 0; i < 16; i++) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

/* While a batch runs on the device this thread asks again and again whether it has ended, or another has come to stand
 * behind it: between two steps there is no time to be woken up. */
static void *rank_main(void *arg)
{
    struct td_engine *e = arg;
    struct td_forward *f = td_ranks_alone(e->ranks);
    for (;;) {
        pthread_mutex_lock(&e->lock);
        while (e->n_queued == 0 && !e->is_stopping) pthread_cond_wait(&e->wake, &e->lock);
        bool is_stopping = e->is_stopping;
        struct slot *next = e->n_queued > e->n_begun && !is_stopping ? e->queue[e->n_begun] : NULL;
        pthread_mutex_unlock(&e->lock);
        if (next != NULL && may_begin(e, f, next)) {
            begin(e, f, next);
        } else if (e->n_begun > 0) {
            if (td_forward_has_ended(f))
                end_first(e, f);
            else
                relax();
        } else if (next != NULL) {
            struct layer_call call = {.engine = e, .slot = next};
            finish_first(e, run(e, next->batch, &call));
        } else {
            return NULL;
        }
    }
}

/* ---- life
 * -------------------------------------------------------------------------------------------------------------------
 */

static enum td_status mailbox_create(struct td_engine *e, uint32_t n_layers)
{
    struct mailbox *box = td_calloc(1, sizeof *box);
    if (box == NULL) return TD_E_NO_MEMORY;
    box->engine = e;
    td_list_init(&box->orphan_link);
    for (uint32_t i = 0; i < TD_ENGINE_DEPTH; i++) {
        struct slot *s = &box->slots[i];
        s->box = box;
        s->done.deliver = deliver_done;
        s->layers = td_calloc(n_layers, sizeof *s->layers);
        if (s->layers == NULL) {
            mailbox_free(box);
            return TD_E_NO_MEMORY;
        }
        for (uint32_t l = 0; l < n_layers; l++)
            s->layers[l] = (struct layer_mail){.mail.deliver = deliver_layer, .slot = s, .layer = l};
    }
    e->box = box;
    return TD_OK;
}

enum td_status td_engine_create(struct td_model *model, const struct td_engine_options *o, struct td_loop *loop,
                                const struct td_engine_handlers *h, void *user, struct td_engine **out,
                                struct td_err *err)
{
    enum td_status st;
    struct td_engine *e = td_calloc(1, sizeof *e);
    if (e == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the engine");
    pthread_mutex_init(&e->run_lock, NULL);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    e->loop = loop;
    if (h != NULL) e->handlers = *h;
    e->user = user;
    e->layer_delay_ms = o->layer_delay_ms;
    e->stage = o->stage;
    e->stage_user = o->stage_user;
    e->timed = o->timed;
    e->timed_user = o->timed_user;
    TD_TRY(td_ranks_create(model, o, &e->ranks, err));
    if (e->timed != NULL && td_ranks_alone(e->ranks) != NULL) td_ranks_alone(e->ranks)->takes_times = true;
    if (loop != NULL) {
        TD_CHECK(e->handlers.on_done != NULL);
        st = mailbox_create(e, td_model_config_of(model)->n_layers);
        if (st != TD_OK) TD_TRY(td_err_set(err, st, "no memory for the engine"));
        if (pthread_create(&e->thread, NULL, rank_main, e) != 0)
            TD_TRY(td_err_set(err, TD_E_NO_MEMORY, "the engine's thread cannot be created"));
        pthread_setname_np(e->thread, "td-rank-0");
        e->has_thread = true;
    }
    *out = e;
    return TD_OK;
out:
    td_engine_destroy(e);
    return st;
}

void td_engine_destroy(struct td_engine *e)
{
    if (e == NULL) return;
    if (e->has_thread) {
        pthread_mutex_lock(&e->lock);
        e->is_stopping = true;
        pthread_cond_signal(&e->wake);
        pthread_mutex_unlock(&e->lock);
        pthread_join(e->thread, NULL);
    }
    if (e->box != NULL) mailbox_orphan(e->box);
    td_ranks_destroy(e->ranks);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    pthread_mutex_destroy(&e->run_lock);
    free(e);
}

enum td_status td_engine_submit(struct td_engine *e, struct td_batch *b)
{
    TD_CHECK(e->has_thread);
    struct slot *free_slot = NULL;
    for (uint32_t i = 0; i < TD_ENGINE_DEPTH && free_slot == NULL; i++)
        if (e->box->slots[i].batch == NULL) free_slot = &e->box->slots[i];
    if (free_slot == NULL) return TD_E_BUSY;
    enum td_status st = td_forward_check(td_ranks_leader(e->ranks), b);
    if (st != TD_OK) return st;
    free_slot->batch = b;
    pthread_mutex_lock(&e->lock);
    e->queue[e->n_queued++] = free_slot;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    return TD_OK;
}

uint64_t td_engine_step_age_ns(const struct td_engine *e)
{
    uint64_t start = atomic_load(&((struct td_engine *)(uintptr_t)e)->step_start_ns);
    return start == 0 ? 0 : td_clock_ns() - start;
}

enum td_status td_engine_run_now(struct td_engine *e, struct td_batch *b, void (*call)(uint32_t layer, void *user),
                                 void *user)
{
    enum td_status st = td_forward_check(td_ranks_leader(e->ranks), b);
    struct layer_call c = {.engine = e, .on_layer = call, .user = user};
    return st != TD_OK ? st : run(e, b, &c);
}
