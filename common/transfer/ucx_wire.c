/* Peers as the transfer thread sees them: the only file (with ucx_emulate.c) that posts to UCX endpoints.
 *
 * The end of a peer, whichever way it comes (UCX's error callback, the end of its process, its owner's close):
 *
 *   1. closing: puts and flushes that UCX has no part in end at once with CANCELED. Then what was sent may leave: over
 *      shared memory for at most DRAIN_MS, over TCP for as long as it takes, be it forever to a stopped process. (UCX
 *      1.13 crashes later on when a TCP endpoint with bytes to send is forced closed, and aborts at the other end when
 *      one is that has not been introduced yet.)
 *   2. cut: force the endpoint closed. UCX ends every request of it through its callback; until then source bytes stay
 *      in use. Puts that a device does for us end as they do always: memory that is mapped here stays, whatever became
 *      of the process that had it.
 *   3. cut and no op left: the keys go, and with them what was mapped through them; a loss or the close is told to the
 *      loop, once.
 *
 * A process that ended is left to UCX to notice for NOTICE_MS where it has a TCP connection (that takes a millisecond
 * or two, and suits UCX better); on shared memory it is cut at once. */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_int.h"

#define DRAIN_MS  200u
#define NOTICE_MS 100u

/* UCX's end of a flush: survives the op when that is canceled. */
struct ucx_flush {
    struct ucx_peer *peer;
    struct ucx_op *op;
};

/* --- ops -----------------------------------------------------------------------------------------------------------
 */

static bool is_emulated_put(const struct ucx_op *op)
{
    return op->item.kind == UCX_PUT && op->peer->pools[op->pool].is_emulated;
}

/* UCX's flush does not know of it: emulated, or by stores into mapped memory. */
static bool is_own_put(const struct ucx_op *op)
{
    return op->item.kind == UCX_PUT &&
           (op->peer->pools[op->pool].is_emulated || op->peer->pools[op->pool].here != NULL);
}

/* Flushes wait for our own puts before them; this one was the last such put, maybe. */
static void let_flushes_go(struct ucx_peer *p)
{
    TD_LIST_FOREACH_SAFE (it, &p->ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (is_own_put(op)) return;
        if (!op->is_waiting) continue;
        op->is_waiting = false;
        td_ucx_wire_step(op, UCS_OK);
    }
}

static void finish(struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    td_list_remove(&op->item.link);
    td_ucx_event(p->x, &op->item);
    if (is_own_put(op)) let_flushes_go(p);
}

static enum td_status why_ended(const struct ucx_peer *p, ucs_status_t s)
{
    return p->is_failed ? TD_E_PEER_LOST : p->is_closing ? TD_E_CANCELED : td_ucx_status(s);
}

void td_ucx_wire_settle(struct ucx_op *op)
{
    if (op->n_left == 0 && td_ucx_emulate_is_over(op)) finish(op);
}

void td_ucx_wire_step(struct ucx_op *op, ucs_status_t s)
{
    if (s != UCS_OK && op->status == TD_OK) op->status = why_ended(op->peer, s);
    op->n_left--;
    td_ucx_wire_settle(op);
}

static void on_complete(void *request, ucs_status_t s, void *user)
{
    ucp_request_free(request);
    td_ucx_wire_step(user, s);
}

/* What a ucp_*_nbx call returned: done, refused, or under way (then on_complete follows). */
static bool follow(struct ucx_op *op, ucs_status_ptr_t r)
{
    if (r == NULL) return true;
    op->n_left++;
    if (!UCS_PTR_IS_ERR(r)) return true;
    td_ucx_wire_step(op, UCS_PTR_STATUS(r));
    return false;
}

static void post_put(struct ucx_op *op, const ucp_request_param_t *param)
{
    const struct ucx_remote *r = &op->peer->pools[op->pool];
    for (unsigned i = 0; i < op->n_segs; i++) {
        const struct td_xfer_seg *s = &op->segs[i];
        if (s->n_bytes == 0) continue;
        if (!follow(op, ucp_put_nbx(op->peer->ep, s->src, s->n_bytes, r->base + s->dst_offset, r->rkey, param))) break;
    }
}

