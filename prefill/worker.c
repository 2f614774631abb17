/* One request of the prefill worker.
 *
 * The happy path
 *   1. A Run arrives: every field is checked, the decode worker is known (or introduced), its generation is begun.
 * WAITING
 *   2. Its turn comes: pages are there, the first chunk goes to the engine; chunks follow one another. COMPUTING After
 * each layer its finished blocks are put into the decode worker's pages.
 *   3. The last chunk drew the first token: it is told at once. The rest of the puts and the flush go on. SENDING
 *   4. `complete` was sent: RunDone, the stream ends, the pages go back. LEAVING
 *
 * What can go wrong, in any state
 *   the client leaves, the deadline passes, the engine fails: the send is aborted (the decode worker is told), the
 * stream ends. the decode worker stops the generation, or dies: the send ends by itself, the stream ends with STALE or
 * TARGET_LOST. the first token ends the request: it is told with its reason, the send is aborted with OK (no KV is
 * needed), all is well. LEAVING lasts until the engine has given the batch back and no put reads the pages any more;
 * only then they are free. */
#include "prefill/worker.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/pace.h"
#include "common/engine/request.h"
#include "common/handoff/wire.h"
#include "common/metrics/metrics.h"
#include "prefill/sched.h"

#define RUN_STATES(X)                                                                                                  \
    X(NONE)                                                                                                            \
    X(WAITING)                                                                                                         \
    X(COMPUTING)                                                                                                       \
    X(SENDING)                                                                                                         \
    X(LEAVING)
#define RUN_EVENTS(X)                                                                                                  \
    X(TURN)   /* pages are there, nobody else computes */                                                              \
    X(DREW)   /* the first token, and more will follow elsewhere */                                                    \
    X(OVER)   /* the first token ended the request */                                                                  \
    X(SENT)   /* `complete` is on its way */                                                                           \
    X(UNSENT) /* the send ended otherwise */                                                                           \
    X(GONE)   /* the client */                                                                                         \
    X(DEADLINE)                                                                                                        \
    X(FAILED) /* ours: engine, memory, end of grace */

enum run_state {
#define X(name) RUN_##name,
    RUN_STATES(X)
#undef X
        RUN_N_STATES
};
enum run_event {
#define X(name) EV_##name,
    RUN_EVENTS(X)
#undef X
        RUN_N_EVENTS
};
static const char *const state_names[] = {
#define X(name) #name,
    RUN_STATES(X)
#undef X
};
static const char *const event_names[] = {
#define X(name) #name,
    RUN_EVENTS(X)
#undef X
};

/* NONE: cannot happen here, nothing is done. */
#define TROUBLE                                                                                                        \
    [EV_UNSENT] = RUN_LEAVING, [EV_GONE] = RUN_LEAVING, [EV_DEADLINE] = RUN_LEAVING, [EV_FAILED] = RUN_LEAVING
static const uint8_t run_next[RUN_N_STATES][RUN_N_EVENTS] = {
    [RUN_WAITING] = {[EV_TURN] = RUN_COMPUTING, TROUBLE},
    [RUN_COMPUTING] = {[EV_DREW] = RUN_SENDING, [EV_OVER] = RUN_LEAVING, TROUBLE},
    [RUN_SENDING] = {[EV_SENT] = RUN_LEAVING, TROUBLE},
    [RUN_LEAVING] = {0}, /* the answer was given; batch and send come to rest */
};

struct td_prefill_run {
    struct td_prefill_worker *w;
    struct td_list link; /* w->runs: by arrival */
    enum run_state state;
    void *call; /* NULL: answered, or gone */
    struct td_token_request req;
    struct td_prefill_seq seq;
    uint64_t decode;       /* incarnation of the target */
    uint32_t n_to_compute; /* tokens that the cache did not know when it arrived */
    struct td_tx_send *send;
    struct td_segment *seg; /* its chunk of the pass in the engine; NULL: none */
    bool is_stalled;        /* COMPUTING, but the next chunk found no page, or no room in the pass */
    struct td_timer deadline;
    uint64_t deadline_ns, arrived_ns, turn_ns, first_ns, entered_ns;
};

