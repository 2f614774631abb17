/* What is under way in the twin.
 *
 *   put      after a delay, the source bytes are read and done runs, at one moment (so bytes changed before done show
 *            in what arrives); each segment then lands in the pool after a delay of its own
 *   flush    after a delay, once every put that was posted before has landed
 *   message  after a delay, never before an earlier message through the same peer; neither waits for puts nor they
 *            for it
 *
 * A put or flush to a dead node either succeeds into the void or hangs until the death is noticed. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/transfer/memory_int.h"

static uint64_t delay(struct memory_node *n)
{
    return td_memory_between(n, n->trouble.delay_min_ns, n->trouble.delay_max_ns);
}

/* --- the sender's end ----------------------------------------------------------------------------------------------
 */

static void free_op(struct memory_op *op)
{
    op->node->env->timer_stop(op->node->env, &op->timer);
    td_list_remove(&op->link);
    free(op);
}

/* Last thing its caller does: done may destroy the node. */
static void end_op(struct memory_op *op, enum td_status st)
{
    struct td_xfer_req *req = op->req;
    free_op(op);
    req->status = st;
    req->done(req, st);
}

static bool is_put_before(const struct memory_op *flush)
{
    TD_LIST_FOREACH (it, &flush->peer->ops) {
        const struct memory_op *op = TD_LIST_ENTRY(it, struct memory_op, link);
        if (op == flush) return false;
        if (op->kind == MEMORY_PUT) return true;
    }
    return false;
}

/* Flushes that waited for a put to land. */
static void try_flushes(uint64_t node, uint64_t peer)
{
    for (;;) {
        struct memory_peer *p = td_memory_find_peer(node, peer);
        struct memory_op *ready = NULL;
        if (p == NULL || p->n_landing != 0 || p->node->is_paused || p->node->is_dead) return;
        TD_LIST_FOREACH (it, &p->ops) {
            struct memory_op *op = TD_LIST_ENTRY(it, struct memory_op, link);
            if (op->kind != MEMORY_FLUSH || !op->is_due || op->is_hung) continue;
            if (!is_put_before(op)) ready = op;
            break;
        }
        if (ready == NULL) return;
        end_op(ready, TD_OK);
    }
}

static void on_arrival(struct td_timer *t);
static void on_copy(struct td_timer *t);

static struct memory_arrival *put_on_wire(struct memory_node *from, struct memory_node *to, enum memory_kind kind,
                                          const void *data, size_t n)
{
    struct memory_arrival *a = td_calloc(1, sizeof *a + n);
    if (a == NULL) return NULL;
    a->kind = kind;
    a->to = to;
    a->from_node = from->id;
    a->from_incarnation = from->incarnation;
    a->timer.fire = on_arrival;
    a->n = n;
    if (n != 0) memcpy(a->data, data, n);
    td_list_push_back(&to->arrivals, &a->link);
    return a;
}

static bool send_segment(struct memory_op *op, unsigned i, struct memory_node *to, bool is_counted)
{
    const struct td_xfer_seg *s = &op->segs[i];
    struct memory_arrival *a = put_on_wire(op->node, to, MEMORY_PUT, s->src, s->n_bytes);
    if (a == NULL) return false;
    a->from_peer = op->peer->id;
    a->pool = op->peer->pools[op->pool];
    a->offset = s->dst_offset;
    a->is_counted = is_counted;
    to->env->timer_start(to->env, &a->timer, delay(op->node));
    return true;
}

static void put_is_due(struct memory_op *op)
{
    struct memory_node *to = td_memory_find(op->peer->target);
    enum td_status st = TD_OK;
    if (to != NULL && !to->is_dead) {
        for (unsigned i = 0; i < op->n_segs && st == TD_OK; i++) {
            if (send_segment(op, i, to, true))
                op->peer->n_landing++;
            else
                st = TD_E_NO_MEMORY;
        }
    }
    uint64_t node = op->node->id, peer = op->peer->id;
    end_op(op, st);
    try_flushes(node, peer); /* a put of nothing, or to the dead, lands at once */
}

