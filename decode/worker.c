/* A request's life here.
 *
 * The happy path
 *   1. Start: checked, pages reserved, the router is told where they are.                                  RESERVED
 *   2. The prefill worker's COMPLETE brings the KV of all tokens and the next token, which the router has already.
 * QUEUED
 *   3. There is a place in the batch; each step feeds the newest token and draws the next.                  RUNNING
 *   4. A stop id, max_tokens or the context's end: Finished.                                                LEAVING,
 * gone With no prefill worker named, the prompt is computed here in chunks: 1 goes to QUEUED at once and every token,
 * the first too, goes to the router.
 *
 * What can go wrong (each ends the request with exactly one Finished)
 *   bad field, unknown or lost prefill worker, no room, draining   refused at once
 *   DecodeFirst: the first token ended the request                 the reservation ends; status OK, reason NONE. The
 * prefill worker's word may come first, and gives the pages back (OVER) cancel, deadline out of the batch before the
 * next step prefill worker lost, aborted, broke the protocol               is_lost: the router goes on elsewhere no
 * page for the next token, and it is the youngest             is_lost the step failed is_lost the router's stream ends,
 * or it reads too slowly               all its requests end, nobody is left to be told A request that leaves while its
 * step is in flight keeps its pages until the step is done (LEAVING). Pages of a reservation belong to td_rx until the
 * sender can write no more: the request is gone before. */
#include "decode/worker.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/request.h"
#include "common/metrics/metrics.h"
#include "decode/sched.h"
#include "decode/stream.h"

#define STALL_LIMIT_NS (1 * TD_NS_PER_S)   /* a sequence waits this long for pages of a sender that does not answer */
#define STALL_RETRY_NS (20 * TD_NS_PER_MS) /* ended reservations give their pages back without telling */

/* clang-format off */
#define DECODE_STATES(X)                                                              \
    X(NEW)      /* being checked */                                                   \
    X(RESERVED) /* waits for its KV */                                                \
    X(OVER)     /* the prefill worker says that its first token ended it; the router will say so too */ \
    X(QUEUED)   /* waits for a place in the batch */                                  \
    X(RUNNING)  /* in the batch */                                                    \
    X(LEAVING)  /* over and reported; a step in flight may still read its pages */
/* clang-format on */
enum decode_state {
#define X(name) DS_##name,
    DECODE_STATES(X)
#undef X
        DS_N
};
static const char *const state_names[] = {
#define X(name) #name,
    DECODE_STATES(X)
#undef X
};
#define TO(state) (1u << DS_##state)
static const uint8_t next_states[DS_N] = {
    [DS_NEW] = TO(RESERVED) | TO(QUEUED) | TO(LEAVING),
    [DS_RESERVED] = TO(QUEUED) | TO(OVER) | TO(LEAVING),
    [DS_OVER] = TO(LEAVING),
    [DS_QUEUED] = TO(RUNNING) | TO(LEAVING),
    [DS_RUNNING] = TO(LEAVING),
};

struct request {
    enum decode_state state;
    struct td_decode_worker *w;
    struct td_decode_stream *stream; /* NULL: LEAVING, nobody to tell */
    uint64_t stream_id;
    struct td_token_request req;
    struct td_decode_seq seq;
    struct td_rx_reservation *reservation; /* RESERVED */
    struct td_rx_target target;            /* its pages */
    uint64_t prefill;                      /* incarnation; 0: computed here */
    struct td_timer deadline;
    uint64_t deadline_ns;
    uint64_t started_ns, entered_ns, complete_ns; /* start, this state, KV complete */
    uint64_t stalled_ns;                          /* waits for pages since, with stalled_at tokens computed */
    uint32_t stalled_at;
    uint64_t handoff_bytes;
    struct td_list in_worker; /* oldest first */
    struct td_list in_stream;
};

struct td_decode_worker {
    struct td_decode_worker_options o;
    struct td_decode_ports ports;
    struct td_kv_pages *kv;
    struct td_rx *rx;
    struct td_decode_sched *sched;
    struct td_list requests, streams;
    uint32_t n_requests; /* not LEAVING */
    uint32_t n_reserved;
    uint64_t next_order;
    uint64_t step_started_ns;
    uint64_t n_steps, n_tokens_drawn;
    bool is_draining, has_drained, is_broken, is_destroying;
    unsigned depth; /* of events being handled: what follows from them is done once, at the end */
    struct td_timer stall_timer;
};

