/* The input of Responses: a text, or items as earlier responses gave them, as messages of a conversation. Each item
 * becomes one message; a function's result finds its function among the calls before it. */
#include "common/text/chat_json.h"

#define MAX_ITEMS 100000u

struct reader {
    struct td_arena *arena;
    struct td_chat_message *messages;
    size_t n_messages;
    struct td_chat_call *calls; /* one per function_call; ids beside it */
    struct td_text *call_ids;
    size_t n_calls;
};

static const char *const part_types[] = {"input_text", "output_text", "text", NULL};
static const char *const assistant_part_types[] = {"output_text", "input_text", "text", "refusal", NULL};
static const char *const reasoning_types[] = {"reasoning_text", "text", NULL};

static struct td_chat_message *add(struct reader *rd, enum td_chat_role role)
{
    struct td_chat_message *m = &rd->messages[rd->n_messages++];
    m->role = role;
    return m;
}

static void read_message(struct reader *rd, struct td_fields *f)
{
    const char *name = "";
    enum td_chat_role role = TD_CHAT_USER;
    if (!td_fields_str(f, "role", &name))
        td_fields_fail(f, TD_E_INVALID, "role", "must be given");
    else if (!td_chat_role_parse(name, &role) || role == TD_CHAT_TOOL)
        td_fields_fail(f, TD_E_INVALID, "role", "\"%.40s\" is none of user, assistant, system, developer", name);
    struct td_chat_message *m = add(rd, role);
    td_chat_json_content(f, rd->arena, "content", role == TD_CHAT_ASSISTANT ? assistant_part_types : part_types,
                         &m->parts, &m->n_parts);
    if (m->parts == NULL) td_fields_fail(f, TD_E_INVALID, "content", "must be given");
}

/* The texts of a reasoning item, joined by line breaks. Without any it leaves no message. */
static void read_reasoning(struct reader *rd, struct td_fields *f)
{
    const struct td_text *parts = NULL;
    size_t n_parts = 0, n = 0;
    td_chat_json_content(f, rd->arena, "content", reasoning_types, &parts, &n_parts);
    for (size_t i = 0; i < n_parts; i++) n += parts[i].n + 1;
    if (f->st != TD_OK || n <= n_parts) return;
    char *text = td_arena_alloc(rd->arena, n, 1);
    if (text == NULL) {
        td_fields_no_memory(f);
        return;
    }
    n = 0;
    for (size_t i = 0; i < n_parts; i++) {
        if (i > 0) text[n++] = '\n';
        memcpy(text + n, parts[i].p, parts[i].n);
        n += parts[i].n;
    }
    add(rd, TD_CHAT_ASSISTANT)->reasoning = (struct td_text){text, n};
}

static void read_call(struct reader *rd, struct td_fields *f)
{
    struct td_chat_call *call = &rd->calls[rd->n_calls];
    if (!td_fields_text(f, "call_id", &rd->call_ids[rd->n_calls]))
        td_fields_fail(f, TD_E_INVALID, "call_id", "must be given");
    if (!td_fields_text(f, "name", &call->name)) td_fields_fail(f, TD_E_INVALID, "name", "must be given");
    if (!td_fields_text(f, "arguments", &call->arguments))
        td_fields_fail(f, TD_E_INVALID, "arguments", "must be given, as a string");
    rd->n_calls++;
    struct td_chat_message *m = add(rd, TD_CHAT_ASSISTANT);
    m->calls = call;
    m->n_calls = 1;
}

static void read_result(struct reader *rd, struct td_fields *f)
{
    struct td_text id = {NULL, 0};
    struct td_chat_message *m = add(rd, TD_CHAT_TOOL);
    if (!td_fields_text(f, "call_id", &id)) td_fields_fail(f, TD_E_INVALID, "call_id", "must be given");
    td_chat_json_content(f, rd->arena, "output", part_types, &m->parts, &m->n_parts);
    if (m->parts == NULL) td_fields_fail(f, TD_E_INVALID, "output", "must be given");
    if (f->st != TD_OK) return;
    for (size_t i = rd->n_calls; i-- > 0;) { /* the latest, should ids repeat */
        if (rd->call_ids[i].n != id.n || memcmp(rd->call_ids[i].p, id.p, id.n) != 0) continue;
        m->name = rd->calls[i].name;
        return;
    }
    td_fields_fail(f, TD_E_INVALID, "call_id", "\"%.60s\" is the id of no function_call before this item", id.p);
}

