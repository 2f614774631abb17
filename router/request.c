/* The life of a request.
 *
 * Happy path:
 *   TOKENIZING  the prompt is being made of the client's text
 *   QUEUED      the router holds the queue: at most one request waits at each prefill worker
 *   RESERVING   decode worker D has the start and looks for pages
 *   PREFILLING  D's answer names its pages; prefill worker P computes the prompt and puts the KV there
 *   HANDOFF     P has sampled the first token, and the client has it; the last KV is on its way
 *   DECODING    D sends tokens; its "finished" ends the request
 *   DONE
 * A first token that ends the request skips the rest: D is told, no KV comes. Where no P is worth it, D computes the
 * prompt too: LOCAL in place of RESERVING to HANDOFF, and the first token comes from D like all others.
 *
 * News of P and D travel on different connections, so D's first tokens, even its "finished", may be here before P's
 * first token. They are held until then.
 *
 * Failures. What the client has seen it keeps: every try begins with all tokens so far, those that were generated
 * counting as such (TokenRequest.n_prompt), so that whoever goes on draws the next one as the last worker would have.
 *   P does not know D's incarnation
 *       the same run again, with D's descriptor (INTRODUCING)
 *   D has no room, or takes the pages back for an older request
 *       to the front of the queue until something changes at D; this is not counted as a failure, unless D has nothing
 *       to wait for: then it will never have room
 *   P or D fails, in any state
 *       if another try can help (request_failure.c): all of it is cancelled, and after a short pause it gets a fresh
 *       start elsewhere (BACKOFF)
 *   P's call fails after the first token
 *       D alone knows whether the KV arrived: its tokens or its failure decide (DOUBT). If it says neither for 3 s, P
 *       has failed
 *   the client leaves or reads too slowly, the deadline passes, or what it waits for (a stop string) has come
 *       D and P are told at once */
#include "router/request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/request_int.h"

typedef enum td_request_event reaction(struct td_request *r);
static reaction enter_queue, start_decode, start_run, start_run_introduced, deliver_first, deliver, back_off;

/* Timeout in ms (0: none), what entering does, what an event does that leaves it where it is. */
static const struct {
    const char *name;
    uint32_t timeout_ms;
    reaction *enter, *stay;
} states[RQ_N_STATES] = {
    [RQ_NEW] = {"NEW", 0, NULL, NULL},
    [RQ_TOKENIZING] = {"TOKENIZING", 0, NULL, NULL},
    [RQ_QUEUED] = {"QUEUED", 0, enter_queue, NULL},
    [RQ_RESERVING] = {"RESERVING", 0, start_decode, NULL},
    [RQ_PREFILLING] = {"PREFILLING", 0, start_run, NULL},
    [RQ_INTRODUCING] = {"INTRODUCING", 0, start_run_introduced, NULL},
    [RQ_HANDOFF] = {"HANDOFF", 0, deliver_first, NULL},
    [RQ_DOUBT] = {"DOUBT", 3000, NULL, NULL},
    [RQ_LOCAL] = {"LOCAL", 0, start_decode, NULL},
    [RQ_DECODING] = {"DECODING", 0, deliver, deliver},
    [RQ_BACKOFF] = {"BACKOFF", 50, back_off, NULL}, /* doubled per retry */
    [RQ_DONE] = {"DONE", 0, NULL, NULL},
    [RQ_FAILED] = {"FAILED", 0, NULL, NULL},
};

