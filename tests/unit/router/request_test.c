/* router/request.c: the life of a request on a virtual clock, with ports that record and workers that say what they are
 * told to. The order of news is the test's to choose. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "common/base/log.h"
#include "router/request.h"

enum { FIRST_TOKEN = 50, MAX_TOKENS = 8, PROMPT_TOKENS = 5 };

struct world {
    struct virtual_env v;
    struct td_router_ports ports;
    struct td_request r;
    struct td_worker d[3], p[3];
    struct identity_message ids[6];
    /* What the ports answer */
    enum td_status place_st, start_st, run_st, emit_st;
    unsigned which; /* pair that place gives */
    bool is_alone, is_local;
    /* What they saw */
    char log[4096];
    uint32_t emitted[256], n_emitted, n_logprobs;
    unsigned n_done, n_starts, n_runs, n_introduced;
    unsigned n_claims, n_released, n_places, n_prefilled;
    bool is_started, is_running, is_queued;
    enum td_status done_st;
    char done_text[600];
};

static void note(struct world *t, const char *what)
{
    size_t n = strlen(t->log);
    if (n < sizeof t->log - 32) snprintf(t->log + n, sizeof t->log - n, "%s%s", n > 0 ? " " : "", what);
}

static void take_pair(struct world *t)
{
    t->r.decode = &t->d[t->which];
    t->r.prefill = t->is_local ? NULL : &t->p[t->which];
    t->n_claims += t->is_local ? 1 : 2;
    t->n_places++;
}

static enum td_status port_place(void *self, struct td_request *r, struct td_err *err)
{
    struct world *t = self;
    note(t, "place");
    assert_null(r->decode);
    assert_null(r->prefill);
    if (t->place_st == TD_OK) {
        take_pair(t);
    } else if (t->place_st == TD_IN_PROGRESS) {
        t->is_queued = true;
    } else {
        td_err_set(err, t->place_st, "not placed");
    }
    return t->place_st;
}
static void port_leave_queue(void *self, struct td_request *r)
{
    struct world *t = self;
    (void)r;
    t->is_queued = false;
}
static enum td_status port_start(void *self, struct td_request *r, struct td_err *err)
{
    struct world *t = self;
    note(t, "start");
    assert_false(t->is_started);
    assert_non_null(r->decode);
    if (t->start_st != TD_OK) return td_err_set(err, t->start_st, "not started");
    /* It begins with everything that the client has, and that counts as generated. */
    assert_int_equal(r->n_tokens, PROMPT_TOKENS + t->n_emitted);
    assert_int_equal(r->n_prompt, PROMPT_TOKENS);
    for (unsigned i = 0; i < t->n_emitted; i++) assert_int_equal(r->tokens[PROMPT_TOKENS + i], t->emitted[i]);
    t->is_started = true;
    t->n_starts++;
    return TD_OK;
}
static void port_cancel(void *self, struct td_request *r)
{
    struct world *t = self;
    note(t, "cancel");
    assert_true(t->is_started);
    assert_non_null(r->decode);
    t->is_started = false;
}
static void port_first(void *self, struct td_request *r)
{
    struct world *t = self;
    (void)r;
    note(t, "first");
    assert_true(t->is_started);
    t->is_started = false;
}
static enum td_status port_run(void *self, struct td_request *r, bool introduce, struct td_err *err)
{
    struct world *t = self;
    note(t, introduce ? "run+" : "run");
    assert_false(t->is_running);
    assert_non_null(r->target);
    assert_int_equal(r->target->generation, 7);
    assert_int_equal(r->target->full->n_pages, 3);
    if (t->run_st != TD_OK) return td_err_set(err, t->run_st, "not run");
    t->is_running = true;
    t->n_runs++;
    t->n_introduced += introduce;
    r->run = t;
    return TD_OK;
}
static void port_run_end(void *self, struct td_request *r, bool cancel)
{
    struct world *t = self;
    (void)r;
    note(t, cancel ? "run-cancel" : "run-leave");
    assert_true(t->is_running);
    t->is_running = false;
}
static bool port_full(void *self, struct td_request *r)
{
    struct world *t = self;
    assert_non_null(r->decode);
    note(t, "full");
    return t->is_alone;
}
static void port_prefilled(void *self, struct td_request *r)
{
    struct world *t = self;
    assert_non_null(r->decode);
    t->n_prefilled++;
}
static void port_release(void *self, struct td_request *r, struct td_worker *w, bool made_room)
{
    struct world *t = self;
    (void)r;
    (void)made_room;
    assert_non_null(w);
    t->n_released++;
}
static enum td_status port_emit(void *self, struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    struct world *t = self;
    assert_int_equal(t->n_done, 0);
    for (uint32_t i = 0; i < n; i++) {
        t->emitted[t->n_emitted++] = r->tokens[r->n_tokens - n + i];
        if (logprobs == NULL) continue;
        t->n_logprobs++;
        assert_int_equal(logprobs[i]->chosen->id, r->tokens[r->n_tokens - n + i]);
    }
    return t->emit_st;
}
static void port_done(void *self, struct td_request *r, enum td_status st, const char *text)
{
    struct world *t = self;
    t->n_done++;
    t->done_st = st;
    snprintf(t->done_text, sizeof t->done_text, "%s", text);
    assert_false(t->is_started);
    assert_false(t->is_running);
    assert_false(t->is_queued);
    assert_null(r->decode);
    assert_null(r->prefill);
    assert_int_equal(t->n_claims, t->n_released);
    assert_int_equal(t->n_places, t->n_prefilled); /* each place at a prefill worker was given back once */
}

