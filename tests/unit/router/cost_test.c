/* router/cost.c: what computing a prompt costs where, by measured paces. */
#include "tests/unit/router/router_world.h"

#include "common/base/log.h"
#include "router/cost.h"
#include "router/place.h"

struct world {
    struct virtual_env v;
    struct td_fleet_ports ports;
    struct td_fleet fleet;
    struct td_worker *d, *p;
};

static void ignore_worker(void *self, struct td_worker *w) { (void)self, (void)w; }
static void ignore_lost(void *self, struct td_worker *w, const char *why) { (void)self, (void)w, (void)why; }
static void ignore_change(void *self) { (void)self; }

static struct td_worker *add(struct world *t, Tandem__V1__Role role, uint64_t incarnation)
{
    struct identity_message m;
    identity_init(&m, role, incarnation);
    struct td_worker *w = NULL;
    void *old = NULL;
    assert_int_equal(td_fleet_join(&t->fleet, &m.id, NULL, &w, &old, NULL), TD_OK);
    w->is_wired = true;
    return w;
}

static int setup(void **state)
{
    struct world *t = calloc(1, sizeof *t);
    virtual_env_init(&t->v);
    t->ports = (struct td_fleet_ports){&t->v.env, t, ignore_worker, ignore_lost, ignore_worker, ignore_change};
    td_fleet_init(&t->fleet, &t->ports, "model", 5000);
    t->d = add(t, DECODE, 1);
    t->p = add(t, PREFILL, 2);
    t->p->load.prefill_tokens_per_s = 10000;
    t->d->load.prefill_tokens_per_s = 5000;
    t->fleet.handoff_us = 4000;
    *state = t;
    return 0;
}
static int teardown(void **state)
{
    struct world *t = *state;
    t->p->prefill_tokens = t->d->prefill_tokens = 0;
    t->p->n_prefilling = 0;
    td_fleet_deinit(&t->fleet);
    free(t);
    return 0;
}

static bool is_local(struct world *t, uint32_t n_tokens, uint32_t n_behind, enum td_prefill_on on)
{
    struct td_place_query q = {.n_tokens = n_tokens, .n_behind = n_behind, .on = on};
    struct td_place out;
    struct td_err err;
    assert_int_equal(td_place_choose(&t->fleet, &q, &out, &err), TD_OK);
    return out.prefill == NULL;
}
static bool is_auto_local(struct world *t, uint32_t n_tokens) { return is_local(t, n_tokens, 0, TD_PREFILL_ON_AUTO); }

static void the_costs_are_those_of_the_model(void **state)
{
    struct world *t = *state;
    struct td_cost_query q = {.n_remote = 1000, .n_local = 500, .n_behind = 3};
    t->p->prefill_tokens = 2000;
    assert_int_equal(td_cost_remote_us(&t->fleet, t->p, &q), 200000 + 100000 + 4000 + 300000);
    t->d->prefill_tokens = 1000;
    t->d->load.n_running = 2;
    assert_int_equal(td_cost_local_us(t->d, t->p, &q), 200000 + 100000 + 2 * 100000);
    add(t, PREFILL, 3); /* those that wait have two to wait for */
    assert_int_equal(td_cost_remote_us(&t->fleet, t->p, &q), 200000 + 100000 + 4000 + 150000);
}

static void a_short_prompt_is_computed_where_its_answer_is(void **state)
{
    struct world *t = *state;
    assert_true(is_auto_local(t, 10));
    assert_false(is_auto_local(t, 1000));
    /* 4 ms of hand-off are worth 40 tokens here: 40/5000 s local, 40/10000 s and the hand-off remote. */
    assert_true(is_auto_local(t, 39));
    assert_false(is_auto_local(t, 40));
}

static void what_many_streams_would_wait_for_goes_to_a_prefill_worker(void **state)
{
    struct world *t = *state;
    assert_true(is_auto_local(t, 20));
    t->d->load.n_running = 10;
    assert_false(is_auto_local(t, 20));
}

static void decode_workers_help_when_prefill_workers_are_behind(void **state)
{
    struct world *t = *state;
    assert_false(is_auto_local(t, 1000));
    t->p->prefill_tokens = 2000;
    t->p->n_prefilling = 1;
    assert_true(is_auto_local(t, 1000));
    t->p->prefill_tokens = 500;
    assert_false(is_auto_local(t, 1000));
    assert_true(is_local(t, 1000, 10, TD_PREFILL_ON_AUTO)); /* and many wait for it */
}

static void with_all_prefill_workers_taken_waiting_is_weighed_too(void **state)
{
    struct world *t = *state;
    t->p->n_prefilling = TD_PLACE_PREFILL_DEPTH;
    t->p->prefill_tokens = 100; /* soon done */
    struct td_place_query q = {.n_tokens = 1000};
    struct td_place out;
    struct td_err err;
    assert_int_equal(td_place_choose(&t->fleet, &q, &out, &err), TD_E_BUSY);
    t->p->prefill_tokens = 20000;
    assert_int_equal(td_place_choose(&t->fleet, &q, &out, &err), TD_OK);
    assert_null(out.prefill);
}

static void until_something_was_measured_prompts_go_to_prefill_workers(void **state)
{
    struct world *t = *state;
    t->p->load.prefill_tokens_per_s = 0;
    assert_false(is_auto_local(t, 10));
    t->p->load.prefill_tokens_per_s = 10000;
    t->d->load.prefill_tokens_per_s = 0; /* thought as fast as the other until it has computed one */
    assert_true(is_auto_local(t, 10));
}

static void the_flag_decides_if_it_says_so(void **state)
{
    struct world *t = *state;
    assert_false(is_local(t, 10, 0, TD_PREFILL_ON_PREFILL));
    assert_true(is_local(t, 5000, 0, TD_PREFILL_ON_DECODE));
    t->p->is_live = false;
    assert_true(is_local(t, 5000, 0, TD_PREFILL_ON_PREFILL)); /* there is nobody else */
    t->p->is_live = true;
    enum td_prefill_on on;
    assert_true(td_place_parse_on("decode", &on) && on == TD_PREFILL_ON_DECODE);
    assert_true(td_place_parse_on("auto", &on) && on == TD_PREFILL_ON_AUTO);
    assert_false(td_place_parse_on("", &on) || td_place_parse_on("both", &on));
}

static void handoffs_are_measured_without_the_step_that_follows(void **state)
{
    struct world *t = *state;
    t->fleet.handoff_us = 0;
    t->d->load.step_us = 1000;
    td_fleet_note_handoff(&t->fleet, 6000);
    assert_int_equal(t->fleet.handoff_us, 5000);
    for (int i = 0; i < 100; i++) td_fleet_note_handoff(&t->fleet, 3000);
    assert_int_equal((int)(t->fleet.handoff_us + 0.5), 2000);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(the_costs_are_those_of_the_model),
        T(a_short_prompt_is_computed_where_its_answer_is),
        T(what_many_streams_would_wait_for_goes_to_a_prefill_worker),
        T(decode_workers_help_when_prefill_workers_are_behind),
        T(with_all_prefill_workers_taken_waiting_is_weighed_too),
        T(until_something_was_measured_prompts_go_to_prefill_workers),
        T(the_flag_decides_if_it_says_so),
        T(handoffs_are_measured_without_the_step_that_follows),
    };
    td_log_open("test", TD_LOG_OFF);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
