/* router/fleet.c: who is alive, by streams, reports and silence; who may join. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "common/base/log.h"
#include "router/fleet.h"

struct world {
    struct virtual_env v;
    struct td_fleet_ports ports;
    struct td_fleet fleet;
    unsigned n_up, n_lost, n_forgotten, n_changed;
    struct td_worker *last_lost;
    uint64_t last_forgotten;
    char why[128];
};

static void on_up(void *self, struct td_worker *w)
{
    struct world *t = self;
    t->n_up++;
    w->is_wired = true;
}
static void on_lost(void *self, struct td_worker *w, const char *why)
{
    struct world *t = self;
    t->n_lost++;
    t->last_lost = w;
    w->join = NULL;
    snprintf(t->why, sizeof t->why, "%s", why);
}
static void on_forget(void *self, struct td_worker *w)
{
    struct world *t = self;
    t->n_forgotten++;
    t->last_forgotten = w->incarnation;
}
static void on_changed(void *self) { ((struct world *)self)->n_changed++; }

static int setup(void **state)
{
    struct world *t = calloc(1, sizeof *t);
    virtual_env_init(&t->v);
    t->ports = (struct td_fleet_ports){&t->v.env, t, on_up, on_lost, on_forget, on_changed};
    td_fleet_init(&t->fleet, &t->ports, "model", 1000);
    *state = t;
    return 0;
}
static int teardown(void **state)
{
    struct world *t = *state;
    td_fleet_deinit(&t->fleet);
    assert_true(td_list_is_empty(&t->v.timers));
    free(t);
    return 0;
}

static char join_a, join_b; /* owners of Join streams */

static struct td_worker *join(struct world *t, const struct identity_message *m, void *owner)
{
    struct td_worker *w = NULL;
    void *old = NULL;
    struct td_err err = {{0}};
    assert_int_equal(td_fleet_join(&t->fleet, &m->id, owner, &w, &old, &err), TD_OK);
    assert_null(old);
    return w;
}
static struct td_worker *add(struct world *t, Tandem__V1__Role role, uint64_t incarnation)
{
    struct identity_message m;
    identity_init(&m, role, incarnation);
    return join(t, &m, &join_a);
}
static void refuse(struct world *t, const struct identity_message *m, enum td_status want, const char *field)
{
    struct td_worker *w = NULL;
    void *old = NULL;
    struct td_err err = {{0}};
    unsigned before = t->n_up;
    assert_int_equal(td_fleet_join(&t->fleet, &m->id, &join_b, &w, &old, &err), want);
    assert_non_null(strstr(err.text, field));
    assert_null(w);
    assert_int_equal(t->n_up, before);
}
static void report(struct world *t, struct td_worker *w)
{
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_fleet_report(&t->fleet, w, &load);
}

static void a_worker_that_joins_is_in_the_pool_until_its_stream_ends(void **state)
{
    struct world *t = *state;
    struct td_worker *w = add(t, DECODE, 1);
    assert_int_equal(t->n_up, 1);
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 1);
    assert_int_equal(td_fleet_n(&t->fleet, PREFILL), 0);
    assert_true(t->n_changed > 0);
    td_fleet_leave(&t->fleet, w);
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 0);
    assert_int_equal(t->n_forgotten, 0); /* never while somebody up the stack may hold it */
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->n_forgotten, 1);
    assert_int_equal(t->n_lost, 0); /* its requests would have gone on */
}

static void a_worker_that_left_is_kept_while_requests_name_it(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1), *p = add(t, PREFILL, 2);
    td_fleet_claim(&t->fleet, d, p, 100);
    td_fleet_leave(&t->fleet, d);
    td_fleet_leave(&t->fleet, p);
    virtual_pass_ms(&t->v, 5000); /* nobody expects reports of it any more */
    assert_int_equal(t->n_forgotten, 0);
    assert_int_equal(t->n_lost, 0);
    td_fleet_prefilled(&t->fleet, p, 100);
    td_fleet_release(&t->fleet, p, true);
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->last_forgotten, 2);
    td_fleet_release(&t->fleet, d, true);
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->last_forgotten, 1);
}