struct td_prefill_worker {
    struct td_prefill_worker_options o;
    struct td_prefill_ports ports;
    struct td_prefill_send *send;
    struct td_prefill_sched sched;
    struct td_list runs;
    uint32_t n_runs, n_waiting, n_computing;
    struct td_batch batch;       /* at most one is in the engine: chunks of the oldest COMPUTING runs, one a run */
    struct td_segment *segments; /* [max_batch]; user: the run */
    struct td_page_copy *copies;
    bool has_batch; /* in the engine */
    uint64_t submitted_ns;
    struct td_prefill_pace pace; /* at its best: what can surely not be met in time */
    struct td_pace mean_pace;    /* for the router */
    bool is_draining, is_advancing;
};

static void advance(struct td_prefill_worker *w);
static uint64_t now(const struct td_prefill_worker *w) { return w->ports.env->now_ns(w->ports.env); }
static struct td_tx *tx_of(const struct td_prefill_worker *w) { return td_prefill_send_tx(w->send); }

/* ---- the end of a request ------------------------------------------------------------------------------------------
 */

static void run_free(struct td_prefill_run *r)
{
    struct td_prefill_worker *w = r->w;
    w->ports.env->timer_stop(w->ports.env, &r->deadline);
    td_prefill_seq_deinit(&r->seq, &w->sched);
    td_token_request_deinit(&r->req);
    td_list_remove(&r->link);
    w->n_runs--;
    free(r);
}

/* Frees a run that has left and that nothing holds any more. */
static void rest(struct td_prefill_run *r)
{
    struct td_prefill_worker *w = r->w;
    if (r->state != RUN_LEAVING || r->seg != NULL || r->send != NULL) return;
    run_free(r);
    advance(w); /* its pages may be what the next one waits for */
    if (w->is_draining && w->n_runs == 0) w->ports.drained(w->ports.self);
}

static void answer(struct td_prefill_run *r, enum td_status st, const char *text)
{
    void *call = r->call;
    r->call = NULL;
    if (call != NULL) r->w->ports.finish(r->w->ports.self, call, st, text);
}

/* A pass that nobody waits for any more ends after the layer it is in. */
static void abandon(struct td_prefill_worker *w)
{
    for (uint32_t i = 0; i < w->batch.n_segments; i++)
        if (((struct td_prefill_run *)w->segments[i].user)->state == RUN_COMPUTING) return;
    atomic_store(&w->batch.is_abandoned, true);
}

/* The one transition. st and text: the answer, if this is the end. r may be gone when this returns. */
static void step(struct td_prefill_run *r, enum run_event ev, enum td_status st, const char *text)
{
    struct td_prefill_worker *w = r->w;
    enum run_state from = r->state, to = (enum run_state)run_next[from][ev];
    if (to == RUN_NONE) {
        rest(r);
        return;
    }
    TD_DEBUG("run", "req=%s event=%s from=%s to=%s status=%s", r->req.id, event_names[ev], state_names[from],
             state_names[to], td_status_name(st));
    r->state = to;
    r->entered_ns = now(w);
    if (from == RUN_WAITING) w->n_waiting--;
    if (from == RUN_COMPUTING) w->n_computing--;
    if (to == RUN_COMPUTING) w->n_computing++;
    if (to == RUN_LEAVING) {
        w->ports.env->timer_stop(w->ports.env, &r->deadline);
        if (r->seg != NULL) abandon(w);
        if (st != TD_OK)
            TD_INFO("run_failed", "req=%s while=%s event=%s status=%s text=\"%s\"", r->req.id, state_names[from],
                    event_names[ev], td_status_name(st), text != NULL ? text : "");
        if (r->send != NULL) td_tx_abort(tx_of(w), r->send, st); /* after `complete` or a stop it changes nothing */
        answer(r, st, text);
        rest(r);
    }
}

static void on_deadline(struct td_timer *t)
{
    struct td_prefill_run *r = TD_CONTAINER_OF(t, struct td_prefill_run, deadline);
    struct td_prefill_worker *w = r->w;
    step(r, EV_DEADLINE, TD_E_DEADLINE, "the deadline passed in the prefill worker");
    advance(w);
}

/* ---- computing -----------------------------------------------------------------------------------------------------
 */

static bool is_sending_any(const struct td_prefill_worker *w)
{
    TD_LIST_FOREACH (it, &w->runs) {
        const struct td_prefill_run *r = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        if (r->state != RUN_COMPUTING && r->seq.n_sliding > 0) return true;
    }
    return false;
}

