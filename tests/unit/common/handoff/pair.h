/* Both ends of a hand-off in one process: a virtual clock, a transfer whose every operation the test lets happen, and
 * memory that is watched. Each page of the receiver remembers which generation may write it, so that a put into a page
 * that has been freed (or given to another generation) fails the test at once. Sources hold a pattern of (generation,
 * group, layer, block). */
#ifndef TESTS_HANDOFF_PAIR_H
#define TESTS_HANDOFF_PAIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "common/handoff/receiver.h"
#include "common/handoff/sender.h"
#include "common/handoff/wire.h"
#include "common/metrics/metrics.h"

#define WINDOW        6u
#define D_INC         0xd0d0d0d0ull
#define N_MAX_LAYERS  2u
#define N_DST_SLIDING 12u
#define N_DST_FULL    24u
#define MAX_REQ       512u

enum op_kind { OP_PUT, OP_FLUSH };
struct op { /* of the fake transfer, in the order posted */
    struct td_list link;
    enum op_kind kind;
    struct td_xfer_req *req;
    unsigned pool, n_segs;
    struct td_xfer_seg *segs;
    uint64_t *owners; /* of the destination pages when posted, one per 64-byte page written */
    uint32_t n_owners;
    struct pair *pair;
};
struct msg {
    struct td_list link;
    uint64_t from;
    uint8_t id;
    size_t n;
    uint8_t bytes[];
};

struct want { /* the test's request: owner of a reservation and of a send */
    struct pair *pair;
    uint32_t n_tokens, cached;
    uint64_t generation, prefill;
    struct td_rx_reservation *r;
    struct td_rx_target target;
    uint32_t pages[TD_KV_N_GROUPS][64];
    uint32_t src[TD_KV_N_GROUPS][64], n_src[TD_KV_N_GROUPS];
    struct td_tx_send *s;
    bool is_begun; /* the sender holds source pages */
    /* what was called */
    unsigned n_ready, n_failed, n_rx_ended, n_tx_ended;
    enum td_status failed_st, tx_st;
    uint64_t tx_bytes;
    struct td_rx_complete complete;
};

struct pair {
    struct td_env env; /* first */
    uint64_t now;
    struct td_list timers;
    uint64_t seed, n_drawn;
    struct td_rx *rx;
    struct td_kv_pages *kv;
    struct td_tx *tx;
    uint64_t p_inc;
    bool p_reachable; /* D can send to P */
    bool put_fails;
    uint64_t window_bytes, put_bytes; /* of the next sender; 0: its own */
    unsigned n_peer_closes, n_peer_opens;
    struct td_kv_group_layout layout[TD_KV_N_GROUPS], src_layout[TD_KV_N_GROUPS];
    uint8_t *dst[TD_KV_N_GROUPS], *src[TD_KV_N_GROUPS];
    uint64_t owner[TD_KV_N_GROUPS][64]; /* generation that may write this page; 0: none */
    bool src_used[TD_KV_N_GROUPS][256];
    struct td_list ops, to_d, to_p, peers;
    struct want wants[MAX_REQ];
    unsigned n_wants;
};

/* --- clock ----------------------------------------------------------------------------------------------------------
 */
static inline uint64_t pair_now(struct td_env *e) { return ((struct pair *)e)->now; }
static inline void pair_timer_stop(struct td_env *e, struct td_timer *t)
{
    (void)e;
    if (!t->is_armed) return;
    td_list_remove(&t->link);
    t->is_armed = false;
}
static inline void pair_timer_start(struct td_env *e, struct td_timer *t, uint64_t delay)
{
    struct pair *w = (struct pair *)e;
    pair_timer_stop(e, t);
    t->due_ns = w->now + delay;
    t->is_armed = true;
    td_list_push_back(&w->timers, &t->link);
}
static inline uint64_t draw(struct pair *w)
{
    uint32_t out[4];
    td_rng_philox(w->seed, w->n_drawn++, 0, out);
    return (uint64_t)out[0] << 32 | out[1];
}
static inline uint64_t pair_random(struct td_env *e) { return draw((struct pair *)e); }