static void flush_is_over(struct ucx_flush *f, ucs_status_t s)
{
    struct ucx_op *op = f->op;
    f->peer->n_wire--;
    free(f);
    if (op == NULL) return;
    op->flush = NULL;
    td_ucx_wire_step(op, s);
}

static void on_flushed(void *request, ucs_status_t s, void *user)
{
    ucp_request_free(request);
    flush_is_over(user, s);
}

static bool has_own_put(const struct ucx_peer *p)
{
    TD_LIST_FOREACH (it, &p->ops)
        if (is_own_put(TD_LIST_ENTRY(it, struct ucx_op, item.link))) return true;
    return false;
}

static void post_flush(struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    if (has_own_put(p)) {
        op->is_waiting = true;
        op->n_left++;
    }
    if (p->is_all_mapped) return; /* that was all */
    struct ucx_flush *f = td_calloc(1, sizeof *f);
    if (f == NULL) {
        op->status = TD_E_NO_MEMORY;
        return;
    }
    *f = (struct ucx_flush){p, op};
    op->flush = f;
    op->n_left++;
    p->n_wire++;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_flushed,
                                 .user_data = f};
    ucs_status_ptr_t r = ucp_ep_flush_nbx(p->ep, &param);
    if (r == NULL || UCS_PTR_IS_ERR(r)) flush_is_over(f, UCS_PTR_STATUS(r));
}

void td_ucx_wire_post(struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    if (op->item.kind == UCX_CLOSE) {
        p->is_closing = true;
        return;
    }
    td_list_push_back(&p->ops, &op->item.link);
    if (p->is_failed || p->is_closing || p->ep == NULL) {
        op->status = p->is_failed ? TD_E_PEER_LOST : TD_E_CANCELED;
        op->is_all_sent = true;
        finish(op);
        return;
    }
    op->n_left = 1;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_complete,
                                 .user_data = op};
    switch (op->item.kind) {
    case UCX_PUT:
        if (is_emulated_put(op))
            td_ucx_emulate_put(op);
        else if (p->pools[op->pool].here != NULL)
            td_ucx_mapped_put(op);
        else
            post_put(op, &param);
        break;
    case UCX_FLUSH: post_flush(op); break;
    case UCX_SEND:
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_AM_SEND_FLAG_EAGER; /* the receiver never fetches from a sender that may be gone by then */
        p->is_unflushed = true;
        follow(op, ucp_am_send_nbx(p->ep, UCX_AM_MESSAGE, &op->header, sizeof op->header, op->data, op->n, &param));
        break;
    default: TD_CHECK(false);
    }
    td_ucx_wire_step(op, UCS_OK);
}

/* --- opening -------------------------------------------------------------------------------------------------------
 */

static void fail(struct ucx_peer *p, const char *how)
{
    if (p->is_failed) return;
    p->is_failed = true;
    TD_INFO("xfer_peer_died", "peer=%016llx how=\"%s\"", (unsigned long long)p->incarnation, how);
}

static void on_endpoint_failed(void *arg, ucp_ep_h ep, ucs_status_t s)
{
    (void)ep;
    fail(arg, ucs_status_string(s));
}

static void unwatch(struct ucx_peer *p)
{
    if (p->is_watched) epoll_ctl(p->x->epoll_fd, EPOLL_CTL_DEL, p->pidfd, NULL);
    p->is_watched = false;
    if (p->pidfd >= 0) close(p->pidfd);
    p->pidfd = -1;
}

void td_ucx_wire_died(struct ucx_peer *p)
{
    unwatch(p);
    p->died_ns = td_clock_ns();
}

/* Segments end with the process that made them: one that cannot be attached any more says that the peer is gone. (Or
 * that it lives in another IPC namespace, and then it is lost to us just the same.) */
