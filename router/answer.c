#include "router/answer.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

struct td_answer_delta {
    Tandem__V1__ChatChannel channel;
    uint32_t message;
    size_t start, n; /* in text */
    char *recipient; /* ours, or NULL */
};

void td_answer_init(struct td_answer *a, const struct td_tokenizer *t,
                    enum td_status (*send)(void *user, const ProtobufCMessage *event), void *user)
{
    a->send = send;
    a->user = user;
    td_detok_init(&a->detok, t, false);
}

static void drop_deltas(struct td_answer *a)
{
    for (size_t i = 0; i < a->n_deltas; i++) free(a->deltas[i].recipient);
    a->n_deltas = 0;
    td_buf_clear(&a->text);
}

void td_answer_deinit(struct td_answer *a)
{
    drop_deltas(a);
    free(a->deltas);
    a->deltas = NULL;
    td_buf_free(&a->text);
    td_chat_parser_destroy(a->parser);
    a->parser = NULL;
}

static enum td_status send_event(struct td_answer *a, const ProtobufCMessage *event)
{
    enum td_status st = a->send(a->user, event);
    a->has_sent = true;
    return st;
}

/* --- Generate -------------------------------------------------------------------------------------------- */

static enum td_status send_tokens(struct td_answer *a, const struct td_request *r, uint32_t n,
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

static enum td_status send_end(struct td_answer *a, const struct td_request *r, Tandem__V1__Usage *usage,
                               Tandem__V1__Timing *timing)
{
    td_buf_clear(&a->text);
    td_detok_end(&a->detok, &a->text);
    if (a->text.failed) return TD_E_NO_MEMORY;
    Tandem__V1__GenerateEvent e = TANDEM__V1__GENERATE_EVENT__INIT;
    e.text = (ProtobufCBinaryData){.data = a->text.data, .len = a->text.n};
    e.finish_reason = r->finish_reason;
    e.usage = usage;
    e.timing = timing;
    return send_event(a, &e.base);
}

/* --- Chat ------------------------------------------------------------------------------------------------ */

static Tandem__V1__ChatChannel channel_of(enum td_chat_kind kind)
{
    switch (kind) {
    case TD_CHAT_REASONING: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING;
    case TD_CHAT_CONTENT: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_FINAL;
    case TD_CHAT_PREAMBLE: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_PREAMBLE;
    case TD_CHAT_CALL: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL;
    default: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_NONE;
    }
}

static struct td_answer_delta *delta_for(struct td_answer *a, Tandem__V1__ChatChannel channel, uint32_t message)
{
    struct td_answer_delta *last = a->n_deltas > 0 ? &a->deltas[a->n_deltas - 1] : NULL;
    if (last != NULL && last->channel == channel && last->message == message) return last;
    if (a->n_deltas == a->cap_deltas) {
        size_t cap = a->cap_deltas < 4 ? 4 : a->cap_deltas * 2;
        struct td_answer_delta *p = td_realloc(a->deltas, cap, sizeof *p);
        if (p == NULL) {
            a->failed = true;
            return NULL;
        }
        a->deltas = p;
        a->cap_deltas = cap;
    }
    last = &a->deltas[a->n_deltas++];
    *last = (struct td_answer_delta){.channel = channel, .message = message, .start = a->text.n};
    return last;
}

static void on_chat_event(void *user, const struct td_chat_event *e)
{
    struct td_answer *a = user;
    Tandem__V1__ChatChannel channel = channel_of(e->kind);
    if (channel == TANDEM__V1__CHAT_CHANNEL__CHANNEL_NONE) return;
    if (e->type == TD_CHAT_MESSAGE_START && e->kind == TD_CHAT_CALL) {
        struct td_answer_delta *d = delta_for(a, channel, e->message);
        if (d == NULL) return;
        d->recipient = td_strdup(e->recipient != NULL ? e->recipient : "");
        if (d->recipient == NULL) a->failed = true;
    } else if (e->type == TD_CHAT_TEXT) {
        struct td_answer_delta *d = delta_for(a, channel, e->message);
        if (d == NULL) return;
        size_t before = a->text.n;
        /* Texts of a channel put end to end read as the messages joined by line breaks. Calls are never joined. */
        bool is_second = a->last_message[channel] != 0 && a->last_message[channel] != e->message + 1;
        if (is_second && e->kind != TD_CHAT_CALL) td_buf_str(&a->text, "\n");
        td_buf_put(&a->text, e->text.p, e->text.n);
        d->n += a->text.n - before;
        a->last_message[channel] = e->message + 1;
    }
}

/* Sends what the parser has made since the last time. usage and timing: it is the end. */
static enum td_status send_deltas(struct td_answer *a, const struct td_request *r, Tandem__V1__Usage *usage,
                                  Tandem__V1__Timing *timing)
{
    enum td_status st = TD_E_NO_MEMORY;
    Tandem__V1__ChatDelta *deltas = NULL, **list = NULL;
    if (a->failed || a->text.failed || a->parser->failed) goto out;
    deltas = td_calloc(a->n_deltas, sizeof *deltas);
    list = td_calloc(a->n_deltas, sizeof(void *));
    if (deltas == NULL || list == NULL) goto out;
    for (size_t i = 0; i < a->n_deltas; i++) {
        const struct td_answer_delta *d = &a->deltas[i];
        tandem__v1__chat_delta__init(&deltas[i]);
        deltas[i].channel = d->channel;
        deltas[i].message_index = d->message;
        if (d->n > 0) deltas[i].text = (ProtobufCBinaryData){.data = a->text.data + d->start, .len = d->n};
        if (d->recipient != NULL) deltas[i].recipient = d->recipient;
        list[i] = &deltas[i];
    }
    Tandem__V1__ChatEvent e = TANDEM__V1__CHAT_EVENT__INIT;
    e.deltas = list;
    e.n_deltas = a->n_deltas;
    if (!a->has_sent) e.request_id = (char *)r->id;
    if (usage != NULL) {
        e.finish_reason = r->finish_reason;
        e.usage = usage;
        e.timing = timing;
        e.reasoning_tokens = (uint32_t)a->parser->n_reasoning_tokens;
    }
    st = send_event(a, &e.base);
out:
    free(deltas);
    free(list);
    drop_deltas(a);
    return st;
}

enum td_status td_answer_init_chat(struct td_answer *a, const struct td_chat_format *f)
{
    struct td_chat_parser_options o = {.on_event = on_chat_event, .user = a};
    return f->parser_create(f, &o, &a->parser);
}

/* --- both ------------------------------------------------------------------------------------------------ */

enum td_status td_answer_tokens(struct td_answer *a, const struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    if (a->parser == NULL) return send_tokens(a, r, n, logprobs);
    for (uint32_t i = 0; i < n; i++) td_chat_parser_feed(a->parser, r->tokens[r->n_tokens - n + i]);
    bool has_news = a->n_deltas > 0 || !a->has_sent || a->failed || a->parser->failed;
    return has_news ? send_deltas(a, r, NULL, NULL) : TD_OK;
}

enum td_status td_answer_end(struct td_answer *a, const struct td_request *r)
{
    Tandem__V1__Usage usage;
    Tandem__V1__Timing timing;
    td_request_usage(r, &usage);
    td_request_timing(r, &timing);
    if (a->parser == NULL) return send_end(a, r, &usage, &timing);
    td_chat_parser_end(a->parser, r->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    return send_deltas(a, r, &usage, &timing);
}
