/* router/admit.c: the queue's bounds and order, with real fleet, placement and requests. */
#include "tests/unit/router/router_world.h"

#include "common/base/log.h"
#include "router/admit.h"

enum { N_MAX = 4, N_REQUESTS = 16 };

struct world {
    struct virtual_env v;
    struct td_fleet_ports fleet_ports;
    struct td_fleet fleet;
    struct td_admit admit;
    struct td_router_ports ports;
    struct td_request r[N_REQUESTS];
    unsigned n_begun, n_done, n_starts;
    struct td_request *started[64];
    enum td_status done_st[N_REQUESTS];
};

static void up(void *self, struct td_worker *w) { (void)self, w->is_wired = true; }
static void ignore_lost(void *self, struct td_worker *w, const char *why) { (void)self, (void)w, (void)why; }
static void ignore_forget(void *self, struct td_worker *w) { (void)self, (void)w; }
static void changed(void *self)
{
    struct world *t = self;
    if (t->admit.env != NULL) td_admit_kick(&t->admit);
}

static enum td_status port_place(void *self, struct td_request *r, struct td_err *err)
{
    return td_admit_place(&((struct world *)self)->admit, r, err);
}
static void port_leave(void *self, struct td_request *r) { td_admit_remove(&((struct world *)self)->admit, r); }
static enum td_status port_start(void *self, struct td_request *r, struct td_err *err)
{
    struct world *t = self;
    (void)err;
    t->started[t->n_starts++] = r;
    return TD_OK;
}
static void port_nothing(void *self, struct td_request *r) { (void)self, (void)r; }
static bool port_full(void *self, struct td_request *r)
{
    (void)self;
    r->decode->is_full = true;
    return false;
}
static void port_prefilled(void *self, struct td_request *r)
{
    td_fleet_prefilled(&((struct world *)self)->fleet, r->prefill != NULL ? r->prefill : r->decode, r->n_charged);
}
static void port_release(void *self, struct td_request *r, struct td_worker *w, bool made_room)
{
    (void)r;
    td_fleet_release(&((struct world *)self)->fleet, w, made_room);
}
static enum td_status port_emit(void *self, struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    (void)self, (void)r, (void)n, (void)logprobs;
    return TD_OK;
}
static void port_done(void *self, struct td_request *r, enum td_status st, const char *text)
{
    struct world *t = self;
    (void)text;
    t->n_done++;
    t->done_st[r - t->r] = st;
}

static int setup(void **state)
{
    struct world *t = calloc(1, sizeof *t);
    virtual_env_init(&t->v);
    t->fleet_ports = (struct td_fleet_ports){&t->v.env, t, up, ignore_lost, ignore_forget, changed};
    td_fleet_init(&t->fleet, &t->fleet_ports, "model", 1000000);
    td_admit_init(&t->admit, &t->v.env, &t->fleet, N_MAX);
    t->ports = (struct td_router_ports){
        .env = &t->v.env,
        .self = t,
        .place = port_place,
        .leave_queue = port_leave,
        .decode_start = port_start,
        .decode_cancel = port_nothing,
        .decode_full = port_full,
        .prefilled = port_prefilled,
        .release = port_release,
        .emit = port_emit,
        .done = port_done,
    };
    *state = t;
    return 0;
}
static int teardown(void **state)
{
    struct world *t = *state;
    for (unsigned i = 0; i < t->n_begun; i++) {
        td_request_on_client_gone(&t->r[i], TD_E_CANCELED);
        td_request_deinit(&t->r[i]);
    }
    assert_int_equal(t->n_done, t->n_begun);
    assert_int_equal(t->admit.n_waiting, 0);
    assert_true(td_list_is_empty(&t->admit.queue));
    TD_LIST_FOREACH (it, &t->fleet.workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        assert_int_equal(w->n_requests, 0);
        assert_int_equal(w->n_prefilling, 0);
    }
    td_admit_deinit(&t->admit);
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
    assert_int_equal(td_fleet_join(&t->fleet, &m.id, NULL, &w, &old, NULL), TD_OK);
    return w;
}

