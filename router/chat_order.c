#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/text/utf8.h"
#include "router/chat.h"
#include "router/params.h"

#define MAX_TOOLS 128u

struct reader {
    const Tandem__V1__ChatRequest *m; /* ours: owned by the order */
    struct td_order *order;
    struct td_err *err;
};

static enum td_status no_memory(const struct reader *rd)
{
    return td_err_set(rd->err, TD_E_NO_MEMORY, "no memory for the conversation");
}

/* --- a copy that lives as long as the order ----------------------------------------------------------------------- */

static void *order_alloc(void *order, size_t n) { return td_order_alloc(order, n, 1); }
static void order_free(void *order, void *p) { (void)order, (void)p; }

static enum td_status copy_request(struct reader *rd, const Tandem__V1__ChatRequest *m)
{
    ProtobufCAllocator a = {.alloc = order_alloc, .free = order_free, .allocator_data = rd->order};
    size_t n = tandem__v1__chat_request__get_packed_size(m);
    uint8_t *bytes = td_calloc(1, n + 1);
    if (bytes == NULL) return no_memory(rd);
    tandem__v1__chat_request__pack(m, bytes);
    rd->m = tandem__v1__chat_request__unpack(&a, n, bytes);
    free(bytes);
    return rd->m != NULL ? TD_OK : no_memory(rd);
}

static struct td_text text_of(const char *s) { return (struct td_text){s, strlen(s)}; }