/* Does anybody but r hold pages that will come back? */
static bool others_hold_pages(const struct td_prefill_run *r)
{
    TD_LIST_FOREACH (it, &r->w->runs) {
        const struct td_prefill_run *o = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        if (o != r && (o->seq.has_full || o->seq.n_sliding > 0)) return true;
    }
    return false;
}

/* The youngest that computes, other than r. */
static struct td_prefill_run *youngest_computing(const struct td_prefill_run *r)
{
    struct td_prefill_run *found = NULL;
    TD_LIST_FOREACH (it, &r->w->runs) {
        struct td_prefill_run *o = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        if (o->state == RUN_COMPUTING && o != r) found = o;
    }
    return found;
}

/* r's next chunk of at most `budget` tokens becomes a segment of the pass that is being put together. false: somebody
 * failed for it, look again. */
static bool add_chunk(struct td_prefill_run *r, uint32_t budget)
{
    struct td_prefill_worker *w = r->w;
    struct td_segment *seg = &w->segments[w->batch.n_segments];
    memset(seg, 0, sizeof *seg);
    r->is_stalled = true;
    enum td_status st = td_prefill_sched_chunk(&w->sched, &r->seq, budget, r->req.tokens, seg);
    if (st == TD_E_NO_PAGES && w->batch.n_segments == 0 && !is_sending_any(w)) {
        /* The oldest must go on, and nothing is on its way back. */
        struct td_prefill_run *youngest = youngest_computing(r);
        step(youngest != NULL ? youngest : r, EV_FAILED, st, "no pages for the next chunk");
        return false;
    }
    if (st != TD_OK) return true; /* waits for pages */
    bool is_last = td_prefill_seq_is_last_chunk(&r->seq);
    if (is_last) td_token_request_want_token(&r->req, 0, seg);
    seg->user = r;
    r->seg = seg;
    r->is_stalled = false;
    w->batch.n_segments++;
    w->batch.n_copies += td_prefill_seq_copies(&r->seq, w->copies + w->batch.n_copies);
    if (r->seq.n_sliding > td_metric_value(TD_M_sequence_sliding_pages_max))
        td_metric_set(TD_M_sequence_sliding_pages_max, r->seq.n_sliding);
    if (!is_last || r->send == NULL) return true;
    for (uint32_t b = r->seq.sliding_first; b < r->seq.sliding_first + r->seq.n_sliding; b++)
        td_tx_set_source(r->send, TD_KV_SLIDING, b, r->seq.pages[TD_KV_SLIDING][b]);
    return true;
}

/* A pass of the runs that compute, the oldest first. false: there is none, for now. */
static bool submit_pass(struct td_prefill_worker *w)
{
    uint32_t budget = w->o.chunk_tokens;
    memset(&w->batch, 0, sizeof w->batch);
    w->batch.segments = w->segments;
    w->batch.copies = w->copies;
    w->batch.want_layers = true;
again:
    TD_LIST_FOREACH (it, &w->runs) {
        struct td_prefill_run *r = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        if (r->state != RUN_COMPUTING || budget == 0) continue;
        uint32_t n = w->batch.n_segments;
        if (!add_chunk(r, budget)) goto again; /* nothing was added yet */
        if (w->batch.n_segments > n) budget -= w->segments[n].n_tokens;
    }
    if (w->batch.n_segments == 0) return false;
    enum td_status st = w->ports.submit(w->ports.self, &w->batch);
    if (st == TD_OK) {
        w->has_batch = true;
        w->submitted_ns = now(w);
        return true;
    }
    uint32_t n = w->batch.n_segments;
    w->batch.n_segments = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct td_prefill_run *r = w->segments[i].user;
        r->seg = NULL;
        r->is_stalled = true;
        td_prefill_sched_chunk_undone(&r->seq);
        if (st != TD_E_BUSY) step(r, EV_FAILED, st, "the engine refused the chunk");
    }
    return st != TD_E_BUSY; /* the next ones may be luckier */
}

