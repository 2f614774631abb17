#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/text/fields.h"
#include "deploy/ctl/cases.h"

struct gathering {
    json_t *messages, *stream, *events, *calls;
    struct td_buf content, reasoning, body; /* joined; of the message that is open */
    bool has_content, has_reasoning;
    uint32_t n_hidden;
};

static const char *kind_name(enum td_chat_kind k)
{
    static const char *const names[] = {
        [TD_CHAT_REASONING] = "reasoning", [TD_CHAT_CONTENT] = "content",           [TD_CHAT_PREAMBLE] = "preamble",
        [TD_CHAT_CALL] = "tool",           [TD_CHAT_UNKNOWN_CALL] = "unknown tool", [TD_CHAT_HIDDEN] = "hidden"};
    return names[k];
}

static json_t *string_or_null(const char *s) { return s == NULL ? json_null() : json_string(s); }
static json_t *text_of(const struct td_buf *b) { return json_stringn(b->n > 0 ? (const char *)b->data : "", b->n); }

/* Visible text in order, neighbours of one kind joined. */
static void add_to_stream(struct gathering *g, const char *kind, const struct td_chat_event *e)
{
    json_t *last = json_array_get(g->stream, json_array_size(g->stream) - 1);
    bool is_call = e->kind == TD_CHAT_CALL;
    bool joins = last != NULL && strcmp(json_string_value(json_object_get(last, "kind")), kind) == 0;
    if (is_call && joins) joins = json_integer_value(json_object_get(last, "index")) == (json_int_t)e->call;
    if (!joins) {
        last = json_object();
        json_object_set_new(last, "kind", json_string(kind));
        if (is_call) json_object_set_new(last, "index", json_integer(e->call));
        json_array_append_new(g->stream, last);
    }
    struct td_text before = td_json_text(json_object_get(last, "text"));
    struct td_buf text = {0};
    td_buf_put(&text, before.p, before.n);
    if (e->starts_line) td_buf_str(&text, "\n");
    td_buf_put(&text, e->text.p, e->text.n);
    json_object_set_new(last, "text", text_of(&text));
    td_buf_free(&text);
}

static void add_text(struct gathering *g, const struct td_chat_event *e)
{
    td_buf_put(&g->body, e->text.p, e->text.n);
    bool is_reasoning = e->kind == TD_CHAT_REASONING;
    if (e->kind == TD_CHAT_CALL) {
        add_to_stream(g, "tool", e);
    } else if (td_chat_kind_is_visible(e->kind)) {
        struct td_buf *whole = is_reasoning ? &g->reasoning : &g->content;
        if (e->starts_line) td_buf_str(whole, "\n");
        td_buf_put(whole, e->text.p, e->text.n);
        *(is_reasoning ? &g->has_reasoning : &g->has_content) = true;
        add_to_stream(g, is_reasoning ? "reasoning" : "content", e);
    }
}

static void add_message(struct gathering *g, const struct td_chat_event *e)
{
    if (e->kind == TD_CHAT_HIDDEN) {
        g->n_hidden++;
        return;
    }
    json_t *m = json_object();
    json_object_set_new(m, "channel", string_or_null(e->channel));
    json_object_set_new(m, "recipient", string_or_null(e->recipient));
    json_object_set_new(m, "content_type", string_or_null(e->content_type));
    json_object_set_new(m, "content", text_of(&g->body));
    json_object_set_new(m, "complete", json_boolean(e->is_complete));
    json_array_append_new(g->messages, m);
    if (e->kind != TD_CHAT_CALL) return;
    json_t *call = json_object();
    json_object_set_new(call, "name", json_string(e->function));
    json_object_set_new(call, "arguments", text_of(&g->body));
    json_array_append_new(g->calls, call);
}