/* Text that clients wrote is bytes in the messages. */
static enum td_status read_text(const struct reader *rd, const ProtobufCBinaryData *d, struct td_text *out,
                                const char *path)
{
    size_t n = td_utf8_valid_prefix(d->data, d->len);
    if (n < d->len) return td_err_set(rd->err, TD_E_INVALID, "%s: not UTF-8 at byte %zu", path, n);
    *out = (struct td_text){d->len > 0 ? (const char *)d->data : "", d->len};
    return TD_OK;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static enum td_status read_content(const struct reader *rd, const Tandem__V1__ChatMessage *from, size_t i,
                                   struct td_chat_message *to)
{
    char path[80];
    size_t n = from->n_parts > 0 ? from->n_parts : 1;
    struct td_text *parts = td_order_alloc(rd->order, n, sizeof *parts);
    if (parts == NULL) return no_memory(rd);
    to->parts = parts;
    to->n_parts = n;
    snprintf(path, sizeof path, "messages[%zu].content", i);
    if (from->n_parts == 0) return read_text(rd, &from->content, &parts[0], path);
    if (from->content.len > 0) return td_err_set(rd->err, TD_E_INVALID, "%s: not beside parts", path);
    for (size_t k = 0; k < n; k++) {
        snprintf(path, sizeof path, "messages[%zu].parts[%zu].text", i, k);
        enum td_status st = read_text(rd, &from->parts[k]->text, &parts[k], path);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

static enum td_status read_calls(const struct reader *rd, const Tandem__V1__ChatMessage *from, size_t i,
                                 struct td_chat_message *to)
{
    char path[80];
    if (from->n_tool_calls == 0) return TD_OK;
    struct td_chat_call *calls = td_order_alloc(rd->order, from->n_tool_calls, sizeof *calls);
    if (calls == NULL) return no_memory(rd);
    for (size_t k = 0; k < from->n_tool_calls; k++) {
        const Tandem__V1__ToolCall *c = from->tool_calls[k];
        if (c->name[0] == '\0')
            return td_err_set(rd->err, TD_E_INVALID, "messages[%zu].tool_calls[%zu].name: must be given", i, k);
        snprintf(path, sizeof path, "messages[%zu].tool_calls[%zu].arguments", i, k);
        enum td_status st = read_text(rd, &c->arguments, &calls[k].arguments, path);
        if (st != TD_OK) return st;
        calls[k].name = text_of(c->name);
    }
    to->calls = calls;
    to->n_calls = from->n_tool_calls;
    return TD_OK;
}

/* The latest call of that id before message i. */
static const char *find_call(const Tandem__V1__ChatRequest *m, size_t i, const char *id)
{
    while (i-- > 0)
        for (size_t k = m->messages[i]->n_tool_calls; k-- > 0;)
            if (strcmp(m->messages[i]->tool_calls[k]->id, id) == 0) return m->messages[i]->tool_calls[k]->name;
    return NULL;
}

static enum td_status read_result(const struct reader *rd, const Tandem__V1__ChatMessage *from, size_t i,
                                  struct td_chat_message *to)
{
    const char *name = from->name;
    if (from->tool_call_id[0] != '\0') {
        name = find_call(rd->m, i, from->tool_call_id);
        if (name == NULL)
            return td_err_set(rd->err, TD_E_INVALID,
                              "messages[%zu].tool_call_id: \"%.60s\" is the id of no call before this message", i,
                              from->tool_call_id);
    }
    if (name[0] == '\0')
        return td_err_set(rd->err, TD_E_INVALID,
                          "messages[%zu].name: a tool message names its function, or its call by tool_call_id", i);
    to->name = text_of(name);
    return TD_OK;
}

static enum td_status read_message(const struct reader *rd, size_t i, struct td_chat_message *to)
{
    const Tandem__V1__ChatMessage *from = rd->m->messages[i];
    char path[80];
    enum td_status st;
    if (!td_chat_role_parse(from->role, &to->role))
        return td_err_set(rd->err, TD_E_INVALID,
                          "messages[%zu].role: \"%.40s\" is none of system, developer, user, assistant, tool", i,
                          from->role);
    TD_TRY(read_content(rd, from, i, to));
    snprintf(path, sizeof path, "messages[%zu].reasoning", i);
    if (from->reasoning.len > 0) TD_TRY(read_text(rd, &from->reasoning, &to->reasoning, path));
    if (to->role == TD_CHAT_ASSISTANT) TD_TRY(read_calls(rd, from, i, to));
    if (to->role == TD_CHAT_USER && from->name[0] != '\0') to->name = text_of(from->name);
    if (to->role == TD_CHAT_TOOL) TD_TRY(read_result(rd, from, i, to));
out:
    return st;
}

static enum td_status read_messages(const struct reader *rd)
{
    size_t n = rd->m->n_messages;
    if (n == 0) return td_err_set(rd->err, TD_E_INVALID, "messages: must not be empty");
    struct td_chat_message *list = td_order_alloc(rd->order, n, sizeof *list);
    if (list == NULL) return no_memory(rd);
    rd->order->chat.messages = list;
    rd->order->chat.n_messages = n;
    for (size_t i = 0; i < n; i++) {
        enum td_status st = read_message(rd, i, &list[i]);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

/* --- tools -------------------------------------------------------------------------------------------------------- */

static enum td_status read_parameters(const struct reader *rd, size_t i, struct td_chat_tool *to)
{
    const ProtobufCBinaryData *d = &rd->m->tools[i]->parameters;
    json_error_t why;
    if (d->len == 0) return TD_OK;
    json_t *v = json_loadb((const char *)d->data, d->len, JSON_ALLOW_NUL, &why);
    if (!json_is_object(v)) {
        bool is_memory = v == NULL && json_error_code(&why) == json_error_out_of_memory;
        json_decref(v);
        if (is_memory) return no_memory(rd);
        return td_err_set(rd->err, TD_E_INVALID, "tools[%zu].parameters: must be a JSON object%s%.80s", i,
                          v == NULL ? ": " : "", v == NULL ? why.text : "");
    }
    to->parameters = v;
    return json_array_append_new(rd->order->doc, v) == 0 ? TD_OK : no_memory(rd);
}

static bool is_same(struct td_text a, struct td_text b) { return a.n == b.n && memcmp(a.p, b.p, a.n) == 0; }

static enum td_status read_tool(const struct reader *rd, size_t i, struct td_chat_tool *list)
{
    const Tandem__V1__Tool *from = rd->m->tools[i];
    struct td_chat_tool *to = &list[i];
    to->name = text_of(from->name);
    if (!td_chat_is_tool_name(to->name))
        return td_err_set(rd->err, TD_E_INVALID, "tools[%zu].name: must be 1 to %u letters, digits, _ or -", i,
                          TD_CHAT_TOOL_NAME_MAX);
    for (size_t k = 0; k < i; k++)
        if (is_same(list[k].name, to->name))
            return td_err_set(rd->err, TD_E_INVALID, "tools[%zu].name: \"%s\" is declared twice", i, from->name);
    if (from->description[0] != '\0') to->description = text_of(from->description);
    return read_parameters(rd, i, to);
}

static enum td_status read_choice(const struct reader *rd)
{
    struct td_order *o = rd->order;
    switch (rd->m->tool_choice) {
    case TANDEM__V1__TOOL_CHOICE__TOOLS_NONE:
        o->tool_choice = TD_TOOL_CHOICE_NONE;
        o->chat.n_tools = 0;
        return TD_OK;
    case TANDEM__V1__TOOL_CHOICE__TOOLS_REQUIRED:
        if (o->chat.n_tools == 0) return td_err_set(rd->err, TD_E_INVALID, "tool_choice: TOOLS_REQUIRED needs tools");
        o->tool_choice = TD_TOOL_CHOICE_REQUIRED;
        return TD_OK;
    case TANDEM__V1__TOOL_CHOICE__TOOLS_NAMED:
        for (size_t i = 0; i < o->chat.n_tools; i++)
            if (is_same(o->chat.tools[i].name, text_of(rd->m->tool_name))) o->tool_name = rd->m->tool_name;
        if (o->tool_name == NULL)
            return td_err_set(rd->err, TD_E_INVALID, "tool_name: \"%.64s\" is none of tools", rd->m->tool_name);
        o->tool_choice = TD_TOOL_CHOICE_NAMED;
        return TD_OK;
    default: return TD_OK;
    }
}

static enum td_status read_tools(const struct reader *rd)
{
    size_t n = rd->m->n_tools;
    struct td_order *o = rd->order;
    if (n > MAX_TOOLS) return td_err_set(rd->err, TD_E_INVALID, "tools: %zu are more than %u", n, MAX_TOOLS);
    struct td_chat_tool *list = td_order_alloc(o, n, sizeof *list);
    o->doc = json_array(); /* owns the parsed parameters */
    if (list == NULL || o->doc == NULL) return no_memory(rd);
    for (size_t i = 0; i < n; i++) {
        enum td_status st = read_tool(rd, i, list);
        if (st != TD_OK) return st;
    }
    o->chat.tools = list;
    o->chat.n_tools = n;
    return read_choice(rd);
}

/* --- the rest ----------------------------------------------------------------------------------------------------- */

static enum td_status read_stop_strings(const struct reader *rd)
{
    size_t n = rd->m->n_stop_strings;
    struct td_order *o = rd->order;
    if (n > TD_ORDER_MAX_STOP_STRINGS)
        return td_err_set(rd->err, TD_E_INVALID, "stop_strings: %zu are more than %u", n, TD_ORDER_MAX_STOP_STRINGS);
    struct td_text *list = td_order_alloc(o, n, sizeof *list);
    if (list == NULL) return no_memory(rd);
    for (size_t i = 0; i < n; i++) {
        char path[40];
        snprintf(path, sizeof path, "stop_strings[%zu]", i);
        enum td_status st = read_text(rd, &rd->m->stop_strings[i], &list[i], path);
        if (st != TD_OK) return st;
        if (list[i].n == 0 || list[i].n > TD_ORDER_MAX_STOP_BYTES)
            return td_err_set(rd->err, TD_E_INVALID, "%s: must have 1 to %u bytes", path, TD_ORDER_MAX_STOP_BYTES);
    }
    o->stop_strings = list;
    o->n_stop_strings = n;
    return TD_OK;
}

static enum td_status read_options(const struct reader *rd)
{
    const Tandem__V1__ChatRequest *m = rd->m;
    struct td_order *o = rd->order;
    if (!td_chat_effort_parse(m->reasoning_effort, &o->chat.effort))
        return td_err_set(rd->err, TD_E_INVALID, "reasoning_effort: \"%.40s\" is none of low, medium, high",
                          m->reasoning_effort);
    if (m->current_date[0] != '\0' && !td_params_is_date(m->current_date))
        return td_err_set(rd->err, TD_E_INVALID, "current_date: \"%.40s\" is not of the form YYYY-MM-DD",
                          m->current_date);
    if (m->n > TD_ORDER_MAX_CHOICES)
        return td_err_set(rd->err, TD_E_INVALID, "n: %u is above %u", m->n, TD_ORDER_MAX_CHOICES);
    if (m->n_logprobs > TD_ORDER_MAX_LOGPROBS)
        return td_err_set(rd->err, TD_E_INVALID, "n_logprobs: %u is above %u", m->n_logprobs, TD_ORDER_MAX_LOGPROBS);
    if (m->current_date[0] != '\0') o->chat.current_date = m->current_date;
    o->chat.keep_reasoning = m->keep_reasoning;
    o->n_choices = m->n > 0 ? m->n : 1;
    o->n_logprobs = m->n_logprobs;
    o->want_logprobs = m->want_logprobs || m->n_logprobs > 0;
    o->hides_reasoning = m->hide_reasoning;
    o->one_call = m->one_call;
    o->model = m->model;
    o->request_id = m->request_id;
    if (m->sampling != NULL) o->sampling = *m->sampling;
    if (m->stop != NULL) o->stop = *m->stop;
    return read_stop_strings(rd);
}

enum td_status td_chat_read_order(const Tandem__V1__ChatRequest *m, struct td_order *o, struct td_err *err)
{
    struct reader rd = {.order = o, .err = err};
    enum td_status st;
    o->is_chat = true;
    TD_TRY(copy_request(&rd, m));
    TD_TRY(read_options(&rd));
    TD_TRY(read_messages(&rd));
    TD_TRY(read_tools(&rd));
out:
    return st;
}
