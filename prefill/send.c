#include "prefill/send.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"

#define SEND_MAGIC 0x73656e64u /* "send" */

struct td_prefill_send {
    uint32_t magic;
    struct td_prefill_send_options o;
    struct td_xfer *x;
    struct td_tx *tx; /* NULL until started */
    char way[64];
};

enum td_status td_prefill_send_create(struct td_prefill_send **out)
{
    struct td_prefill_send *ps = td_calloc(1, sizeof *ps);
    if (ps == NULL) return TD_E_NO_MEMORY;
    ps->magic = SEND_MAGIC;
    *out = ps;
    return TD_OK;
}

enum td_status td_prefill_send_start(struct td_prefill_send *ps, struct td_xfer *x,
                                     const struct td_prefill_send_options *o)
{
    ps->o = *o;
    ps->x = x;
    struct td_tx_ports ports = {.env = o->env, .self = o->self, .xfer = o->xfer, .x = x, .ended = o->ended};
    return td_tx_create(&ports, &o->source, o->incarnation, &ps->tx);
}

void td_prefill_send_detach(struct td_prefill_send *ps)
{
    if (ps != NULL && ps->tx != NULL) td_tx_detach(ps->tx);
}

void td_prefill_send_destroy(struct td_prefill_send *ps)
{
    if (ps == NULL) return;
    td_tx_destroy(ps->tx);
    ps->magic = 0;
    free(ps);
}

static void on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    struct td_prefill_send *ps = user;
    (void)x;
    TD_MAGIC_CHECK(ps, SEND_MAGIC);
    if (ps->tx != NULL) td_tx_on_message(ps->tx, from, id, data, n);
}

static void on_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user)
{
    struct td_prefill_send *ps = user;
    (void)x;
    (void)peer; /* closed by the sender, whose it is */
    TD_MAGIC_CHECK(ps, SEND_MAGIC);
    TD_WARN("decode_worker_lost", "decode=%016" PRIx64, incarnation);
    td_metric_add(TD_M_xfer_peers_lost, 1);
    if (ps->tx != NULL) td_tx_on_peer_lost(ps->tx, incarnation);
}

struct td_xfer_handlers td_prefill_send_handlers(void)
{
    return (struct td_xfer_handlers){.on_message = on_message, .on_lost = on_lost};
}

struct td_tx *td_prefill_send_tx(const struct td_prefill_send *ps) { return ps->tx; }

/* What a descriptor says of its ranks, for the transfer and for the sender. */
struct ranks {
    struct td_xfer_remote pools[TD_MAX_RANKS * TD_KV_N_GROUPS];
    struct td_tx_remote_layout remote;
};

static enum td_status read_ranks(const struct td_descriptor *d, struct ranks *out, struct td_err *err)
{
    td_peer_rank_layout(d, 0, out->remote.kv);
    out->remote.n_ranks = d->n_ranks;
    for (uint32_t r = 0; r < d->n_ranks; r++) {
        const struct td_peer_rank *rank = &d->ranks[r], *first = &d->ranks[0];
        /* One way leads to all pools, see common/worker/start.c. */
        if (rank->n_address != first->n_address || memcmp(rank->address, first->address, rank->n_address) != 0)
            return td_err_set(err, TD_E_MISMATCH, "ranks.worker_address differs: one for all ranks here, not there");
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            out->pools[r * TD_KV_N_GROUPS + (uint32_t)g] = rank->pools[g];
            if (rank->n_pages[g] < out->remote.kv[g].n_pages) out->remote.kv[g].n_pages = rank->n_pages[g];
        }
    }
    return TD_OK;
}

enum td_status td_prefill_send_introduce(struct td_prefill_send *ps, uint64_t decode,
                                         const Tandem__V1__PeerDescriptor *m, struct td_err *err)
{
    struct td_descriptor d;
    struct ranks ranks;
    struct td_xfer_peer *peer;
    if (td_tx_peer(ps->tx, decode) != NULL) return TD_OK;
    if (m == NULL) return td_err_set(err, TD_E_UNKNOWN_PEER, "decode worker %016" PRIx64 " is not known here", decode);
    enum td_status st = td_descriptor_from_msg(m, &d, err);
    if (st != TD_OK) return st;
    if (d.incarnation != decode)
        return td_err_set(err, TD_E_INVALID,
                          "descriptor.incarnation %016" PRIx64 " is not that of the target, %016" PRIx64, d.incarnation,
                          decode);
    st = td_peer_layout_check(&ps->o.layout, &d.layout, err);
    if (st == TD_OK) st = read_ranks(&d, &ranks, err);
    if (st != TD_OK) {
        TD_WARN("decode_worker_refused", "decode=%016" PRIx64 " name=%s %s", decode, d.name, err->text);
        return st;
    }
    const struct td_peer_rank *r = &d.ranks[0];
    st = ps->o.xfer->peer_open(ps->x, decode, r->address, r->n_address, ranks.pools, d.n_ranks * TD_KV_N_GROUPS, &peer,
                               err);
    if (st != TD_OK) return td_err_prefix(err, st, "decode worker %s", d.name);
    st = td_tx_add_peer(ps->tx, decode, peer, &ranks.remote);
    if (st != TD_OK) {
        ps->o.xfer->peer_close(peer);
        return td_err_set(err, st, "no memory for decode worker %s", d.name);
    }
    const char *way = td_prefill_send_transport(ps, decode);
    TD_INFO("decode_worker_known",
            "decode=%016" PRIx64 " name=%s ranks=%u sliding_pages=%u full_pages=%u transport=\"%s\"", decode, d.name,
            d.n_ranks, ranks.remote.kv[TD_KV_SLIDING].n_pages, ranks.remote.kv[TD_KV_FULL].n_pages, way);
    td_metric_info("handoff_transport", "transport", way);
    return TD_OK;
}

const char *td_prefill_send_transport(struct td_prefill_send *ps, uint64_t decode)
{
    struct td_xfer_peer *peer = td_tx_peer(ps->tx, decode);
    if (peer == NULL) return "?";
    const char *name = ps->o.xfer->peer_transport(peer);
    if (!ps->o.is_staged) return name;
    snprintf(ps->way, sizeof ps->way, "%s staged", name);
    return ps->way;
}
