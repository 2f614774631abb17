/* /v1/responses. Every message that the model writes is an item of the output, in order: reasoning, message or
 * function_call. Streamed or not, the items are kept until the end, for the last event holds the whole response.
 * Nothing is stored: previous_response_id is refused, store is echoed as false.
 *
 * An item opens with the choice's MESSAGE_START and closes with its MESSAGE_END. One that the model did not end is
 * closed by the event after, when it is known whether the limit cut it. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/base/mem.h"
#include "router/api_int.h"
#include "router/router_int.h"

struct item {
    enum td_chat_kind kind;
    struct td_buf text, logprobs; /* logprobs: the inside of a JSON array */
    struct td_buf function;
    char call_id[TD_CALL_ID_BYTES];
    const char *status;
};

struct responses {
    uint64_t n_events; /* sent: the next one's sequence_number */
    struct item *items;
    size_t n_items, cap_items;
    bool is_open, was_cut; /* the last item; was_cut: its end is still to be told */
    enum td_finish finish;
};

/* --- the request -------------------------------------------------------------------------------------------------- */

static const struct td_fields_refusal refusals[] = {
    {"previous_response_id", TD_HARMLESS_NONE,
     "not supported: nothing is stored here, send the earlier items as input"},
    {"conversation", TD_HARMLESS_NONE, "not supported: nothing is stored here, send the earlier items as input"},
    {"prompt", TD_HARMLESS_NONE, "not supported: nothing is stored here"},
    {"background", TD_HARMLESS_FALSE, NULL},
    {"max_tool_calls", TD_HARMLESS_NONE, NULL},
};

static void read_text_format(struct td_fields *f)
{
    const json_t *v;
    if (!td_fields_object(f, "text", &v)) return;
    struct td_fields t = td_fields_open(v, f->err, "text");
    const json_t *format;
    if (td_fields_object(&t, "format", &format)) {
        struct td_text type = {NULL, 0};
        struct td_fields inner = td_fields_open(format, f->err, "text.format");
        td_fields_text(&inner, "type", &type);
        if (td_text_is(type, "json_schema") || td_text_is(type, "json_object"))
            td_fields_fail(&t, TD_E_UNIMPLEMENTED, "format", "\"%.20s\" is not supported yet, only \"text\"", type.p);
        else if (!td_text_is(type, "text"))
            td_fields_fail(&inner, TD_E_INVALID, "type", "must be text, json_object or json_schema");
        if (t.st == TD_OK) t.st = inner.st;
    }
    struct td_text verbosity = {"medium", 6};
    td_fields_text(&t, "verbosity", &verbosity);
    if (!td_text_is(verbosity, "medium"))
        td_fields_fail(&t, TD_E_UNIMPLEMENTED, "verbosity", "only \"medium\" is supported");
    f->st = t.st;
}

/* Reasoning comes in the clear, so nobody misses its encrypted form. */
static void read_include(struct td_order *o, struct td_fields *f)
{
    const json_t *list;
    if (!td_fields_array(f, "include", &list)) return;
    for (size_t i = 0; i < json_array_size(list); i++) {
        struct td_text name = td_json_text(json_array_get(list, i));
        if (td_text_is(name, "message.output_text.logprobs"))
            o->want_logprobs = true;
        else if (!td_text_is(name, "reasoning.encrypted_content"))
            td_fields_fail(f, TD_E_UNIMPLEMENTED, "include", "\"%.60s\" is not supported",
                           name.p != NULL ? name.p : "?");
    }
}

static void read_truncation(struct td_fields *f)
{
    struct td_text how = {"disabled", 8};
    td_fields_text(f, "truncation", &how);
    if (td_text_is(how, "auto"))
        td_fields_fail(f, TD_E_UNIMPLEMENTED, "truncation", "\"auto\" is not supported");
    else if (!td_text_is(how, "disabled"))
        td_fields_fail(f, TD_E_INVALID, "truncation", "must be \"disabled\"");
}

static void read_reasoning(struct td_order *o, struct td_fields *f)
{
    const json_t *v;
    if (!td_fields_object(f, "reasoning", &v)) return;
    struct td_fields r = td_fields_open(v, f->err, "reasoning");
    td_chat_json_effort(&r, "effort", &o->chat.effort);
    f->st = r.st;
}