/* 0: not expected here, dropped. */
#define ENDS      [EV_FATAL] = RQ_FAILED, [EV_GONE] = RQ_FAILED
#define ELSEWHERE [EV_NO_ROOM] = RQ_QUEUED, [EV_RETRY] = RQ_BACKOFF, ENDS
static const uint8_t next[RQ_N_STATES][TD_REQUEST_N_EVENTS] = {
    [RQ_NEW] = {[EV_BEGIN] = RQ_TOKENIZING, ENDS},
    [RQ_TOKENIZING] = {[EV_READY] = RQ_QUEUED, ENDS},
    [RQ_QUEUED] = {[EV_PLACED] = RQ_RESERVING, [EV_PLACED_LOCAL] = RQ_LOCAL, ENDS},
    [RQ_RESERVING] = {[EV_RESERVED] = RQ_PREFILLING, ELSEWHERE},
    [RQ_PREFILLING] = {[EV_FIRST] = RQ_HANDOFF,
                       [EV_UNKNOWN_PEER] = RQ_INTRODUCING,
                       [EV_TOKENS] = RQ_PREFILLING,
                       [EV_FINISHED] = RQ_PREFILLING,
                       ELSEWHERE},
    [RQ_INTRODUCING] =
        {[EV_FIRST] = RQ_HANDOFF, [EV_TOKENS] = RQ_INTRODUCING, [EV_FINISHED] = RQ_INTRODUCING, ELSEWHERE},
    [RQ_HANDOFF] = {[EV_TOKENS] = RQ_DECODING,
                    [EV_FINISHED] = RQ_DONE,
                    [EV_STOPPED] = RQ_DONE,
                    [EV_RUN_FAILED] = RQ_DOUBT,
                    ELSEWHERE},
    [RQ_DOUBT] = {[EV_TOKENS] = RQ_DECODING, [EV_FINISHED] = RQ_DONE, ELSEWHERE},
    [RQ_LOCAL] = {[EV_TOKENS] = RQ_DECODING, [EV_STOPPED] = RQ_DONE, ELSEWHERE},
    [RQ_DECODING] = {[EV_TOKENS] = RQ_DECODING, [EV_FINISHED] = RQ_DONE, [EV_STOPPED] = RQ_DONE, ELSEWHERE},
    [RQ_BACKOFF] = {[EV_TIMEOUT] = RQ_QUEUED, ENDS},
};

/* --- letting go ------------------------------------------------------------------------------------------ */

void td_request_give_place(struct td_request *r)
{
    if (!r->has_place) return;
    r->has_place = false;
    r->ports->prefilled(r->ports->self, r);
}

static void end_run(struct td_request *r, bool cancel)
{
    td_request_give_place(r);
    if (!r->has_run) return;
    r->has_run = false;
    r->ports->run_end(r->ports->self, r, cancel);
    r->run = NULL;
}

static void end_decode(struct td_request *r)
{
    if (!r->has_start) return;
    r->has_start = false;
    r->ports->decode_cancel(r->ports->self, r);
}

static void release_workers(struct td_request *r, bool made_room)
{
    struct td_worker *d = r->decode, *p = r->prefill;
    r->decode = r->prefill = NULL;
    if (p != NULL) r->ports->release(r->ports->self, r, p, made_room);
    if (d != NULL) r->ports->release(r->ports->self, r, d, made_room);
}

/* Back to a request that nobody works at. made_room: it held something at its workers. */
static void let_go(struct td_request *r, bool cancel_run, bool made_room)
{
    end_decode(r);
    end_run(r, cancel_run);
    release_workers(r, made_room);
    td_request_drop_held(r);
    if (r->target != NULL) tandem__v1__kv_target__free_unpacked(r->target, NULL);
    r->target = NULL;
    r->has_first = r->has_finish = false;
}

static void finish(struct td_request *r)
{
    bool is_good = r->state == RQ_DONE;
    struct td_env *env = r->ports->env;
    env->timer_stop(env, &r->timeout);
    env->timer_stop(env, &r->deadline);
    r->t_last = td_request_now(r);
    let_go(r, !is_good || r->is_stopped, true); /* a good run may still be saying its Done */
    r->ports->done(r->ports->self, r, is_good ? TD_OK : r->fail_status, is_good ? "" : r->fail.text);
}

/* --- the loop -------------------------------------------------------------------------------------------- */

static uint64_t timeout_ns(const struct td_request *r)
{
    unsigned doublings = r->state == RQ_BACKOFF && r->n_retries > 0 ? r->n_retries - 1 : 0;
    return (states[r->state].timeout_ms * TD_NS_PER_MS) << doublings;
}

