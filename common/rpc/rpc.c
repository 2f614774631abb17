/* The process's side of gRPC: completion queue, poller threads, the inbox through which completions reach the loop. */
#include "common/rpc/rpc.h"

#include <grpc/support/log.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/tsan.h"
#include "common/rpc/rpc_int.h"

#define RPC_MAGIC                    0x72706331u /* "rpc1" */
#define DEFAULT_KEEPALIVE_MS         10000u
#define DEFAULT_KEEPALIVE_TIMEOUT_MS 5000u
#define DEFAULT_MAX_QUEUED_BYTES     (1u << 20)
#define DEFAULT_FIRST_MESSAGE_MS     30000u

/* --- gRPC's log ------------------------------------------------------------------------------------------------------
 * What core calls an error is mostly a client that went away mid-handshake: a warning for us. */
static void on_grpc_log(gpr_log_func_args *a)
{
    const char *slash = strrchr(a->file, '/'), *file = slash != NULL ? slash + 1 : a->file;
    if (a->severity == GPR_LOG_SEVERITY_ERROR)
        TD_WARN("grpc", "at=%s:%d text=\"%s\"", file, a->line, a->message);
    else
        TD_DEBUG("grpc", "at=%s:%d text=\"%s\"", file, a->line, a->message);
}

/* --- time -------------------------------------------------------------------------------------------------- */
uint64_t rpc_until_ns(gpr_timespec deadline)
{
    gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0 || left.tv_sec > 1000000000)
        return TD_NEVER_NS;
    uint64_t now = td_clock_ns();
    if (left.tv_sec < 0) return now;
    return now + (uint64_t)left.tv_sec * TD_NS_PER_S + (uint64_t)left.tv_nsec;
}

gpr_timespec rpc_timespec(uint64_t deadline_ns)
{
    if (deadline_ns == TD_NEVER_NS) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    uint64_t now = td_clock_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
    gpr_timespec span = {
        .tv_sec = (int64_t)(left / TD_NS_PER_S), .tv_nsec = (int32_t)(left % TD_NS_PER_S), GPR_TIMESPAN};
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), span);
}

/* --- tags: loop -> core -> poller -> loop ------------------------------------------------------------------ */
void rpc_tag_begin(struct rpc_tag *t)
{
    t->rpc->n_in_flight++;
    TD_TSAN_RELEASE(t);
}

bool rpc_start_batch(struct td_rpc_call *c, const grpc_op *ops, size_t n, struct rpc_tag *t)
{
    c->n_in_flight++;
    rpc_tag_begin(t);
    grpc_call_error e = grpc_call_start_batch(c->call, ops, n, t, NULL);
    if (e == GRPC_CALL_OK) return true;
    c->n_in_flight--;
    c->rpc->n_in_flight--;
    TD_ERROR("rpc_batch_refused", "error=%s", grpc_call_error_to_string(e));
    return false;
}

static void deliver_to_inbox(struct td_rpc *r, struct rpc_tag *t)
{
    t->next = NULL;
    pthread_mutex_lock(&r->inbox_lock);
    *r->inbox_last = t;
    r->inbox_last = &t->next;
    bool must_post = !r->wake->is_posted;
    r->wake->is_posted = true;
    pthread_cond_signal(&r->inbox_filled);
    pthread_mutex_unlock(&r->inbox_lock);
    if (must_post) td_loop_post(r->loop, &r->wake->mail);
}

static void *poll_completions(void *user)
{
    struct td_rpc *r = user;
    for (;;) {
        grpc_event e = grpc_completion_queue_next(r->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN) return NULL;
        if (e.type != GRPC_OP_COMPLETE) continue;
        struct rpc_tag *t = e.tag;
        TD_TSAN_ACQUIRE(t);
        t->ok = e.success != 0;
        deliver_to_inbox(r, t);
    }
}

static struct rpc_tag *take_inbox(struct td_rpc *r)
{
    struct rpc_tag *first = r->inbox_first;
    r->inbox_first = NULL;
    r->inbox_last = &r->inbox_first;
    return first;
}

static void run_tags(struct rpc_tag *t)
{
    if (t == NULL) return;
    struct td_rpc *r = t->rpc;
    r->is_delivering = true;
    while (t != NULL) {
        struct rpc_tag *next = t->next;
        r->n_in_flight--;
        t->done(t, t->ok);
        t = next;
    }
    r->is_delivering = false;
}

/* A wake that is still posted when its td_rpc ends, kept until the loop delivers it (or drops it with itself). */
static struct rpc_wake *retired[64];
static pthread_mutex_t retired_lock = PTHREAD_MUTEX_INITIALIZER;

static void retire_wake(struct rpc_wake *w)
{
    w->rpc = NULL;
    pthread_mutex_lock(&retired_lock);
    for (unsigned i = 0; i < TD_COUNT(retired); i++)
        if (retired[i] == NULL) {
            retired[i] = w;
            break;
        }
    pthread_mutex_unlock(&retired_lock);
}

static void free_retired_wake(struct rpc_wake *w)
{
    pthread_mutex_lock(&retired_lock);
    for (unsigned i = 0; i < TD_COUNT(retired); i++)
        if (retired[i] == w) retired[i] = NULL;
    pthread_mutex_unlock(&retired_lock);
    free(w);
}