static uint64_t now(const struct td_decode_worker *w) { return w->ports.env->now_ns(w->ports.env); }
static uint64_t ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (to_ns - from_ns) / TD_NS_PER_MS : 0;
}
static struct request *request_of(struct td_decode_seq *q) { return TD_CONTAINER_OF(q, struct request, seq); }

static void set_state(struct request *r, enum decode_state to)
{
    TD_CHECK((next_states[r->state] >> to & 1u) != 0);
    TD_DEBUG("request_state", "req=%s stream_id=%" PRIu64 " from=%s to=%s", r->req.id, r->stream_id,
             state_names[r->state], state_names[to]);
    if (r->state == DS_RESERVED) r->w->n_reserved--;
    if (to == DS_RESERVED) r->w->n_reserved++;
    r->state = to;
    r->entered_ns = now(r->w);
}

/* --- the end of a request ------------------------------------------------------------------------------------------
 */

static void free_request(struct request *r)
{
    td_list_remove(&r->in_worker);
    td_decode_seq_deinit(&r->seq);
    td_token_request_deinit(&r->req);
    free(r);
}

/* A start that never became a request. */
static void refuse(struct td_decode_stream *s, uint64_t stream_id, enum td_status st, const char *message)
{
    struct td_decode_finish f = {.stream_id = stream_id, .status = st, .is_lost = td_status_retry(st) != TD_RETRY_NO};
    snprintf(f.message, sizeof f.message, "%s", message);
    td_decode_stream_finished(s, &f);
}

/* The request is over: its router is told (once), its resources go back as soon as they can. r may be gone afterwards.
 */
static void finish(struct request *r, Tandem__V1__FinishReason reason, enum td_status st, bool is_lost, const char *why)
{
    struct td_decode_worker *w = r->w;
    TD_CHECK(r->state != DS_LEAVING);
    uint64_t t = now(w);
    if (r->stream != NULL) {
        struct td_decode_finish f = {
            .stream_id = r->stream_id,
            .reason = reason,
            .status = st,
            .is_lost = is_lost,
            .handoff_bytes = r->handoff_bytes,
            .handoff_us = r->prefill != 0 && r->complete_ns != 0 ? (r->complete_ns - r->started_ns) / 1000 : 0,
            .decode_us = r->complete_ns != 0 ? (t - r->complete_ns) / 1000 : 0,
        };
        snprintf(f.message, sizeof f.message, "%s", why);
        if (r->handoff_bytes > 0)
            snprintf(f.transport, sizeof f.transport, "%s", w->ports.transport(w->ports.self, r->prefill));
        td_decode_stream_finished(r->stream, &f);
    }
    TD_INFO("request_finished",
            "req=%s stream_id=%" PRIu64 " state=%s status=%s reason=%d prompt=%u generated=%u age_ms=%" PRIu64
            " lost=%d why=\"%s\"",
            r->req.id, r->stream_id, state_names[r->state], td_status_name(st), (int)reason, r->req.n_prompt,
            td_token_request_n_generated(&r->req), ms_between(r->started_ns, t), is_lost, why);
    w->ports.env->timer_stop(w->ports.env, &r->deadline);
    td_list_remove(&r->in_stream);
    r->stream = NULL;
    w->n_requests--;

    enum decode_state was = r->state;
    set_state(r, DS_LEAVING);
    if (was == DS_QUEUED || was == DS_RUNNING) {
        td_decode_sched_remove(w->sched, &r->seq); /* released follows */
        return;
    }
    if (r->reservation != NULL) {
        struct td_rx_reservation *rv = r->reservation;
        r->reservation = NULL;
        td_rx_end(w->rx, rv); /* no callback touches the owner from here on */
    }
    free_request(r);
}

static void finish_lost(struct request *r, enum td_status st, const char *why)
{
    finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, st, true, why);
}

