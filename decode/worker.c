/* Events in, and what follows from each: the next step, news to routers, the end of a drain. */
#include "decode/worker.h"

#include <inttypes.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "decode/worker_int.h"

#define STALL_RETRY_NS (20 * TD_NS_PER_MS) /* a sequence waits for pages: look again */

/* --- what follows from an event ---------------------------------------------------------------------------- */

static void end_requests_of(struct td_decode_worker *w, struct td_decode_stream *s, enum td_status st, const char *why)
{
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct td_decode_request *r = TD_LIST_ENTRY(it, struct td_decode_request, in_worker);
        if (r->stream == s && r->state != DS_LEAVING) td_decode_request_refuse(r, st, why);
    }
}

static void set_gauges(const struct td_decode_worker *w)
{
    td_metric_set(TD_M_kv_pages_free_sliding, td_kv_pages_n_free(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_free_full, td_kv_pages_n_free(w->kv, TD_KV_FULL));
    td_metric_set(TD_M_kv_pages_cached_sliding, td_kv_pages_n_kept(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_cached_full, td_kv_pages_n_kept(w->kv, TD_KV_FULL));
    td_metric_set(TD_M_sequences_running, td_decode_sched_n_running(w->sched));
    td_metric_set(TD_M_sequences_waiting, td_decode_sched_n_queued(w->sched) + w->n_reserved);
}

static void start_step(struct td_decode_worker *w)
{
    while (!w->is_broken && td_decode_sched_n_in_flight(w->sched) < w->o.step_depth) {
        bool is_first = td_decode_sched_n_in_flight(w->sched) == 0;
        struct td_batch *b = td_decode_sched_plan(w->sched);
        if (td_decode_sched_has_stalled(w->sched))
            w->ports.env->timer_start(w->ports.env, &w->stall_timer, STALL_RETRY_NS);
        if (b == NULL) return;
        if (is_first) w->step_started_ns = td_decode_now(w);
        enum td_status st = w->ports.submit(w->ports.self, b);
        if (st == TD_OK) continue;
        TD_ERROR("step_refused", "status=%s segments=%u", td_status_name(st), b->n_segments);
        td_decode_sched_refused(w->sched, st);
        return;
    }
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

void td_decode_worker_enter(struct td_decode_worker *w) { w->depth++; }

/* The next step starts before news is packed: the engine should not wait for that. */
void td_decode_worker_leave(struct td_decode_worker *w)
{
    if (w->depth > 1 || w->is_destroying) {
        w->depth--;
        return;
    }
    start_step(w);
    flush_streams(w);
    start_step(w); /* a stream that ended may have made room */
    set_gauges(w);
    if (w->is_draining && !w->has_drained && w->n_requests == 0 && td_decode_sched_n_in_flight(w->sched) == 0 &&
        !has_unsent_news(w)) {
        w->has_drained = true;
        w->ports.drained(w->ports.self);
    }
    w->depth--;
}

static void on_stall_timer(struct td_timer *t)
{
    struct td_decode_worker *w = TD_CONTAINER_OF(t, struct td_decode_worker, stall_timer);
    td_decode_worker_enter(w);
    td_decode_worker_leave(w);
}

/* --- commands of routers ----------------------------------------------------------------------------------- */

void td_decode_worker_end_stream(struct td_decode_worker *w, struct td_decode_stream *s, enum td_status st,
                                 const char *text)
{
    if (s->ending != TD_OK) return;
    s->ending = st;
    TD_WARN("router_stream_ended", "router=%016" PRIx64 " status=%s why=\"%s\"", s->router, td_status_name(st), text);
    end_requests_of(w, s, st, text);
    w->ports.close(w->ports.self, s->call, st, text);
}

static void on_cancel(struct td_decode_stream *s, uint64_t stream_id)
{
    struct td_decode_request *r =
        td_decode_request_find(s, stream_id); /* NULL: it finished while the command was on its way */
    if (r != NULL) td_decode_request_refuse(r, TD_E_CANCELED, td_status_text(TD_E_CANCELED));
}

static void on_first(struct td_decode_stream *s, uint64_t stream_id)
{
    struct td_decode_request *r = td_decode_request_find(s, stream_id);
    if (r != NULL)
        td_decode_request_finish(r, TANDEM__V1__FINISH_REASON__FINISH_NONE, TD_OK, false, "over with its first token");
}

static void on_command(struct td_decode_worker *w, struct td_decode_stream *s, const Tandem__V1__DecodeCommand *cmd)
{
    bool is_hello = cmd->command_case == TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO;
    if (is_hello == s->has_hello) {
        td_decode_worker_end_stream(w, s, TD_E_PROTOCOL,
                                    is_hello ? "hello: sent twice" : "hello: must be the first command");
        return;
    }
    switch (cmd->command_case) {
    case TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO:
        s->has_hello = true;
        s->router = cmd->hello->router;
        TD_INFO("router_stream", "router=%016" PRIx64, s->router);
        break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_PEER: w->ports.introduce(w->ports.self, cmd->peer); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_START: td_decode_request_start(w, s, cmd->start); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL: on_cancel(s, cmd->cancel->stream_id); break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_FIRST: on_first(s, cmd->first->stream_id); break;
    default: TD_WARN("unknown_command", "router=%016" PRIx64, s->router); break; /* of a newer router */
    }
}

/* --- events ------------------------------------------------------------------------------------------------ */

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
    td_decode_worker_enter(w);
    on_command(w, s, cmd);
    td_decode_worker_leave(w);
}

void td_decode_worker_on_writable(struct td_decode_worker *w, struct td_decode_stream *s)
{
    (void)s;
    td_decode_worker_enter(w);
    td_decode_worker_leave(w);
}

void td_decode_worker_on_stream_closed(struct td_decode_worker *w, struct td_decode_stream *s)
{
    td_decode_worker_enter(w);
    end_requests_of(w, s, TD_E_CANCELED, "the router's stream ended");
    td_list_remove(&s->link);
    td_decode_stream_destroy(s);
    td_decode_worker_leave(w);
}

void td_decode_worker_on_step(struct td_decode_worker *w, enum td_status st)
{
    td_decode_worker_enter(w);
    w->n_steps++;
    td_metric_add(TD_M_steps, 1);
    uint64_t t = td_decode_now(w), took_ns = t - w->step_started_ns;
    w->step_started_ns = t; /* of the next, if it is there already */
    td_metric_observe(TD_M_step_seconds, (double)took_ns / (double)TD_NS_PER_S);
    bool breaks = !w->is_broken && st != TD_OK && td_status_scope(st) == TD_SCOPE_PROCESS;
    if (breaks) w->is_broken = true;
    if (st == TD_OK) {
        uint32_t n_prompt = td_decode_sched_n_step_prompt(w->sched);
        td_pace_note(n_prompt > 0 ? &w->prompts : &w->steps, n_prompt > 0 ? n_prompt : 1, took_ns);
    }
    td_decode_sched_done(w->sched, st, took_ns);
    if (breaks) {
        td_decode_worker_end_all(w, st, "the engine failed");
        flush_streams(w);
        w->ports.broken(w->ports.self, st, "the engine failed");
    }
    td_decode_worker_leave(w);
}

void td_decode_worker_on_peer_message(struct td_decode_worker *w, uint64_t from, uint8_t id, const void *data, size_t n)
{
    td_decode_worker_enter(w);
    td_rx_on_message(w->rx, from, id, data, n);
    td_decode_worker_leave(w);
}

void td_decode_worker_on_peer_lost(struct td_decode_worker *w, uint64_t prefill)
{
    td_decode_worker_enter(w);
    td_rx_on_peer_lost(w->rx, prefill);
    td_decode_worker_leave(w);
}

void td_decode_worker_on_peer_reachable(struct td_decode_worker *w, uint64_t prefill)
{
    td_decode_worker_enter(w);
    td_rx_on_peer_reachable(w->rx, prefill);
    td_decode_worker_leave(w);
}

/* --- the operator's ---------------------------------------------------------------------------------------- */

void td_decode_worker_drain(struct td_decode_worker *w)
{
    td_decode_worker_enter(w);
    w->is_draining = true;
    td_decode_worker_leave(w);
}

void td_decode_worker_end_all(struct td_decode_worker *w, enum td_status st, const char *why)
{
    td_decode_worker_enter(w);
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct td_decode_request *r = TD_LIST_ENTRY(it, struct td_decode_request, in_worker);
        if (r->state != DS_LEAVING) td_decode_request_lose(r, st, why);
    }
    td_decode_worker_leave(w);
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

/* --- life -------------------------------------------------------------------------------------------------- */

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
    if (o->has_prefix_cache) TD_TRY(td_kv_prefix_create(o->kv, o->window_tokens, kv, &w->prefix));
    struct td_decode_sched_options so = {.prefix = w->prefix,
                                         .window_tokens = o->window_tokens,
                                         .max_batch = o->max_batch,
                                         .chunk_tokens = o->chunk_tokens,
                                         .depth = o->step_depth};
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
    struct td_decode_sched_owner owner = td_decode_request_sched_owner(w);
    struct td_rx_ports rp = td_decode_request_rx_ports(w);
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
    td_decode_worker_enter(w);
    while (w->sched != NULL && td_decode_sched_n_in_flight(w->sched) > 0)
        td_decode_sched_done(w->sched, TD_E_CANCELED, 0);
    TD_LIST_FOREACH_SAFE (it, &w->requests) {
        struct td_decode_request *r = TD_LIST_ENTRY(it, struct td_decode_request, in_worker);
        if (r->state != DS_LEAVING) td_decode_request_refuse(r, TD_E_CANCELED, "shutting down");
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
    td_kv_prefix_destroy(w->prefix);
    free(w);
}
