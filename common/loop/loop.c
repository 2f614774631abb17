#include "common/loop/loop.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/rng.h"
#include "common/loop/loop_int.h"
#include "common/loop/timers_int.h"

/* One round delivers at most this many mails, so that timers and sockets get their turn under a flood. */
#define MAILS_PER_ROUND 256u
/* libuv's timer is re-armed at least this often; keeps "never" (2^64-1 ns) within what it can count. */
#define LONGEST_SLEEP_MS 3600000ull

struct td_loop {
    uv_loop_t uv;
    struct td_env env;
    bool is_stopping, is_destroying;

    struct td_timers timers;
    uv_timer_t timer;  /* armed for the earliest of timers, by before_block */
    uint64_t armed_ns; /* what it is armed for; TD_NEVER_NS: it is not */

    _Atomic(struct td_mail *) inbox;        /* posted, newest first */
    struct td_mail *mail_first, *mail_last; /* taken from inbox, oldest first; loop thread only */
    uv_async_t wake;

    uv_prepare_t prepare;
    struct td_list idles;
    struct td_list *idle_next; /* where the running pass goes on; moved when that hook is removed */

    uv_signal_t signals[2];
    unsigned n_signals;
    void (*on_signal)(int signum, unsigned nth, void *user);
    void *signal_user;

    uint64_t n_work;
    uint64_t seed, n_random;
    char read_buf[TD_LOOP_READ_BYTES];
};

uv_loop_t *td_loop_uv(struct td_loop *l) { return &l->uv; }
char *td_loop_read_buf(struct td_loop *l) { return l->read_buf; }

enum td_status td_status_from_uv(int e)
{
    switch (e) {
    case 0: return TD_OK;
    case UV_ENOMEM: return TD_E_NO_MEMORY;
    case UV_ECANCELED: return TD_E_CANCELED;
    case UV_EOF:
    case UV_ECONNRESET:
    case UV_ECONNABORTED:
    case UV_EPIPE:
    case UV_ENOTCONN:
    case UV_ETIMEDOUT:
    case UV_EHOSTUNREACH:
    case UV_ENETUNREACH: return TD_E_PEER_LOST;
    case UV_EINVAL: return TD_E_INVALID;
    default: return TD_E_IO;
    }
}

/* --- clock, timers, random numbers ---------------------------------------------------------------------------------
 */
static struct td_loop *loop_of(struct td_env *env) { return TD_CONTAINER_OF(env, struct td_loop, env); }

static uint64_t env_now(struct td_env *env)
{
    (void)env;
    return td_clock_ns();
}

static void env_timer_start(struct td_env *env, struct td_timer *t, uint64_t delay_ns)
{
    struct td_loop *l = loop_of(env);
    if (l->is_destroying) return;
    uint64_t now = td_clock_ns();
    td_timers_start(&l->timers, t, delay_ns > TD_NEVER_NS - now ? TD_NEVER_NS : now + delay_ns);
}

static void env_timer_stop(struct td_env *env, struct td_timer *t)
{
    struct td_loop *l = loop_of(env);
    if (l->is_destroying)
        t->is_armed = false; /* its neighbours in the heap may be gone */
    else
        td_timers_stop(&l->timers, t);
}

static uint64_t env_random(struct td_env *env)
{
    struct td_loop *l = loop_of(env);
    uint32_t r[4];
    td_rng_philox(l->seed, l->n_random++, 0, r);
    return (uint64_t)r[0] << 32 | r[1];
}

static void on_timer(uv_timer_t *h)
{
    struct td_loop *l = h->data;
    l->armed_ns = TD_NEVER_NS;
    if (!l->is_destroying) td_timers_fire(&l->timers, td_clock_ns());
}

