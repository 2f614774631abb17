#include "common/text/conversation.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

void td_conversation_deinit(struct td_conversation *c)
{
    for (size_t i = 0; i < c->n_blocks; i++) free(c->blocks[i]);
    free(c->blocks);
    free(c->messages);
    free(c->tools);
    free(c->calls);
    json_decref(c->document);
    *c = (struct td_conversation){0};
}

void td_conversation_keep(struct td_conversation *c, struct json_t *document)
{
    json_decref(c->document);
    c->document = json_incref(document);
}

/* Room for one more; NULL on no memory, array then stays what it was. */
static void *grow(struct td_conversation *c, void *array, size_t n, size_t *cap, size_t size)
{
    if (n < *cap) return array;
    size_t more = *cap == 0 ? 8 : *cap * 2;
    void *p = td_realloc(array, more, size);
    if (p == NULL)
        c->failed = true;
    else
        *cap = more;
    return p;
}

bool td_conversation_own(struct td_conversation *c, void *p)
{
    void **list = grow(c, c->blocks, c->n_blocks, &c->cap_blocks, sizeof *list);
    if (list == NULL) {
        free(p);
        return false;
    }
    c->blocks = list;
    c->blocks[c->n_blocks++] = p;
    return true;
}

static void *block(struct td_conversation *c, size_t n, size_t size)
{
    void *p = td_calloc(n > 0 ? n : 1, size);
    if (p == NULL) c->failed = true;
    return p != NULL && td_conversation_own(c, p) ? p : NULL;
}

struct td_chat_message *td_conversation_add(struct td_conversation *c, enum td_chat_role role)
{
    struct td_chat_message *list = grow(c, c->messages, c->n_messages, &c->cap_messages, sizeof *list);
    struct td_chat_message *m = &c->spare;
    if (list != NULL) {
        c->messages = list;
        m = &list[c->n_messages++];
    }
    *m = (struct td_chat_message){.role = role};
    return m;
}

struct td_text *td_conversation_parts(struct td_conversation *c, struct td_chat_message *m, size_t n)
{
    struct td_text *parts = block(c, n, sizeof *parts);
    m->parts = parts;
    m->n_parts = parts == NULL ? 0 : n;
    return parts;
}

void td_conversation_set_text(struct td_conversation *c, struct td_chat_message *m, struct td_text text)
{
    struct td_text *parts = td_conversation_parts(c, m, 1);
    if (parts != NULL) parts[0] = text;
}

void td_conversation_add_call(struct td_conversation *c, struct td_chat_message *m, struct td_text id,
                              struct td_text name, struct td_text arguments)
{
    /* Lists are doubled; an outgrown one stays in blocks until the end. */
    if ((m->n_calls & (m->n_calls - 1)) == 0) {
        struct td_chat_call *more = block(c, m->n_calls == 0 ? 1 : m->n_calls * 2, sizeof *more);
        if (more == NULL) return;
        if (m->n_calls > 0) memcpy(more, m->calls, m->n_calls * sizeof *more);
        m->calls = more;
    }
    ((struct td_chat_call *)m->calls)[m->n_calls++] = (struct td_chat_call){.name = name, .arguments = arguments};
    struct td_conversation_call *list = grow(c, c->calls, c->n_calls, &c->cap_calls, sizeof *list);
    if (list == NULL) return;
    c->calls = list;
    list[c->n_calls++] = (struct td_conversation_call){.id = id, .name = name, .message = c->n_messages - 1};
}

static bool is_same(struct td_text a, struct td_text b) { return a.n == b.n && memcmp(a.p, b.p, a.n) == 0; }

bool td_conversation_find_call(const struct td_conversation *c, struct td_text id, size_t before,
                               struct td_text *name_out)
{
    const struct td_conversation_call *found = NULL;
    for (size_t i = 0; i < c->n_calls; i++) {
        const struct td_conversation_call *k = &c->calls[i];
        if (k->id.p == NULL || !is_same(k->id, id)) continue;
        if (found != NULL && k->message >= before) break;
        found = k;
    }
    if (found != NULL) *name_out = found->name;
    return found != NULL;
}

/* --- tools -------------------------------------------------------------------------------------------------------- */

static bool is_deeper(const json_t *v, unsigned levels)
{
    if (!json_is_object(v) && !json_is_array(v)) return false;
    if (levels == 0) return true;
    const char *key;
    json_t *child;
    size_t i;
    if (json_is_array(v)) {
        json_array_foreach (v, i, child)
            if (is_deeper(child, levels - 1)) return true;
    } else {
        json_object_foreach ((json_t *)v, key, child)
            if (is_deeper(child, levels - 1)) return true;
    }
    return false;
}

bool td_conversation_has_tool(const struct td_conversation *c, struct td_text name)
{
    for (size_t i = 0; i < c->n_tools; i++)
        if (is_same(c->tools[i].name, name)) return true;
    return false;
}

enum td_status td_conversation_add_tool(struct td_conversation *c, const char *path, struct td_text name,
                                        struct td_text description, const struct json_t *parameters, struct td_err *err)
{
    if (!td_chat_is_tool_name(name))
        return td_err_set(err, TD_E_INVALID, "%s.name: must be 1 to %u letters, digits, underscores or dashes", path,
                          TD_CHAT_TOOL_NAME_MAX);
    if (td_conversation_has_tool(c, name))
        return td_err_set(err, TD_E_INVALID, "%s.name: \"%.*s\" is declared twice", path, (int)name.n, name.p);
    if (json_is_null(parameters)) parameters = NULL;
    if (parameters != NULL && !json_is_object(parameters))
        return td_err_set(err, TD_E_INVALID, "%s.parameters: must be an object", path);
    if (is_deeper(parameters, TD_SCHEMA_MAX_DEPTH))
        return td_err_set(err, TD_E_INVALID, "%s.parameters: nested deeper than %u levels", path, TD_SCHEMA_MAX_DEPTH);
    struct td_chat_tool *list = grow(c, c->tools, c->n_tools, &c->cap_tools, sizeof *list);
    if (list == NULL) return TD_OK; /* td_conversation_end says so */
    c->tools = list;
    list[c->n_tools++] = (struct td_chat_tool){.name = name, .description = description, .parameters = parameters};
    return TD_OK;
}

enum td_status td_conversation_end(struct td_conversation *c, struct td_err *err)
{
    if (c->failed) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the conversation");
    c->chat.messages = c->messages;
    c->chat.n_messages = c->n_messages;
    c->chat.tools = c->tools;
    c->chat.n_tools = c->n_tools;
    return TD_OK;
}