/* Lost, too, if somebody else can do it or we can later: the status says so. */
static void finish_refused(struct request *r, enum td_status st, const char *why)
{
    finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, st, td_status_retry(st) != TD_RETRY_NO, why);
}

static void end_requests_of(struct td_decode_worker *w, struct td_decode_stream *s, enum td_status st, const char *why)
{
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct request *r = TD_LIST_ENTRY(it, struct request, in_worker);
        if (r->stream == s && r->state != DS_LEAVING) finish_refused(r, st, why);
    }
}

/* --- what follows from an event ------------------------------------------------------------------------------------
 */

static void set_gauges(const struct td_decode_worker *w)
{
    td_metric_set(TD_M_kv_pages_free_sliding, td_kv_pages_n_free(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_free_full, td_kv_pages_n_free(w->kv, TD_KV_FULL));
    td_metric_set(TD_M_sequences_running, td_decode_sched_n_running(w->sched));
    td_metric_set(TD_M_sequences_waiting, td_decode_sched_n_queued(w->sched) + w->n_reserved);
}

static void start_step(struct td_decode_worker *w)
{
    if (w->is_broken || td_decode_sched_is_in_flight(w->sched)) return;
    struct td_batch *b = td_decode_sched_plan(w->sched);
    if (td_decode_sched_has_stalled(w->sched)) w->ports.env->timer_start(w->ports.env, &w->stall_timer, STALL_RETRY_NS);
    if (b == NULL) return;
    w->step_started_ns = now(w);
    enum td_status st = w->ports.submit(w->ports.self, b);
    if (st == TD_OK) return;
    TD_ERROR("step_refused", "status=%s segments=%u", td_status_name(st), b->n_segments);
    td_decode_sched_done(w->sched, st); /* ends everything that was in it */
}

/* Streams that cannot be kept are closed; the others get their news. */
static void flush_streams(struct td_decode_worker *w)
{
    TD_LIST_FOREACH_SAFE (it, &w->streams) {
        struct td_decode_stream *s = TD_LIST_ENTRY(it, struct td_decode_stream, link);
        if (s->ending != TD_OK) continue;
        enum td_status st = TD_OK;
        if (!s->has_failed && td_decode_stream_has_news(s))
            st = td_decode_stream_flush(s, w->ports.send, w->ports.self);
        if (!s->has_failed && (st == TD_OK || st == TD_E_BUSY)) continue;
        s->ending = s->has_failed ? TD_E_SLOW_CLIENT : st;
        TD_WARN("router_stream_ended", "router=%016" PRIx64 " status=%s pending_bytes=%zu", s->router,
                td_status_name(s->ending), s->n_pending_bytes);
        end_requests_of(w, s, s->ending, "the router's stream cannot be served");
        w->ports.close(w->ports.self, s->call, s->ending, td_status_text(s->ending));
    }
}

static bool has_unsent_news(const struct td_decode_worker *w)
{
    TD_LIST_FOREACH (it, &w->streams) {
        const struct td_decode_stream *s = TD_LIST_ENTRY(it, struct td_decode_stream, link);
        if (s->ending == TD_OK && td_decode_stream_has_news(s)) return true;
    }
    return false;
}

static void enter(struct td_decode_worker *w) { w->depth++; }

/* The next step starts before news is packed: the engine should not wait for that. */
static void leave(struct td_decode_worker *w)
{
    if (w->depth > 1 || w->is_destroying) {
        w->depth--;
        return;
    }
    start_step(w);
    flush_streams(w);
    start_step(w); /* a stream that ended may have made room */
    set_gauges(w);
    if (w->is_draining && !w->has_drained && w->n_requests == 0 && !td_decode_sched_is_in_flight(w->sched) &&
        !has_unsent_news(w)) {
        w->has_drained = true;
        w->ports.drained(w->ports.self);
    }
    w->depth--;
}

static void on_stall_timer(struct td_timer *t)
{
    struct td_decode_worker *w = TD_CONTAINER_OF(t, struct td_decode_worker, stall_timer);
    enter(w);
    leave(w);
}

/* --- from the scheduler --------------------------------------------------------------------------------------------
 */

static void on_joined(void *self, struct td_decode_seq *q)
{
    (void)self;
    set_state(request_of(q), DS_RUNNING);
}

static void on_drew(void *self, struct td_decode_seq *q, const struct td_segment *seg)
{
    struct td_decode_worker *w = self;
    struct request *r = request_of(q);
    w->n_tokens_drawn++;
    td_metric_add(TD_M_generated_tokens, 1);
    td_decode_stream_token(r->stream, r->stream_id, seg);
    Tandem__V1__FinishReason reason = td_token_request_append(&r->req, seg->token);
    if (reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) finish(r, reason, TD_OK, false, "");
}

static void on_broke(void *self, struct td_decode_seq *q, enum td_status st)
{
    (void)self;
    finish_lost(request_of(q), st, "the engine failed");
}

static void on_no_pages(void *self, struct td_decode_seq *q)
{
    (void)self;
    finish_lost(request_of(q), TD_E_NO_PAGES, "no KV page for the next token");
}

/* Reservations give their pages back only when their sender confirms: what to do while the last sequence waits for
 * them. */
static bool on_relieve(void *self, struct td_decode_seq *q)
{
    struct td_decode_worker *w = self;
    struct request *r = request_of(q), *youngest = NULL;
    uint64_t t = now(w);
    if (r->stalled_ns == 0 || r->stalled_at != q->n_cached) r->stalled_ns = t;
    r->stalled_at = q->n_cached;
    if (td_rx_n_quarantined_pages(w->rx) > 0 && t - r->stalled_ns < STALL_LIMIT_NS) return true;
    TD_LIST_FOREACH (it, &w->requests) {
        struct request *other = TD_LIST_ENTRY(it, struct request, in_worker);
        if (other->state == DS_RESERVED && other->seq.order > q->order) youngest = other;
    }
    if (youngest == NULL) return false;
    r->stalled_ns = t;
    finish_lost(youngest, TD_E_NO_PAGES, "its pages are needed by an older request");
    return true;
}

static void on_released(void *self, struct td_decode_seq *q)
{
    (void)self;
    free_request(request_of(q));
}

/* --- from the hand-off ---------------------------------------------------------------------------------------------
 */

static enum td_status rx_send(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    struct td_decode_worker *w = self;
    return w->ports.send_peer(w->ports.self, prefill, id, data, n);
}

static void rx_ready(void *self, struct td_rx_reservation *rv, const struct td_rx_complete *c)
{
    struct td_decode_worker *w = self;
    struct request *r = td_rx_owner(rv);
    TD_CHECK(r->state == DS_RESERVED && r->reservation == rv);
    enter(w);
    r->reservation = NULL;
    r->complete_ns = now(w);
    r->handoff_bytes = c->kv_bytes;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        td_decode_seq_take_pages(&r->seq, (enum td_kv_group)g, r->target.first_block[g], r->target.n_pages[g],
                                 r->target.pages[g]);
    r->seq.n_cached = r->req.n_tokens;
    Tandem__V1__FinishReason reason = td_token_request_append(&r->req, c->first_token);
    set_state(r, DS_QUEUED);
    td_decode_sched_add(w->sched, &r->seq);
    /* The prefill worker should have said so rather than send KV; the router has the token either way. */
    if (reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) finish(r, reason, TD_OK, false, "");
    leave(w);
}

static void rx_failed(void *self, struct td_rx_reservation *rv, enum td_status st, const char *why)
{
    struct td_decode_worker *w = self;
    struct request *r = td_rx_owner(rv);
    TD_CHECK(r->state == DS_RESERVED && r->reservation == rv);
    enter(w);
    r->reservation = NULL; /* its pages go back on their own */
    if (st == TD_E_CANCELED)
        set_state(r, DS_OVER);
    else
        finish_lost(r, st, why);
    leave(w);
}

static void rx_ended(void *self, struct td_rx_reservation *rv)
{
    struct td_decode_worker *w = self; /* the owner may be gone: only its pages matter, somebody may wait for them */
    (void)rv;
    enter(w);
    leave(w);
}

/* --- commands of routers -------------------------------------------------------------------------------------------
 */

static void end_stream(struct td_decode_worker *w, struct td_decode_stream *s, enum td_status st, const char *text)
{
    if (s->ending != TD_OK) return;
    s->ending = st;
    TD_WARN("router_stream_ended", "router=%016" PRIx64 " status=%s why=\"%s\"", s->router, td_status_name(st), text);
    end_requests_of(w, s, st, text);
    w->ports.close(w->ports.self, s->call, st, text);
}

static struct td_list *bucket_of(struct td_decode_stream *s, uint64_t stream_id)
{
    return &s->requests[stream_id % TD_DECODE_STREAM_BUCKETS];
}

static struct request *find(struct td_decode_stream *s, uint64_t stream_id)
{
    TD_LIST_FOREACH (it, bucket_of(s, stream_id)) {
        struct request *r = TD_LIST_ENTRY(it, struct request, in_stream);
        if (r->stream_id == stream_id) return r;
    }
    return NULL;
}

static void on_deadline(struct td_timer *t)
{
    struct request *r = TD_CONTAINER_OF(t, struct request, deadline);
    struct td_decode_worker *w = r->w;
    enter(w);
    finish_refused(r, TD_E_DEADLINE, "deadline passed");
    leave(w);
}

static void set_deadline(struct request *r)
{
    r->deadline_ns = TD_NEVER_NS;
    if (r->req.timeout_us == 0 || r->req.timeout_us > (TD_NEVER_NS - r->started_ns) / 1000) return;
    r->deadline_ns = r->started_ns + r->req.timeout_us * 1000;
    r->deadline.fire = on_deadline;
    r->w->ports.env->timer_start(r->w->ports.env, &r->deadline, r->req.timeout_us * 1000);
}

/* Pages for r, or why there are none. */
static enum td_status reserve(struct td_decode_worker *w, struct request *r, struct td_err *err)
{
    bool is_local = r->prefill == 0;
    enum td_status st = is_local ? TD_OK : w->ports.check_peer(w->ports.self, r->prefill, err);
    if (st != TD_OK) return st;
    st = td_decode_sched_room(w->sched, r->req.n_tokens, is_local, w->n_requests - 1);
    if (st == TD_E_TOO_LARGE)
        return td_err_set(err, st, "token_ids: the KV of %u tokens never fits into this worker's pages",
                          r->req.n_tokens);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    if (is_local) return TD_OK;
    st = td_rx_reserve(w->rx, r->prefill, r->req.n_tokens, 0, r->req.id, r, &r->reservation, &r->target);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "%s", td_status_text(st));
}

