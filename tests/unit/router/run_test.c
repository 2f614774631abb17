/* router/run.c: an order's choices are served as requests of a fleet whose workers say what the test tells them to. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "common/base/log.h"
#include "router/router_int.h"
#include "router/run.h"

enum { MAX_CHOICES = 8 };

struct world {
    struct virtual_env v;
    struct td_router ro;
    struct td_worker *decode;
    unsigned n_started, n_canceled, n_left; /* at the worker; runs that are gone */
    enum td_status place_st[MAX_CHOICES];   /* of the n-th request placed */
    unsigned n_placed;

    struct td_run *run;
    char shown[MAX_CHOICES][128];
    unsigned n_ends, n_done;
    enum td_status done_st, event_st;
    char done_text[256];
    struct td_run_usage usage;
    bool is_inside; /* of a call that must not call back */
};

static struct world *the_world; /* whom main.c's functions speak for */
void td_router_update_ready(struct td_router *ro) { (void)ro; }
void td_router_client_left(struct td_router *ro)
{
    (void)ro;
    the_world->n_left++;
}

/* --- workers ------------------------------------------------------------------------------------------------------ */

static void up(void *self, struct td_worker *w) { (void)self, w->is_wired = true; }
static void ignore_lost(void *self, struct td_worker *w, const char *why) { (void)self, (void)w, (void)why; }
static void ignore_forget(void *self, struct td_worker *w) { (void)self, (void)w; }
static void ignore_changed(void *self) { (void)self; }

/* The ports' self is the router, as run.c has it. */
static struct world *world_of(void *self) { return TD_CONTAINER_OF(self, struct world, ro); }

static enum td_status place(void *self, struct td_request *r, struct td_err *err)
{
    struct world *w = world_of(self);
    enum td_status st = w->place_st[w->n_placed++ % MAX_CHOICES];
    if (st != TD_OK) return td_err_set(err, st, "told to refuse");
    r->decode = w->decode; /* no prefill worker: it computes the prompt itself */
    return TD_OK;
}
static enum td_status decode_start(void *self, struct td_request *r, struct td_err *err)
{
    (void)r, (void)err;
    world_of(self)->n_started++;
    return TD_OK;
}
static void decode_cancel(void *self, struct td_request *r)
{
    (void)r;
    world_of(self)->n_canceled++;
}
static void nothing(void *self, struct td_request *r) { (void)self, (void)r; }
static void release(void *self, struct td_request *r, struct td_worker *w, bool made_room)
{
    (void)self, (void)r, (void)w, (void)made_room;
}

/* --- the sink ----------------------------------------------------------------------------------------------------- */

static enum td_status on_event(void *user, uint32_t choice, const struct td_choice_event *e)
{
    struct world *w = user;
    assert_false(w->is_inside);
    assert_int_equal(w->n_done, 0);
    assert_true(choice < MAX_CHOICES);
    char *s = w->shown[choice];
    size_t n = strlen(s);
    if (e->type == TD_CHOICE_TEXT) snprintf(s + n, sizeof w->shown[0] - n, "%.*s", (int)e->text.n, e->text.p);
    if (e->type == TD_CHOICE_END) snprintf(s + n, sizeof w->shown[0] - n, "=%s", td_finish_name(e->finish));
    w->n_ends += e->type == TD_CHOICE_END;
    return w->event_st;
}

static void on_done(void *user, enum td_status st, const char *text)
{
    struct world *w = user;
    assert_false(w->is_inside);
    w->n_done++;
    w->done_st = st;
    snprintf(w->done_text, sizeof w->done_text, "%s", text);
    w->usage = td_run_usage_of(w->run);
    w->run = NULL;
}

static const struct td_run_sink sink = {.on_event = on_event, .on_done = on_done};

/* --- the world ---------------------------------------------------------------------------------------------------- */

static struct world *new_world(void)
{
    static struct td_fleet_ports fleet_ports;
    struct world *w = calloc(1, sizeof *w);
    struct td_router *ro = &w->ro;
    struct identity_message id;
    struct td_err err = {{0}};
    void *old;
    the_world = w;
    virtual_env_init(&w->v);
    ro->env = &w->v.env;
    ro->cfg.request_timeout = 10000;
    strcpy(ro->cfg.model_name, "model");
    strcpy(ro->cfg.current_date, "2025-11-03");
    fleet_ports = (struct td_fleet_ports){
        .env = ro->env, .self = w, .up = up, .lost = ignore_lost, .forget = ignore_forget, .changed = ignore_changed};
    td_fleet_init(&ro->fleet, &fleet_ports, "model", 1u << 30);
    td_admit_init(&ro->admit, ro->env, &ro->fleet, 100);
    identity_init(&id, DECODE, 1);
    id.id.vocab_size = 2048;
    assert_int_equal(td_fleet_join(&ro->fleet, &id.id, w, &w->decode, &old, &err), TD_OK);
    assert_int_equal(td_tokenizer_load("tests/tiny/tiny-model", &ro->tokenizer, &err), TD_OK);
    assert_int_equal(td_chat_format_open("harmony", ro->tokenizer, &ro->format, &err), TD_OK);
    ro->request_ports = (struct td_router_ports){.env = ro->env,
                                                 .self = ro,
                                                 .place = place,
                                                 .leave_queue = nothing,
                                                 .decode_start = decode_start,
                                                 .decode_cancel = decode_cancel,
                                                 .decode_first = nothing,
                                                 .prefilled = nothing,
                                                 .release = release};
    td_run_bind(ro);
    return w;
}

