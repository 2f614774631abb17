#include "tests/unit/decode/decode_world.h"

#include "common/base/fault.h"
#include "common/base/rng.h"

/* --- the happy path ---------------------------------------------------------------------------------------- */

static void a_request_is_reserved_completed_and_decoded_to_its_end(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
    assert_true(t->is_reserved);
    /* Full: blocks 0..2. Sliding: position 10 sees 3..9: blocks 0..2. */
    assert_int_equal(t->n_pages[TD_KV_FULL], 3);
    assert_int_equal(t->first_block[TD_KV_SLIDING], 0);
    assert_null(w->batches[0]);
    complete(w, t);
    assert_non_null(w->batches[0]);
    assert_int_equal(w->batches[0]->segments[0].start, 10);
    assert_int_equal(w->batches[0]->segments[0].n_tokens, 1);
    assert_int_equal(w->batches[0]->segments[0].draw_index, 1);
    run(w);
    expect_tokens(t, false, 19); /* the first token is the prefill worker's to tell */
    expect_finished(t, LENGTH, "OK", false);
    assert_int_equal(t->handoff_bytes, td_handoff_bytes(w->kv, WINDOW, 10, 0));
    assert_int_equal(w->n_steps, 19);
    expect_pages_back(w);
    free_world(w);
}

static void a_long_sequence_keeps_only_the_window_of_sliding_pages(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 17, .max_tokens = 43});
    assert_int_equal(t->first_block[TD_KV_SLIDING], 2); /* 17 sees 10..16 */
    assert_int_equal(t->n_pages[TD_KV_SLIDING], 3);
    complete(w, t);
    while (step(w, TD_OK)) {
        uint32_t held = w->free_at_start[TD_KV_SLIDING] - td_kv_pages_n_free(w->pages, TD_KV_SLIDING);
        assert_true(held <= 3);
    }
    expect_tokens(t, false, 42);
    expect_finished(t, LENGTH, "OK", false); /* max_tokens and the context's end agree here */
    expect_pages_back(w);
    free_world(w);
}

static void it_ends_at_the_end_of_the_context(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 50, .max_tokens = 1000});
    complete(w, t);
    run(w);
    expect_tokens(t, false, CONTEXT - 51);
    expect_finished(t, LENGTH, "OK", false);
    free_world(w);
}

static void a_stop_id_is_the_last_token_and_waits_for_min_tokens(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    /* The history ends in 62 as the first generated token of a migrated request: what follows is the stop id. */
    struct told *a =
        start(w, 0, 1, (struct ask){.n_prompt = 5, .n_generated = 1, .last = 62, .max_tokens = 9, .is_local = true});
    run(w);
    assert_int_equal(a->n_tokens, 1);
    assert_int_equal(a->tokens[0], STOP_ID);
    expect_finished(a, STOP, "OK", false);

    struct told *b = start(
        w, 0, 2,
        (struct ask){.n_prompt = 5, .n_generated = 1, .last = 62, .max_tokens = 9, .min_tokens = 2, .is_local = true});
    run(w);
    assert_int_equal(b->tokens[0], 1); /* banned at index 1: the engine took another */
    expect_finished(b, LENGTH, "OK", false);
    assert_int_equal(b->n_tokens, 8);

    struct told *c = start(
        w, 0, 3,
        (struct ask){.n_prompt = 5, .n_generated = 1, .last = 62, .max_tokens = 4, .no_stop = true, .is_local = true});
    run(w);
    assert_int_equal(c->tokens[0], STOP_ID); /* nobody called it a stop */
    expect_finished(c, LENGTH, "OK", false);
    free_world(w);
}

static void a_migrated_request_goes_on_where_it_was(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 6, .n_generated = 5, .max_tokens = 9});
    complete(w, t);
    assert_int_equal(w->batches[0]->segments[0].draw_index, 6);
    assert_int_equal(w->batches[0]->segments[0].n_prompt, 6);
    run(w);
    expect_tokens(t, false, 3);
    expect_finished(t, LENGTH, "OK", false);
    free_world(w);
}

static void a_prompt_computed_here_gives_the_same_tokens_in_chunks(void **state)
{
    (void)state;
    for (uint32_t chunk = 1; chunk < 40; chunk += 3) {
        struct world *w = make_world((struct shape){.chunk = chunk});
        struct told *other = start(w, 0, 1, (struct ask){.n_prompt = 4, .max_tokens = 50});
        complete(w, other);
        struct told *t = start(w, 0, 2, (struct ask){.n_prompt = 33, .max_tokens = 12, .is_local = true});
        assert_false(t->is_reserved);
        uint32_t before = other->n_tokens;
        step(w, TD_OK);
        step(w, TD_OK);
        assert_int_equal(other->n_tokens, before + 2); /* the others decode meanwhile */
        run(w);
        expect_tokens(t, true, 12); /* the first too: nobody else tells it */
        expect_tokens(other, false, 49);
        expect_finished(t, LENGTH, "OK", false);
        assert_int_equal(t->handoff_bytes, 0);
        expect_pages_back(w);
        free_world(w);
    }
}

