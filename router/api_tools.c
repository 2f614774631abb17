/* Tools, the choice among them, and messages' content: what chats of all wire forms have in common. */
#include "router/api.h"

#define MAX_TOOLS 128u

/* --- tools -------------------------------------------------------------------------------------------------------- */

static void read_function(struct td_fields *f, struct td_chat_tool *tool)
{
    bool is_strict = false;
    if (!td_fields_text(f, "name", &tool->name))
        td_fields_fail(f, TD_E_INVALID, "name", "must be given");
    else if (!td_chat_is_tool_name(tool->name))
        td_fields_fail(f, TD_E_INVALID, "name", "must be 1 to %u letters, digits, _ or -", TD_CHAT_TOOL_NAME_MAX);
    td_fields_text(f, "description", &tool->description);
    td_fields_object(f, "parameters", &tool->parameters);
    td_fields_bool(f, "strict", &is_strict);
    if (is_strict) td_fields_fail(f, TD_E_UNIMPLEMENTED, "strict", "constrained output is not supported yet");
}

static void read_tool(struct td_fields *f, const json_t *v, size_t index, bool is_flat, struct td_chat_tool *tool)
{
    struct td_fields t = td_fields_open(v, f->err, "tools[%zu]", index);
    struct td_text type = {NULL, 0};
    td_fields_text(&t, "type", &type);
    if (!td_text_is(type, "function"))
        td_fields_fail(&t, TD_E_INVALID, "type", "must be \"function\"; no other tools are offered here");
    if (is_flat && t.st == TD_OK) {
        read_function(&t, tool);
    } else if (t.st == TD_OK) {
        struct td_fields inner = td_fields_open(json_object_get(v, "function"), f->err, "tools[%zu].function", index);
        if (inner.st == TD_OK) read_function(&inner, tool);
        t.st = inner.st;
    }
    f->st = t.st;
}

static void check_names_differ(struct td_fields *f, const struct td_chat_tool *tools, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++)
            if (tools[i].name.n == tools[k].name.n && memcmp(tools[i].name.p, tools[k].name.p, tools[i].name.n) == 0) {
                td_fields_fail(f, TD_E_INVALID, "tools", "two tools are named \"%.64s\"", tools[i].name.p);
                return;
            }
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

static bool is_offered(const struct td_order *o, const char *name)
{
    for (size_t i = 0; i < o->chat.n_tools; i++)
        if (td_text_is(o->chat.tools[i].name, name)) return true;
    return false;
}

static void read_named_choice(struct td_order *o, struct td_fields *f, const json_t *v, bool is_flat)
{
    struct td_fields c = td_fields_open(v, f->err, "tool_choice");
    struct td_text type = {NULL, 0};
    td_fields_text(&c, "type", &type);
    if (!td_text_is(type, "function")) td_fields_fail(&c, TD_E_INVALID, "type", "must be \"function\"");
    if (!is_flat && c.st == TD_OK) c = td_fields_open(json_object_get(v, "function"), f->err, "tool_choice.function");
    if (!td_fields_str(&c, "name", &o->tool_name))
        td_fields_fail(&c, TD_E_INVALID, "name", "must be given");
    else if (!is_offered(o, o->tool_name))
        td_fields_fail(&c, TD_E_INVALID, "name", "\"%.64s\" is none of tools", o->tool_name);
    o->tool_choice = TD_TOOL_CHOICE_NAMED;
    f->st = c.st;
}