static void over(struct world *w)
{
    assert_true(td_list_is_empty(&w->ro.runs));
    assert_int_equal(w->ro.n_clients, 0);
    assert_int_equal(w->ro.n_running, 0);
    assert_int_equal(w->ro.admit.n_tokenizing, 0);
    td_admit_deinit(&w->ro.admit);
    td_fleet_deinit(&w->ro.fleet);
    td_chat_format_destroy(w->ro.format);
    td_tokenizer_destroy(w->ro.tokenizer);
    free(w);
}

static enum td_status start(struct world *w, uint32_t n_choices, size_t n_prompts, struct td_err *err)
{
    static const uint32_t ids[] = {65, 66, 67};
    struct td_order o;
    td_order_init(&o);
    struct td_order_prompt *prompts = td_order_alloc(&o, n_prompts + 1, sizeof *prompts);
    if (prompts == NULL) return TD_E_NO_MEMORY;
    for (size_t i = 0; i < n_prompts; i++) prompts[i] = (struct td_order_prompt){.ids = ids, .n_ids = 1 + i % 3};
    o.prompts = prompts;
    o.n_prompts = n_prompts;
    o.n_choices = n_choices;
    w->is_inside = true;
    enum td_status st = td_run_start(&w->ro, &o, &sink, w, &w->run, err);
    w->is_inside = false;
    td_order_deinit(&o);
    return st;
}

static struct td_request *request(struct world *w, uint32_t choice)
{
    return (struct td_request *)(uintptr_t)td_run_request(w->run, choice);
}

static void say(struct world *w, uint32_t choice, const char *text)
{
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    assert_int_equal(td_tokenizer_encode(w->ro.tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, &err), TD_OK);
    td_request_on_tokens(request(w, choice), ids.ids, NULL, (uint32_t)ids.n);
    td_token_list_free(&ids);
}

static void finish(struct world *w, uint32_t choice, Tandem__V1__FinishReason reason)
{
    Tandem__V1__DecodeFinished f = TANDEM__V1__DECODE_FINISHED__INIT;
    f.reason = reason;
    td_request_on_finished(request(w, choice), &f);
}

/* --- tests -------------------------------------------------------------------------------------------------------- */

