/* One request's life.
 *
 * The happy path
 *   1. Start: checked, pages reserved, the router is told where they are: RESERVED.
 *
 *   2. The prefill worker's COMPLETE brings the KV of all tokens, and the next token, which the router has: QUEUED.
 *
 *   3. There is a place in the batch; each step feeds the newest token and draws the next: RUNNING.
 *
 *   4. A stop id, max_tokens or the context's end: the router hears Finished: LEAVING, gone.
 *
 * With no prefill worker named, the prompt is computed here in chunks: 1 goes to QUEUED at once, and every token, the
 * first too, goes to the router.
 *
 * What can go wrong; each ends the request with exactly one Finished:
 *
 *   - A bad field, an unknown or lost prefill worker, no room, draining: refused at once.
 *
 *   - The first token ended it (DecodeFirst): the reservation ends; status OK, reason NONE.
 *     The prefill worker's word may come first and gives the pages back; then it waits for the router's: OVER.
 *
 *   - Cancel, deadline: out of the batch before the next step.
 *
 *   - The prefill worker is lost, aborts or breaks the protocol: lost, the router goes on elsewhere.
 *
 *   - No page for an older request's next token: the youngest gives its own up and is lost with PREEMPTED. The router
 *     keeps its tokens and brings it back where its pages and a margin can be reserved.
 *
 *   - No page for the next token of the oldest, and nobody left who could give one; or its step failed: lost as well.
 *
 *   - The router's stream ends, or is read too slowly: all its requests end, nobody is left to be told.
 *
 * A request that leaves while its step is in flight keeps its pages until the step is done (LEAVING). The pages of a
 * reservation belong to td_rx until the sender can write no more; the request is gone before. */
#include "decode/worker_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"

#define STALL_LIMIT_NS (1 * TD_NS_PER_S) /* a sequence waits this long for pages of a sender that does not answer */

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

const char *td_decode_request_state(const struct td_decode_request *r) { return state_names[r->state]; }

static struct td_decode_request *request_of(struct td_decode_seq *q)
{
    return TD_CONTAINER_OF(q, struct td_decode_request, seq);
}

static void set_state(struct td_decode_request *r, enum decode_state to)
{
    TD_CHECK((next_states[r->state] >> to & 1u) != 0);
    TD_DEBUG("request_state", "req=%s stream_id=%" PRIu64 " from=%s to=%s", r->req.id, r->stream_id,
             state_names[r->state], state_names[to]);
    if (r->state == DS_RESERVED) r->w->n_reserved--;
    if (to == DS_RESERVED) r->w->n_reserved++;
    r->state = to;
    r->entered_ns = td_decode_now(r->w);
}

/* --- the end of a request ---------------------------------------------------------------------------------- */

static void free_request(struct td_decode_request *r)
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

void td_decode_request_finish(struct td_decode_request *r, Tandem__V1__FinishReason reason, enum td_status st,
                              bool is_lost, const char *why)
{
    struct td_decode_worker *w = r->w;
    TD_CHECK(r->state != DS_LEAVING);
    uint64_t t = td_decode_now(w);
    if (r->stream != NULL) {
        struct td_decode_finish f = {
            .stream_id = r->stream_id,
            .reason = reason,
            .status = st,
            .is_lost = is_lost,
            .is_handoff = r->has_handoff_failed,
            .cached_tokens = r->prefill == 0 ? r->seq.hit.n_tokens : 0,
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
            td_token_request_n_generated(&r->req), td_ms_between(r->started_ns, t), is_lost, why);
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
    td_decode_seq_drop(&r->seq, w->sched); /* what it shared */
    free_request(r);
}

void td_decode_request_lose(struct td_decode_request *r, enum td_status st, const char *why)
{
    td_decode_request_finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, st, true, why);
}

void td_decode_request_refuse(struct td_decode_request *r, enum td_status st, const char *why)
{
    td_decode_request_finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, st, td_status_retry(st) != TD_RETRY_NO, why);
}

/* --- the start --------------------------------------------------------------------------------------------- */

static struct td_list *bucket_of(struct td_decode_stream *s, uint64_t stream_id)
{
    return &s->requests[stream_id % TD_DECODE_STREAM_BUCKETS];
}

struct td_decode_request *td_decode_request_find(struct td_decode_stream *s, uint64_t stream_id)
{
    TD_LIST_FOREACH (it, bucket_of(s, stream_id)) {
        struct td_decode_request *r = TD_LIST_ENTRY(it, struct td_decode_request, in_stream);
        if (r->stream_id == stream_id) return r;
    }
    return NULL;
}

static void on_deadline(struct td_timer *t)
{
    struct td_decode_request *r = TD_CONTAINER_OF(t, struct td_decode_request, deadline);
    struct td_decode_worker *w = r->w;
    td_decode_worker_enter(w);
    td_decode_request_refuse(r, TD_E_DEADLINE, "deadline passed");
    td_decode_worker_leave(w);
}

