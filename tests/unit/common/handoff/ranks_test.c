/* Hand-offs between workers of any two numbers of ranks: every byte of every head lands where its target rank looks for
 * it, each rank gets the closed form's bytes, and nothing else is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/handoff/receiver.h"
#include "common/handoff/sender.h"
#include "common/handoff/wire.h"

#define N_HEADS     8u
#define WINDOW      6u
#define PAGE        4u
#define D_INC       0xd0d0u
#define P_INC       0x9090u
#define UNTOUCHED   0xc5
#define N_SRC_PAGES 23u
#define N_DST_PAGES 17u

struct world {
    struct td_env env; /* first */
    struct td_list timers;
    uint32_t src_ranks, dst_ranks, n_tokens, cached;
    struct td_kv_group_layout src_kv[TD_KV_N_GROUPS], dst_kv[TD_KV_N_GROUPS];
    uint8_t *src[TD_MAX_RANKS][TD_KV_N_GROUPS], *dst[TD_MAX_RANKS][TD_KV_N_GROUPS];
    struct td_tx *tx;
    struct td_rx *rx;
    struct td_kv_pages *kv;
    uint64_t put_bytes, ended_bytes;
    unsigned n_puts, n_ready, n_failed, n_ended;
    struct td_list done; /* requests that are over, not yet told */
    struct td_rx_complete complete;
};
struct td_xfer_peer {
    struct world *w;
};

/* ---- clock and transfer: what is posted happens at once and is told later
 * --------------------------------------------------------------------------------------------------------------- */

static uint64_t now(struct td_env *e)
{
    (void)e;
    return TD_NS_PER_S;
}
static void timer_stop(struct td_env *e, struct td_timer *t)
{
    (void)e;
    if (t->is_armed) td_list_remove(&t->link);
    t->is_armed = false;
}
static void timer_start(struct td_env *e, struct td_timer *t, uint64_t delay)
{
    (void)delay;
    timer_stop(e, t);
    t->is_armed = true;
    td_list_push_back(&((struct world *)e)->timers, &t->link);
}

static enum td_status put(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                          struct td_xfer_req *req)
{
    struct world *w = p->w;
    uint32_t rank = pool / TD_KV_N_GROUPS, g = pool % TD_KV_N_GROUPS;
    assert_true(rank < w->dst_ranks && n_segs > 0);
    for (unsigned i = 0; i < n_segs; i++) {
        assert_true(segs[i].dst_offset + segs[i].n_bytes <= td_kv_pool_bytes(&w->dst_kv[g]));
        memcpy(w->dst[rank][g] + segs[i].dst_offset, segs[i].src, segs[i].n_bytes);
        w->put_bytes += segs[i].n_bytes;
    }
    w->n_puts++;
    td_list_push_back(&w->done, &req->link);
    return TD_OK;
}
static enum td_status flush(struct td_xfer_peer *p, struct td_xfer_req *req)
{
    td_list_push_back(&p->w->done, &req->link);
    return TD_OK;
}
static enum td_status send_to_d(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n)
{
    td_rx_on_message(p->w->rx, P_INC, id, data, n);
    return TD_OK;
}
static void peer_close(struct td_xfer_peer *p) { free(p); }
static const char *transport(struct td_xfer_peer *p)
{
    (void)p;
    return "fake";
}
static const struct td_xfer_ops fake = {.name = "fake",
                                        .put = put,
                                        .flush = flush,
                                        .send = send_to_d,
                                        .peer_close = peer_close,
                                        .peer_transport = transport};

static void settle(struct world *w)
{
    while (!td_list_is_empty(&w->done) || !td_list_is_empty(&w->timers)) {
        TD_LIST_FOREACH_SAFE (it, &w->done) {
            td_list_remove(it);
            struct td_xfer_req *req = TD_LIST_ENTRY(it, struct td_xfer_req, link);
            req->done(req, TD_OK);
        }
        if (td_list_is_empty(&w->timers)) continue;
        struct td_timer *t = TD_LIST_ENTRY(w->timers.next, struct td_timer, link);
        timer_stop(&w->env, t);
        t->fire(t);
    }
}

