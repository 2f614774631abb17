/* /v1/chat/completions. Not streamed: each choice collects its texts, and the whole is written at the end. Streamed:
 * each event becomes a chunk at once. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/base/mem.h"
#include "router/api_int.h"
#include "router/router_int.h"

struct answer {
    struct td_buf content, reasoning, calls, logprobs; /* calls, logprobs: the inside of JSON arrays */
    bool has_content, has_reasoning, has_logprobs;
    enum td_finish finish;
};

struct chat {
    bool includes_usage;
    struct answer *answers; /* not streamed: one per choice */
    uint32_t n_answers;
};

/* --- the request -------------------------------------------------------------------------------------------------- */

static const struct td_fields_refusal refusals[] = {
    {"functions", TD_HARMLESS_EMPTY, "use tools"},
    {"function_call", TD_HARMLESS_NONE, "use tool_choice"},
    {"audio", TD_HARMLESS_NONE, NULL},
    {"web_search_options", TD_HARMLESS_NONE, NULL},
    {"chat_template", TD_HARMLESS_NONE, NULL},
    {"chat_template_kwargs", TD_HARMLESS_EMPTY, "use reasoning_effort"},
    {"documents", TD_HARMLESS_EMPTY, NULL},
    {"echo", TD_HARMLESS_FALSE, NULL},
    {"continue_final_message", TD_HARMLESS_FALSE, NULL},
};

static void read_response_format(struct td_fields *f)
{
    const json_t *v;
    if (!td_fields_object(f, "response_format", &v)) return;
    struct td_fields r = td_fields_open(v, f->err, "response_format");
    struct td_text type = {NULL, 0};
    if (!td_fields_text(&r, "type", &type))
        td_fields_fail(&r, TD_E_INVALID, "type", "must be given");
    else if (td_text_is(type, "json_object") || td_text_is(type, "json_schema"))
        td_fields_fail(f, TD_E_UNIMPLEMENTED, "response_format", "\"%.20s\" is not supported yet, only \"text\"",
                       type.p);
    else if (!td_text_is(type, "text"))
        td_fields_fail(&r, TD_E_INVALID, "type", "\"%.40s\" is none of text, json_object, json_schema", type.p);
    if (f->st == TD_OK) f->st = r.st;
}

static void read_modalities(struct td_fields *f)
{
    const json_t *list;
    if (!td_fields_array(f, "modalities", &list)) return;
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!td_text_is(td_json_text(json_array_get(list, i)), "text"))
            td_fields_fail(f, TD_E_UNIMPLEMENTED, "modalities", "only \"text\" is supported");
}

static void read_logprobs(struct td_order *o, struct td_fields *f)
{
    td_fields_bool(f, "logprobs", &o->want_logprobs);
    if (td_fields_u32(f, "top_logprobs", 0, TD_ORDER_MAX_LOGPROBS, &o->n_logprobs) && !o->want_logprobs &&
        o->n_logprobs > 0)
        td_fields_fail(f, TD_E_INVALID, "top_logprobs", "needs logprobs to be true");
}

static void read(struct td_api_call *call, struct td_fields *f)
{
    struct td_order *o = &call->order;
    struct chat *c = call->state;
    o->is_chat = true;
    td_api_read_options(o, f);
    td_chat_json_messages(f, &o->arena, &o->chat);
    td_api_read_tools(o, f, false);
    td_chat_json_effort(f, "reasoning_effort", &o->chat.effort);
    td_fields_u32(f, "n", 1, TD_ORDER_MAX_CHOICES, &o->n_choices);
    if (!td_fields_u32(f, "max_completion_tokens", 1, INT32_MAX, &o->stop.max_tokens))
        td_fields_u32(f, "max_tokens", 1, INT32_MAX, &o->stop.max_tokens);
    bool includes_reasoning = true;
    td_fields_bool(f, "include_reasoning", &includes_reasoning);
    o->hides_reasoning = !includes_reasoning;
    read_logprobs(o, f);
    td_api_read_stream(call, f, &c->includes_usage);
    read_response_format(f);
    read_modalities(f);
    td_fields_refuse(f, refusals, sizeof refusals / sizeof refusals[0]);
    if (f->st != TD_OK || call->is_stream) return;
    c->answers = td_calloc(o->n_choices, sizeof *c->answers);
    if (c->answers == NULL)
        td_fields_no_memory(f);
    else
        c->n_answers = o->n_choices;
}

static void drop(struct td_api_call *call)
{
    struct chat *c = call->state;
    for (uint32_t i = 0; i < c->n_answers; i++) {
        struct answer *a = &c->answers[i];
        td_buf_free(&a->content);
        td_buf_free(&a->reasoning);
        td_buf_free(&a->calls);
        td_buf_free(&a->logprobs);
    }
    free(c->answers);
}