static void set_deadline(struct td_decode_request *r)
{
    r->deadline_ns = TD_NEVER_NS;
    if (r->req.timeout_us == 0 || r->req.timeout_us > (TD_NEVER_NS - r->started_ns) / 1000) return;
    r->deadline_ns = r->started_ns + r->req.timeout_us * 1000;
    r->deadline.fire = on_deadline;
    r->w->ports.env->timer_start(r->w->ports.env, &r->deadline, r->req.timeout_us * 1000);
}

/* Pages for r, or why there are none. */
static enum td_status reserve(struct td_decode_worker *w, struct td_decode_request *r, struct td_err *err)
{
    bool is_local = r->prefill == 0;
    enum td_status st = is_local ? TD_OK : w->ports.check_peer(w->ports.self, r->prefill, err);
    r->has_handoff_failed = st != TD_OK;
    if (st != TD_OK) return st;
    /* With tokens of its own it was somewhere before. */
    uint32_t margin = r->req.n_tokens > r->req.n_prompt ? w->o.return_margin_tokens : 0;
    if (margin > r->req.n_tokens_max - r->req.n_tokens) margin = r->req.n_tokens_max - r->req.n_tokens;
    td_decode_seq_find(&r->seq, w->sched, is_local);
    st = td_decode_sched_room(w->sched, r->req.n_tokens, is_local, &r->seq.hit, w->n_requests - 1, margin);
    if (st == TD_E_NO_PAGES && r->seq.hit.has_copy && w->n_requests == 1) {
        /* Nobody else is here whose end could make room: the page to copy from is what is in the way. */
        td_decode_seq_forget(&r->seq, w->sched);
        st = td_decode_sched_room(w->sched, r->req.n_tokens, is_local, &r->seq.hit, 0, 0);
    }
    if (st == TD_E_TOO_LARGE)
        return td_err_set(err, st, "token_ids: the KV of %u tokens never fits into this worker's pages",
                          r->req.n_tokens);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    if (is_local) return TD_OK;
    st = td_rx_reserve(w->rx, r->prefill, r->req.n_tokens, r->seq.hit.n_tokens, r->req.id, r, &r->reservation,
                       &r->target);
    r->has_handoff_failed = st == TD_E_PEER_LOST;
    return st == TD_OK ? TD_OK : td_err_set(err, st, "%s", td_status_text(st));
}

/* By the router's account. A clock that started later than the request gives 0: among the oldest. */
static uint64_t born_ns(const struct td_decode_worker *w, const struct td_token_request *req)
{
    uint64_t t = td_decode_now(w), age_us = req->age_us;
    return age_us < t / 1000 ? t - age_us * 1000 : 0;
}

