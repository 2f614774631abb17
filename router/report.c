/* What is told of a request: usage and timing to its client, state and ages on /statez. */
#include <inttypes.h>

#include "common/base/clock.h"
#include "router/request.h"

void td_request_usage(const struct td_request *r, Tandem__V1__Usage *out)
{
    tandem__v1__usage__init(out);
    out->prompt_tokens = r->n_prompt;
    out->completion_tokens = td_request_n_generated(r);
    out->cached_tokens = r->cached_tokens;
}

static uint64_t us_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns != 0 && to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;
}

void td_request_timing(const struct td_request *r, Tandem__V1__Timing *out)
{
    tandem__v1__timing__init(out);
    out->queue_us = us_between(r->t_received, r->t_run);
    out->prefill_us = r->prefill_us;
    /* P's Done may come after the last token; then what the client saw is the measure. */
    out->handoff_us = r->handoff_us > 0 ? r->handoff_us : us_between(r->t_prefilled, r->t_first_decoded);
    /* A worker knows only its own part of what went on elsewhere. */
    out->decode_us = r->n_migrations > 0 ? us_between(r->t_first, r->t_last) : r->decode_us;
    out->ttft_us = us_between(r->t_received, r->t_first);
    out->total_us = us_between(r->t_received, r->t_last);
    out->handoff_bytes = r->past_handoff_bytes + r->handoff_bytes;
    out->transport = (char *)r->transport;
    out->prefill_worker = (char *)r->prefill_name;
    out->decode_worker = (char *)r->decode_name;
    out->migrations = r->n_migrations;
}

uint64_t td_request_handoff_extra_us(const struct td_request *r)
{
    if (r->t_prefilled == 0 || r->t_first_decoded < r->t_prefilled || r->prefill_us == 0) return UINT64_MAX;
    if (r->n_tries != 1) return UINT64_MAX;
    uint64_t until_first_us = us_between(r->t_run, r->t_prefilled);
    uint64_t way_us = until_first_us > r->prefill_us ? until_first_us - r->prefill_us : 0;
    return way_us + us_between(r->t_prefilled, r->t_first_decoded);
}

static uint64_t ms_between(uint64_t from_ns, uint64_t to_ns) { return (to_ns - from_ns) / TD_NS_PER_MS; }

void td_request_describe(const struct td_request *r, struct td_buf *out)
{
    uint64_t now = r->ports->env->now_ns(r->ports->env);
    td_buf_printf(out,
                  "{\"id\":\"%s\",\"state\":\"%s\",\"state_ms\":%" PRIu64 ",\"age_ms\":%" PRIu64
                  ",\"deadline_in_ms\":%" PRId64 ",\"prompt_tokens\":%u,\"generated_tokens\":%u,\"held_tokens\":%u,"
                  "\"retries\":%u,\"deaths\":%u,\"migrations\":%u,\"preemptions\":%u,\"decode\":\"%s\","
                  "\"prefill\":\"%s\"}",
                  r->id, td_request_state_name(r), ms_between(r->t_state, now), ms_between(r->t_received, now),
                  r->deadline_ns == TD_NEVER_NS ? -1 : (int64_t)(r->deadline_ns - now) / (int64_t)TD_NS_PER_MS,
                  r->n_prompt, td_request_n_generated(r), r->n_held, r->n_retries + r->n_turned, r->n_deaths,
                  r->n_migrations, r->n_preempted, r->decode != NULL ? r->decode->identity->name : "",
                  r->prefill != NULL ? r->prefill->identity->name : "");
}
