/* Peers as the loop thread sees them: it checks what callers ask, wraps it into ops, and hands what comes back to its
 * owner.
 *
 * A peer's life here: open -> (is_lost once the transfer thread has seen its death: puts, flushes and messages are
 * refused from then on; on_lost runs when the last op is back) -> is_closed (the owner let go) -> freed when the
 * transfer thread says so. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_int.h"

struct open_call {
    struct ucx_call call;
    struct ucx_peer *p;
    const struct td_card_address *address;
    const struct td_card_key *keys;
    enum td_status status;
    struct td_err *err;
};

static struct ucx_peer *peer_of(struct td_xfer_peer *p)
{
    struct ucx_peer *q = (struct ucx_peer *)(void *)p;
    TD_MAGIC_CHECK(q, UCX_PEER_MAGIC);
    return q;
}

/* --- ops -----------------------------------------------------------------------------------------------------------
 */

static struct ucx_op *take_op(struct ucx_peer *p, enum ucx_kind kind, struct td_xfer_req *req)
{
    struct ucx *x = p->x;
    struct ucx_op *op;
    if (td_list_is_empty(&x->free_ops)) {
        op = td_calloc(1, sizeof *op);
        if (op == NULL) return NULL;
        td_list_init(&op->item.link);
        td_list_init(&op->landed_link);
    } else {
        op = TD_LIST_ENTRY(x->free_ops.next, struct ucx_op, item.link);
        td_list_remove(&op->item.link);
    }
    op->item.kind = kind;
    op->peer = p;
    op->req = req;
    op->n_segs = 0;
    op->status = TD_OK;
    op->is_waiting = op->is_all_sent = false;
    op->flush = NULL;
    op->n_unacked = op->next_seg = 0;
    op->next_byte = 0;
    return op;
}

static void put_op_back(struct ucx *x, struct ucx_op *op)
{
    free(op->data);
    op->data = NULL;
    td_list_push_front(&x->free_ops, &op->item.link); /* the warmest first */
}

void td_ucx_free_ops(struct ucx *x)
{
    TD_LIST_FOREACH_SAFE (it, &x->free_ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        td_list_remove(it);
        free(op->segs);
        free(op);
    }
}

static enum td_status may_post(const struct ucx_peer *p)
{
    if (p->x->is_destroying) return TD_E_CANCELED;
    TD_CHECK(!p->is_closed);
    return p->is_lost ? TD_E_PEER_LOST : TD_OK;
}

static void post(struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    p->n_open++;
    if (op->req != NULL) op->req->status = TD_IN_PROGRESS;
    td_ucx_command(p->x, &op->item);
}

enum td_status td_ucx_put(struct td_xfer_peer *peer, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                          struct td_xfer_req *req)
{
    struct ucx_peer *p = peer_of(peer);
    enum td_status st = may_post(p);
    if (st != TD_OK) return st;
    if (pool >= p->n_pools) return TD_E_INVALID;
    uint64_t n_bytes = p->pools[pool].n_bytes, total = 0;
    for (unsigned i = 0; i < n_segs; i++) {
        if (segs[i].dst_offset > n_bytes || segs[i].n_bytes > n_bytes - segs[i].dst_offset) return TD_E_INVALID;
        if (segs[i].n_bytes != 0 && segs[i].src == NULL) return TD_E_INVALID;
        total += segs[i].n_bytes;
    }
    struct ucx_op *op = take_op(p, UCX_PUT, req);
    if (op == NULL) return TD_E_NO_MEMORY;
    if (n_segs > op->cap_segs) {
        struct td_xfer_seg *grown = td_realloc(op->segs, n_segs, sizeof *grown);
        if (grown == NULL) {
            put_op_back(p->x, op);
            return TD_E_NO_MEMORY;
        }
        op->segs = grown;
        op->cap_segs = n_segs;
    }
    if (n_segs != 0) memcpy(op->segs, segs, n_segs * sizeof *segs);
    op->n_segs = n_segs;
    op->pool = pool;
    p->x->stats.n_puts++;
    p->x->stats.n_put_segs += n_segs;
    p->x->stats.put_bytes += total;
    post(op);
    return TD_OK;
}