static void a_prompt_computed_here_does_not_double_the_steps_of_the_others(void **state)
{
    (void)state;
    for (uint64_t token_ns = 0; token_ns <= 400000; token_ns += 100000) {
        struct world *w = make_world((struct shape){.chunk = 30, .n_sliding = 200});
        w->token_ns = token_ns;
        for (uint64_t i = 1; i <= 4; i++)
            start(w, 0, i, (struct ask){.n_prompt = 2, .max_tokens = 50, .is_local = true});
        for (int i = 0; i < 10; i++) step(w, TD_OK);
        struct told *t[2];
        uint32_t most = 0;
        for (uint64_t i = 0; i < 2; i++)
            t[i] = start(w, 0, 10 + i, (struct ask){.n_prompt = 45, .max_tokens = 3, .is_local = true});
        while (t[1]->n_finished == 0) {
            assert_true(step(w, TD_OK));
            assert_true(w->n_decoding_last == 0 || w->n_prompt_last * token_ns <= 1000000); /* alone it may */
            if (w->n_prompt_last > most && w->n_decoding_last > 0) most = w->n_prompt_last;
        }
        /* Chunks grow where they cost little, as far as a prompt is long enough to learn it. */
        assert_in_range(most, token_ns == 0 ? 7 : token_ns == 100000 ? 5 : 1, token_ns == 0 ? 30 : 900000 / token_ns);
        expect_tokens(t[0], true, 3);
        expect_tokens(t[1], true, 3);
        run(w);
        /* Alone, a prompt takes all it may have. */
        start(w, 0, 20, (struct ask){.n_prompt = 40, .max_tokens = 3, .is_local = true});
        step(w, TD_OK);
        assert_int_equal(w->n_prompt_last, 30);
        run(w);
        free_world(w);
    }
}

static void one_message_a_step_carries_the_tokens_of_all_requests_of_a_router(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    connect_router(w, 1);
    struct told *t[4];
    for (uint64_t i = 0; i < 4; i++)
        t[i] = start(w, i == 3 ? 1 : 0, i,
                     (struct ask){.n_prompt = 3 + (uint32_t)i, .max_tokens = 10, .n_logprobs = i == 1 ? 3 : 0});
    for (int i = 0; i < 4; i++) complete(w, t[i]);
    step(w, TD_OK);
    unsigned before[] = {w->routers[0].n_messages, w->routers[1].n_messages};
    step(w, TD_OK);
    assert_int_equal(w->n_segments_last, 4);
    assert_int_equal(w->routers[0].n_messages, before[0] + 1);
    assert_int_equal(w->routers[1].n_messages, before[1] + 1);
    run(w);
    for (int i = 0; i < 4; i++) {
        expect_tokens(t[i], false, 9);
        expect_finished(t[i], LENGTH, "OK", false);
    }
    assert_int_equal(t[1]->n_logprobs, 9 * 4);
    assert_int_equal(t[0]->n_logprobs, 0);
    free_world(w);
}

static void no_more_than_max_batch_run_and_the_oldest_go_first(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.max_batch = 2});
    struct told *t[4];
    for (uint64_t i = 0; i < 4; i++)
        t[i] = start(w, 0, i, (struct ask){.n_prompt = 5, .max_tokens = 4 + 2 * (uint32_t)i});
    complete(w, t[3]); /* KV arrives in another order */
    complete(w, t[2]);
    complete(w, t[1]);
    complete(w, t[0]);
    while (step(w, TD_OK)) assert_true(w->n_segments_last <= 2);
    for (uint32_t i = 0; i < 4; i++) expect_tokens(t[i], false, 3 + 2 * i);
    free_world(w);
}

/* --- the prefix cache -------------------------------------------------------------------------------------- */

/* A turn of a conversation: history is the last turn's tokens, its answer and some more. */
static struct told *turn(struct world *w, uint64_t id, const uint32_t *tokens, uint32_t n, struct ask a)
{
    a.tokens = tokens;
    a.n_prompt = n;
    return start(w, 0, id, a);
}

static void the_second_turn_receives_only_what_is_not_here(void **state)
{
    (void)state;
    for (int is_local = 0; is_local < 2; is_local++)
        for (uint32_t n = 1; n <= 24; n++) {
            struct world *w = make_world((struct shape){0}), *cold = make_world((struct shape){.has_no_cache = true});
            uint32_t history[CONTEXT];
            struct told *a = start(w, 0, 1, (struct ask){.n_prompt = n, .max_tokens = 10, .is_local = is_local});
            if (!is_local) complete(w, a);
            run(w);
            memcpy(history, a->prompt, n * sizeof history[0]);
            expected(a, true, 10, history + n);
            for (uint32_t i = 0; i < 8; i++) history[n + 10 + i] = 40 + i;
            struct ask ask = {.max_tokens = 12, .is_local = is_local};
            struct told *b = turn(w, 2, history, n + 18, ask), *want = turn(cold, 2, history, n + 18, ask);
            /* The KV of all but the last drawn token is known, in whole pages. */
            uint32_t known = (n + 9) / PAGE * PAGE;
            if (!is_local) {
                assert_int_equal(b->cached, known);
                assert_int_equal(b->n_pages[TD_KV_FULL], (n + 18 - 1) / PAGE + 1 - known / PAGE);
                complete(w, b);
                complete(cold, want);
            }
            run(w);
            run(cold);
            assert_true(!is_local || (b->n_cached_here >= known && b->n_cached_here < known + PAGE));
            assert_int_equal(b->n_tokens, want->n_tokens);
            assert_memory_equal(b->tokens, want->tokens, b->n_tokens * sizeof b->tokens[0]);
            expect_finished(b, LENGTH, "OK", false);
            free_world(w);
            free_world(cold);
        }
}

static void what_a_preempted_request_had_is_still_there_when_it_comes_back(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_full = 40});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 20, .max_tokens = 30});
    complete(w, a);
    for (int i = 0; i < 9; i++) step(w, TD_OK);
    cancel(w, 0, 1);
    run(w);
    uint32_t history[CONTEXT];
    memcpy(history, a->prompt, sizeof history);
    expected(a, true, 10, history + 20);
    struct told *b = turn(w, 2, history, 20, (struct ask){.n_generated = 10, .max_tokens = 30, .is_local = true});
    run(w);
    assert_int_equal(b->n_cached_here, 28);
    expect_tokens(b, true, 20);
    free_world(w);
}