/* Fires what is due until `ns` from now, in order. */
static inline void advance_ns(struct pair *w, uint64_t ns)
{
    uint64_t until = w->now + ns;
    for (;;) {
        struct td_timer *first = NULL;
        TD_LIST_FOREACH (it, &w->timers) {
            struct td_timer *t = TD_LIST_ENTRY(it, struct td_timer, link);
            if (t->due_ns <= until && (first == NULL || t->due_ns < first->due_ns)) first = t;
        }
        if (first == NULL) break;
        if (first->due_ns > w->now) w->now = first->due_ns;
        pair_timer_stop(&w->env, first);
        first->fire(first);
    }
    w->now = until;
}
static inline void advance_ms(struct pair *w, uint64_t ms) { advance_ns(w, ms * TD_NS_PER_MS); }
static inline void turn(struct pair *w) { advance_ns(w, 0); } /* what was put off to the next turn of the loop */

/* --- the fake transfer
 * ------------------------------------------------------------------------------------------------ */
struct td_xfer {
    struct pair *pair;
};
struct td_xfer_peer {
    struct td_list link; /* pair->peers */
    struct pair *pair;
};
static inline struct td_xfer_peer *fake_peer(struct pair *w)
{
    struct td_xfer_peer *p = calloc(1, sizeof *p);
    p->pair = w;
    td_list_push_back(&w->peers, &p->link);
    return p;
}

static inline uint32_t page_of_offset(const struct td_kv_group_layout *g, uint64_t off)
{
    return (uint32_t)(off % td_kv_layer_bytes(g) / td_kv_page_bytes(g));
}

static inline enum td_status fake_put(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs,
                                      unsigned n_segs, struct td_xfer_req *req)
{
    struct pair *w = p->pair;
    if (w->put_fails) return TD_E_PEER_LOST;
    struct op *op = calloc(1, sizeof *op);
    *op = (struct op){.kind = OP_PUT, .req = req, .pool = pool, .n_segs = n_segs, .pair = w};
    op->segs = calloc(n_segs, sizeof *segs);
    memcpy(op->segs, segs, n_segs * sizeof *segs);
    const struct td_kv_group_layout *g = &w->layout[pool];
    op->owners = calloc(256, sizeof *op->owners);
    for (unsigned i = 0; i < n_segs; i++) {
        assert_true(segs[i].dst_offset + segs[i].n_bytes <= td_kv_pool_bytes(g));
        for (uint64_t at = 0; at < segs[i].n_bytes; at += td_kv_page_bytes(g)) {
            uint64_t owner = w->owner[pool][page_of_offset(g, segs[i].dst_offset + at)];
            assert_int_not_equal(owner, 0); /* never put into a free page */
            op->owners[op->n_owners++] = owner;
        }
    }
    td_list_push_back(&w->ops, &op->link);
    return TD_OK;
}
static inline enum td_status fake_flush(struct td_xfer_peer *p, struct td_xfer_req *req)
{
    struct op *op = calloc(1, sizeof *op);
    *op = (struct op){.kind = OP_FLUSH, .req = req, .pair = p->pair};
    td_list_push_back(&p->pair->ops, &op->link);
    return TD_OK;
}
static inline void push_msg(struct td_list *q, uint64_t from, uint8_t id, const void *data, size_t n)
{
    struct msg *m = calloc(1, sizeof *m + n);
    m->from = from;
    m->id = id;
    m->n = n;
    memcpy(m->bytes, data, n);
    td_list_push_back(q, &m->link);
}
static inline enum td_status fake_send(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n)
{
    push_msg(&p->pair->to_d, p->pair->p_inc, id, data, n);
    return TD_OK;
}
static inline enum td_status fake_peer_open(struct td_xfer *x, uint64_t inc, const void *address, size_t n_address,
                                            const struct td_xfer_remote *pools, unsigned n_pools,
                                            struct td_xfer_peer **out, struct td_err *err)
{
    (void)inc, (void)pools, (void)n_pools, (void)err;
    assert_int_equal(n_address, 4);
    assert_memory_equal(address, "addr", 4);
    x->pair->n_peer_opens++;
    *out = fake_peer(x->pair);
    return TD_OK;
}
static inline void fake_peer_close(struct td_xfer_peer *p)
{
    p->pair->n_peer_closes++;
    td_list_remove(&p->link);
    free(p);
}
static const char *fake_transport(struct td_xfer_peer *p)
{
    (void)p;
    return "fake";
}
static inline bool fake_is_one_sided(struct td_xfer_peer *p)
{
    (void)p;
    return true;
}
static const struct td_xfer_ops fake_xfer = {
    .name = "fake",
    .put = fake_put,
    .flush = fake_flush,
    .send = fake_send,
    .peer_open = fake_peer_open,
    .peer_close = fake_peer_close,
    .peer_transport = fake_transport,
    .peer_is_one_sided = fake_is_one_sided,
};

