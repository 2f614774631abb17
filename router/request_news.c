/* What news means to a request: of its queue, its decode worker D, its prefill worker P, and its client. Each function
 * turns one piece of news into an event of request.c, or drops it where it is not expected. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "router/request_int.h"

/* --- the order and the queue ------------------------------------------------------------------------------ */

void td_request_on_ready(struct td_request *r) { td_request_step(r, EV_READY); }

void td_request_on_placed(struct td_request *r)
{
    td_request_step(r, r->prefill != NULL ? EV_PLACED : EV_PLACED_LOCAL);
}

void td_request_on_bad(struct td_request *r, enum td_status st, const char *text)
{
    if (td_request_is_done(r)) return;
    td_request_step(r, td_request_fatal(r, st, text));
}

void td_request_on_refused(struct td_request *r, enum td_status st, const char *text)
{
    if (r->state != RQ_QUEUED) return;
    td_request_step(r, r->fail_status != TD_OK ? EV_FATAL : td_request_fatal(r, st, text));
}

/* --- the decode worker ------------------------------------------------------------------------------------ */

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
        td_request_step(r, td_request_failed(r, TD_BLAME_DECODE, TD_E_PROTOCOL, false, "reserved without a target"));
        return;
    }
    r->target = copy_target(target);
    td_request_step(r, r->target != NULL ? EV_RESERVED
                                         : td_request_fatal(r, TD_E_NO_MEMORY, "no memory for the page list"));
}

static bool awaits_decode(const struct td_request *r)
{
    return r->has_start && (td_request_is_prefilling(r) || r->state == RQ_HANDOFF || r->state == RQ_DOUBT ||
                            r->state == RQ_LOCAL || r->state == RQ_DECODING);
}

/* The usual case: nothing is held, nothing is copied. */
static enum td_request_event pass_on(struct td_request *r, const uint32_t *ids,
                                     Tandem__V1__PositionLogprobs *const *logprobs, uint32_t n)
{
    bool is_local = r->state == RQ_LOCAL;
    bool is_first_ever = r->t_first == 0;
    if (is_local) td_request_give_place(r);
    enum td_request_event ev = td_request_emit(r, ids, r->want_logprobs ? logprobs : NULL, n);
    if (ev != EV_NONE) return ev;
    if (is_local && is_first_ever) r->prefill_us = (r->t_first - r->t_run) / 1000;
    if (is_local) return EV_TOKENS;
    td_request_advanced(r);
    return EV_NONE;
}

void td_request_on_tokens(struct td_request *r, const uint32_t *ids, Tandem__V1__PositionLogprobs *const *logprobs,
                          uint32_t n)
{
    if (!awaits_decode(r) || r->has_finish || n == 0) return;
    if (td_request_n_generated(r) + (uint64_t)r->n_held + n > r->max_tokens) {
        td_request_step(
            r, td_request_failed(r, TD_BLAME_DECODE, TD_E_PROTOCOL, false, "more tokens than it was asked for"));
        return;
    }
    if (r->t_first_decoded == 0) r->t_first_decoded = td_request_now(r);
    if (r->state == RQ_DECODING || r->state == RQ_LOCAL) {
        td_request_step(r, pass_on(r, ids, logprobs, n));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (td_request_hold(r, ids[i], logprobs != NULL ? logprobs[i] : NULL, false)) continue;
        td_request_step(r, td_request_fatal(r, TD_E_NO_MEMORY, "no memory for tokens that wait for the first"));
        return;
    }
    td_request_step(r, EV_TOKENS);
}

static bool is_final(Tandem__V1__FinishReason reason)
{
    return reason == TANDEM__V1__FINISH_REASON__FINISH_STOP || reason == TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
}

static enum td_status status_by_name(const char *name, enum td_status otherwise)
{
    for (int st = 0; st < TD_N_STATUS; st++)
        if (strcmp(td_status_name((enum td_status)st), name) == 0) return (enum td_status)st;
    return otherwise;
}

/* It ended without an answer. */
static enum td_request_event decode_gave_up(struct td_request *r, const Tandem__V1__DecodeFinished *f)
{
    enum td_status st = status_by_name(f->status_name, TD_E_INTERNAL);
    /* P has told D already that the first token ends it; P's own word to us is on its way. */
    if (st == TD_OK && td_request_is_prefilling(r)) return EV_NONE;
    if (st == TD_OK || st == TD_IN_PROGRESS) st = TD_E_PROTOCOL;
    if (st == TD_E_NO_PAGES || st == TD_E_PREEMPTED || st == TD_E_BUSY) return td_request_no_room(r, st, f->message);
    enum td_blame blame = f->is_handoff && r->prefill != NULL ? TD_BLAME_PREFILL : TD_BLAME_DECODE;
    return td_request_failed(r, blame, st, f->is_lost, f->message);
}