static void take_turn(struct td_prefill_run *r)
{
    struct td_prefill_worker *w = r->w;
    enum td_status st = td_prefill_sched_reserve(&w->sched, &r->seq, r->req.tokens);
    if (st != TD_OK) {
        if (st != TD_E_NO_PAGES || !others_hold_pages(r)) step(r, EV_FAILED, st, "no pages for the prompt");
        return;
    }
    for (uint32_t b = 0; b < r->seq.n_blocks; b++)
        td_tx_set_source(r->send, TD_KV_FULL, b, r->seq.pages[TD_KV_FULL][b]);
    r->turn_ns = now(w);
    step(r, EV_TURN, TD_OK, NULL);
}

/* Tokens that are computed before r's own: of those that compute, and of those that came before it. */
static uint64_t tokens_ahead(const struct td_prefill_run *r)
{
    uint64_t n = 0;
    TD_LIST_FOREACH (it, &r->w->runs) {
        const struct td_prefill_run *o = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        if (o == r) break;
        if (o->state == RUN_COMPUTING) n += o->seq.n_tokens - o->seq.n_done;
        if (o->state == RUN_WAITING) n += o->n_to_compute;
    }
    return n;
}

/* Can r still be in time, as fast as passes have been? TD_OK, or DEADLINE with the reason. */
static enum td_status check_deadline(const struct td_prefill_run *r, struct td_err *err)
{
    const struct td_prefill_worker *w = r->w;
    uint64_t t = now(w), need = td_prefill_pace_ns(&w->pace, tokens_ahead(r) + r->n_to_compute);
    if (r->deadline_ns == TD_NEVER_NS || (t < r->deadline_ns && need <= r->deadline_ns - t)) return TD_OK;
    if (t >= r->deadline_ns) return td_err_set(err, TD_E_DEADLINE, "the deadline passed in the prefill worker");
    return td_err_set(err, TD_E_DEADLINE,
                      "the deadline is in %" PRIu64 " ms, the %u tokens to compute and those before them take %" PRIu64,
                      (uint64_t)((r->deadline_ns - t) / TD_NS_PER_MS), r->n_to_compute,
                      (uint64_t)(need / TD_NS_PER_MS));
}

/* Is there a place for one more that computes? Not where pages of sliding layers could become scarce. */
static bool has_place(const struct td_prefill_worker *w)
{
    if (w->n_computing == 0) return true;
    if (w->n_computing >= w->o.max_batch) return false;
    uint32_t page = w->o.kv[TD_KV_SLIDING].page_tokens;
    return td_kv_pages_n_free(w->sched.pages, TD_KV_SLIDING) >=
           w->n_computing * td_prefill_sched_sliding_send(w->o.model->window, page) +
               td_prefill_sched_sliding_compute(w->o.model->window, w->o.chunk_tokens, page);
}

/* The next ones take their turn, as far as there are places and pages: first come, first served. */
static void admit(struct td_prefill_worker *w)
{
    while (has_place(w)) {
        struct td_prefill_run *next = NULL;
        TD_LIST_FOREACH (it, &w->runs) {
            struct td_prefill_run *r = TD_LIST_ENTRY(it, struct td_prefill_run, link);
            if (r->state != RUN_WAITING) continue;
            next = r;
            break;
        }
        if (next == NULL) return;
        uint32_t n_waiting = w->n_waiting;
        struct td_err err;
        if (check_deadline(next, &err) != TD_OK)
            step(next, EV_DEADLINE, TD_E_DEADLINE, err.text);
        else
            take_turn(next);
        if (w->n_waiting == n_waiting) return; /* waits for pages */
    }
}

/* Gives the engine what there is to do. Calls made from within wait for the outermost round. */
static void advance(struct td_prefill_worker *w)
{
    if (w->is_advancing) return;
    w->is_advancing = true;
    while (!w->has_batch) {
        uint32_t n_left = w->n_waiting + w->n_computing;
        admit(w);
        if (submit_pass(w)) continue;
        if (w->n_waiting + w->n_computing == n_left) break; /* else somebody failed, and perhaps made room */
    }
    w->is_advancing = false;
    td_metric_set(TD_M_sequences_waiting, w->n_waiting);
    td_metric_set(TD_M_sequences_running, w->n_runs - w->n_waiting);
}

void td_prefill_worker_on_layer(struct td_prefill_worker *w, struct td_batch *b, uint32_t layer)
{
    TD_CHECK(layer < w->o.model->n_layers && w->has_batch);
    enum td_kv_group g = w->o.model->is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        struct td_prefill_run *r = b->segments[i].user;
        if (r->send == NULL || r->state != RUN_COMPUTING) continue;
        td_tx_layer_ready(tx_of(w), r->send, w->o.model->layer_in_group[layer], g,
                          td_prefill_seq_ready_end(&r->seq, &w->sched, g));
    }
}

