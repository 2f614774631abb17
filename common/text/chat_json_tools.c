/* Tools, and the choice among them. */
#include "common/text/chat_json.h"

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

static bool is_offered(const struct td_chat_conversation *c, const char *name)
{
    for (size_t i = 0; i < c->n_tools; i++)
        if (td_text_is(c->tools[i].name, name)) return true;
    return false;
}

static void read_named_choice(struct td_fields *f, const json_t *v, bool is_flat,
                              const struct td_chat_conversation *offered, const char **name_out)
{
    struct td_fields c = td_fields_open(v, f->err, "tool_choice");
    struct td_text type = {NULL, 0};
    td_fields_text(&c, "type", &type);
    if (!td_text_is(type, "function")) td_fields_fail(&c, TD_E_INVALID, "type", "must be \"function\"");
    if (!is_flat && c.st == TD_OK) c = td_fields_open(json_object_get(v, "function"), f->err, "tool_choice.function");
    if (!td_fields_str(&c, "name", name_out))
        td_fields_fail(&c, TD_E_INVALID, "name", "must be given");
    else if (!is_offered(offered, *name_out))
        td_fields_fail(&c, TD_E_INVALID, "name", "\"%.64s\" is none of tools", *name_out);
    f->st = c.st;
}

static enum td_tool_choice read_choice(struct td_fields *f, bool is_flat, const struct td_chat_conversation *offered,
                                       const char **name_out)
{
    const json_t *v = f->st == TD_OK ? td_fields_get(f, "tool_choice") : NULL;
    struct td_text word = td_json_text(v);
    if (v == NULL || td_text_is(word, "auto")) return TD_TOOL_CHOICE_AUTO;
    if (td_text_is(word, "none")) return TD_TOOL_CHOICE_NONE;
    if (json_is_object(v)) {
        read_named_choice(f, v, is_flat, offered, name_out);
        return TD_TOOL_CHOICE_NAMED;
    }
    if (!td_text_is(word, "required"))
        td_fields_fail(f, TD_E_INVALID, "tool_choice", "must be \"none\", \"auto\", \"required\" or name a function");
    else if (offered->n_tools == 0)
        td_fields_fail(f, TD_E_INVALID, "tool_choice", "\"required\" needs tools");
    return TD_TOOL_CHOICE_REQUIRED;
}

static void read_tools(struct td_fields *f, struct td_arena *a, bool is_flat, struct td_chat_conversation *out)
{
    const json_t *list;
    if (!td_fields_array(f, "tools", &list)) return;
    size_t n = json_array_size(list);
    if (n > MAX_TOOLS) td_fields_fail(f, TD_E_INVALID, "tools", "%zu are more than %u", n, MAX_TOOLS);
    struct td_chat_tool *tools = f->st == TD_OK ? td_arena_alloc(a, n, sizeof *tools) : NULL;
    if (tools == NULL) td_fields_no_memory(f);
    for (size_t i = 0; i < n && f->st == TD_OK; i++) read_tool(f, json_array_get(list, i), i, is_flat, &tools[i]);
    if (f->st == TD_OK) check_names_differ(f, tools, n);
    out->tools = tools;
    out->n_tools = f->st == TD_OK ? n : 0;
}

void td_chat_json_tools(struct td_fields *f, struct td_arena *a, bool is_flat, struct td_chat_conversation *out,
                        enum td_tool_choice *choice_out, const char **name_out)
{
    read_tools(f, a, is_flat, out);
    *choice_out = read_choice(f, is_flat, out, name_out);
    if (*choice_out == TD_TOOL_CHOICE_NONE) out->n_tools = 0;
}