static void read_choice(struct td_order *o, struct td_fields *f, bool is_flat)
{
    const json_t *v = f->st == TD_OK ? td_fields_get(f, "tool_choice") : NULL;
    if (v == NULL) return;
    struct td_text word = td_json_text(v);
    if (json_is_object(v))
        read_named_choice(o, f, v, is_flat);
    else if (td_text_is(word, "none"))
        o->tool_choice = TD_TOOL_CHOICE_NONE;
    else if (td_text_is(word, "required"))
        o->tool_choice = TD_TOOL_CHOICE_REQUIRED;
    else if (!td_text_is(word, "auto"))
        td_fields_fail(f, TD_E_INVALID, "tool_choice", "must be \"none\", \"auto\", \"required\" or name a function");
    if (o->tool_choice == TD_TOOL_CHOICE_REQUIRED && o->chat.n_tools == 0)
        td_fields_fail(f, TD_E_INVALID, "tool_choice", "\"required\" needs tools");
}

void td_api_read_tools(struct td_order *o, struct td_fields *f, bool is_flat)
{
    const json_t *list;
    if (td_fields_array(f, "tools", &list)) {
        size_t n = json_array_size(list);
        if (n > MAX_TOOLS) td_fields_fail(f, TD_E_INVALID, "tools", "%zu are more than %u", n, MAX_TOOLS);
        struct td_chat_tool *tools = f->st == TD_OK ? td_order_alloc(o, n + 1, sizeof *tools) : NULL;
        if (tools == NULL) td_fields_no_memory(f);
        for (size_t i = 0; i < n && f->st == TD_OK; i++) read_tool(f, json_array_get(list, i), i, is_flat, &tools[i]);
        if (f->st == TD_OK) check_names_differ(f, tools, n);
        o->chat.tools = tools;
        o->chat.n_tools = f->st == TD_OK ? n : 0;
    }
    read_choice(o, f, is_flat);
    bool parallel = true;
    td_fields_bool(f, "parallel_tool_calls", &parallel);
    o->one_call = !parallel;
    if (o->tool_choice == TD_TOOL_CHOICE_NONE) o->chat.n_tools = 0;
}

/* --- effort, content ---------------------------------------------------------------------------------------------- */

void td_api_read_effort(struct td_order *o, struct td_fields *f, const char *name)
{
    const char *word = "";
    if (!td_fields_str(f, name, &word)) return;
    if (word[0] == '\0' || !td_chat_effort_parse(word, &o->chat.effort))
        td_fields_fail(f, TD_E_INVALID, name, "\"%.40s\" is none of low, medium, high", word);
}

static void read_part(struct td_fields *f, const json_t *v, const char *name, size_t index, const char *const *types,
                      struct td_text *out)
{
    struct td_fields p = td_fields_open(v, f->err, "%s%s[%zu]", f->path, name, index);
    struct td_text type = {NULL, 0};
    const char *field = NULL;
    td_fields_text(&p, "type", &type);
    for (; *types != NULL && field == NULL; types++)
        if (td_text_is(type, *types)) field = td_text_is(type, "refusal") ? "refusal" : "text";
    if (field == NULL)
        td_fields_fail(&p, TD_E_INVALID, "type", "\"%.40s\" is not taken here, only text",
                       type.p != NULL ? type.p : "");
    else if (!td_fields_text(&p, field, out))
        td_fields_fail(&p, TD_E_INVALID, field, "must be given");
    f->st = p.st;
}

void td_api_read_content(struct td_order *o, struct td_fields *f, const char *name, const char *const *types,
                         const struct td_text **parts_out, size_t *n_out)
{
    const json_t *v = f->st == TD_OK ? td_fields_get(f, name) : NULL;
    if (v == NULL) return;
    if (!json_is_string(v) && !json_is_array(v)) {
        td_fields_fail(f, TD_E_INVALID, name, "must be a string or an array of parts");
        return;
    }
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    struct td_text *parts = td_order_alloc(o, n + 1, sizeof *parts);
    if (parts == NULL) {
        td_fields_no_memory(f);
        return;
    }
    if (json_is_string(v)) parts[0] = td_json_text(v);
    for (size_t i = 0; json_is_array(v) && i < n && f->st == TD_OK; i++)
        read_part(f, json_array_get(v, i), name, i, types, &parts[i]);
    *parts_out = parts;
    *n_out = n;
}