static void cached_pages_give_way_to_those_who_need_them(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_sliding = 20, .n_full = 16});
    for (uint64_t id = 1; id <= 20; id++) {
        struct told *t = start(
            w, 0, id, (struct ask){.n_prompt = 30, .max_tokens = 30, .salt = (uint32_t)id * 11, .is_local = id % 2});
        if (id % 2 == 0) complete(w, t);
        run(w);
        expect_finished(t, LENGTH, "OK", false);
        expect_tokens(t, id % 2, id % 2 ? 30 : 29);
        expect_pages_back(w);
    }
    free_world(w);
}

/* --- ends before the end ----------------------------------------------------------------------------------- */

static void the_first_token_may_have_been_the_last(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    /* The router's word first: the prefill worker is asked to stop, and confirms. */
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    first_was_last(w, 0, 1);
    expect_finished(a, NONE, "OK", false);
    assert_int_equal(w->n_stops, 1);
    answer_stops(w);
    expect_pages_back(w);
    /* The prefill worker's word first: pages are back at once, the router hears nothing before it has said so itself.
     */
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 10, .max_tokens = 5});
    say(w, PREFILL_ID, TD_WIRE_ABORTED, (struct td_wire){.generation = b->generation, .status = TD_OK});
    expect_pages_back(w);
    assert_int_equal(b->n_finished, 0);
    first_was_last(w, 0, 2);
    expect_finished(b, NONE, "OK", false);
    /* A router that never says so still has a deadline and a cancel. */
    struct told *c = start(w, 0, 3, (struct ask){.n_prompt = 10, .max_tokens = 5, .timeout_us = 1000});
    say(w, PREFILL_ID, TD_WIRE_ABORTED, (struct td_wire){.generation = c->generation, .status = TD_OK});
    advance_ms(w, 2);
    expect_finished(c, NONE, "DEADLINE", false);
    /* KV came although the first token reached max_tokens. */
    struct told *d = start(w, 0, 4, (struct ask){.n_prompt = 10, .max_tokens = 1});
    complete(w, d);
    expect_finished(d, LENGTH, "OK", false);
    assert_int_equal(d->n_tokens, 0);
    assert_int_equal(td_decode_worker_n_requests(w->worker), 0);
    expect_pages_back(w);
    free_world(w);
}

enum stage { AT_RESERVED, AT_QUEUED, AT_RUNNING, AT_IN_FLIGHT, N_STAGES };

/* Brings request 1 into a stage; request 0 occupies the batch of one in AT_QUEUED. */
static struct told *bring(struct world *w, enum stage at, uint64_t timeout_us)
{
    if (at == AT_QUEUED) {
        struct told *blocker = start(w, 0, 0, (struct ask){.n_prompt = 4, .max_tokens = 50});
        complete(w, blocker);
    }
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 9, .max_tokens = 30, .timeout_us = timeout_us});
    if (at == AT_RESERVED) return t;
    complete(w, t);
    if (at == AT_QUEUED) return t;
    step(w, TD_OK);
    step(w, TD_OK);
    return t;
}

static void cancel_and_deadline_end_a_request_in_every_state(void **state)
{
    (void)state;
    for (int at = 0; at < N_STAGES; at++)
        for (int how = 0; how < 3; how++) {
            struct world *w = make_world((struct shape){.max_batch = 1});
            struct told *t = bring(w, (enum stage)at, how == 1 ? 20000 : 0);
            uint32_t n_tokens = t->n_tokens;
            if (how == 0) cancel(w, 0, 1);
            if (how == 1) advance_ms(w, 20);
            if (how == 2) lose_router(w, 0);
            if (how < 2) expect_finished(t, NONE, how == 0 ? "CANCELED" : "DEADLINE", false);
            if (how < 2) cancel(w, 0, 1); /* once more: nothing happens */
            step(w, TD_OK);
            assert_int_equal(t->n_tokens, n_tokens); /* out within one step */
            answer_stops(w);
            run(w);
            assert_int_equal(t->n_finished, how < 2);
            expect_pages_back(w);
            assert_int_equal(td_decode_worker_n_requests(w->worker), 0);
            free_world(w);
        }
}

static void a_lost_router_ends_its_requests_and_no_others(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    connect_router(w, 1);
    struct told *mine[3], *other = start(w, 1, 1, (struct ask){.n_prompt = 9, .max_tokens = 30});
    for (uint64_t i = 0; i < 3; i++) mine[i] = start(w, 0, i + 1, (struct ask){.n_prompt = 9, .max_tokens = 30});
    complete(w, other);
    complete(w, mine[0]);
    step(w, TD_OK);
    complete(w, mine[1]);
    lose_router(w, 0);
    assert_int_equal(td_decode_worker_n_requests(w->worker), 1);
    answer_stops(w);
    run(w);
    expect_tokens(other, false, 29);
    expect_finished(other, LENGTH, "OK", false);
    expect_pages_back(w);
    connect_router(w, 0); /* it comes back */
    struct told *again = start(w, 0, 1, (struct ask){.n_prompt = 9, .max_tokens = 3});
    complete(w, again);
    run(w);
    expect_tokens(again, false, 2);
    free_world(w);
}

/* --- prefill workers that fail ----------------------------------------------------------------------------- */

static void a_lost_prefill_worker_loses_its_hand_offs_and_pages_come_back_after_quarantine(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 10, .max_tokens = 5, .prefill = 0xF1});
    struct told *c = start(w, 0, 3, (struct ask){.n_prompt = 10, .max_tokens = 5});
    complete(w, c); /* its KV is here: it does not need the sender any more */
    td_decode_worker_on_peer_lost(w->worker, PREFILL_ID);
    expect_finished(a, NONE, "PEER_LOST", true);
    assert_int_equal(b->n_finished, 0);
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_decode_worker_load(w->worker, &load);
    assert_int_equal(load.quarantined_pages, 6);
    run(w);
    expect_tokens(c, false, 4);
    complete_from(w, 0xF1, b);
    run(w);
    expect_tokens(b, false, 4);
    advance_ms(w, 251);
    expect_pages_back(w);
    struct told *d = start(w, 0, 4, (struct ask){.n_prompt = 10, .max_tokens = 5}); /* the dead are known */
    expect_finished(d, NONE, "PEER_LOST", true);
    free_world(w);
}