static void world_init(struct world *t)
{
    memset(t, 0, sizeof *t);
    virtual_env_init(&t->v);
    for (unsigned i = 0; i < 3; i++) {
        identity_init(&t->ids[i], DECODE, i + 1);
        identity_init(&t->ids[3 + i], PREFILL, i + 11);
        t->d[i] = (struct td_worker){.identity = &t->ids[i].id, .incarnation = i + 1, .role = DECODE, .is_live = true};
        t->p[i] =
            (struct td_worker){.identity = &t->ids[3 + i].id, .incarnation = i + 11, .role = PREFILL, .is_live = true};
    }
    t->ports = (struct td_router_ports){
        .env = &t->v.env,
        .self = t,
        .place = port_place,
        .leave_queue = port_leave_queue,
        .decode_start = port_start,
        .decode_cancel = port_cancel,
        .decode_first = port_first,
        .run_start = port_run,
        .run_end = port_run_end,
        .decode_full = port_full,
        .prefilled = port_prefilled,
        .release = port_release,
        .emit = port_emit,
        .done = port_done,
    };
    td_request_init(&t->r, &t->ports);
    snprintf(t->r.id, sizeof t->r.id, "req-test");
    t->r.tokens = td_calloc(PROMPT_TOKENS, sizeof(uint32_t));
    t->r.n_tokens = t->r.n_prompt = t->r.cap_tokens = PROMPT_TOKENS;
    t->r.max_tokens = MAX_TOKENS;
    t->r.deadline_ns = t->v.now_ns + 60 * TD_NS_PER_S;
}

/* Every test ends here: exactly one result, nothing left open, no timer armed. */
static void world_deinit(struct world *t)
{
    if (t->n_done == 0) td_request_on_client_gone(&t->r, TD_E_CANCELED);
    assert_int_equal(t->n_done, 1);
    virtual_pass_ms(&t->v, 100000);
    assert_int_equal(t->n_done, 1);
    td_request_deinit(&t->r);
    assert_true(td_list_is_empty(&t->v.timers));
}

static int setup(void **state)
{
    struct world *t = malloc(sizeof *t);
    world_init(t);
    *state = t;
    return 0;
}
static int teardown(void **state)
{
    world_deinit(*state);
    free(*state);
    return 0;
}

/* --- what the others say --------------------------------------------------------------------------------- */

static void begin(struct world *t) { td_request_begin(&t->r); }
static void ready(struct world *t) { td_request_on_ready(&t->r); }
static void reserved(struct world *t)
{
    uint32_t pages[3] = {4, 5, 6};
    Tandem__V1__PageList full = TANDEM__V1__PAGE_LIST__INIT;
    full.pages = pages;
    full.n_pages = 3;
    Tandem__V1__KvTarget target = TANDEM__V1__KV_TARGET__INIT;
    target.generation = 7;
    target.full = &full;
    td_request_on_reserved(&t->r, &target);
}
static void first_with(struct world *t, Tandem__V1__FinishReason reason)
{
    if (!t->is_running) return; /* there is nobody who could say it */
    Tandem__V1__TokenLogprob chosen = TANDEM__V1__TOKEN_LOGPROB__INIT;
    chosen.id = FIRST_TOKEN;
    Tandem__V1__PositionLogprobs l = TANDEM__V1__POSITION_LOGPROBS__INIT;
    l.chosen = &chosen;
    Tandem__V1__FirstToken f = TANDEM__V1__FIRST_TOKEN__INIT;
    f.token_id = FIRST_TOKEN;
    f.finish_reason = reason;
    f.prefill_us = 1234;
    f.cached_tokens = 2;
    if (t->r.want_logprobs) f.logprobs = &l;
    td_request_on_first(&t->r, &f);
}
static void first(struct world *t) { first_with(t, TANDEM__V1__FINISH_REASON__FINISH_NONE); }
static void first_and_last(struct world *t) { first_with(t, TANDEM__V1__FINISH_REASON__FINISH_STOP); }
static void run_done(struct world *t)
{
    if (!t->is_running) return;
    Tandem__V1__RunDone d = TANDEM__V1__RUN_DONE__INIT;
    d.kv_bytes = 4096;
    d.handoff_us = 77;
    d.transport = (char *)"posix";
    td_request_on_run_done(&t->r, &d);
}
static void run_closed(struct world *t, enum td_status st)
{
    if (!t->is_running) return;
    t->is_running = false;
    td_request_on_run_closed(&t->r, st, st == TD_OK ? "" : "said the prefill worker");
}
static void run_ok(struct world *t) { run_closed(t, TD_OK); }
static void run_lost(struct world *t) { run_closed(t, TD_E_PEER_LOST); }
static void run_unknown(struct world *t) { run_closed(t, TD_E_UNKNOWN_PEER); }
static void run_bad(struct world *t) { run_closed(t, TD_E_INVALID); }
static void tokens_n(struct world *t, uint32_t from, uint32_t n)
{
    if (!t->is_started) return;
    uint32_t ids[64];
    Tandem__V1__TokenLogprob chosen[64];
    Tandem__V1__PositionLogprobs l[64], *list[64];
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = from + i;
        tandem__v1__token_logprob__init(&chosen[i]);
        tandem__v1__position_logprobs__init(&l[i]);
        chosen[i].id = ids[i];
        l[i].chosen = &chosen[i];
        list[i] = &l[i];
    }
    td_request_on_tokens(&t->r, ids, t->r.want_logprobs ? list : NULL, n);
}
static void token(struct world *t) { tokens_n(t, 60, 1); }
static void two_tokens(struct world *t) { tokens_n(t, 61, 2); }
static void finished_with(struct world *t, Tandem__V1__FinishReason reason, enum td_status st, bool is_lost)
{
    if (!t->is_started) return;
    t->is_started = false;
    Tandem__V1__DecodeFinished f = TANDEM__V1__DECODE_FINISHED__INIT;
    f.reason = reason;
    f.status = st;
    f.status_name = (char *)td_status_name(st);
    f.message = (char *)(st == TD_OK ? "" : "said the decode worker");
    f.handoff_bytes = st == TD_OK ? 8192 : 0;
    f.decode_us = 999;
    f.transport = (char *)"tcp";
    f.is_lost = is_lost;
    td_request_on_finished(&t->r, &f);
}
static void finished(struct world *t) { finished_with(t, TANDEM__V1__FINISH_REASON__FINISH_LENGTH, TD_OK, false); }
static void decode_failed(struct world *t) { finished_with(t, 0, TD_E_DEVICE, false); }
static void decode_bad(struct world *t) { finished_with(t, 0, TD_E_INVALID, false); }
static void finished_ok_for_nothing(struct world *t) { finished_with(t, 0, TD_OK, false); }
static void no_pages(struct world *t) { finished_with(t, 0, TD_E_NO_PAGES, false); }
static void decode_lost(struct world *t)
{
    t->is_started = false; /* the link forgets its requests before it tells them */
    td_request_on_worker_lost(&t->r, t->r.decode != NULL ? t->r.decode : &t->d[0], "its stream broke");
}
static void prefill_lost(struct world *t)
{
    td_request_on_worker_lost(&t->r, t->r.prefill != NULL ? t->r.prefill : &t->p[0], "silent");
}
static void client_gone(struct world *t) { td_request_on_client_gone(&t->r, TD_E_CANCELED); }
static void bad_order(struct world *t) { td_request_on_bad(&t->r, TD_E_INVALID, "text: not UTF-8"); }
static void placed(struct world *t)
{
    if (!t->is_queued) return;
    take_pair(t);
    td_request_on_placed(&t->r);
}
static void refused(struct world *t)
{
    td_request_on_refused(&t->r, TD_E_UNAVAILABLE, "no decode worker is available");
}
static void a_little_later(struct world *t) { virtual_pass_ms(&t->v, 250); }
static void much_later(struct world *t) { virtual_pass_ms(&t->v, 5000); }
static void after_the_deadline(struct world *t) { virtual_pass_ms(&t->v, 61000); }

