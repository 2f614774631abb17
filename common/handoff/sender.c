/* The prefill worker's half of receiver.c's protocol.
 *
 * A send is OPEN while layers arrive: each becomes ranges of blocks, posted as puts as long as no more than
 * WINDOW_BYTES are in flight, so that a stop has little to wait for. Then it is CLOSING with an outcome: puts come to
 * rest, a flush makes them visible (FLUSHING), one message tells the receiver, and the owner gets his pages back.
 *
 *   outcome   set by                                     not yet posted   message     owner's status
 *   COMPLETE  td_tx_finish                               posted           COMPLETE    OK
 *   ABORTED   td_tx_abort, a put that failed             dropped          ABORTED     the reason
 *   STOPPED   the receiver's STOP                        dropped          STOPPED     STALE
 *   LOST      the receiver's process is known dead       dropped          none        PEER_LOST
 * A later row overrides an earlier one at any time.
 *
 * A flush that fails though the peer lives confirms nothing: no message goes out, and the receiver's next STOP flushes
 * again. STOP for a generation that is not in progress (never seen, or ended) is answered after a flush too, and
 * remembered.
 *
 * Receivers, the ways to them and answers to STOP are sender_peers.c. */
#include "common/handoff/sender.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/handoff/sender_int.h"
#include "common/metrics/metrics.h"

#define WINDOW_BYTES (64u << 20) /* in flight per send, unless told otherwise */
#define PUT_BYTES    (16u << 20) /* one put, unless a single page is larger */

static const char *const state_names[] = {
#define X(name) #name,
    TX_STATES(X)
#undef X
};
static const char *const outcome_names[] = {
#define X(name) #name,
    TX_OUTCOMES(X)
#undef X
};

/* A range of blocks of one layer: waiting to be posted for all target ranks, then in flight to one of them. */
struct put {
    struct td_xfer_req req;
    struct td_list link;
    struct td_tx_send *send;
    enum td_kv_group group;
    uint32_t layer, first, end; /* blocks */
    uint32_t rank;              /* in flight: the target's */
    uint64_t n_bytes;
};

static void advance(struct td_tx_send *s);

/* ---- puts ------------------------------------------------------------------------------------------------------- */

static void put_done(struct td_xfer_req *req, enum td_status st);

static struct put *put_take(struct td_tx *tx)
{
    struct put *p;
    if (!td_list_is_empty(&tx->free_puts)) {
        p = TD_LIST_ENTRY(tx->free_puts.next, struct put, link);
        td_list_remove(&p->link);
        memset(p, 0, sizeof *p);
    } else {
        p = td_calloc(1, sizeof *p);
        if (p == NULL) return NULL;
    }
    td_list_init(&p->link);
    p->req.done = put_done;
    return p;
}

static void put_give(struct td_tx *tx, struct put *p) { td_list_push_back(&tx->free_puts, &p->link); }

static void drop_waiting(struct td_tx_send *s)
{
    TD_LIST_FOREACH_SAFE (it, &s->waiting) {
        td_list_remove(it);
        put_give(s->tx, TD_LIST_ENTRY(it, struct put, link));
    }
    s->bytes_waiting = 0;
}

static void close_with(struct td_tx_send *s, enum tx_outcome outcome, enum td_status why)
{
    if (outcome <= s->outcome) return;
    TD_DEBUG("handoff_tx", "req=%s generation=%" PRIu64 " state=%s outcome=%s was=%s", s->holder, s->generation,
             state_names[s->state], outcome_names[outcome], outcome_names[s->outcome]);
    s->outcome = outcome;
    s->why = why;
    if (s->state == TX_OPEN) s->state = TX_CLOSING;
    if (outcome != OUT_COMPLETE) drop_waiting(s);
    td_tx_later(s->tx, &s->later);
}

/* Of all ranks together. */
static uint64_t page_bytes(const struct td_tx_send *s, enum td_kv_group g)
{
    return td_kv_page_bytes(&s->tx->src.kv[g]) * s->tx->src.n_ranks;
}

