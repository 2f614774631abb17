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
 * A first token that ends the request skips the rest: D is told, no KV comes.
 *
 * News of P and D travel on different connections, so D's first tokens, even its "finished", may be here before P's
 * first token. They are held until then.
 *
 * Failures:
 *   P does not know D's incarnation
 *       the same run again, with D's descriptor (INTRODUCING)
 *   D has no room
 *       back to the front of the queue until something changes at D; this is not counted as a failure, unless D has
 *       nothing to wait for: then it will never have room
 *   P or D fails before the first token
 *       if the status says that another try can help: all of it is cancelled, and after a short pause a new pair gets a
 *       fresh start (BACKOFF), twice at most
 *   P's call fails after the first token
 *       D alone knows whether the KV arrived: its tokens or its failure decide (DOUBT); if it says neither for 3 s, the
 *       request fails with P's reason
 *   anything fails once the client has tokens
 *       the request ends with the worker's message. All tokens so far are in r->tokens, so that going on elsewhere can
 *       take the place of FAILED here
 *   the client leaves or reads too slowly, the deadline passes, or what it waits for (a stop string) has come
 *       D and P are told at once */
#include "router/request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

enum event {
    EV_NONE,
    EV_BEGIN,
    EV_READY,
    EV_PLACED,
    EV_NO_ROOM, /* D refused for want of pages */
    EV_RESERVED,
    EV_UNKNOWN_PEER, /* P has never heard of D */
    EV_FIRST,
    EV_TOKENS,
    EV_FINISHED,
    EV_STOPPED,    /* the client has all it wants: the workers are told, and that was the answer */
    EV_RUN_FAILED, /* P's call failed after the first token */
    EV_RETRY,      /* failed, and another try may help */
    EV_FATAL,      /* failed for good: r->fail_status, r->fail */
    EV_GONE,       /* nobody waits for the answer: client left, deadline */
    EV_TIMEOUT,    /* the state's own */
    N_EVENTS
};

static enum event enter_queue(struct td_request *r);
static enum event start_decode(struct td_request *r);
static enum event start_run(struct td_request *r);
static enum event start_run_introduced(struct td_request *r);
static enum event deliver_first(struct td_request *r);
static enum event deliver(struct td_request *r);
static enum event back_off(struct td_request *r);

/* state, timeout in ms (0: none), on entering, on an event that leaves it where it is */
#define REQUEST_STATES(X)                                                                                              \
    X(NEW, 0, NULL, NULL)                                                                                              \
    X(TOKENIZING, 0, NULL, NULL)                                                                                       \
    X(QUEUED, 0, enter_queue, NULL)                                                                                    \
    X(RESERVING, 0, start_decode, NULL)                                                                                \
    X(PREFILLING, 0, start_run, NULL)                                                                                  \
    X(INTRODUCING, 0, start_run_introduced, NULL)                                                                      \
    X(HANDOFF, 0, deliver_first, NULL)                                                                                 \
    X(DOUBT, 3000, NULL, NULL)                                                                                         \
    X(DECODING, 0, deliver, deliver)                                                                                   \
    X(BACKOFF, 50, back_off, NULL) /* doubled per retry */                                                             \
    X(DONE, 0, NULL, NULL)                                                                                             \
    X(FAILED, 0, NULL, NULL)

enum td_request_state {
#define X(name, timeout_ms, enter, stay) RQ_##name,
    REQUEST_STATES(X)
#undef X
        RQ_N_STATES
};
static const struct {
    const char *name;
    uint32_t timeout_ms;
    enum event (*enter)(struct td_request *r);
    enum event (*stay)(struct td_request *r);
} states[RQ_N_STATES] = {
#define X(name, timeout_ms, enter, stay) {#name, timeout_ms, enter, stay},
    REQUEST_STATES(X)
#undef X
};

