/* Both ends against each other: the happy path and every way in receiver.c that it can go wrong. */
#include "tests/unit/common/handoff/pair.h"

static int make(void **state)
{
    *state = pair_create(1);
    return 0;
}
static int unmake(void **state)
{
    pair_destroy(*state);
    return 0;
}

static uint64_t n_stale(void) { return td_metric_count(TD_M_handoff_stale); }

static void kv_arrives_and_is_ready(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 11, 0);
    assert_int_equal(q->target.n_pages[TD_KV_FULL], 3);
    assert_int_equal(q->target.first_block[TD_KV_SLIDING], 1); /* positions 6..10 */
    assert_int_equal(begin(w, q), TD_OK);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 42);
    settle(w);
    assert_int_equal(q->n_ready, 1);
    assert_int_equal(q->n_rx_ended, 1);
    assert_int_equal(q->complete.first_token, 42);
    assert_int_equal(q->tx_st, TD_OK);
    uint64_t bytes = td_handoff_bytes(w->layout, WINDOW, 11, 0);
    assert_int_equal(bytes, 2 * 64 + 2 * 3 * 64);
    assert_int_equal(q->tx_bytes, bytes);
    assert_int_equal(q->complete.kv_bytes, bytes);
    assert_pages_free(w, true);
}

static void blocks_that_the_receiver_holds_do_not_travel(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 21, 9); /* blocks 0, 1 are whole there; block 2 is not */
    assert_int_equal(q->target.first_block[TD_KV_FULL], 2);
    assert_int_equal(begin(w, q), TD_OK);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    settle(w);
    assert_int_equal(q->n_ready, 1);
    assert_int_equal(q->tx_bytes, td_handoff_bytes(w->layout, WINDOW, 21, 9));
}

static void layers_travel_while_later_chunks_are_computed(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 20, 0);
    assert_int_equal(begin(w, q), TD_OK);
    td_tx_layer_ready(w->tx, q->s, 0, TD_KV_FULL, 2);
    td_tx_layer_ready(w->tx, q->s, 1, TD_KV_FULL, 2);
    assert_int_equal(n_ops(w), 2);
    td_tx_layer_ready(w->tx, q->s, 1, TD_KV_FULL, 2);    /* nothing new */
    td_tx_layer_ready(w->tx, q->s, 0, TD_KV_SLIDING, 2); /* below the window */
    assert_int_equal(n_ops(w), 2);
    happen_all(w);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    settle(w);
    assert_int_equal(q->n_ready, 1);
}

static void no_more_than_the_window_is_in_flight(void **state)
{
    struct pair *w = *state;
    td_tx_set_window(w->tx, 3 * 64, 2 * 64); /* three pages; two a put */
    pair_introduce(w);
    struct want *q = reserve(w, 40, 0);
    begin(w, q);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    turn(w);
    assert_int_equal(n_ops(w), 1);
    settle(w);
    assert_int_equal(q->n_ready, 1);
    assert_int_equal(q->tx_bytes, td_handoff_bytes(w->layout, WINDOW, 40, 0));
}

static void a_stop_drops_what_waits_for_the_window(void **state)
{
    struct pair *w = *state;
    td_tx_set_window(w->tx, 64, 64);
    pair_introduce(w);
    struct want *q = reserve(w, 40, 0);
    begin(w, q);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    td_rx_end(w->rx, q->r);
    deliver_all(w);
    turn(w);
    assert_int_equal(n_ops(w), 1);
    happen_nth(w, 0);
    assert_int_equal(n_ops(w), 1); /* the flush, no other put */
    settle(w);
    assert_int_equal(q->tx_st, TD_E_STALE);
    assert_int_equal(q->tx_bytes, 64);
    assert_int_equal(q->n_rx_ended, 1);
}

static void complete_is_sent_only_after_the_flush(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    deliver_all(w); /* BEGUN */
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    turn(w);
    assert_true(td_list_is_empty(&w->to_d));
    while (n_ops(w) > 0) {
        assert_true(td_list_is_empty(&w->to_d));
        assert_int_equal(q->n_tx_ended, 0);
        happen_nth(w, 0);
    }
    assert_int_equal(q->n_tx_ended, 1);
    settle(w);
    assert_int_equal(q->n_ready, 1);
}

