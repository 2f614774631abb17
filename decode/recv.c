#include "decode/recv.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/json.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"

#define MAX_PEERS 1024u /* beyond that the oldest that is gone or refused is forgotten */

struct peer {
    struct td_list link; /* oldest first */
    uint64_t incarnation;
    char name[128];
    struct td_xfer_peer *way; /* NULL: see status */
    enum td_status status;    /* OK, PEER_LOST, or why it was refused */
    char why[256];
};

struct td_decode_recv {
    const struct td_xfer_ops *ops;
    struct td_xfer *x;
    struct td_decode_worker *w;
    struct td_peer_layout layout;
    struct td_list peers;
    uint32_t n_peers;
};

enum td_status td_decode_recv_create(const struct td_xfer_ops *ops, const struct td_peer_layout *layout,
                                     struct td_decode_recv **out)
{
    struct td_decode_recv *rv = td_calloc(1, sizeof *rv);
    if (rv == NULL) return TD_E_NO_MEMORY;
    rv->ops = ops;
    rv->layout = *layout;
    td_list_init(&rv->peers);
    *out = rv;
    return TD_OK;
}

void td_decode_recv_start(struct td_decode_recv *rv, struct td_xfer *x, struct td_decode_worker *w)
{
    rv->x = x;
    rv->w = w;
}

static void forget(struct td_decode_recv *rv, struct peer *p)
{
    if (p->way != NULL) rv->ops->peer_close(p->way);
    td_list_remove(&p->link);
    rv->n_peers--;
    free(p);
}

void td_decode_recv_destroy(struct td_decode_recv *rv)
{
    if (rv == NULL) return;
    while (!td_list_is_empty(&rv->peers)) forget(rv, TD_LIST_ENTRY(rv->peers.next, struct peer, link));
    free(rv);
}

static struct peer *find(const struct td_decode_recv *rv, uint64_t incarnation)
{
    TD_LIST_FOREACH (it, &rv->peers) {
        struct peer *p = TD_LIST_ENTRY(it, struct peer, link);
        if (p->incarnation == incarnation) return p;
    }
    return NULL;
}

/* --- introductions ----------------------------------------------------------------------------------------- */

static bool make_room(struct td_decode_recv *rv)
{
    if (rv->n_peers < MAX_PEERS) return true;
    TD_LIST_FOREACH (it, &rv->peers) {
        struct peer *p = TD_LIST_ENTRY(it, struct peer, link);
        if (p->way != NULL) continue;
        forget(rv, p);
        return true;
    }
    return false;
}

static enum td_status open_way(struct td_decode_recv *rv, const struct td_descriptor *d, struct peer *p,
                               struct td_err *err)
{
    enum td_status st = td_peer_layout_check(&rv->layout, &d->layout, err);
    if (st != TD_OK) return st;
    /* Messages only: this side never writes into a prefill worker. */
    return rv->ops->peer_open(rv->x, d->incarnation, d->ranks[0].address, d->ranks[0].n_address, NULL, 0, &p->way, err);
}

