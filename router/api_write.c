/* JSON that several endpoints write. */
#include <inttypes.h>
#include <math.h>

#include "router/api.h"
#include "router/router_int.h"

void td_api_put_number(struct td_buf *b, double d)
{
    td_buf_printf(b, "%.9g", isfinite(d) ? d : -9999.0); /* what other servers write for it */
}

static void put_token(struct td_buf *b, const struct td_router *ro, uint32_t id, float logprob)
{
    size_t n;
    const uint8_t *bytes = td_tokenizer_bytes(ro->tokenizer, id, &n);
    td_buf_str(b, "{\"token\":");
    td_json_quote(b, bytes != NULL ? (const char *)bytes : "", n);
    td_buf_str(b, ",\"logprob\":");
    td_api_put_number(b, (double)logprob);
    td_buf_str(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++) td_buf_printf(b, i > 0 ? ",%u" : "%u", bytes[i]);
    td_buf_str(b, "]");
}

void td_api_put_logprobs(struct td_buf *b, const struct td_router *ro, const struct td_token_logprobs *t)
{
    put_token(b, ro, t->id, t->logprob);
    td_buf_str(b, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < t->n_top; i++) {
        if (i > 0) td_buf_str(b, ",");
        put_token(b, ro, t->top[i].id, t->top[i].logprob);
        td_buf_str(b, "}");
    }
    td_buf_str(b, "]}");
}

void td_api_put_usage(struct td_buf *b, const struct td_run *run)
{
    struct td_run_usage u = td_run_usage_of(run);
    td_buf_printf(b,
                  "{\"prompt_tokens\":%" PRIu64 ",\"completion_tokens\":%" PRIu64 ",\"total_tokens\":%" PRIu64
                  ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu64
                  "},\"completion_tokens_details\":{\"reasoning_tokens\":%" PRIu64 "}}",
                  u.prompt_tokens, u.completion_tokens, u.prompt_tokens + u.completion_tokens, u.cached_tokens,
                  u.reasoning_tokens);
}
