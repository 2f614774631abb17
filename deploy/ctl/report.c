#include "deploy/ctl/report.h"

#include <inttypes.h>

#include "common/base/json.h"

const char *td_report_finish(Tandem__V1__FinishReason reason)
{
    switch (reason) {
    case TANDEM__V1__FINISH_REASON__FINISH_STOP: return "stop";
    case TANDEM__V1__FINISH_REASON__FINISH_LENGTH: return "length";
    case TANDEM__V1__FINISH_REASON__FINISH_TOOL_CALLS: return "tool_calls";
    default: return "none";
    }
}

void td_report_usage(const Tandem__V1__Usage *u, struct td_buf *out)
{
    if (u == NULL) {
        td_buf_str(out, "null");
        return;
    }
    td_buf_printf(out, "{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"cached_tokens\":%u}", u->prompt_tokens,
                  u->completion_tokens, u->cached_tokens);
}

void td_report_timing(const Tandem__V1__Timing *t, struct td_buf *out)
{
    if (t == NULL) {
        td_buf_str(out, "null");
        return;
    }
    td_buf_printf(out,
                  "{\"queue_us\":%" PRIu64 ",\"prefill_us\":%" PRIu64 ",\"handoff_us\":%" PRIu64
                  ",\"decode_us\":%" PRIu64 ",\"ttft_us\":%" PRIu64 ",\"total_us\":%" PRIu64
                  ",\"handoff_bytes\":%" PRIu64 ",\"transport\":",
                  t->queue_us, t->prefill_us, t->handoff_us, t->decode_us, t->ttft_us, t->total_us, t->handoff_bytes);
    td_json_quote_str(out, t->transport);
    td_buf_str(out, ",\"prefill_worker\":");
    td_json_quote_str(out, t->prefill_worker);
    td_buf_str(out, ",\"decode_worker\":");
    td_json_quote_str(out, t->decode_worker);
    td_buf_str(out, "}");
}

static void put_logprob(const Tandem__V1__TokenLogprob *p, struct td_buf *out)
{
    /* 9 digits give a float back exactly. Not finite would not be JSON. */
    if (p->logprob - p->logprob == 0)
        td_buf_printf(out, "\"id\":%u,\"logprob\":%.9g", p->id, (double)p->logprob);
    else
        td_buf_printf(out, "\"id\":%u,\"logprob\":null", p->id);
}

void td_report_logprobs(const Tandem__V1__PositionLogprobs *p, struct td_buf *out)
{
    td_buf_str(out, "{");
    if (p->chosen != NULL) {
        put_logprob(p->chosen, out);
        td_buf_str(out, ",");
    }
    td_buf_str(out, "\"top\":[");
    for (size_t i = 0; i < p->n_top; i++) {
        td_buf_str(out, i > 0 ? ",{" : "{");
        put_logprob(p->top[i], out);
        td_buf_str(out, "}");
    }
    td_buf_str(out, "]}");
}

void td_report_ids(const uint32_t *ids, size_t n, struct td_buf *out)
{
    td_buf_str(out, "[");
    for (size_t i = 0; i < n; i++) td_buf_printf(out, i > 0 ? ",%u" : "%u", ids[i]);
    td_buf_str(out, "]");
}

static void put_bytes(uint64_t n, struct td_buf *out)
{
    if (n >= 10u << 20)
        td_buf_printf(out, "%.1f MiB", (double)n / (1 << 20));
    else if (n >= 10u << 10)
        td_buf_printf(out, "%.1f KiB", (double)n / (1 << 10));
    else
        td_buf_printf(out, "%" PRIu64 " B", n);
}

void td_report_summary(const Tandem__V1__Usage *u, const Tandem__V1__Timing *t, uint32_t reasoning_tokens,
                       Tandem__V1__FinishReason reason, struct td_buf *out)
{
    td_buf_str(out, "[");
    if (u != NULL) {
        td_buf_printf(out, "%u prompt tokens", u->prompt_tokens);
        if (u->cached_tokens > 0) td_buf_printf(out, " (%u cached)", u->cached_tokens);
        td_buf_printf(out, ", %u written", u->completion_tokens);
        if (reasoning_tokens > 0) td_buf_printf(out, " (%u thinking)", reasoning_tokens);
    }
    if (reason == TANDEM__V1__FINISH_REASON__FINISH_LENGTH) td_buf_str(out, ", cut at the limit");
    if (t != NULL) {
        td_buf_printf(out, " | first token %.1f ms", (double)t->ttft_us / 1e3);
        /* The first token belongs to the prefill; the others share the time after it. */
        if (u != NULL && u->completion_tokens > 1 && t->total_us > t->ttft_us)
            td_buf_printf(out, ", %.1f tokens/s",
                          (u->completion_tokens - 1) * 1e6 / (double)(t->total_us - t->ttft_us));
        td_buf_str(out, " | KV moved: ");
        put_bytes(t->handoff_bytes, out);
        if (t->handoff_bytes > 0)
            td_buf_printf(out, " over UCX %s in %.2f ms", t->transport[0] != '\0' ? t->transport : "?",
                          (double)t->handoff_us / 1e3);
        td_buf_printf(out, " | %s -> %s", t->prefill_worker[0] != '\0' ? t->prefill_worker : "-",
                      t->decode_worker[0] != '\0' ? t->decode_worker : "-");
    }
    td_buf_str(out, "]");
}