static enum td_status open_failed(struct td_err *err, ucs_status_t s, const char *what)
{
    if (s != UCS_ERR_SHMEM_SEGMENT) return td_ucx_err(err, s, what);
    return td_err_set(err, TD_E_PEER_LOST, "%s: its shared memory cannot be attached", what);
}

enum td_status td_ucx_wire_open(struct ucx_peer *p, const struct td_card_address *a, const struct td_card_key *keys,
                                struct td_err *err)
{
    struct ucx *x = p->x;
    td_list_init(&p->ops);
    td_list_push_back(&x->live, &p->live_link);
    ucp_ep_params_t params = {
        .field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)a->worker,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_endpoint_failed, .arg = p},
    };
    ucs_status_t s = ucp_ep_create(x->worker, &params, &p->ep);
    if (s != UCS_OK) {
        p->ep = NULL;
        return open_failed(err, s, "opening a way to the peer");
    }
    for (unsigned i = 0; i < p->n_pools; i++) {
        s = ucp_ep_rkey_unpack(p->ep, keys[i].rkey, &p->pools[i].rkey);
        if (s != UCS_OK) {
            p->pools[i].rkey = NULL;
            return open_failed(err, s, "unpacking a pool's key");
        }
    }
    td_ucx_find_paths(p);
    td_ucx_emulate_hello(p);
    if (p->pidfd >= 0) {
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = p};
        p->is_watched = epoll_ctl(x->epoll_fd, EPOLL_CTL_ADD, p->pidfd, &e) == 0;
    }
    return TD_OK;
}

/* --- the end -------------------------------------------------------------------------------------------------------
 */

static void on_drained(void *request, ucs_status_t s, void *user)
{
    (void)s;
    struct ucx_peer *p = user;
    ucp_request_free(request);
    p->is_draining = false;
}

static void on_cut(void *request, ucs_status_t s, void *user)
{
    (void)s;
    struct ucx_peer *p = user;
    ucp_request_free(request);
    p->is_cut = true;
}

static void drain(struct ucx_peer *p)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_drained,
                                 .user_data = p};
    p->is_unflushed = false;
    ucs_status_ptr_t r = ucp_ep_flush_nbx(p->ep, &param);
    p->is_draining = r != NULL && !UCS_PTR_IS_ERR(r);
}

static void cut(struct ucx_peer *p)
{
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                                 .cb.send = on_cut,
                                 .user_data = p,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    p->is_cutting = true;
    unwatch(p);
    ucs_status_ptr_t r = p->ep == NULL ? NULL : ucp_ep_close_nbx(p->ep, &param);
    if (UCS_PTR_IS_ERR(r))
        TD_WARN("xfer_close_failed", "peer=%016llx text=\"%s\"", (unsigned long long)p->incarnation,
                ucs_status_string(UCS_PTR_STATUS(r)));
    if (r == NULL || UCS_PTR_IS_ERR(r)) p->is_cut = true;
}

/* Ends the puts and flushes whose end is ours to say: UCX holds nothing of the caller's for them. */
static void end_own_ops(struct ucx_peer *p)
{
    TD_LIST_FOREACH (it, &p->ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        bool is_put = is_emulated_put(op);
        if (!is_put && op->item.kind != UCX_FLUSH) continue;
        if (op->status == TD_OK) op->status = why_ended(p, UCS_ERR_CANCELED);
        if (op->flush != NULL) op->flush->op = NULL;
        op->is_all_sent = true;
        op->n_unacked = op->n_left = 0;
        finish(op); /* and maybe flushes behind it: start over */
        end_own_ops(p);
        return;
    }
}