static void an_aborted_or_false_hand_off_loses_the_request(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    say(w, PREFILL_ID, TD_WIRE_ABORTED, (struct td_wire){.generation = a->generation, .status = TD_E_DEVICE});
    expect_finished(a, NONE, "DEVICE", true);
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 10, .max_tokens = 5});
    say(w, PREFILL_ID, TD_WIRE_COMPLETE,
        (struct td_wire){.generation = b->generation, .first_token = 1, .n_ranks = 1, .kv_bytes = {17}});
    expect_finished(b, NONE, "PROTOCOL", true);
    /* The prefill worker lost its caller from sight, and who asked us still waits: OVER is for those that are over. */
    struct told *c = start(w, 0, 3, (struct ask){.n_prompt = 10, .max_tokens = 5});
    say(w, PREFILL_ID, TD_WIRE_ABORTED, (struct td_wire){.generation = c->generation, .status = TD_E_CANCELED});
    expect_finished(c, NONE, "STALE", true);
    answer_stops(w);
    expect_pages_back(w);
    assert_null(w->batches[0]);
    free_world(w);
}

static void a_prefill_worker_that_does_not_fit_is_refused_with_the_reason(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    const enum td_status why[] = {TD_E_UNKNOWN_PEER, TD_E_MISMATCH, TD_E_PEER_LOST};
    for (uint64_t i = 0; i < 3; i++) {
        w->peer_status = why[i];
        struct told *t = start(w, 0, i + 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
        expect_finished(t, NONE, td_status_name(why[i]), true);
        assert_non_null(strstr(t->message, "prefill:"));
    }
    expect_pages_back(w);
    free_world(w);
}

/* --- bad commands ------------------------------------------------------------------------------------------ */

static void a_bad_request_is_refused_by_field_and_harms_no_other(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *good = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    struct told *bad = start(w, 0, 2, (struct ask){.n_prompt = 10, .max_tokens = 0});
    expect_finished(bad, NONE, "INVALID", false);
    assert_memory_equal(bad->message, "max_tokens:", 11);
    bad = start(w, 0, 3, (struct ask){.n_prompt = 10, .max_tokens = 5, .last = VOCAB});
    expect_finished(bad, NONE, "INVALID", false);
    Tandem__V1__DecodeStart m = TANDEM__V1__DECODE_START__INIT; /* no request in it */
    m.stream_id = 4;
    w->routers[0].told[4].has_start = true;
    command(w, 0, TANDEM__V1__DECODE_COMMAND__COMMAND_START, &m);
    expect_finished(&w->routers[0].told[4], NONE, "INVALID", false);
    command(w, 0, TANDEM__V1__DECODE_COMMAND__COMMAND__NOT_SET, NULL); /* of a newer router */
    cancel(w, 0, 999);
    first_was_last(w, 0, 999);
    complete(w, good);
    run(w);
    expect_tokens(good, false, 4);
    free_world(w);
}

static void a_router_that_breaks_the_protocol_loses_its_stream(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    complete(w, t);
    hello(w, 0); /* twice */
    assert_int_equal(w->routers[0].closed, TD_E_PROTOCOL);
    cancel(w, 0, 1); /* what it still sends is ignored */
    run(w);
    expect_pages_back(w);
    lose_router(w, 0);

    connect_router(w, 0);
    start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5});
    start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 5}); /* the same id while it lives */
    assert_int_equal(w->routers[0].closed, TD_E_PROTOCOL);
    answer_stops(w);
    lose_router(w, 0);

    struct router *r = &w->routers[1];
    memset(r, 0, sizeof *r);
    r->stream = td_decode_worker_on_stream(w->worker, r);
    cancel(w, 1, 1); /* before hello */
    assert_int_equal(r->closed, TD_E_PROTOCOL);
    expect_pages_back(w);
    free_world(w);
}

/* --- a slow router ----------------------------------------------------------------------------------------- */

static void news_waits_for_a_busy_router_and_nothing_is_lost(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *t = start(w, 0, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
    complete(w, t);
    step(w, TD_OK);
    w->routers[0].is_busy = true;
    struct told *late = start(w, 0, 2, (struct ask){.n_prompt = 10, .max_tokens = 20});
    cancel(w, 0, 2); /* reserved and finished before the router hears of either */
    answer_stops(w);
    run(w);
    assert_int_equal(t->n_tokens, 1);
    expect_pages_back(w);
    w->routers[0].is_busy = false;
    unsigned before = w->routers[0].n_messages;
    td_decode_worker_on_writable(w->worker, w->routers[0].stream);
    assert_int_equal(w->routers[0].n_messages, before + 1);
    expect_tokens(t, false, 19);
    expect_finished(t, LENGTH, "OK", false);
    assert_true(late->is_reserved);
    expect_finished(late, NONE, "CANCELED", false);
    free_world(w);
}

static void a_router_that_never_reads_is_dropped_and_the_others_go_on(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    connect_router(w, 1);
    struct told *other = start(w, 1, 1, (struct ask){.n_prompt = 4, .max_tokens = 50});
    complete(w, other);
    w->routers[0].is_busy = true;
    uint64_t id = 1;
    uint32_t n_ids = MAX_IDS - 1;
    for (uint64_t round = 0; !w->routers[0].is_closed; round++) { /* refusals pile up, too */
        assert_true(round < 100000);
        w->routers[0].told[id].has_start = true;
        start(w, 0, id, (struct ask){.n_prompt = 5, .max_tokens = 0});
        id = id % n_ids + 1;
    }
    assert_int_equal(w->routers[0].closed, TD_E_SLOW_CLIENT);
    run(w);
    expect_tokens(other, false, 49);
    lose_router(w, 0);
    expect_pages_back(w);
    free_world(w);
}

/* --- pages ------------------------------------------------------------------------------------------------- */

static void a_prompt_that_finds_no_room_is_refused_and_one_that_never_will_is_told_so(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_sliding = 40, .n_full = 10});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 20, .max_tokens = 5}); /* 5 + 1 full pages to begin */
    assert_true(a->is_reserved);
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 20, .max_tokens = 5});
    expect_finished(b, NONE, "NO_PAGES", true);
    struct told *c = start(w, 0, 3, (struct ask){.n_prompt = 40, .max_tokens = 5}); /* 11 > 10 */
    expect_finished(c, NONE, "TOO_LARGE", false);
    /* 5 are free; 3 for a prompt of 12 and 1 to go on, and 1 for a's next page: just enough. 4 would leave a without.
     */
    struct told *d = start(w, 0, 4, (struct ask){.n_prompt = 16, .max_tokens = 5});
    expect_finished(d, NONE, "NO_PAGES", true);
    struct told *e = start(w, 0, 5, (struct ask){.n_prompt = 12, .max_tokens = 5});
    assert_true(e->is_reserved);
    complete(w, a);
    complete(w, e);
    run(w);
    expect_tokens(a, false, 4);
    expect_tokens(e, false, 4);
    free_world(w);
}