static void a_silent_worker_is_lost_and_one_that_reports_is_not(void **state)
{
    struct world *t = *state;
    struct td_worker *silent = add(t, DECODE, 1), *chatty = add(t, DECODE, 2);
    silent->n_requests = 1;
    for (int i = 0; i < 30; i++) {
        virtual_pass_ms(&t->v, 100);
        report(t, chatty);
        if (i < 9) assert_int_equal(t->n_lost, 0);
    }
    assert_int_equal(t->n_lost, 1);
    assert_ptr_equal(t->last_lost, silent);
    assert_non_null(strstr(t->why, "silent"));
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 1);
    td_fleet_release(&t->fleet, silent, true);
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->n_forgotten, 1);
}

static void a_worker_whose_step_hangs_is_lost_though_it_reports(void **state)
{
    struct world *t = *state;
    struct identity_message m;
    identity_init(&m, DECODE, 1);
    m.id.step_timeout_ms = 500;
    struct td_worker *w = join(t, &m, &join_a);
    w->is_wired = true;
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 0); /* not before it has said how its present step does */
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    load.last_step_age_us = 500000;
    td_fleet_report(&t->fleet, w, &load);
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 1);
    assert_int_equal(t->n_lost, 0);
    load.last_step_age_us = 500001;
    td_fleet_report(&t->fleet, w, &load);
    assert_int_equal(t->n_lost, 1);
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 0);
    virtual_pass_ms(&t->v, 0);
    w = join(t, &m, &join_b); /* its loop lives and joins again: nothing is given to it */
    w->is_wired = true;
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 0);
    td_fleet_report(&t->fleet, w, &load);
    assert_int_equal(t->n_lost, 2);
}

static void a_lost_worker_that_wakes_up_may_come_back_as_itself(void **state)
{
    struct world *t = *state;
    struct td_worker *w = add(t, DECODE, 1);
    w->n_requests = 1; /* still named, so still known */
    virtual_pass_ms(&t->v, 2000);
    assert_int_equal(t->n_lost, 1);
    assert_ptr_equal(add(t, DECODE, 1), w);
    assert_true(w->is_live);
    assert_int_equal(t->n_up, 2);
    w->n_requests = 0;
}

static void a_restart_at_the_same_address_is_a_new_life(void **state)
{
    struct world *t = *state;
    struct td_worker *old = add(t, DECODE, 1);
    old->n_requests = 1;
    struct identity_message m;
    identity_init(&m, DECODE, 9);
    snprintf(m.address, sizeof m.address, "%s", old->identity->rpc_address);
    struct td_worker *fresh = join(t, &m, &join_b);
    assert_ptr_not_equal(fresh, old);
    assert_ptr_equal(t->last_lost, old);
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 1);
    td_fleet_release(&t->fleet, old, true);
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->last_forgotten, 1);
    assert_null(td_fleet_find(&t->fleet, 1));
    assert_ptr_equal(td_fleet_find(&t->fleet, 9), fresh);
}

static void a_new_life_may_differ_from_the_old_one_at_its_address(void **state)
{
    struct world *t = *state;
    struct td_worker *old = add(t, DECODE, 1);
    struct identity_message m;
    identity_init(&m, DECODE, 9);
    snprintf(m.address, sizeof m.address, "%s", old->identity->rpc_address);
    m.layout.page_tokens = 32;
    join(t, &m, &join_b);
    assert_int_equal(t->n_lost, 1);
}

static void joining_again_takes_over_from_the_older_stream(void **state)
{
    struct world *t = *state;
    struct td_worker *w = add(t, PREFILL, 1), *again = NULL;
    struct identity_message m;
    identity_init(&m, PREFILL, 1);
    void *old = NULL;
    assert_int_equal(td_fleet_join(&t->fleet, &m.id, &join_b, &again, &old, NULL), TD_OK);
    assert_ptr_equal(again, w);
    assert_ptr_equal(old, &join_a);
    assert_ptr_equal(w->join, &join_b);
    assert_int_equal(t->n_lost, 0);
}