static void a_stop_before_the_run_makes_the_run_stale(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    td_rx_end(w->rx, q->r);
    assert_pages_free(w, false); /* not confirmed yet */
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
    assert_int_equal(q->n_failed, 0); /* the owner asked for it */
    assert_pages_free(w, true);
    assert_int_equal(begin(w, q), TD_E_STALE);
}

static void a_stop_among_puts_waits_for_them(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 16, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    layer(w, q, TD_KV_SLIDING, 0);
    assert_int_equal(n_ops(w), 2);
    td_rx_end(w->rx, q->r);
    deliver_all(w);
    turn(w);
    assert_int_equal(q->n_rx_ended, 0);
    assert_int_equal(td_rx_n_quarantined_pages(w->rx), q->target.n_pages[0] + q->target.n_pages[1]);
    layer(w, q, TD_KV_FULL, 1); /* too late: not put any more */
    assert_int_equal(n_ops(w), 2);
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
    assert_int_equal(q->tx_st, TD_E_STALE);
    assert_int_equal(td_rx_n_quarantined_pages(w->rx), 0);
    assert_pages_free(w, true);
}

static void a_complete_that_crosses_the_stop_frees_but_is_not_ready(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    happen_all(w);
    td_rx_end(w->rx, q->r); /* COMPLETE is on its way */
    while (deliver_to_d(w)) {
    }
    assert_int_equal(q->n_ready, 0);
    assert_int_equal(q->n_rx_ended, 1);
    assert_pages_free(w, true);
    uint64_t stale = n_stale();
    settle(w); /* STOP finds the generation ended and is answered; nobody waits for that */
    assert_int_equal(n_stale(), stale + 1);
    assert_int_equal(begin(w, q), TD_E_STALE);
}

static void a_second_complete_is_stale(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    all_layers(w, q);
    td_tx_finish(w->tx, q->s, 1);
    settle(w);
    uint64_t stale = n_stale();
    struct td_wire m = {.to = D_INC, .generation = q->generation, .first_token = 1, .n_ranks = 1};
    m.kv_bytes[0] = td_handoff_bytes(w->layout, WINDOW, 8, 0);
    message_to_d(w, w->p_inc, TD_WIRE_COMPLETE, m);
    assert_int_equal(n_stale(), stale + 1);
    assert_int_equal(q->n_ready, 1);
    assert_int_equal(begin(w, q), TD_E_STALE); /* a generation is used once */
}

static void complete_with_other_bytes_is_never_ready(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    uint64_t right = td_handoff_bytes(w->layout, WINDOW, 8, 0);
    const struct td_wire bad[] = {
        {.n_ranks = 1, .kv_bytes = {right - 1}},
        {.n_ranks = 1, .kv_bytes = {right + 1}},
        {.n_ranks = 2, .kv_bytes = {right, right}},
        {.n_ranks = 1, .kv_bytes = {right}, .first_token = 1000}, /* beyond the vocabulary */
    };
    for (unsigned i = 0; i < TD_COUNT(bad); i++) {
        struct want *q = reserve(w, 8, 0);
        struct td_wire m = bad[i];
        m.to = D_INC;
        m.generation = q->generation;
        message_to_d(w, w->p_inc, TD_WIRE_COMPLETE, m);
        assert_int_equal(q->n_ready, 0);
        assert_int_equal(q->n_failed, 1);
        assert_int_equal(q->failed_st, TD_E_PROTOCOL);
        assert_int_equal(q->n_rx_ended, 0); /* it may still write: asked to stop */
        m.kv_bytes[0] = right;
        m.n_ranks = 1;
        m.first_token = 0;
        message_to_d(w, w->p_inc, TD_WIRE_COMPLETE, m); /* a good one after that does not help */
        assert_int_equal(q->n_ready, 0);
        settle(w);
        assert_int_equal(q->n_rx_ended, 1);
    }
    assert_pages_free(w, true);
}