static void when_pages_run_out_the_youngest_gives_way_and_the_oldest_always_advances(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_sliding = 40, .n_full = 16});
    struct told *t[3];
    for (uint64_t i = 0; i < 3; i++) {
        t[i] = start(w, 0, i, (struct ask){.n_prompt = 8, .max_tokens = 50});
        assert_true(t[i]->is_reserved);
    }
    for (int i = 0; i < 3; i++) complete(w, t[i]);
    uint32_t before = 0;
    while (step(w, TD_OK)) {
        assert_int_equal(t[0]->n_tokens, before + 1);
        before = t[0]->n_tokens;
    }
    expect_finished(t[2], NONE, "PREEMPTED", true);
    expect_finished(t[1], NONE, "PREEMPTED", true);
    assert_true(t[1]->n_tokens > t[2]->n_tokens);
    expect_tokens(t[1], false, t[1]->n_tokens); /* what it had is right: another worker goes on from it */
    expect_finished(t[0], LENGTH, "OK", false);
    expect_tokens(t[0], false, 49);
    expect_pages_back(w);
    free_world(w);
}

static void what_gave_way_comes_back_with_its_rank_when_there_is_a_margin(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_sliding = 40, .n_full = 18, .margin = 12});
    w->now_ns += 60 * TD_NS_PER_S;
    struct told *old = start(w, 0, 1, (struct ask){.n_prompt = 8, .max_tokens = 20, .age_us = 3000});
    struct told *mid = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 50, .age_us = 2000});
    assert_true(old->is_reserved && mid->is_reserved);
    complete(w, mid);
    complete(w, old);
    for (int i = 0; i < 8; i++) step(w, TD_OK); /* 5 pages each */
    /* 13 tokens need 4 pages, 3 or 4 more the margin of 12, 2 the others: not now. Without a past it fits. */
    struct told *back = start(w, 0, 3, (struct ask){.n_prompt = 8, .n_generated = 5, .max_tokens = 30, .age_us = 2500});
    expect_finished(back, NONE, "NO_PAGES", true);
    struct told *fresh = start(w, 0, 4, (struct ask){.n_prompt = 13, .max_tokens = 40});
    assert_true(fresh->is_reserved);
    cancel(w, 0, 4);
    answer_stops(w);
    while (old->n_finished == 0) assert_true(step(w, TD_OK));
    expect_finished(old, LENGTH, "OK", false);
    back = start(w, 0, 5, (struct ask){.n_prompt = 8, .n_generated = 5, .max_tokens = 45, .age_us = 2500000});
    assert_true(back->is_reserved);
    complete(w, back);
    run(w);
    /* It was born before the one that ran meanwhile, so that one gives way. */
    expect_finished(mid, NONE, "PREEMPTED", true);
    expect_finished(back, LENGTH, "OK", false);
    expect_tokens(back, false, 39);
    expect_pages_back(w);
    free_world(w);
}

static void a_sequence_alone_that_outgrows_the_pool_ends(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_full = 5});
    struct told *t = start(w, 0, 0, (struct ask){.n_prompt = 8, .max_tokens = 50});
    complete(w, t);
    run(w);
    expect_finished(t, NONE, "NO_PAGES", true);
    expect_tokens(t, false, 12); /* positions 8..19 were computed */
    expect_pages_back(w);
    free_world(w);
}

static void the_last_sequence_waits_for_pages_that_a_reservation_gives_back(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.n_full = 9});
    struct told *old =
        start(w, 0, 0, (struct ask){.n_prompt = 8, .max_tokens = 25}); /* 3 of 9 pages to begin, 8 at the end */
    struct told *young = start(w, 0, 1, (struct ask){.n_prompt = 14, .max_tokens = 5});
    assert_true(young->is_reserved); /* 4 of 9 */
    complete(w, old);
    while (step(w, TD_OK)) {
    }
    /* 5 pages hold positions 0..19; the 6th is wanted. The reservation was ended for it, and its sender is asked. */
    assert_int_equal(old->n_finished, 0);
    expect_finished(young, NONE, "PREEMPTED", true);
    assert_int_equal(w->n_stops, 1);
    advance_ms(w, 100);
    assert_null(w->batches[0]);
    answer_stops(w);
    assert_non_null(w->batches[0]); /* at once */
    run(w);
    expect_tokens(old, false, 24);
    expect_pages_back(w);

    /* A sender that stays silent does not hold it for ever. */
    old = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 25});
    young = start(w, 0, 3, (struct ask){.n_prompt = 14, .max_tokens = 5});
    complete(w, old);
    while (step(w, TD_OK)) {
    }
    advance_ms(w, 900);
    assert_int_equal(old->n_finished, 0);
    advance_ms(w, 1500);
    expect_finished(old, NONE, "NO_PAGES", true);
    answer_stops(w);
    expect_pages_back(w);
    free_world(w);
}