/* 0: not expected here, dropped. */
#define ENDS [EV_FATAL] = RQ_FAILED, [EV_GONE] = RQ_FAILED
static const uint8_t next[RQ_N_STATES][N_EVENTS] = {
    [RQ_NEW] = {[EV_BEGIN] = RQ_TOKENIZING, ENDS},
    [RQ_TOKENIZING] = {[EV_READY] = RQ_QUEUED, ENDS},
    [RQ_QUEUED] = {[EV_PLACED] = RQ_RESERVING, ENDS},
    [RQ_RESERVING] = {[EV_RESERVED] = RQ_PREFILLING, [EV_NO_ROOM] = RQ_QUEUED, [EV_RETRY] = RQ_BACKOFF, ENDS},
    [RQ_PREFILLING] = {[EV_FIRST] = RQ_HANDOFF,
                       [EV_UNKNOWN_PEER] = RQ_INTRODUCING,
                       [EV_TOKENS] = RQ_PREFILLING,
                       [EV_FINISHED] = RQ_PREFILLING,
                       [EV_RETRY] = RQ_BACKOFF,
                       ENDS},
    [RQ_INTRODUCING] = {[EV_FIRST] = RQ_HANDOFF,
                        [EV_TOKENS] = RQ_INTRODUCING,
                        [EV_FINISHED] = RQ_INTRODUCING,
                        [EV_RETRY] = RQ_BACKOFF,
                        ENDS},
    [RQ_HANDOFF] =
        {[EV_TOKENS] = RQ_DECODING, [EV_FINISHED] = RQ_DONE, [EV_STOPPED] = RQ_DONE, [EV_RUN_FAILED] = RQ_DOUBT, ENDS},
    [RQ_DOUBT] = {[EV_TOKENS] = RQ_DECODING, [EV_FINISHED] = RQ_DONE, [EV_TIMEOUT] = RQ_FAILED, ENDS},
    [RQ_DECODING] = {[EV_TOKENS] = RQ_DECODING, [EV_FINISHED] = RQ_DONE, [EV_STOPPED] = RQ_DONE, ENDS},
    [RQ_BACKOFF] = {[EV_TIMEOUT] = RQ_QUEUED, ENDS},
};

static uint64_t now_of(const struct td_request *r) { return r->ports->env->now_ns(r->ports->env); }

/* --- letting go ------------------------------------------------------------------------------------------ */

static void end_run(struct td_request *r, bool cancel)
{
    if (r->has_place) {
        r->has_place = false;
        r->ports->prefilled(r->ports->self, r);
    }
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

static void drop_held(struct td_request *r)
{
    for (uint32_t i = 0; i < r->n_held; i++)
        if (r->want_logprobs) tandem__v1__position_logprobs__free_unpacked(r->held_logprobs[i], NULL);
    r->n_held = 0;
}

/* Back to a request that nobody works at. made_room: it held something at its workers. */
static void let_go(struct td_request *r, bool cancel_run, bool made_room)
{
    end_decode(r);
    end_run(r, cancel_run);
    release_workers(r, made_room);
    drop_held(r);
    if (r->target != NULL) tandem__v1__kv_target__free_unpacked(r->target, NULL);
    r->target = NULL;
    r->has_finish = false;
}

static void finish(struct td_request *r)
{
    bool is_good = r->state == RQ_DONE;
    struct td_env *env = r->ports->env;
    env->timer_stop(env, &r->timeout);
    env->timer_stop(env, &r->deadline);
    r->t_last = now_of(r);
    let_go(r, !is_good || r->is_stopped, true); /* a good run may still be saying its Done */
    r->ports->done(r->ports->self, r, is_good ? TD_OK : r->fail_status, is_good ? "" : r->fail.text);
}

/* --- the loop -------------------------------------------------------------------------------------------- */

/* Nothing may touch r after this: it may be gone. */
static void step(struct td_request *r, enum event ev)
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
        r->t_state = now_of(r);
        struct td_env *env = r->ports->env;
        env->timer_stop(env, &r->timeout);
        if (states[to].timeout_ms > 0)
            env->timer_start(env, &r->timeout,
                             (states[to].timeout_ms * TD_NS_PER_MS) << (to == RQ_BACKOFF ? r->n_retries : 0));
        if (to == RQ_DONE || to == RQ_FAILED) {
            finish(r);
            return;
        }
        ev = states[to].enter != NULL ? states[to].enter(r) : EV_NONE;
    }
}

static enum event fatal(struct td_request *r, enum td_status st, const char *text)
{
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s", text);
    return EV_FATAL;
}

