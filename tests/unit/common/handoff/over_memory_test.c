/* Hand-offs over the in-process transfer, with its seeded delays, deaths and pauses: the contract that both ends rely
 * on, kept by a transfer that is not made for them. Free pages carry a canary. */
#include "common/transfer/memory.h"
#include "tests/unit/common/handoff/pair.h"

#define CANARY 0xc5

struct net {
    struct pair *w;
    struct td_xfer *dx, *px;
    struct td_xfer_pool *pools[TD_KV_N_GROUPS];
    struct td_xfer_peer *to_p; /* D's way to the P of now */
    uint64_t to_p_inc;
    bool is_dead, is_paused; /* P */
    unsigned n_ready;
};

static void canary_write(const struct net *n, const struct want *q)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t i = 0; i < q->target.n_pages[g]; i++)
            for (uint32_t l = 0; l < n->w->layout[g].n_layers; l++)
                memset(n->w->dst[g] + td_kv_offset(&n->w->layout[g], l, q->pages[g][i], 0, false, 0), CANARY,
                       td_kv_page_bytes(&n->w->layout[g]));
}
/* Every page that nobody may write is untouched. */
static void canary_check(const struct net *n)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t p = 0; p < n->w->layout[g].n_pages; p++)
            for (uint32_t l = 0; l < n->w->layout[g].n_layers && n->w->owner[g][p] == 0; l++) {
                const uint8_t *at = n->w->dst[g] + td_kv_offset(&n->w->layout[g], l, p, 0, false, 0);
                for (size_t b = 0; b < td_kv_page_bytes(&n->w->layout[g]); b++) assert_int_equal(at[b], CANARY);
            }
}

/* --- D
 * ---------------------------------------------------------------------------------------------------------------- */
static enum td_status d_send(void *self, uint64_t prefill, uint8_t id, const void *data, size_t len)
{
    struct net *n = self;
    if (n->to_p == NULL || n->to_p_inc != prefill) return TD_E_UNAVAILABLE;
    return td_xfer_memory.send(n->to_p, id, data, len);
}
static void d_ready(void *self, struct td_rx_reservation *r, const struct td_rx_complete *c)
{
    struct net *n = self;
    n->n_ready++;
    rx_ready(n->w, r, c);
}
static void d_failed(void *self, struct td_rx_reservation *r, enum td_status st, const char *why)
{
    rx_failed(((struct net *)self)->w, r, st, why);
}
static void d_ended(void *self, struct td_rx_reservation *r)
{
    struct net *n = self;
    struct want *q = td_rx_owner(r);
    rx_ended(n->w, r);
    canary_write(n, q);
}
static void d_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t len, void *user)
{
    (void)x;
    td_rx_on_message(((struct net *)user)->w->rx, from, id, data, len);
}
static void d_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t inc, void *user)
{
    struct net *n = user;
    (void)x;
    assert_ptr_equal(peer, n->to_p);
    td_xfer_memory.peer_close(peer);
    n->to_p = NULL;
    td_rx_on_peer_lost(n->w->rx, inc);
}

/* --- P
 * ---------------------------------------------------------------------------------------------------------------- */
static void p_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t len, void *user)
{
    struct net *n = user;
    (void)x;
    td_tx_on_message(n->w->tx, from, id, data, len);
}
static void p_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t inc, void *user)
{
    (void)x;
    (void)peer;
    td_tx_on_peer_lost(((struct net *)user)->w->tx, inc);
}
static void p_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t bytes)
{
    tx_ended(((struct net *)self)->w, s, st, bytes);
}

static const struct td_xfer_memory_trouble trouble = {
    .delay_min_ns = 1000,
    .delay_max_ns = 40 * TD_NS_PER_MS, /* well within the quarantine */
    .notice_min_ns = TD_NS_PER_MS,
    .notice_max_ns = 300 * TD_NS_PER_MS,
    .lose_message_ppm = 0,
    .hang_put_ppm = 300000,
};

