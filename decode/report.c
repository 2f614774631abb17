/* What others hear of the worker: load for the fleet, /statez. */
#include "decode/worker_int.h"

#include <inttypes.h>

void td_decode_worker_load(const struct td_decode_worker *w, Tandem__V1__Load *out)
{
    out->n_running = td_decode_sched_n_running(w->sched);
    out->n_waiting = td_decode_sched_n_queued(w->sched) + w->n_reserved;
    out->free_sliding_pages = td_kv_pages_n_free(w->kv, TD_KV_SLIDING);
    out->free_full_pages = td_kv_pages_n_free(w->kv, TD_KV_FULL);
    out->quarantined_pages = td_rx_n_quarantined_pages(w->rx);
    out->is_draining = w->is_draining;
    out->prefill_tokens_per_s = td_pace_per_s(&w->prompts);
    out->step_us = td_pace_us_each(&w->steps);
}

const struct td_kv_prefix *td_decode_worker_prefix(const struct td_decode_worker *w) { return w->prefix; }
uint32_t td_decode_worker_n_requests(const struct td_decode_worker *w) { return w->n_requests; }
bool td_decode_worker_is_draining(const struct td_decode_worker *w) { return w->is_draining; }

static void describe_request(const struct td_decode_worker *w, const struct td_decode_request *r, struct td_buf *out)
{
    uint64_t t = td_decode_now(w);
    uint32_t n_pages[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        n_pages[g] = (r->state == DS_RESERVED ? r->target.n_pages[g] : 0) + r->seq.end[g] - r->seq.first[g];
    td_buf_printf(out,
                  "{\"request\":\"%s\",\"stream_id\":%" PRIu64 ",\"state\":\"%s\",\"age_ms\":%" PRIu64
                  ",\"state_age_ms\":%" PRIu64 ",\"prompt_tokens\":%u,\"generated_tokens\":%u,\"max_tokens\":%u,"
                  "\"cached_tokens\":%u,\"sliding_pages\":%u,\"full_pages\":%u,\"prefill\":\"%016" PRIx64 "\",",
                  r->req.id, r->stream_id, td_decode_request_state(r), td_ms_between(r->started_ns, t),
                  td_ms_between(r->entered_ns, t), r->req.n_prompt, td_token_request_n_generated(&r->req),
                  r->req.max_tokens, r->seq.n_cached, n_pages[TD_KV_SLIDING], n_pages[TD_KV_FULL], r->prefill);
    if (r->deadline_ns == TD_NEVER_NS || r->deadline_ns == 0)
        td_buf_str(out, "\"deadline_ms\":null}");
    else
        td_buf_printf(out, "\"deadline_ms\":%" PRIu64 "}", td_ms_between(t, r->deadline_ns));
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
        describe_request(w, TD_LIST_ENTRY(it, struct td_decode_request, in_worker), out);
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
    if (w->prefix != NULL) {
        td_buf_str(out, ",\"prefix_cache\":");
        td_kv_prefix_describe(w->prefix, out);
    }
    td_buf_str(out, "}");
}
