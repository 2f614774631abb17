#include <string.h>

#include "common/base/check.h"
#include "common/text/chat_json.h"
#include "common/text/harmony.h"
#include "deploy/ctl/cases.h"

/* --- Chat Completions --------------------------------------------------------------------------------------------- */

/* A body with "input" is a Responses request. */
static enum td_status render_request(const struct td_chat_format *f, const json_t *request, const char *date,
                                     struct td_token_list *out, struct td_err *err)
{
    struct td_chat_conversation c = {.current_date = date};
    struct td_arena arena = {0};
    enum td_tool_choice choice;
    const char *name = NULL;
    uint32_t n_forced;
    bool is_responses = json_object_get(request, "input") != NULL;
    struct td_fields fields = td_fields_open(request, err, "%s", "");
    if (is_responses)
        td_chat_json_input(&fields, &arena, &c);
    else
        td_chat_json_messages(&fields, &arena, &c);
    td_chat_json_tools(&fields, &arena, is_responses, &c, &choice, &name);
    if (!is_responses) {
        td_chat_json_effort(&fields, "reasoning_effort", &c.effort);
        td_chat_json_response_format(&fields, &arena, &c.response_format);
    } else if (fields.st == TD_OK && td_fields_get(&fields, "reasoning") != NULL) {
        struct td_fields reasoning = td_fields_open(td_fields_get(&fields, "reasoning"), err, "reasoning");
        td_chat_json_effort(&reasoning, "effort", &c.effort);
        fields.st = reasoning.st;
    }
    enum td_status st = fields.st;
    if (st == TD_OK) st = td_chat_prompt(f, &c, choice, name, out, &n_forced, err);
    td_arena_free(&arena);
    return st;
}

/* --- harmony's own messages --------------------------------------------------------------------------------------- */

/* What the messages point into. */
struct reading {
    struct td_harmony_message *messages;
    size_t n;
    struct td_arena arena;
    bool has_functions;
    struct td_err *err;
};

static enum td_status bad(const struct reading *r, size_t i, const char *field, const char *why)
{
    return td_err_set(r->err, TD_E_INVALID, "messages[%zu].%s: %s", i, field, why);
}

static void *take(struct reading *r, size_t n, size_t size) { return td_arena_alloc(&r->arena, n, size); }

static enum td_status no_memory(const struct reading *r)
{
    return td_err_set(r->err, TD_E_NO_MEMORY, "no memory for the messages");
}

static struct td_text text_of(const json_t *v, const char *key) { return td_json_text(json_object_get(v, key)); }

static bool is_string(const json_t *v, const char *text)
{
    return json_is_string(v) && strcmp(json_string_value(v), text) == 0;
}

/* tools: {namespace: {"name", "description", "tools": [{"name", "description", "parameters"}]}} */
static enum td_status read_namespaces(struct reading *r, size_t at, const json_t *tools,
                                      struct td_harmony_namespace **out, size_t *n_out)
{
    struct td_harmony_namespace *list = take(r, json_object_size(tools), sizeof *list);
    if (list == NULL) return no_memory(r);
    *out = list;
    *n_out = 0;
    const char *key;
    json_t *v;
    json_object_foreach ((json_t *)tools, key, v) {
        const json_t *functions = json_object_get(v, "tools");
        size_t n = json_array_size(functions);
        struct td_chat_tool *t = take(r, n, sizeof *t);
        if (t == NULL) return no_memory(r);
        for (size_t i = 0; i < n; i++) {
            const json_t *fn = json_array_get(functions, i), *parameters = json_object_get(fn, "parameters");
            t[i] = (struct td_chat_tool){.name = text_of(fn, "name"),
                                         .description = text_of(fn, "description"),
                                         .parameters = json_is_object(parameters) ? parameters : NULL};
            if (t[i].name.p == NULL) return bad(r, at, "content", "a tool has no name");
        }
        struct td_text name = text_of(v, "name");
        if (name.p == NULL) name = (struct td_text){key, strlen(key)};
        list[(*n_out)++] = (struct td_harmony_namespace){
            .name = name, .description = text_of(v, "description"), .tools = t, .n_tools = n};
    }
    return TD_OK;
}

/* "Medium" is "medium" in the prompt. */
static enum td_status read_effort(struct reading *r, struct td_text t, struct td_text *out)
{
    *out = t;
    if (t.p == NULL) return TD_OK;
    char *lower = take(r, t.n + 1, 1);
    if (lower == NULL) return no_memory(r);
    for (size_t i = 0; i < t.n; i++) lower[i] = t.p[i] >= 'A' && t.p[i] <= 'Z' ? (char)(t.p[i] | 0x20) : t.p[i];
    *out = (struct td_text){lower, t.n};
    return TD_OK;
}

static enum td_status write_system(struct reading *r, size_t at, const json_t *content, struct td_buf *out)
{
    const json_t *config = json_object_get(content, "channel_config");
    const json_t *channels = json_object_get(config, "valid_channels");
    struct td_harmony_namespace *tools;
    struct td_harmony_system s = {.identity = text_of(content, "model_identity"),
                                  .cutoff = text_of(content, "knowledge_cutoff"),
                                  .date = text_of(content, "conversation_start_date"),
                                  .n_channels = json_array_size(channels),
                                  .channel_required = json_is_true(json_object_get(config, "channel_required")),
                                  .has_functions = r->has_functions};
    enum td_status st;
    TD_TRY(read_namespaces(r, at, json_object_get(content, "tools"), &tools, &s.n_tools));
    TD_TRY(read_effort(r, text_of(content, "reasoning_effort"), &s.effort));
    struct td_text *names = take(r, s.n_channels, sizeof *names);
    if (names == NULL) return no_memory(r);
    for (size_t i = 0; i < s.n_channels; i++) names[i] = td_json_text(json_array_get(channels, i));
    s.channels = names;
    s.tools = tools;
    td_harmony_system_text(&s, out);
out:
    return st;
}