/* --- how to get to each state ---------------------------------------------------------------------------- */

static void to_tokenizing(struct world *t) { begin(t); }
static void to_queued(struct world *t)
{
    t->place_st = TD_IN_PROGRESS;
    begin(t);
    ready(t);
    t->place_st = TD_OK;
}
static void to_reserving(struct world *t) { begin(t), ready(t); }
static void to_prefilling(struct world *t) { to_reserving(t), reserved(t); }
static void to_introducing(struct world *t) { to_prefilling(t), run_unknown(t); }
static void to_handoff(struct world *t) { to_prefilling(t), first(t); }
static void to_doubt(struct world *t) { to_handoff(t), run_lost(t); }
static void to_decoding(struct world *t) { to_handoff(t), token(t); }
static void to_local(struct world *t)
{
    t->is_local = true;
    to_reserving(t);
}
static void to_backoff(struct world *t) { to_prefilling(t), run_lost(t); }
static void to_done(struct world *t) { to_decoding(t), finished(t); }
static void to_failed(struct world *t) { to_decoding(t), decode_bad(t); }
static void to_new(struct world *t) { (void)t; }

static const struct {
    const char *state;
    void (*go)(struct world *t);
} all_states[] = {
    {"NEW", to_new},
    {"TOKENIZING", to_tokenizing},
    {"QUEUED", to_queued},
    {"RESERVING", to_reserving},
    {"PREFILLING", to_prefilling},
    {"INTRODUCING", to_introducing},
    {"HANDOFF", to_handoff},
    {"DOUBT", to_doubt},
    {"LOCAL", to_local},
    {"DECODING", to_decoding},
    {"BACKOFF", to_backoff},
    {"DONE", to_done},
    {"FAILED", to_failed},
};
static void (*const all_events[])(struct world *t) = {
    begin,          ready,
    reserved,       first,
    first_and_last, run_done,
    run_ok,         run_lost,
    run_unknown,    run_bad,
    token,          two_tokens,
    finished,       decode_failed,
    decode_bad,     finished_ok_for_nothing,
    no_pages,       decode_lost,
    prefill_lost,   client_gone,
    bad_order,      placed,
    refused,        a_little_later,
    much_later,     after_the_deadline,
};

/* --- tests ----------------------------------------------------------------------------------------------- */

static void expect_emitted(const struct world *t, const uint32_t *ids, uint32_t n)
{
    assert_int_equal(t->n_emitted, n);
    for (uint32_t i = 0; i < n; i++) assert_int_equal(t->emitted[i], ids[i]);
}
#define EXPECT_EMITTED(t, ...) expect_emitted(t, (const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4)

static void the_states_are_reached_as_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(all_states); i++) {
        struct world t;
        world_init(&t);
        all_states[i].go(&t);
        assert_string_equal(td_request_state_name(&t.r), all_states[i].state);
        world_deinit(&t);
    }
}

static void a_good_request_goes_straight_through(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    assert_string_equal(t->log, "place start run");
    virtual_pass_ms(&t->v, 10);
    first(t);
    EXPECT_EMITTED(t, FIRST_TOKEN);
    run_done(t);
    run_ok(t);
    virtual_pass_ms(&t->v, 5);
    token(t);
    two_tokens(t);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60, 61, 62);
    finished(t);
    assert_int_equal(t->n_done, 1);
    assert_int_equal(t->done_st, TD_OK);
    assert_string_equal(t->log, "place start run");
    assert_int_equal(t->r.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    Tandem__V1__Usage u;
    td_request_usage(&t->r, &u);
    assert_int_equal(u.prompt_tokens, PROMPT_TOKENS);
    assert_int_equal(u.completion_tokens, 4);
    assert_int_equal(u.cached_tokens, 2);
    Tandem__V1__Timing time;
    td_request_timing(&t->r, &time);
    assert_int_equal(time.ttft_us, 10000);
    assert_int_equal(time.total_us, 15000);
    assert_int_equal(time.prefill_us, 1234);
    assert_int_equal(time.handoff_us, 77);
    assert_int_equal(time.decode_us, 999);
    assert_int_equal(time.handoff_bytes, 8192);
    assert_string_equal(time.transport, "posix");
    assert_string_equal(time.prefill_worker, "prefill-11");
    assert_string_equal(time.decode_worker, "decode-1");
}

static void the_end_does_not_wait_for_the_prefill_workers_last_word(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    assert_string_equal(t->log, "place start run run-leave"); /* not cancelled: it has only good news to tell */
    Tandem__V1__Timing time;
    td_request_timing(&t->r, &time);
    assert_string_equal(time.transport, "tcp");
}