/* ---- the two ends
 * --------------------------------------------------------------------------------------------------------------- */

static enum td_status send_to_p(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    (void)prefill;
    td_tx_on_message(((struct world *)self)->tx, D_INC, id, data, n);
    return TD_OK;
}
static void on_ready(void *self, struct td_rx_reservation *r, const struct td_rx_complete *c)
{
    struct world *w = self;
    (void)r;
    w->n_ready++;
    w->complete = *c;
}
static void on_failed(void *self, struct td_rx_reservation *r, enum td_status st, const char *why)
{
    (void)r;
    (void)st;
    (void)why;
    ((struct world *)self)->n_failed++;
}
static void on_rx_ended(void *self, struct td_rx_reservation *r)
{
    (void)self;
    (void)r;
}
static void on_tx_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes)
{
    struct world *w = self;
    (void)s;
    assert_int_equal(st, TD_OK);
    w->n_ended++;
    w->ended_bytes = kv_bytes;
}

static void open_world(struct world *w, uint32_t src_ranks, uint32_t dst_ranks, uint64_t window, uint64_t put_max)
{
    *w = (struct world){.env = {now, timer_start, timer_stop, NULL}, .src_ranks = src_ranks, .dst_ranks = dst_ranks};
    td_list_init(&w->timers);
    td_list_init(&w->done);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        struct td_kv_group_layout l = {.n_layers = 2, .head_dim = 2, .page_tokens = PAGE, .dtype = TD_BF16};
        w->src_kv[g] = w->dst_kv[g] = l;
        w->src_kv[g].n_heads = N_HEADS / src_ranks;
        w->dst_kv[g].n_heads = N_HEADS / dst_ranks;
        w->src_kv[g].n_pages = N_SRC_PAGES;
        w->dst_kv[g].n_pages = N_DST_PAGES;
        for (uint32_t r = 0; r < src_ranks; r++) w->src[r][g] = calloc(1, td_kv_pool_bytes(&w->src_kv[g]));
        for (uint32_t r = 0; r < dst_ranks; r++) {
            w->dst[r][g] = malloc(td_kv_pool_bytes(&w->dst_kv[g]));
            memset(w->dst[r][g], UNTOUCHED, td_kv_pool_bytes(&w->dst_kv[g]));
        }
    }
    uint32_t n_pages[TD_KV_N_GROUPS] = {N_DST_PAGES, N_DST_PAGES};
    assert_int_equal(td_kv_pages_create(n_pages, &w->kv), TD_OK);
    struct td_rx_options ro = {.incarnation = D_INC, .window_tokens = WINDOW, .n_ranks = dst_ranks, .n_vocab = 100};
    memcpy(ro.kv, w->dst_kv, sizeof ro.kv);
    struct td_rx_ports rp = {&w->env, w, send_to_p, on_ready, on_failed, on_rx_ended, NULL};
    assert_int_equal(td_rx_create(&ro, w->kv, &rp, &w->rx), TD_OK);
    struct td_tx_ports tp = {.env = &w->env, .self = w, .xfer = &fake, .ended = on_tx_ended};
    struct td_tx_source src = {.n_ranks = src_ranks};
    struct td_tx_remote_layout remote = {.n_ranks = dst_ranks};
    memcpy(src.kv, w->src_kv, sizeof src.kv);
    memcpy(remote.kv, w->dst_kv, sizeof remote.kv);
    for (uint32_t r = 0; r < src_ranks; r++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) src.base[r][g] = w->src[r][g];
    assert_int_equal(td_tx_create(&tp, &src, P_INC, &w->tx), TD_OK);
    td_tx_set_window(w->tx, window, put_max);
    struct td_xfer_peer *peer = calloc(1, sizeof *peer);
    peer->w = w;
    assert_int_equal(td_tx_add_peer(w->tx, D_INC, peer, &remote), TD_OK);
}