/* Posts blocks [first, end) of a waiting range to one target rank, from every source rank that has heads of its. */
static enum td_status post_to_rank(struct td_tx_send *s, const struct put *range, uint32_t first, uint32_t end,
                                   uint32_t rank)
{
    struct td_tx *tx = s->tx;
    enum td_kv_group g = range->group;
    const struct td_kv_group_layout *src = &tx->src.kv[g], *dst = &s->path->remote.kv[g];
    struct td_tx_geometry geo = {.src = src, .dst = dst, .dst_first_head = rank * dst->n_heads};
    uint32_t n = end - first, at = first - s->dst[g].first_block, n_segs = 0;
    uint32_t first_source = geo.dst_first_head / src->n_heads;
    uint32_t n_sources = (geo.dst_first_head + dst->n_heads - 1) / src->n_heads - first_source + 1;
    if (n * n_sources > tx->n_segs_max) {
        struct td_xfer_seg *segs = td_realloc(tx->segs, (size_t)n * n_sources, sizeof *segs);
        if (segs == NULL) return TD_E_NO_MEMORY;
        tx->segs = segs;
        tx->n_segs_max = n * n_sources;
    }
    struct put *p = put_take(tx);
    if (p == NULL) return TD_E_NO_MEMORY;
    p->send = s;
    p->group = g;
    p->layer = range->layer;
    p->first = first;
    p->end = end;
    p->rank = rank;
    for (uint32_t i = first_source; i < first_source + n_sources; i++) {
        uint64_t n_bytes;
        geo.src_base = tx->src.base[i][g];
        geo.src_first_head = i * src->n_heads;
        n_segs += td_tx_segments(&geo, range->layer, s->src_pages[g] + at, s->dst_pages[g] + at, n, tx->segs + n_segs,
                                 &n_bytes);
        p->n_bytes += n_bytes;
    }
    s->is_touched = true;
    enum td_status st =
        tx->ports.xfer->put(s->path->xp, rank * TD_KV_N_GROUPS + (unsigned)g, tx->segs, n_segs, &p->req);
    if (st != TD_OK) {
        put_give(tx, p);
        return st;
    }
    td_list_push_back(&tx->flying_puts, &p->link);
    s->n_in_flight++;
    s->bytes_in_flight += p->n_bytes;
    return TD_OK;
}

/* As many waiting puts as the window lets through. */
static void post_waiting(struct td_tx_send *s)
{
    struct td_tx *tx = s->tx;
    while (!td_list_is_empty(&s->waiting)) {
        struct put *p = TD_LIST_ENTRY(s->waiting.next, struct put, link);
        uint64_t page = page_bytes(s, p->group), n_fit = tx->put_bytes / page;
        if (n_fit == 0) n_fit = 1;
        uint64_t n = p->end - p->first < n_fit ? p->end - p->first : n_fit;
        if (s->n_in_flight > 0 && s->bytes_in_flight + n * page > tx->window_bytes) return;
        uint32_t first = p->first, end = first + (uint32_t)n;
        s->bytes_waiting -= n * page;
        enum td_status st = TD_OK;
        for (uint32_t r = 0; r < s->path->remote.n_ranks && st == TD_OK; r++) st = post_to_rank(s, p, first, end, r);
        if (st != TD_OK) {
            close_with(s, st == TD_E_PEER_LOST ? OUT_LOST : OUT_ABORTED, st);
            return;
        }
        p->first = end; /* the rest waits on */
        if (p->first < p->end) continue;
        td_list_remove(&p->link);
        put_give(tx, p);
    }
}