/* Lets one posted operation happen. Puts may happen in any order; a flush only when no put before it is left. */
static inline void happen(struct pair *w, struct op *op, enum td_status st)
{
    td_list_remove(&op->link);
    uint32_t at_owner = 0;
    for (unsigned i = 0; op->kind == OP_PUT && i < op->n_segs; i++) {
        const struct td_kv_group_layout *g = &w->layout[op->pool];
        const struct td_xfer_seg *s = &op->segs[i];
        for (uint64_t at = 0; at < s->n_bytes; at += td_kv_page_bytes(g)) /* never written after it was given back */
            assert_int_equal(w->owner[op->pool][page_of_offset(g, s->dst_offset + at)], op->owners[at_owner++]);
        if (st == TD_OK) memcpy(w->dst[op->pool] + s->dst_offset, s->src, s->n_bytes);
    }
    struct td_xfer_req *req = op->req;
    free(op->segs);
    free(op->owners);
    free(op);
    req->done(req, st);
}
static inline bool happen_nth(struct pair *w, uint64_t nth)
{
    unsigned n = 0;
    bool before = false;
    TD_LIST_FOREACH (it, &w->ops) {
        struct op *op = TD_LIST_ENTRY(it, struct op, link);
        if (op->kind == OP_PUT) before = true;
        if (op->kind == OP_FLUSH && before) continue;
        n++;
    }
    if (n == 0) return false;
    nth %= n;
    before = false;
    TD_LIST_FOREACH (it, &w->ops) {
        struct op *op = TD_LIST_ENTRY(it, struct op, link);
        if (op->kind == OP_PUT) before = true;
        if (op->kind == OP_FLUSH && before) continue;
        if (nth-- == 0) {
            happen(w, op, TD_OK);
            return true;
        }
    }
    return false;
}
static inline unsigned n_ops(const struct pair *w)
{
    unsigned n = 0;
    TD_LIST_FOREACH (it, &w->ops) n++;
    return n;
}
static inline void happen_all(struct pair *w)
{
    do {
        while (happen_nth(w, 0)) {
        }
        turn(w);
    } while (!td_list_is_empty(&w->ops));
}

static inline bool deliver_to_d(struct pair *w)
{
    if (td_list_is_empty(&w->to_d)) return false;
    struct msg *m = TD_LIST_ENTRY(w->to_d.next, struct msg, link);
    td_list_remove(&m->link);
    td_rx_on_message(w->rx, m->from, m->id, m->bytes, m->n);
    free(m);
    return true;
}
static inline bool deliver_to_p(struct pair *w)
{
    if (td_list_is_empty(&w->to_p)) return false;
    struct msg *m = TD_LIST_ENTRY(w->to_p.next, struct msg, link);
    td_list_remove(&m->link);
    td_tx_on_message(w->tx, m->from, m->id, m->bytes, m->n);
    free(m);
    return true;
}
static inline void deliver_all(struct pair *w)
{
    while (deliver_to_d(w) || deliver_to_p(w)) {
    }
}
static inline void drop_messages(struct td_list *q)
{
    TD_LIST_FOREACH_SAFE (it, q) {
        td_list_remove(it);
        free(TD_LIST_ENTRY(it, struct msg, link));
    }
}
/* Everything that can happen without time passing. */
static inline void settle(struct pair *w)
{
    do {
        happen_all(w);
        deliver_all(w);
        turn(w);
    } while (!td_list_is_empty(&w->ops) || !td_list_is_empty(&w->to_d) || !td_list_is_empty(&w->to_p));
}