/* --- both kinds of answer ----------------------------------------------------------------------------------------- */

static void put_head(struct td_api_call *call, const char *object)
{
    td_buf_printf(&call->out,
                  "{\"id\":\"chatcmpl-%016" PRIx64 "\",\"object\":\"%s\",\"created\":%" PRIu64 ",\"model\":",
                  call->random, object, call->created_s);
    td_json_quote_str(&call->out, call->router->cfg.model_name);
}

static void put_logprobs(struct td_buf *b, const struct td_api_call *call, const struct td_choice_event *e)
{
    for (size_t i = 0; i < e->n_tokens; i++) {
        if (i > 0) td_buf_str(b, ",");
        td_api_put_logprobs(b, call->router, &e->tokens[i]);
    }
}

static bool is_content(const struct td_choice_event *e)
{
    return e->kind == TD_CHAT_CONTENT || e->kind == TD_CHAT_PREAMBLE;
}

/* --- streamed ----------------------------------------------------------------------------------------------------- */

static void begin_chunk(struct td_api_call *call, uint32_t choice)
{
    put_head(call, "chat.completion.chunk");
    td_buf_printf(&call->out, ",\"choices\":[{\"index\":%u,\"delta\":{", choice);
}

static enum td_status end_chunk(struct td_api_call *call, const char *finish)
{
    const struct chat *c = call->state;
    td_buf_printf(&call->out, finish != NULL ? ",\"finish_reason\":\"%s\"}]" : ",\"finish_reason\":null}]", finish);
    td_buf_str(&call->out, c->includes_usage ? ",\"usage\":null}" : "}");
    return td_api_send(call, NULL);
}

/* A text as JSON, with the line break that joins it to the message before. */
static void put_joined(struct td_buf *b, const struct td_choice_event *e)
{
    struct td_buf joined = {0};
    if (e->starts_line) td_buf_str(&joined, "\n");
    td_buf_put(&joined, e->text.p, e->text.n);
    if (joined.failed) b->failed = true;
    td_json_quote(b, td_buf_cstr(&joined), joined.n);
    td_buf_free(&joined);
}