static void only_the_right_sender_and_the_right_life_count(void **state)
{
    struct pair *w = *state;
    struct want *q = reserve(w, 8, 0);
    struct td_wire m = {.to = D_INC, .generation = q->generation, .n_ranks = 1};
    m.kv_bytes[0] = td_handoff_bytes(w->layout, WINDOW, 8, 0);
    uint64_t stale = n_stale();
    message_to_d(w, 0xbad, TD_WIRE_COMPLETE, m);
    m.to = D_INC + 1;
    message_to_d(w, w->p_inc, TD_WIRE_COMPLETE, m);
    m.to = D_INC;
    m.generation++;
    message_to_d(w, w->p_inc, TD_WIRE_COMPLETE, m);
    m.generation--;
    message_to_d(w, w->p_inc, TD_WIRE_STOPPED, m); /* nobody asked */
    message_to_d(w, w->p_inc, TD_WIRE_STOP, m);
    td_rx_on_message(w->rx, w->p_inc, TD_WIRE_COMPLETE, "", 0);
    td_rx_on_message(w->rx, w->p_inc, 99, "hello", 5);
    assert_int_equal(n_stale(), stale + 7);
    assert_int_equal(q->n_ready + q->n_failed + q->n_rx_ended, 0);
    td_rx_end(w->rx, q->r);
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
}

static void a_dead_sender_costs_a_quarantine(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    deliver_all(w);
    layer(w, q, TD_KV_FULL, 0);
    uint64_t dead = w->p_inc;
    pair_kill_sender(w);
    td_rx_on_peer_lost(w->rx, dead);
    assert_int_equal(q->n_failed, 1);
    assert_int_equal(q->failed_st, TD_E_PEER_LOST);
    assert_int_equal(q->n_rx_ended, 0);
    advance_ms(w, 249);
    assert_pages_free(w, false);
    assert_true(td_rx_n_quarantined_pages(w->rx) > 0);
    advance_ms(w, 1);
    assert_int_equal(q->n_rx_ended, 1);
    assert_pages_free(w, true);
    assert_int_equal(td_rx_n_quarantined_pages(w->rx), 0);
    w->p_inc = dead;
    assert_null(reserve(w, 8, 0)); /* it would never be answered */
}

static void a_sender_that_dies_while_asked_to_stop_costs_a_quarantine(void **state)
{
    struct pair *w = *state;
    struct want *q = reserve(w, 8, 0);
    td_rx_end(w->rx, q->r);
    td_rx_on_peer_lost(w->rx, w->p_inc);
    assert_int_equal(q->n_failed, 0);
    advance_ms(w, 250);
    assert_int_equal(q->n_rx_ended, 1);
    assert_pages_free(w, true);
}

static void a_silent_sender_keeps_pages_pinned_and_is_asked_again(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    td_rx_end(w->rx, q->r);
    drop_messages(&w->to_p); /* the first STOP is lost */
    for (int i = 0; i < 60; i++) {
        advance_ms(w, 1000);
        assert_false(td_list_is_empty(&w->to_p));
        if (i < 59) drop_messages(&w->to_p);
    }
    assert_int_equal(q->n_rx_ended, 0);
    assert_int_equal(td_metric_value(TD_M_kv_pages_quarantined), q->target.n_pages[0] + q->target.n_pages[1]);
    struct td_buf b = {0};
    td_rx_describe(w->rx, &b);
    assert_non_null(strstr(td_buf_cstr(&b), "\"state\":\"STOPPING\""));
    td_buf_free(&b);
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
    assert_int_equal(td_metric_value(TD_M_kv_pages_quarantined), 0);
}

static void a_stop_reaches_a_sender_that_comes_within_reach_later(void **state)
{
    struct pair *w = *state;
    w->p_reachable = false;
    struct want *q = reserve(w, 8, 0);
    td_rx_end(w->rx, q->r);
    advance_ms(w, 500);
    assert_true(td_list_is_empty(&w->to_p));
    w->p_reachable = true;
    td_rx_on_peer_reachable(w->rx, w->p_inc);
    assert_false(td_list_is_empty(&w->to_p));
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
}

static void a_sender_that_was_never_told_of_us_can_answer(void **state)
{
    struct pair *w = *state; /* not introduced */
    struct want *q = reserve(w, 8, 0);
    td_rx_end(w->rx, q->r);
    settle(w);
    assert_int_equal(w->n_peer_opens, 1);
    assert_int_equal(q->n_rx_ended, 1);
    assert_null(td_tx_peer(w->tx, D_INC)); /* still needs the descriptor */
    pair_introduce(w);
    turn(w);
    assert_int_equal(w->n_peer_closes, 1);
    assert_non_null(td_tx_peer(w->tx, D_INC));
    assert_int_equal(begin(w, q), TD_E_STALE); /* what was stopped before stays so */
}