static struct td_request *submit(struct world *t)
{
    struct td_request *r = &t->r[t->n_begun++];
    td_request_init(r, &t->ports);
    r->tokens = td_calloc(10, sizeof(uint32_t));
    r->n_tokens = r->n_prompt = r->cap_tokens = 10;
    r->max_tokens = 5;
    td_request_begin(r);
    td_request_on_ready(r);
    return r;
}
static const char *state_of(const struct td_request *r) { return td_request_state_name(r); }
static void pump(struct world *t) { virtual_pass_ms(&t->v, 0); }
static void refuse_for_room(struct td_request *r)
{
    Tandem__V1__DecodeFinished f = TANDEM__V1__DECODE_FINISHED__INIT;
    f.status_name = (char *)"NO_PAGES";
    td_request_on_finished(r, &f);
}

static void without_workers_requests_are_refused_at_once(void **state)
{
    struct world *t = *state;
    struct td_err err = {{0}};
    assert_int_equal(td_admit_check(&t->admit, &err), TD_E_UNAVAILABLE);
    assert_non_null(strstr(err.text, "decode"));
    add(t, PREFILL, 2);
    assert_int_equal(td_admit_check(&t->admit, &err), TD_E_UNAVAILABLE);
    submit(t);
    assert_int_equal(t->done_st[0], TD_E_UNAVAILABLE);
    add(t, DECODE, 1); /* is enough */
    assert_int_equal(td_admit_check(&t->admit, &err), TD_OK);
}

static void the_queue_is_bounded(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    struct td_err err = {{0}};
    for (unsigned i = 0; i < 2 + N_MAX; i++) {
        assert_int_equal(td_admit_check(&t->admit, &err), TD_OK);
        assert_string_equal(state_of(submit(t)), i < 2 ? "RESERVING" : "QUEUED");
    }
    assert_int_equal(t->admit.n_waiting, N_MAX);
    assert_int_equal(td_admit_check(&t->admit, &err), TD_E_BUSY);
    assert_non_null(strstr(err.text, "--max-queue"));
    submit(t);
    assert_int_equal(t->done_st[2 + N_MAX], TD_E_BUSY);
}

static void prompts_being_tokenized_count(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    t->admit.n_tokenizing = N_MAX;
    assert_int_equal(td_admit_check(&t->admit, NULL), TD_E_BUSY);
}

static void first_come_first_served(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 5; i++) submit(t);
    for (unsigned i = 0; i < 3; i++) {
        td_request_on_client_gone(&t->r[i], TD_E_CANCELED); /* frees a place */
        assert_string_equal(state_of(&t->r[i + 2]), "QUEUED");
        pump(t);
        assert_ptr_equal(t->started[i + 2], &t->r[i + 2]);
        assert_string_equal(state_of(&t->r[i + 2]), "RESERVING");
    }
}

static void a_newcomer_does_not_overtake(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 3; i++) submit(t);
    td_request_on_client_gone(&t->r[0], TD_E_CANCELED);
    assert_string_equal(state_of(submit(t)), "QUEUED"); /* there is a place, but not for it */
    pump(t);
    assert_string_equal(state_of(&t->r[2]), "RESERVING");
    assert_string_equal(state_of(&t->r[3]), "QUEUED");
}

static void a_request_that_found_no_room_waits_in_front(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 4; i++) submit(t);
    refuse_for_room(&t->r[1]);
    pump(t);
    assert_string_equal(state_of(&t->r[1]), "QUEUED");
    assert_int_equal(t->n_starts, 2); /* nobody is sent to a full worker */
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_fleet_report(&t->fleet, d, &load);
    pump(t);
    assert_ptr_equal(t->started[2], &t->r[1]);
    assert_string_equal(state_of(&t->r[2]), "QUEUED");
}

static void many_refused_requests_keep_their_order(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    add(t, PREFILL, 2);
    submit(t);
    submit(t);
    submit(t); /* has not had its turn */
    refuse_for_room(&t->r[0]);
    refuse_for_room(&t->r[1]);
    pump(t);
    assert_int_equal(t->admit.n_waiting, 3);
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_fleet_report(&t->fleet, d, &load);
    pump(t);
    assert_int_equal(t->n_starts, 4);
    assert_ptr_equal(t->started[2], &t->r[0]);
    assert_ptr_equal(t->started[3], &t->r[1]);
    assert_int_equal(t->admit.n_waiting, 1);
}

static void the_end_of_another_request_makes_room(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    submit(t);
    submit(t);
    refuse_for_room(&t->r[1]);
    pump(t);
    assert_string_equal(state_of(&t->r[1]), "QUEUED");
    td_request_on_client_gone(&t->r[0], TD_E_CANCELED);
    pump(t);
    assert_string_equal(state_of(&t->r[1]), "RESERVING");
}