static void on_start(struct td_decode_worker *w, struct td_decode_stream *s, const Tandem__V1__DecodeStart *m)
{
    if (find(s, m->stream_id) != NULL) {
        end_stream(w, s, TD_E_PROTOCOL, "stream_id: in use");
        return;
    }
    if (w->is_draining || w->is_broken) {
        refuse(s, m->stream_id, TD_E_DRAINING, td_status_text(TD_E_DRAINING));
        return;
    }
    struct td_err err = {0};
    struct request *r = td_calloc(1, sizeof *r);
    enum td_status st = TD_E_NO_MEMORY;
    if (r != NULL) {
        st = td_token_request_parse(m->request, w->o.n_vocab, w->o.max_context_tokens, &r->req, &err);
        if (st == TD_OK) {
            st = td_decode_seq_init(&r->seq, w->sched, &r->req, w->next_order);
            if (st != TD_OK) td_token_request_deinit(&r->req);
        }
    }
    if (st != TD_OK) {
        free(r);
        refuse(s, m->stream_id, st, err.text[0] != '\0' ? err.text : td_status_text(st));
        return;
    }
    w->next_order++;
    r->w = w;
    r->stream = s;
    r->stream_id = m->stream_id;
    r->prefill = m->prefill;
    r->started_ns = r->entered_ns = now(w);
    td_list_push_back(&w->requests, &r->in_worker);
    td_list_push_back(bucket_of(s, r->stream_id), &r->in_stream);
    w->n_requests++;

    st = reserve(w, r, &err);
    if (st != TD_OK) {
        finish_refused(r, st, err.text);
        return;
    }
    td_metric_add(TD_M_prompt_tokens, r->req.n_prompt);
    set_deadline(r);
    if (r->reservation != NULL) {
        set_state(r, DS_RESERVED);
        td_decode_stream_reserved(s, r->stream_id, w->o.incarnation, &r->target);
    } else {
        r->complete_ns = r->started_ns;
        set_state(r, DS_QUEUED);
        td_decode_sched_add(w->sched, &r->seq);
    }
}