static void put_done(struct td_xfer_req *req, enum td_status st)
{
    struct put *p = TD_CONTAINER_OF(req, struct put, req);
    struct td_tx_send *s = p->send;
    td_list_remove(&p->link);
    s->n_in_flight--;
    s->bytes_in_flight -= p->n_bytes;
    if (st == TD_OK) {
        s->bytes_done += p->n_bytes;
        s->rank_bytes[p->rank] += p->n_bytes;
    } else {
        close_with(s, st == TD_E_PEER_LOST ? OUT_LOST : OUT_ABORTED, st);
    }
    put_give(s->tx, p);
    advance(s);
}

/* ---- the end of a send ------------------------------------------------------------------------------------------ */

static void finish(struct td_tx_send *s, enum td_status st)
{
    struct td_tx *tx = s->tx;
    tx->ports.env->timer_stop(tx->ports.env, &s->later);
    TD_DEBUG("handoff_tx_ended", "req=%s generation=%" PRIu64 " outcome=%s status=%s bytes=%" PRIu64, s->holder,
             s->generation, outcome_names[s->outcome], td_status_name(st), s->bytes_done);
    td_refused_add(&s->peer->refused, s->generation); /* a generation is used once */
    bool is_complete = s->outcome == OUT_COMPLETE && st == TD_OK;
    if (is_complete) {
        td_metric_add(TD_M_handoffs_completed, 1);
        td_metric_observe(TD_M_handoff_seconds, (double)(td_tx_now(tx) - s->finish_ns) / (double)TD_NS_PER_S);
    } else if (st != TD_OK) { /* OK: the first token ended the request, no KV was wanted */
        td_metric_add(TD_M_handoffs_failed, 1);
    }
    td_metric_add(TD_M_handoff_bytes, s->bytes_done);
    td_list_remove(&s->link);
    td_tx_path_drop(tx, s->path);
    tx->ports.ended(tx->ports.self, s, st, s->bytes_done);
    free(s);
}

/* Every put is at rest and visible there: tell the receiver. */
static void conclude(struct td_tx_send *s)
{
    struct td_wire m = {.to = s->peer->incarnation, .generation = s->generation};
    enum td_status st = TD_OK, sent;
    switch (s->outcome) {
    case OUT_COMPLETE:
        m.first_token = s->first_token;
        m.n_ranks = s->path->remote.n_ranks;
        memcpy(m.kv_bytes, s->rank_bytes, sizeof m.kv_bytes);
        /* Not sent: the receiver will ask to stop, so the Run must not be reported as done. */
        st = td_tx_tell(s->tx, s->path, TD_WIRE_COMPLETE, &m);
        break;
    case OUT_ABORTED:
        m.status = s->why;
        st = s->why == TD_OK ? TD_OK : s->why;
        sent = td_tx_tell(s->tx, s->path, TD_WIRE_ABORTED, &m);
        if (sent != TD_OK) TD_DEBUG("handoff_tx_untold", "req=%s status=%s", s->holder, td_status_name(sent));
        break;
    case OUT_STOPPED:
        st = TD_E_STALE;
        (void)td_tx_tell(s->tx, s->path, TD_WIRE_STOPPED, &m); /* not sent: asked again, answered again */
        break;
    default: st = TD_E_PEER_LOST; break;
    }
    finish(s, st);
}

static void flush_done(struct td_xfer_req *req, enum td_status st)
{
    struct td_tx_send *s = TD_CONTAINER_OF(req, struct td_tx_send, flush);
    if (st == TD_OK || s->outcome == OUT_LOST) {
        conclude(s);
        return;
    }
    if (st != TD_E_PEER_LOST)
        TD_WARN("handoff_flush_failed", "req=%s generation=%" PRIu64 " status=%s", s->holder, s->generation,
                td_status_name(st));
    finish(s, s->outcome == OUT_STOPPED ? TD_E_STALE : st);
}

