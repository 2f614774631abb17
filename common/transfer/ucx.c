/* The real transfer. One thread owns the UCX worker and sleeps on its file descriptor together with an eventfd for
 * commands and a pidfd per peer on this machine. A round of it:
 *
 *   commands, and what the device has put -> progress until nothing moves -> peers that end go one step on -> events to
 * the loop -> arm -> sleep
 *
 * Arming fails while UCX still has events, and then another round is due: that is UCX's own busy polling while data
 * flows. It is bounded: after ARM_BUSY_MAX rounds in which nothing moved, the thread sleeps a millisecond all the same.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_int.h"

#define KEEPALIVE_MS_DEFAULT 200u
#define PROGRESS_MAX         64u   /* calls before commands and events get their turn */
#define ARM_BUSY_MAX         1000u /* seen up to 550,000 in a row under shared-memory traffic */
#define STOP_MS              3000u /* for a worker that does not let go of its endpoints */
#define SETTLE_MS            500u  /* for what UCX itself still has to send at the end */

struct start {
    struct ucx *x;
    sem_t finished;
    enum td_status status;
    struct td_err *err;
};

static void splice(struct td_list *to, struct td_list *from)
{
    if (td_list_is_empty(from)) return;
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    td_list_init(from);
}

/* --- loop thread to transfer thread --------------------------------------------------------------------------------
 */