static void arm_timer(struct td_loop *l)
{
    uint64_t due = l->timers.root == NULL ? TD_NEVER_NS : l->timers.root->due_ns;
    if (due == l->armed_ns) return;
    l->armed_ns = due;
    if (due == TD_NEVER_NS) {
        uv_timer_stop(&l->timer);
        return;
    }
    uint64_t now = td_clock_ns(), ms = due <= now ? 0 : (due - now - 1) / TD_NS_PER_MS + 1;
    uv_update_time(&l->uv); /* libuv counts from its own, older idea of now */
    uv_timer_start(&l->timer, on_timer, ms < LONGEST_SLEEP_MS ? ms : LONGEST_SLEEP_MS, 0);
}

struct td_env *td_loop_env(struct td_loop *l) { return &l->env; }

/* --- mail ----------------------------------------------------------------------------------------------------------
 */
void td_loop_post(struct td_loop *l, struct td_mail *m)
{
    struct td_mail *old = atomic_load_explicit(&l->inbox, memory_order_relaxed);
    do {
        m->next = old;
    } while (!atomic_compare_exchange_weak_explicit(&l->inbox, &old, m, memory_order_release, memory_order_relaxed));
    if (old == NULL) uv_async_send(&l->wake); /* else whoever found it empty has woken the loop, or is about to */
}

static void take_inbox(struct td_loop *l)
{
    struct td_mail *m = atomic_exchange_explicit(&l->inbox, NULL, memory_order_acquire), *first = NULL, *last = m;
    if (m == NULL) return;
    while (m != NULL) {
        struct td_mail *next = m->next;
        m->next = first;
        first = m;
        m = next;
    }
    if (l->mail_first == NULL)
        l->mail_first = first;
    else
        l->mail_last->next = first;
    l->mail_last = last;
}

static void on_wake(uv_async_t *h)
{
    struct td_loop *l = h->data;
    if (l->is_destroying) return;
    take_inbox(l);
    for (unsigned n = 0; n < MAILS_PER_ROUND && l->mail_first != NULL; n++) {
        struct td_mail *m = l->mail_first;
        l->mail_first = m->next; /* first: deliver may free or post m */
        m->deliver(m);
    }
    if (l->mail_first != NULL) uv_async_send(&l->wake);
}

/* --- before blocking -----------------------------------------------------------------------------------------------
 */
static void before_block(uv_prepare_t *h)
{
    struct td_loop *l = h->data;
    if (l->is_destroying) return;
    for (struct td_list *it = l->idles.next; it != &l->idles; it = l->idle_next) {
        l->idle_next = it->next;
        struct td_loop_idle *i = TD_LIST_ENTRY(it, struct td_loop_idle, link);
        i->before_block(i);
    }
    l->idle_next = NULL;
    arm_timer(l);
}

void td_loop_add_idle(struct td_loop *l, struct td_loop_idle *i) { td_list_push_back(&l->idles, &i->link); }

void td_loop_remove_idle(struct td_loop *l, struct td_loop_idle *i)
{
    if (l->idle_next == &i->link) l->idle_next = i->link.next;
    td_list_remove(&i->link);
}

/* --- signals -------------------------------------------------------------------------------------------------------
 */
static void on_uv_signal(uv_signal_t *h, int signum)
{
    struct td_loop *l = h->data;
    l->on_signal(signum, ++l->n_signals, l->signal_user);
}

enum td_status td_loop_on_signal(struct td_loop *l, void (*on_signal)(int signum, unsigned nth, void *user), void *user)
{
    static const int wanted[TD_COUNT(((struct td_loop *)NULL)->signals)] = {SIGTERM, SIGINT};
    l->on_signal = on_signal;
    l->signal_user = user;
    for (unsigned i = 0; i < TD_COUNT(l->signals); i++) {
        int e = uv_signal_start(&l->signals[i], on_uv_signal, wanted[i]);
        if (e != 0) return td_status_from_uv(e);
    }
    return TD_OK;
}

/* --- background work -----------------------------------------------------------------------------------------------
 */