static void open_x(struct net *n, uint64_t inc, const struct td_xfer_handlers *h, struct td_xfer **out)
{
    struct td_xfer_options o = {.transport = "memory", .incarnation = inc};
    struct td_err err;
    assert_int_equal(td_xfer_memory_open_env(&n->w->env, draw(n->w), &trouble, &o, h, n, out, &err), TD_OK);
}
static void start_p(struct net *n, uint64_t inc)
{
    static const struct td_xfer_handlers h = {p_message, p_lost};
    struct td_err err;
    size_t n_address;
    open_x(n, inc, &h, &n->px);
    struct td_tx_ports ports = {&n->w->env, n, &td_xfer_memory, n->px, p_ended};
    struct td_tx_source src = {.n_ranks = 1, .base = {{n->w->src[0], n->w->src[1]}}};
    memcpy(src.kv, n->w->src_layout, sizeof src.kv);
    assert_int_equal(td_tx_create(&ports, &src, inc, &n->w->tx), TD_OK);
    td_tx_set_window(n->w->tx, (1 + draw(n->w) % 8) * 64, (1 + draw(n->w) % 3) * 64);
    n->w->p_inc = inc;
    n->is_dead = n->is_paused = false;
    if (n->to_p != NULL) { /* a new life is known before the old one's death was noticed */
        td_xfer_memory.peer_close(n->to_p);
        td_rx_on_peer_lost(n->w->rx, n->to_p_inc);
    }
    const void *address = td_xfer_memory.address(n->px, &n_address);
    assert_int_equal(td_xfer_memory.peer_open(n->dx, inc, address, n_address, NULL, 0, &n->to_p, &err), TD_OK);
    n->to_p_inc = inc;
    td_rx_on_peer_reachable(n->w->rx, inc);
}
static void introduce(struct net *n)
{
    struct td_xfer_remote pools[TD_KV_N_GROUPS];
    struct td_tx_remote_layout remote = {.n_ranks = 1};
    struct td_xfer_peer *peer;
    struct td_err err;
    size_t n_address;
    const void *address = td_xfer_memory.address(n->dx, &n_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        pools[g].base = (uint64_t)(uintptr_t)td_xfer_memory.pool_base(n->pools[g]);
        pools[g].key = td_xfer_memory.pool_key(n->pools[g], &pools[g].n_key);
    }
    memcpy(remote.kv, n->w->layout, sizeof remote.kv);
    assert_int_equal(td_xfer_memory.peer_open(n->px, D_INC, address, n_address, pools, TD_KV_N_GROUPS, &peer, &err),
                     TD_OK);
    assert_int_equal(td_tx_add_peer(n->w->tx, D_INC, peer, &remote), TD_OK);
}
/* The process dies: nothing of it runs any more; what it sent may still arrive. Its memory is kept until that is over.
 */
static void kill_p(struct net *n)
{
    td_xfer_memory_kill(n->px);
    n->is_dead = true;
    for (unsigned i = 0; i < n->w->n_wants; i++) n->w->wants[i].s = NULL;
}
static void bury_p(struct net *n)
{
    td_tx_detach(n->w->tx);
    td_xfer_memory.destroy(n->px);
    n->px = NULL;
    td_tx_destroy(n->w->tx);
    n->w->tx = NULL;
    memset(n->w->src_used, 0, sizeof n->w->src_used);
}

