#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "router/chat.h"

static Tandem__V1__ChatChannel channel_of(enum td_chat_kind kind)
{
    switch (kind) {
    case TD_CHAT_REASONING: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING;
    case TD_CHAT_PREAMBLE: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_PREAMBLE;
    case TD_CHAT_CALL: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL;
    default: return TANDEM__V1__CHAT_CHANNEL__CHANNEL_FINAL;
    }
}

static Tandem__V1__FinishReason finish_of(enum td_finish f)
{
    switch (f) {
    case TD_FINISH_LENGTH: return TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    case TD_FINISH_TOOL_CALLS: return TANDEM__V1__FINISH_REASON__FINISH_TOOL_CALLS;
    default: return TANDEM__V1__FINISH_REASON__FINISH_STOP;
    }
}

static enum td_status send(struct td_chat_writer *w, Tandem__V1__ChatEvent *e)
{
    e->choice = w->choice;
    if (w->request_id != NULL) e->request_id = (char *)w->request_id;
    w->request_id = NULL;
    return w->send(w->user, &e->base);
}

static enum td_status send_delta(struct td_chat_writer *w, Tandem__V1__ChatDelta *d)
{
    Tandem__V1__ChatEvent e = TANDEM__V1__CHAT_EVENT__INIT;
    e.deltas = &d;
    e.n_deltas = 1;
    return send(w, &e);
}

static Tandem__V1__ChatDelta delta_of(const struct td_choice_event *e)
{
    Tandem__V1__ChatDelta d = TANDEM__V1__CHAT_DELTA__INIT;
    d.channel = channel_of(e->kind);
    d.message_index = e->message;
    d.call_index = e->call;
    return d;
}

static enum td_status write_call(struct td_chat_writer *w, const struct td_choice_event *e)
{
    Tandem__V1__ChatDelta d = delta_of(e);
    struct td_buf recipient = {0};
    td_buf_printf(&recipient, "functions.%s", e->function);
    d.recipient = (char *)td_buf_cstr(&recipient);
    d.call_id = (char *)e->call_id;
    d.function = (char *)e->function;
    enum td_status st = recipient.failed ? TD_E_NO_MEMORY : send_delta(w, &d);
    td_buf_free(&recipient);
    return st;
}

/* One position's messages, in one block. */
struct position {
    Tandem__V1__PositionLogprobs m;
    Tandem__V1__TokenLogprob chosen, top[TD_ORDER_MAX_LOGPROBS];
    Tandem__V1__TokenLogprob *list[TD_ORDER_MAX_LOGPROBS];
};

static void fill_position(struct position *p, const struct td_token_logprobs *t)
{
    tandem__v1__position_logprobs__init(&p->m);
    tandem__v1__token_logprob__init(&p->chosen);
    p->chosen.id = t->id;
    p->chosen.logprob = t->logprob;
    p->m.chosen = &p->chosen;
    p->m.top = p->list;
    p->m.n_top = t->n_top;
    for (uint32_t i = 0; i < t->n_top; i++) {
        tandem__v1__token_logprob__init(&p->top[i]);
        p->top[i].id = t->top[i].id;
        p->top[i].logprob = t->top[i].logprob;
        p->list[i] = &p->top[i];
    }
}

static enum td_status write_text(struct td_chat_writer *w, const struct td_choice_event *e)
{
    Tandem__V1__ChatDelta d = delta_of(e);
    struct td_buf text = {0};
    enum td_status st = TD_E_NO_MEMORY;
    struct position *positions = td_calloc(e->n_tokens + 1, sizeof *positions);
    Tandem__V1__PositionLogprobs **list = td_calloc(e->n_tokens + 1, sizeof *list);
    if (positions == NULL || list == NULL) goto out;
    uint32_t *last = &w->last_message[d.channel];
    bool is_second = e->text.n > 0 && *last != 0 && *last != e->message + 1;
    if (is_second && e->kind != TD_CHAT_CALL) td_buf_str(&text, "\n");
    td_buf_put(&text, e->text.p, e->text.n);
    if (e->text.n > 0) *last = e->message + 1;
    for (size_t i = 0; i < e->n_tokens; i++) {
        fill_position(&positions[i], &e->tokens[i]);
        list[i] = &positions[i].m;
    }
    d.text = (ProtobufCBinaryData){.data = text.data, .len = text.n};
    d.logprobs = list;
    d.n_logprobs = e->n_tokens;
    st = text.failed ? TD_E_NO_MEMORY : send_delta(w, &d);
out:
    free(positions);
    free(list);
    td_buf_free(&text);
    return st;
}

static enum td_status write_message_end(struct td_chat_writer *w, const struct td_choice_event *e)
{
    Tandem__V1__ChatDelta d = delta_of(e);
    d.end = e->is_complete ? TANDEM__V1__CHAT_MESSAGE_END__MESSAGE_COMPLETE : TANDEM__V1__CHAT_MESSAGE_END__MESSAGE_CUT;
    return send_delta(w, &d);
}

static enum td_status write_end(struct td_chat_writer *w, const struct td_choice_event *e,
                                const struct td_chat_summary *summary)
{
    Tandem__V1__ChatEvent m = TANDEM__V1__CHAT_EVENT__INIT;
    m.finish_reason = finish_of(e->finish);
    if (summary != NULL) {
        m.usage = summary->usage;
        m.timing = summary->timing;
        m.reasoning_tokens = summary->reasoning_tokens;
    }
    return send(w, &m);
}

enum td_status td_chat_write(struct td_chat_writer *w, const struct td_choice_event *e,
                             const struct td_chat_summary *summary)
{
    Tandem__V1__ChatEvent begin = TANDEM__V1__CHAT_EVENT__INIT;
    switch (e->type) {
    case TD_CHOICE_BEGIN: return send(w, &begin); /* the client learns the id, and that the model has begun */
    case TD_CHOICE_MESSAGE_START: return e->kind == TD_CHAT_CALL ? write_call(w, e) : TD_OK;
    case TD_CHOICE_TEXT: return write_text(w, e);
    case TD_CHOICE_MESSAGE_END: return write_message_end(w, e);
    case TD_CHOICE_END: return write_end(w, e, summary);
    }
    return TD_OK;
}