/* A worker failed us. May somebody else, or the same a little later, do better? */
static enum event worker_failed(struct td_request *r, bool decode_failed, enum td_status st, const char *text)
{
    const struct td_worker *w = decode_failed ? r->decode : r->prefill;
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s worker %s: %s", decode_failed ? "decode" : "prefill",
               w != NULL ? w->identity->name : "?", text[0] != '\0' ? text : td_status_text(st));
    TD_WARN("worker_failed", "req=%s worker=%s state=%s status=%s text=\"%s\"", r->id,
            w != NULL ? w->identity->name : "?", states[r->state].name, td_status_name(st), text);
    if (r->has_first || td_status_retry(st) == TD_RETRY_NO || r->n_retries == TD_ROUTER_MAX_RETRIES) return EV_FATAL;
    r->failed_decode = r->decode != NULL ? r->decode->incarnation : 0;
    r->failed_prefill = r->prefill != NULL ? r->prefill->incarnation : 0;
    r->decode_failed = decode_failed;
    /* A generation that has ended is cured by a fresh start, wherever. */
    r->same_ok = td_status_retry(st) == TD_RETRY_LATER || st == TD_E_STALE;
    return EV_RETRY;
}

/* --- what happens on entering a state -------------------------------------------------------------------- */

static enum event enter_queue(struct td_request *r)
{
    let_go(r, true, false); /* D had no room */
    struct td_err err = {{0}};
    enum td_status st = r->ports->place(r->ports->self, r, &err);
    if (st == TD_OK) return EV_PLACED;
    if (st == TD_IN_PROGRESS) return EV_NONE;
    /* After a failure that is the better reason to give. */
    return r->n_retries > 0 && st == TD_E_UNAVAILABLE ? EV_FATAL : fatal(r, st, err.text);
}

static void copy_name(char *out, size_t n, const char *name)
{
    size_t len = strnlen(name, n - 1);
    memcpy(out, name, len);
    out[len] = '\0';
}

static enum event start_decode(struct td_request *r)
{
    r->had_turn = true;
    r->has_place = true; /* its place at P is taken from now on */
    copy_name(r->decode_name, sizeof r->decode_name, r->decode->identity->name);
    copy_name(r->prefill_name, sizeof r->prefill_name, r->prefill->identity->name);
    struct td_err err = {{0}};
    enum td_status st = r->ports->decode_start(r->ports->self, r, &err);
    if (st == TD_E_BUSY) { /* its stream is full: the same as a full worker */
        r->ports->decode_full(r->ports->self, r);
        return EV_NO_ROOM;
    }
    if (st != TD_OK) return worker_failed(r, true, st, err.text);
    r->has_start = true;
    return EV_NONE;
}

static enum event run(struct td_request *r, bool introduce)
{
    struct td_err err = {{0}};
    r->t_run = now_of(r);
    enum td_status st = r->ports->run_start(r->ports->self, r, introduce, &err);
    if (st != TD_OK) return worker_failed(r, false, st, err.text);
    r->has_run = true;
    return EV_NONE;
}
static enum event start_run(struct td_request *r) { return run(r, false); }
static enum event start_run_introduced(struct td_request *r) { return run(r, true); }

/* Takes the tokens into the answer and to the client. */
static enum event emit(struct td_request *r, const uint32_t *ids, Tandem__V1__PositionLogprobs *const *logprobs,
                       uint32_t n)
{
    if (td_request_n_generated(r) + (uint64_t)n > r->max_tokens)
        return fatal(r, TD_E_PROTOCOL, "a worker sent more tokens than it was asked for");
    if (r->n_tokens + (uint64_t)n > r->cap_tokens) {
        uint64_t cap = r->n_tokens + (uint64_t)n + 256;
        uint32_t *p = cap <= UINT32_MAX ? td_realloc(r->tokens, (size_t)cap, sizeof *p) : NULL;
        if (p == NULL) return fatal(r, TD_E_NO_MEMORY, "no memory for the answer's tokens");
        r->tokens = p;
        r->cap_tokens = (uint32_t)cap;
    }
    for (uint32_t i = 0; i < n; i++) r->tokens[r->n_tokens++] = ids[i];
    enum td_status st = r->ports->emit(r->ports->self, r, n, logprobs);
    if (st != TD_OK) return fatal(r, st, td_status_text(st));
    if (!r->is_stopped) return EV_NONE;
    r->finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    return EV_STOPPED;
}

/* Everything held, in order, as one piece. */
static enum event emit_held(struct td_request *r)
{
    if (r->n_held == 0) return EV_NONE;
    enum event ev = emit(r, r->held_ids, r->want_logprobs ? r->held_logprobs : NULL, r->n_held);
    drop_held(r);
    return ev;
}

