#include "common/text/chat_json.h"

#define MAX_MESSAGES 100000u
#define MAX_CALLS    4096u /* of all messages: each result looks for its own among them */

/* --- effort, content, format
 * ---------------------------------------------------------------------------------------------- */

void td_chat_json_effort(struct td_fields *f, const char *name, enum td_chat_effort *out)
{
    const char *word = "";
    if (!td_fields_str(f, name, &word)) return;
    if (word[0] == '\0' || !td_chat_effort_parse(word, out))
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

void td_chat_json_content(struct td_fields *f, struct td_arena *a, const char *name, const char *const *types,
                          const struct td_text **parts_out, size_t *n_out)
{
    const json_t *v = f->st == TD_OK ? td_fields_get(f, name) : NULL;
    if (v == NULL) return;
    if (!json_is_string(v) && !json_is_array(v)) {
        td_fields_fail(f, TD_E_INVALID, name, "must be a string or an array of parts");
        return;
    }
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    struct td_text *parts = td_arena_alloc(a, n + 1, sizeof *parts);
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

void td_chat_json_response_format(struct td_fields *f, struct td_arena *a, struct td_chat_response_format *out)
{
    const json_t *v, *inner, *schema;
    struct td_text type = {NULL, 0};
    if (!td_fields_object(f, "response_format", &v)) return;
    struct td_fields r = td_fields_open(v, f->err, "response_format");
    td_fields_text(&r, "type", &type);
    if (type.p == NULL) td_fields_fail(&r, TD_E_INVALID, "type", "must be given");
    if (td_text_is(type, "json_schema") && !td_fields_object(&r, "json_schema", &inner)) {
        td_fields_fail(&r, TD_E_INVALID, "json_schema", "must be given");
    } else if (td_text_is(type, "json_schema")) {
        struct td_fields s = td_fields_open(inner, f->err, "response_format.json_schema");
        td_fields_text(&s, "name", &out->name);
        td_fields_text(&s, "description", &out->description);
        if (!td_fields_object(&s, "schema", &schema)) td_fields_fail(&s, TD_E_INVALID, "schema", "must be given");
        size_t n = s.st == TD_OK ? json_dumpb(schema, NULL, 0, JSON_COMPACT) : 0;
        char *text = td_arena_alloc(a, n, 1);
        if (text == NULL)
            td_fields_no_memory(&s);
        else if (s.st == TD_OK)
            out->schema = (struct td_text){text, json_dumpb(schema, text, n, JSON_COMPACT)};
        r.st = s.st;
    }
    f->st = r.st;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

struct known_call {
    struct td_text id, name;
    size_t message;
};

struct reader {
    struct td_arena *arena;
    struct td_chat_message *messages;
    struct known_call *calls;
    size_t n_calls;
};

static const char *const text_types[] = {"text", NULL};
static const char *const assistant_types[] = {"text", "refusal", NULL};

/* {"id": .., "type": "function", "function": {"name": .., "arguments": ".."}} */
static void read_call(struct reader *rd, struct td_fields *f, const json_t *v, size_t index,
                      const struct td_chat_message *m, struct td_chat_call *out)
{
    struct known_call *known = &rd->calls[rd->n_calls++];
    known->message = (size_t)(m - rd->messages);
    struct td_fields c = td_fields_open(v, f->err, "%stool_calls[%zu]", f->path, index);
    struct td_text type = {"function", 8};
    td_fields_text(&c, "type", &type);
    if (!td_text_is(type, "function")) td_fields_fail(&c, TD_E_INVALID, "type", "must be \"function\"");
    if (!td_fields_text(&c, "id", &known->id)) td_fields_fail(&c, TD_E_INVALID, "id", "must be given");
    if (c.st == TD_OK)
        c = td_fields_open(json_object_get(v, "function"), f->err, "%stool_calls[%zu].function", f->path, index);
    const char *name = NULL;
    if (!td_fields_str(&c, "name", &name)) td_fields_fail(&c, TD_E_INVALID, "name", "must be given");
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
    struct td_chat_call *calls = td_arena_alloc(rd->arena, n + 1, sizeof *calls);
    if (calls == NULL) {
        td_fields_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n && f->st == TD_OK; i++) read_call(rd, f, json_array_get(list, i), i, m, &calls[i]);
    m->calls = calls;
    m->n_calls = f->st == TD_OK ? n : 0;
}

/* The latest call of that id before message i, else the first behind it. */
static const struct known_call *find_call(const struct reader *rd, struct td_text id, size_t i)
{
    const struct known_call *found = NULL;
    for (size_t k = 0; k < rd->n_calls; k++) {
        const struct known_call *c = &rd->calls[k];
        if (c->id.n != id.n || memcmp(c->id.p, id.p, id.n) != 0) continue;
        if (found != NULL && c->message >= i) break;
        found = c;
    }
    return found;
}

/* Once all calls are known. */
static void name_answers(struct reader *rd, struct td_fields *f, const json_t *list)
{
    for (size_t i = 0; i < json_array_size(list) && f->st == TD_OK; i++) {
        struct td_text id;
        if (rd->messages[i].role != TD_CHAT_TOOL) continue;
        struct td_fields e = td_fields_open(json_array_get(list, i), f->err, "messages[%zu]", i);
        if (!td_fields_text(&e, "tool_call_id", &id)) {
            td_fields_fail(&e, TD_E_INVALID, "tool_call_id", "must be given");
        } else {
            const struct known_call *c = find_call(rd, id, i);
            if (c == NULL) td_fields_fail(&e, TD_E_INVALID, "tool_call_id", "\"%.60s\" is the id of no call", id.p);
            if (c != NULL) rd->messages[i].name = c->name;
        }
        f->st = e.st;
    }
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
    td_chat_json_content(&e, rd->arena, "content", is_assistant ? assistant_types : text_types, &m->parts, &m->n_parts);
    if (is_assistant) {
        if (!td_fields_text(&e, "reasoning", &m->reasoning)) td_fields_text(&e, "reasoning_content", &m->reasoning);
        if (m->reasoning.n == 0) m->reasoning.p = NULL;
        read_calls(rd, &e, m);
    }
    if (m->parts != NULL && m->n_parts == 0 && !is_assistant)
        td_fields_fail(&e, TD_E_INVALID, "content", "must not be empty");
    /* An answer that is fed back may have had none: then it says null. */
    bool may_be_empty = is_assistant && json_object_get(v, "content") != NULL;
    if (m->parts == NULL && m->n_calls == 0 && m->reasoning.p == NULL && !may_be_empty)
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

void td_chat_json_messages(struct td_fields *f, struct td_arena *a, struct td_chat_conversation *out)
{
    const json_t *list;
    if (!td_fields_array(f, "messages", &list)) {
        td_fields_fail(f, TD_E_INVALID, "messages", "must be given");
        return;
    }
    size_t n = json_array_size(list);
    if (n == 0) td_fields_fail(f, TD_E_INVALID, "messages", "must not be empty");
    if (n > MAX_MESSAGES) td_fields_fail(f, TD_E_INVALID, "messages", "%zu are more than %u", n, MAX_MESSAGES);
    size_t n_calls = count_calls(list);
    if (n_calls > MAX_CALLS)
        td_fields_fail(f, TD_E_INVALID, "messages", "%zu tool calls are more than %u", n_calls, MAX_CALLS);
    if (f->st != TD_OK) return;
    struct reader rd = {.arena = a};
    rd.messages = td_arena_alloc(a, n, sizeof *rd.messages);
    rd.calls = td_arena_alloc(a, n_calls + 1, sizeof *rd.calls);
    if (rd.messages == NULL || rd.calls == NULL) {
        td_fields_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n && f->st == TD_OK; i++) read_message(&rd, f, json_array_get(list, i), i);
    name_answers(&rd, f, list);
    out->messages = rd.messages;
    out->n_messages = f->st == TD_OK ? n : 0;
}