static void an_abort_frees_at_once(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    td_tx_abort(w->tx, q->s, TD_E_DEVICE);
    turn(w);
    assert_int_equal(q->n_tx_ended, 0); /* the put is under way */
    settle(w);
    assert_int_equal(q->tx_st, TD_E_DEVICE);
    assert_int_equal(q->n_failed, 1);
    assert_int_equal(q->failed_st, TD_E_DEVICE);
    assert_int_equal(q->n_rx_ended, 1);
    assert_pages_free(w, true);
}

static void a_first_token_that_ends_the_request_releases_without_kv(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    td_tx_abort(w->tx, q->s, TD_OK);
    assert_int_equal(q->n_tx_ended, 0); /* never within the call */
    settle(w);
    assert_int_equal(q->tx_st, TD_OK);
    assert_int_equal(q->failed_st, TD_E_CANCELED);
    assert_int_equal(q->n_rx_ended, 1);
}

static void a_lost_receiver_ends_its_sends(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    td_tx_on_peer_lost(w->tx, D_INC);
    turn(w);
    assert_int_equal(q->n_tx_ended, 0); /* the source is still being read */
    assert_null(td_tx_peer(w->tx, D_INC));
    struct op *op = TD_LIST_ENTRY(w->ops.next, struct op, link);
    happen(w, op, TD_E_PEER_LOST);
    turn(w);
    assert_int_equal(q->n_tx_ended, 1);
    assert_int_equal(q->tx_st, TD_E_PEER_LOST);
    assert_int_equal(w->n_peer_closes, 1);
    assert_int_equal(begin(w, q), TD_E_UNKNOWN_PEER);
    td_rx_end(w->rx, q->r);
    td_rx_on_peer_lost(w->rx, w->p_inc);
    advance_ms(w, 250);
}

static void a_put_that_fails_aborts(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    happen(w, TD_LIST_ENTRY(w->ops.next, struct op, link), TD_E_IO);
    settle(w);
    assert_int_equal(q->tx_st, TD_E_IO);
    assert_int_equal(q->failed_st, TD_E_IO);
    assert_int_equal(q->n_rx_ended, 1);
}

static void an_unconfirmed_flush_tells_nothing(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    deliver_all(w);
    layer(w, q, TD_KV_FULL, 0);
    td_tx_abort(w->tx, q->s, TD_E_CANCELED);
    turn(w);
    happen_nth(w, 0);
    assert_int_equal(n_ops(w), 1);
    happen(w, TD_LIST_ENTRY(w->ops.next, struct op, link), TD_E_IO);
    turn(w);
    assert_int_equal(q->n_tx_ended, 1);
    assert_true(td_list_is_empty(&w->to_d));
    assert_int_equal(q->n_rx_ended, 0);
    td_rx_end(w->rx, q->r); /* its deadline */
    settle(w);
    assert_int_equal(q->n_rx_ended, 1);
}

static void finishing_before_all_layers_are_ready_aborts(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    begin(w, q);
    layer(w, q, TD_KV_FULL, 0);
    td_tx_finish(w->tx, q->s, 1);
    settle(w);
    assert_int_equal(q->tx_st, TD_E_INTERNAL);
    assert_int_equal(q->n_ready, 0);
    assert_int_equal(q->n_failed, 1);
}

static void a_rising_floor_stops_what_the_receiver_forgot(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *a = reserve(w, 8, 0);
    begin(w, a);
    layer(w, a, TD_KV_FULL, 0);
    struct want *b = reserve(w, 8, 0);
    b->target.lowest_live_generation = b->generation; /* as if a had ended there */
    assert_int_equal(begin(w, b), TD_OK);
    turn(w);
    settle(w);
    assert_int_equal(a->tx_st, TD_E_STALE);
    all_layers(w, b);
    td_tx_finish(w->tx, b->s, 1);
    td_rx_end(w->rx, a->r);
    settle(w);
    assert_int_equal(b->n_ready, 1);
    assert_int_equal(begin(w, a), TD_E_STALE);
}