static void on_cancel(struct td_decode_stream *s, uint64_t stream_id)
{
    struct request *r = find(s, stream_id); /* NULL: it finished while the command was on its way */
    if (r != NULL) finish_refused(r, TD_E_CANCELED, td_status_text(TD_E_CANCELED));
}

static void on_first(struct td_decode_stream *s, uint64_t stream_id)
{
    struct request *r = find(s, stream_id);
    if (r != NULL) finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, TD_OK, false, "over with its first token");
}

static void on_command(struct td_decode_worker *w, struct td_decode_stream *s, const Tandem__V1__DecodeCommand *cmd)
{
    bool is_hello = cmd->command_case == TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO;
    if (is_hello == s->has_hello) {
        end_stream(w, s, TD_E_PROTOCOL, is_hello ? "hello: sent twice" : "hello: must be the first command");
        return;
    }
    switch (cmd->command_case) {
    case TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO:
        s->has_hello = true;
        s->router = cmd->hello->router;
        TD_INFO("router_stream", "router=%016" PRIx64, s->router);
        break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_PEER: w->ports.introduce(w->ports.self, cmd->peer); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_START: on_start(w, s, cmd->start); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL: on_cancel(s, cmd->cancel->stream_id); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_FIRST: on_first(s, cmd->first->stream_id); break;
    default: TD_WARN("unknown_command", "router=%016" PRIx64, s->router); break; /* of a newer router */
    }
}