static void read(struct td_api_call *call, struct td_fields *f)
{
    struct td_order *o = &call->order;
    bool store;
    const json_t *metadata;
    o->is_chat = true;
    o->chat_field = "input";
    td_fields_refuse(f, refusals, sizeof refusals / sizeof refusals[0]);
    td_api_read_options(o, f);
    td_chat_json_input(f, &o->arena, &o->chat);
    td_api_read_tools(o, f, true);
    read_reasoning(o, f);
    td_fields_u32(f, "max_output_tokens", 1, INT32_MAX, &o->stop.max_tokens);
    if (td_fields_u32(f, "top_logprobs", 0, TD_ORDER_MAX_LOGPROBS, &o->n_logprobs) && o->n_logprobs > 0)
        o->want_logprobs = true;
    td_fields_bool(f, "stream", &call->is_stream);
    td_fields_bool(f, "store", &store);
    td_fields_object(f, "metadata", &metadata);
    read_text_format(f);
    read_include(o, f);
    read_truncation(f);
}

static void drop(struct td_api_call *call)
{
    struct responses *s = call->state;
    for (size_t i = 0; i < s->n_items; i++) {
        td_buf_free(&s->items[i].text);
        td_buf_free(&s->items[i].logprobs);
        td_buf_free(&s->items[i].function);
    }
    free(s->items);
}

/* --- pieces of JSON ----------------------------------------------------------------------------------------------- */

static void put_buf(struct td_buf *b, const struct td_buf *text)
{
    td_json_quote(b, text->n > 0 ? (const char *)text->data : "", text->n);
}

static const struct td_buf none = {0};

static void put_logprobs(struct td_buf *b, const struct td_buf *entries)
{
    td_buf_str(b, ",\"logprobs\":[");
    td_buf_put(b, entries->data, entries->n);
    td_buf_str(b, "]");
}

/* "rs_", "msg_" or "fc_" and what makes it this call's and this item's. */
static void put_item_id(const struct td_api_call *call, struct td_buf *b, size_t index)
{
    const struct responses *s = call->state;
    const struct item *it = &s->items[index];
    const char *prefix = it->kind == TD_CHAT_REASONING ? "rs" : it->kind == TD_CHAT_CALL ? "fc" : "msg";
    td_buf_printf(b, "\"%s_%016" PRIx64 "%04zx\"", prefix, call->random, index);
}

/* The one part of a message or reasoning item. */
static void put_part(struct td_buf *b, const struct item *it, bool is_whole)
{
    bool is_reasoning = it->kind == TD_CHAT_REASONING;
    td_buf_printf(b, "{\"type\":\"%s\",\"text\":", is_reasoning ? "reasoning_text" : "output_text");
    put_buf(b, is_whole ? &it->text : &none);
    if (!is_reasoning) {
        td_buf_str(b, ",\"annotations\":[]");
        put_logprobs(b, is_whole ? &it->logprobs : &none);
    }
    td_buf_str(b, "}");
}