static void tokens_that_overtake_the_first_token_wait_for_it(void **state)
{
    struct world *t = *state;
    t->r.want_logprobs = true;
    to_prefilling(t);
    token(t);
    two_tokens(t);
    assert_int_equal(t->n_emitted, 0);
    first(t);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60, 61, 62);
    assert_int_equal(t->n_logprobs, 4);
    assert_string_equal(td_request_state_name(&t->r), "DECODING");
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
}

static void even_the_end_may_overtake_the_first_token(void **state)
{
    struct world *t = *state;
    to_introducing(t);
    token(t);
    finished(t);
    assert_int_equal(t->n_done, 0);
    first(t);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60);
    assert_int_equal(t->n_done, 1);
    assert_int_equal(t->done_st, TD_OK);
    assert_int_equal(t->r.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
}

static void held_tokens_are_dropped_when_the_first_never_comes(void **state)
{
    struct world *t = *state;
    t->r.want_logprobs = true;
    to_prefilling(t);
    two_tokens(t);
    t->which = 1;
    run_lost(t); /* and all over again at another pair */
    a_little_later(t);
    assert_string_equal(t->log, "place start run cancel place start");
    reserved(t);
    first(t);
    EXPECT_EMITTED(t, FIRST_TOKEN);
    virtual_pass_ms(&t->v, 3);
    token(t);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60);
    Tandem__V1__Timing time;
    td_request_timing(&t->r, &time);
    assert_int_equal(time.handoff_us, 3000); /* of the try that worked */
}

static void a_first_token_that_is_the_last_ends_both_workers_part(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    first_and_last(t);
    EXPECT_EMITTED(t, FIRST_TOKEN);
    assert_int_equal(t->done_st, TD_OK);
    assert_int_equal(t->r.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_STOP);
    assert_string_equal(t->log, "place start run first run-leave");
}

static void the_decode_worker_may_know_first_that_the_first_token_is_the_last(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    finished_with(t, TANDEM__V1__FINISH_REASON__FINISH_NONE, TD_OK, false);
    assert_int_equal(t->n_done, 0);
    first_and_last(t);
    EXPECT_EMITTED(t, FIRST_TOKEN);
    assert_int_equal(t->done_st, TD_OK);
    assert_string_equal(t->log, "place start run run-leave");
}

static void workers_that_disagree_about_the_first_token_end_the_request(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    finished_with(t, TANDEM__V1__FINISH_REASON__FINISH_NONE, TD_OK, false);
    first(t);
    assert_int_equal(t->done_st, TD_E_PROTOCOL);
}

static void an_unknown_peer_is_introduced_once(void **state)
{
    struct world *t = *state;
    to_introducing(t);
    assert_string_equal(t->log, "place start run run+");
    assert_int_equal(t->n_introduced, 1);
    assert_int_equal(t->n_prefilled, 0); /* its place at P is still taken */
    run_unknown(t);                      /* again: now it is a failure like others */
    assert_string_equal(td_request_state_name(&t->r), "BACKOFF");
    assert_int_equal(t->r.n_retries, 1);
}

static void no_room_means_waiting_in_front_and_does_not_count(void **state)
{
    struct world *t = *state;
    to_reserving(t);
    for (int i = 0; i < 10; i++) {
        t->place_st = TD_IN_PROGRESS;
        no_pages(t);
        assert_string_equal(td_request_state_name(&t->r), "QUEUED");
        assert_true(t->r.had_turn);
        t->place_st = TD_OK;
        placed(t);
    }
    assert_int_equal(t->r.n_retries, 0);
    reserved(t);
    first_and_last(t);
    assert_int_equal(t->done_st, TD_OK);
}

static void what_an_empty_worker_cannot_hold_is_refused_in_the_end(void **state)
{
    struct world *t = *state;
    t->is_alone = true;
    to_reserving(t);
    for (int i = 0; i < 2; i++) {
        t->place_st = TD_IN_PROGRESS;
        no_pages(t);
        assert_int_equal(t->n_done, 0);
        placed(t);
    }
    no_pages(t);
    assert_int_equal(t->done_st, TD_E_NO_PAGES);
    assert_non_null(strstr(t->done_text, "decode-1"));
}

static void a_full_stream_to_the_worker_is_like_a_full_worker(void **state)
{
    struct world *t = *state;
    t->place_st = TD_IN_PROGRESS;
    t->start_st = TD_E_BUSY;
    begin(t);
    ready(t);
    placed(t);
    assert_string_equal(td_request_state_name(&t->r), "QUEUED");
    assert_non_null(strstr(t->log, "full"));
    t->start_st = TD_OK;
    placed(t);
    assert_string_equal(td_request_state_name(&t->r), "RESERVING");
}

/* For every status: what a prefill or decode worker's failure before the first token leads to is the table's retry
 * column. */
static void retries_follow_the_status_table(void **state)
{
    (void)state;
    for (int st = 0; st < TD_N_STATUS; st++) {
        if (st == TD_E_OK || st == TD_E_IN_PROGRESS || st == TD_E_UNKNOWN_PEER) continue;
        /* We did not cancel anything: a worker that says so is leaving. */
        bool helps = td_status_retry(st) != TD_RETRY_NO || st == TD_E_CANCELED;
        for (int side = 0; side < 2; side++) {
            /* Want of room is no failure. */
            if (side == 1 && (st == TD_E_NO_PAGES || st == TD_E_PREEMPTED || st == TD_E_BUSY)) continue;
            struct world t;
            world_init(&t);
            to_prefilling(&t);
            if (side == 0)
                run_closed(&t, st);
            else
                finished_with(&t, 0, st, false);
            if (helps) {
                assert_string_equal(td_request_state_name(&t.r), "BACKOFF");
                assert_int_equal(t.r.failed_decode, 1);
                assert_int_equal(t.r.failed_prefill, 11);
                bool is_decode = side == 1 || st == TD_E_TARGET_LOST;
                assert_int_equal(t.r.blame, is_decode ? TD_BLAME_DECODE : TD_BLAME_PREFILL);
                assert_int_equal(t.r.same_ok, td_status_retry(st) == TD_RETRY_LATER || st == TD_E_STALE);
                a_little_later(&t);
                assert_string_equal(td_request_state_name(&t.r), "RESERVING");
                assert_int_equal(t.n_starts, 2);
            } else {
                assert_int_equal(t.done_st, st);
                assert_non_null(strstr(t.done_text, side == 0 ? "prefill-11: said the prefill worker"
                                                              : "decode-1: said the decode worker"));
            }
            world_deinit(&t);
        }
    }
}

