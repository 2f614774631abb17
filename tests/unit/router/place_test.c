/* router/place.c: who gets a request. */
#include "tests/unit/router/router_world.h"

#include "common/base/log.h"
#include "router/place.h"

struct world {
    struct virtual_env v;
    struct td_fleet_ports ports;
    struct td_fleet fleet;
};

static void ignore_worker(void *self, struct td_worker *w) { (void)self, (void)w; }
static void ignore_lost(void *self, struct td_worker *w, const char *why) { (void)self, (void)w, (void)why; }
static void ignore_change(void *self) { (void)self; }

static int setup(void **state)
{
    struct world *t = calloc(1, sizeof *t);
    virtual_env_init(&t->v);
    t->ports = (struct td_fleet_ports){&t->v.env, t, ignore_worker, ignore_lost, ignore_worker, ignore_change};
    td_fleet_init(&t->fleet, &t->ports, "model", 5000);
    *state = t;
    return 0;
}
static int teardown(void **state)
{
    struct world *t = *state;
    td_fleet_deinit(&t->fleet);
    free(t);
    return 0;
}

static struct td_worker *add(struct world *t, Tandem__V1__Role role, uint64_t incarnation)
{
    struct identity_message m;
    identity_init(&m, role, incarnation);
    struct td_worker *w = NULL;
    void *old = NULL;
    struct td_err err = {{0}};
    assert_int_equal(td_fleet_join(&t->fleet, &m.id, NULL, &w, &old, &err), TD_OK);
    w->is_wired = true;
    return w;
}

static enum td_status choose(struct world *t, const struct td_place_query *q, struct td_place *out)
{
    static const struct td_place_query first;
    struct td_err err = {{0}};
    enum td_status st = td_place_choose(&t->fleet, q != NULL ? q : &first, out, &err);
    if (st != TD_OK) assert_true(err.text[0] != '\0');
    return st;
}

static void decode_workers_can_serve_alone_and_prefill_workers_cannot(void **state)
{
    struct world *t = *state;
    struct td_place p;
    assert_int_equal(choose(t, NULL, &p), TD_E_UNAVAILABLE);
    add(t, PREFILL, 2);
    assert_int_equal(choose(t, NULL, &p), TD_E_UNAVAILABLE);
    td_fleet_find(&t->fleet, 2)->is_live = false;
    add(t, DECODE, 1);
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_int_equal(p.decode->incarnation, 1);
    assert_null(p.prefill);
    td_fleet_find(&t->fleet, 2)->is_live = true;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_int_equal(p.decode->incarnation, 1);
    assert_int_equal(p.prefill->incarnation, 2);
}

static void a_draining_gone_or_unwired_worker_gets_nothing(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1), *f = add(t, PREFILL, 2);
    struct td_place p;
    d->load.is_draining = true;
    assert_int_equal(choose(t, NULL, &p), TD_E_UNAVAILABLE);
    d->load.is_draining = false;
    d->is_wired = false;
    assert_int_equal(choose(t, NULL, &p), TD_E_UNAVAILABLE);
    d->is_wired = true;
    f->is_live = false;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_null(p.prefill);
    f->is_live = true;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.prefill, f);
}

static void the_decode_worker_with_the_fewest_sequences_is_taken(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1), *b = add(t, DECODE, 2);
    add(t, PREFILL, 3);
    struct td_place p;
    a->n_requests = 3;
    b->n_requests = 2;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
    b->load.n_running = 3; /* another router's */
    b->load.n_waiting = 1;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, a);
    b->load.n_waiting = 0; /* now as many: free pages decide */
    a->load.free_full_pages = 10;
    b->load.free_full_pages = 20;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
}

static void equal_workers_are_taken_in_turn(void **state)
{
    struct world *t = *state;
    struct td_worker *d[3] = {add(t, DECODE, 1), add(t, DECODE, 2), add(t, DECODE, 3)};
    struct td_worker *f[3] = {add(t, PREFILL, 4), add(t, PREFILL, 5), add(t, PREFILL, 6)};
    for (int i = 0; i < 9; i++) {
        struct td_place p;
        assert_int_equal(choose(t, NULL, &p), TD_OK);
        td_fleet_claim(&t->fleet, p.decode, p.prefill, 10);
        td_fleet_prefilled(&t->fleet, p.prefill, 10);
        td_fleet_release(&t->fleet, p.decode, true);
        td_fleet_release(&t->fleet, p.prefill, true);
        assert_ptr_equal(p.decode, d[i % 3]);
        assert_ptr_equal(p.prefill, f[i % 3]);
    }
}