enum td_status td_ucx_flush(struct td_xfer_peer *peer, struct td_xfer_req *req)
{
    struct ucx_peer *p = peer_of(peer);
    enum td_status st = may_post(p);
    if (st != TD_OK) return st;
    struct ucx_op *op = take_op(p, UCX_FLUSH, req);
    if (op == NULL) return TD_E_NO_MEMORY;
    post(op);
    return TD_OK;
}

enum td_status td_ucx_send(struct td_xfer_peer *peer, uint8_t id, const void *data, size_t n)
{
    struct ucx_peer *p = peer_of(peer);
    enum td_status st = may_post(p);
    if (st != TD_OK) return st;
    if (n > TD_XFER_MESSAGE_MAX) return TD_E_TOO_LARGE;
    if (p->send_bytes + n > UCX_BACKLOG_MAX_BYTES) return TD_E_BUSY; /* alive or not, it has not read for long */
    struct ucx_op *op = take_op(p, UCX_SEND, NULL);
    if (op == NULL) return TD_E_NO_MEMORY;
    op->data = td_calloc(1, n);
    if (op->data == NULL) {
        put_op_back(p->x, op);
        return TD_E_NO_MEMORY;
    }
    if (n != 0) memcpy(op->data, data, n);
    op->n = n;
    op->header = (struct ucx_header){
        .magic = UCX_HEADER_MAGIC, .id = id, .version = UCX_HEADER_VERSION, .incarnation = p->x->incarnation};
    p->send_bytes += n;
    p->x->stats.n_sent++;
    post(op);
    return TD_OK;
}

/* --- what comes back -----------------------------------------------------------------------------------------------
 */

static void tell_loss(struct ucx_peer *p)
{
    struct ucx *x = p->x;
    if (!p->is_lost || p->is_loss_told || p->is_closed || p->n_open != 0 || x->is_destroying) return;
    p->is_loss_told = true;
    x->stats.n_peers_lost++;
    if (x->handlers.on_lost != NULL)
        x->handlers.on_lost((struct td_xfer *)(void *)x, (struct td_xfer_peer *)(void *)p, p->incarnation, x->user);
}

static void op_is_back(struct ucx *x, struct ucx_op *op)
{
    struct ucx_peer *p = op->peer;
    struct td_xfer_req *req = op->req;
    struct ucx_mailbox *mb = x->mailbox;
    enum td_status st = op->status;
    p->n_open--;
    if (op->item.kind == UCX_SEND) p->send_bytes -= op->n;
    put_op_back(x, op);
    if (req != NULL) {
        req->status = st;
        req->done(req, st); /* may destroy x, and with it the peer */
        if (mb->x == NULL) return;
    }
    tell_loss(p);
}

void td_ucx_peer_deliver(struct ucx *x, struct ucx_item *item)
{
    if (item->kind == UCX_LOST) {
        struct ucx_peer *p = TD_CONTAINER_OF(item, struct ucx_peer, lost);
        p->is_lost = true;
        tell_loss(p);
        return;
    }
    struct ucx_op *op = TD_CONTAINER_OF(item, struct ucx_op, item);
    if (item->kind != UCX_CLOSE) {
        op_is_back(x, op);
        return;
    }
    TD_CHECK(op->peer->n_open == 0); /* commands and events keep their order */
    if (op->peer->is_closed) td_ucx_free_peer(op->peer);
}

void td_ucx_free_peer(struct ucx_peer *p)
{
    td_list_remove(&p->link);
    p->magic = 0;
    free(p);
}

/* --- opening and closing -------------------------------------------------------------------------------------------
 */