void td_request_step(struct td_request *r, enum td_request_event ev)
{
    while (ev != EV_NONE) {
        uint8_t from = r->state, to = next[from][ev];
        if (to == 0) {
            if (from != RQ_DONE && from != RQ_FAILED)
                TD_DEBUG("request_event_dropped", "req=%s state=%s event=%d", r->id, states[from].name, (int)ev);
            return;
        }
        if (to == from) {
            ev = states[to].stay != NULL ? states[to].stay(r) : EV_NONE;
            continue;
        }
        TD_DEBUG("request_state", "req=%s from=%s to=%s", r->id, states[from].name, states[to].name);
        if (from == RQ_QUEUED) r->ports->leave_queue(r->ports->self, r);
        r->state = to;
        r->t_state = td_request_now(r);
        struct td_env *env = r->ports->env;
        env->timer_stop(env, &r->timeout);
        if (states[to].timeout_ms > 0) env->timer_start(env, &r->timeout, timeout_ns(r));
        if (to == RQ_DONE || to == RQ_FAILED) {
            finish(r);
            return;
        }
        ev = states[to].enter != NULL ? states[to].enter(r) : EV_NONE;
    }
}

/* --- what happens on entering a state -------------------------------------------------------------------- */

/* Before another try: what only the try that ends now knew. */
static void forget_try(struct td_request *r)
{
    r->is_resumed = r->t_first != 0;
    r->finish_reason = TANDEM__V1__FINISH_REASON__FINISH_NONE;
    r->past_handoff_bytes += r->handoff_bytes;
    r->t_prefilled = r->t_first_decoded = r->handoff_us = r->handoff_bytes = 0;
    r->transport[0] = '\0';
}

static enum td_request_event enter_queue(struct td_request *r)
{
    if (r->decode != NULL) { /* D has no room */
        let_go(r, true, false);
        forget_try(r);
    }
    struct td_err err = {{0}};
    enum td_status st = r->ports->place(r->ports->self, r, &err);
    if (st == TD_OK) return r->prefill != NULL ? EV_PLACED : EV_PLACED_LOCAL;
    if (st == TD_IN_PROGRESS) return EV_NONE;
    /* After a failure that is the better reason to give. */
    return r->fail_status != TD_OK && st == TD_E_UNAVAILABLE ? EV_FATAL : td_request_fatal(r, st, err.text);
}

void td_request_copy_name(char *out, size_t n, const char *name)
{
    size_t len = strnlen(name, n - 1);
    memcpy(out, name, len);
    out[len] = '\0';
}

/* It never got the request: if it died, then not of this. */
static enum td_status unsent(enum td_status st) { return st == TD_E_PEER_LOST ? TD_E_UNAVAILABLE : st; }

static enum td_request_event start_decode(struct td_request *r)
{
    r->had_turn = true;
    r->n_tries++;
    r->has_place = true; /* its place in the prefill is taken from now on */
    if (r->t_run == 0) r->t_run = td_request_now(r);
    td_request_copy_name(r->decode_name, sizeof r->decode_name, r->decode->identity->name);
    td_request_copy_name(r->prefill_name, sizeof r->prefill_name, r->prefill != NULL ? r->prefill->identity->name : "");
    struct td_err err = {{0}};
    enum td_status st = r->ports->decode_start(r->ports->self, r, &err);
    if (st == TD_E_BUSY) { /* its stream is full: the same as a full worker */
        r->ports->decode_full(r->ports->self, r);
        return EV_NO_ROOM;
    }
    if (st != TD_OK) return td_request_failed(r, TD_BLAME_DECODE, unsent(st), false, err.text);
    r->has_start = true;
    return EV_NONE;
}

static enum td_request_event run(struct td_request *r, bool introduce)
{
    struct td_err err = {{0}};
    enum td_status st = r->ports->run_start(r->ports->self, r, introduce, &err);
    if (st != TD_OK) return td_request_failed(r, TD_BLAME_PREFILL, unsent(st), false, err.text);
    r->has_run = true;
    return EV_NONE;
}
static enum td_request_event start_run(struct td_request *r) { return run(r, false); }
static enum td_request_event start_run_introduced(struct td_request *r) { return run(r, true); }