/* --- the receiver's owner
 * ----------------------------------------------------------------------------------------------- */
static inline uint8_t pattern(uint64_t generation, int g, uint32_t layer, uint32_t block, size_t i)
{
    return (uint8_t)(generation * 131 + (unsigned)g * 71 + layer * 37 + block * 17 + i);
}
static inline enum td_status rx_send(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    struct pair *w = self;
    if (!w->p_reachable || prefill != w->p_inc) return TD_E_UNAVAILABLE;
    push_msg(&w->to_p, D_INC, id, data, n);
    return TD_OK;
}
static inline void rx_ready(void *self, struct td_rx_reservation *r, const struct td_rx_complete *c)
{
    struct pair *w = self;
    struct want *q = td_rx_owner(r);
    assert_non_null(q);
    assert_int_equal(q->n_ready + q->n_failed + q->n_rx_ended, 0);
    q->n_ready++;
    q->complete = *c;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) /* every byte is there */
        for (uint32_t l = 0; l < w->layout[g].n_layers; l++)
            for (uint32_t i = 0; i < q->target.n_pages[g]; i++) {
                const uint8_t *at = w->dst[g] + td_kv_offset(&w->layout[g], l, q->pages[g][i], 0, false, 0);
                for (size_t b = 0; b < td_kv_page_bytes(&w->layout[g]); b++)
                    assert_int_equal(at[b], pattern(q->generation, g, l, q->target.first_block[g] + i, b));
            }
}
static inline void rx_failed(void *self, struct td_rx_reservation *r, enum td_status st, const char *why)
{
    (void)self;
    struct want *q = td_rx_owner(r);
    assert_non_null(why);
    assert_int_equal(q->n_ready + q->n_failed + q->n_rx_ended, 0);
    q->n_failed++;
    q->failed_st = st;
}
static inline void disown_pages(struct want *q)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t i = 0; i < q->target.n_pages[g]; i++) {
            assert_int_equal(q->pair->owner[g][q->pages[g][i]], q->generation);
            q->pair->owner[g][q->pages[g][i]] = 0;
        }
}
static inline void rx_ended(void *self, struct td_rx_reservation *r)
{
    (void)self;
    struct want *q = td_rx_owner(r);
    assert_int_equal(q->n_rx_ended, 0);
    q->n_rx_ended++;
    q->r = NULL;
    disown_pages(q); /* after READY too: nobody else may write them */
    if (q->n_ready)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) /* the sequence is short: its pages go back */
            for (uint32_t i = 0; i < q->target.n_pages[g]; i++) td_kv_pages_unref(q->pair->kv, g, q->pages[g][i]);
}

/* --- the sender's owner
 * ------------------------------------------------------------------------------------------------ */
static inline void tx_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes)
{
    struct pair *w = self;
    struct want *q = td_tx_owner(s);
    assert_int_equal(q->n_tx_ended, 0);
    q->n_tx_ended++;
    q->tx_st = st;
    q->tx_bytes = kv_bytes;
    q->s = NULL;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) /* the source pages are used for something else at once */
        for (uint32_t i = 0; i < q->n_src[g]; i++) {
            w->src_used[g][q->src[g][i]] = false;
            for (uint32_t l = 0; l < w->src_layout[g].n_layers; l++)
                memset(w->src[g] + td_kv_offset(&w->src_layout[g], l, q->src[g][i], 0, false, 0), 0xee,
                       td_kv_page_bytes(&w->src_layout[g]));
        }
}

/* --- building
 * ---------------------------------------------------------------------------------------------------------- */