static void nonsense_is_refused_by_field(void **state)
{
    struct world *t = *state;
    struct identity_message m;
#define REFUSE(change, st, field)                                                                                      \
    do {                                                                                                               \
        identity_init(&m, DECODE, 5);                                                                                  \
        change;                                                                                                        \
        refuse(t, &m, st, field);                                                                                      \
    } while (0)
    REFUSE(m.id.role = TANDEM__V1__ROLE__ROLE_NONE, TD_E_INVALID, "role");
    REFUSE(m.id.role = 17, TD_E_INVALID, "role");
    REFUSE(m.id.name = (char *)"", TD_E_INVALID, "name");
    REFUSE(m.id.name = (char *)"two words", TD_E_INVALID, "name");
    REFUSE(m.id.name = (char *)"line\nbreak", TD_E_INVALID, "name");
    REFUSE(m.id.name = (char *)"quo\"te", TD_E_INVALID, "name");
    REFUSE(m.id.rpc_address = (char *)"", TD_E_INVALID, "rpc_address");
    REFUSE(m.id.version = (char *)"\\", TD_E_INVALID, "version");
    REFUSE(m.id.max_context_tokens = 1, TD_E_INVALID, "max_context_tokens");
    REFUSE(m.id.vocab_size = 0, TD_E_INVALID, "vocab_size");
    REFUSE(m.eos[1] = 100, TD_E_INVALID, "eos_ids");
    REFUSE(m.id.descriptor = NULL, TD_E_INVALID, "descriptor");
    REFUSE(m.descriptor.incarnation = 0, TD_E_INVALID, "incarnation");
    REFUSE(m.descriptor.layout = NULL, TD_E_INVALID, "layout");
    REFUSE(m.id.model = (char *)"another", TD_E_MISMATCH, "model");
    char long_name[200];
    memset(long_name, 'x', sizeof long_name);
    long_name[199] = '\0';
    REFUSE(m.id.name = long_name, TD_E_INVALID, "name");
    assert_int_equal(td_fleet_n(&t->fleet, DECODE), 0);
}

static void a_worker_that_contradicts_the_fleet_is_refused_by_field(void **state)
{
    struct world *t = *state;
    struct identity_message m;
    add(t, DECODE, 1);
#undef REFUSE
#define REFUSE(change, field)                                                                                          \
    do {                                                                                                               \
        identity_init(&m, PREFILL, 5);                                                                                 \
        change;                                                                                                        \
        refuse(t, &m, TD_E_MISMATCH, field);                                                                           \
    } while (0)
    REFUSE(m.layout.model_fingerprint = (char *)"zzz", "model_fingerprint");
    REFUSE(m.layout.page_tokens = 32, "page_tokens: 32 here, 64 at decode-1");
    REFUSE(m.layout.n_sliding_layers = 4, "n_sliding_layers");
    REFUSE(m.layout.n_full_layers = 4, "n_full_layers");
    REFUSE(m.layout.n_kv_heads = 4, "n_kv_heads");
    REFUSE(m.layout.head_dim = 32, "head_dim");
    REFUSE(m.layout.window_tokens = 64, "window_tokens");
    REFUSE(m.layout.kv_dtype_sliding = (char *)"f32", "kv_dtype_sliding");
    REFUSE(m.layout.kv_dtype_full = (char *)"e4m3", "kv_dtype_full");
    REFUSE(m.layout.weight_form = (char *)"fp8", "weight_form");
    REFUSE(m.layout.layout_version = 2, "layout_version");
    REFUSE(m.id.vocab_size = 101, "vocab_size");
    REFUSE(m.eos[0] = 7, "eos_ids");
    REFUSE(m.id.n_eos_ids = 1, "eos_ids");
    identity_init(&m, PREFILL, 5);
    m.id.max_context_tokens = 500; /* not a contradiction: the least counts */
    join(t, &m, &join_b);
    assert_int_equal(td_fleet_least_context(&t->fleet), 500);
    assert_int_equal(td_fleet_most_context(&t->fleet), 1000);
}

static void an_incarnation_cannot_be_borrowed(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    struct identity_message m;
    identity_init(&m, PREFILL, 1);
    refuse(t, &m, TD_E_INVALID, "incarnation");
    identity_init(&m, DECODE, 1);
    snprintf(m.address, sizeof m.address, "elsewhere:1");
    refuse(t, &m, TD_E_INVALID, "incarnation");
}