/* The first token, and what overtook it. */
static enum event deliver_first(struct td_request *r)
{
    bool has_overtaken = r->n_held > 1;
    enum event ev = emit_held(r);
    if (ev != EV_NONE) return ev;
    if (r->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE && !r->has_finish) { /* P said so: no KV comes */
        if (r->has_start) r->ports->decode_first(r->ports->self, r);
        r->has_start = false;
        r->has_finish = true;
    }
    if (r->has_finish) return EV_FINISHED;
    return has_overtaken ? EV_TOKENS : EV_NONE;
}

static enum event deliver(struct td_request *r)
{
    enum event ev = emit_held(r);
    if (ev != EV_NONE) return ev;
    return r->has_finish ? EV_FINISHED : EV_NONE;
}

static enum event back_off(struct td_request *r)
{
    r->n_retries++;
    let_go(r, true, true);
    r->finish_reason = TANDEM__V1__FINISH_REASON__FINISH_NONE;
    r->t_first_decoded = r->handoff_us = r->handoff_bytes = 0;
    r->transport[0] = '\0';
    return EV_NONE;
}

/* --- news ------------------------------------------------------------------------------------------------ */

static void on_deadline(struct td_timer *t)
{
    struct td_request *r = TD_CONTAINER_OF(t, struct td_request, deadline);
    r->fail_status = TD_E_DEADLINE;
    td_err_set(&r->fail, TD_E_DEADLINE, "deadline passed while the request was %s", states[r->state].name);
    step(r, EV_GONE);
}

static void on_timeout(struct td_timer *t) { step(TD_CONTAINER_OF(t, struct td_request, timeout), EV_TIMEOUT); }

void td_request_init(struct td_request *r, const struct td_router_ports *ports)
{
    r->ports = ports;
    r->deadline.fire = on_deadline;
    r->timeout.fire = on_timeout;
    r->deadline_ns = TD_NEVER_NS;
    td_list_init(&r->queue_link);
    r->t_received = r->t_state = now_of(r);
}

void td_request_deinit(struct td_request *r)
{
    if (r->ports == NULL) return;
    TD_CHECK(r->state == RQ_NEW || td_request_is_done(r));
    drop_held(r);
    free(r->held_ids);
    free(r->held_logprobs);
    free(r->tokens);
    free(r->stop_ids);
    if (r->sampling != NULL) tandem__v1__sampling__free_unpacked(r->sampling, NULL);
    r->held_logprobs = NULL;
    r->held_ids = r->tokens = r->stop_ids = NULL;
    r->sampling = NULL;
    r->ports = NULL;
}

void td_request_begin(struct td_request *r)
{
    if (r->deadline_ns != TD_NEVER_NS) {
        uint64_t now = now_of(r);
        r->ports->env->timer_start(r->ports->env, &r->deadline, r->deadline_ns > now ? r->deadline_ns - now : 0);
    }
    step(r, EV_BEGIN);
}

void td_request_on_ready(struct td_request *r) { step(r, EV_READY); }
void td_request_on_placed(struct td_request *r) { step(r, EV_PLACED); }

void td_request_on_bad(struct td_request *r, enum td_status st, const char *text)
{
    if (td_request_is_done(r)) return;
    step(r, fatal(r, st, text));
}

void td_request_on_refused(struct td_request *r, enum td_status st, const char *text)
{
    if (r->state != RQ_QUEUED) return;
    step(r, r->n_retries > 0 ? EV_FATAL : fatal(r, st, text));
}

static Tandem__V1__KvTarget *copy_target(const Tandem__V1__KvTarget *t)
{
    size_t n = tandem__v1__kv_target__get_packed_size(t);
    uint8_t *bytes = td_calloc(1, n + 1);
    if (bytes == NULL) return NULL;
    tandem__v1__kv_target__pack(t, bytes);
    Tandem__V1__KvTarget *copy = tandem__v1__kv_target__unpack(NULL, n, bytes);
    free(bytes);
    return copy;
}

void td_request_on_reserved(struct td_request *r, const Tandem__V1__KvTarget *target)
{
    if (r->state != RQ_RESERVING || !r->has_start) return;
    if (target == NULL) {
        step(r, worker_failed(r, true, TD_E_PROTOCOL, "reserved without a target"));
        return;
    }
    r->target = copy_target(target);
    step(r, r->target != NULL ? EV_RESERVED : fatal(r, TD_E_NO_MEMORY, "no memory for the page list"));
}

static bool is_prefilling(const struct td_request *r)
{
    return r->state == RQ_PREFILLING || r->state == RQ_INTRODUCING;
}
static bool awaits_decode(const struct td_request *r)
{
    return r->has_start &&
           (is_prefilling(r) || r->state == RQ_HANDOFF || r->state == RQ_DOUBT || r->state == RQ_DECODING);
}