static void two_retries_and_no_more(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    run_closed(t, TD_E_INTERNAL);
    a_little_later(t);
    finished_with(t, 0, TD_E_INTERNAL, false);
    a_little_later(t);
    assert_int_equal(t->n_starts, 3);
    reserved(t);
    run_closed(t, TD_E_INTERNAL);
    assert_int_equal(t->n_done, 1);
    assert_int_equal(t->done_st, TD_E_INTERNAL);
    assert_int_equal(t->n_starts, 3);
}

static void what_saw_two_workers_die_is_not_tried_again(void **state)
{
    (void)state;
    void (*const deaths[])(struct world *) = {run_lost, decode_lost, decode_failed, prefill_lost};
    for (size_t i = 0; i < TD_COUNT(deaths); i++)
        for (size_t j = 0; j < TD_COUNT(deaths); j++) {
            struct world t;
            world_init(&t);
            to_prefilling(&t);
            deaths[i](&t);
            a_little_later(&t);
            assert_int_equal(t.n_starts, 2);
            reserved(&t);
            first(&t);
            two_tokens(&t); /* to go on well does not make it harmless */
            token(&t);
            decode_lost(&t);
            assert_int_equal(t.n_done, 1);
            assert_string_equal(td_status_grpc_name(t.done_st), "UNAVAILABLE");
            assert_non_null(strstr(t.done_text, "second worker that died"));
            world_deinit(&t);
        }
}

static void workers_that_leave_in_good_order_do_not_count_as_failures(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    for (unsigned i = 0; i < 6; i++) {
        t->which = i % 3;
        if (i % 2 == 0)
            run_closed(t, i % 4 == 0 ? TD_E_DRAINING : TD_E_CANCELED);
        else
            finished_with(t, 0, TD_E_DRAINING, true);
        a_little_later(t);
        assert_string_equal(td_request_state_name(&t->r), "RESERVING");
        reserved(t);
    }
    assert_true(t->p[0].load.is_draining); /* it said so; nobody else is sent there */
    first(t);
    token(t);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    assert_int_equal(t->r.n_deaths + t->r.n_retries + t->r.n_migrations, 0);
}

static void workers_that_keep_turning_it_away_are_not_asked_for_ever(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    for (unsigned i = 0; i < TD_ROUTER_MAX_TURNED; i++) {
        run_closed(t, TD_E_CANCELED);
        a_little_later(t);
        reserved(t);
    }
    run_closed(t, TD_E_CANCELED);
    assert_int_equal(t->n_done, 1);
    assert_string_equal(td_status_grpc_name(t->done_st), "UNAVAILABLE"); /* nobody cancelled it */
}

static void without_another_worker_the_first_failure_is_the_reason(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    t->place_st = TD_E_UNAVAILABLE;
    run_lost(t);
    a_little_later(t);
    assert_int_equal(t->done_st, TD_E_PEER_LOST);
    assert_non_null(strstr(t->done_text, "said the prefill worker"));
}

static void a_worker_that_never_got_the_request_did_not_die_of_it(void **state)
{
    struct world *t = *state;
    t->start_st = TD_E_PEER_LOST;
    to_reserving(t);
    assert_string_equal(td_request_state_name(&t->r), "BACKOFF");
    t->start_st = TD_OK;
    t->run_st = TD_E_PEER_LOST;
    a_little_later(t);
    reserved(t);
    assert_string_equal(td_request_state_name(&t->r), "BACKOFF");
    assert_int_equal(t->r.n_deaths, 0);
    assert_int_equal(t->r.n_retries, 2);
}

/* The prefill worker may know long before we do: blamed itself, the next try would go to the dead again, whose loss
 * would then count as the second. */
static void a_run_whose_decode_worker_is_lost_is_that_worker_s_death(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    run_closed(t, TD_E_TARGET_LOST);
    assert_string_equal(td_request_state_name(&t->r), "BACKOFF");
    assert_int_equal(t->r.blame, TD_BLAME_DECODE);
    assert_int_equal(t->r.n_deaths, 1);
    a_little_later(t);
    assert_string_equal(td_request_state_name(&t->r), "RESERVING");
}

static void a_refusal_from_the_queue_reaches_the_client(void **state)
{
    struct world *t = *state;
    to_queued(t);
    refused(t);
    assert_int_equal(t->done_st, TD_E_UNAVAILABLE);
    assert_non_null(strstr(t->done_text, "no decode worker"));
}

static void a_full_queue_refuses(void **state)
{
    struct world *t = *state;
    t->place_st = TD_E_BUSY;
    begin(t);
    ready(t);
    assert_int_equal(t->done_st, TD_E_BUSY);
}

/* From every state in which its client has tokens, after every failure that another can make good: nothing that the
 * client has is sent again, whoever comes next is told all of it, and what it counts goes on. */
static void a_request_goes_on_elsewhere_with_the_tokens_it_has(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_handoff, to_doubt, to_decoding};
    void (*const failures[])(struct world *) = {decode_failed, decode_lost, no_pages};
    for (size_t w = 0; w < TD_COUNT(ways); w++)
        for (size_t i = 0; i < TD_COUNT(failures); i++)
            for (int local = 0; local < 2; local++) {
                struct world t;
                world_init(&t);
                t.r.want_logprobs = true;
                ways[w](&t);
                unsigned had = t.n_emitted;
                t.which = 1;
                t.is_local = local;
                failures[i](&t);
                assert_false(t.is_running);
                a_little_later(&t);
                assert_int_equal(t.n_starts, 2); /* the port checks what it was told */
                if (local) {
                    tokens_n(&t, 70, 1);
                } else {
                    reserved(&t);
                    first(&t);
                }
                assert_int_equal(t.n_emitted, had + 1);
                two_tokens(&t);
                finished(&t);
                assert_int_equal(t.done_st, TD_OK);
                assert_int_equal(t.n_emitted, had + 3);
                assert_int_equal(t.n_logprobs, had + 3);
                Tandem__V1__Usage u;
                td_request_usage(&t.r, &u);
                assert_int_equal(u.prompt_tokens, PROMPT_TOKENS);
                assert_int_equal(u.completion_tokens, had + 3);
                assert_int_equal(u.cached_tokens, 2); /* of the first try */
                Tandem__V1__Timing time;
                td_request_timing(&t.r, &time);
                assert_int_equal(time.migrations, 1);
                assert_string_equal(time.decode_worker, "decode-2");
                assert_string_equal(time.prefill_worker, local ? "" : "prefill-12");
                world_deinit(&t);
            }
}