static void read_item(struct reader *rd, struct td_fields *f, const json_t *v, size_t index)
{
    static const struct {
        const char *type;
        void (*read)(struct reader *rd, struct td_fields *f);
    } kinds[] = {
        {"message", read_message},
        {"reasoning", read_reasoning},
        {"function_call", read_call},
        {"function_call_output", read_result},
    };
    struct td_fields item = td_fields_open(v, f->err, "input[%zu]", index);
    struct td_text type = {"message", 7};
    td_fields_text(&item, "type", &type);
    size_t k = 0;
    while (k < sizeof kinds / sizeof kinds[0] && !td_text_is(type, kinds[k].type)) k++;
    if (td_text_is(type, "item_reference"))
        td_fields_fail(&item, TD_E_UNIMPLEMENTED, "type",
                       "\"item_reference\" is not supported: nothing is stored here");
    else if (k == sizeof kinds / sizeof kinds[0])
        td_fields_fail(&item, TD_E_INVALID, "type",
                       "\"%.40s\" is none of message, reasoning, function_call, function_call_output", type.p);
    else if (item.st == TD_OK)
        kinds[k].read(rd, &item);
    f->st = item.st;
}

/* One message in front for the instructions, if there are any. */
static void read_instructions(struct reader *rd, struct td_fields *f)
{
    struct td_text text;
    if (!td_fields_text(f, "instructions", &text)) return;
    struct td_text *part = td_arena_alloc(rd->arena, 1, sizeof *part);
    if (part == NULL) {
        td_fields_no_memory(f);
        return;
    }
    *part = text;
    struct td_chat_message *m = add(rd, TD_CHAT_DEVELOPER);
    m->parts = part;
    m->n_parts = 1;
}

void td_chat_json_input(struct td_fields *f, struct td_arena *a, struct td_chat_conversation *out)
{
    const json_t *input = f->st == TD_OK ? td_fields_get(f, "input") : NULL;
    size_t n = json_is_array(input) ? json_array_size(input) : 1;
    if (input == NULL)
        td_fields_fail(f, TD_E_INVALID, "input", "must be given");
    else if (!json_is_string(input) && !json_is_array(input))
        td_fields_fail(f, TD_E_INVALID, "input", "must be a string or an array of items");
    else if (n == 0)
        td_fields_fail(f, TD_E_INVALID, "input", "must not be empty");
    else if (n > MAX_ITEMS)
        td_fields_fail(f, TD_E_INVALID, "input", "%zu items are more than %u", n, MAX_ITEMS);
    if (f->st != TD_OK) return;
    struct reader rd = {.arena = a};
    rd.messages = td_arena_alloc(a, n + 1, sizeof *rd.messages);
    rd.calls = td_arena_alloc(a, n, sizeof *rd.calls);
    rd.call_ids = td_arena_alloc(a, n, sizeof *rd.call_ids);
    if (rd.messages == NULL || rd.calls == NULL || rd.call_ids == NULL) {
        td_fields_no_memory(f);
        return;
    }
    read_instructions(&rd, f);
    if (json_is_string(input)) {
        struct td_chat_message *m = add(&rd, TD_CHAT_USER);
        td_chat_json_content(f, a, "input", part_types, &m->parts, &m->n_parts);
    }
    for (size_t i = 0; json_is_array(input) && i < n && f->st == TD_OK; i++)
        read_item(&rd, f, json_array_get(input, i), i);
    if (f->st == TD_OK && rd.n_messages == 0) td_fields_fail(f, TD_E_INVALID, "input", "holds no message");
    out->messages = rd.messages;
    out->n_messages = f->st == TD_OK ? rd.n_messages : 0;
}