_Static_assert(sizeof(uv_work_t) <= sizeof(((struct td_work *)NULL)->impl), "enlarge td_work.impl");

static void on_work(uv_work_t *req)
{
    struct td_work *w = req->data;
    w->work(w);
}

static void on_work_done(uv_work_t *req, int e)
{
    TD_CHECK(e == 0); /* nobody cancels */
    struct td_work *w = req->data;
    ((struct td_loop *)req->loop->data)->n_work--;
    w->done(w);
}

void td_loop_work(struct td_loop *l, struct td_work *w)
{
    uv_work_t *req = (uv_work_t *)(void *)w->impl;
    memset(w->impl, 0, sizeof w->impl);
    req->data = w;
    TD_CHECK(uv_queue_work(&l->uv, req, on_work, on_work_done) == 0); /* it refuses a missing callback only */
    l->n_work++;
}

/* --- life ----------------------------------------------------------------------------------------------------------
 */
enum td_status td_loop_run(struct td_loop *l)
{
    while (!l->is_stopping) uv_run(&l->uv, UV_RUN_ONCE);
    l->is_stopping = false;
    return TD_OK;
}

void td_loop_run_once(struct td_loop *l, bool may_block) { uv_run(&l->uv, may_block ? UV_RUN_ONCE : UV_RUN_NOWAIT); }

void td_loop_stop(struct td_loop *l)
{
    l->is_stopping = true;
    uv_stop(&l->uv); /* so that a stop from before_block does not wait for the next event */
}

static int init_handles(struct td_loop *l)
{
    int e;
    l->timer.data = l->wake.data = l->prepare.data = l;
    if ((e = uv_timer_init(&l->uv, &l->timer)) != 0) return e;
    if ((e = uv_async_init(&l->uv, &l->wake, on_wake)) != 0) return e;
    if ((e = uv_prepare_init(&l->uv, &l->prepare)) != 0) return e;
    for (unsigned i = 0; i < TD_COUNT(l->signals); i++) {
        if ((e = uv_signal_init(&l->uv, &l->signals[i])) != 0) return e;
        l->signals[i].data = l;
    }
    return uv_prepare_start(&l->prepare, before_block);
}

enum td_status td_loop_create(struct td_loop **out)
{
    struct td_loop *l = td_calloc(1, sizeof *l);
    if (l == NULL) return TD_E_NO_MEMORY;
    int e = uv_loop_init(&l->uv);
    if (e != 0) {
        TD_ERROR("loop_failed", "error=\"%s\"", uv_strerror(e));
        free(l);
        return td_status_from_uv(e);
    }
    l->uv.data = l;
    l->env = (struct td_env){
        .now_ns = env_now, .timer_start = env_timer_start, .timer_stop = env_timer_stop, .random = env_random};
    l->seed = td_rng_system();
    l->armed_ns = TD_NEVER_NS;
    td_list_init(&l->idles);
    if ((e = init_handles(l)) != 0) {
        TD_ERROR("loop_failed", "error=\"%s\"", uv_strerror(e));
        td_loop_destroy(l);
        return td_status_from_uv(e);
    }
    signal(SIGPIPE, SIG_IGN);
    *out = l;
    return TD_OK;
}

static void close_handle(uv_handle_t *h, void *user)
{
    if (uv_is_closing(h)) return;
    if (h->data == user)
        uv_close(h, NULL);
    else
        ((struct td_uv_owner *)h->data)->close(h);
}

void td_loop_destroy(struct td_loop *l)
{
    if (l == NULL) return;
    l->is_destroying = true;
    while (l->n_work > 0) uv_run(&l->uv, UV_RUN_ONCE);
    uv_walk(&l->uv, close_handle, l);
    while (uv_loop_alive(&l->uv)) uv_run(&l->uv, UV_RUN_DEFAULT); /* the first may only clear an old stop */
    TD_CHECK(uv_loop_close(&l->uv) == 0);
    free(l);
}