/* --- the engine fails, the operator speaks ----------------------------------------------------------------- */

static void a_failed_step_loses_its_sequences(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 8, .max_tokens = 9});
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 9});
    complete(w, a);
    step(w, TD_E_NO_MEMORY); /* of a request's scope: the worker goes on */
    expect_finished(a, NONE, "NO_MEMORY", true);
    assert_int_equal(w->n_broken, 0);
    complete(w, b);
    step(w, TD_OK);
    struct told *c = start(w, 0, 3, (struct ask){.n_prompt = 8, .max_tokens = 9});
    step(w, TD_E_DEVICE); /* of the process's: everything is lost */
    expect_finished(b, NONE, "DEVICE", true);
    expect_finished(c, NONE, "DEVICE", true);
    assert_int_equal(w->n_broken, 1);
    struct told *d = start(w, 0, 4, (struct ask){.n_prompt = 8, .max_tokens = 9});
    expect_finished(d, NONE, "DRAINING", true);
    answer_stops(w);
    expect_pages_back(w);
    free_world(w);
}

static void a_refused_step_loses_its_sequences_and_no_others(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *a = start(w, 0, 1, (struct ask){.n_prompt = 8, .max_tokens = 9});
    struct told *b = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 9});
    w->submit_status = TD_E_INVALID;
    complete(w, a);
    expect_finished(a, NONE, "INVALID", true);
    w->submit_status = TD_OK;
    complete(w, b);
    run(w);
    expect_tokens(b, false, 8);
    free_world(w);
}

static void draining_refuses_the_new_and_finishes_the_old(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){0});
    struct told *running = start(w, 0, 1, (struct ask){.n_prompt = 8, .max_tokens = 9});
    struct told *reserved = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 9});
    complete(w, running);
    td_decode_worker_drain(w->worker);
    struct told *late = start(w, 0, 3, (struct ask){.n_prompt = 8, .max_tokens = 9});
    expect_finished(late, NONE, "DRAINING", true);
    run(w);
    assert_int_equal(w->n_drained, 0);
    complete(w, reserved);
    w->routers[0].is_busy = true;
    run(w);
    assert_int_equal(w->n_drained, 0); /* its news is not on its way yet */
    w->routers[0].is_busy = false;
    td_decode_worker_on_writable(w->worker, w->routers[0].stream);
    assert_int_equal(w->n_drained, 1);
    expect_tokens(running, false, 8);
    expect_tokens(reserved, false, 8);
    td_decode_worker_close_streams(w->worker);
    assert_int_equal(w->routers[0].closed, TD_OK);
    lose_router(w, 0);
    assert_int_equal(w->n_drained, 1);
    expect_pages_back(w);
    free_world(w);
}

static void ending_all_tells_every_router_that_it_may_go_on_elsewhere(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.max_batch = 1});
    struct told *t[3];
    for (uint64_t i = 0; i < 3; i++) t[i] = start(w, 0, i, (struct ask){.n_prompt = 8, .max_tokens = 9});
    complete(w, t[0]);
    complete(w, t[1]);
    td_decode_worker_end_all(w->worker, TD_E_DEVICE, "a step hangs"); /* with that step in flight */
    for (int i = 0; i < 3; i++) expect_finished(t[i], NONE, "DEVICE", true);
    answer_stops(w);
    free_world(w); /* the step never ended */
}

static void the_description_is_json_with_every_request(void **state)
{
    (void)state;
    struct world *w = make_world((struct shape){.max_batch = 1});
    start(w, 0, 1, (struct ask){.n_prompt = 8, .max_tokens = 9, .timeout_us = 5000000});
    struct told *t = start(w, 0, 2, (struct ask){.n_prompt = 8, .max_tokens = 9});
    complete(w, t);
    struct td_buf b = {0};
    td_decode_worker_describe(w->worker, &b);
    const char *s = td_buf_cstr(&b);
    assert_non_null(strstr(s, "\"request\":\"r0-1\",\"stream_id\":1,\"state\":\"RESERVED\""));
    assert_non_null(strstr(s, "\"request\":\"r0-2\",\"stream_id\":2,\"state\":\"RUNNING\""));
    assert_non_null(strstr(s, "\"deadline_ms\":5000}"));
    assert_non_null(strstr(s, "\"running\":1,\"queued\":0,\"reserved\":1"));
    int depth = 0;
    for (const char *p = s; *p != '\0'; p++) depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
    assert_int_equal(depth, 0);
    td_buf_free(&b);
    free_world(w);
}

/* --- anything at any time ---------------------------------------------------------------------------------- */

static void check_pages_add_up(const struct world *w)
{
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_decode_worker_load(w->worker, &load);
    assert_true(load.free_sliding_pages <= w->free_at_start[TD_KV_SLIDING]);
}