/* The last chunk is done: the first token. */
static void drew(struct td_prefill_run *r, const struct td_segment *seg)
{
    struct td_prefill_worker *w = r->w;
    uint32_t token = seg->token;
    Tandem__V1__FirstToken first = TANDEM__V1__FIRST_TOKEN__INIT;
    struct td_logprobs_msg logprobs;
    first.token_id = token;
    if (r->req.want_logprobs) {
        td_logprobs_msg_init(&logprobs, seg->chosen, seg->top, seg->n_top_logprobs);
        first.logprobs = &logprobs.msg;
    }
    first.finish_reason = td_token_request_append(&r->req, token);
    r->first_ns = now(w);
    first.cached_tokens = r->seq.n_cached;
    first.queue_us = (r->turn_ns - r->arrived_ns) / 1000;
    first.prefill_us = (r->first_ns - r->arrived_ns) / 1000;
    Tandem__V1__RunEvent ev = TANDEM__V1__RUN_EVENT__INIT;
    ev.event_case = TANDEM__V1__RUN_EVENT__EVENT_FIRST;
    ev.first = &first;
    td_metric_add(TD_M_generated_tokens, 1);
    if (w->ports.event(w->ports.self, r->call, &ev) != TD_OK) {
        step(r, EV_FAILED, TD_E_SLOW_CLIENT, "the first token could not be told");
        return;
    }
    if (first.finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) {
        step(r, EV_OVER, TD_OK, NULL);
        return;
    }
    td_tx_finish(tx_of(w), r->send, token);
    step(r, EV_DREW, TD_OK, NULL);
}

static void chunk_done(struct td_prefill_run *r, const struct td_segment *seg, enum td_status st)
{
    struct td_prefill_worker *w = r->w;
    r->seg = NULL;
    if (st != TD_OK || r->state != RUN_COMPUTING) {
        td_prefill_sched_chunk_undone(&r->seq);
        if (r->state == RUN_COMPUTING)
            step(r, EV_FAILED, st, "the forward pass failed");
        else
            rest(r);
        return;
    }
    td_prefill_sched_chunk_done(&w->sched, &r->seq, r->req.tokens);
    if (r->seq.n_done == r->seq.n_tokens) drew(r, seg);
}

void td_prefill_worker_on_done(struct td_prefill_worker *w, struct td_batch *b, enum td_status st)
{
    TD_CHECK(w->has_batch && b == &w->batch);
    uint64_t took_ns = now(w) - w->submitted_ns;
    td_metric_add(TD_M_steps, 1);
    td_metric_observe(TD_M_step_seconds, (double)took_ns / (double)TD_NS_PER_S);
    w->is_advancing = true; /* until every run of the pass knows */
    uint32_t n = b->n_segments, n_tokens = 0;
    for (uint32_t i = 0; i < n; i++) n_tokens += w->segments[i].n_tokens;
    if (st == TD_OK) td_prefill_pace_observe(&w->pace, n_tokens, took_ns);
    if (st == TD_OK) td_pace_note(&w->mean_pace, n_tokens, took_ns);
    for (uint32_t i = 0; i < n; i++) chunk_done(w->segments[i].user, &w->segments[i], st);
    w->batch.n_segments = 0;
    w->has_batch = false;
    w->is_advancing = false;
    advance(w);
}

/* ---- sending -------------------------------------------------------------------------------------------------------
 */

void td_prefill_worker_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes)
{
    struct td_prefill_worker *w = self;
    struct td_prefill_run *r = td_tx_owner(s);
    r->send = NULL;
    if (st != TD_OK || r->state != RUN_SENDING) {
        const char *text = st == TD_E_STALE       ? "the decode worker stopped this generation"
                           : st == TD_E_PEER_LOST ? "the decode worker is lost"
                                                  : "the KV could not be moved";
        step(r, EV_UNSENT, st == TD_E_PEER_LOST ? TD_E_TARGET_LOST : st, text); /* not we are lost */
        advance(w);
        return;
    }
    Tandem__V1__RunDone done = TANDEM__V1__RUN_DONE__INIT;
    done.kv_bytes = kv_bytes;
    done.handoff_us = (now(w) - r->first_ns) / 1000;
    done.transport = (char *)td_prefill_send_transport(w->send, r->decode);
    td_metric_info("handoff_transport", "transport", done.transport);
    Tandem__V1__RunEvent ev = TANDEM__V1__RUN_EVENT__INIT;
    ev.event_case = TANDEM__V1__RUN_EVENT__EVENT_DONE;
    ev.done = &done;
    if (r->call != NULL) (void)w->ports.event(w->ports.self, r->call, &ev); /* the KV has arrived all the same */
    step(r, EV_SENT, TD_OK, NULL);
    advance(w);
}