enum td_request_event td_request_emit(struct td_request *r, const uint32_t *ids,
                                      Tandem__V1__PositionLogprobs *const *logprobs, uint32_t n)
{
    if (td_request_n_generated(r) + (uint64_t)n > r->max_tokens)
        return td_request_fatal(r, TD_E_PROTOCOL, "a worker sent more tokens than it was asked for");
    if (r->n_tokens + (uint64_t)n > r->cap_tokens) {
        uint64_t cap = r->n_tokens + (uint64_t)n + 256;
        uint32_t *p = cap <= UINT32_MAX ? td_realloc(r->tokens, (size_t)cap, sizeof *p) : NULL;
        if (p == NULL) return td_request_fatal(r, TD_E_NO_MEMORY, "no memory for the answer's tokens");
        r->tokens = p;
        r->cap_tokens = (uint32_t)cap;
    }
    for (uint32_t i = 0; i < n; i++) r->tokens[r->n_tokens++] = ids[i];
    if (r->t_first == 0) r->t_first = td_request_now(r);
    r->n_migrations += r->is_resumed;
    r->is_resumed = false;
    enum td_status st = r->ports->emit(r->ports->self, r, n, logprobs);
    if (st != TD_OK) return td_request_fatal(r, st, td_status_text(st));
    if (!r->is_stopped) return EV_NONE;
    r->finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    return EV_STOPPED;
}

/* The first token, and what overtook it. */
static enum td_request_event deliver_first(struct td_request *r)
{
    bool has_overtaken = r->n_held > 1;
    enum td_request_event ev = td_request_emit_held(r);
    if (ev != EV_NONE) return ev;
    if (r->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE && !r->has_finish) { /* P said so: no KV comes */
        if (r->has_start) r->ports->decode_first(r->ports->self, r);
        r->has_start = false;
        r->has_finish = true;
    }
    if (r->has_finish) return EV_FINISHED;
    return has_overtaken ? EV_TOKENS : EV_NONE;
}

static enum td_request_event deliver(struct td_request *r)
{
    enum td_request_event ev = td_request_emit_held(r);
    if (ev != EV_NONE) return ev;
    td_request_advanced(r);
    return r->has_finish ? EV_FINISHED : EV_NONE;
}

static enum td_request_event back_off(struct td_request *r)
{
    let_go(r, true, true);
    forget_try(r);
    return EV_NONE;
}

/* --- life ------------------------------------------------------------------------------------------------ */

static void on_deadline(struct td_timer *t)
{
    struct td_request *r = TD_CONTAINER_OF(t, struct td_request, deadline);
    r->fail_status = TD_E_DEADLINE;
    td_err_set(&r->fail, TD_E_DEADLINE, "deadline passed while the request was %s", states[r->state].name);
    td_request_step(r, EV_GONE);
}

static void on_timeout(struct td_timer *t)
{
    struct td_request *r = TD_CONTAINER_OF(t, struct td_request, timeout);
    if (r->state == RQ_DOUBT)
        td_request_step(r, td_request_run_failed(r, r->doubt_status, true, r->doubt.text));
    else
        td_request_step(r, EV_TIMEOUT);
}

void td_request_init(struct td_request *r, const struct td_router_ports *ports)
{
    r->ports = ports;
    r->deadline.fire = on_deadline;
    r->timeout.fire = on_timeout;
    r->deadline_ns = TD_NEVER_NS;
    td_list_init(&r->queue_link);
    r->t_received = r->t_state = td_request_now(r);
}

void td_request_deinit(struct td_request *r)
{
    if (r->ports == NULL) return;
    TD_CHECK(r->state == RQ_NEW || td_request_is_done(r));
    td_request_free_held(r);
    td_block_names_deinit(&r->names);
    free(r->tokens);
    free(r->stop_ids);
    if (r->sampling != NULL) tandem__v1__sampling__free_unpacked(r->sampling, NULL);
    r->tokens = r->stop_ids = NULL;
    r->sampling = NULL;
    r->ports = NULL;
}

void td_request_begin(struct td_request *r)
{
    if (r->deadline_ns != TD_NEVER_NS) {
        uint64_t now = td_request_now(r);
        r->ports->env->timer_start(r->ports->env, &r->deadline, r->deadline_ns > now ? r->deadline_ns - now : 0);
    }
    td_request_step(r, EV_BEGIN);
}

/* --- questions ------------------------------------------------------------------------------------------- */

bool td_request_is_done(const struct td_request *r) { return r->state == RQ_DONE || r->state == RQ_FAILED; }
bool td_request_is_queued(const struct td_request *r) { return r->state == RQ_QUEUED; }
const char *td_request_state_name(const struct td_request *r) { return states[r->state].name; }