static void random_traffic(uint64_t seed, bool with_faults)
{
    struct shape s = {.n_sliding = 12 + (uint32_t)(td_rng_uniform(seed, 0, 1) * 30),
                      .n_full = 14 + (uint32_t)(td_rng_uniform(seed, 0, 2) * 60),
                      .max_batch = 1 + (uint32_t)(td_rng_uniform(seed, 0, 3) * 6),
                      .chunk = 1 + (uint32_t)(td_rng_uniform(seed, 0, 4) * 12),
                      .depth = 1 + seed % 2};
    struct world *w = make_world(s);
    connect_router(w, 1);
    bool is_local[2][MAX_IDS] = {{false}}, is_done[2][MAX_IDS] = {{false}};
    uint64_t n_ids[2] = {0, 0};
    for (uint64_t i = 1; i < 600; i++) {
        unsigned r = td_rng_uniform(seed, i, 0) < 0.5;
        double what = td_rng_uniform(seed, i, 1);
        uint64_t id = (uint64_t)(td_rng_uniform(seed, i, 2) * (double)n_ids[r]);
        struct router *ro = &w->routers[r];
        struct told *t = &ro->told[id];
        bool is_open = t->is_reserved && t->n_finished == 0 && !is_done[r][id] && !is_local[r][id];
        if (with_faults && td_rng_uniform(seed, i, 9) < 0.1)
            td_fault_arm(TD_FAULT_ALLOC, (uint32_t)(td_rng_uniform(seed, i, 10) * 8), 1);
        if (ro->is_closed) { /* only where memory ran out */
            assert_true(with_faults);
            lose_router(w, r);
            td_fault_disarm_all();
            connect_router(w, r);
            n_ids[r] = 0;
            memset(is_done[r], 0, sizeof is_done[r]);
            memset(is_local[r], 0, sizeof is_local[r]);
            continue;
        }
        if (what < 0.3 && n_ids[r] < MAX_IDS - 1) {
            id = n_ids[r]++;
            is_local[r][id] = td_rng_uniform(seed, i, 3) < 0.4;
            start(w, r, id,
                  (struct ask){.n_prompt = 1 + (uint32_t)(td_rng_uniform(seed, i, 4) * 40),
                               .max_tokens = 1 + (uint32_t)(td_rng_uniform(seed, i, 5) * 25),
                               .is_local = is_local[r][id],
                               .last = td_rng_uniform(seed, i, 6) < 0.2 ? 62 : 0,
                               .timeout_us = td_rng_uniform(seed, i, 7) < 0.2 ? 30000 : 0,
                               .n_logprobs = td_rng_uniform(seed, i, 8) < 0.2 ? 2 : 0,
                               .presence_penalty = td_rng_uniform(seed, i, 11) < 0.2 ? 1 : 0,
                               .salt = (uint32_t)seed});
        } else if (what < 0.5 && is_open) {
            is_done[r][id] = true;
            complete(w, t);
        } else if (what < 0.53 && t->has_start) {
            cancel(w, r, id);
        } else if (what < 0.55 && is_open) {
            is_done[r][id] = true;
            say(w, PREFILL_ID, TD_WIRE_ABORTED,
                (struct td_wire){.generation = t->generation,
                                 .status = td_rng_uniform(seed, i, 3) < 0.5 ? TD_OK : TD_E_DEVICE});
        } else if (what < 0.57 && t->has_start) {
            first_was_last(w, r, id);
        } else if (what < 0.62) {
            answer_stops(w);
        } else if (what < 0.65) {
            advance_ms(w, 7);
        } else if (what < 0.67) {
            w->routers[r].is_busy = !w->routers[r].is_busy;
            td_decode_worker_on_writable(w->worker, w->routers[r].stream);
        } else {
            step(w, TD_OK);
        }
        check_pages_add_up(w);
        if (w->n_stops > MAX_STOPS / 2) answer_stops(w);
    }
    td_fault_disarm_all();
    for (unsigned r = 0; r < 2; r++) {
        w->routers[r].is_busy = false;
        if (!w->routers[r].is_closed) td_decode_worker_on_writable(w->worker, w->routers[r].stream);
        for (uint64_t id = 0; id < n_ids[r]; id++) {
            struct told *t = &w->routers[r].told[id];
            if (t->is_reserved && t->n_finished == 0 && !is_done[r][id] && !is_local[r][id]) complete(w, t);
        }
    }
    for (int i = 0; i < 400; i++) {
        run(w);
        answer_stops(w);
        advance_ms(w, 10);
    }
    for (unsigned r = 0; r < 2; r++)
        for (uint64_t id = 0; id < n_ids[r] && !w->routers[r].is_closed; id++) {
            struct told *t = &w->routers[r].told[id];
            if (t->n_finished == 0) cancel(w, r, id); /* over with its first token, says the prefill worker alone */
            assert_int_equal(t->n_finished, 1);
            uint32_t want[CONTEXT + 80];
            expected(t, is_local[r][id], t->n_tokens, want);
            for (uint32_t k = 0; k < t->n_tokens; k++) assert_int_equal(t->tokens[k], want[k]);
            if (t->reason == STOP && t->n_tokens > 0) assert_int_equal(t->tokens[t->n_tokens - 1], STOP_ID);
        }
    answer_stops(w);
    assert_int_equal(td_decode_worker_n_requests(w->worker), 0);
    expect_pages_back(w);
    free_world(w);
}

static void random_traffic_leaves_right_tokens_one_end_each_and_every_page(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 150; seed++) random_traffic(seed, false);
}

static void random_traffic_survives_failed_allocations(void **state)
{
    (void)state;
    for (uint64_t seed = 1001; seed <= 1100; seed++) random_traffic(seed, true);
}