static void when_the_last_decode_worker_leaves_those_who_wait_hear_of_it(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 5; i++) submit(t);
    td_fleet_leave(&t->fleet, d);
    pump(t);
    for (int i = 2; i < 5; i++) assert_int_equal(t->done_st[i], TD_E_UNAVAILABLE);
    assert_string_equal(state_of(&t->r[0]), "RESERVING"); /* its stream tells, not the fleet */
    assert_string_equal(state_of(submit(t)), "FAILED");
}

static void a_new_worker_takes_from_the_queue(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 6; i++) submit(t);
    assert_int_equal(t->n_starts, 2);
    add(t, PREFILL, 3);
    pump(t);
    assert_int_equal(t->n_starts, 4);
}

static void a_retry_that_waits_for_another_worker_does_not_block_the_queue(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    struct td_worker *other = add(t, PREFILL, 3);
    for (int i = 0; i < 4; i++) submit(t); /* two at each */
    struct td_request *r = t->r[0].prefill == other ? &t->r[1] : &t->r[0];
    td_request_on_worker_lost(r, r->prefill, "silent"); /* as if: it stays in the pool here */
    virtual_pass_ms(&t->v, 200);
    assert_string_equal(state_of(r), "QUEUED"); /* the other one has no room */
    struct td_request *w = submit(t);
    td_admit_kick(&t->admit);
    pump(t);
    assert_string_equal(state_of(r), "QUEUED");
    assert_string_equal(state_of(w), "RESERVING");
    assert_int_equal(w->prefill->incarnation, 2);
}

/* What had to give its pages up waits for many; those that come later need few, and would take them one by one. */
static void nobody_overtakes_a_request_that_waits_for_its_pages(void **state)
{
    struct world *t = *state;
    struct td_worker *d = add(t, DECODE, 1);
    d->load.n_running = 1;
    d->load.free_full_pages = 1;
    submit(t);
    virtual_pass_ms(&t->v, 1);
    submit(t);
    struct td_request *r = &t->r[1];
    uint32_t ids[] = {7, 8};
    td_request_on_tokens(r, ids, NULL, 2);
    assert_string_equal(state_of(r), "DECODING");
    refuse_for_room(r);
    assert_string_equal(state_of(r), "QUEUED");
    assert_true(r->is_back);
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    load.n_running = 2;
    load.free_full_pages = 2; /* one for itself, and one for each of the others is wanted */
    td_fleet_report(&t->fleet, d, &load);
    pump(t);
    assert_string_equal(state_of(r), "QUEUED");
    struct td_request *newcomer = submit(t);
    pump(t);
    assert_string_equal(state_of(newcomer), "QUEUED");
    refuse_for_room(&t->r[0]); /* the older one had its turn too, and stands before it */
    assert_string_equal(state_of(&t->r[0]), "QUEUED");
    load.free_full_pages = 10;
    td_fleet_report(&t->fleet, d, &load);
    pump(t);
    assert_ptr_equal(t->started[2], &t->r[0]);
    assert_ptr_equal(t->started[3], r);
    assert_ptr_equal(t->started[4], newcomer);
}

static void a_client_that_leaves_leaves_the_queue(void **state)
{
    struct world *t = *state;
    add(t, DECODE, 1);
    add(t, PREFILL, 2);
    for (int i = 0; i < 5; i++) submit(t);
    td_request_on_client_gone(&t->r[3], TD_E_CANCELED);
    assert_int_equal(t->admit.n_waiting, 2);
    td_request_on_client_gone(&t->r[0], TD_E_CANCELED);
    td_request_on_client_gone(&t->r[1], TD_E_CANCELED);
    pump(t);
    assert_string_equal(state_of(&t->r[2]), "RESERVING");
    assert_string_equal(state_of(&t->r[4]), "RESERVING");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(without_workers_requests_are_refused_at_once),
        T(the_queue_is_bounded),
        T(prompts_being_tokenized_count),
        T(first_come_first_served),
        T(a_newcomer_does_not_overtake),
        T(a_request_that_found_no_room_waits_in_front),
        T(many_refused_requests_keep_their_order),
        T(the_end_of_another_request_makes_room),
        T(when_the_last_decode_worker_leaves_those_who_wait_hear_of_it),
        T(a_new_worker_takes_from_the_queue),
        T(a_retry_that_waits_for_another_worker_does_not_block_the_queue),
        T(nobody_overtakes_a_request_that_waits_for_its_pages),
        T(a_client_that_leaves_leaves_the_queue),
    };
    td_log_open("test", TD_LOG_OFF);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
