/* Harmony behind chat.h: maps a conversation to the format's own messages, as OpenAI's Chat Completions are mapped to
 * it. first system or developer message   the developer message's instructions user, tool                          as
 * they are assistant                           its reasoning on analysis, its content on final; with calls the content
 * is a preamble on commentary before the reasoning, then one message per call The system message is ours: identity,
 * dates, effort, channels. */
#include "common/text/harmony.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"

#define TEXT(literal) ((struct td_text){literal, sizeof literal - 1})

/* Of one text made here. A nested schema's indents can make 20 times its bytes, far more than any context holds. */
#define MAX_TEXT_BYTES (16u << 20)

static const struct td_text valid_channels[] = {TEXT("analysis"), TEXT("commentary"), TEXT("final")};

/* What a rendering needs to remember until the end: messages, and texts made on the way. */
struct mapping {
    struct td_harmony_message *messages;
    size_t n, cap;
    char **texts; /* owned */
    size_t n_texts, cap_texts;
    struct td_harmony_message nowhere; /* what add_message gives when memory is out */
    bool failed, is_too_large;
};

static void mapping_free(struct mapping *m)
{
    for (size_t i = 0; i < m->n_texts; i++) free(m->texts[i]);
    free(m->texts);
    free(m->messages);
}

/* One more element in an array; false on no memory. */
static bool grow(struct mapping *m, void *array_ptr, size_t *cap, size_t n, size_t size)
{
    void *array;
    if (n < *cap) return true;
    memcpy(&array, array_ptr, sizeof array);
    size_t more = *cap == 0 ? 16 : *cap * 2;
    void *p = td_realloc(array, more, size);
    if (p == NULL) {
        m->failed = true;
        return false;
    }
    memcpy(array_ptr, &p, sizeof p);
    *cap = more;
    return true;
}

/* Takes the buffer's memory. */
static struct td_text keep_text(struct mapping *m, struct td_buf *b)
{
    struct td_text none = {NULL, 0};
    if (b->failed) m->failed = true;
    if (b->n > MAX_TEXT_BYTES) m->is_too_large = true;
    if (m->failed || !grow(m, &m->texts, &m->cap_texts, m->n_texts, sizeof *m->texts)) {
        td_buf_free(b);
        return none;
    }
    struct td_text t = {td_buf_cstr(b), b->n};
    m->texts[m->n_texts++] = (char *)b->data;
    *b = (struct td_buf){0};
    return t;
}

static struct td_harmony_message *add_message(struct mapping *m, struct td_text author)
{
    if (m->failed || !grow(m, &m->messages, &m->cap, m->n, sizeof *m->messages)) return &m->nowhere;
    m->messages[m->n] = (struct td_harmony_message){.author = author};
    return &m->messages[m->n++];
}

static struct td_text join(struct mapping *m, const struct td_text *parts, size_t n)
{
    struct td_buf b = {0};
    for (size_t i = 0; i < n; i++) td_buf_put(&b, parts[i].p, parts[i].n);
    td_buf_cstr(&b);
    return keep_text(m, &b);
}

static bool is_empty(const struct td_text *parts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (parts[i].n > 0) return false;
    }
    return true;
}