static void a_client_that_has_what_it_wants_ends_it_well(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_decoding, to_local};
    for (size_t i = 0; i < TD_COUNT(ways); i++) {
        struct world t;
        world_init(&t);
        ways[i](&t);
        t.r.is_stopped = true; /* as the port says of a stop string */
        tokens_n(&t, 61, 1);
        assert_int_equal(t.done_st, TD_OK);
        assert_int_equal(t.r.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_STOP);
        assert_non_null(strstr(t.log, "cancel"));
        world_deinit(&t);
    }
}

static void late_news_of_the_worker_that_was_left_changes_nothing(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    t->which = 1;
    decode_failed(t);
    t->is_started = true; /* as if it still spoke */
    two_tokens(t);
    decode_failed(t);
    t->is_started = false;
    assert_int_equal(t->n_emitted, 2);
    a_little_later(t);
    reserved(t);
    td_request_on_worker_lost(&t->r, &t->d[0], "its stream broke");
    assert_string_equal(td_request_state_name(&t->r), "PREFILLING");
    assert_int_equal(t->r.n_deaths, 1);
}

static void tokens_that_overtook_a_lost_first_token_come_again_from_the_next(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    two_tokens(t);
    finished(t); /* the decode worker had all of it, but nobody knows the first token */
    run_lost(t);
    a_little_later(t);
    assert_int_equal(t->n_starts, 2);
    reserved(t);
    first(t);
    two_tokens(t);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    EXPECT_EMITTED(t, FIRST_TOKEN, 61, 62);
    assert_int_equal(t->r.n_migrations, 0); /* its client had nothing yet */
}

static void without_another_worker_the_client_hears_who_was_lost(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    decode_lost(t);
    assert_int_equal(t->n_done, 0);
    t->place_st = TD_E_UNAVAILABLE;
    a_little_later(t);
    assert_string_equal(td_status_grpc_name(t->done_st), "UNAVAILABLE");
    assert_non_null(strstr(t->done_text, "decode-1: its stream broke"));
}

static void what_no_other_worker_can_make_good_ends_it(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_handoff, to_decoding};
    for (size_t i = 0; i < TD_COUNT(ways); i++) {
        struct world t;
        world_init(&t);
        ways[i](&t);
        decode_bad(&t);
        assert_int_equal(t.done_st, TD_E_INVALID);
        assert_int_equal(t.n_starts, 1);
        world_deinit(&t);
    }
}

static void a_failed_handoff_is_not_the_decode_workers_fault(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_reserving, to_prefilling, to_handoff, to_doubt};
    for (size_t i = 0; i < TD_COUNT(ways); i++) {
        struct world t;
        world_init(&t);
        ways[i](&t);
        t.is_started = false;
        Tandem__V1__DecodeFinished f = TANDEM__V1__DECODE_FINISHED__INIT;
        f.status_name = (char *)"PEER_LOST";
        f.message = (char *)"the prefill worker is lost";
        f.is_lost = f.is_handoff = true;
        td_request_on_finished(&t.r, &f);
        assert_string_equal(td_request_state_name(&t.r), "BACKOFF");
        assert_int_equal(t.r.blame, TD_BLAME_PREFILL);
        /* Once, though both ends tell of it; and not if it had not been given to it yet. */
        assert_int_equal(t.r.n_deaths, i > 0);
        run_lost(&t);
        assert_int_equal(t.r.n_deaths, i > 0);
        world_deinit(&t);
    }
}

static void a_preempted_request_waits_in_front_for_room_to_grow(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    for (unsigned i = 0; i < 10; i++) { /* however often */
        t->place_st = TD_IN_PROGRESS;
        finished_with(t, 0, TD_E_PREEMPTED, true);
        assert_string_equal(td_request_state_name(&t->r), "QUEUED");
        assert_true(t->r.had_turn && t->r.is_back);
        assert_non_null(strstr(t->log, "full"));
        t->place_st = TD_OK;
        placed(t);
        reserved(t);
        assert_string_equal(td_request_state_name(&t->r), "PREFILLING");
    }
    first(t);
    token(t);
    assert_false(t->r.is_back);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60, FIRST_TOKEN, 60);
    assert_int_equal(t->r.n_preempted, 10);
    assert_int_equal(t->r.n_migrations, 1);
}

static void reserved_pages_taken_back_are_not_a_failure(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    t->place_st = TD_IN_PROGRESS;
    finished_with(t, 0, TD_E_PREEMPTED, true);
    assert_string_equal(td_request_state_name(&t->r), "QUEUED");
    assert_false(t->is_running);
    assert_int_equal(t->r.n_retries + t->r.n_deaths, 0);
}

static void a_decode_worker_can_do_it_alone(void **state)
{
    struct world *t = *state;
    t->r.want_logprobs = true;
    to_local(t);
    assert_string_equal(t->log, "place start");
    virtual_pass_ms(&t->v, 30);
    assert_int_equal(t->n_prefilled, 0);
    token(t);
    assert_int_equal(t->n_prefilled, 1); /* another may be prefilled there */
    EXPECT_EMITTED(t, 60);
    two_tokens(t);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    EXPECT_EMITTED(t, 60, 61, 62);
    Tandem__V1__Timing time;
    td_request_timing(&t->r, &time);
    assert_string_equal(time.prefill_worker, "");
    assert_int_equal(time.ttft_us, 30000);
    assert_int_equal(time.prefill_us, 30000);
}