void td_request_on_finished(struct td_request *r, const Tandem__V1__DecodeFinished *f)
{
    if (!r->has_start || r->has_finish) return;
    r->has_start = false; /* D has forgotten it */
    if (!is_final(f->reason)) {
        td_request_step(r, decode_gave_up(r, f));
        return;
    }
    if (r->state == RQ_RESERVING || r->state == RQ_LOCAL) {
        td_request_step(r,
                        td_request_failed(r, TD_BLAME_DECODE, TD_E_PROTOCOL, false, "finished before it had anything"));
        return;
    }
    r->has_finish = true;
    r->finish_reason = f->reason;
    r->decode_us = f->decode_us;
    if (r->prefill == NULL && r->n_migrations == 0)
        r->cached_tokens = f->cached_tokens < r->n_prompt ? f->cached_tokens : r->n_prompt;
    if (f->handoff_bytes > 0) r->handoff_bytes = f->handoff_bytes;
    if (r->transport[0] == '\0') td_request_copy_name(r->transport, sizeof r->transport, f->transport);
    td_request_step(r, EV_FINISHED);
}

/* --- the prefill worker ----------------------------------------------------------------------------------- */

void td_request_on_first(struct td_request *r, const Tandem__V1__FirstToken *first)
{
    if (!td_request_is_prefilling(r) || !r->has_run || r->has_first) return;
    if (!td_request_hold(r, first->token_id, first->logprobs, true)) {
        td_request_step(r, td_request_fatal(r, TD_E_NO_MEMORY, "no memory for the first token"));
        return;
    }
    r->has_first = true;
    r->t_prefilled = td_request_now(r);
    if (r->t_first == 0) { /* what a later try finds in a cache is partly its own answer */
        r->cached_tokens = first->cached_tokens < r->n_prompt ? first->cached_tokens : r->n_prompt;
        r->prefill_us = first->prefill_us;
    }
    td_request_give_place(r);
    /* A reason from D that was held stays the one that counts. */
    if (is_final(first->finish_reason) && !r->has_finish) r->finish_reason = first->finish_reason;
    if (r->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE && !r->has_start)
        td_request_step(
            r, td_request_failed(r, TD_BLAME_DECODE, TD_E_PROTOCOL, false, "took the first token for the last"));
    else
        td_request_step(r, EV_FIRST);
}

void td_request_on_run_done(struct td_request *r, const Tandem__V1__RunDone *done)
{
    if (!r->has_run) return;
    r->handoff_bytes = done->kv_bytes;
    r->handoff_us = done->handoff_us;
    td_request_copy_name(r->transport, sizeof r->transport, done->transport);
}

void td_request_on_run_closed(struct td_request *r, enum td_status st, const char *text)
{
    if (!r->has_run) return;
    r->has_run = false;
    r->run = NULL;
    if (!r->has_first && r->has_place && st == TD_E_UNKNOWN_PEER && r->state == RQ_PREFILLING) {
        td_request_step(r, EV_UNKNOWN_PEER);
        return;
    }
    td_request_give_place(r);
    if (td_request_is_prefilling(r)) {
        td_request_step(r, st == TD_OK ? td_request_failed(r, TD_BLAME_PREFILL, TD_E_PROTOCOL, false,
                                                           "the run ended without a first token")
                                       : td_request_run_failed(r, st, false, text));
    } else if (st != TD_OK && r->state == RQ_HANDOFF) {
        r->doubt_status = st;
        td_err_set(&r->doubt, st, "%s", text);
        td_request_step(r, EV_RUN_FAILED);
    }
}

/* --- either, and the client ------------------------------------------------------------------------------- */

void td_request_on_worker_lost(struct td_request *r, struct td_worker *w, const char *why)
{
    if (td_request_is_done(r)) return;
    if (r->decode == w) {
        if (!r->has_start) return; /* it has finished here already: what was held goes to the client */
        r->has_start = false;
        td_request_step(r, td_request_failed(r, TD_BLAME_DECODE, TD_E_PEER_LOST, true, why));
    } else if (r->prefill == w && r->has_run) {
        r->ports->run_end(r->ports->self, r, true);
        td_request_on_run_closed(r, TD_E_PEER_LOST, why);
    } else if (r->prefill == w && r->state == RQ_RESERVING) {
        td_request_step(r, td_request_failed(r, TD_BLAME_PREFILL, TD_E_PEER_LOST, true, why));
    }
}

void td_request_on_client_gone(struct td_request *r, enum td_status st)
{
    if (td_request_is_done(r)) return;
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s", td_status_text(st));
    td_request_step(r, EV_GONE);
}