static struct td_text with_prefix(struct mapping *m, const char *prefix, struct td_text name)
{
    struct td_buf b = {0};
    td_buf_str(&b, prefix);
    td_buf_put(&b, name.p, name.n);
    return keep_text(m, &b);
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

struct one_part {
    struct td_text text;
};

static void map_assistant(struct mapping *m, const struct td_chat_message *c)
{
    bool has_calls = c->n_calls > 0;
    for (unsigned pass = 0; pass < 2; pass++) {
        /* A preamble comes before the reasoning, an answer after it. */
        bool is_content = has_calls == (pass == 0);
        if (is_content && !is_empty(c->parts, c->n_parts)) {
            struct td_harmony_message *h = add_message(m, TEXT("assistant"));
            h->channel = has_calls ? TEXT("commentary") : TEXT("final");
            h->parts = c->parts;
            h->n_parts = c->n_parts;
        }
        if (!is_content && c->reasoning.n > 0) {
            struct td_harmony_message *h = add_message(m, TEXT("assistant"));
            h->channel = TEXT("analysis");
            h->parts = &c->reasoning;
            h->n_parts = 1;
        }
    }
    for (size_t i = 0; i < c->n_calls; i++) {
        struct td_text to = with_prefix(m, "functions.", c->calls[i].name);
        struct td_harmony_message *h = add_message(m, TEXT("assistant"));
        h->channel = TEXT("commentary");
        h->recipient = to;
        h->content_type = TEXT("json");
        h->parts = &c->calls[i].arguments;
        h->n_parts = 1;
    }
}

/* The text of parts[0] lives as long as the mapping. */
static void set_own_part(struct mapping *m, struct td_harmony_message *h, struct td_text text)
{
    struct one_part *p = td_calloc(1, sizeof *p);
    if (p == NULL || !grow(m, &m->texts, &m->cap_texts, m->n_texts, sizeof *m->texts)) {
        m->failed = true;
        free(p);
        return;
    }
    p->text = text;
    m->texts[m->n_texts++] = (char *)p;
    h->parts = &p->text;
    h->n_parts = 1;
}

static void map_developer(struct mapping *m, const struct td_harmony_developer *d)
{
    struct td_buf b = {0};
    td_harmony_developer_text(d, &b);
    struct td_text text = keep_text(m, &b);
    set_own_part(m, add_message(m, TEXT("developer")), text);
}

static enum td_status map_message(struct mapping *m, const struct td_chat_message *c, struct td_err *err)
{
    switch (c->role) {
    case TD_CHAT_SYSTEM:
    case TD_CHAT_DEVELOPER:
        if (!is_empty(c->parts, c->n_parts)) {
            struct td_harmony_developer d = {.instructions = join(m, c->parts, c->n_parts)};
            map_developer(m, &d);
        }
        return TD_OK;
    case TD_CHAT_USER: {
        struct td_harmony_message *h = add_message(m, TEXT("user"));
        h->name = c->name;
        h->parts = c->parts;
        h->n_parts = c->n_parts;
        return TD_OK;
    }
    case TD_CHAT_ASSISTANT: map_assistant(m, c); return TD_OK;
    case TD_CHAT_TOOL: {
        if (c->name.n == 0) return td_err_set(err, TD_E_INVALID, "a tool message must name its function");
        struct td_text author = with_prefix(m, "functions.", c->name);
        struct td_text text = join(m, c->parts, c->n_parts); /* before add_message: arrays may move */
        struct td_harmony_message *h = add_message(m, author);
        h->recipient = TEXT("assistant");
        h->channel = TEXT("commentary");
        set_own_part(m, h, text);
        return TD_OK;
    }
    }
    return td_err_set(err, TD_E_INVALID, "unknown role");
}

static void map_frame(struct mapping *m, const struct td_chat_conversation *c, bool takes_first)
{
    static const struct td_text efforts[] = {TEXT("medium"), TEXT("low"), TEXT("high")};
    struct td_harmony_system s = {.identity = TEXT("You are ChatGPT, a large language model trained by OpenAI."),
                                  .cutoff = TEXT("2024-06"),
                                  .effort = efforts[c->effort],
                                  .channels = valid_channels,
                                  .n_channels = TD_COUNT(valid_channels),
                                  .channel_required = true,
                                  .has_functions = c->n_tools > 0};
    if (c->current_date != NULL && *c->current_date != '\0')
        s.date = (struct td_text){c->current_date, strlen(c->current_date)};
    struct td_buf b = {0};
    td_harmony_system_text(&s, &b);
    struct td_text text = keep_text(m, &b);
    set_own_part(m, add_message(m, TEXT("system")), text);

    struct td_harmony_namespace functions = {.name = TEXT("functions"), .tools = c->tools, .n_tools = c->n_tools};
    struct td_harmony_developer d = {
        .tools = &functions, .n_tools = c->n_tools > 0, .response_format = c->response_format};
    const struct td_chat_message *first = &c->messages[0];
    if (takes_first && !is_empty(first->parts, first->n_parts)) d.instructions = join(m, first->parts, first->n_parts);
    if (d.instructions.p != NULL || d.n_tools > 0 || d.response_format.schema.p != NULL) map_developer(m, &d);
}

static enum td_status render(const struct td_chat_format *f, const struct td_chat_conversation *c,
                             struct td_token_list *out, struct td_err *err)
{
    struct mapping m = {0};
    enum td_status st = TD_OK;
    bool takes_first =
        c->n_messages > 0 && (c->messages[0].role == TD_CHAT_SYSTEM || c->messages[0].role == TD_CHAT_DEVELOPER);
    map_frame(&m, c, takes_first);
    for (size_t i = takes_first; i < c->n_messages && st == TD_OK; i++) {
        st = map_message(&m, &c->messages[i], err);
        if (st != TD_OK) td_err_prefix(err, st, "messages[%zu]", i);
    }
    if (st == TD_OK && m.failed) st = td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    if (st == TD_OK && m.is_too_large)
        st = td_err_set(err, TD_E_TOO_LARGE, "tools: instructions and tools make more than %u bytes", MAX_TEXT_BYTES);
    const struct td_harmony *h = TD_CONTAINER_OF(f, const struct td_harmony, format);
    if (st == TD_OK)
        st = td_harmony_render(h, m.messages, m.n, TD_HARMONY_COMPLETION,
                               c->keep_reasoning ? TD_HARMONY_DROP_NONE : TD_HARMONY_DROP_FINISHED, out, err);
    mapping_free(&m);
    return st;
}

/* As models write it: the channel first, and with a name all of the header. Without one the header ends before the dot,
 * which belongs to the name's first token. */
static enum td_status force_call(const struct td_chat_format *f, const char *name, struct td_token_list *out,
                                 struct td_err *err)
{
    const struct td_harmony *h = TD_CONTAINER_OF(f, const struct td_harmony, format);
    struct td_buf to = {0};
    td_buf_printf(&to, " to=functions%s%s", name != NULL ? "." : "", name != NULL ? name : "");
    if (name != NULL) td_buf_str(&to, " ");
    enum td_status st = to.failed ? td_err_set(err, TD_E_NO_MEMORY, "out of memory") : TD_OK;
    td_token_list_push(out, h->ids[TD_HARMONY_CHANNEL]);
    if (st == TD_OK) st = td_tokenizer_encode(f->tokenizer, "commentary", 10, TD_TEXT_ORDINARY, out, err);
    if (st == TD_OK) st = td_tokenizer_encode(f->tokenizer, (char *)to.data, to.n, TD_TEXT_ORDINARY, out, err);
    if (st == TD_OK && name != NULL) {
        td_token_list_push(out, h->ids[TD_HARMONY_CONSTRAIN]);
        st = td_tokenizer_encode(f->tokenizer, "json", 4, TD_TEXT_ORDINARY, out, err);
        td_token_list_push(out, h->ids[TD_HARMONY_MESSAGE]);
    }
    td_buf_free(&to);
    return st;
}

/* --- the format ----------------------------------------------------------------------------------------------------
 */

static void destroy(struct td_chat_format *f) { free(TD_CONTAINER_OF(f, struct td_harmony, format)); }

enum td_status td_harmony_create(const struct td_tokenizer *t, struct td_chat_format **out, struct td_err *err)
{
    static const char *const names[TD_HARMONY_N_TOKENS] = {
        [TD_HARMONY_START] = "<|start|>",
        [TD_HARMONY_CHANNEL] = "<|channel|>",
        [TD_HARMONY_CONSTRAIN] = "<|constrain|>",
        [TD_HARMONY_MESSAGE] = "<|message|>",
        [TD_HARMONY_END] = "<|end|>",
        [TD_HARMONY_RETURN] = "<|return|>",
        [TD_HARMONY_CALL] = "<|call|>",
    };
    struct td_harmony *h = td_calloc(1, sizeof *h);
    if (h == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    h->format = (struct td_chat_format){.name = "harmony",
                                        .tokenizer = t,
                                        .render = render,
                                        .parser_create = td_harmony_parser_create,
                                        .force_call = force_call,
                                        .destroy = destroy};
    for (size_t i = 0; i < TD_HARMONY_N_TOKENS; i++) {
        h->ids[i] = td_tokenizer_special(t, names[i]);
        if (h->ids[i] != TD_NO_TOKEN) continue;
        free(h);
        return td_err_set(err, TD_E_BAD_CONFIG, "chat format harmony: the vocabulary has no %s", names[i]);
    }
    *out = &h->format;
    return TD_OK;
}
