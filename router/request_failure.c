/* What a worker's failure leads to.
 *
 * Another try helps if the status table says so, or the worker does: then everything is cancelled, and after a short
 * pause the request goes back to the front of the queue, with all tokens that its client has. Whoever takes it next
 * computes prompt and answer so far, and draws the next token from there; where it failed is avoided (place.c).
 *
 * Tries are bounded, in three ways. A worker that died (its connection broke, its device failed, it hung) counts for
 * the life of the request, since the request may be what kills workers. Other failures count until a decode worker's
 * tokens show that it goes on. Workers that leave in good order count apart: a fleet that is restarted one by one may
 * turn a request away several times. */
#include <string.h>

#include "common/base/log.h"
#include "router/request_int.h"

enum td_request_event td_request_fatal(struct td_request *r, enum td_status st, const char *text)
{
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s", text);
    return EV_FATAL;
}

/* Did a worker die that had the request in hand? Until the pages are reserved no prefill worker has seen it. */
static bool is_death(const struct td_request *r, enum td_blame blame, enum td_status st)
{
    if (r->state == RQ_RESERVING && blame == TD_BLAME_PREFILL) return false;
    return st == TD_E_PEER_LOST || st == TD_E_TARGET_LOST || st == TD_E_DEVICE;
}

/* May it be tried once more? Counts this failure. */
static bool may_try_again(struct td_request *r, enum td_blame blame, enum td_status st, bool can_go_on)
{
    if (!can_go_on && td_status_retry(st) == TD_RETRY_NO) return false;
    if (is_death(r, blame, st)) return ++r->n_deaths < TD_ROUTER_MAX_DEATHS;
    if (st == TD_E_DRAINING) return r->n_turned++ < TD_ROUTER_MAX_TURNED;
    return r->n_retries++ < TD_ROUTER_MAX_RETRIES;
}

enum td_request_event td_request_failed(struct td_request *r, enum td_blame blame, enum td_status st, bool can_go_on,
                                        const char *text)
{
    struct td_worker *w = blame == TD_BLAME_DECODE ? r->decode : r->prefill;
    if (text[0] == '\0') text = td_status_text(st);
    /* We did not cancel it, so it did: it is shutting down. */
    if (st == TD_E_CANCELED)
        st = TD_E_DRAINING;
    else if (st == TD_E_DRAINING && w != NULL)
        w->load.is_draining = true; /* its next report will say the same */
    bool again = may_try_again(r, blame, st, can_go_on);
    bool is_second_death = is_death(r, blame, st) && r->n_deaths >= TD_ROUTER_MAX_DEATHS;
    r->fail_status = st;
    td_err_set(&r->fail, st, "%s worker %s: %s%s", blame == TD_BLAME_DECODE ? "decode" : "prefill",
               w != NULL ? w->identity->name : "?", text,
               is_second_death ? " (the second worker that died with this request: it is not tried again)" : "");
    TD_WARN("worker_failed", "req=%s worker=%s state=%s status=%s again=%d text=\"%s\"", r->id,
            w != NULL ? w->identity->name : "?", td_request_state_name(r), td_status_name(st), again, text);
    if (!again) return EV_FATAL;
    r->failed_decode = r->decode != NULL ? r->decode->incarnation : 0;
    r->failed_prefill = r->prefill != NULL ? r->prefill->incarnation : 0;
    r->blame = blame;
    /* A generation that has ended is cured by a fresh start, wherever. */
    r->same_ok = td_status_retry(st) == TD_RETRY_LATER || st == TD_E_STALE;
    return EV_RETRY;
}

enum td_request_event td_request_run_failed(struct td_request *r, enum td_status st, bool can_go_on, const char *text)
{
    return td_request_failed(r, st == TD_E_TARGET_LOST ? TD_BLAME_DECODE : TD_BLAME_PREFILL, st, can_go_on, text);
}

enum td_request_event td_request_no_room(struct td_request *r, enum td_status st, const char *text)
{
    bool was_refused = st != TD_E_PREEMPTED && (r->state == RQ_RESERVING || r->state == RQ_LOCAL);
    bool is_alone = r->ports->decode_full(r->ports->self, r);
    if (!was_refused) { /* it had pages: somebody older needs them */
        r->n_preempted++;
        r->is_back = true;
        TD_INFO("request_preempted", "req=%s worker=%s state=%s generated_tokens=%u", r->id, r->decode->identity->name,
                td_request_state_name(r), td_request_n_generated(r));
        return EV_NO_ROOM;
    }
    /* Three refusals of an empty worker, and the request does not fit at all. (Not one: pages may be on their way
     * back.) */
    if (!is_alone || ++r->n_refused_alone < 3) return EV_NO_ROOM;
    td_err_set(&r->fail, st, "decode worker %s: %s", r->decode->identity->name,
               text[0] != '\0' ? text : td_status_text(st));
    r->fail_status = st;
    return EV_FATAL;
}

void td_request_advanced(struct td_request *r)
{
    r->n_retries = r->n_turned = r->n_refused_alone = 0;
    r->failed_decode = r->failed_prefill = 0;
    r->blame = TD_BLAME_NONE;
    r->same_ok = r->is_back = false;
    r->fail_status = TD_OK;
    r->fail.text[0] = '\0';
}