static Tandem__V1__PositionLogprobs *copy_logprobs(const Tandem__V1__PositionLogprobs *l)
{
    size_t n =
        l != NULL ? tandem__v1__position_logprobs__get_packed_size(l) : 0; /* missing: an empty one in its place */
    uint8_t *bytes = td_calloc(1, n + 1);
    if (bytes == NULL) return NULL;
    if (l != NULL) tandem__v1__position_logprobs__pack(l, bytes);
    Tandem__V1__PositionLogprobs *copy = tandem__v1__position_logprobs__unpack(NULL, n, bytes);
    free(bytes);
    return copy;
}

/* front: ahead of everything held. logprobs are copied. */
static bool hold(struct td_request *r, uint32_t id, const Tandem__V1__PositionLogprobs *logprobs, bool front)
{
    if (r->n_held == r->cap_held) {
        uint32_t cap = r->cap_held < 8 ? 8 : r->cap_held * 2;
        uint32_t *ids = td_realloc(r->held_ids, cap, sizeof *ids);
        if (ids != NULL) r->held_ids = ids;
        Tandem__V1__PositionLogprobs **l = td_realloc(r->held_logprobs, cap, sizeof(void *));
        if (l != NULL) r->held_logprobs = l;
        if (ids == NULL || l == NULL) return false;
        r->cap_held = cap;
    }
    Tandem__V1__PositionLogprobs *copy = r->want_logprobs ? copy_logprobs(logprobs) : NULL;
    if (r->want_logprobs && copy == NULL) return false;
    uint32_t at = front ? 0 : r->n_held, n_after = r->n_held - at;
    memmove(r->held_ids + at + 1, r->held_ids + at, n_after * sizeof *r->held_ids);
    memmove(r->held_logprobs + at + 1, r->held_logprobs + at, n_after * sizeof(void *));
    r->held_ids[at] = id;
    r->held_logprobs[at] = copy;
    r->n_held++;
    return true;
}

static bool is_final(Tandem__V1__FinishReason reason)
{
    return reason == TANDEM__V1__FINISH_REASON__FINISH_STOP || reason == TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
}

void td_request_on_first(struct td_request *r, const Tandem__V1__FirstToken *first)
{
    if (!is_prefilling(r) || !r->has_run || r->has_first) return;
    if (!hold(r, first->token_id, first->logprobs, true)) {
        step(r, fatal(r, TD_E_NO_MEMORY, "no memory for the first token"));
        return;
    }
    r->has_first = true;
    r->t_first = now_of(r);
    r->cached_tokens = first->cached_tokens < r->n_prompt ? first->cached_tokens : r->n_prompt;
    r->prefill_us = first->prefill_us;
    if (r->has_place) {
        r->has_place = false;
        r->ports->prefilled(r->ports->self, r);
    }
    /* A reason from D that was held stays the one that counts. */
    if (is_final(first->finish_reason) && !r->has_finish) r->finish_reason = first->finish_reason;
    if (r->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE && !r->has_start)
        step(r, worker_failed(r, true, TD_E_PROTOCOL, "took the first token for the last"));
    else
        step(r, EV_FIRST);
}

void td_request_on_run_done(struct td_request *r, const Tandem__V1__RunDone *done)
{
    if (!r->has_run) return;
    r->handoff_bytes = done->kv_bytes;
    r->handoff_us = done->handoff_us;
    copy_name(r->transport, sizeof r->transport, done->transport);
}

void td_request_on_tokens(struct td_request *r, const uint32_t *ids, Tandem__V1__PositionLogprobs *const *logprobs,
                          uint32_t n)
{
    if (!awaits_decode(r) || r->has_finish || n == 0) return;
    if (td_request_n_generated(r) + (uint64_t)r->n_held + n > r->max_tokens) {
        step(r, worker_failed(r, true, TD_E_PROTOCOL, "more tokens than it was asked for"));
        return;
    }
    if (r->t_first_decoded == 0) r->t_first_decoded = now_of(r);
    if (r->state == RQ_DECODING) { /* the usual case: nothing is held, nothing is copied */
        step(r, emit(r, ids, r->want_logprobs ? logprobs : NULL, n));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (hold(r, ids[i], logprobs != NULL ? logprobs[i] : NULL, false)) continue;
        step(r, fatal(r, TD_E_NO_MEMORY, "no memory for tokens that wait for the first"));
        return;
    }
    step(r, EV_TOKENS);
}