static void open_call(struct ucx_call *call)
{
    struct open_call *c = TD_CONTAINER_OF(call, struct open_call, call);
    c->status = td_ucx_wire_open(c->p, c->address, c->keys, c->err);
}

static void close_peer(struct ucx_peer *p)
{
    p->is_closed = true;
    if (p->x->is_destroying) return; /* all of them are being closed */
    p->close_op.item.kind = UCX_CLOSE;
    p->close_op.peer = p;
    td_ucx_command(p->x, &p->close_op.item);
}

enum td_status td_ucx_peer_open(struct td_xfer *xfer, uint64_t incarnation, const void *address, size_t n_address,
                                const struct td_xfer_remote *pools, unsigned n_pools, struct td_xfer_peer **out,
                                struct td_err *err)
{
    struct ucx *x = ucx_of(xfer);
    struct td_card_address a;
    struct td_card_key keys[TD_XFER_POOLS_MAX];
    if (x->is_destroying) return TD_E_CANCELED;
    if (n_pools > TD_XFER_POOLS_MAX)
        return td_err_set(err, TD_E_INVALID, "%u pools; at most %d", n_pools, TD_XFER_POOLS_MAX);
    enum td_status st = td_card_read_address(address, n_address, &a, err);
    if (st != TD_OK) return st;
    if (a.incarnation != incarnation)
        return td_err_set(err, TD_E_MISMATCH, "the address is of incarnation %016llx, wanted is %016llx",
                          (unsigned long long)a.incarnation, (unsigned long long)incarnation);
    for (unsigned i = 0; i < n_pools; i++) {
        st = td_card_read_key(pools[i].key, pools[i].n_key, &keys[i], err);
        if (st != TD_OK) return td_err_prefix(err, st, "pool %u", i);
        if (keys[i].base != pools[i].base)
            return td_err_set(err, TD_E_MISMATCH, "pool %u: key is for base %llx, descriptor says %llx", i,
                              (unsigned long long)keys[i].base, (unsigned long long)pools[i].base);
    }
    int pidfd = -1;
    if (td_process_watch(&a.process, &pidfd) == TD_E_PEER_LOST)
        return td_err_set(err, TD_E_PEER_LOST, "process %u of incarnation %016llx is gone", a.process.pid,
                          (unsigned long long)incarnation);
    struct ucx_peer *p = td_calloc(1, sizeof *p);
    if (p == NULL) {
        if (pidfd >= 0) close(pidfd);
        return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    }
    p->magic = UCX_PEER_MAGIC;
    p->x = x;
    p->incarnation = incarnation;
    p->n_pools = n_pools;
    for (unsigned i = 0; i < n_pools; i++)
        p->pools[i] = (struct ucx_remote){
            .base = keys[i].base, .n_bytes = keys[i].n_bytes, .secret = keys[i].secret, .kind = keys[i].kind};
    p->pidfd = pidfd;
    td_list_push_back(&x->peers, &p->link);
    struct open_call c = {.call.run = open_call, .p = p, .address = &a, .keys = keys, .err = err};
    td_ucx_call(x, &c.call);
    if (c.status != TD_OK) {
        close_peer(p);
        return c.status;
    }
    *out = (struct td_xfer_peer *)(void *)p;
    return TD_OK;
}

void td_ucx_peer_close(struct td_xfer_peer *peer)
{
    struct ucx_peer *p = peer_of(peer);
    TD_CHECK(!p->is_closed);
    close_peer(p);
}

const char *td_ucx_peer_transport(struct td_xfer_peer *peer)
{
    struct ucx_peer *p = peer_of(peer);
    return p->n_pools != 0 ? p->pools[0].transport : "?";
}

bool td_ucx_peer_is_one_sided(struct td_xfer_peer *peer)
{
    struct ucx_peer *p = peer_of(peer);
    for (unsigned i = 0; i < p->n_pools; i++)
        if (!p->pools[i].is_one_sided) return false;
    return p->n_pools != 0;
}