/* ---- arriving ------------------------------------------------------------------------------------------------------
 */

static enum td_status check_list(const struct td_prefill_worker *w, enum td_kv_group g, const Tandem__V1__PageList *m,
                                 uint32_t n_tokens, uint32_t cached, struct td_tx_pages *out, struct td_err *err)
{
    const char *field = g == TD_KV_SLIDING ? "target.sliding" : "target.full";
    uint32_t first, end;
    if (m == NULL) return td_err_set(err, TD_E_INVALID, "%s is missing", field);
    td_handoff_blocks(&w->o.kv[g], g, w->o.model->window, n_tokens, cached, &first, &end);
    if (m->first_block != first || m->n_pages != end - first)
        return td_err_set(err, TD_E_INVALID,
                          "%s has blocks %u to %zu, a prompt of %u tokens (%u cached) needs %u to %u", field,
                          m->first_block, m->first_block + m->n_pages, n_tokens, cached, first, end);
    *out = (struct td_tx_pages){first, end - first, m->pages};
    return TD_OK;
}

static enum td_status check_target(const struct td_prefill_worker *w, const Tandem__V1__KvTarget *t, uint32_t n_tokens,
                                   struct td_tx_pages dst[TD_KV_N_GROUPS], struct td_err *err)
{
    enum td_status st;
    if (t == NULL) return td_err_set(err, TD_E_INVALID, "target is missing");
    if (t->incarnation == 0) return td_err_set(err, TD_E_INVALID, "target.incarnation is 0");
    if (t->generation == 0 || t->lowest_live_generation > t->generation)
        return td_err_set(err, TD_E_INVALID, "target.generation %" PRIu64 " is 0 or below the lowest live one",
                          t->generation);
    if (t->cached_tokens >= n_tokens)
        return td_err_set(err, TD_E_INVALID, "target.cached_tokens %u leaves nothing of %u tokens", t->cached_tokens,
                          n_tokens);
    TD_TRY(check_list(w, TD_KV_SLIDING, t->sliding, n_tokens, t->cached_tokens, &dst[TD_KV_SLIDING], err));
    TD_TRY(check_list(w, TD_KV_FULL, t->full, n_tokens, t->cached_tokens, &dst[TD_KV_FULL], err));
out:
    return st;
}

/* Checks everything and begins the send. */
static enum td_status begin(struct td_prefill_worker *w, struct td_prefill_run *r, const Tandem__V1__RunRequest *m,
                            struct td_err *err)
{
    enum td_status st;
    struct td_tx_pages src[TD_KV_N_GROUPS], dst[TD_KV_N_GROUPS];
    if (m->request == NULL) return td_err_set(err, TD_E_INVALID, "request is missing");
    TD_TRY(td_token_request_parse(m->request, w->o.model->vocab, w->o.max_context_tokens, &r->req, err));
    if (w->is_draining) return td_err_set(err, TD_E_DRAINING, "this prefill worker is draining");
    if (w->n_waiting + (w->n_computing > 0 ? 1 : 0) > w->o.max_waiting)
        return td_err_set(err, TD_E_BUSY, "%u requests wait here already", w->n_waiting);
    TD_TRY(check_target(w, m->target, r->req.n_tokens, dst, err));
    r->decode = m->target->incarnation;
    st = td_prefill_send_introduce(w->send, r->decode, m->descriptor, err);
    if (st == TD_E_PEER_LOST) st = TD_E_TARGET_LOST;
    if (st != TD_OK) return st;
    TD_TRY(td_prefill_seq_init(&r->seq, &w->sched, r->req.n_tokens, r->req.id));
    r->n_to_compute = r->req.n_tokens - td_prefill_sched_known(&w->sched, &r->seq, r->req.tokens);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) /* numbers follow when there are pages */
        src[g] = (struct td_tx_pages){0, r->seq.n_blocks, r->seq.pages[g]};
    st = td_tx_begin(tx_of(w), r->decode, m->target->generation, m->target->lowest_live_generation, src, dst, r->req.id,
                     r, &r->send);
    if (st == TD_E_STALE) td_err_set(err, st, "generation %" PRIu64 " has ended", m->target->generation);
    if (st == TD_E_INVALID) td_err_set(err, st, "target: a page number is not in the decode worker's pool");