static inline void pair_start_sender(struct pair *w, uint64_t incarnation)
{
    static struct td_xfer x;
    x.pair = w;
    struct td_tx_ports ports = {.env = &w->env, .self = w, .xfer = &fake_xfer, .x = &x, .ended = tx_ended};
    struct td_tx_source src = {.n_ranks = 1, .base = {{w->src[0], w->src[1]}}};
    memcpy(src.kv, w->src_layout, sizeof src.kv);
    w->p_inc = incarnation;
    assert_int_equal(td_tx_create(&ports, &src, incarnation, &w->tx), TD_OK);
    if (w->window_bytes > 0) td_tx_set_window(w->tx, w->window_bytes, w->put_bytes);
}
static inline void pair_introduce(struct pair *w)
{
    struct td_xfer_peer *peer = fake_peer(w);
    struct td_tx_remote_layout remote = {.n_ranks = 1};
    memcpy(remote.kv, w->layout, sizeof remote.kv);
    assert_int_equal(td_tx_add_peer(w->tx, D_INC, peer, &remote), TD_OK);
}
static inline struct pair *pair_create(uint64_t seed)
{
    struct pair *w = calloc(1, sizeof *w);
    w->env = (struct td_env){pair_now, pair_timer_start, pair_timer_stop, pair_random};
    w->seed = seed;
    w->now = 1000 * TD_NS_PER_S;
    td_list_init(&w->timers);
    td_list_init(&w->ops);
    td_list_init(&w->to_d);
    td_list_init(&w->to_p);
    td_list_init(&w->peers);
    struct td_kv_group_layout g = {.n_heads = 2, .head_dim = 2, .page_tokens = 4, .dtype = TD_BF16};
    for (int i = 0; i < TD_KV_N_GROUPS; i++) {
        w->layout[i] = w->src_layout[i] = g;
        w->layout[i].n_layers = w->src_layout[i].n_layers = i == TD_KV_SLIDING ? 1 : N_MAX_LAYERS;
        w->layout[i].n_pages = i == TD_KV_SLIDING ? N_DST_SLIDING : N_DST_FULL;
        w->src_layout[i].n_pages = 200;
        w->dst[i] = calloc(1, td_kv_pool_bytes(&w->layout[i]));
        w->src[i] = calloc(1, td_kv_pool_bytes(&w->src_layout[i]));
    }
    uint32_t n_pages[TD_KV_N_GROUPS] = {N_DST_SLIDING, N_DST_FULL};
    assert_int_equal(td_kv_pages_create(n_pages, &w->kv), TD_OK);
    struct td_rx_options o = {
        .incarnation = D_INC,
        .address = "addr",
        .n_address = 4,
        .window_tokens = WINDOW,
        .n_ranks = 1,
        .n_vocab = 1000,
        .quarantine_ms = 250,
        .stop_retry_ms = 1000,
    };
    memcpy(o.kv, w->layout, sizeof o.kv);
    struct td_rx_ports ports = {&w->env, w, rx_send, rx_ready, rx_failed, rx_ended, NULL};
    assert_int_equal(td_rx_create(&o, w->kv, &ports, &w->rx), TD_OK);
    pair_start_sender(w, 0xa1);
    w->p_reachable = true;
    return w;
}
/* The sender's process dies: no callback of it runs, what it posted comes to rest somehow. */
static inline void pair_kill_sender(struct pair *w)
{
    td_tx_detach(w->tx);
    while (!td_list_is_empty(&w->ops)) {
        struct op *op = TD_LIST_ENTRY(w->ops.next, struct op, link);
        happen(w, op, TD_E_CANCELED);
    }
    turn(w);
    TD_LIST_FOREACH_SAFE (it, &w->peers) {
        td_list_remove(it);
        free(TD_LIST_ENTRY(it, struct td_xfer_peer, link));
    }
    td_tx_destroy(w->tx);
    w->tx = NULL;
    w->p_reachable = false;
    drop_messages(&w->to_p);
}
static inline void pair_destroy(struct pair *w)
{
    if (w->tx != NULL) pair_kill_sender(w);
    td_rx_destroy(w->rx);
    assert_int_equal(td_kv_pages_n_free(w->kv, TD_KV_SLIDING), N_DST_SLIDING);
    assert_int_equal(td_kv_pages_n_free(w->kv, TD_KV_FULL), N_DST_FULL);
    td_kv_pages_destroy(w->kv);
    drop_messages(&w->to_d);
    drop_messages(&w->to_p);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        free(w->dst[g]);
        free(w->src[g]);
    }
    assert_true(td_list_is_empty(&w->timers));
    free(w);
}

