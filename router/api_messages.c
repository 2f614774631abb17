/* The messages of Chat Completions. A tool's answer names the call it answers by id; the function's name, which the
 * model sees, is looked up among all calls of the conversation. */
#include "router/api_int.h"

#define MAX_MESSAGES 100000u

struct known_call {
    struct td_text id, name;
};

struct reader {
    struct td_order *order;
    struct td_chat_message *messages;
    struct known_call *calls;
    size_t n_calls;
};

static const char *const text_types[] = {"text", NULL};
static const char *const assistant_types[] = {"text", "refusal", NULL};

/* {"id": .., "type": "function", "function": {"name": .., "arguments": ".."}} */
static void read_call(struct reader *rd, struct td_fields *f, const json_t *v, size_t index, struct td_chat_call *out)
{
    struct known_call *known = &rd->calls[rd->n_calls++];
    struct td_fields c = td_fields_open(v, f->err, "%stool_calls[%zu]", f->path, index);
    struct td_text type = {"function", 8};
    td_fields_text(&c, "type", &type);
    if (!td_text_is(type, "function")) td_fields_fail(&c, TD_E_INVALID, "type", "must be \"function\"");
    if (!td_fields_text(&c, "id", &known->id)) td_fields_fail(&c, TD_E_INVALID, "id", "must be given");
    if (c.st == TD_OK)
        c = td_fields_open(json_object_get(v, "function"), f->err, "%stool_calls[%zu].function", f->path, index);
    const char *name = NULL;
    if (!td_fields_str(&c, "name", &name) || name[0] == '\0') td_fields_fail(&c, TD_E_INVALID, "name", "must be given");
    if (!td_fields_text(&c, "arguments", &out->arguments))
        td_fields_fail(&c, TD_E_INVALID, "arguments", "must be given, as a string");
    f->st = c.st;
    if (f->st != TD_OK) return;
    out->name = known->name = (struct td_text){name, strlen(name)};
}

static void read_calls(struct reader *rd, struct td_fields *f, struct td_chat_message *m)
{
    const json_t *list;
    if (!td_fields_array(f, "tool_calls", &list)) return;
    size_t n = json_array_size(list);
    struct td_chat_call *calls = td_order_alloc(rd->order, n + 1, sizeof *calls);
    if (calls == NULL) {
        td_fields_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n && f->st == TD_OK; i++) read_call(rd, f, json_array_get(list, i), i, &calls[i]);
    m->calls = calls;
    m->n_calls = f->st == TD_OK ? n : 0;
}

static void read_tool_answer(struct reader *rd, struct td_fields *f, struct td_chat_message *m)
{
    struct td_text id;
    if (!td_fields_text(f, "tool_call_id", &id)) {
        td_fields_fail(f, TD_E_INVALID, "tool_call_id", "must be given");
        return;
    }
    for (size_t i = rd->n_calls; i-- > 0;) { /* the latest, should ids repeat */
        const struct known_call *k = &rd->calls[i];
        if (k->id.n != id.n || memcmp(k->id.p, id.p, id.n) != 0) continue;
        m->name = k->name;
        return;
    }
    td_fields_fail(f, TD_E_INVALID, "tool_call_id", "\"%.60s\" is the id of no call before this message", id.p);
}

static void read_message(struct reader *rd, struct td_fields *f, const json_t *v, size_t index)
{
    struct td_chat_message *m = &rd->messages[index];
    struct td_fields e = td_fields_open(v, f->err, "messages[%zu]", index);
    const char *role = "";
    if (!td_fields_str(&e, "role", &role))
        td_fields_fail(&e, TD_E_INVALID, "role", "must be given");
    else if (!td_chat_role_parse(role, &m->role))
        td_fields_fail(&e, TD_E_INVALID, "role", "\"%.40s\" is none of system, developer, user, assistant, tool", role);
    bool is_assistant = m->role == TD_CHAT_ASSISTANT;
    td_api_read_content(rd->order, &e, "content", is_assistant ? assistant_types : text_types, &m->parts, &m->n_parts);
    if (is_assistant) {
        if (!td_fields_text(&e, "reasoning", &m->reasoning)) td_fields_text(&e, "reasoning_content", &m->reasoning);
        if (m->reasoning.n == 0) m->reasoning.p = NULL;
        read_calls(rd, &e, m);
    }
    if (m->role == TD_CHAT_TOOL) read_tool_answer(rd, &e, m);
    if (m->parts == NULL && m->n_calls == 0 && m->reasoning.p == NULL)
        td_fields_fail(&e, TD_E_INVALID, "content", "must be given");
    f->st = e.st;
}

/* How many calls the conversation holds: their table does not grow while it is read. */
static size_t count_calls(const json_t *list)
{
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(list); i++)
        n += json_array_size(json_object_get(json_array_get(list, i), "tool_calls"));
    return n;
}

void td_api_read_messages(struct td_order *o, struct td_fields *f)
{
    const json_t *list;
    if (!td_fields_array(f, "messages", &list)) {
        td_fields_fail(f, TD_E_INVALID, "messages", "must be given");
        return;
    }
    size_t n = json_array_size(list);
    if (n == 0) td_fields_fail(f, TD_E_INVALID, "messages", "must not be empty");
    if (n > MAX_MESSAGES) td_fields_fail(f, TD_E_INVALID, "messages", "%zu are more than %u", n, MAX_MESSAGES);
    if (f->st != TD_OK) return;
    struct reader rd = {.order = o};
    rd.messages = td_order_alloc(o, n, sizeof *rd.messages);
    rd.calls = td_order_alloc(o, count_calls(list) + 1, sizeof *rd.calls);
    if (rd.messages == NULL || rd.calls == NULL) {
        td_fields_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n && f->st == TD_OK; i++) read_message(&rd, f, json_array_get(list, i), i);
    o->chat.messages = rd.messages;
    o->chat.n_messages = f->st == TD_OK ? n : 0;
}
