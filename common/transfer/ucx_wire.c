/* Peers as the transfer thread sees them: the only file that posts to UCX endpoints.
 *
 * The end of a peer, whichever way it comes (UCX's error callback, the pidfd of its process, its owner's close):
 *   1. closing and messages not flushed: flush, for at most DRAIN_MS, so that they leave
 *   2. cut: force the endpoint closed. UCX ends every request of it through its callback; until then source bytes stay
 * in use
 *   3. cut and no op left: the keys go; a loss or the close is told to the loop, once. */
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/ucx_int.h"

#define DRAIN_MS 200u

/* Flushes wait for the emulated puts before them; this one was the last such put, maybe. */
static void let_flushes_go(struct ucx_peer *p)
{
    TD_LIST_FOREACH_SAFE (it, &p->ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (op->item.kind == UCX_PUT && p->pools[op->pool].is_emulated) return;
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
    if (op->item.kind == UCX_PUT && p->pools[op->pool].is_emulated) let_flushes_go(p);
}

static enum td_status why_ended(const struct ucx_peer *p, ucs_status_t s)
{
    return p->is_failed ? TD_E_PEER_LOST : p->is_closing ? TD_E_CANCELED : td_ucx_status(s);
}

void td_ucx_wire_step(struct ucx_op *op, ucs_status_t s)
{
    if (s != UCS_OK && op->status == TD_OK) op->status = why_ended(op->peer, s);
    if (--op->n_left == 0 && op->n_unacked == 0) finish(op);
}

void td_ucx_wire_settle(struct ucx_op *op)
{
    if (op->n_left == 0 && op->n_unacked == 0) finish(op);
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
    if (!UCS_PTR_IS_ERR(r)) {
        op->n_left++;
        return true;
    }
    op->n_left++;
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

static bool has_emulated_put(const struct ucx_peer *p)
{
    TD_LIST_FOREACH (it, &p->ops) {
        const struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (op->item.kind == UCX_PUT && p->pools[op->pool].is_emulated) return true;
    }
    return false;
}

void td_ucx_wire_post(struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    if (op->item.kind == UCX_CLOSE) {
        p->is_closing = true;
        return;
    }
    td_list_push_back(&p->ops, &op->item.link);
    op->n_left = 1;
    if (p->is_failed || p->is_closing || p->ep == NULL) {
        op->status = p->is_failed ? TD_E_PEER_LOST : TD_E_CANCELED;
        finish(op);
        return;
    }
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_complete,
                                 .user_data = op};
    switch (op->item.kind) {
    case UCX_PUT:
        if (p->pools[op->pool].is_emulated)
            td_ucx_emulate_put(op);
        else
            post_put(op, &param);
        break;
    case UCX_FLUSH:
        if (has_emulated_put(p)) {
            op->is_waiting = true;
            op->n_left++;
        }
        follow(op, ucp_ep_flush_nbx(p->ep, &param));
        break;
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

void td_ucx_wire_died(struct ucx_peer *p, const char *how)
{
    if (p->is_failed) return;
    p->is_failed = true;
    TD_INFO("xfer_peer_died", "peer=%016llx how=\"%s\"", (unsigned long long)p->incarnation, how);
}

static void on_endpoint_failed(void *arg, ucp_ep_h ep, ucs_status_t s)
{
    (void)ep;
    td_ucx_wire_died(arg, ucs_status_string(s));
}

static void unwatch(struct ucx_peer *p)
{
    if (p->is_watched) epoll_ctl(p->x->epoll_fd, EPOLL_CTL_DEL, p->pidfd, NULL);
    p->is_watched = false;
    if (p->pidfd >= 0) close(p->pidfd);
    p->pidfd = -1;
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
        return td_ucx_err(err, s, "opening a way to the peer");
    }
    for (unsigned i = 0; i < p->n_pools; i++) {
        s = ucp_ep_rkey_unpack(p->ep, keys[i].rkey, &p->pools[i].rkey);
        if (s != UCS_OK) {
            p->pools[i].rkey = NULL;
            return td_ucx_err(err, s, "unpacking a pool's key");
        }
        td_ucx_find_path(p, &p->pools[i]);
    }
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
    p->drain_until_ns = td_clock_ns() + DRAIN_MS * TD_NS_PER_MS;
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
    if (p->ep == NULL) {
        p->is_cut = true;
        return;
    }
    ucs_status_ptr_t r = ucp_ep_close_nbx(p->ep, &param);
    if (UCS_PTR_IS_ERR(r))
        TD_WARN("xfer_close_failed", "peer=%016llx text=\"%s\"", (unsigned long long)p->incarnation,
                ucs_status_string(UCS_PTR_STATUS(r)));
    if (r == NULL || UCS_PTR_IS_ERR(r)) p->is_cut = true;
}

/* No acknowledgement will come any more. */
static void give_up_acks(struct ucx_peer *p)
{
    TD_LIST_FOREACH (it, &p->ops) { /* ending a put may end flushes behind it: start over each time */
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (op->n_unacked == 0) continue;
        op->n_unacked = 0;
        if (op->status == TD_OK) op->status = why_ended(p, UCS_ERR_CANCELED);
        if (op->n_left != 0) continue;
        td_ucx_wire_settle(op);
        give_up_acks(p);
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
        if (p->is_failed) {
            p->lost.kind = UCX_LOST;
            td_ucx_event(p->x, &p->lost);
        }
    }
    if (!p->is_closing) return;
    td_list_remove(&p->live_link);
    p->close_op.item.kind = UCX_CLOSE;
    p->close_op.peer = p;
    td_ucx_event(p->x, &p->close_op.item);
}

/* One step on, if it can go one; true: it is on its way to its end and not there. */
static bool step(struct ucx_peer *p, uint64_t now_ns)
{
    if (!p->is_failed && !p->is_closing) return false;
    if (!p->is_cutting) {
        if (p->is_unflushed && !p->is_failed && p->ep != NULL) drain(p);
        if (p->is_draining && !p->is_failed && now_ns < p->drain_until_ns) return true;
        cut(p);
    }
    if (p->is_cut) give_up_acks(p);
    if (!p->is_cut || p->is_draining || !td_list_is_empty(&p->ops)) return true;
    if (!p->is_finished || p->is_closing) tell(p);
    return false;
}

bool td_ucx_wire_round(struct ucx *x)
{
    bool is_busy = false;
    uint64_t now_ns = 0;
    TD_LIST_FOREACH_SAFE (it, &x->live) {
        struct ucx_peer *p = TD_LIST_ENTRY(it, struct ucx_peer, live_link);
        if (!p->is_failed && !p->is_closing) continue;
        if (now_ns == 0) now_ns = td_clock_ns();
        if (step(p, now_ns)) is_busy = true;
    }
    return is_busy;
}

void td_ucx_wire_close_all(struct ucx *x)
{
    TD_LIST_FOREACH (it, &x->live) TD_LIST_ENTRY(it, struct ucx_peer, live_link)->is_closing = true;
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