static void put_text_delta(struct td_api_call *call, const struct td_choice_event *e)
{
    struct td_buf *b = &call->out;
    if (e->kind == TD_CHAT_CALL) {
        td_buf_printf(b, "\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":", e->call);
        td_api_put_text(b, e->text);
        td_buf_str(b, "}}]");
    } else if (is_content(e)) {
        td_buf_str(b, "\"content\":");
        put_joined(b, e);
    } else {
        td_buf_str(b, "\"reasoning\":");
        put_joined(b, e);
        td_buf_str(b, ",\"reasoning_content\":");
        put_joined(b, e);
    }
    td_buf_str(b, "}");
    if (e->n_tokens > 0) {
        td_buf_str(b, ",\"logprobs\":{\"content\":[");
        put_logprobs(b, call, e);
        td_buf_str(b, "],\"refusal\":null}");
    }
}

static enum td_status stream_event(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e)
{
    struct td_buf *b = &call->out;
    if (e->type == TD_CHOICE_MESSAGE_END || (e->type == TD_CHOICE_MESSAGE_START && e->kind != TD_CHAT_CALL))
        return TD_OK;
    begin_chunk(call, choice);
    switch (e->type) {
    case TD_CHOICE_BEGIN: td_buf_str(b, "\"role\":\"assistant\",\"content\":\"\"}"); break;
    case TD_CHOICE_MESSAGE_START:
        td_buf_printf(b, "\"tool_calls\":[{\"index\":%u,\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":",
                      e->call, e->call_id);
        td_json_quote_str(b, e->function);
        td_buf_str(b, ",\"arguments\":\"\"}}]}");
        break;
    case TD_CHOICE_TEXT: put_text_delta(call, e); break;
    default: td_buf_str(b, "}"); break;
    }
    return end_chunk(call, e->type == TD_CHOICE_END ? td_finish_name(e->finish) : NULL);
}

static void end_stream(struct td_api_call *call)
{
    const struct chat *c = call->state;
    if (c->includes_usage) {
        put_head(call, "chat.completion.chunk");
        td_buf_str(&call->out, ",\"choices\":[],\"usage\":");
        td_api_put_usage(&call->out, call->run);
        td_buf_str(&call->out, "}");
        td_api_send(call, NULL); /* a client that has gone is told of in any case */
    }
    td_api_end_stream(call, true);
}

/* --- not streamed ------------------------------------------------------------------------------------------------- */

static void collect_call(struct answer *a, const struct td_choice_event *e)
{
    if (e->call > 0) td_buf_str(&a->calls, ",");
    td_buf_printf(&a->calls, "{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", e->call_id);
    td_json_quote_str(&a->calls, e->function);
    td_buf_str(&a->calls, ",\"arguments\":\"");
}

static void collect_text(struct td_api_call *call, struct answer *a, const struct td_choice_event *e)
{
    if (e->kind == TD_CHAT_CALL) { /* goes on inside the quotes */
        size_t before = a->calls.n;
        td_api_put_text(&a->calls, e->text);
        if (a->calls.failed) return;
        memmove(a->calls.data + before, a->calls.data + before + 1, a->calls.n - before - 1);
        a->calls.n -= 2;
        return;
    }
    struct td_buf *b = is_content(e) ? &a->content : &a->reasoning;
    *(is_content(e) ? &a->has_content : &a->has_reasoning) = true;
    if (e->starts_line) td_buf_str(b, "\n");
    td_buf_put(b, e->text.p, e->text.n);
    if (e->n_tokens == 0) return;
    if (a->has_logprobs) td_buf_str(&a->logprobs, ",");
    a->has_logprobs = true;
    put_logprobs(&a->logprobs, call, e);
}

static enum td_status collect_event(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e)
{
    struct chat *c = call->state;
    struct answer *a = &c->answers[choice];
    if (e->type == TD_CHOICE_MESSAGE_START && e->kind == TD_CHAT_CALL)
        collect_call(a, e);
    else if (e->type == TD_CHOICE_MESSAGE_END && e->kind == TD_CHAT_CALL)
        td_buf_str(&a->calls, "\"}}");
    else if (e->type == TD_CHOICE_TEXT)
        collect_text(call, a, e);
    else if (e->type == TD_CHOICE_END)
        a->finish = e->finish;
    bool failed = a->content.failed || a->reasoning.failed || a->calls.failed || a->logprobs.failed;
    return failed ? TD_E_NO_MEMORY : TD_OK;
}

static void put_text_or_null(struct td_buf *b, const char *name, struct td_buf *text, bool has_text)
{
    td_buf_printf(b, ",\"%s\":", name);
    if (has_text)
        td_json_quote(b, td_buf_cstr(text), text->n);
    else
        td_buf_str(b, "null");
}

static void put_choice(struct td_api_call *call, uint32_t index, struct answer *a)
{
    struct td_buf *b = &call->out;
    td_buf_printf(b, "%s{\"index\":%u,\"message\":{\"role\":\"assistant\"", index > 0 ? "," : "", index);
    put_text_or_null(b, "content", &a->content, a->has_content);
    td_buf_str(b, ",\"refusal\":null");
    put_text_or_null(b, "reasoning", &a->reasoning, a->has_reasoning);
    put_text_or_null(b, "reasoning_content", &a->reasoning, a->has_reasoning);
    if (a->calls.n > 0) {
        td_buf_str(b, ",\"tool_calls\":[");
        td_buf_put(b, a->calls.data, a->calls.n);
        td_buf_str(b, "]");
    }
    td_buf_str(b, "},\"logprobs\":");
    if (td_run_order(call->run)->want_logprobs) {
        td_buf_str(b, "{\"content\":[");
        td_buf_put(b, a->logprobs.data, a->logprobs.n);
        td_buf_str(b, "],\"refusal\":null}");
    } else {
        td_buf_str(b, "null");
    }
    td_buf_printf(b, ",\"finish_reason\":\"%s\"}", td_finish_name(a->finish));
}

static void respond(struct td_api_call *call)
{
    struct chat *c = call->state;
    put_head(call, "chat.completion");
    td_buf_str(&call->out, ",\"choices\":[");
    for (uint32_t i = 0; i < c->n_answers; i++) put_choice(call, i, &c->answers[i]);
    td_buf_str(&call->out, "],\"usage\":");
    td_api_put_usage(&call->out, call->run);
    td_buf_str(&call->out, "}\n");
    td_api_respond(call);
}

/* --- the endpoint ------------------------------------------------------------------------------------------------- */

static enum td_status on_event(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e)
{
    return call->is_stream ? stream_event(call, choice, e) : collect_event(call, choice, e);
}

static void on_end(struct td_api_call *call)
{
    if (call->is_stream)
        end_stream(call);
    else
        respond(call);
}

const struct td_api_endpoint td_api_chat = {
    .path = "/v1/chat/completions",
    .state_bytes = sizeof(struct chat),
    .read = read,
    .on_event = on_event,
    .on_end = on_end,
    .drop = drop,
};