static void at_most_one_request_waits_at_a_prefill_worker(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    struct td_worker *a = add(t, PREFILL, 2), *b = add(t, PREFILL, 3);
    struct td_place p;
    unsigned at_a = 0;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(choose(t, NULL, &p), TD_OK);
        td_fleet_claim(&t->fleet, p.decode, p.prefill, 10);
        at_a += p.prefill == a;
    }
    assert_int_equal(at_a, 2);
    assert_int_equal(choose(t, NULL, &p), TD_E_BUSY);
    td_fleet_prefilled(&t->fleet, b, 10);
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
}

static void shorter_prompts_ahead_are_preferred_among_equals(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    struct td_worker *a = add(t, PREFILL, 2), *b = add(t, PREFILL, 3);
    a->n_prefilling = b->n_prefilling = 1;
    a->prefill_tokens = 5000;
    b->prefill_tokens = 100;
    struct td_place p;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
    a->n_prefilling = b->n_prefilling = 0;
    a->prefill_tokens = b->prefill_tokens = 0;
}

static void a_full_worker_is_left_alone_until_it_reports(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1);
    add(t, PREFILL, 2);
    struct td_place p;
    a->is_full = true;
    assert_int_equal(choose(t, NULL, &p), TD_E_BUSY);
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_fleet_report(&t->fleet, a, &load);
    assert_int_equal(choose(t, NULL, &p), TD_OK);
}

static void a_worker_stuck_in_a_step_is_the_last_choice(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1), *b = add(t, DECODE, 2);
    add(t, PREFILL, 3);
    a->load.last_step_age_us = 5001000;
    b->n_requests = 50;
    struct td_place p;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
    b->load.is_draining = true;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, a);
    b->n_requests = 0;
}

static void a_retry_after_a_failed_run_prefers_another_prefill_worker(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    struct td_worker *a = add(t, PREFILL, 2), *b = add(t, PREFILL, 3);
    struct td_place_query q = {.failed_decode = 1, .failed_prefill = 2, .blame = TD_BLAME_PREFILL};
    struct td_place p;
    b->n_prefilling = 1; /* worse, but not the one that failed */
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
    assert_ptr_equal(p.decode, d);
    b->n_prefilling = 2; /* no room there now: rather wait than go back */
    assert_int_equal(choose(t, &q, &p), TD_E_BUSY);
    b->n_prefilling = 0;
    (void)a;
}

static void with_one_prefill_worker_that_failed_the_decode_worker_does_it_alone(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1), *f = add(t, PREFILL, 3);
    struct td_place_query q = {.failed_decode = 1, .failed_prefill = 3, .blame = TD_BLAME_PREFILL};
    struct td_place p;
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.decode, d);
    assert_null(p.prefill);
    q.same_ok = true; /* unless a fresh start there helps */
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.prefill, f);
}

static void the_last_try_after_failed_runs_needs_no_handoff(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    add(t, PREFILL, 3);
    add(t, PREFILL, 4);
    struct td_place_query q = {.failed_decode = 1, .failed_prefill = 3, .blame = TD_BLAME_PREFILL, .is_last_try = true};
    struct td_place p;
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.decode, d);
    assert_null(p.prefill);
}

static void a_lone_decode_worker_that_failed_is_tried_again_only_if_waiting_helps(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    struct td_place p;
    struct td_place_query q = {.failed_decode = 1, .failed_prefill = 2, .blame = TD_BLAME_DECODE};
    assert_int_equal(choose(t, &q, &p), TD_E_UNAVAILABLE);
    q.same_ok = true;
    assert_int_equal(choose(t, &q, &p), TD_OK);
}

static void who_gave_its_pages_up_comes_back_only_where_there_is_room_to_grow(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1);
    struct td_place_query q = {.n_tokens = 640, .is_back = true}; /* 11 pages of 64, with the next token's */
    struct td_place p;
    a->load.n_running = 3;
    a->load.free_full_pages = 13;
    assert_int_equal(choose(t, &q, &p), TD_E_BUSY);
    a->load.free_full_pages = 14; /* one more for each of the others */
    assert_int_equal(choose(t, &q, &p), TD_OK);
    a->load.free_full_pages = 0;
    assert_int_equal(choose(t, &q, &p), TD_E_BUSY);
    a->load.n_running = 0; /* nobody else is there: it can say itself whether this ever fits */
    assert_int_equal(choose(t, &q, &p), TD_OK);
    a->load.n_running = 3;
    q.is_back = false; /* others are sent, and refused by whoever knows better */
    assert_int_equal(choose(t, &q, &p), TD_OK);
}