static enum td_status status_by_name(const char *name, enum td_status otherwise)
{
    for (int st = 0; st < TD_N_STATUS; st++)
        if (strcmp(td_status_name((enum td_status)st), name) == 0) return (enum td_status)st;
    return otherwise;
}

static enum event decode_refused(struct td_request *r, enum td_status st, const char *text)
{
    bool has_room = st != TD_E_NO_PAGES && st != TD_E_BUSY;
    if (r->state != RQ_RESERVING || has_room) return worker_failed(r, true, st, text);
    /* Three refusals of an empty worker, and the request does not fit at all. (Not one: pages may be on their way
     * back.) */
    if (r->ports->decode_full(r->ports->self, r) && ++r->n_refused_alone == 3) {
        worker_failed(r, true, st, text);
        return EV_FATAL;
    }
    return EV_NO_ROOM;
}

void td_request_on_finished(struct td_request *r, const Tandem__V1__DecodeFinished *f)
{
    if (!r->has_start || r->has_finish) return;
    r->has_start = false; /* D has forgotten it */
    if (!is_final(f->reason)) {
        enum td_status st = status_by_name(f->status_name, TD_E_INTERNAL);
        /* P has told D already that the first token ends it; P's own word to us is on its way. */
        if (st == TD_OK && is_prefilling(r)) return;
        if (st == TD_OK || st == TD_IN_PROGRESS) st = TD_E_PROTOCOL;
        if (f->is_lost && td_status_retry(st) == TD_RETRY_NO) st = TD_E_PEER_LOST; /* it says that others can go on */
        step(r, decode_refused(r, st, f->message));
        return;
    }
    if (r->state == RQ_RESERVING) {
        step(r, worker_failed(r, true, TD_E_PROTOCOL, "finished before it had anything"));
        return;
    }
    r->has_finish = true;
    r->finish_reason = f->reason;
    r->decode_us = f->decode_us;
    if (f->handoff_bytes > 0) r->handoff_bytes = f->handoff_bytes;
    if (r->transport[0] == '\0') copy_name(r->transport, sizeof r->transport, f->transport);
    step(r, EV_FINISHED);
}

void td_request_on_run_closed(struct td_request *r, enum td_status st, const char *text)
{
    if (!r->has_run) return;
    r->has_run = false;
    r->run = NULL;
    if (!r->has_first && r->has_place && st == TD_E_UNKNOWN_PEER && r->state == RQ_PREFILLING) {
        step(r, EV_UNKNOWN_PEER);
        return;
    }
    if (r->has_place) {
        r->has_place = false;
        r->ports->prefilled(r->ports->self, r);
    }
    if (is_prefilling(r)) {
        step(r, st == TD_OK ? worker_failed(r, false, TD_E_PROTOCOL, "the run ended without a first token")
                            : worker_failed(r, false, st, text));
    } else if (st != TD_OK && r->state == RQ_HANDOFF) {
        worker_failed(r, false, st, text); /* keeps the reason; D decides */
        step(r, EV_RUN_FAILED);
    }
}

void td_request_on_worker_lost(struct td_request *r, struct td_worker *w, const char *why)
{
    if (td_request_is_done(r)) return;
    if (r->decode == w) {
        if (!r->has_start) return; /* it has finished here already: what was held goes to the client */
        r->has_start = false;
        step(r, worker_failed(r, true, TD_E_PEER_LOST, why));
    } else if (r->prefill == w && r->has_run) {
        r->ports->run_end(r->ports->self, r, true);
        td_request_on_run_closed(r, TD_E_PEER_LOST, why);
    } else if (r->prefill == w && r->state == RQ_RESERVING) {
        step(r, worker_failed(r, false, TD_E_PEER_LOST, why));
    }
}

void td_request_on_client_gone(struct td_request *r, enum td_status st)
{
    if (td_request_is_done(r)) return;
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s", td_status_text(st));
    step(r, EV_GONE);
}

/* --- questions ------------------------------------------------------------------------------------------- */

bool td_request_is_done(const struct td_request *r) { return r->state == RQ_DONE || r->state == RQ_FAILED; }
bool td_request_is_queued(const struct td_request *r) { return r->state == RQ_QUEUED; }
const char *td_request_state_name(const struct td_request *r) { return states[r->state].name; }