static void on_wake(struct td_mail *m)
{
    struct rpc_wake *w = TD_CONTAINER_OF(m, struct rpc_wake, mail);
    struct td_rpc *r = w->rpc;
    if (r == NULL) {
        free_retired_wake(w);
        return;
    }
    pthread_mutex_lock(&r->inbox_lock);
    w->is_posted = false;
    struct rpc_tag *t = take_inbox(r);
    pthread_mutex_unlock(&r->inbox_lock);
    run_tags(t);
}

static void flush_dirty(struct td_rpc *r)
{
    while (!td_list_is_empty(&r->dirty)) {
        struct td_rpc_call *c = TD_LIST_ENTRY(r->dirty.next, struct td_rpc_call, dirty_link);
        td_list_remove(&c->dirty_link);
        rpc_call_flush(c);
    }
}

static void before_block(struct td_loop_idle *i) { flush_dirty(TD_CONTAINER_OF(i, struct td_rpc, idle)); }

/* For destroy, while the loop does not run: plays the loop's part until core holds no tag of ours. */
void rpc_drain_until_idle(struct td_rpc *r)
{
    for (;;) {
        flush_dirty(r);
        if (r->n_in_flight == 0) return;
        pthread_mutex_lock(&r->inbox_lock);
        while (r->inbox_first == NULL) pthread_cond_wait(&r->inbox_filled, &r->inbox_lock);
        struct rpc_tag *t = take_inbox(r);
        pthread_mutex_unlock(&r->inbox_lock);
        run_tags(t);
    }
}

/* --- life -------------------------------------------------------------------------------------------------- */
static enum td_status start_pollers(struct td_rpc *r)
{
    for (; r->n_pollers < RPC_N_POLLERS; r->n_pollers++) {
        if (pthread_create(&r->pollers[r->n_pollers], NULL, poll_completions, r) != 0) return TD_E_NO_MEMORY;
        pthread_setname_np(r->pollers[r->n_pollers], "rpc-poller");
    }
    return TD_OK;
}

enum td_status td_rpc_create(struct td_loop *loop, const struct td_rpc_options *o, struct td_rpc **out)
{
    enum td_status st = TD_E_NO_MEMORY;
    struct td_rpc *r = td_calloc(1, sizeof *r);
    if (r == NULL) return st;
    r->magic = RPC_MAGIC;
    r->loop = loop;
    if (o != NULL) r->opt = *o;
    if (r->opt.keepalive_ms == 0) r->opt.keepalive_ms = DEFAULT_KEEPALIVE_MS;
    if (r->opt.keepalive_timeout_ms == 0) r->opt.keepalive_timeout_ms = DEFAULT_KEEPALIVE_TIMEOUT_MS;
    if (r->opt.max_queued_bytes == 0) r->opt.max_queued_bytes = DEFAULT_MAX_QUEUED_BYTES;
    if (r->opt.first_message_ms == 0) r->opt.first_message_ms = DEFAULT_FIRST_MESSAGE_MS;
    td_list_init(&r->dirty);
    td_list_init(&r->calls);
    td_list_init(&r->channels);
    td_list_init(&r->watchers);
    pthread_mutex_init(&r->inbox_lock, NULL);
    pthread_cond_init(&r->inbox_filled, NULL);
    r->inbox_last = &r->inbox_first;
    r->idle.before_block = before_block;
    td_loop_add_idle(loop, &r->idle);

    /* Signals are the loop's: no thread made here, by core or by us, may take one. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    gpr_set_log_function(on_grpc_log);
    gpr_set_log_verbosity(td_log_lowest() == TD_LOG_DEBUG ? GPR_LOG_SEVERITY_INFO : GPR_LOG_SEVERITY_ERROR);
    grpc_init();
    r->cq = grpc_completion_queue_create_for_next(NULL);
    r->wake = td_calloc(1, sizeof *r->wake);
    if (r->wake != NULL) {
        *r->wake = (struct rpc_wake){.mail.deliver = on_wake, .rpc = r};
        st = start_pollers(r);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (st != TD_OK) {
        td_rpc_destroy(r);
        return st;
    }
    *out = r;
    return TD_OK;
}

void td_rpc_destroy(struct td_rpc *r)
{
    if (r == NULL) return;
    TD_MAGIC_CHECK(r, RPC_MAGIC);
    TD_CHECK(!r->is_delivering);           /* not from inside a callback: the rest of the inbox is still to run */
    TD_CHECK(!r->is_shutdown_mail_posted); /* its done is still under way */
    r->is_destroying = true;
    TD_LIST_FOREACH (it, &r->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->channel != NULL) td_rpc_cancel(c);
    }
    rpc_server_stop(r);
    rpc_drain_until_idle(r);
    TD_CHECK(td_list_is_empty(&r->calls));
    while (!td_list_is_empty(&r->channels))
        td_rpc_channel_close(TD_LIST_ENTRY(r->channels.next, struct td_rpc_channel, link));

    grpc_completion_queue_shutdown(r->cq);
    for (uint32_t i = 0; i < r->n_pollers; i++) pthread_join(r->pollers[i], NULL);
    if (r->n_pollers == 0) /* creation failed: nobody drained it */
        while (grpc_completion_queue_next(r->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
               GRPC_QUEUE_SHUTDOWN) {
        }
    grpc_completion_queue_destroy(r->cq);
    grpc_shutdown();

    td_loop_remove_idle(r->loop, &r->idle);
    if (r->wake != NULL && r->wake->is_posted)
        retire_wake(r->wake);
    else
        free(r->wake);
    pthread_cond_destroy(&r->inbox_filled);
    pthread_mutex_destroy(&r->inbox_lock);
    r->magic = 0;
    free(r);
}