static void tell(struct ucx_peer *p)
{
    if (!p->is_finished) {
        for (unsigned i = 0; i < p->n_pools; i++)
            if (p->pools[i].rkey != NULL) ucp_rkey_destroy(p->pools[i].rkey);
        p->ep = NULL;
        p->is_finished = true;
        if (p->is_failed && !p->is_tcp) td_ucx_probe_start(p->x);
        if (p->is_failed && p != &p->x->self) {
            p->lost.kind = UCX_LOST;
            td_ucx_event(p->x, &p->lost);
        }
    }
    if (!p->is_closing) return;
    td_list_remove(&p->live_link);
    if (p == &p->x->self) return;
    p->close_op.item.kind = UCX_CLOSE;
    p->close_op.peer = p;
    td_ucx_event(p->x, &p->close_op.item);
}

static bool is_quiet(const struct ucx_peer *p)
{
    return p->n_wire == 0 && !p->is_draining && td_list_is_empty(&p->ops);
}

/* Closing, and alive as far as we know: true while what was sent may still leave. */
static bool is_leaving(struct ucx_peer *p, bool is_stopping, uint64_t now_ns)
{
    if (p->ep == NULL) return false;
    if (p->drain_until_ns == 0) p->drain_until_ns = now_ns + DRAIN_MS * TD_NS_PER_MS;
    end_own_ops(p);
    if (p->is_unflushed) drain(p);
    if (is_quiet(p) && !(p->is_tcp && p->hello_ticket != 0)) return false;
    return (p->is_tcp && !is_stopping) || now_ns < p->drain_until_ns;
}

/* In how many ms to look again; -1: when something comes. */
static int step(struct ucx_peer *p, bool is_stopping, uint64_t now_ns)
{
    if (p->died_ns != 0 && !p->is_failed && (!p->is_tcp || now_ns - p->died_ns >= NOTICE_MS * TD_NS_PER_MS))
        fail(p, "its process ended");
    if (!p->is_failed && !p->is_closing) return p->died_ns != 0 ? (int)NOTICE_MS / 4 : -1;
    if (!p->is_cutting) {
        if (!p->is_failed && is_leaving(p, is_stopping, now_ns))
            return p->is_tcp && !is_stopping && p->died_ns == 0 ? -1 : 5;
        cut(p);
    }
    if (p->is_cut) end_own_ops(p);
    if (!p->is_cut || !is_quiet(p)) return 5; /* by progress alone; not everything of this wakes the descriptor */
    if (!p->is_finished || p->is_closing) tell(p);
    return -1;
}

int td_ucx_wire_round(struct ucx *x, bool is_stopping)
{
    int timeout_ms = -1;
    uint64_t now_ns = 0;
    TD_LIST_FOREACH_SAFE (it, &x->live) {
        struct ucx_peer *p = TD_LIST_ENTRY(it, struct ucx_peer, live_link);
        if (is_stopping) p->is_closing = true;
        if (!p->is_failed && !p->is_closing && p->died_ns == 0) continue;
        if (now_ns == 0) now_ns = td_clock_ns();
        int ms = step(p, is_stopping, now_ns);
        if (ms >= 0 && (timeout_ms < 0 || ms < timeout_ms)) timeout_ms = ms;
    }
    if (x->probe_due_ns != 0) {
        int ms = td_ucx_probe_round(x, now_ns != 0 ? now_ns : td_clock_ns());
        if (ms >= 0 && (timeout_ms < 0 || ms < timeout_ms)) timeout_ms = ms;
    }
    return timeout_ms;
}

void td_ucx_wire_abandon(struct ucx *x)
{
    TD_LIST_FOREACH_SAFE (it, &x->live) {
        struct ucx_peer *p = TD_LIST_ENTRY(it, struct ucx_peer, live_link);
        unwatch(p);
        TD_LIST_FOREACH_SAFE (o, &p->ops) {
            struct ucx_op *op = TD_LIST_ENTRY(o, struct ucx_op, item.link);
            td_list_remove(o);
            op->status = p->is_failed ? TD_E_PEER_LOST : TD_E_CANCELED;
            td_ucx_event(x, &op->item);
        }
        td_list_remove(it);
    }
}