static void a_lost_decode_worker_before_the_first_token_is_replaced(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_reserving, to_prefilling, to_introducing};
    for (size_t i = 0; i < TD_COUNT(ways); i++) {
        struct world t;
        world_init(&t);
        ways[i](&t);
        t.which = 1;
        decode_lost(&t);
        assert_string_equal(td_request_state_name(&t.r), "BACKOFF");
        assert_false(t.is_running); /* its run was cancelled */
        a_little_later(&t);
        assert_ptr_equal(t.r.decode, &t.d[1]);
        assert_int_equal(t.n_done, 0);
        world_deinit(&t);
    }
}

static void a_lost_prefill_worker_before_the_first_token_is_replaced(void **state)
{
    (void)state;
    void (*const ways[])(struct world *) = {to_reserving, to_prefilling, to_introducing};
    for (size_t i = 0; i < TD_COUNT(ways); i++) {
        struct world t;
        world_init(&t);
        ways[i](&t);
        t.which = 1;
        prefill_lost(&t);
        assert_string_equal(td_request_state_name(&t.r), "BACKOFF");
        assert_false(t.is_started); /* cancelled: its reservation names the old prefill worker */
        a_little_later(&t);
        assert_ptr_equal(t.r.prefill, &t.p[1]);
        world_deinit(&t);
    }
}

static void after_the_first_token_only_decode_knows_whether_kv_arrived(void **state)
{
    struct world *t = *state;
    to_doubt(t);
    assert_int_equal(t->n_done, 0);
    virtual_pass_ms(&t->v, 2900);
    token(t); /* it did */
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
}

static void in_doubt_the_decode_workers_failure_decides(void **state)
{
    struct world *t = *state;
    to_doubt(t);
    decode_failed(t);
    assert_string_equal(td_request_state_name(&t->r), "BACKOFF");
    assert_int_equal(t->r.blame, TD_BLAME_DECODE);
    assert_int_equal(t->r.n_deaths, 1); /* the run's end was not counted before anybody knew what it meant */
}

static void in_doubt_silence_means_that_the_prefill_worker_failed(void **state)
{
    struct world *t = *state;
    to_doubt(t);
    t->place_st = TD_E_UNAVAILABLE;
    virtual_pass_ms(&t->v, 3000);
    assert_string_equal(t->log, "place start run cancel");
    assert_int_equal(t->r.blame, TD_BLAME_PREFILL);
    a_little_later(t);
    assert_int_equal(t->done_st, TD_E_PEER_LOST);
    assert_non_null(strstr(t->done_text, "said the prefill worker"));
}

static void a_prefill_worker_that_fails_while_decoding_is_nobodys_concern(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    run_lost(t);
    two_tokens(t);
    finished(t);
    assert_int_equal(t->done_st, TD_OK);
    EXPECT_EMITTED(t, FIRST_TOKEN, 60, 61, 62);
}

static void a_run_that_ends_well_without_a_first_token_broke_the_protocol(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    run_ok(t);
    assert_int_equal(t->done_st, TD_E_PROTOCOL);
}

static void more_tokens_than_asked_for_are_refused(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    tokens_n(t, 10, MAX_TOKENS);
    assert_int_equal(t->done_st, TD_E_PROTOCOL);
    assert_int_equal(t->n_emitted, 2);
}

static void held_tokens_count_against_the_limit_too(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    tokens_n(t, 10, MAX_TOKENS);
    first(t);
    assert_int_equal(t->done_st, TD_E_PROTOCOL);
}

static void a_client_that_reads_too_slowly_ends_its_request(void **state)
{
    struct world *t = *state;
    to_decoding(t);
    t->emit_st = TD_E_SLOW_CLIENT;
    token(t);
    assert_int_equal(t->done_st, TD_E_SLOW_CLIENT);
    assert_string_equal(t->log, "place start run cancel run-cancel");
}

/* In every state: the client leaves, or the deadline passes. Workers are told at once, and only those concerned. */
static void the_client_may_leave_in_every_state(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(all_states); i++) {
        struct world t;
        world_init(&t);
        all_states[i].go(&t);
        bool was_over = t.n_done == 1, was_started = t.is_started, was_running = t.is_running;
        size_t before = strlen(t.log);
        client_gone(&t);
        assert_int_equal(t.n_done, 1);
        if (!was_over) assert_int_equal(t.done_st, TD_E_CANCELED);
        if (!was_over) assert_int_equal(strstr(t.log + before, "cancel") != NULL, was_started || was_running);
        if (!was_over) assert_int_equal(strstr(t.log + before, "run-cancel") != NULL, was_running);
        world_deinit(&t);
    }
}

static void the_deadline_ends_every_state(void **state)
{
    (void)state;
    for (size_t i = 1; i < TD_COUNT(all_states); i++) {
        struct world t;
        world_init(&t);
        t.r.deadline_ns = t.v.now_ns + 20 * TD_NS_PER_MS;
        all_states[i].go(&t);
        bool was_over = t.n_done == 1;
        virtual_pass_ms(&t.v, 19);
        assert_int_equal(t.n_done, was_over);
        virtual_pass_ms(&t.v, 1);
        assert_int_equal(t.n_done, 1);
        if (!was_over) {
            assert_int_equal(t.done_st, TD_E_DEADLINE);
            assert_non_null(strstr(t.done_text, all_states[i].state));
        }
        world_deinit(&t);
    }
}

static void a_deadline_in_the_past_ends_at_once(void **state)
{
    struct world *t = *state;
    t->r.deadline_ns = t->v.now_ns - 5;
    begin(t);
    virtual_pass_ms(&t->v, 0);
    assert_int_equal(t->done_st, TD_E_DEADLINE);
}

static void every_event_in_every_state_leads_to_one_result(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(all_states); i++)
        for (size_t a = 0; a < TD_COUNT(all_events); a++)
            for (size_t b = 0; b < TD_COUNT(all_events); b++) {
                struct world t;
                world_init(&t);
                t.r.want_logprobs = (a + b) % 2;
                all_states[i].go(&t);
                all_events[a](&t);
                all_events[b](&t);
                world_deinit(&t);
            }
}