/* --- events --------------------------------------------------------------------------------------------------------
 */

struct td_decode_stream *td_decode_worker_on_stream(struct td_decode_worker *w, void *call)
{
    struct td_decode_stream *s = td_decode_stream_create(call);
    if (s != NULL) td_list_push_back(&w->streams, &s->link);
    return s;
}

void td_decode_worker_on_command(struct td_decode_worker *w, struct td_decode_stream *s,
                                 const Tandem__V1__DecodeCommand *cmd)
{
    if (s->ending != TD_OK) return;
    enter(w);
    on_command(w, s, cmd);
    leave(w);
}

void td_decode_worker_on_writable(struct td_decode_worker *w, struct td_decode_stream *s)
{
    (void)s;
    enter(w);
    leave(w);
}

void td_decode_worker_on_stream_closed(struct td_decode_worker *w, struct td_decode_stream *s)
{
    enter(w);
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct request *r = TD_LIST_ENTRY(it, struct request, in_worker);
        if (r->stream == s) finish_refused(r, TD_E_CANCELED, "the router's stream ended");
    }
    td_list_remove(&s->link);
    td_decode_stream_destroy(s);
    leave(w);
}

void td_decode_worker_on_step(struct td_decode_worker *w, enum td_status st)
{
    enter(w);
    w->n_steps++;
    td_metric_add(TD_M_steps, 1);
    td_metric_observe(TD_M_step_seconds, (double)(now(w) - w->step_started_ns) / (double)TD_NS_PER_S);
    if (st != TD_OK && td_status_scope(st) == TD_SCOPE_PROCESS) w->is_broken = true;
    td_decode_sched_done(w->sched, st);
    if (w->is_broken) {
        td_decode_worker_end_all(w, st, "the engine failed");
        flush_streams(w);
        w->ports.broken(w->ports.self, st, "the engine failed");
    }
    leave(w);
}

void td_decode_worker_on_peer_message(struct td_decode_worker *w, uint64_t from, uint8_t id, const void *data, size_t n)
{
    enter(w);
    td_rx_on_message(w->rx, from, id, data, n);
    leave(w);
}

void td_decode_worker_on_peer_lost(struct td_decode_worker *w, uint64_t prefill)
{
    enter(w);
    td_rx_on_peer_lost(w->rx, prefill);
    leave(w);
}