out:
    return st;
}

struct td_prefill_run *td_prefill_worker_on_run(struct td_prefill_worker *w, void *call, uint64_t deadline_ns,
                                                const Tandem__V1__RunRequest *m)
{
    struct td_err err = {0};
    struct td_prefill_run *r = td_calloc(1, sizeof *r);
    if (r == NULL) {
        w->ports.finish(w->ports.self, call, TD_E_NO_MEMORY, NULL);
        return NULL;
    }
    r->w = w;
    r->call = call;
    r->arrived_ns = r->entered_ns = now(w);
    r->deadline.fire = on_deadline;
    td_list_push_back(&w->runs, &r->link);
    w->n_runs++;
    enum td_status st = begin(w, r, m, &err);
    if (st != TD_OK) {
        TD_INFO("run_refused", "req=%s status=%s %s", r->req.id, td_status_name(st), err.text);
        answer(r, st, err.text[0] != 0 ? err.text : NULL);
        run_free(r);
        return NULL;
    }
    r->state = RUN_WAITING;
    w->n_waiting++;
    td_metric_add(TD_M_prompt_tokens, r->req.n_tokens);
    r->deadline_ns = deadline_ns;
    if (r->req.timeout_us > 0 && r->req.timeout_us < (TD_NEVER_NS - r->arrived_ns) / 1000) {
        uint64_t own = r->arrived_ns + r->req.timeout_us * 1000;
        if (own < r->deadline_ns) r->deadline_ns = own;
    }
    struct td_err late;
    if (check_deadline(r, &late) != TD_OK)
        step(r, EV_DEADLINE, TD_E_DEADLINE, late.text); /* at once, rather than when it is too late for others too */
    else if (r->deadline_ns != TD_NEVER_NS)
        w->ports.env->timer_start(w->ports.env, &r->deadline,
                                  r->deadline_ns > r->arrived_ns ? r->deadline_ns - r->arrived_ns : 0);
    TD_DEBUG("run", "req=%s tokens=%u decode=%016" PRIx64 " generation=%" PRIu64, r->req.id, r->req.n_tokens, r->decode,
             m->target->generation);
    advance(w);
    /* Its own turn may have failed at once: then it answered, and is gone or about to be. */
    TD_LIST_FOREACH (it, &w->runs)
        if (it == &r->link) return r->call != NULL ? r : NULL;
    return NULL;
}

void td_prefill_worker_on_gone(struct td_prefill_worker *w, struct td_prefill_run *r, enum td_status why)
{
    r->call = NULL;
    step(r, why == TD_E_DEADLINE ? EV_DEADLINE : EV_GONE, why == TD_OK ? TD_E_CANCELED : why, "the client has left");
    advance(w);
}

/* ---- the worker ----------------------------------------------------------------------------------------------------
 */

enum td_status td_prefill_worker_create(const struct td_prefill_worker_options *o, struct td_kv_pages *kv,
                                        struct td_prefill_send *send, const struct td_prefill_ports *ports,
                                        struct td_prefill_worker **out)
{
    struct td_prefill_worker *w = td_calloc(1, sizeof *w);
    if (w == NULL) return TD_E_NO_MEMORY;
    w->o = *o;
    w->ports = *ports;
    w->send = send;
    w->sched.window_tokens = o->model->window;
    w->sched.pages = kv;
    memcpy(w->sched.kv, o->kv, sizeof w->sched.kv);
    td_list_init(&w->runs);
    if (w->o.max_batch == 0) w->o.max_batch = 1;
    enum td_status st = TD_OK;
    w->segments = td_calloc(w->o.max_batch, sizeof *w->segments);
    w->copies = td_calloc(w->o.max_batch, TD_KV_N_GROUPS * sizeof *w->copies);
    if (w->segments == NULL || w->copies == NULL) st = TD_E_NO_MEMORY;
    if (st == TD_OK && o->has_prefix_cache) st = td_kv_prefix_create(o->kv, o->model->window, kv, &w->sched.prefix);
    if (st != TD_OK) {
        td_prefill_worker_destroy(w);
        return st;
    }
    *out = w;
    return TD_OK;
}