/* s may be gone when this returns. */
static void advance(struct td_tx_send *s)
{
    struct td_tx *tx = s->tx;
    if (s->state == TX_FLUSHING) return; /* its done goes on */
    if (s->outcome <= OUT_COMPLETE) post_waiting(s);
    if (s->state == TX_OPEN || s->n_in_flight > 0 || !td_list_is_empty(&s->waiting)) return;
    if (s->outcome == OUT_LOST || !s->is_touched) {
        conclude(s);
        return;
    }
    s->state = TX_FLUSHING;
    s->flush.done = flush_done;
    enum td_status st = tx->ports.xfer->flush(s->path->xp, &s->flush);
    if (st != TD_OK) flush_done(&s->flush, st);
}

static void on_later(struct td_timer *t) { advance(TD_CONTAINER_OF(t, struct td_tx_send, later)); }

/* ---- owner ------------------------------------------------------------------------------------------------------ */

enum td_status td_tx_create(const struct td_tx_ports *ports, const struct td_tx_source *src, uint64_t incarnation,
                            struct td_tx **out)
{
    struct td_tx *tx = td_calloc(1, sizeof *tx);
    if (tx == NULL) return TD_E_NO_MEMORY;
    tx->ports = *ports;
    tx->src = *src;
    tx->incarnation = incarnation;
    tx->window_bytes = WINDOW_BYTES;
    tx->put_bytes = PUT_BYTES;
    tx->reaper.fire = td_tx_reap;
    td_list_init(&tx->sends);
    td_list_init(&tx->peers);
    td_list_init(&tx->paths);
    td_list_init(&tx->replies);
    td_list_init(&tx->free_puts);
    td_list_init(&tx->flying_puts);
    *out = tx;
    return TD_OK;
}

void td_tx_set_window(struct td_tx *tx, uint64_t window_bytes, uint64_t put_bytes)
{
    tx->window_bytes = window_bytes;
    tx->put_bytes = put_bytes;
}

void *td_tx_owner(const struct td_tx_send *s) { return s->owner; }

uint32_t td_tx_n_sends(const struct td_tx *tx)
{
    uint32_t n = 0;
    TD_LIST_FOREACH (it, &tx->sends) n++;
    return n;
}

/* The pages of a list lie within a pool. */
static bool pages_fit(const uint32_t *pages, uint32_t n, uint32_t n_pool, bool may_be_unknown)
{
    for (uint32_t i = 0; i < n; i++)
        if (pages[i] >= n_pool && !(may_be_unknown && pages[i] == UINT32_MAX)) return false;
    return true;
}

static bool lists_fit(const struct td_tx *tx, const struct td_tx_path *path,
                      const struct td_tx_pages src[TD_KV_N_GROUPS], const struct td_tx_pages dst[TD_KV_N_GROUPS])
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint64_t src_end = (uint64_t)src[g].first_block + src[g].n_pages;
        uint64_t dst_end = (uint64_t)dst[g].first_block + dst[g].n_pages;
        if (dst_end > UINT32_MAX || src[g].first_block > dst[g].first_block || src_end < dst_end) return false;
        if (!pages_fit(dst[g].pages, dst[g].n_pages, path->remote.kv[g].n_pages, false)) return false;
        if (!pages_fit(src[g].pages, src[g].n_pages, tx->src.kv[g].n_pages, true)) return false;
    }
    return true;
}

/* The receiver knows nothing below its lowest live generation: what is under way there must not write on. */
static void raise_floor(struct td_tx *tx, struct td_tx_life *p, uint64_t lowest_live)
{
    td_refused_raise_floor(&p->refused, lowest_live);
    TD_LIST_FOREACH (it, &tx->sends) {
        struct td_tx_send *s = TD_LIST_ENTRY(it, struct td_tx_send, link);
        if (s->peer == p && s->generation < lowest_live) close_with(s, OUT_STOPPED, TD_E_STALE);
    }
}

static struct td_tx_send *send_find(const struct td_tx *tx, const struct td_tx_life *p, uint64_t generation)
{
    TD_LIST_FOREACH (it, &tx->sends) {
        struct td_tx_send *s = TD_LIST_ENTRY(it, struct td_tx_send, link);
        if (s->peer == p && s->generation == generation) return s;
    }
    return NULL;
}