static void a_failed_decode_worker_is_avoided(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    struct td_worker *b = add(t, DECODE, 2);
    add(t, PREFILL, 3);
    b->n_requests = 9;
    struct td_place_query q = {.failed_decode = 1, .failed_prefill = 3, .blame = TD_BLAME_DECODE, .same_ok = true};
    struct td_place p;
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
    b->n_requests = 0;
}

/* --- prefix caches --------------------------------------------------------------------------------------- */

static const uint64_t names[] = {10, 20, 30, 40};
static const struct td_place_query long_prompt = {.n_tokens = 260, .names = names, .n_names = 4};
static void knows(struct td_worker *w, uint32_t n) { td_prefixes_apply(&w->prefixes, true, names, n); }

static void the_prefill_worker_that_would_be_done_first_is_taken(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    struct td_worker *a = add(t, PREFILL, 2), *b = add(t, PREFILL, 3);
    struct td_place p;
    knows(b, 3);
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
    assert_int_equal(p.n_compute, 260 - 3 * 64);
    b->n_prefilling = 1;
    b->prefill_tokens = 150; /* 150 + 68 are still less than 260 */
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
    b->prefill_tokens = 250;
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.prefill, a);
    assert_int_equal(p.n_compute, 260);
    a->load.prefill_tokens_per_s = 100;
    b->load.prefill_tokens_per_s = 200;
    struct td_place_query q = long_prompt;
    q.on = TD_PREFILL_ON_PREFILL;
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.prefill, b);
    b->n_prefilling = TD_PLACE_PREFILL_DEPTH; /* a queue is not worth any cache */
    assert_int_equal(choose(t, &q, &p), TD_OK);
    assert_ptr_equal(p.prefill, a);
    b->n_prefilling = 0;
    b->prefill_tokens = 0;
}

static void a_decode_worker_that_knows_the_prompt_may_have_a_few_sequences_more(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1), *b = add(t, DECODE, 2), *c = add(t, DECODE, 3);
    add(t, PREFILL, 4);
    struct td_place p;
    knows(b, 1);
    knows(c, 4);
    a->load.n_running = 8;
    b->load.n_running = 10;
    c->load.n_running = 11;
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
    c->load.n_running = 10;
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.decode, c);
    b->load.n_running = 5; /* now that one is the least busy, and two more are too many */
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.decode, b);
}

static void a_prompt_that_the_decode_worker_knows_is_computed_there(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1), *f = add(t, PREFILL, 2);
    struct td_place p;
    d->load.prefill_tokens_per_s = f->load.prefill_tokens_per_s = 10000;
    t->fleet.handoff_us = 1000;
    d->load.n_running = 1;
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_ptr_equal(p.prefill, f);
    knows(d, 4);
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_null(p.prefill);
    assert_int_equal(p.n_compute, 4);
    knows(f, 4); /* a hand-off costs more than to compute 4 tokens beside one stream */
    assert_int_equal(choose(t, &long_prompt, &p), TD_OK);
    assert_null(p.prefill);
}

static void without_names_caches_do_not_matter(void **state)
{
    struct world *t = *state;
    struct td_worker *a = add(t, DECODE, 1), *b = add(t, DECODE, 2);
    add(t, PREFILL, 3);
    knows(b, 4);
    b->load.n_running = 1;
    struct td_place p;
    assert_int_equal(choose(t, NULL, &p), TD_OK);
    assert_ptr_equal(p.decode, a);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(decode_workers_can_serve_alone_and_prefill_workers_cannot),
        T(a_draining_gone_or_unwired_worker_gets_nothing),
        T(the_decode_worker_with_the_fewest_sequences_is_taken),
        T(equal_workers_are_taken_in_turn),
        T(at_most_one_request_waits_at_a_prefill_worker),
        T(shorter_prompts_ahead_are_preferred_among_equals),
        T(a_full_worker_is_left_alone_until_it_reports),
        T(a_worker_stuck_in_a_step_is_the_last_choice),
        T(a_retry_after_a_failed_run_prefers_another_prefill_worker),
        T(with_one_prefill_worker_that_failed_the_decode_worker_does_it_alone),
        T(the_last_try_after_failed_runs_needs_no_handoff),
        T(a_lone_decode_worker_that_failed_is_tried_again_only_if_waiting_helps),
        T(who_gave_its_pages_up_comes_back_only_where_there_is_room_to_grow),
        T(a_failed_decode_worker_is_avoided),
        T(the_prefill_worker_that_would_be_done_first_is_taken),
        T(a_decode_worker_that_knows_the_prompt_may_have_a_few_sequences_more),
        T(a_prompt_that_the_decode_worker_knows_is_computed_there),
        T(without_names_caches_do_not_matter),
    };
    td_log_open("test", TD_LOG_OFF);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