static void on_op_due(struct td_timer *t)
{
    struct memory_op *op = TD_CONTAINER_OF(t, struct memory_op, timer);
    if (op->node->is_paused) {
        op->is_due = true;
        return;
    }
    if (op->peer == NULL) {
        end_op(op, TD_E_CANCELED);
        return;
    }
    struct memory_node *to = td_memory_find(op->peer->target);
    if ((to == NULL || to->is_dead) && td_memory_chance(op->node, op->node->trouble.hang_put_ppm)) {
        op->is_hung = true;
        return;
    }
    if (op->kind == MEMORY_PUT) {
        put_is_due(op);
        return;
    }
    op->is_due = true;
    try_flushes(op->node->id, op->peer->id);
}

static enum td_status may_post(const struct memory_peer *p)
{
    if (p->node->is_destroying) return TD_E_CANCELED;
    return p->is_lost ? TD_E_PEER_LOST : TD_OK;
}

static enum td_status post(struct memory_peer *p, enum memory_kind kind, unsigned pool, const struct td_xfer_seg *segs,
                           unsigned n_segs, struct td_xfer_req *req)
{
    struct memory_op *op = td_calloc(1, sizeof *op + n_segs * sizeof *segs);
    if (op == NULL) return TD_E_NO_MEMORY;
    op->kind = kind;
    op->node = p->node;
    op->peer = p;
    op->req = req;
    op->timer.fire = on_op_due;
    op->pool = pool;
    op->n_segs = n_segs;
    if (n_segs != 0) memcpy(op->segs, segs, n_segs * sizeof *segs);
    req->status = TD_IN_PROGRESS;
    td_list_push_back(&p->ops, &op->link);
    if (!p->node->is_dead) p->node->env->timer_start(p->node->env, &op->timer, delay(p->node));
    return TD_OK;
}

enum td_status td_memory_put(struct td_xfer_peer *peer, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                             struct td_xfer_req *req)
{
    struct memory_peer *p = memory_peer_of(peer);
    enum td_status st = may_post(p);
    if (st != TD_OK) return st;
    if (pool >= p->n_pools) return TD_E_INVALID;
    uint64_t n_bytes = p->n_bytes[pool], total = 0;
    for (unsigned i = 0; i < n_segs; i++) {
        if (segs[i].dst_offset > n_bytes || segs[i].n_bytes > n_bytes - segs[i].dst_offset) return TD_E_INVALID;
        if (segs[i].n_bytes != 0 && segs[i].src == NULL) return TD_E_INVALID;
        total += segs[i].n_bytes;
    }
    st = post(p, MEMORY_PUT, pool, segs, n_segs, req);
    if (st != TD_OK) return st;
    p->node->stats.n_puts++;
    p->node->stats.n_put_segs += n_segs;
    p->node->stats.put_bytes += total;
    return TD_OK;
}

enum td_status td_memory_flush(struct td_xfer_peer *peer, struct td_xfer_req *req)
{
    struct memory_peer *p = memory_peer_of(peer);
    enum td_status st = may_post(p);
    return st != TD_OK ? st : post(p, MEMORY_FLUSH, 0, NULL, 0, req);
}

enum td_status td_memory_send(struct td_xfer_peer *peer, uint8_t id, const void *data, size_t n)
{
    struct memory_peer *p = memory_peer_of(peer);
    enum td_status st = may_post(p);
    if (st != TD_OK) return st;
    if (n > TD_XFER_MESSAGE_MAX) return TD_E_TOO_LARGE;
    struct memory_node *from = p->node, *to = td_memory_find(p->target);
    from->stats.n_sent++;
    if (from->is_dead || to == NULL || to->is_dead) return TD_OK;
    if (td_memory_chance(from, from->trouble.lose_message_ppm)) return TD_OK;
    struct memory_arrival *a = put_on_wire(from, to, MEMORY_MESSAGE, data, n);
    if (a == NULL) return TD_E_NO_MEMORY;
    a->from_peer = p->id;
    a->message_id = id;
    to->env->timer_start(to->env, &a->timer, delay(from));
    if (!td_memory_chance(from, from->trouble.double_message_ppm)) return TD_OK;
    struct memory_arrival *copy = put_on_wire(from, to, MEMORY_COPY, data, n);
    if (copy == NULL) return TD_OK;
    copy->message_id = id;
    copy->timer.fire = on_copy;
    to->env->timer_start(to->env, &copy->timer, delay(from) * 8); /* overtakes, or is overtaken */
    return TD_OK;
}

/* --- the receiver's end --------------------------------------------------------------------------------------------
 */

static void free_arrival(struct memory_arrival *a)
{
    a->to->env->timer_stop(a->to->env, &a->timer);
    td_list_remove(&a->link);
    free(a);
}

