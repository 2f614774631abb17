/* A decode worker that plans a step while one runs: what is fed on, what is thrown away, and whose pages are whose
 * meanwhile. The world's engine looks at every page a step uses when it computes it. */
#include "tests/unit/decode/decode_world.h"

static struct world *make_deep(struct shape s)
{
    s.depth = 2;
    return make_world(s);
}

/* A request of which the first step and the one behind it are in flight. */
static struct told *start_two_steps(struct world *w, uint64_t id, struct ask a)
{
    struct told *t = start(w, 0, id, a);
    if (!a.is_local) complete(w, t);
    return t;
}

static void the_next_step_is_there_while_one_runs_and_goes_on_from_what_it_draws(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    struct told *t = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 12});
    assert_int_equal(w->n_batches, 2);
    const struct td_segment *first = &w->batches[0]->segments[0], *second = &w->batches[1]->segments[0];
    assert_false(first->is_fed);
    assert_true(second->is_fed);
    assert_int_equal(second->fed_by, 0);
    assert_int_equal(second->start, first->start + 1);
    assert_int_equal(second->draw_index, first->draw_index + 1);
    step(w, TD_OK);
    assert_int_equal(w->n_batches, 2); /* the third is there before the second has ended */
    run(w);
    expect_tokens(t, false, 11);
    expect_finished(t, LENGTH, "OK", false);
    assert_int_equal(w->n_steps, 11); /* its length is known: no step too many */
    free_world(w);
}

static void what_a_step_computes_for_a_sequence_that_ended_is_thrown_away(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    /* After 62 comes the stop id, and the engine goes on from it all the same. */
    struct told *t =
        start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20, .last = 62, .is_local = true});
    struct told *other = start_two_steps(w, 2, (struct ask){.n_prompt = 9, .max_tokens = 20});
    uint32_t free_before[TD_KV_N_GROUPS];
    while (t->n_finished == 0) {
        for (int g = 0; g < TD_KV_N_GROUPS; g++) free_before[g] = td_kv_pages_n_free(w->pages, (enum td_kv_group)g);
        assert_true(step(w, TD_OK));
    }
    expect_finished(t, STOP, "OK", false);
    assert_int_equal(t->n_tokens, 1);
    assert_int_equal(t->tokens[0], STOP_ID);
    assert_int_equal(w->n_batches, 2);
    bool is_in_flight = false;
    for (uint32_t i = 0; i < w->batches[0]->n_segments; i++)
        is_in_flight |= w->batches[0]->segments[i].start == t->n_prompt;
    assert_true(is_in_flight);
    /* The step still writes its pages; they come back when it has. */
    assert_true(td_kv_pages_n_free(w->pages, TD_KV_FULL) <= free_before[TD_KV_FULL]);
    uint32_t held = td_kv_pages_n_free(w->pages, TD_KV_FULL);
    step(w, TD_OK);
    assert_true(td_kv_pages_n_free(w->pages, TD_KV_FULL) > held);
    assert_int_equal(t->n_tokens, 1);
    run(w);
    expect_tokens(other, false, 19);
    free_world(w);
}

static void a_cancel_in_flight_keeps_the_pages_until_both_steps_are_done(void **state)
{
    (void)state;
    for (int when = 0; when < 3; when++) {
        struct world *w = make_deep((struct shape){.has_no_cache = true});
        struct told *t = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
        for (int i = 0; i < when; i++) step(w, TD_OK);
        assert_int_equal(w->n_batches, 2);
        uint32_t held = td_kv_pages_n_free(w->pages, TD_KV_FULL);
        cancel(w, 0, 1);
        expect_finished(t, NONE, "CANCELED", false);
        assert_int_equal(t->n_tokens, when);
        assert_int_equal(td_kv_pages_n_free(w->pages, TD_KV_FULL), held);
        step(w, TD_OK);
        assert_int_equal(td_kv_pages_n_free(w->pages, TD_KV_FULL), held); /* the second writes them */
        step(w, TD_OK);
        expect_pages_back(w);
        assert_int_equal(t->n_tokens, when);
        assert_int_equal(w->n_batches, 0);
        free_world(w);
    }
}