/* Commands as a router packs them, with bytes changed on the way: whatever still decodes is handled. */
static void damaged_commands_are_survived(void **state)
{
    (void)state;
    uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, stop = STOP_ID;
    Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Sampling__LogitBiasEntry bias = TANDEM__V1__SAMPLING__LOGIT_BIAS_ENTRY__INIT,
                                         *biases[] = {&bias, &bias};
    s.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    s.top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P;
    s.top_p = 0.5f;
    s.n_logit_bias = 1;
    s.logit_bias = biases;
    Tandem__V1__TokenRequest q = TANDEM__V1__TOKEN_REQUEST__INIT;
    q.request_id = "id";
    q.token_ids = tokens;
    q.n_token_ids = 9;
    q.n_prompt = 7;
    q.sampling = &s;
    q.max_tokens = 8;
    q.min_tokens = 2;
    q.stop_ids = &stop;
    q.n_stop_ids = 1;
    q.n_logprobs = 2;
    q.timeout_us = 5;
    Tandem__V1__DecodeStart start_body = TANDEM__V1__DECODE_START__INIT;
    start_body.request = &q;
    Tandem__V1__DecodeCancel cancel_body = TANDEM__V1__DECODE_CANCEL__INIT;
    unsigned n_decoded = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        struct world *w = make_world((struct shape){0});
        w->routers[0].is_deaf = true;
        for (uint64_t i = 0; i < 40; i++) {
            Tandem__V1__DecodeCommand c = TANDEM__V1__DECODE_COMMAND__INIT;
            start_body.stream_id = cancel_body.stream_id = i / 2;
            start_body.prefill = i % 3 == 0 ? 0 : PREFILL_ID;
            bool is_start = td_rng_uniform(seed, i, 0) < 0.8;
            c.command_case =
                is_start ? TANDEM__V1__DECODE_COMMAND__COMMAND_START : TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL;
            if (is_start)
                c.start = &start_body;
            else
                c.cancel = &cancel_body;
            uint8_t bytes[256];
            size_t n = tandem__v1__decode_command__pack(&c, bytes);
            assert_true(n < sizeof bytes);
            for (uint64_t k = 0; k < 2; k++)
                if (td_rng_uniform(seed, i, 3 + (uint32_t)k) < 0.7)
                    bytes[(size_t)(td_rng_uniform(seed, i, 5 + (uint32_t)k) * (double)n)] =
                        (uint8_t)(td_rng_uniform(seed, i, 7 + (uint32_t)k) * 256);
            Tandem__V1__DecodeCommand *got = tandem__v1__decode_command__unpack(NULL, n, bytes);
            if (got != NULL && got->command_case != TANDEM__V1__DECODE_COMMAND__COMMAND_PEER) {
                n_decoded++;
                td_decode_worker_on_command(w->worker, w->routers[0].stream, got);
            }
            if (got != NULL) tandem__v1__decode_command__free_unpacked(got, NULL);
            if (td_rng_uniform(seed, i, 1) < 0.5) step(w, TD_OK);
            if (w->n_stops > MAX_STOPS / 2) answer_stops(w);
        }
        lose_router(w, 0);
        answer_stops(w);
        run(w);
        answer_stops(w);
        expect_pages_back(w);
        free_world(w);
    }
    assert_true(n_decoded > 4000);
}

int main(void)
{
    td_log_open("test", TD_LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_reserved_completed_and_decoded_to_its_end),
        cmocka_unit_test(a_long_sequence_keeps_only_the_window_of_sliding_pages),
        cmocka_unit_test(it_ends_at_the_end_of_the_context),
        cmocka_unit_test(a_stop_id_is_the_last_token_and_waits_for_min_tokens),
        cmocka_unit_test(a_migrated_request_goes_on_where_it_was),
        cmocka_unit_test(a_prompt_computed_here_gives_the_same_tokens_in_chunks),
        cmocka_unit_test(a_prompt_computed_here_does_not_double_the_steps_of_the_others),
        cmocka_unit_test(one_message_a_step_carries_the_tokens_of_all_requests_of_a_router),
        cmocka_unit_test(no_more_than_max_batch_run_and_the_oldest_go_first),
        cmocka_unit_test(the_second_turn_receives_only_what_is_not_here),
        cmocka_unit_test(what_a_preempted_request_had_is_still_there_when_it_comes_back),
        cmocka_unit_test(cached_pages_give_way_to_those_who_need_them),
        cmocka_unit_test(the_first_token_may_have_been_the_last),
        cmocka_unit_test(cancel_and_deadline_end_a_request_in_every_state),
        cmocka_unit_test(a_lost_router_ends_its_requests_and_no_others),
        cmocka_unit_test(a_lost_prefill_worker_loses_its_hand_offs_and_pages_come_back_after_quarantine),
        cmocka_unit_test(an_aborted_or_false_hand_off_loses_the_request),
        cmocka_unit_test(a_prefill_worker_that_does_not_fit_is_refused_with_the_reason),
        cmocka_unit_test(a_bad_request_is_refused_by_field_and_harms_no_other),
        cmocka_unit_test(a_router_that_breaks_the_protocol_loses_its_stream),
        cmocka_unit_test(news_waits_for_a_busy_router_and_nothing_is_lost),
        cmocka_unit_test(a_router_that_never_reads_is_dropped_and_the_others_go_on),
        cmocka_unit_test(a_prompt_that_finds_no_room_is_refused_and_one_that_never_will_is_told_so),
        cmocka_unit_test(when_pages_run_out_the_youngest_gives_way_and_the_oldest_always_advances),
        cmocka_unit_test(what_gave_way_comes_back_with_its_rank_when_there_is_a_margin),
        cmocka_unit_test(a_sequence_alone_that_outgrows_the_pool_ends),
        cmocka_unit_test(the_last_sequence_waits_for_pages_that_a_reservation_gives_back),
        cmocka_unit_test(a_failed_step_loses_its_sequences),
        cmocka_unit_test(a_refused_step_loses_its_sequences_and_no_others),
        cmocka_unit_test(draining_refuses_the_new_and_finishes_the_old),
        cmocka_unit_test(ending_all_tells_every_router_that_it_may_go_on_elsewhere),
        cmocka_unit_test(the_description_is_json_with_every_request),
        cmocka_unit_test(random_traffic_leaves_right_tokens_one_end_each_and_every_page),
        cmocka_unit_test(random_traffic_survives_failed_allocations),
        cmocka_unit_test(damaged_commands_are_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