void td_decode_request_start(struct td_decode_worker *w, struct td_decode_stream *s, const Tandem__V1__DecodeStart *m)
{
    if (td_decode_request_find(s, m->stream_id) != NULL) {
        td_decode_worker_end_stream(w, s, TD_E_PROTOCOL, "stream_id: in use");
        return;
    }
    if (w->is_draining || w->is_broken) {
        refuse(s, m->stream_id, TD_E_DRAINING, td_status_text(TD_E_DRAINING));
        return;
    }
    struct td_err err = {0};
    struct td_decode_request *r = td_calloc(1, sizeof *r);
    enum td_status st = TD_E_NO_MEMORY;
    if (r != NULL) {
        st = td_token_request_parse(m->request, w->o.n_vocab, w->o.max_context_tokens, &r->req, &err);
        if (st == TD_OK) {
            st = td_decode_seq_init(&r->seq, w->sched, &r->req, born_ns(w, &r->req), w->next_order);
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
    r->started_ns = r->entered_ns = td_decode_now(w);
    td_list_push_back(&w->requests, &r->in_worker);
    td_list_push_back(bucket_of(s, r->stream_id), &r->in_stream);
    w->n_requests++;

    st = reserve(w, r, &err);
    if (st != TD_OK) {
        td_decode_request_refuse(r, st, err.text);
        return;
    }
    td_metric_add(TD_M_prompt_tokens, r->req.n_prompt);
    if (w->prefix != NULL) td_kv_prefix_count(&r->seq.hit);
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

/* --- from the scheduler ------------------------------------------------------------------------------------ */

/* Its router keeps it with the tokens so far, and starts it again where there is room. */
static void preempt(struct td_decode_request *r)
{
    td_metric_add(TD_M_preemptions, 1);
    td_decode_request_lose(r, TD_E_PREEMPTED, "its pages are needed by an older request");
}

static void on_joined(void *self, struct td_decode_seq *q)
{
    (void)self;
    set_state(request_of(q), DS_RUNNING);
}

static void on_drew(void *self, struct td_decode_seq *q, const struct td_segment *seg)
{
    struct td_decode_worker *w = self;
    struct td_decode_request *r = request_of(q);
    w->n_tokens_drawn++;
    td_metric_add(TD_M_generated_tokens, 1);
    td_decode_stream_token(r->stream, r->stream_id, seg);
    Tandem__V1__FinishReason reason = td_token_request_append(&r->req, seg->token);
    if (reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) td_decode_request_finish(r, reason, TD_OK, false, "");
}

static void on_broke(void *self, struct td_decode_seq *q, enum td_status st)
{
    (void)self;
    td_decode_request_lose(request_of(q), st, "the engine failed");
}

static void on_no_pages(void *self, struct td_decode_seq *q, bool gave_way)
{
    (void)self;
    if (gave_way)
        preempt(request_of(q));
    else
        td_decode_request_lose(request_of(q), TD_E_NO_PAGES, "no KV page for the next token");
}

/* Reservations give their pages back only when their sender confirms: what to do while the last sequence waits for
 * them. */
static bool on_relieve(void *self, struct td_decode_seq *q)
{
    struct td_decode_worker *w = self;
    struct td_decode_request *r = request_of(q), *youngest = NULL;
    uint64_t t = td_decode_now(w);
    if (r->stalled_ns == 0 || r->stalled_at != q->n_cached) r->stalled_ns = t;
    r->stalled_at = q->n_cached;
    if (td_rx_n_quarantined_pages(w->rx) > 0 && t - r->stalled_ns < STALL_LIMIT_NS) return true;
    TD_LIST_FOREACH (it, &w->requests) {
        struct td_decode_request *other = TD_LIST_ENTRY(it, struct td_decode_request, in_worker);
        if (other->state != DS_RESERVED || !td_decode_seq_is_older(q, &other->seq)) continue;
        if (youngest == NULL || td_decode_seq_is_older(&youngest->seq, &other->seq)) youngest = other;
    }
    if (youngest == NULL) return false;
    r->stalled_ns = t;
    preempt(youngest);
    return true;
}

static void on_released(void *self, struct td_decode_seq *q)
{
    (void)self;
    free_request(request_of(q));
}

struct td_decode_sched_owner td_decode_request_sched_owner(struct td_decode_worker *w)
{
    return (struct td_decode_sched_owner){.self = w,
                                          .joined = on_joined,
                                          .drew = on_drew,
                                          .broke = on_broke,
                                          .no_pages = on_no_pages,
                                          .relieve = on_relieve,
                                          .released = on_released};
}

/* --- from the hand-off ------------------------------------------------------------------------------------- */

static enum td_status rx_send(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    struct td_decode_worker *w = self;
    return w->ports.send_peer(w->ports.self, prefill, id, data, n);
}

static void rx_ready(void *self, struct td_rx_reservation *rv, const struct td_rx_complete *c)
{
    struct td_decode_worker *w = self;
    struct td_decode_request *r = td_rx_owner(rv);
    TD_CHECK(r->state == DS_RESERVED && r->reservation == rv);
    td_decode_worker_enter(w);
    r->reservation = NULL;
    r->complete_ns = td_decode_now(w);
    r->handoff_bytes = c->kv_bytes;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        td_decode_seq_take_pages(&r->seq, (enum td_kv_group)g, r->target.first_block[g], r->target.n_pages[g],
                                 r->target.pages[g]);
    td_decode_seq_filled(&r->seq, w->sched);
    Tandem__V1__FinishReason reason = td_token_request_append(&r->req, c->first_token);
    set_state(r, DS_QUEUED);
    td_decode_sched_add(w->sched, &r->seq);
    /* The prefill worker should have said so rather than send KV; the router has the token either way. */
    if (reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) td_decode_request_finish(r, reason, TD_OK, false, "");
    td_decode_worker_leave(w);
}

static void rx_failed(void *self, struct td_rx_reservation *rv, enum td_status st, const char *why)
{
    struct td_decode_worker *w = self;
    struct td_decode_request *r = td_rx_owner(rv);
    TD_CHECK(r->state == DS_RESERVED && r->reservation == rv);
    td_decode_worker_enter(w);
    r->reservation = NULL; /* its pages go back on their own */
    if (st == TD_E_CANCELED) {
        set_state(r, DS_OVER);
        td_decode_seq_drop(&r->seq, w->sched);
    } else {
        r->has_handoff_failed = true;
        td_decode_request_lose(r, st, why);
    }
    td_decode_worker_leave(w);
}

static void rx_ended(void *self, struct td_rx_reservation *rv)
{
    struct td_decode_worker *w = self; /* the owner may be gone: only its pages matter, somebody may wait for them */
    (void)rv;
    td_decode_worker_enter(w);
    td_decode_worker_leave(w);
}

static void rx_arrived(void *self, const uint32_t *const pages[TD_KV_N_GROUPS], const uint32_t n_pages[TD_KV_N_GROUPS])
{
    struct td_decode_worker *w = self;
    if (w->ports.arrived != NULL) w->ports.arrived(w->ports.self, pages, n_pages);
}

struct td_rx_ports td_decode_request_rx_ports(struct td_decode_worker *w)
{
    return (struct td_rx_ports){
        .env = w->ports.env, .self = w, .send = rx_send, .ready = rx_ready, .failed = rx_failed, .ended = rx_ended, .arrived = rx_arrived};
}