static void land(struct memory_arrival *a)
{
    TD_LIST_FOREACH (it, &a->to->pools) {
        struct memory_pool *pool = TD_LIST_ENTRY(it, struct memory_pool, link);
        if (pool->id != a->pool) continue;
        uint8_t *at = pool->base + a->offset; /* bounds: checked against the key by put */
        if (a->to->watch != NULL)
            a->to->watch((struct td_xfer *)(void *)a->to, a->from_incarnation, at, a->n, a->data, a->to->watch_user);
        if (a->n != 0) memcpy(at, a->data, a->n);
        break;
    }
    uint64_t node = a->from_node, peer = a->from_peer;
    bool is_counted = a->is_counted;
    free_arrival(a);
    if (!is_counted) return;
    struct memory_peer *p = td_memory_find_peer(node, peer);
    if (p != NULL && --p->n_landing == 0) try_flushes(node, peer);
}

static void hand_over(struct memory_arrival *a)
{
    struct memory_node *to = a->to;
    td_list_remove(&a->link);
    to->stats.n_received++;
    if (to->handlers.on_message != NULL)
        to->handlers.on_message((struct td_xfer *)(void *)to, a->from_incarnation, a->message_id, a->data, a->n,
                                to->user);
    free(a);
}

static void on_copy(struct td_timer *t)
{
    struct memory_arrival *a = TD_CONTAINER_OF(t, struct memory_arrival, timer);
    if (a->to->is_paused)
        free_arrival(a); /* one copy fewer */
    else
        hand_over(a);
}

static struct memory_arrival *oldest_message(struct memory_arrival *like)
{
    TD_LIST_FOREACH (it, &like->to->arrivals) {
        struct memory_arrival *a = TD_LIST_ENTRY(it, struct memory_arrival, link);
        if (a->kind == MEMORY_MESSAGE && a->from_node == like->from_node && a->from_peer == like->from_peer) return a;
    }
    return like;
}

static void on_arrival(struct td_timer *t)
{
    struct memory_arrival *a = TD_CONTAINER_OF(t, struct memory_arrival, timer);
    if (a->kind == MEMORY_PUT) {
        land(a);
        return;
    }
    /* Messages do not overtake: the oldest of this peer goes first, whichever timer fired. */
    struct memory_arrival *first = oldest_message(a);
    struct td_env *env = a->to->env;
    env->timer_stop(env, &first->timer);
    if (first != a) env->timer_start(env, &a->timer, 1);
    if (first->to->is_paused) {
        td_list_remove(&first->link);
        td_list_push_back(&first->to->parked, &first->link);
    } else {
        hand_over(first);
    }
}

void td_memory_drop(struct memory_node *n)
{
    TD_LIST_FOREACH_SAFE (it, &n->arrivals) free_arrival(TD_LIST_ENTRY(it, struct memory_arrival, link));
    TD_LIST_FOREACH_SAFE (it, &n->parked) free_arrival(TD_LIST_ENTRY(it, struct memory_arrival, link));
    /* Who waits for a put to land here waits no more: it is to the dead now. */
    TD_LIST_FOREACH (it, &td_memory_nodes) {
        struct memory_node *other = TD_LIST_ENTRY(it, struct memory_node, link);
        TD_LIST_FOREACH (q, &other->peers) {
            struct memory_peer *p = TD_LIST_ENTRY(q, struct memory_peer, link);
            if (p->target == n->id) p->n_landing = 0;
        }
    }
}

/* --- pause, loss, cancel -------------------------------------------------------------------------------------------
 */

static void restart_due(struct memory_node *n, struct td_list *ops)
{
    TD_LIST_FOREACH (it, ops) {
        struct memory_op *op = TD_LIST_ENTRY(it, struct memory_op, link);
        if (op->is_due && !op->is_hung) n->env->timer_start(n->env, &op->timer, 0);
    }
}

void td_memory_resume(struct memory_node *n)
{
    TD_LIST_FOREACH (it, &n->peers) {
        struct memory_peer *p = TD_LIST_ENTRY(it, struct memory_peer, link);
        restart_due(n, &p->ops);
        if (p->is_notice_held) n->env->timer_start(n->env, &p->notice, 0);
        p->is_notice_held = false;
    }
    restart_due(n, &n->canceled);
    while (!td_list_is_empty(&n->parked)) { /* back to the front, the oldest foremost */
        struct memory_arrival *a = TD_LIST_ENTRY(n->parked.prev, struct memory_arrival, link);
        td_list_remove(&a->link);
        td_list_push_front(&n->arrivals, &a->link);
        n->env->timer_start(n->env, &a->timer, 0);
    }
}