static void wild(uint64_t seed, unsigned *n_ready)
{
    struct net n = {.w = pair_create(seed)};
    struct pair *w = n.w;
    struct td_err err;
    pair_kill_sender(w);
    td_rx_destroy(w->rx);
    static const struct td_xfer_handlers h = {d_message, d_lost};
    open_x(&n, D_INC, &h, &n.dx);
    struct td_rx_options o = {
        .incarnation = D_INC, .window_tokens = WINDOW, .n_ranks = 1, .quarantine_ms = 250, .stop_retry_ms = 200};
    o.address = td_xfer_memory.address(n.dx, &o.n_address);
    memcpy(o.kv, w->layout, sizeof o.kv);
    struct td_rx_ports rp = {&w->env, &n, d_send, d_ready, d_failed, d_ended, NULL};
    assert_int_equal(td_rx_create(&o, w->kv, &rp, &w->rx), TD_OK);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        free(w->dst[g]);
        assert_int_equal(td_xfer_memory.pool_create(n.dx, td_kv_pool_bytes(&w->layout[g]), &n.pools[g], &err), TD_OK);
        w->dst[g] = td_xfer_memory.pool_base(n.pools[g]);
        memset(w->dst[g], CANARY, td_kv_pool_bytes(&w->layout[g]));
    }
    uint64_t inc = 0xa2;
    start_p(&n, inc++);
    for (int i = 0; i < 300; i++) {
        struct want *q =
            w->n_wants > 0 ? &w->wants[w->n_wants - 1 - draw(w) % (w->n_wants < 6 ? w->n_wants : 6)] : NULL;
        bool is_up = !n.is_dead && !n.is_paused;
        switch (draw(w) % 12) {
        case 0:
        case 1: (void)reserve(w, 1 + (uint32_t)(draw(w) % 40), 0); break;
        case 2:
            if (is_up && td_tx_peer(w->tx, D_INC) == NULL) introduce(&n);
            break;
        case 3:
        case 4:
            if (q != NULL && is_up && q->prefill == w->p_inc && q->s == NULL && q->n_tx_ended == 0) (void)begin(w, q);
            break;
        case 5:
            if (q != NULL && is_up && q->s != NULL)
                td_tx_layer_ready(w->tx, q->s, (uint32_t)(draw(w) % 2), TD_KV_FULL, (uint32_t)(draw(w) % 10));
            break;
        case 6:
        case 7:
            if (q != NULL && is_up && q->s != NULL) {
                all_layers(w, q);
                td_tx_finish(w->tx, q->s, 3);
            }
            break;
        case 8:
            if (q != NULL && q->r != NULL && draw(w) % 3 == 0) td_rx_end(w->rx, q->r);
            break;
        case 9:
            if (draw(w) % 10 == 0 && !n.is_dead) {
                kill_p(&n);
            } else if (n.is_dead && draw(w) % 2) {
                bury_p(&n);
                start_p(&n, inc++);
            } else if (!n.is_dead && draw(w) % 4 == 0) {
                n.is_paused = !n.is_paused;
                td_xfer_memory_pause(n.px, n.is_paused);
            }
            break;
        default: advance_ns(w, draw(w) % (60 * TD_NS_PER_MS)); break;
        }
        canary_check(&n);
    }
    if (n.is_paused) td_xfer_memory_pause(n.px, false);
    for (unsigned i = 0; i < w->n_wants; i++)
        if (w->wants[i].r != NULL) td_rx_end(w->rx, w->wants[i].r);
    for (int i = 0; i < 40; i++) {
        advance_ms(w, 50);
        canary_check(&n);
    }
    for (unsigned i = 0; i < w->n_wants; i++) assert_int_equal(w->wants[i].n_rx_ended, 1);
    assert_pages_free(w, true);
    *n_ready += n.n_ready;
    bury_p(&n);
    if (n.to_p != NULL) td_xfer_memory.peer_close(n.to_p);
    td_xfer_memory.destroy(n.dx);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) w->dst[g] = NULL;
    pair_destroy(w);
}

static void pages_come_back_untouched_whatever_happens(void **state)
{
    (void)state;
    unsigned n_ready = 0;
    const char *one = getenv("SEED");
    if (one != NULL) {
        wild(strtoull(one, NULL, 10), &n_ready);
        return;
    }
    for (uint64_t seed = 1; seed <= 200; seed++) wild(seed, &n_ready);
    assert_true(n_ready > 100);
}

int main(void)
{
    td_log_open("over_memory_test", TD_LOG_OFF); /* deaths and pauses are on purpose */
    const struct CMUnitTest tests[] = {cmocka_unit_test(pages_come_back_untouched_whatever_happens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