enum td_status td_tx_begin(struct td_tx *tx, uint64_t decode, uint64_t generation, uint64_t lowest_live,
                           const struct td_tx_pages src[TD_KV_N_GROUPS], const struct td_tx_pages dst[TD_KV_N_GROUPS],
                           const char *holder, void *owner, struct td_tx_send **out)
{
    struct td_tx_life *p = td_tx_peer_find(tx, decode);
    if (p == NULL || p->path == NULL || !p->path->has_pools) return TD_E_UNKNOWN_PEER;
    raise_floor(tx, p, lowest_live);
    if (td_refused_has(&p->refused, generation) || send_find(tx, p, generation) != NULL) return TD_E_STALE;
    if (!lists_fit(tx, p->path, src, dst)) return TD_E_INVALID;
    uint32_t n_layers = tx->src.kv[0].n_layers + tx->src.kv[1].n_layers;
    size_t n_words = (size_t)2 * dst[0].n_pages + (size_t)2 * dst[1].n_pages + n_layers;
    struct td_tx_send *s = td_calloc(1, sizeof *s + n_words * sizeof s->storage[0]);
    if (s == NULL) return TD_E_NO_MEMORY;
    s->tx = tx;
    s->peer = p;
    s->path = p->path;
    s->path->n_users++;
    s->generation = generation;
    s->owner = owner;
    s->later.fire = on_later;
    s->begun_ns = td_tx_now(tx);
    holder_copy(s->holder, holder);
    td_list_init(&s->waiting);
    uint32_t *at = s->storage;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t n = dst[g].n_pages, n_group_layers = tx->src.kv[g].n_layers;
        s->src[g] = (struct td_tx_pages){dst[g].first_block, n, at};
        s->src_pages[g] = at;
        if (n > 0) memcpy(at, src[g].pages + (dst[g].first_block - src[g].first_block), n * sizeof *at);
        at += n;
        s->dst[g] = (struct td_tx_pages){dst[g].first_block, n, at};
        s->dst_pages[g] = at;
        if (n > 0) memcpy(at, dst[g].pages, n * sizeof *at);
        at += n;
        s->ready_end[g] = at;
        for (uint32_t l = 0; l < n_group_layers; l++) s->ready_end[g][l] = dst[g].first_block;
        at += n_group_layers;
        s->blocks_left += (uint64_t)n * n_group_layers;
    }
    td_list_push_back(&tx->sends, &s->link);
    td_metric_add(TD_M_handoffs, 1);
    struct td_wire m = {.to = decode, .generation = generation};
    (void)td_tx_tell(tx, s->path, TD_WIRE_BEGUN, &m); /* only informs: COMPLETE counts without it */
    *out = s;
    return TD_OK;
}

void td_tx_set_source(struct td_tx_send *s, enum td_kv_group g, uint32_t block, uint32_t page)
{
    TD_CHECK(page < s->tx->src.kv[g].n_pages);
    if (block < s->src[g].first_block || block - s->src[g].first_block >= s->src[g].n_pages) return;
    s->src_pages[g][block - s->src[g].first_block] = page;
}

void td_tx_layer_ready(struct td_tx *tx, struct td_tx_send *s, uint32_t layer, enum td_kv_group g, uint32_t end_block)
{
    TD_CHECK(layer < tx->src.kv[g].n_layers);
    if (s->state != TX_OPEN) return;
    uint32_t last = s->dst[g].first_block + s->dst[g].n_pages, first = s->ready_end[g][layer];
    if (end_block > last) end_block = last;
    if (end_block <= first) return;
    for (uint32_t b = first; b < end_block; b++) TD_CHECK(s->src_pages[g][b - s->dst[g].first_block] != UINT32_MAX);
    struct put *p = put_take(tx);
    if (p == NULL) {
        close_with(s, OUT_ABORTED, TD_E_NO_MEMORY);
        return;
    }
    p->send = s;
    p->group = g;
    p->layer = layer;
    p->first = first;
    p->end = end_block;
    s->ready_end[g][layer] = end_block;
    s->bytes_waiting += (uint64_t)(end_block - first) * page_bytes(s, g);
    td_list_push_back(&s->waiting, &p->link);
    s->blocks_left -= end_block - first;
    if (s->blocks_left == 0)
        td_metric_observe(TD_M_handoff_tail_bytes, (double)(s->bytes_waiting + s->bytes_in_flight));
    post_waiting(s);
}