static void lists_that_do_not_fit_are_refused(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    uint32_t keep = q->pages[TD_KV_FULL][1];
    q->pages[TD_KV_FULL][1] = N_DST_FULL; /* one past the pool */
    assert_int_equal(begin(w, q), TD_E_INVALID);
    q->pages[TD_KV_FULL][1] = keep;
    q->target.first_block[TD_KV_FULL] = UINT32_MAX;
    assert_int_equal(begin(w, q), TD_E_INVALID);
    q->target.first_block[TD_KV_FULL] = 1; /* block 2 is not in the source */
    assert_int_equal(begin(w, q), TD_E_INVALID);
    q->target.first_block[TD_KV_FULL] = 0;
    assert_int_equal(begin(w, q), TD_OK);
    struct td_tx_send *s = q->s;
    assert_int_equal(begin(w, q), TD_E_STALE); /* under way */
    q->s = s;
    td_tx_abort(w->tx, q->s, TD_E_CANCELED);
    settle(w);
}

static void an_owner_that_goes_away_leaves_the_reservation_to_end(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    struct want *q = reserve(w, 8, 0);
    td_rx_disown(q->r);
    disown_pages(q); /* the test's own book-keeping: no ended will come */
    settle(w);
    assert_int_equal(q->n_rx_ended + q->n_failed + q->n_ready, 0);
    assert_pages_free(w, true);
}

static void reserving_needs_room_for_both_kinds(void **state)
{
    struct pair *w = *state;
    pair_introduce(w);
    assert_null(reserve(w, 0, 0));
    assert_null(reserve(w, 8, 8));
    assert_null(reserve(w, N_DST_FULL * 4 + 1, 0));
    assert_pages_free(w, true);
    struct want *q = reserve(w, N_DST_FULL * 4, 0);
    assert_non_null(q);
    assert_null(reserve(w, 1, 0));
    uint64_t lowest = td_rx_lowest_live_generation(w->rx);
    assert_int_equal(lowest, q->generation);
    td_rx_end(w->rx, q->r);
    assert_int_equal(td_rx_lowest_live_generation(w->rx), lowest);
    settle(w);
    assert_int_equal(td_rx_lowest_live_generation(w->rx), lowest + 1);
}

/* Any order of anything: pages come back, and READY (checked byte by byte in rx_ready) means what it says. */
static void wild(uint64_t seed)
{
    struct pair *w = pair_create(seed);
    uint64_t next_inc = 0xa2, known_dead = 0;
    w->window_bytes = (1 + draw(w) % 6) * 64;
    w->put_bytes = (1 + draw(w) % 3) * 64;
    td_tx_set_window(w->tx, w->window_bytes, w->put_bytes);
    if (draw(w) % 2) pair_introduce(w);
    for (int i = 0; i < 250; i++) {
        struct want *q =
            w->n_wants > 0 ? &w->wants[w->n_wants - 1 - draw(w) % (w->n_wants < 8 ? w->n_wants : 8)] : NULL;
        switch (draw(w) % 16) {
        case 0:
        case 1: (void)reserve(w, 1 + (uint32_t)(draw(w) % 40), (uint32_t)(draw(w) % 3 == 0 ? draw(w) % 10 : 0)); break;
        case 2:
        case 3:
            if (q == NULL || w->tx == NULL || q->prefill != w->p_inc || q->s != NULL || q->n_tx_ended) break;
            if (begin(w, q) == TD_OK) assert_int_equal(q->n_rx_ended, 0);
            break;
        case 4:
        case 5:
            if (q != NULL && q->s != NULL) {
                enum td_kv_group g = (enum td_kv_group)(draw(w) % 2);
                td_tx_layer_ready(w->tx, q->s, (uint32_t)(draw(w) % w->layout[g].n_layers), g,
                                  (uint32_t)(draw(w) % (q->n_tokens / 4 + 2)));
            }
            break;
        case 6:
        case 7:
            if (q != NULL && q->s != NULL) {
                all_layers(w, q);
                td_tx_finish(w->tx, q->s, 7);
            }
            break;
        case 8:
            if (q != NULL && q->s != NULL && draw(w) % 4 == 0) td_tx_abort(w->tx, q->s, TD_E_CANCELED);
            break;
        case 9:
            if (q != NULL && q->r != NULL && draw(w) % 2 == 0) td_rx_end(w->rx, q->r);
            break;
        case 10: (void)happen_nth(w, draw(w)); break;
        case 11: (void)deliver_to_d(w); break;
        case 12:
            if (w->tx != NULL) (void)deliver_to_p(w);
            break;
        case 13: advance_ms(w, draw(w) % 700); break;
        case 14: turn(w); break;
        case 15:
            if (draw(w) % 12 == 0 && w->tx != NULL) {
                known_dead = w->p_inc;
                pair_kill_sender(w);
            } else if (w->tx == NULL) {
                td_rx_on_peer_lost(w->rx, known_dead);
                pair_start_sender(w, next_inc++);
                w->p_reachable = draw(w) % 2;
                if (draw(w) % 2) pair_introduce(w);
            } else if (!w->p_reachable) {
                w->p_reachable = true;
                td_rx_on_peer_reachable(w->rx, w->p_inc);
            } else if (td_tx_peer(w->tx, D_INC) == NULL) {
                pair_introduce(w);
            }
            break;
        }
    }
    if (w->tx == NULL) {
        td_rx_on_peer_lost(w->rx, known_dead);
        pair_start_sender(w, next_inc++);
    }
    w->p_reachable = true;
    for (unsigned i = 0; i < w->n_wants; i++)
        if (w->wants[i].r != NULL) td_rx_end(w->rx, w->wants[i].r);
    for (int i = 0; i < 4; i++) {
        settle(w);
        advance_ms(w, 1000);
    }
    for (unsigned i = 0; i < w->n_wants; i++) {
        struct want *q = &w->wants[i];
        assert_null(q->r);
        assert_null(q->s);
        assert_int_equal(q->n_rx_ended, 1);
        assert_true(q->n_ready + q->n_failed <= 1);
    }
    assert_int_equal(td_tx_n_sends(w->tx), 0);
    assert_int_equal(td_rx_n_quarantined_pages(w->rx), 0);
    assert_pages_free(w, true);
    pair_destroy(w);
}