void td_decode_worker_on_peer_reachable(struct td_decode_worker *w, uint64_t prefill)
{
    enter(w);
    td_rx_on_peer_reachable(w->rx, prefill);
    leave(w);
}

/* --- the operator's ------------------------------------------------------------------------------------------------
 */

void td_decode_worker_drain(struct td_decode_worker *w)
{
    enter(w);
    w->is_draining = true;
    leave(w);
}

void td_decode_worker_end_all(struct td_decode_worker *w, enum td_status st, const char *why)
{
    enter(w);
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct request *r = TD_LIST_ENTRY(it, struct request, in_worker);
        if (r->state != DS_LEAVING) finish_lost(r, st, why);
    }
    leave(w);
}

void td_decode_worker_close_streams(struct td_decode_worker *w)
{
    TD_LIST_FOREACH_SAFE (it, &w->streams) {
        struct td_decode_stream *s = TD_LIST_ENTRY(it, struct td_decode_stream, link);
        if (s->ending != TD_OK) continue;
        end_requests_of(w, s, TD_E_DRAINING, td_status_text(TD_E_DRAINING));
        s->ending = TD_E_DRAINING;
        w->ports.close(w->ports.self, s->call, TD_OK, NULL);
    }
}

void td_decode_worker_load(const struct td_decode_worker *w, Tandem__V1__Load *out)
{
    out->n_running = td_decode_sched_n_running(w->sched);
    out->n_waiting = td_decode_sched_n_queued(w->sched) + w->n_reserved;
    out->free_sliding_pages = td_kv_pages_n_free(w->kv, TD_KV_SLIDING);
    out->free_full_pages = td_kv_pages_n_free(w->kv, TD_KV_FULL);
    out->quarantined_pages = td_rx_n_quarantined_pages(w->rx);
    out->is_draining = w->is_draining;
}

uint32_t td_decode_worker_n_requests(const struct td_decode_worker *w) { return w->n_requests; }
bool td_decode_worker_is_draining(const struct td_decode_worker *w) { return w->is_draining; }