void td_tx_finish(struct td_tx *tx, struct td_tx_send *s, uint32_t first_token)
{
    if (s->blocks_left > 0 && s->state == TX_OPEN) {
        TD_ERROR("handoff_unfinished", "req=%s generation=%" PRIu64 " blocks=%" PRIu64 " were never ready", s->holder,
                 s->generation, s->blocks_left);
        close_with(s, OUT_ABORTED, TD_E_INTERNAL);
        return;
    }
    s->first_token = first_token;
    s->finish_ns = td_tx_now(tx);
    close_with(s, OUT_COMPLETE, TD_OK);
}

void td_tx_abort(struct td_tx *tx, struct td_tx_send *s, enum td_status why)
{
    (void)tx;
    close_with(s, OUT_ABORTED, why);
}

/* ---- the receiver ----------------------------------------------------------------------------------------------- */

static void on_stop(struct td_tx *tx, uint64_t from, const struct td_wire *m)
{
    struct td_tx_life *p = td_tx_peer_find(tx, from);
    if (p == NULL) p = td_tx_peer_make(tx, from);
    if (p == NULL) {
        TD_WARN("handoff_stop_unanswered", "decode=%016" PRIx64 " generation=%" PRIu64 " peers=%u", from, m->generation,
                tx->n_peers);
        return;
    }
    raise_floor(tx, p, m->lowest_live);
    struct td_tx_send *s = send_find(tx, p, m->generation);
    if (s != NULL) {
        close_with(s, OUT_STOPPED, TD_E_STALE);
        return;
    }
    td_refused_add(&p->refused, m->generation);
    if (p->path == NULL && m->address != NULL) {
        struct td_xfer_peer *xp;
        struct td_err err = {0};
        enum td_status st = tx->ports.xfer->peer_open(tx->ports.x, from, m->address, m->n_address, NULL, 0, &xp, &err);
        if (st == TD_OK && td_tx_path_set(tx, p, xp, NULL) != TD_OK) tx->ports.xfer->peer_close(xp);
        if (st != TD_OK)
            TD_WARN("handoff_stop_unanswered", "decode=%016" PRIx64 " status=%s %s", from, td_status_name(st),
                    err.text);
    }
    if (p->path != NULL) td_tx_answer(tx, p, m->generation);
}

void td_tx_on_message(struct td_tx *tx, uint64_t from, uint8_t id, const void *data, size_t n)
{
    struct td_wire m;
    struct td_err err;
    if (td_wire_decode(id, data, n, &m, &err) != TD_OK) {
        TD_WARN("handoff_bad_message", "from=%016" PRIx64 " %s", from, err.text);
        td_metric_add(TD_M_handoff_stale, 1);
        return;
    }
    if (id != TD_WIRE_STOP || m.to != tx->incarnation || from == 0) {
        TD_DEBUG("handoff_stale", "from=%016" PRIx64 " generation=%" PRIu64 " %s", from, m.generation,
                 td_wire_name(id));
        td_metric_add(TD_M_handoff_stale, 1);
        return;
    }
    on_stop(tx, from, &m);
}

void td_tx_on_peer_lost(struct td_tx *tx, uint64_t decode)
{
    struct td_tx_life *p = td_tx_peer_find(tx, decode);
    if (p == NULL) return;
    if (p->path != NULL) {
        td_tx_path_retire(tx, p->path);
        p->path = NULL;
    }
    TD_LIST_FOREACH (it, &tx->sends) {
        struct td_tx_send *s = TD_LIST_ENTRY(it, struct td_tx_send, link);
        if (s->peer == p) close_with(s, OUT_LOST, TD_E_PEER_LOST);
    }
}