static void what_a_worker_holds_is_counted(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1), *p = add(t, PREFILL, 2);
    td_fleet_claim(&t->fleet, d, p, 100);
    td_fleet_claim(&t->fleet, d, p, 50);
    assert_int_equal(d->n_requests, 2);
    assert_int_equal(p->n_prefilling, 2);
    assert_int_equal(p->prefill_tokens, 150);
    td_fleet_prefilled(&t->fleet, p, 100);
    assert_int_equal(p->n_prefilling, 1);
    assert_int_equal(p->prefill_tokens, 50);
    d->is_full = true;
    td_fleet_release(&t->fleet, d, false); /* was refused there: no room was made */
    assert_true(d->is_full);
    td_fleet_release(&t->fleet, d, true);
    assert_false(d->is_full);
    td_fleet_prefilled(&t->fleet, p, 50);
    td_fleet_release(&t->fleet, p, true);
    td_fleet_release(&t->fleet, p, true);
}

static void what_a_worker_says_of_its_cache_is_kept_with_it(void **state)
{
    struct world *t = *state;
    struct td_worker *w = add(t, DECODE, 1);
    assert_int_equal(td_fleet_page_tokens(&t->fleet), 64);
    Tandem__V1__PrefixNews news = TANDEM__V1__PREFIX_NEWS__INIT;
    uint64_t changes[] = {10, 20, 10 | 1};
    news.is_all = true;
    news.changes = changes;
    news.n_changes = 3;
    td_fleet_prefixes(&t->fleet, w, &news);
    assert_true(td_prefixes_has(&w->prefixes, 20));
    assert_false(td_prefixes_has(&w->prefixes, 10));
    td_fleet_leave(&t->fleet, w);
    virtual_pass_ms(&t->v, 0); /* it goes with the worker: nothing leaks */
    assert_null(td_fleet_find(&t->fleet, 1));
    assert_int_equal(td_fleet_page_tokens(&t->fleet), 0);
}

static void a_failed_allocation_refuses_the_worker_and_leaves_no_trace(void **state)
{
    struct world *t = *state;
    struct identity_message m;
    identity_init(&m, DECODE, 1);
    for (uint32_t k = 0; k < 2; k++) {
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        refuse(t, &m, TD_E_NO_MEMORY, "memory");
        td_fault_disarm_all();
        assert_true(td_list_is_empty(&t->fleet.workers));
    }
    join(t, &m, &join_a);
}

static void the_description_is_json_with_ages(void **state)
{
    struct world *t = *state;
    struct td_buf b = {0};
    td_fleet_describe(&t->fleet, &b);
    assert_string_equal(td_buf_cstr(&b), "[]");
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    virtual_pass_ms(&t->v, 700);
    td_buf_clear(&b);
    td_fleet_describe(&t->fleet, &b);
    assert_non_null(strstr(td_buf_cstr(&b), "\"name\":\"decode-1\",\"role\":\"decode\",\"state\":\"live\""));
    assert_non_null(strstr(td_buf_cstr(&b), "\"seen_ms_ago\":700"));
    td_buf_free(&b);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(a_worker_that_joins_is_in_the_pool_until_its_stream_ends),
        T(a_worker_that_left_is_kept_while_requests_name_it),
        T(a_silent_worker_is_lost_and_one_that_reports_is_not),
        T(a_worker_whose_step_hangs_is_lost_though_it_reports),
        T(a_lost_worker_that_wakes_up_may_come_back_as_itself),
        T(a_restart_at_the_same_address_is_a_new_life),
        T(a_new_life_may_differ_from_the_old_one_at_its_address),
        T(joining_again_takes_over_from_the_older_stream),
        T(nonsense_is_refused_by_field),
        T(a_worker_that_contradicts_the_fleet_is_refused_by_field),
        T(an_incarnation_cannot_be_borrowed),
        T(what_a_worker_holds_is_counted),
        T(what_a_worker_says_of_its_cache_is_kept_with_it),
        T(a_failed_allocation_refuses_the_worker_and_leaves_no_trace),
        T(the_description_is_json_with_ages),
    };
    td_log_open("test", TD_LOG_OFF);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