static enum td_status write_developer(struct reading *r, size_t at, const json_t *content, struct td_buf *out)
{
    struct td_harmony_namespace *tools;
    struct td_harmony_developer d = {.instructions = text_of(content, "instructions")};
    enum td_status st = read_namespaces(r, at, json_object_get(content, "tools"), &tools, &d.n_tools);
    if (st != TD_OK) return st;
    d.tools = tools;
    td_harmony_developer_text(&d, out);
    return TD_OK;
}

static enum td_status read_part(struct reading *r, size_t at, const json_t *part, struct td_text *out)
{
    const json_t *type = json_object_get(part, "type");
    struct td_buf text = {0};
    enum td_status st;
    if (is_string(type, "text")) {
        *out = text_of(part, "text");
        return out->p != NULL ? TD_OK : bad(r, at, "content", "a text part without text");
    }
    if (is_string(type, "system_content"))
        st = write_system(r, at, part, &text);
    else if (is_string(type, "developer_content"))
        st = write_developer(r, at, part, &text);
    else
        st = bad(r, at, "content", "a part's type must be text, system_content or developer_content");
    if (st == TD_OK && text.failed) st = no_memory(r);
    char *copy = take(r, text.n, 1);
    if (st == TD_OK && copy == NULL) st = no_memory(r);
    if (st == TD_OK && text.n > 0) memcpy(copy, text.data, text.n);
    *out = (struct td_text){copy, text.n};
    td_buf_free(&text);
    return st;
}

static enum td_status read_message(struct reading *r, size_t at, const json_t *m)
{
    struct td_harmony_message *h = &r->messages[at];
    const json_t *content = json_object_get(m, "content");
    bool is_tool = is_string(json_object_get(m, "role"), "tool");
    size_t n = json_is_string(content) ? 1 : json_array_size(content);
    struct td_text *parts = take(r, n, sizeof *parts);
    if (parts == NULL) return no_memory(r);
    *h = (struct td_harmony_message){.author = text_of(m, is_tool ? "name" : "role"),
                                     .recipient = text_of(m, "recipient"),
                                     .channel = text_of(m, "channel"),
                                     .content_type = text_of(m, "content_type"),
                                     .parts = parts,
                                     .n_parts = n};
    if (!is_tool) h->name = text_of(m, "name");
    if (h->author.p == NULL) return bad(r, at, is_tool ? "name" : "role", "must be a string");
    if (!json_is_string(content) && !json_is_array(content))
        return bad(r, at, "content", "must be a string or a list of parts");
    if (json_is_string(content)) parts[0] = td_json_text(content);
    for (size_t i = 0; json_is_array(content) && i < n; i++) {
        enum td_status st = read_part(r, at, json_array_get(content, i), &parts[i]);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

static bool declares_functions(const json_t *messages)
{
    size_t i, k;
    json_t *m, *part;
    json_array_foreach (messages, i, m) {
        if (!is_string(json_object_get(m, "role"), "developer")) continue;
        json_array_foreach (json_object_get(m, "content"), k, part) {
            const json_t *functions = json_object_get(json_object_get(part, "tools"), "functions");
            if (json_array_size(json_object_get(functions, "tools")) > 0) return true;
        }
    }
    return false;
}

static enum td_status render_messages(const struct td_chat_format *f, const json_t *c, struct td_token_list *out,
                                      struct td_err *err)
{
    static const char *const modes[] = {"completion", "conversation", "training"};
    const json_t *messages = json_object_get(c, "messages"), *mode = json_object_get(c, "mode");
    if (strcmp(f->name, "harmony") != 0)
        return td_err_set(err, TD_E_INVALID, "mode: such messages are for the format harmony, this is %s", f->name);
    if (!json_is_array(messages)) return td_err_set(err, TD_E_INVALID, "messages: must be a list");
    size_t how = 0;
    while (how < 3 && !is_string(mode, modes[how])) how++;
    if (how == 3) return td_err_set(err, TD_E_INVALID, "mode: must be completion, conversation or training");
    struct reading r = {.n = json_array_size(messages), .has_functions = declares_functions(messages), .err = err};
    enum td_status st = TD_OK;
    r.messages = take(&r, r.n, sizeof *r.messages);
    if (r.messages == NULL) st = no_memory(&r);
    for (size_t i = 0; st == TD_OK && i < r.n; i++) st = read_message(&r, i, json_array_get(messages, i));
    bool keeps = json_is_false(json_object_get(c, "auto_drop"));
    if (st == TD_OK)
        st = td_harmony_render(TD_CONTAINER_OF(f, const struct td_harmony, format), r.messages, r.n,
                               (enum td_harmony_mode)how, keeps ? TD_HARMONY_DROP_NONE : TD_HARMONY_DROP_FIRST, out,
                               err);
    td_arena_free(&r.arena);
    return st;
}

enum td_status td_case_render(const struct td_chat_format *f, json_t *c, const char *date, struct td_token_list *out,
                              struct td_err *err)
{
    json_t *request = json_object_get(c, "request"), *own_date = json_object_get(c, "date");
    if (!json_is_object(c)) return td_err_set(err, TD_E_INVALID, "a case must be an object");
    if (json_is_object(request))
        return render_request(f, request, json_is_string(own_date) ? json_string_value(own_date) : date, out, err);
    if (json_object_get(c, "mode") != NULL) return render_messages(f, c, out, err);
    return render_request(f, c, date, out, err);
}