void td_ucx_wake(struct ucx *x)
{
    uint64_t one = 1;
    ssize_t n;
    do n = write(x->wake_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
}

void td_ucx_command(struct ucx *x, struct ucx_item *item)
{
    pthread_mutex_lock(&x->lock);
    bool was_empty = td_list_is_empty(&x->commands);
    td_list_push_back(&x->commands, &item->link);
    pthread_mutex_unlock(&x->lock);
    if (was_empty) td_ucx_wake(x); /* else whoever made it non-empty did, and the thread has not looked yet */
}

void td_ucx_call(struct ucx *x, struct ucx_call *c)
{
    c->item.kind = UCX_CALL;
    c->x = x;
    sem_init(&c->finished, 0, 0);
    td_ucx_command(x, &c->item);
    while (sem_wait(&c->finished) != 0 && errno == EINTR) continue;
    sem_destroy(&c->finished);
}

/* Returns true when asked to stop. */
static bool take_commands(struct ucx *x)
{
    struct td_list taken, landed;
    td_list_init(&taken);
    td_list_init(&landed);
    pthread_mutex_lock(&x->lock);
    splice(&taken, &x->commands);
    splice(&landed, &x->landed);
    bool is_stopping = x->is_stopping;
    pthread_mutex_unlock(&x->lock);
    td_ucx_mapped_landed(&landed);
    while (!td_list_is_empty(&taken)) {
        struct ucx_item *item = TD_LIST_ENTRY(taken.next, struct ucx_item, link);
        td_list_remove(&item->link);
        if (item->kind == UCX_CALL) {
            struct ucx_call *c = TD_CONTAINER_OF(item, struct ucx_call, item);
            c->run(c);
            sem_post(&c->finished);
        } else {
            td_ucx_wire_post(TD_CONTAINER_OF(item, struct ucx_op, item));
        }
    }
    return is_stopping;
}

/* --- transfer thread to loop thread --------------------------------------------------------------------------------
 */

void td_ucx_event(struct ucx *x, struct ucx_item *item) { td_list_push_back(&x->out, &item->link); }

bool td_ucx_backlog_take(struct ucx *x, size_t n_bytes)
{
    struct ucx_mailbox *mb = x->mailbox;
    if (atomic_fetch_add_explicit(&mb->backlog_bytes, n_bytes, memory_order_relaxed) + n_bytes <= UCX_BACKLOG_MAX_BYTES)
        return true;
    td_ucx_backlog_give(mb, n_bytes);
    return false;
}

void td_ucx_backlog_give(struct ucx_mailbox *mb, size_t n_bytes)
{
    atomic_fetch_sub_explicit(&mb->backlog_bytes, n_bytes, memory_order_relaxed);
}

static void hand_over(struct ucx *x, bool with_mail)
{
    struct ucx_mailbox *mb = x->mailbox;
    if (td_list_is_empty(&x->out)) return;
    pthread_mutex_lock(&mb->lock);
    splice(&mb->events, &x->out);
    bool must_post = with_mail && !mb->is_posted;
    if (must_post) mb->is_posted = true;
    pthread_mutex_unlock(&mb->lock);
    if (must_post) td_loop_post(x->loop, &mb->mail);
}

static void deliver_item(struct ucx *x, struct ucx_item *item)
{
    if (item->kind != UCX_MESSAGE) {
        td_ucx_peer_deliver(x, item);
        return;
    }
    struct ucx_message *m = TD_CONTAINER_OF(item, struct ucx_message, item);
    td_ucx_backlog_give(x->mailbox, m->n + sizeof *m);
    if (!x->is_destroying) {
        x->stats.n_received++;
        td_ucx_emulate_see_written();
        if (x->handlers.on_message != NULL)
            x->handlers.on_message((struct td_xfer *)(void *)x, m->from, m->id, m->data, m->n, x->user);
    }
    free(m);
}

/* Mailboxes whose transfer is gone but whose mail the loop still holds. Kept reachable, for a loop that ends before it
 * delivers. Loop thread. */
static struct td_list orphans = {&orphans, &orphans};

static void free_mailbox(struct ucx_mailbox *mb)
{
    td_list_remove(&mb->orphan_link);
    pthread_mutex_destroy(&mb->lock);
    free(mb);
}

static void deliver(struct td_mail *mail)
{
    struct ucx_mailbox *mb = TD_CONTAINER_OF(mail, struct ucx_mailbox, mail);
    pthread_mutex_lock(&mb->lock);
    mb->is_posted = false;
    if (mb->x != NULL) splice(&mb->x->inbox, &mb->events);
    pthread_mutex_unlock(&mb->lock);
    mb->n_deliveries++;
    while (mb->x != NULL && !td_list_is_empty(&mb->x->inbox)) { /* any callback may destroy it */
        struct ucx_item *item = TD_LIST_ENTRY(mb->x->inbox.next, struct ucx_item, link);
        td_list_remove(&item->link);
        deliver_item(mb->x, item);
    }
    mb->n_deliveries--;
    if (mb->x == NULL && mb->n_deliveries == 0 && !mb->is_posted) free_mailbox(mb);
}

/* --- the thread ----------------------------------------------------------------------------------------------------
 */

static enum td_status start_worker(struct ucx *x, struct td_err *err)
{
    ucp_config_t *config;
    enum td_status st = td_ucx_config(x, &config, err);
    if (st != TD_OK) return st;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                           .name = "tandem"};
    ucs_status_t s = ucp_init(&params, config, &x->context);
    ucp_config_release(config);
    if (s != UCS_OK) {
        x->context = NULL;
        return td_err_set(err, td_ucx_status(s), "UCX does not start with transports \"%s\": %s",
                          x->tls != NULL ? x->tls : "all", ucs_status_string(s));
    }
    x->has_shared_memory = td_ucx_has_shared_memory(x->context);
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    s = ucp_worker_create(x->context, &wp, &x->worker);
    if (s != UCS_OK) {
        x->worker = NULL;
        ucp_cleanup(x->context);
        x->context = NULL;
        return td_ucx_err(err, s,
                          x->has_shared_memory ? "creating UCX's worker (over shared memory it needs some 5 MiB in "
                                                 "/dev/shm and 5 MiB in System V segments)"
                                               : "creating UCX's worker");
    }
    return TD_OK;
}

/* UCX's worker wants its receive queues in every kind of shared memory that it knows of, and gives up where one kind is
 * short, as /dev/shm in many containers. We go on with what is left; the pools say how fast that is. */
static enum td_status start_worker_with_what_fits(struct ucx *x, struct td_err *err)
{
    static const char *const left[] = {NULL, "^posix", "^posix,sysv"};
    enum td_status st = TD_E_INTERNAL;
    for (size_t i = 0; i < TD_COUNT(left); i++) {
        struct td_err why = {.text = ""};
        struct statvfs v;
        x->tls_left = left[i];
        st = start_worker(x, &why);
        if (st == TD_OK) return TD_OK;
        if (x->tls != NULL || !x->has_shared_memory || i + 1 == TD_COUNT(left))
            return td_err_set(err, st, "%s", why.text);
        uint64_t dev_shm = statvfs("/dev/shm", &v) == 0 ? (uint64_t)v.f_bavail * v.f_frsize : 0;
        TD_WARN("shared_memory_short", "dev_shm_free_bytes=%" PRIu64 " next=\"%s\" why=\"%s\"", dev_shm, left[i + 1],
                why.text);
    }
    return st;
}