void td_decode_recv_introduce(struct td_decode_recv *rv, const Tandem__V1__PeerDescriptor *m)
{
    struct td_err err = {0};
    struct td_descriptor *d = td_calloc(1, sizeof *d);
    enum td_status st = d == NULL ? TD_E_NO_MEMORY : td_descriptor_from_msg(m, d, &err);
    if (st != TD_OK) {
        TD_WARN("peer_not_understood", "status=%s why=\"%s\"", td_status_name(st), err.text);
        free(d);
        return;
    }
    struct peer *p = find(rv, d->incarnation);
    if (p != NULL &&
        (p->way != NULL || p->status == TD_E_PEER_LOST)) { /* every router introduces it; the dead stay dead */
        free(d);
        return;
    }
    if (p == NULL) {
        p = make_room(rv) ? td_calloc(1, sizeof *p) : NULL;
        if (p == NULL) {
            TD_WARN("peer_not_kept", "peer=%016" PRIx64 " peers=%u", d->incarnation, rv->n_peers);
            free(d);
            return;
        }
        p->incarnation = d->incarnation;
        td_list_push_back(&rv->peers, &p->link);
        rv->n_peers++;
    }
    snprintf(p->name, sizeof p->name, "%s", d->name);
    p->status = open_way(rv, d, p, &err);
    snprintf(p->why, sizeof p->why, "%.*s", (int)sizeof p->why - 1, err.text);
    free(d);
    uint64_t incarnation = p->incarnation;
    if (p->status != TD_OK) {
        TD_WARN("peer_refused", "peer=%016" PRIx64 " status=%s why=\"%s\"", incarnation, td_status_name(p->status),
                p->why);
        if (p->status == TD_E_PEER_LOST) td_decode_worker_on_peer_lost(rv->w, incarnation);
        return;
    }
    TD_INFO("peer_introduced", "peer=%016" PRIx64 " peers=%u", incarnation, rv->n_peers);
    td_decode_worker_on_peer_reachable(rv->w, incarnation);
}

enum td_status td_decode_recv_check(const struct td_decode_recv *rv, uint64_t prefill, struct td_err *err)
{
    const struct peer *p = find(rv, prefill);
    if (p == NULL)
        return td_err_set(err, TD_E_UNKNOWN_PEER, "prefill: incarnation %016" PRIx64 " was not introduced", prefill);
    if (p->status != TD_OK) return td_err_set(err, p->status, "prefill: %s", p->why);
    return TD_OK;
}

/* --- messages ---------------------------------------------------------------------------------------------- */

enum td_status td_decode_recv_send(struct td_decode_recv *rv, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    const struct peer *p = find(rv, prefill);
    if (p == NULL) return TD_E_UNKNOWN_PEER;
    if (p->way == NULL) return p->status;
    return rv->ops->send(p->way, id, data, n);
}

const char *td_decode_recv_transport(const struct td_decode_recv *rv, uint64_t prefill)
{
    const struct peer *p = find(rv, prefill);
    const char *name = p != NULL && p->way != NULL ? rv->ops->peer_transport(p->way) : "?";
    return strcmp(name, "?") == 0 ? "" : name; /* the sender knows better: it is the one that puts */
}

static void on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    struct td_decode_recv *rv = user;
    (void)x;
    if (rv->w != NULL) td_decode_worker_on_peer_message(rv->w, from, id, data, n);
}

static void on_lost(struct td_xfer *x, struct td_xfer_peer *way, uint64_t incarnation, void *user)
{
    struct td_decode_recv *rv = user;
    struct peer *p = find(rv, incarnation);
    (void)x;
    TD_CHECK(p != NULL && p->way == way);
    TD_WARN("peer_lost", "peer=%016" PRIx64, incarnation);
    td_metric_add(TD_M_xfer_peers_lost, 1);
    p->way = NULL;
    p->status = TD_E_PEER_LOST;
    snprintf(p->why, sizeof p->why, "its process is gone");
    rv->ops->peer_close(way);
    td_decode_worker_on_peer_lost(rv->w, incarnation);
}

struct td_xfer_handlers td_decode_recv_handlers(void)
{
    return (struct td_xfer_handlers){.on_message = on_message, .on_lost = on_lost};
}

void td_decode_recv_describe(const struct td_decode_recv *rv, struct td_buf *out)
{
    td_buf_str(out, "[");
    const char *comma = "";
    TD_LIST_FOREACH (it, &rv->peers) {
        const struct peer *p = TD_LIST_ENTRY(it, struct peer, link);
        td_buf_printf(out, "%s{\"incarnation\":\"%016" PRIx64 "\",\"name\":", comma, p->incarnation);
        td_json_quote_str(out, p->name);
        td_buf_printf(out, ",\"status\":\"%s\",\"why\":", td_status_name(p->status));
        td_json_quote_str(out, p->why);
        td_buf_str(out, "}");
        comma = ",";
    }
    td_buf_str(out, "]");
}