static void close_world(struct world *w)
{
    td_tx_on_peer_lost(w->tx, D_INC);
    settle(w);
    td_tx_destroy(w->tx);
    td_rx_destroy(w->rx);
    td_kv_pages_destroy(w->kv);
    for (uint32_t r = 0; r < TD_MAX_RANKS; r++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            free(w->src[r][g]);
            free(w->dst[r][g]);
        }
}

/* What byte b of a head's K and V of one block must be, whoever holds it. */
static uint8_t pattern(int g, uint32_t layer, uint32_t block, uint32_t head, size_t b)
{
    return (uint8_t)(1 + (b + 7 * head + 31 * block + 101 * layer + 53 * (uint32_t)g) % 196); /* never UNTOUCHED */
}

/* Head h (of the model's) of a page in whatever rank holds it. */
static uint8_t *head_at(uint8_t *const base[][TD_KV_N_GROUPS], const struct td_kv_group_layout *kv, int g,
                        uint32_t layer, uint32_t page, uint32_t h)
{
    return base[h / kv[g].n_heads][g] + td_kv_offset(&kv[g], layer, page, h % kv[g].n_heads, false, 0);
}

static void hand_over(struct world *w, uint32_t n_tokens, uint32_t cached)
{
    struct td_rx_reservation *r;
    struct td_rx_target target;
    struct td_tx_send *s;
    struct td_tx_pages src[TD_KV_N_GROUPS], dst[TD_KV_N_GROUPS];
    uint32_t src_pages[TD_KV_N_GROUPS][32], dst_pages[TD_KV_N_GROUPS][32];
    unsigned n_ready = w->n_ready, n_ended = w->n_ended;
    w->put_bytes = 0;
    assert_int_equal(td_rx_reserve(w->rx, P_INC, n_tokens, cached, "r", w, &r, &target), TD_OK);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t first = target.first_block[g], n = target.n_pages[g];
        for (uint32_t i = 0; i < n; i++) {
            src_pages[g][i] = (5 * i + 3) % N_SRC_PAGES;
            dst_pages[g][i] = target.pages[g][i];
            for (uint32_t l = 0; l < w->src_kv[g].n_layers; l++)
                for (uint32_t h = 0; h < N_HEADS; h++)
                    for (size_t b = 0; b < td_kv_head_bytes(&w->src_kv[g]); b++)
                        head_at(w->src, w->src_kv, g, l, src_pages[g][i], h)[b] = pattern(g, l, first + i, h, b);
        }
        src[g] = (struct td_tx_pages){first, n, src_pages[g]};
        dst[g] = (struct td_tx_pages){first, n, dst_pages[g]};
    }
    assert_int_equal(td_tx_begin(w->tx, D_INC, target.generation, target.lowest_live_generation, src, dst, "r", w, &s),
                     TD_OK);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t l = 0; l < w->src_kv[g].n_layers; l++) {
            td_tx_layer_ready(w->tx, s, l, g, dst[g].first_block + dst[g].n_pages / 2);
            td_tx_layer_ready(w->tx, s, l, g, UINT32_MAX);
        }
    td_tx_finish(w->tx, s, 42);
    settle(w);
    assert_int_equal(w->n_ready, n_ready + 1);
    assert_int_equal(w->n_ended, n_ended + 1);
    assert_int_equal(w->n_failed, 0);
    uint64_t want = w->dst_ranks * td_handoff_bytes(w->dst_kv, WINDOW, n_tokens, cached);
    assert_int_equal(w->put_bytes, want);
    assert_int_equal(w->ended_bytes, want);
    assert_int_equal(w->complete.kv_bytes, want);
    assert_int_equal(w->complete.first_token, 42);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t i = 0; i < dst[g].n_pages; i++)
            for (uint32_t l = 0; l < w->dst_kv[g].n_layers; l++)
                for (uint32_t h = 0; h < N_HEADS; h++)
                    for (size_t b = 0; b < td_kv_head_bytes(&w->dst_kv[g]); b++)
                        assert_int_equal(head_at(w->dst, w->dst_kv, g, l, dst_pages[g][i], h)[b],
                                         pattern(g, l, dst[g].first_block + i, h, b));
}