void td_tx_detach(struct td_tx *tx)
{
    tx->is_detached = true;
    TD_LIST_FOREACH (it, &tx->sends) close_with(TD_LIST_ENTRY(it, struct td_tx_send, link), OUT_LOST, TD_E_CANCELED);
}

/* ---- end, and what people see ----------------------------------------------------------------------------------- */

void td_tx_destroy(struct td_tx *tx)
{
    if (tx == NULL) return;
    tx->ports.env->timer_stop(tx->ports.env, &tx->reaper);
    TD_LIST_FOREACH_SAFE (it, &tx->sends) {
        struct td_tx_send *s = TD_LIST_ENTRY(it, struct td_tx_send, link);
        tx->ports.env->timer_stop(tx->ports.env, &s->later);
        drop_waiting(s);
        free(s);
    }
    td_tx_drop_replies(tx);
    TD_LIST_FOREACH_SAFE (it, &tx->free_puts) free(TD_LIST_ENTRY(it, struct put, link));
    TD_LIST_FOREACH_SAFE (it, &tx->flying_puts) free(TD_LIST_ENTRY(it, struct put, link));
    TD_LIST_FOREACH_SAFE (it, &tx->paths) free(TD_LIST_ENTRY(it, struct td_tx_path, link));
    TD_LIST_FOREACH_SAFE (it, &tx->peers) td_tx_peer_free(tx, TD_LIST_ENTRY(it, struct td_tx_life, link));
    free(tx->segs);
    free(tx);
}

void td_tx_describe(const struct td_tx *tx, struct td_buf *out)
{
    td_buf_str(out, "{\"peers\":[");
    const char *comma = "";
    TD_LIST_FOREACH (it, &tx->peers) {
        const struct td_tx_life *p = TD_LIST_ENTRY(it, struct td_tx_life, link);
        const struct td_tx_path *path = tx->is_detached ? NULL : p->path;
        td_buf_printf(out,
                      "%s{\"incarnation\":\"%016" PRIx64
                      "\",\"path\":\"%s\",\"transport\":\"%s\",\"one_sided\":%s,\"refused_below\":%" PRIu64
                      ",\"refused_singly\":%u}",
                      comma, p->incarnation,
                      path == NULL      ? "lost"
                      : path->has_pools ? "open"
                                        : "messages only",
                      path == NULL ? "?" : tx->ports.xfer->peer_transport(path->xp),
                      path != NULL && tx->ports.xfer->peer_is_one_sided(path->xp) ? "true" : "false", p->refused.floor,
                      p->refused.n);
        comma = ",";
    }
    td_buf_str(out, "],\"sends\":[");
    comma = "";
    TD_LIST_FOREACH (it, &tx->sends) {
        const struct td_tx_send *s = TD_LIST_ENTRY(it, struct td_tx_send, link);
        td_buf_printf(out,
                      "%s{\"request\":\"%s\",\"decode\":\"%016" PRIx64 "\",\"generation\":%" PRIu64
                      ",\"state\":\"%s\",\"outcome\":\"%s\",\"age_ms\":%" PRIu64
                      ",\"puts_in_flight\":%u,\"bytes_in_flight\":%" PRIu64 ",\"bytes_waiting\":%" PRIu64
                      ",\"bytes_done\":%" PRIu64 ",\"blocks_left\":%" PRIu64 "}",
                      comma, s->holder, s->peer->incarnation, s->generation, state_names[s->state],
                      outcome_names[s->outcome], (uint64_t)((td_tx_now(tx) - s->begun_ns) / TD_NS_PER_MS),
                      s->n_in_flight, s->bytes_in_flight, s->bytes_waiting, s->bytes_done, s->blocks_left);
        comma = ",";
    }
    td_buf_str(out, "]}");
}