/* --- what tests say
 * ------------------------------------------------------------------------------------------------------ */
static inline struct want *reserve(struct pair *w, uint32_t n_tokens, uint32_t cached)
{
    struct want *q = &w->wants[w->n_wants];
    assert_true(w->n_wants < MAX_REQ);
    char holder[16];
    snprintf(holder, sizeof holder, "req-%u", w->n_wants);
    enum td_status st = td_rx_reserve(w->rx, w->p_inc, n_tokens, cached, holder, q, &q->r, &q->target);
    if (st != TD_OK) return NULL;
    w->n_wants++;
    q->pair = w;
    q->n_tokens = n_tokens;
    q->cached = cached;
    q->generation = q->target.generation;
    q->prefill = w->p_inc;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t i = 0; i < q->target.n_pages[g]; i++) {
            q->pages[g][i] = q->target.pages[g][i];
            assert_int_equal(w->owner[g][q->pages[g][i]], 0);
            w->owner[g][q->pages[g][i]] = q->generation;
        }
    return q;
}
static inline enum td_status begin(struct pair *w, struct want *q)
{
    struct td_tx_pages src[TD_KV_N_GROUPS], dst[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t n = (q->n_tokens + 3) / 4, at = (uint32_t)(draw(w) % 100);
        q->n_src[g] = n;
        for (uint32_t i = 0; i < n; i++) {
            do at = (at + 1 + (draw(w) % 4 == 0)) % 200;
            while (w->src_used[g][at]);
            q->src[g][i] = at;
            w->src_used[g][at] = true;
            for (uint32_t l = 0; l < w->src_layout[g].n_layers; l++)
                for (size_t b = 0; b < td_kv_page_bytes(&w->src_layout[g]); b++)
                    w->src[g][td_kv_offset(&w->src_layout[g], l, at, 0, false, 0) + b] =
                        pattern(q->generation, g, l, i, b);
        }
        src[g] = (struct td_tx_pages){0, n, q->src[g]};
        dst[g] = (struct td_tx_pages){q->target.first_block[g], q->target.n_pages[g], q->pages[g]};
    }
    enum td_status st =
        td_tx_begin(w->tx, D_INC, q->generation, q->target.lowest_live_generation, src, dst, "req", q, &q->s);
    if (st != TD_OK)
        for (int g = 0; g < TD_KV_N_GROUPS; g++)
            for (uint32_t i = 0; i < q->n_src[g]; i++) w->src_used[g][q->src[g][i]] = false;
    return st;
}
static inline void layer(struct pair *w, struct want *q, enum td_kv_group g, uint32_t l)
{
    td_tx_layer_ready(w->tx, q->s, l, g, (q->n_tokens + 3) / 4);
}
static inline void all_layers(struct pair *w, struct want *q)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t l = 0; l < w->layout[g].n_layers; l++) layer(w, q, (enum td_kv_group)g, l);
}
static inline void assert_pages_free(const struct pair *w, bool all)
{
    bool are = td_kv_pages_n_free(w->kv, TD_KV_SLIDING) == N_DST_SLIDING &&
               td_kv_pages_n_free(w->kv, TD_KV_FULL) == N_DST_FULL;
    assert_int_equal(are, all);
}
static inline void message_to_d(struct pair *w, uint64_t from, uint8_t id, struct td_wire m)
{
    struct td_buf b = {0};
    td_wire_encode(id, &m, &b);
    td_rx_on_message(w->rx, from, id, b.data, b.n);
    td_buf_free(&b);
}

#endif