static void penalties_make_the_next_step_wait_for_all(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    struct told *plain = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 12});
    struct told *bound = start_two_steps(w, 2, (struct ask){.n_prompt = 9, .max_tokens = 8, .presence_penalty = 1});
    bool has_met = false;
    while (bound->n_finished == 0) {
        uint32_t n_plain = plain->n_tokens, n_bound = bound->n_tokens;
        for (uint32_t k = 0; k < w->n_batches && !has_met; k++) has_met = w->batches[k]->n_segments == 2;
        assert_true(step(w, TD_OK));
        assert_true(plain->n_tokens == n_plain + 1); /* each step that passes has both, as soon as they have met */
        if (n_bound > 0) assert_true(bound->n_tokens == n_bound + 1 || bound->n_finished == 1);
        if (bound->n_tokens < 6 && has_met) assert_int_equal(w->n_batches, 1); /* its last is known to be that */
    }
    assert_true(has_met);
    run(w);
    expect_tokens(plain, false, 11);
    expect_tokens(bound, false, 7);
    free_world(w);
}

/* The world's engine would see a page of the victim that is written by two. */
static void nobody_gives_way_while_a_step_is_in_flight(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){.n_full = 9, .has_no_cache = true});
    struct told *old = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
    struct told *young = start_two_steps(w, 2, (struct ask){.n_prompt = 11, .max_tokens = 20});
    while (young->n_finished == 0) {
        uint32_t n = w->n_batches;
        assert_true(step(w, TD_OK));
        if (young->n_finished == 1) assert_int_equal(n, 1); /* only when nothing was left in flight */
    }
    expect_finished(young, NONE, "PREEMPTED", true);
    run(w);
    expect_tokens(old, false, 19);
    expect_tokens(young, false, young->n_tokens);
    free_world(w);
}

static void draining_ends_when_the_last_step_in_flight_has_ended(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    struct told *t =
        start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20, .last = 62, .is_local = true});
    td_decode_worker_drain(w->worker);
    while (t->n_finished == 0) assert_true(step(w, TD_OK));
    assert_int_equal(w->n_batches, 1);
    assert_int_equal(w->n_drained, 0);
    step(w, TD_OK);
    assert_int_equal(w->n_drained, 1);
    free_world(w);
}

static void a_failed_step_takes_the_one_behind_it_along(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    struct told *t = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
    step(w, TD_OK);
    step(w, TD_E_DEVICE);
    expect_finished(t, NONE, "DEVICE", true);
    assert_int_equal(w->n_broken, 1);
    step(w, TD_E_DEVICE);
    assert_int_equal(w->n_broken, 1);
    assert_int_equal(t->n_tokens, 1);
    expect_pages_back(w);
    free_world(w);
}

static void a_refused_step_ends_its_own_and_leaves_the_one_before(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){0});
    struct told *t = start_two_steps(w, 1, (struct ask){.n_prompt = 10, .max_tokens = 20});
    w->submit_status = TD_E_INVALID;
    step(w, TD_OK); /* and the third is refused while the second is in flight */
    w->submit_status = TD_OK;
    assert_int_equal(w->n_batches, 1);
    expect_finished(t, NONE, "INVALID", true);
    assert_int_equal(t->n_tokens, 1);
    run(w);
    expect_pages_back(w);
    assert_int_equal(t->n_tokens, 1);
    free_world(w);
}

static void a_prompt_computed_here_copies_what_is_known_in_part_once(void **state)
{
    (void)state;
    struct world *w = make_deep((struct shape){.chunk = 2});
    uint32_t tokens[20];
    for (uint32_t i = 0; i < 20; i++) tokens[i] = 1 + i;
    start_two_steps(w, 1, (struct ask){.n_prompt = 16, .max_tokens = 2, .is_local = true, .tokens = tokens});
    run(w);
    tokens[15] = 50; /* the last block is known in part */
    struct told *t =
        start_two_steps(w, 2, (struct ask){.n_prompt = 20, .max_tokens = 6, .is_local = true, .tokens = tokens});
    assert_int_equal(w->n_batches, 2);
    assert_true(w->batches[0]->n_copies > 0);
    assert_int_equal(w->batches[1]->n_copies, 0);
    run(w);
    expect_tokens(t, true, 6);
    free_world(w);
}

int main(void)
{
    td_log_open("test", TD_LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_next_step_is_there_while_one_runs_and_goes_on_from_what_it_draws),
        cmocka_unit_test(what_a_step_computes_for_a_sequence_that_ended_is_thrown_away),
        cmocka_unit_test(a_cancel_in_flight_keeps_the_pages_until_both_steps_are_done),
        cmocka_unit_test(penalties_make_the_next_step_wait_for_all),
        cmocka_unit_test(nobody_gives_way_while_a_step_is_in_flight),
        cmocka_unit_test(draining_ends_when_the_last_step_in_flight_has_ended),
        cmocka_unit_test(a_failed_step_takes_the_one_behind_it_along),
        cmocka_unit_test(a_refused_step_ends_its_own_and_leaves_the_one_before),
        cmocka_unit_test(a_prompt_computed_here_copies_what_is_known_in_part_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