static enum td_status set_up(struct ucx *x, struct td_err *err)
{
    enum td_status st = td_ucx_mapped_open(x, err);
    if (st == TD_OK) st = start_worker_with_what_fits(x, err);
    if (st != TD_OK) return st;
    ucs_status_t s;
    if ((s = ucp_worker_get_efd(x->worker, &x->ucx_fd)) != UCS_OK)
        return td_ucx_err(err, s, "getting UCX's file descriptor");
    struct epoll_event wake_event = {.events = EPOLLIN, .data.ptr = &x->wake_fd};
    struct epoll_event ucx_event = {.events = EPOLLIN, .data.ptr = &x->ucx_fd};
    if (epoll_ctl(x->epoll_fd, EPOLL_CTL_ADD, x->wake_fd, &wake_event) != 0 ||
        epoll_ctl(x->epoll_fd, EPOLL_CTL_ADD, x->ucx_fd, &ucx_event) != 0)
        return td_err_set(err, TD_E_IO, "epoll: %s", strerror(errno));
    if ((st = td_ucx_message_listen(x, err)) != TD_OK || (st = td_ucx_emulate_listen(x, err)) != TD_OK) return st;

    ucp_address_t *address;
    size_t n_address;
    if ((s = ucp_worker_get_address(x->worker, &address, &n_address)) != UCS_OK)
        return td_ucx_err(err, s, "getting our UCX address");
    struct td_card_address a = {
        .incarnation = x->incarnation, .worker = (const uint8_t *)address, .n_worker = (uint32_t)n_address};
    td_process_self(&a.process);
    td_card_pack_address(&a, &x->address);
    td_ucx_probe_open(x, &a);
    ucp_worker_release_address(x->worker, address);
    return x->address.failed ? td_err_set(err, TD_E_NO_MEMORY, "out of memory") : TD_OK;
}

static void sleep_until_something(struct ucx *x, int timeout_ms)
{
    struct epoll_event events[16];
    int n = epoll_wait(x->epoll_fd, events, (int)TD_COUNT(events), timeout_ms);
    for (int i = 0; i < n; i++) {
        void *p = events[i].data.ptr;
        if (p == &x->wake_fd) {
            uint64_t count;
            ssize_t got = read(x->wake_fd, &count, sizeof count);
            (void)got; /* non-blocking; what matters is that it is empty now */
        } else if (p != &x->ucx_fd) {
            td_ucx_wire_died(p);
        }
    }
}

/* Until asked to stop and every peer has let go. */
static void work(struct ucx *x)
{
    unsigned n_busy = 0;
    uint64_t stop_at_ns = TD_NEVER_NS;
    for (;;) {
        bool is_stopping = take_commands(x);
        unsigned n = 0;
        while (n < PROGRESS_MAX && ucp_worker_progress(x->worker) != 0) n++;
        int timeout_ms = td_ucx_wire_round(x, is_stopping);
        hand_over(x, true);
        if (is_stopping) {
            uint64_t now_ns = td_clock_ns();
            if (stop_at_ns == TD_NEVER_NS) stop_at_ns = now_ns + STOP_MS * TD_NS_PER_MS;
            if (td_list_is_empty(&x->live)) return;
            if (now_ns >= stop_at_ns) {
                TD_ERROR("xfer_stop_timeout", "ms=%u text=\"endpoints do not close; abandoned\"", STOP_MS);
                return;
            }
        }
        if (n != 0) {
            n_busy = 0;
            continue;
        }
        ucs_status_t s = ucp_worker_arm(x->worker);
        if (s == UCS_ERR_BUSY && ++n_busy < ARM_BUSY_MAX) continue;
        if (s != UCS_OK && s != UCS_ERR_BUSY) TD_ERROR("xfer_arm_failed", "text=\"%s\"", ucs_status_string(s));
        n_busy = 0;
        sleep_until_something(x, s != UCS_OK ? 1 : timeout_ms);
    }
}

/* Endpoints that peers opened to us have answers of UCX's own to send, which UCX 1.13 aborts on when the worker is
 * destroyed under them: the last of these may leave. False when they do not within SETTLE_MS. */
