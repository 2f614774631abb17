#include "common/text/chat_json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

struct td_text td_chat_json_text(const struct json_t *v)
{
    if (!json_is_string(v)) return (struct td_text){NULL, 0};
    return (struct td_text){json_string_value(v), json_string_length(v)};
}

/* An absent field and null are the same to clients. */
static const json_t *get(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_null(v) ? NULL : v;
}

static enum td_status bad(struct td_err *err, const char *path, const char *field, const char *why)
{
    return td_err_set(err, TD_E_INVALID, "%s.%s: %s", path, field, why);
}

/* A string that may be absent. */
static enum td_status read_text(const json_t *object, const char *path, const char *key, struct td_text *out,
                                struct td_err *err)
{
    const json_t *v = get(object, key);
    *out = td_chat_json_text(v);
    return v == NULL || out->p != NULL ? TD_OK : bad(err, path, key, "must be a string");
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static enum td_status read_part(const json_t *part, const char *path, size_t i, enum td_chat_role role,
                                struct td_text *out, struct td_err *err)
{
    const char *type = json_string_value(get(part, "type"));
    if (!json_is_object(part) || type == NULL)
        return td_err_set(err, TD_E_INVALID, "%s.content[%zu].type: must be a string", path, i);
    bool is_refusal = role == TD_CHAT_ASSISTANT && strcmp(type, "refusal") == 0;
    if (!is_refusal && strcmp(type, "text") != 0)
        return td_err_set(err, TD_E_INVALID, "%s.content[%zu].type: \"%.40s\" is not supported, only text is", path, i,
                          type);
    *out = td_chat_json_text(get(part, type));
    if (out->p != NULL) return TD_OK;
    return td_err_set(err, TD_E_INVALID, "%s.content[%zu].%s: must be a string", path, i, type);
}

static enum td_status read_content(struct td_conversation *c, struct td_chat_message *m, const json_t *content,
                                   const char *path, struct td_err *err)
{
    if (json_is_string(content)) {
        td_conversation_set_text(c, m, td_chat_json_text(content));
        return TD_OK;
    }
    if (!json_is_array(content)) return bad(err, path, "content", "must be a string or a list of parts");
    size_t n = json_array_size(content);
    if (n == 0) return bad(err, path, "content", "must not be empty");
    struct td_text *parts = td_conversation_parts(c, m, n);
    for (size_t i = 0; parts != NULL && i < n; i++) {
        enum td_status st = read_part(json_array_get(content, i), path, i, m->role, &parts[i], err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

static enum td_status read_call(struct td_conversation *c, struct td_chat_message *m, const json_t *v, const char *path,
                                struct td_err *err)
{
    struct td_text id, name, arguments;
    const json_t *function = get(v, "function"), *type = get(v, "type");
    enum td_status st;
    if (!json_is_object(v)) return td_err_set(err, TD_E_INVALID, "%s: must be an object", path);
    if (type != NULL && (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0))
        return bad(err, path, "type", "only function is supported");
    if (!json_is_object(function)) return bad(err, path, "function", "must be an object");
    TD_TRY(read_text(v, path, "id", &id, err));
    TD_TRY(read_text(function, path, "name", &name, err));
    TD_TRY(read_text(function, path, "arguments", &arguments, err));
    if (name.p == NULL) return bad(err, path, "function.name", "must be a string");
    if (arguments.p == NULL) arguments = (struct td_text){"", 0};
    td_conversation_add_call(c, m, id, name, arguments);
out:
    return st;
}

static enum td_status read_assistant(struct td_conversation *c, struct td_chat_message *m, const json_t *v,
                                     const char *path, struct td_err *err)
{
    enum td_status st;
    const json_t *calls = get(v, "tool_calls"), *content = get(v, "content");
    if (get(v, "function_call") != NULL) return bad(err, path, "function_call", "not supported, use tool_calls");
    TD_TRY(read_text(v, path, "reasoning", &m->reasoning, err));
    if (m->reasoning.p == NULL) TD_TRY(read_text(v, path, "reasoning_content", &m->reasoning, err));
    if (calls != NULL && !json_is_array(calls)) return bad(err, path, "tool_calls", "must be a list");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        char call_path[80];
        snprintf(call_path, sizeof call_path, "%s.tool_calls[%zu]", path, i);
        TD_TRY(read_call(c, m, json_array_get(calls, i), call_path, err));
    }
    if (content != NULL) return read_content(c, m, content, path, err);
    /* null is what an answer that was nothing but reasoning or calls looks like */
    bool is_answer = m->n_calls > 0 || m->reasoning.p != NULL || json_object_get(v, "content") != NULL;
    return is_answer ? TD_OK : bad(err, path, "content", "is missing");
out:
    return st;
}

/* Results find their functions once all calls are known. */
static enum td_status name_results(struct td_conversation *c, const json_t *messages, struct td_err *err)
{
    for (size_t i = 0; i < c->n_messages; i++) {
        struct td_chat_message *m = &c->messages[i];
        if (m->role != TD_CHAT_TOOL) continue;
        struct td_text id = td_chat_json_text(get(json_array_get(messages, i), "tool_call_id"));
        if (id.p == NULL) return td_err_set(err, TD_E_INVALID, "messages[%zu].tool_call_id: must be a string", i);
        if (!td_conversation_find_call(c, id, i, &m->name))
            return td_err_set(err, TD_E_INVALID, "messages[%zu].tool_call_id: no tool call has the id \"%.80s\"", i,
                              id.p);
    }
    return TD_OK;
}

static enum td_status read_message(struct td_conversation *c, const json_t *v, const char *path, struct td_err *err)
{
    const char *name = json_string_value(get(v, "role"));
    enum td_chat_role role;
    if (!json_is_object(v)) return td_err_set(err, TD_E_INVALID, "%s: must be an object", path);
    if (name == NULL) return bad(err, path, "role", "must be a string");
    if (!td_chat_role_parse(name, &role))
        return td_err_set(err, TD_E_INVALID, "%s.role: \"%.40s\" is none of system, developer, user, assistant, tool",
                          path, name);
    struct td_chat_message *m = td_conversation_add(c, role);
    if (role == TD_CHAT_ASSISTANT) return read_assistant(c, m, v, path, err);
    const json_t *content = get(v, "content");
    return content != NULL ? read_content(c, m, content, path, err) : bad(err, path, "content", "is missing");
}

static enum td_status read_messages(struct td_conversation *c, const json_t *messages, struct td_err *err)
{
    if (messages == NULL) return td_err_set(err, TD_E_INVALID, "messages: is missing");
    if (!json_is_array(messages)) return td_err_set(err, TD_E_INVALID, "messages: must be a list");
    if (json_array_size(messages) == 0) return td_err_set(err, TD_E_INVALID, "messages: must not be empty");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        char path[40];
        snprintf(path, sizeof path, "messages[%zu]", i);
        enum td_status st = read_message(c, json_array_get(messages, i), path, err);
        if (st != TD_OK) return st;
        if (c->failed) return td_conversation_end(c, err); /* indexes would no longer agree */
    }
    return name_results(c, messages, err);
}

/* --- tools -------------------------------------------------------------------------------------------------------- */

static enum td_status read_tools(struct td_conversation *c, const json_t *tools, struct td_err *err)
{
    if (tools != NULL && !json_is_array(tools)) return td_err_set(err, TD_E_INVALID, "tools: must be a list");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *v = json_array_get(tools, i), *function = get(v, "function");
        const char *type = json_string_value(get(v, "type"));
        struct td_text description;
        char path[40];
        snprintf(path, sizeof path, "tools[%zu].function", i);
        if (type == NULL || strcmp(type, "function") != 0)
            return td_err_set(err, TD_E_INVALID, "tools[%zu].type: only function is supported", i);
        if (!json_is_object(function)) return td_err_set(err, TD_E_INVALID, "%s: must be an object", path);
        if (json_is_true(get(function, "strict")))
            return bad(err, path, "strict", "true is not supported: arguments are not constrained to the schema");
        enum td_status st;
        st = read_text(function, path, "description", &description, err);
        if (st == TD_OK)
            st = td_conversation_add_tool(c, path, td_chat_json_text(get(function, "name")), description,
                                          get(function, "parameters"), err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

enum td_status td_chat_json_choice(const struct td_conversation *c, const struct json_t *v, const char *path,
                                   enum td_chat_choice *out, struct td_err *err)
{
    static const char *const names[] = {"auto", "none", "required"};
    *out = TD_CHAT_CHOICE_AUTO;
    if (v == NULL || json_is_null(v)) return TD_OK;
    if (json_is_string(v)) {
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            if (strcmp(json_string_value(v), names[i]) != 0) continue;
            *out = (enum td_chat_choice)i;
            if (*out == TD_CHAT_CHOICE_REQUIRED && c->n_tools == 0)
                return td_err_set(err, TD_E_INVALID, "%s: \"required\" needs tools", path);
            return TD_OK;
        }
        return td_err_set(err, TD_E_INVALID, "%s: \"%.40s\" is none of none, auto, required", path,
                          json_string_value(v));
    }
    const char *type = json_string_value(get(v, "type"));
    if (type == NULL || strcmp(type, "function") != 0)
        return td_err_set(err, TD_E_INVALID,
                          "%s: must be \"none\", \"auto\", \"required\" or an object of type function", path);
    const json_t *function = get(v, "function");
    struct td_text name = td_chat_json_text(get(function != NULL ? function : v, "name"));
    if (name.p == NULL) return bad(err, path, function != NULL ? "function.name" : "name", "must be a string");
    if (!td_conversation_has_tool(c, name))
        return td_err_set(err, TD_E_INVALID, "%s: no tool has the name \"%.64s\"", path, name.p);
    *out = TD_CHAT_CHOICE_NAMED;
    return TD_OK;
}

/* --- the rest ----------------------------------------------------------------------------------------------------- */

enum td_status td_chat_json_effort(const struct json_t *v, const char *path, enum td_chat_effort *out,
                                   struct td_err *err)
{
    *out = TD_CHAT_EFFORT_MEDIUM;
    if (v == NULL || json_is_null(v)) return TD_OK;
    const char *name = json_string_value(v);
    if (name != NULL && *name != '\0' && td_chat_effort_parse(name, out)) return TD_OK;
    return td_err_set(err, TD_E_INVALID, "%s: must be low, medium or high", path);
}

static enum td_status read_response_format(struct td_conversation *c, const json_t *v, struct td_err *err)
{
    static const char path[] = "response_format.json_schema";
    const char *type = json_string_value(get(v, "type"));
    enum td_status st;
    if (v == NULL) return TD_OK;
    if (type == NULL) return td_err_set(err, TD_E_INVALID, "response_format.type: must be a string");
    if (strcmp(type, "json_schema") != 0) return TD_OK;
    const json_t *schema = get(get(v, "json_schema"), "schema");
    struct td_chat_response_format *f = &c->chat.response_format;
    TD_TRY(read_text(get(v, "json_schema"), path, "name", &f->name, err));
    TD_TRY(read_text(get(v, "json_schema"), path, "description", &f->description, err));
    if (!json_is_object(schema)) return bad(err, path, "schema", "must be an object");
    char *text = json_dumps(schema, JSON_COMPACT);
    if (text == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the schema");
    if (td_conversation_own(c, text)) f->schema = (struct td_text){text, strlen(text)};
out:
    return st;
}

enum td_status td_chat_json_read(struct td_conversation *c, struct json_t *request, enum td_chat_choice *choice_out,
                                 struct td_err *err)
{
    enum td_status st;
    td_conversation_keep(c, request);
    TD_TRY(read_messages(c, get(request, "messages"), err));
    TD_TRY(read_tools(c, get(request, "tools"), err));
    TD_TRY(td_chat_json_choice(c, get(request, "tool_choice"), "tool_choice", choice_out, err));
    TD_TRY(td_chat_json_effort(get(request, "reasoning_effort"), "reasoning_effort", &c->chat.effort, err));
    TD_TRY(read_response_format(c, get(request, "response_format"), err));
    if (*choice_out == TD_CHAT_CHOICE_NONE) c->n_tools = 0;
    st = td_conversation_end(c, err);
out:
    return st;
}