/* Long random lives. The client never sees a token before the first one, nor one twice as many as it asked for. */
static void random_lives_end_well(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int life = 0; life < 20000; life++) {
        struct world t;
        world_init(&t);
        t.r.want_logprobs = life % 3 == 0;
        begin(&t);
        for (int i = 0; i < 25; i++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            uint32_t dice = (uint32_t)(seed >> 33);
            t.place_st = dice % 3 == 0 ? TD_IN_PROGRESS : dice % 41 == 1 ? TD_E_UNAVAILABLE : TD_OK;
            t.start_st = dice % 37 == 0 ? TD_E_PEER_LOST : dice % 31 == 0 && t.place_st != TD_OK ? TD_E_BUSY : TD_OK;
            t.run_st = dice % 29 == 0 ? TD_E_PEER_LOST : TD_OK;
            t.emit_st = dice % 43 == 0 ? TD_E_SLOW_CLIENT : TD_OK;
            t.which = dice % 3;
            t.is_alone = dice % 2;
            t.is_local = dice % 5 == 0;
            uint32_t e = (dice >> 8) % (3 * TD_COUNT(all_events)); /* good news is more frequent */
            if (e >= TD_COUNT(all_events)) e %= 14;
            all_events[e](&t);
        }
        assert_true(t.n_emitted <= MAX_TOKENS);
        world_deinit(&t);
    }
}

/* With the 1st, 2nd, ... allocation failing: the request ends, well or with NO_MEMORY, and nothing is left open. */
static void every_failed_allocation_ends_the_request_in_order(void **state)
{
    (void)state;
    unsigned n_failed = 0;
    for (uint32_t k = 0; k < 40; k++) {
        struct world t;
        world_init(&t);
        t.r.want_logprobs = true;
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        to_prefilling(&t);
        two_tokens(&t);
        first(&t);
        run_done(&t);
        two_tokens(&t);
        finished(&t);
        td_fault_disarm_all();
        assert_int_equal(t.n_done, 1);
        assert_true(t.done_st == TD_OK || t.done_st == TD_E_NO_MEMORY);
        n_failed += t.done_st != TD_OK;
        world_deinit(&t);
    }
    assert_true(n_failed > 3 && n_failed < 40); /* all of them were tried, and a life without failures is a good one */
}

static void the_description_names_state_and_age(void **state)
{
    struct world *t = *state;
    to_prefilling(t);
    virtual_pass_ms(&t->v, 42);
    struct td_buf b = {0};
    td_request_describe(&t->r, &b);
    assert_non_null(strstr(td_buf_cstr(&b), "\"id\":\"req-test\",\"state\":\"PREFILLING\",\"state_ms\":42"));
    assert_non_null(strstr(td_buf_cstr(&b), "\"decode\":\"decode-1\",\"prefill\":\"prefill-11\""));
    td_buf_free(&b);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_states_are_reached_as_named),
        T(a_good_request_goes_straight_through),
        T(the_end_does_not_wait_for_the_prefill_workers_last_word),
        T(tokens_that_overtake_the_first_token_wait_for_it),
        T(even_the_end_may_overtake_the_first_token),
        T(held_tokens_are_dropped_when_the_first_never_comes),
        T(a_first_token_that_is_the_last_ends_both_workers_part),
        T(the_decode_worker_may_know_first_that_the_first_token_is_the_last),
        T(workers_that_disagree_about_the_first_token_end_the_request),
        T(an_unknown_peer_is_introduced_once),
        T(no_room_means_waiting_in_front_and_does_not_count),
        T(what_an_empty_worker_cannot_hold_is_refused_in_the_end),
        T(a_full_stream_to_the_worker_is_like_a_full_worker),
        cmocka_unit_test(retries_follow_the_status_table),
        T(two_retries_and_no_more),
        T(without_another_worker_the_first_failure_is_the_reason),
        T(a_worker_that_never_got_the_request_did_not_die_of_it),
        T(a_run_whose_decode_worker_is_lost_is_that_worker_s_death),
        T(a_refusal_from_the_queue_reaches_the_client),
        T(a_full_queue_refuses),
        cmocka_unit_test(what_saw_two_workers_die_is_not_tried_again),
        T(workers_that_leave_in_good_order_do_not_count_as_failures),
        T(workers_that_keep_turning_it_away_are_not_asked_for_ever),
        cmocka_unit_test(a_request_goes_on_elsewhere_with_the_tokens_it_has),
        cmocka_unit_test(a_client_that_has_what_it_wants_ends_it_well),
        T(late_news_of_the_worker_that_was_left_changes_nothing),
        T(tokens_that_overtook_a_lost_first_token_come_again_from_the_next),
        T(without_another_worker_the_client_hears_who_was_lost),
        cmocka_unit_test(what_no_other_worker_can_make_good_ends_it),
        cmocka_unit_test(a_failed_handoff_is_not_the_decode_workers_fault),
        T(a_preempted_request_waits_in_front_for_room_to_grow),
        T(reserved_pages_taken_back_are_not_a_failure),
        T(a_decode_worker_can_do_it_alone),
        cmocka_unit_test(a_lost_decode_worker_before_the_first_token_is_replaced),
        cmocka_unit_test(a_lost_prefill_worker_before_the_first_token_is_replaced),
        T(after_the_first_token_only_decode_knows_whether_kv_arrived),
        T(in_doubt_the_decode_workers_failure_decides),
        T(in_doubt_silence_means_that_the_prefill_worker_failed),
        T(a_prefill_worker_that_fails_while_decoding_is_nobodys_concern),
        T(a_run_that_ends_well_without_a_first_token_broke_the_protocol),
        T(more_tokens_than_asked_for_are_refused),
        T(held_tokens_count_against_the_limit_too),
        T(a_client_that_reads_too_slowly_ends_its_request),
        cmocka_unit_test(the_client_may_leave_in_every_state),
        cmocka_unit_test(the_deadline_ends_every_state),
        T(a_deadline_in_the_past_ends_at_once),
        cmocka_unit_test(every_event_in_every_state_leads_to_one_result),
        cmocka_unit_test(random_lives_end_well),
        cmocka_unit_test(every_failed_allocation_ends_the_request_in_order),
        T(the_description_names_state_and_age),
    };
    td_log_open("test", TD_LOG_OFF);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