static bool settle(struct ucx *x)
{
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_ptr_t r = ucp_worker_flush_nbx(x->worker, &param);
    if (!UCS_PTR_IS_PTR(r)) return true; /* done, or refused: nothing is on its way */
    uint64_t until_ns = td_clock_ns() + SETTLE_MS * TD_NS_PER_MS;
    while (ucp_request_check_status(r) == UCS_INPROGRESS) {
        if (td_clock_ns() >= until_ns) return false;
        if (ucp_worker_progress(x->worker) != 0) continue;
        if (ucp_worker_arm(x->worker) == UCS_OK) sleep_until_something(x, 5);
    }
    ucp_request_free(r);
    return true;
}

static void *run(void *arg)
{
    struct start *start = arg;
    struct ucx *x = start->x;
    pthread_setname_np(pthread_self(), "td-transfer");
    enum td_status st = start->status = set_up(x, start->err);
    sem_post(&start->finished); /* start is gone from here on */
    if (st == TD_OK) work(x);
    bool is_settled = x->worker == NULL || settle(x);
    if (!is_settled)
        TD_WARN("xfer_not_settled", "ms=%u text=\"UCX's own messages do not leave; its worker ends with the process\"",
                SETTLE_MS);
    td_ucx_mapped_close(x);
    if (is_settled && x->worker != NULL) ucp_worker_destroy(x->worker);
    td_ucx_wire_abandon(x);
    TD_LIST_FOREACH_SAFE (it, &x->mapped) td_ucx_pool_unmap(TD_LIST_ENTRY(it, struct ucx_pool, map_link));
    if (is_settled && x->context != NULL) ucp_cleanup(x->context);
    hand_over(x, false);
    return NULL;
}

/* --- open and destroy ----------------------------------------------------------------------------------------------
 */

static void stop_thread(struct ucx *x)
{
    if (!x->has_thread) return;
    pthread_mutex_lock(&x->lock);
    x->is_stopping = true;
    pthread_mutex_unlock(&x->lock);
    td_ucx_wake(x);
    pthread_join(x->thread, NULL);
    x->has_thread = false;
}

/* After the thread: what it left, in order. Only done callbacks run. */
static void deliver_rest(struct ucx *x)
{
    struct ucx_mailbox *mb = x->mailbox;
    splice(&x->inbox, &mb->events);
    /* Commands that it did not see any more, but close commands: their peers go anyway. */
    while (!td_list_is_empty(&x->commands)) {
        struct ucx_item *item = TD_LIST_ENTRY(x->commands.next, struct ucx_item, link);
        td_list_remove(&item->link);
        if (item->kind == UCX_CLOSE) continue;
        TD_CONTAINER_OF(item, struct ucx_op, item)->status = TD_E_CANCELED;
        td_list_push_back(&x->inbox, &item->link);
    }
    while (!td_list_is_empty(&x->inbox)) {
        struct ucx_item *item = TD_LIST_ENTRY(x->inbox.next, struct ucx_item, link);
        td_list_remove(&item->link);
        deliver_item(x, item);
    }
}

static void ucx_destroy(struct td_xfer *xfer)
{
    if (xfer == NULL) return;
    struct ucx *x = ucx_of(xfer);
    TD_CHECK(!x->is_destroying);
    x->is_destroying = true;
    stop_thread(x);
    struct ucx_mailbox *mb = x->mailbox;
    if (mb != NULL) deliver_rest(x);
    TD_LIST_FOREACH_SAFE (it, &x->peers) td_ucx_free_peer(TD_LIST_ENTRY(it, struct ucx_peer, link));
    TD_LIST_FOREACH_SAFE (it, &x->pools) td_ucx_free_pool(TD_LIST_ENTRY(it, struct ucx_pool, link));
    td_ucx_free_ops(x);
    if (mb != NULL) {
        mb->x = NULL;
        td_list_push_back(&orphans, &mb->orphan_link);
        if (!mb->is_posted && mb->n_deliveries == 0) free_mailbox(mb);
    }
    if (x->wake_fd >= 0) close(x->wake_fd);
    if (x->epoll_fd >= 0) close(x->epoll_fd);
    pthread_mutex_destroy(&x->lock);
    td_buf_free(&x->address);
    free(x->tls);
    x->magic = 0;
    free(x);
}