/* No byte of a page that was never reserved has been written, on any rank. */
static void check_untouched(const struct world *w)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t page = 0; page < N_DST_PAGES; page++) {
            if (td_kv_pages_refs(w->kv, (enum td_kv_group)g, page) > 0) continue;
            for (uint32_t r = 0; r < w->dst_ranks; r++)
                for (uint32_t l = 0; l < w->dst_kv[g].n_layers; l++) {
                    const uint8_t *at = w->dst[r][g] + td_kv_offset(&w->dst_kv[g], l, page, 0, false, 0);
                    for (size_t b = 0; b < td_kv_page_bytes(&w->dst_kv[g]); b++) assert_int_equal(at[b], UNTOUCHED);
                }
        }
}

static void every_head_arrives_for_every_pair_of_rank_counts(void **state)
{
    (void)state;
    for (uint32_t p = 1; p <= N_HEADS; p *= 2)
        for (uint32_t d = 1; d <= N_HEADS; d *= 2)
            for (uint32_t small = 0; small < 2; small++) {
                struct world w;
                open_world(&w, p, d, small ? 512 : 1u << 20, small ? 300 : 1u << 20);
                hand_over(&w, 3, 0);
                hand_over(&w, 21, 0);
                hand_over(&w, 30, 8);
                check_untouched(&w);
                close_world(&w);
            }
}

/* 6 heads among 2 ranks and among 3: every head goes once. */
static void ranges_of_heads_need_not_nest(void **state)
{
    (void)state;
    struct td_kv_group_layout src = {.n_layers = 1,
                                     .n_pages = 2,
                                     .n_heads = 3,
                                     .head_dim = 2,
                                     .page_tokens = PAGE,
                                     .dtype = TD_BF16},
                              dst = src;
    dst.n_heads = 2; /* 6 heads: source ranks have 3, target ranks 2 */
    uint8_t base[4096] = {0};
    uint32_t page = 1;
    uint64_t sum = 0;
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t d = 0; d < 3; d++) {
            struct td_tx_geometry geo = {
                .src = &src, .dst = &dst, .src_base = base, .src_first_head = 3 * s, .dst_first_head = 2 * d};
            struct td_xfer_seg seg;
            uint64_t n_bytes;
            (void)td_tx_segments(&geo, 0, &page, &page, 1, &seg, &n_bytes);
            sum += n_bytes;
        }
    assert_int_equal(sum, 6 * td_kv_head_bytes(&src));
}

static void a_complete_for_other_ranks_is_never_ready(void **state)
{
    (void)state;
    struct world w;
    open_world(&w, 2, 4, 1u << 20, 1u << 20);
    struct td_rx_reservation *r;
    struct td_rx_target target;
    assert_int_equal(td_rx_reserve(w.rx, P_INC, 5, 0, "r", &w, &r, &target), TD_OK);
    uint64_t each = td_handoff_bytes(w.dst_kv, WINDOW, 5, 0);
    struct td_wire m = {.to = D_INC,
                        .generation = target.generation,
                        .n_ranks = 4,
                        .kv_bytes = {each, each, each + 8, each - 8}}; /* the sum is right, two ranks are not */
    struct td_buf b = {0};
    td_wire_encode(TD_WIRE_COMPLETE, &m, &b);
    td_rx_on_message(w.rx, P_INC, TD_WIRE_COMPLETE, b.data, b.n);
    td_buf_free(&b);
    assert_int_equal(w.n_ready, 0);
    assert_int_equal(w.n_failed, 1);
    settle(&w);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_arrives_for_every_pair_of_rank_counts),
        cmocka_unit_test(ranges_of_heads_need_not_nest),
        cmocka_unit_test(a_complete_for_other_ranks_is_never_ready),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
