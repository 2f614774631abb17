/* The receivers that a sender knows, the ways to them, and its answers to STOP for generations that are not in
 * progress.
 *
 * A *life* is one incarnation of a decode worker. It outlives the way to it, since it holds which generations were
 * refused. A *path* is a way; a new one replaces the old, which closes when its last user is gone. */
#include <stdlib.h>

#include "common/base/mem.h"
#include "common/handoff/sender_int.h"

#define MAX_PEERS   1024u /* lives of decode workers remembered; a STOP from one more is not answered */
#define MAX_REPLIES 4096u /* answers to STOP waiting for their flush */

/* An answer to STOP for a generation that is not in progress. */
struct reply {
    struct td_xfer_req req;
    struct td_list link;
    struct td_tx *tx;
    struct td_tx_path *path;
    uint64_t incarnation, generation;
};

/* ---- lives and paths -------------------------------------------------------------------------------------------- */

struct td_tx_life *td_tx_peer_find(const struct td_tx *tx, uint64_t incarnation)
{
    TD_LIST_FOREACH (it, &tx->peers) {
        struct td_tx_life *p = TD_LIST_ENTRY(it, struct td_tx_life, link);
        if (p->incarnation == incarnation) return p;
    }
    return NULL;
}

void td_tx_peer_free(struct td_tx *tx, struct td_tx_life *p)
{
    td_list_remove(&p->link);
    td_refused_deinit(&p->refused);
    free(p);
    tx->n_peers--;
}

static bool peer_is_used(const struct td_tx *tx, const struct td_tx_life *p)
{
    if (p->path != NULL) return true;
    TD_LIST_FOREACH (it, &tx->sends)
        if (TD_LIST_ENTRY(it, struct td_tx_send, link)->peer == p) return true;
    return false;
}

/* Makes room by forgetting the life that was lost first. */
struct td_tx_life *td_tx_peer_make(struct td_tx *tx, uint64_t incarnation)
{
    if (tx->n_peers == MAX_PEERS) {
        TD_LIST_FOREACH (it, &tx->peers) {
            struct td_tx_life *p = TD_LIST_ENTRY(it, struct td_tx_life, link);
            if (peer_is_used(tx, p)) continue;
            td_tx_peer_free(tx, p);
            break;
        }
        if (tx->n_peers == MAX_PEERS) return NULL;
    }
    struct td_tx_life *p = td_calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    p->incarnation = incarnation;
    td_list_push_back(&tx->peers, &p->link);
    tx->n_peers++;
    return p;
}

void td_tx_path_retire(struct td_tx *tx, struct td_tx_path *path)
{
    path->is_retired = true;
    if (path->n_users == 0) td_tx_later(tx, &tx->reaper);
}

void td_tx_path_drop(struct td_tx *tx, struct td_tx_path *path)
{
    TD_CHECK(path->n_users > 0);
    if (--path->n_users == 0 && path->is_retired) td_tx_later(tx, &tx->reaper);
}

void td_tx_reap(struct td_timer *t)
{
    struct td_tx *tx = TD_CONTAINER_OF(t, struct td_tx, reaper);
    TD_LIST_FOREACH_SAFE (it, &tx->paths) {
        struct td_tx_path *path = TD_LIST_ENTRY(it, struct td_tx_path, link);
        if (!path->is_retired || path->n_users > 0) continue;
        td_list_remove(&path->link);
        if (!tx->is_detached) tx->ports.xfer->peer_close(path->xp);
        free(path);
    }
}

enum td_status td_tx_path_set(struct td_tx *tx, struct td_tx_life *p, struct td_xfer_peer *xp,
                              const struct td_tx_remote_layout *remote)
{
    struct td_tx_path *path = td_calloc(1, sizeof *path);
    if (path == NULL) return TD_E_NO_MEMORY;
    path->xp = xp;
    path->has_pools = remote != NULL;
    if (remote != NULL) path->remote = *remote;
    td_list_push_back(&tx->paths, &path->link);
    if (p->path != NULL) td_tx_path_retire(tx, p->path);
    p->path = path;
    return TD_OK;
}

enum td_status td_tx_add_peer(struct td_tx *tx, uint64_t decode, struct td_xfer_peer *xp,
                              const struct td_tx_remote_layout *remote)
{
    struct td_tx_life *p = td_tx_peer_find(tx, decode);
    if (p == NULL) p = td_tx_peer_make(tx, decode);
    if (p == NULL) return TD_E_NO_MEMORY;
    return td_tx_path_set(tx, p, xp, remote);
}

static const struct td_tx_path *path_of(const struct td_tx *tx, uint64_t decode)
{
    const struct td_tx_life *p = td_tx_peer_find(tx, decode);
    return p != NULL && p->path != NULL && p->path->has_pools ? p->path : NULL;
}

struct td_xfer_peer *td_tx_peer(const struct td_tx *tx, uint64_t decode)
{
    const struct td_tx_path *path = path_of(tx, decode);
    return path != NULL ? path->xp : NULL;
}

const struct td_tx_remote_layout *td_tx_peer_layout(const struct td_tx *tx, uint64_t decode)
{
    const struct td_tx_path *path = path_of(tx, decode);
    return path != NULL ? &path->remote : NULL;
}

enum td_status td_tx_tell(struct td_tx *tx, struct td_tx_path *path, uint8_t id, const struct td_wire *m)
{
    struct td_buf b = {0};
    td_wire_encode(id, m, &b);
    enum td_status st = b.failed ? TD_E_NO_MEMORY : tx->ports.xfer->send(path->xp, id, b.data, b.n);
    td_buf_free(&b);
    return st;
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void reply_free(struct reply *r)
{
    td_list_remove(&r->link);
    r->tx->n_replies--;
    td_tx_path_drop(r->tx, r->path);
    free(r);
}

static void reply_flushed(struct td_xfer_req *req, enum td_status st)
{
    struct reply *r = TD_CONTAINER_OF(req, struct reply, req);
    struct td_wire m = {.to = r->incarnation, .generation = r->generation};
    if (st == TD_OK) (void)td_tx_tell(r->tx, r->path, TD_WIRE_STOPPED, &m); /* else: asked again */
    reply_free(r);
}

void td_tx_answer(struct td_tx *tx, struct td_tx_life *p, uint64_t generation)
{
    TD_LIST_FOREACH (it, &tx->replies) {
        const struct reply *r = TD_LIST_ENTRY(it, struct reply, link);
        if (r->incarnation == p->incarnation && r->generation == generation) return; /* on its way */
    }
    if (tx->n_replies >= MAX_REPLIES) return;
    struct reply *r = td_calloc(1, sizeof *r);
    if (r == NULL) return;
    r->tx = tx;
    r->path = p->path;
    r->path->n_users++;
    r->incarnation = p->incarnation;
    r->generation = generation;
    r->req.done = reply_flushed;
    td_list_push_back(&tx->replies, &r->link);
    tx->n_replies++;
    if (tx->ports.xfer->flush(r->path->xp, &r->req) != TD_OK) reply_free(r);
}

void td_tx_drop_replies(struct td_tx *tx)
{
    TD_LIST_FOREACH_SAFE (it, &tx->replies) free(TD_LIST_ENTRY(it, struct reply, link));
}