void td_prefill_worker_destroy(struct td_prefill_worker *w)
{
    if (w == NULL) return;
    TD_LIST_FOREACH_SAFE (it, &w->runs) run_free(TD_LIST_ENTRY(it, struct td_prefill_run, link));
    td_kv_prefix_destroy(w->sched.prefix);
    free(w->segments);
    free(w->copies);
    free(w);
}

void td_prefill_worker_drain(struct td_prefill_worker *w)
{
    w->is_draining = true;
    if (w->n_runs == 0) w->ports.drained(w->ports.self);
}

void td_prefill_worker_end_all(struct td_prefill_worker *w, enum td_status st, const char *text)
{
    bool was = w->is_advancing;
    w->is_advancing = true; /* nothing new begins meanwhile */
    TD_LIST_FOREACH_SAFE (it, &w->runs) step(TD_LIST_ENTRY(it, struct td_prefill_run, link), EV_FAILED, st, text);
    w->is_advancing = was;
    advance(w);
}

uint32_t td_prefill_worker_n_runs(const struct td_prefill_worker *w) { return w->n_runs; }

const struct td_kv_prefix *td_prefill_worker_prefix(const struct td_prefill_worker *w) { return w->sched.prefix; }

void td_prefill_worker_load(const struct td_prefill_worker *w, Tandem__V1__Load *out)
{
    out->n_running = w->n_runs - w->n_waiting;
    out->n_waiting = w->n_waiting;
    out->free_sliding_pages = td_kv_pages_n_free(w->sched.pages, TD_KV_SLIDING);
    out->free_full_pages = td_kv_pages_n_free(w->sched.pages, TD_KV_FULL);
    out->is_draining = w->is_draining;
    out->prefill_tokens_per_s = td_pace_per_s(&w->mean_pace);
}

void td_prefill_worker_describe(const struct td_prefill_worker *w, struct td_buf *out)
{
    td_buf_printf(out, "{\"is_draining\":%s,\"n_waiting\":%u,\"requests\":[", w->is_draining ? "true" : "false",
                  w->n_waiting);
    uint64_t t = now(w);
    const char *comma = "";
    TD_LIST_FOREACH (it, &w->runs) {
        const struct td_prefill_run *r = TD_LIST_ENTRY(it, struct td_prefill_run, link);
        td_buf_printf(out, "%s{\"request\":", comma);
        td_json_quote_str(out, r->req.id);
        td_buf_printf(
            out,
            ",\"state\":\"%s\",\"age_ms\":%" PRIu64 ",\"state_age_ms\":%" PRIu64
            ",\"tokens\":%u,\"tokens_done\":%u,\"cached_tokens\":%u,\"sliding_pages\":%u,\"decode\":\"%016" PRIx64
            "\",\"in_engine\":%s,\"is_sending\":%s,\"is_stalled\":%s,\"deadline_in_ms\":",
            state_names[r->state], (uint64_t)((t - r->arrived_ns) / TD_NS_PER_MS),
            (uint64_t)((t - r->entered_ns) / TD_NS_PER_MS), r->seq.n_tokens, r->seq.n_done, r->seq.n_cached,
            r->seq.n_sliding, r->decode, r->seg != NULL ? "true" : "false", r->send != NULL ? "true" : "false",
            r->is_stalled ? "true" : "false");
        if (r->deadline_ns == TD_NEVER_NS)
            td_buf_str(out, "null}");
        else
            td_buf_printf(out, "%" PRIu64 "}",
                          (uint64_t)(r->deadline_ns > t ? (r->deadline_ns - t) / TD_NS_PER_MS : 0));
        comma = ",";
    }
    td_buf_str(out, "]");
    if (w->sched.prefix != NULL) {
        td_buf_str(out, ",\"prefix_cache\":");
        td_kv_prefix_describe(w->sched.prefix, out);
    }
    td_buf_str(out, "}");
}