static enum td_status start_thread(struct ucx *x, struct td_err *err)
{
    struct start start = {.x = x, .err = err};
    sem_init(&start.finished, 0, 0);
    /* Signals are the loop's. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = pthread_create(&x->thread, NULL, run, &start);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e != 0) {
        sem_destroy(&start.finished);
        return td_err_set(err, TD_E_NO_MEMORY, "cannot start the transfer thread: %s", strerror(e));
    }
    x->has_thread = true;
    while (sem_wait(&start.finished) != 0 && errno == EINTR) continue;
    sem_destroy(&start.finished);
    return start.status;
}

static enum td_status ucx_open(struct td_loop *loop, const struct td_xfer_options *o, const struct td_xfer_handlers *h,
                               void *user, struct td_xfer **out, struct td_err *err)
{
    enum td_status st = TD_E_NO_MEMORY;
    struct ucx *x = td_calloc(1, sizeof *x);
    if (x == NULL) return td_err_set(err, st, "out of memory");
    x->magic = UCX_MAGIC;
    x->loop = loop;
    if (h != NULL) x->handlers = *h;
    x->user = user;
    x->incarnation = o->incarnation;
    x->device = o->device;
    x->is_mapping_off = o->is_mapping_off;
    x->keepalive_ms = o->keepalive_ms == 0 ? KEEPALIVE_MS_DEFAULT : o->keepalive_ms;
    x->wake_fd = x->epoll_fd = -1;
    struct td_list *const lists[] = {&x->inbox, &x->free_ops, &x->peers,  &x->pools, &x->commands,
                                     &x->live,  &x->out,      &x->mapped, &x->landed};
    for (size_t i = 0; i < TD_COUNT(lists); i++) td_list_init(lists[i]);
    pthread_mutex_init(&x->lock, NULL);
    if (o->tls != NULL && o->tls[0] != 0 && (x->tls = td_strdup(o->tls)) == NULL) goto no_memory;
    struct ucx_mailbox *mb = td_calloc(1, sizeof *mb);
    if (mb == NULL) goto no_memory;
    mb->mail.deliver = deliver;
    mb->x = x;
    pthread_mutex_init(&mb->lock, NULL);
    td_list_init(&mb->events);
    td_list_init(&mb->orphan_link);
    x->mailbox = mb;
    x->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    x->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (x->wake_fd < 0 || x->epoll_fd < 0) {
        st = td_err_set(err, TD_E_IO, "no file descriptors for the transfer thread: %s", strerror(errno));
        goto out;
    }
    td_ucx_quieten();
    st = start_thread(x, err);
    if (st != TD_OK) goto out;
    *out = (struct td_xfer *)(void *)x;
    return TD_OK;
no_memory:
    td_err_set(err, TD_E_NO_MEMORY, "out of memory");
out:
    ucx_destroy((struct td_xfer *)(void *)x);
    return st;
}

static const void *ucx_address(struct td_xfer *x, size_t *n_out)
{
    *n_out = ucx_of(x)->address.n;
    return ucx_of(x)->address.data;
}

static void ucx_stats(const struct td_xfer *xfer, struct td_xfer_stats *out)
{
    struct ucx *x = ucx_of(xfer);
    *out = x->stats;
    out->is_deaf = atomic_load_explicit(&x->is_deaf, memory_order_relaxed);
    out->n_bad_messages = atomic_load_explicit(&x->n_bad_messages, memory_order_relaxed);
    out->n_dropped_messages = atomic_load_explicit(&x->n_dropped_messages, memory_order_relaxed);
}

const struct td_xfer_ops td_xfer_ucx = {
    .name = "ucx",
    .open = ucx_open,
    .destroy = ucx_destroy,
    .pool_create = td_ucx_pool_create,
    .pool_register = td_ucx_pool_register,
    .pool_register_device = td_ucx_pool_register_device,
    .pool_destroy = td_ucx_pool_destroy,
    .pool_base = td_ucx_pool_base,
    .address = ucx_address,
    .pool_key = td_ucx_pool_key,
    .peer_open = td_ucx_peer_open,
    .peer_close = td_ucx_peer_close,
    .put = td_ucx_put,
    .flush = td_ucx_flush,
    .send = td_ucx_send,
    .peer_transport = td_ucx_peer_transport,
    .peer_is_one_sided = td_ucx_peer_is_one_sided,
    .stats = ucx_stats,
};