static void put_item(const struct td_api_call *call, struct td_buf *b, size_t index, bool is_whole)
{
    struct responses *s = call->state;
    struct item *it = &s->items[index];
    td_buf_str(b, "{\"id\":");
    put_item_id(call, b, index);
    if (it->kind == TD_CHAT_CALL) {
        td_buf_printf(b, ",\"type\":\"function_call\",\"call_id\":\"%s\",\"name\":", it->call_id);
        put_buf(b, &it->function);
        td_buf_str(b, ",\"arguments\":");
        put_buf(b, is_whole ? &it->text : &none);
    } else {
        td_buf_str(b, it->kind == TD_CHAT_REASONING ? ",\"type\":\"reasoning\",\"summary\":[],\"content\":["
                                                    : ",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
        if (is_whole) put_part(b, it, true);
        td_buf_str(b, "]");
    }
    td_buf_printf(b, ",\"status\":\"%s\"}", is_whole ? it->status : "in_progress");
}

/* A field of the request as it came, or what stands for its absence. */
static void put_echo(struct td_buf *b, const json_t *request, const char *name, const char *otherwise)
{
    const json_t *v = json_object_get(request, name);
    char *text = v != NULL && !json_is_null(v) ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    td_buf_printf(b, ",\"%s\":%s", name, text != NULL ? text : otherwise);
    free(text);
}

static void put_settings(struct td_buf *b, const struct td_order *o)
{
    static const char *const efforts[] = {"medium", "low", "high"};
    td_buf_str(b, ",\"background\":false");
    put_echo(b, o->doc, "instructions", "null");
    put_echo(b, o->doc, "max_output_tokens", "null");
    put_echo(b, o->doc, "metadata", "{}");
    put_echo(b, o->doc, "parallel_tool_calls", "true");
    td_buf_printf(b,
                  ",\"previous_response_id\":null,\"reasoning\":{\"effort\":\"%s\",\"summary\":null},\"store\":false",
                  efforts[o->chat.effort]);
    put_echo(b, o->doc, "temperature", "1.0");
    td_buf_str(b, ",\"text\":{\"format\":{\"type\":\"text\"}}");
    put_echo(b, o->doc, "tool_choice", "\"auto\"");
    put_echo(b, o->doc, "tools", "[]");
    put_echo(b, o->doc, "top_logprobs", "0");
    put_echo(b, o->doc, "top_p", "1.0");
    td_buf_str(b, ",\"truncation\":\"disabled\"");
    put_echo(b, o->doc, "user", "null");
}

static void put_usage(struct td_buf *b, const struct td_run *run)
{
    struct td_run_usage u = td_run_usage_of(run);
    td_buf_printf(b,
                  ",\"usage\":{\"input_tokens\":%" PRIu64 ",\"input_tokens_details\":{\"cached_tokens\":%" PRIu64
                  "},\"output_tokens\":%" PRIu64 ",\"output_tokens_details\":{\"reasoning_tokens\":%" PRIu64
                  "},\"total_tokens\":%" PRIu64 "}",
                  u.prompt_tokens, u.cached_tokens, u.completion_tokens, u.reasoning_tokens,
                  u.prompt_tokens + u.completion_tokens);
}

/* error: the inside of {"code":...,"message":...}, or NULL. */
static void put_response(struct td_api_call *call, const char *status, const char *error)
{
    struct responses *s = call->state;
    struct td_buf *b = &call->out;
    td_buf_printf(b,
                  "{\"id\":\"resp_%016" PRIx64 "\",\"object\":\"response\",\"created_at\":%" PRIu64
                  ",\"status\":\"%s\",\"model\":",
                  call->random, call->created_s, status);
    td_json_quote_str(b, call->router->cfg.model_name);
    td_buf_printf(b, ",\"error\":%s,\"incomplete_details\":%s,\"output\":[", error != NULL ? error : "null",
                  strcmp(status, "incomplete") == 0 ? "{\"reason\":\"max_output_tokens\"}" : "null");
    for (size_t i = 0; i < s->n_items; i++) {
        if (i > 0) td_buf_str(b, ",");
        put_item(call, b, i, true);
    }
    td_buf_str(b, "]");
    put_settings(b, td_run_order(call->run));
    if (strcmp(status, "completed") == 0 || strcmp(status, "incomplete") == 0)
        put_usage(b, call->run);
    else
        td_buf_str(b, ",\"usage\":null");
    td_buf_str(b, "}");
}

/* --- events ------------------------------------------------------------------------------------------------------- */

static struct td_buf *begin_event(struct td_api_call *call, const char *type)
{
    struct responses *s = call->state;
    td_buf_printf(&call->out, "{\"type\":\"%s\",\"sequence_number\":%" PRIu64, type, s->n_events++);
    return &call->out;
}

static enum td_status end_event(struct td_api_call *call, const char *type)
{
    td_buf_str(&call->out, "}");
    return td_api_send(call, type);
}

static enum td_status send_response(struct td_api_call *call, const char *type, const char *status, const char *error)
{
    td_buf_str(begin_event(call, type), ",\"response\":");
    put_response(call, status, error);
    return end_event(call, type);
}

static enum td_status send_item(struct td_api_call *call, const char *type, bool is_whole)
{
    struct responses *s = call->state;
    td_buf_printf(begin_event(call, type), ",\"output_index\":%zu,\"item\":", s->n_items - 1);
    put_item(call, &call->out, s->n_items - 1, is_whole);
    return end_event(call, type);
}

/* Begins an event about the last item, or about its one part. */
static struct td_buf *begin_item_event(struct td_api_call *call, const char *type)
{
    const struct responses *s = call->state;
    struct td_buf *b = begin_event(call, type);
    td_buf_str(b, ",\"item_id\":");
    put_item_id(call, b, s->n_items - 1);
    td_buf_printf(b, ",\"output_index\":%zu", s->n_items - 1);
    if (s->items[s->n_items - 1].kind != TD_CHAT_CALL) td_buf_str(b, ",\"content_index\":0");
    return b;
}

static enum td_status send_part(struct td_api_call *call, const char *type, bool is_whole)
{
    struct responses *s = call->state;
    struct td_buf *b = begin_item_event(call, type);
    td_buf_str(b, ",\"part\":");
    put_part(b, &s->items[s->n_items - 1], is_whole);
    return end_event(call, type);
}

/* What the events of a kind of item are called. */
struct event_names {
    const char *part_added, *delta, *done, *part_done;
};
static const struct event_names *names_of(enum td_chat_kind kind)
{
    static const struct event_names message = {"response.content_part.added", "response.output_text.delta",
                                               "response.output_text.done", "response.content_part.done"};
    static const struct event_names reasoning = {"response.reasoning_part.added", "response.reasoning_text.delta",
                                                 "response.reasoning_text.done", "response.reasoning_part.done"};
    static const struct event_names call = {NULL, "response.function_call_arguments.delta",
                                            "response.function_call_arguments.done", NULL};
    return kind == TD_CHAT_CALL ? &call : kind == TD_CHAT_REASONING ? &reasoning : &message;
}

static enum td_status send_opening(struct td_api_call *call)
{
    const struct responses *s = call->state;
    const struct event_names *names = names_of(s->items[s->n_items - 1].kind);
    enum td_status st = send_item(call, "response.output_item.added", false);
    return st == TD_OK && names->part_added != NULL ? send_part(call, names->part_added, false) : st;
}

static enum td_status send_delta(struct td_api_call *call, struct td_text text, const struct td_buf *logprobs)
{
    const struct responses *s = call->state;
    enum td_chat_kind kind = s->items[s->n_items - 1].kind;
    const char *type = names_of(kind)->delta;
    struct td_buf *b = begin_item_event(call, type);
    td_buf_str(b, ",\"delta\":");
    td_api_put_text(b, text);
    if (kind != TD_CHAT_CALL && kind != TD_CHAT_REASONING) put_logprobs(b, logprobs);
    return end_event(call, type);
}

static enum td_status send_closing(struct td_api_call *call)
{
    struct responses *s = call->state;
    struct item *it = &s->items[s->n_items - 1];
    const struct event_names *names = names_of(it->kind);
    struct td_buf *b = begin_item_event(call, names->done);
    td_buf_str(b, it->kind == TD_CHAT_CALL ? ",\"arguments\":" : ",\"text\":");
    put_buf(b, &it->text);
    if (it->kind == TD_CHAT_CALL) {
        td_buf_str(b, ",\"name\":");
        put_buf(b, &it->function);
    } else if (it->kind != TD_CHAT_REASONING) {
        put_logprobs(b, &it->logprobs);
    }
    enum td_status st = end_event(call, names->done);
    if (st == TD_OK && names->part_done != NULL) st = send_part(call, names->part_done, true);
    return st == TD_OK ? send_item(call, "response.output_item.done", true) : st;
}

/* --- items -------------------------------------------------------------------------------------------------------- */

static struct item *add_item(struct responses *s)
{
    if (s->n_items == s->cap_items) {
        size_t cap = s->cap_items == 0 ? 4 : s->cap_items * 2;
        struct item *list = td_realloc(s->items, cap, sizeof *list);
        if (list == NULL) return NULL;
        s->items = list;
        s->cap_items = cap;
    }
    struct item *it = &s->items[s->n_items++];
    *it = (struct item){.status = "in_progress"};
    return it;
}

static enum td_status open_item(struct td_api_call *call, const struct td_choice_event *e)
{
    struct responses *s = call->state;
    struct item *it = add_item(s);
    if (it == NULL) return TD_E_NO_MEMORY;
    it->kind = e->kind;
    if (e->kind == TD_CHAT_CALL) {
        snprintf(it->call_id, sizeof it->call_id, "%s", e->call_id);
        td_buf_str(&it->function, e->function);
    }
    s->is_open = true;
    return call->is_stream ? send_opening(call) : TD_OK;
}

static enum td_status add_text(struct td_api_call *call, const struct td_choice_event *e)
{
    struct responses *s = call->state;
    struct item *it = &s->items[s->n_items - 1];
    struct td_buf logprobs = {0};
    td_buf_put(&it->text, e->text.p, e->text.n);
    for (size_t i = 0; i < e->n_tokens; i++) {
        if (i > 0) td_buf_str(&logprobs, ",");
        td_api_put_logprobs(&logprobs, call->router, &e->tokens[i]);
    }
    if (e->n_tokens > 0 && it->logprobs.n > 0) td_buf_str(&it->logprobs, ",");
    td_buf_put(&it->logprobs, logprobs.data, logprobs.n);
    bool failed = it->text.failed || it->logprobs.failed || logprobs.failed;
    enum td_status st = failed ? TD_E_NO_MEMORY : call->is_stream ? send_delta(call, e->text, &logprobs) : TD_OK;
    td_buf_free(&logprobs);
    return st;
}

static enum td_status close_item(struct td_api_call *call, const char *status)
{
    struct responses *s = call->state;
    s->is_open = s->was_cut = false;
    s->items[s->n_items - 1].status = status;
    return call->is_stream ? send_closing(call) : TD_OK;
}

static enum td_status begin(struct td_api_call *call)
{
    if (!call->is_stream) return TD_OK;
    enum td_status st = send_response(call, "response.created", "in_progress", NULL);
    return st == TD_OK ? send_response(call, "response.in_progress", "in_progress", NULL) : st;
}

static enum td_status on_event(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e)
{
    struct responses *s = call->state;
    (void)choice;
    if (s->was_cut) {
        bool by_limit = e->type == TD_CHOICE_END && e->finish == TD_FINISH_LENGTH;
        enum td_status st = close_item(call, by_limit ? "incomplete" : "completed");
        if (st != TD_OK) return st;
    }
    switch (e->type) {
    case TD_CHOICE_BEGIN: return begin(call);
    case TD_CHOICE_MESSAGE_START: return open_item(call, e);
    case TD_CHOICE_TEXT: return add_text(call, e);
    case TD_CHOICE_MESSAGE_END:
        s->was_cut = !e->is_complete;
        return e->is_complete ? close_item(call, "completed") : TD_OK;
    case TD_CHOICE_END: s->finish = e->finish; return TD_OK;
    }
    return TD_OK;
}

static void on_end(struct td_api_call *call)
{
    const struct responses *s = call->state;
    bool is_cut = s->finish == TD_FINISH_LENGTH;
    const char *status = is_cut ? "incomplete" : "completed";
    if (!call->is_stream) {
        put_response(call, status, NULL);
        td_api_respond(call);
        return;
    }
    send_response(call, is_cut ? "response.incomplete" : "response.completed", status, NULL);
    td_api_end_stream(call, false);
}

/* The stream has begun, so the client has a response that can fail. */
static void on_failure(struct td_api_call *call, enum td_status st, const char *text)
{
    struct responses *s = call->state;
    struct td_buf error = {0};
    bool is_theirs = st == TD_E_INVALID || st == TD_E_TOO_LARGE;
    td_buf_printf(&error, "{\"code\":\"%s\",\"message\":", is_theirs ? "invalid_prompt" : "server_error");
    td_json_quote_str(&error, text);
    td_buf_str(&error, "}");
    if (s->is_open) s->items[s->n_items - 1].status = "incomplete";
    send_response(call, "response.failed", "failed", error.failed ? NULL : td_buf_cstr(&error));
    td_buf_free(&error);
}

const struct td_api_endpoint td_api_responses = {
    .path = "/v1/responses",
    .state_bytes = sizeof(struct responses),
    .read = read,
    .on_event = on_event,
    .on_end = on_end,
    .on_failure = on_failure,
    .drop = drop,
};
