#include "router/answer.h"

void td_answer_init(struct td_answer *a, const struct td_tokenizer *t,
                    enum td_status (*send)(void *user, const ProtobufCMessage *event), void *user)
{
    a->send = send;
    a->user = user;
    td_detok_init(&a->detok, t, false);
}

void td_answer_deinit(struct td_answer *a) { td_buf_free(&a->text); }

static enum td_status send_event(struct td_answer *a, const ProtobufCMessage *event)
{
    enum td_status st = a->send(a->user, event);
    a->has_sent = true;
    return st;
}

enum td_status td_answer_tokens(struct td_answer *a, const struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    td_buf_clear(&a->text);
    uint32_t *ids = r->tokens + r->n_tokens - n;
    for (uint32_t i = 0; i < n; i++) td_detok_feed(&a->detok, ids[i], &a->text);
    if (a->text.failed) return TD_E_NO_MEMORY;
    Tandem__V1__GenerateEvent e = TANDEM__V1__GENERATE_EVENT__INIT;
    e.token_ids = ids;
    e.n_token_ids = n;
    e.text = (ProtobufCBinaryData){.data = a->text.data, .len = a->text.n};
    if (logprobs != NULL) {
        e.logprobs = (Tandem__V1__PositionLogprobs **)logprobs;
        e.n_logprobs = n;
    }
    if (!a->has_sent) {
        e.request_id = (char *)r->id;
        e.seed = r->sampling->seed;
    }
    return send_event(a, &e.base);
}

enum td_status td_answer_end(struct td_answer *a, const struct td_request *r)
{
    Tandem__V1__Usage usage;
    Tandem__V1__Timing timing;
    td_request_usage(r, &usage);
    td_request_timing(r, &timing);
    td_buf_clear(&a->text);
    td_detok_end(&a->detok, &a->text);
    if (a->text.failed) return TD_E_NO_MEMORY;
    Tandem__V1__GenerateEvent e = TANDEM__V1__GENERATE_EVENT__INIT;
    e.text = (ProtobufCBinaryData){.data = a->text.data, .len = a->text.n};
    e.finish_reason = r->finish_reason;
    e.usage = &usage;
    e.timing = &timing;
    return send_event(a, &e.base);
}