static void any_order_of_events_returns_every_page(void **state)
{
    (void)state;
    const char *one = getenv("SEED");
    if (one != NULL) {
        wild(strtoull(one, NULL, 10));
        return;
    }
    unsigned n_ready = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        uint64_t before = td_metric_count(TD_M_handoffs_completed);
        wild(seed);
        n_ready += td_metric_count(TD_M_handoffs_completed) > before;
    }
    assert_true(n_ready > 100); /* the runs do reach the good end */
}

int main(void)
{
    td_log_open("handoff_test", TD_LOG_OFF); /* silent senders and broken messages are on purpose */
#define T(name) cmocka_unit_test_setup_teardown(name, make, unmake)
    const struct CMUnitTest tests[] = {
        T(kv_arrives_and_is_ready),
        T(blocks_that_the_receiver_holds_do_not_travel),
        T(layers_travel_while_later_chunks_are_computed),
        T(no_more_than_the_window_is_in_flight),
        T(a_stop_drops_what_waits_for_the_window),
        T(complete_is_sent_only_after_the_flush),
        T(a_stop_before_the_run_makes_the_run_stale),
        T(a_stop_among_puts_waits_for_them),
        T(a_complete_that_crosses_the_stop_frees_but_is_not_ready),
        T(a_second_complete_is_stale),
        T(complete_with_other_bytes_is_never_ready),
        T(only_the_right_sender_and_the_right_life_count),
        T(a_dead_sender_costs_a_quarantine),
        T(a_sender_that_dies_while_asked_to_stop_costs_a_quarantine),
        T(a_silent_sender_keeps_pages_pinned_and_is_asked_again),
        T(a_stop_reaches_a_sender_that_comes_within_reach_later),
        T(a_sender_that_was_never_told_of_us_can_answer),
        T(an_abort_frees_at_once),
        T(a_first_token_that_ends_the_request_releases_without_kv),
        T(a_lost_receiver_ends_its_sends),
        T(a_put_that_fails_aborts),
        T(an_unconfirmed_flush_tells_nothing),
        T(finishing_before_all_layers_are_ready_aborts),
        T(a_rising_floor_stops_what_the_receiver_forgot),
        T(lists_that_do_not_fit_are_refused),
        T(an_owner_that_goes_away_leaves_the_reservation_to_end),
        T(reserving_needs_room_for_both_kinds),
        cmocka_unit_test(any_order_of_events_returns_every_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