static void choices_are_served_side_by_side(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct td_err err = {{0}};
    assert_int_equal(start(w, 2, 2, &err), TD_OK);
    assert_int_equal(w->n_started, 0); /* nothing happens within the call */
    virtual_pass_ms(&w->v, 0);
    assert_int_equal(w->n_started, 4);
    for (uint32_t i = 0; i < 4; i++) say(w, i, "Hello");
    assert_string_not_equal(request(w, 0)->id, request(w, 1)->id);
    say(w, 3, " there");
    finish(w, 3, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    for (uint32_t i = 0; i < 3; i++) finish(w, i, TANDEM__V1__FINISH_REASON__FINISH_STOP);
    assert_int_equal(w->n_done, 0); /* not within the worker's news either */
    virtual_pass_ms(&w->v, 0);
    assert_int_equal(w->n_done, 1);
    assert_int_equal(w->done_st, TD_OK);
    assert_string_equal(w->shown[0], "Hello=stop");
    assert_string_equal(w->shown[3], "Hello there=length");
    assert_int_equal(w->usage.prompt_tokens, 1 + 2); /* each prompt once */
    assert_true(w->usage.completion_tokens >= 5);
    assert_int_equal(w->n_left, 1);
    over(w);
}

static void the_first_failure_ends_all(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct td_err err = {{0}};
    w->place_st[2] = TD_E_BUSY;
    assert_int_equal(start(w, 4, 1, &err), TD_OK);
    virtual_pass_ms(&w->v, 0);
    assert_int_equal(w->n_done, 1);
    assert_int_equal(w->done_st, TD_E_BUSY);
    assert_string_equal(w->done_text, "told to refuse");
    assert_int_equal(w->n_started, 2);
    assert_int_equal(w->n_canceled, 2);
    over(w);
}

static void a_listener_that_cannot_keep_up_ends_all(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct td_err err = {{0}};
    assert_int_equal(start(w, 2, 1, &err), TD_OK);
    virtual_pass_ms(&w->v, 0);
    w->event_st = TD_E_SLOW_CLIENT;
    say(w, 1, "Hello");
    virtual_pass_ms(&w->v, 0);
    assert_int_equal(w->done_st, TD_E_SLOW_CLIENT);
    assert_int_equal(w->n_canceled, 2);
    over(w);
}

static void who_leaves_hears_no_more(void **state)
{
    (void)state;
    for (int when = 0; when < 3; when++) {
        struct world *w = new_world();
        struct td_err err = {{0}};
        assert_int_equal(start(w, 2, 1, &err), TD_OK);
        if (when > 0) virtual_pass_ms(&w->v, 0);
        if (when > 1) say(w, 0, "Hello");
        struct td_run *run = w->run;
        td_run_cancel(run);
        virtual_pass_ms(&w->v, 0);
        assert_int_equal(w->n_done, 0);
        assert_int_equal(w->n_ends, 0);
        assert_int_equal(w->n_canceled, when > 0 ? 2 : 0);
        assert_int_equal(w->n_left, 1);
        over(w);
    }
}

static void a_deadline_ends_all(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct td_err err = {{0}};
    assert_int_equal(start(w, 3, 1, &err), TD_OK);
    virtual_pass_ms(&w->v, 0);
    say(w, 0, "Hello");
    virtual_pass_ms(&w->v, 10001);
    assert_int_equal(w->n_done, 1);
    assert_int_equal(w->done_st, TD_E_DEADLINE);
    assert_int_equal(w->n_canceled, 3);
    over(w);
}

static void what_cannot_be_served_does_not_begin(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    struct world *w = new_world();
    assert_int_equal(start(w, 1, 0, &err), TD_E_INVALID);
    assert_int_equal(start(w, 100, 2, &err), TD_E_INVALID);
    w->ro.admit.n_max = 0;
    assert_int_equal(start(w, 1, 1, &err), TD_E_BUSY);
    w->ro.is_draining = true;
    assert_int_equal(start(w, 1, 1, &err), TD_E_DRAINING);
    w->ro.is_draining = false;
    w->decode->is_wired = false;
    assert_int_equal(start(w, 1, 1, &err), TD_E_UNAVAILABLE);
    assert_int_equal(w->n_placed, 0);
    over(w);
}

static void the_servers_limits_apply(void **state)
{
    (void)state;
    static const struct {
        uint32_t by_default, at_most, asked, served;
    } cases[] = {{0, 0, 0, 999},  {50, 0, 0, 50},  {50, 0, 70, 70}, {0, 40, 0, 40},
                 {50, 40, 0, 40}, {0, 40, 70, 40}, {0, 40, 7, 7}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct world *w = new_world();
        struct td_err err = {{0}};
        struct td_order o;
        static const uint32_t ids[] = {65};
        w->ro.cfg.default_max_tokens = cases[i].by_default;
        w->ro.cfg.max_output_tokens = cases[i].at_most;
        td_order_init(&o);
        struct td_order_prompt prompt = {.ids = ids, .n_ids = 1};
        o.prompts = &prompt;
        o.n_prompts = 1;
        o.stop.max_tokens = cases[i].asked;
        assert_int_equal(td_run_start(&w->ro, &o, &sink, w, &w->run, &err), TD_OK);
        virtual_pass_ms(&w->v, 0);
        assert_int_equal(request(w, 0)->max_tokens, cases[i].served);
        td_run_cancel(w->run);
        virtual_pass_ms(&w->v, 0);
        over(w);
    }
}

static void no_memory_is_said_whenever_it_happens(void **state)
{
    (void)state;
    bool was_complete = false;
    for (uint32_t k = 0; !was_complete; k++) {
        struct world *w = new_world();
        struct td_err err = {{0}};
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = start(w, 2, 1, &err);
        if (st == TD_OK) virtual_pass_ms(&w->v, 0);
        td_fault_disarm_all();
        was_complete = st == TD_OK && w->n_done == 0;
        if (was_complete)
            td_run_cancel(w->run);
        else
            assert_int_equal(st != TD_OK ? st : w->done_st, TD_E_NO_MEMORY);
        virtual_pass_ms(&w->v, 0);
        over(w);
        assert_true(k < 200);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choices_are_served_side_by_side),
        cmocka_unit_test(the_first_failure_ends_all),
        cmocka_unit_test(a_listener_that_cannot_keep_up_ends_all),
        cmocka_unit_test(who_leaves_hears_no_more),
        cmocka_unit_test(a_deadline_ends_all),
        cmocka_unit_test(what_cannot_be_served_does_not_begin),
        cmocka_unit_test(the_servers_limits_apply),
        cmocka_unit_test(no_memory_is_said_whenever_it_happens),
    };
    td_log_open("run_test", TD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