/* The event as it is. */
static void add_event(struct gathering *g, const struct td_chat_event *e)
{
    static const char *const names[] = {[TD_CHAT_MESSAGE_START] = "message_start",
                                        [TD_CHAT_TEXT] = "text",
                                        [TD_CHAT_MESSAGE_END] = "message_end",
                                        [TD_CHAT_TURN_END] = "turn_end"};
    json_t *v = json_object();
    json_object_set_new(v, "event", json_string(names[e->type]));
    if (e->type != TD_CHAT_TURN_END) {
        json_object_set_new(v, "message", json_integer(e->message));
        json_object_set_new(v, "kind", json_string(kind_name(e->kind)));
    }
    if (e->type == TD_CHAT_MESSAGE_START) {
        json_object_set_new(v, "channel", string_or_null(e->channel));
        json_object_set_new(v, "recipient", string_or_null(e->recipient));
        json_object_set_new(v, "content_type", string_or_null(e->content_type));
        if (e->kind == TD_CHAT_CALL) {
            json_object_set_new(v, "call", json_integer(e->call));
            json_object_set_new(v, "function", json_string(e->function));
        }
    } else if (e->type == TD_CHAT_TEXT) {
        json_object_set_new(v, "text", json_stringn(e->text.p, e->text.n));
        if (e->starts_line) json_object_set_new(v, "starts_line", json_true());
    } else {
        json_object_set_new(v, "complete", json_boolean(e->is_complete));
    }
    json_array_append_new(g->events, v);
}

static void on_event(void *user, const struct td_chat_event *e)
{
    struct gathering *g = user;
    add_event(g, e);
    if (e->type == TD_CHAT_MESSAGE_START) td_buf_clear(&g->body);
    if (e->type == TD_CHAT_TEXT) add_text(g, e);
    if (e->type == TD_CHAT_MESSAGE_END) add_message(g, e);
}

static enum td_status read_functions(const json_t *tools, struct td_text **out, size_t *n_out, struct td_err *err)
{
    if (tools != NULL && !json_is_array(tools)) return td_err_set(err, TD_E_INVALID, "tools: must be a list of names");
    *n_out = json_array_size(tools);
    *out = td_calloc(*n_out + 1, sizeof **out);
    if (*out == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the tools");
    for (size_t i = 0; i < *n_out; i++) {
        (*out)[i] = td_json_text(json_array_get(tools, i));
        if ((*out)[i].p == NULL) return td_err_set(err, TD_E_INVALID, "tools[%zu]: must be a name", i);
    }
    return TD_OK;
}

static json_t *result(struct gathering *g, bool hit_limit)
{
    json_t *v = json_object(), *chat = json_object();
    json_object_set_new(chat, "reasoning", g->has_reasoning ? text_of(&g->reasoning) : json_null());
    json_object_set_new(chat, "content", g->has_content ? text_of(&g->content) : json_null());
    json_object_set(chat, "tool_calls", g->calls);
    const char *finish = hit_limit ? "length" : json_array_size(g->calls) > 0 ? "tool_calls" : "stop";
    json_object_set_new(chat, "finish_reason", json_string(finish));
    json_object_set(v, "messages", g->messages);
    json_object_set_new(v, "hidden", json_integer(g->n_hidden));
    json_object_set(v, "stream", g->stream);
    json_object_set_new(v, "chat", chat);
    json_object_set(v, "events", g->events);
    return v;
}

enum td_status td_case_parse(const struct td_chat_format *f, const uint32_t *ids, size_t n, bool hit_limit,
                             const json_t *tools, json_t **out, struct td_err *err)
{
    struct gathering g = {
        .messages = json_array(), .stream = json_array(), .events = json_array(), .calls = json_array()};
    struct td_text *functions = NULL;
    struct td_chat_parser *p = NULL;
    struct td_chat_parser_options o = {.on_event = on_event, .user = &g};
    enum td_status st;
    TD_TRY(read_functions(tools, &functions, &o.n_functions, err));
    o.functions = functions;
    TD_TRY(f->parser_create(f, &o, &p));
    for (size_t i = 0; i < n; i++) td_chat_parser_feed(p, ids[i]);
    td_chat_parser_end(p, hit_limit);
    if (p->failed || g.content.failed || g.reasoning.failed || g.body.failed)
        st = td_err_set(err, TD_E_NO_MEMORY, "no memory for the messages");
    else
        *out = result(&g, hit_limit);
out:
    td_chat_parser_destroy(p);
    free(functions);
    json_decref(g.messages);
    json_decref(g.stream);
    json_decref(g.events);
    json_decref(g.calls);
    td_buf_free(&g.content);
    td_buf_free(&g.reasoning);
    td_buf_free(&g.body);
    return st;
}