static void on_notice(struct td_timer *t)
{
    struct memory_peer *p = TD_CONTAINER_OF(t, struct memory_peer, notice);
    struct memory_node *n = p->node;
    if (n->is_paused) {
        p->is_notice_held = true;
        return;
    }
    uint64_t node = n->id, peer = p->id;
    p->is_lost = true;
    while (!td_list_is_empty(&p->ops)) {
        end_op(TD_LIST_ENTRY(p->ops.next, struct memory_op, link), TD_E_PEER_LOST);
        if (td_memory_find_peer(node, peer) == NULL) return; /* closed, or the node destroyed, from within done */
    }
    n->stats.n_peers_lost++;
    if (n->handlers.on_lost != NULL)
        n->handlers.on_lost((struct td_xfer *)(void *)n, (struct td_xfer_peer *)(void *)p, p->incarnation, n->user);
}

void td_memory_watch(struct memory_peer *p)
{
    struct memory_node *n = p->node;
    if (n->is_dead || n->is_destroying || p->is_lost || p->notice.fire != NULL) return;
    p->notice.fire = on_notice;
    n->env->timer_start(n->env, &p->notice, td_memory_between(n, n->trouble.notice_min_ns, n->trouble.notice_max_ns));
}

void td_memory_cancel(struct memory_peer *p)
{
    TD_LIST_FOREACH_SAFE (it, &p->ops) {
        struct memory_op *op = TD_LIST_ENTRY(it, struct memory_op, link);
        td_list_remove(it);
        td_list_push_back(&p->node->canceled, it);
        op->peer = NULL;
        op->is_hung = op->is_due = false;
        if (!p->node->is_dead) p->node->env->timer_start(p->node->env, &op->timer, 0);
    }
}

void td_memory_cancel_now(struct memory_node *n)
{
    TD_LIST_FOREACH (it, &n->peers) td_memory_cancel(TD_LIST_ENTRY(it, struct memory_peer, link));
    while (!td_list_is_empty(&n->canceled))
        end_op(TD_LIST_ENTRY(n->canceled.next, struct memory_op, link), TD_E_CANCELED);
}

void td_memory_free_ops(struct td_list *ops)
{
    TD_LIST_FOREACH_SAFE (it, ops) free_op(TD_LIST_ENTRY(it, struct memory_op, link));
}

/* Of each put that was posted and not read yet, each segment is with the network already or never will be. */
static void half_send(struct memory_node *dead)
{
    TD_LIST_FOREACH (it, &dead->peers) {
        struct memory_peer *p = TD_LIST_ENTRY(it, struct memory_peer, link);
        struct memory_node *to = td_memory_find(p->target);
        TD_LIST_FOREACH (o, &p->ops) {
            struct memory_op *op = TD_LIST_ENTRY(o, struct memory_op, link);
            dead->env->timer_stop(dead->env, &op->timer);
            if (op->kind != MEMORY_PUT || op->is_hung || to == NULL || to->is_dead) continue;
            for (unsigned i = 0; i < op->n_segs; i++)
                if (td_memory_chance(dead, 500000)) (void)send_segment(op, i, to, false);
        }
        dead->env->timer_stop(dead->env, &p->notice);
    }
    TD_LIST_FOREACH (o, &dead->canceled)
        dead->env->timer_stop(dead->env, &TD_LIST_ENTRY(o, struct memory_op, link)->timer);
}

void td_memory_lose_wire(struct memory_node *dead)
{
    half_send(dead);
    /* Its messages arrive up to some point. */
    TD_LIST_FOREACH (it, &td_memory_nodes) {
        struct memory_node *to = TD_LIST_ENTRY(it, struct memory_node, link);
        bool is_lost = false;
        TD_LIST_FOREACH_SAFE (q, &to->arrivals) {
            struct memory_arrival *a = TD_LIST_ENTRY(q, struct memory_arrival, link);
            if (a->kind != MEMORY_MESSAGE || a->from_node != dead->id) continue;
            is_lost = is_lost || td_memory_chance(dead, 250000);
            if (is_lost) free_arrival(a);
        }
    }
    td_memory_drop(dead);
}