static void describe_request(const struct td_decode_worker *w, const struct request *r, struct td_buf *out)
{
    uint64_t t = now(w);
    uint32_t n_pages[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        n_pages[g] = r->state == DS_RESERVED ? r->target.n_pages[g] : r->seq.end[g] - r->seq.first[g];
    td_buf_printf(out,
                  "{\"request\":\"%s\",\"stream_id\":%" PRIu64 ",\"state\":\"%s\",\"age_ms\":%" PRIu64
                  ",\"state_age_ms\":%" PRIu64 ",\"prompt_tokens\":%u,\"generated_tokens\":%u,\"max_tokens\":%u,"
                  "\"cached_tokens\":%u,\"sliding_pages\":%u,\"full_pages\":%u,\"prefill\":\"%016" PRIx64 "\",",
                  r->req.id, r->stream_id, state_names[r->state], ms_between(r->started_ns, t),
                  ms_between(r->entered_ns, t), r->req.n_prompt, td_token_request_n_generated(&r->req),
                  r->req.max_tokens, r->seq.n_cached, n_pages[TD_KV_SLIDING], n_pages[TD_KV_FULL], r->prefill);
    if (r->deadline_ns == TD_NEVER_NS || r->deadline_ns == 0)
        td_buf_str(out, "\"deadline_ms\":null}");
    else
        td_buf_printf(out, "\"deadline_ms\":%" PRIu64 "}", ms_between(t, r->deadline_ns));
}

void td_decode_worker_describe(const struct td_decode_worker *w, struct td_buf *out)
{
    td_buf_printf(out,
                  "{\"is_draining\":%s,\"steps\":%" PRIu64 ",\"tokens\":%" PRIu64
                  ",\"running\":%u,\"queued\":%u,\"reserved\":%u,\"max_batch\":%u,\"requests\":[",
                  w->is_draining ? "true" : "false", w->n_steps, w->n_tokens_drawn, td_decode_sched_n_running(w->sched),
                  td_decode_sched_n_queued(w->sched), w->n_reserved, w->o.max_batch);
    const char *comma = "";
    TD_LIST_FOREACH (it, &w->requests) {
        td_buf_str(out, comma);
        describe_request(w, TD_LIST_ENTRY(it, struct request, in_worker), out);
        comma = ",";
    }
    td_buf_str(out, "],\"streams\":[");
    comma = "";
    TD_LIST_FOREACH (it, &w->streams) {
        const struct td_decode_stream *s = TD_LIST_ENTRY(it, struct td_decode_stream, link);
        td_buf_printf(out, "%s{\"router\":\"%016" PRIx64 "\",\"pending_bytes\":%zu,\"is_ending\":%s}", comma, s->router,
                      s->n_pending_bytes, s->ending != TD_OK ? "true" : "false");
        comma = ",";
    }
    td_buf_str(out, "],\"receiver\":");
    td_rx_describe(w->rx, out);
    td_buf_str(out, ",\"pages\":");
    td_kv_pages_describe(w->kv, out);
    td_buf_str(out, "}");
}

/* --- life ----------------------------------------------------------------------------------------------------------
 */

enum td_status td_decode_worker_create(const struct td_decode_worker_options *o, struct td_kv_pages *kv,
                                       const struct td_decode_ports *ports, struct td_decode_worker **out)
{
    enum td_status st = TD_E_NO_MEMORY;
    struct td_decode_worker *w = td_calloc(1, sizeof *w);
    if (w == NULL) return st;
    w->o = *o;
    w->ports = *ports;
    w->kv = kv;
    td_list_init(&w->requests);
    td_list_init(&w->streams);
    w->stall_timer.fire = on_stall_timer;
    struct td_decode_sched_options so = {
        .window_tokens = o->window_tokens, .max_batch = o->max_batch, .chunk_tokens = o->chunk_tokens};
    struct td_rx_options ro = {
        .incarnation = o->incarnation,
        .address = o->xfer_address,
        .n_address = o->n_xfer_address,
        .window_tokens = o->window_tokens,
        .n_ranks = o->n_ranks,
        .n_vocab = o->n_vocab,
        .quarantine_ms = o->quarantine_ms,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++) so.kv[g] = ro.kv[g] = o->kv[g];
    struct td_decode_sched_owner owner = {.self = w,
                                          .joined = on_joined,
                                          .drew = on_drew,
                                          .broke = on_broke,
                                          .no_pages = on_no_pages,
                                          .relieve = on_relieve,
                                          .released = on_released};
    struct td_rx_ports rp = {
        .env = ports->env, .self = w, .send = rx_send, .ready = rx_ready, .failed = rx_failed, .ended = rx_ended};
    TD_TRY(td_decode_sched_create(&so, kv, &owner, &w->sched));
    TD_TRY(td_rx_create(&ro, kv, &rp, &w->rx));
    td_metric_set(TD_M_kv_pages_total_sliding, td_kv_pages_n_total(kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_total_full, td_kv_pages_n_total(kv, TD_KV_FULL));
    set_gauges(w);
    *out = w;
    w = NULL;
out:
    td_decode_worker_destroy(w);
    return st;
}

void td_decode_worker_destroy(struct td_decode_worker *w)
{
    if (w == NULL) return;
    w->is_destroying = true;
    enter(w);
    if (w->sched != NULL && td_decode_sched_is_in_flight(w->sched)) td_decode_sched_done(w->sched, TD_E_CANCELED);
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct request *r = TD_LIST_ENTRY(it, struct request, in_worker);
        if (r->state != DS_LEAVING) finish_refused(r, TD_E_CANCELED, "shutting down");
    }
    TD_CHECK(td_list_is_empty(&w->requests));
    TD_LIST_FOREACH_SAFE (it, &w->streams) {
        struct td_decode_stream *s = TD_LIST_ENTRY(it, struct td_decode_stream, link);
        td_list_remove(&s->link);
        td_decode_stream_destroy(s);
    }
    w->ports.env->timer_stop(w->ports.env, &w->stall_timer);
    td_rx_destroy(w->rx);
    td_decode_sched_destroy(w->sched);
    free(w);
}
