#include "tests/unit/common/text/text_cases.h"

#include "common/base/fault.h"
#include "common/text/chat.h"
#include "common/text/harmony.h"
#include "common/text/utf8.h"

static struct td_tokenizer *tiny;
static struct td_chat_format *tiny_format, *released_format; /* the latter NULL without the released vocabulary */
static json_t *cases;

static const struct td_harmony *harmony_of(const struct td_chat_format *f)
{
    return TD_CONTAINER_OF(f, const struct td_harmony, format);
}

static struct td_text text_of(const json_t *v)
{
    if (!json_is_string(v)) return (struct td_text){NULL, 0};
    return (struct td_text){json_string_value(v), json_string_length(v)};
}

static void assert_text(const struct td_tokenizer *t, const struct td_token_list *ids, const json_t *expected,
                        const char *name)
{
    struct td_buf got = {0};
    td_tokenizer_decode(t, ids->ids, ids->n, true, &got);
    if (strcmp(td_buf_cstr(&got), json_string_value(expected)) != 0)
        fail_msg("%s:\n--- got\n%s\n--- expected\n%s", name, td_buf_cstr(&got), json_string_value(expected));
    td_buf_free(&got);
}

/* --- rendering ---------------------------------------------------------------------------------------------------- */

#define MAX 16
struct rendering {
    struct td_harmony_message messages[MAX];
    struct td_text parts[MAX][MAX];
    struct td_buf texts[MAX];
    struct td_harmony_namespace namespaces[MAX];
    struct td_chat_tool tools[MAX][MAX];
    struct td_text channels[MAX];
    char effort[16];
};

static size_t read_namespaces(struct rendering *r, const json_t *tools)
{
    size_t n = 0;
    for (void *it = json_object_iter((json_t *)tools); it != NULL; it = json_object_iter_next((json_t *)tools, it)) {
        const json_t *v = json_object_iter_value(it), *list = json_object_get(v, "tools");
        struct td_harmony_namespace *ns = &r->namespaces[n];
        *ns = (struct td_harmony_namespace){.name = text_of(json_object_get(v, "name")),
                                            .description = text_of(json_object_get(v, "description")),
                                            .tools = r->tools[n],
                                            .n_tools = json_array_size(list)};
        for (size_t i = 0; i < ns->n_tools; i++) {
            const json_t *t = json_array_get(list, i);
            r->tools[n][i] = (struct td_chat_tool){.name = text_of(json_object_get(t, "name")),
                                                   .description = text_of(json_object_get(t, "description")),
                                                   .parameters = json_object_get(t, "parameters")};
        }
        n++;
    }
    return n;
}

static bool declares_functions(const json_t *messages)
{
    size_t i;
    json_t *m;
    json_array_foreach (messages, i, m) {
        const json_t *content = json_array_get(json_object_get(m, "content"), 0);
        const json_t *functions = json_object_get(json_object_get(content, "tools"), "functions");
        bool is_developer = strcmp(json_string_value(json_object_get(m, "role")), "developer") == 0;
        if (is_developer && json_array_size(json_object_get(functions, "tools")) > 0) return true;
    }
    return false;
}

static void render_special_content(struct rendering *r, const json_t *content, bool has_functions, struct td_buf *out)
{
    size_t n = read_namespaces(r, json_object_get(content, "tools"));
    if (strcmp(json_string_value(json_object_get(content, "type")), "developer_content") == 0) {
        struct td_harmony_developer d = {
            .instructions = text_of(json_object_get(content, "instructions")), .tools = r->namespaces, .n_tools = n};
        td_harmony_developer_text(&d, out);
        return;
    }
    const json_t *config = json_object_get(content, "channel_config"),
                 *channels = json_object_get(config, "valid_channels");
    struct td_harmony_system s = {.identity = text_of(json_object_get(content, "model_identity")),
                                  .cutoff = text_of(json_object_get(content, "knowledge_cutoff")),
                                  .date = text_of(json_object_get(content, "conversation_start_date")),
                                  .effort = text_of(json_object_get(content, "reasoning_effort")),
                                  .channels = r->channels,
                                  .n_channels = json_array_size(channels),
                                  .channel_required = json_is_true(json_object_get(config, "channel_required")),
                                  .tools = r->namespaces,
                                  .n_tools = n,
                                  .has_functions = has_functions};
    for (size_t i = 0; i < s.n_channels; i++) r->channels[i] = text_of(json_array_get(channels, i));
    if (s.effort.p != NULL) {
        snprintf(r->effort, sizeof r->effort, "%s", s.effort.p);
        r->effort[0] = (char)(r->effort[0] | 0x20);
        s.effort.p = r->effort;
    }
    td_harmony_system_text(&s, out);
}

static void read_message(struct rendering *r, size_t i, const json_t *m, bool has_functions)
{
    struct td_harmony_message *h = &r->messages[i];
    const json_t *content = json_object_get(m, "content");
    bool is_tool = strcmp(json_string_value(json_object_get(m, "role")), "tool") == 0;
    *h = (struct td_harmony_message){.author = text_of(json_object_get(m, is_tool ? "name" : "role")),
                                     .name = text_of(is_tool ? NULL : json_object_get(m, "name")),
                                     .recipient = text_of(json_object_get(m, "recipient")),
                                     .channel = text_of(json_object_get(m, "channel")),
                                     .content_type = text_of(json_object_get(m, "content_type")),
                                     .parts = r->parts[i],
                                     .n_parts = json_is_string(content) ? 1 : json_array_size(content)};
    if (json_is_string(content)) r->parts[i][0] = text_of(content);
    for (size_t k = 0; k < json_array_size(content); k++) {
        const json_t *part = json_array_get(content, k);
        if (strcmp(json_string_value(json_object_get(part, "type")), "text") == 0) {
            r->parts[i][k] = text_of(json_object_get(part, "text"));
            continue;
        }
        render_special_content(r, part, has_functions, &r->texts[i]);
        r->parts[i][k] = (struct td_text){td_buf_cstr(&r->texts[i]), r->texts[i].n};
    }
}

static void check_render_case(const struct td_chat_format *f, const json_t *c, bool has_ids)
{
    struct rendering *r = calloc(1, sizeof *r);
    assert_non_null(r);
    const json_t *messages = json_object_get(c, "messages");
    const char *mode = json_string_value(json_object_get(c, "mode")),
               *name = json_string_value(json_object_get(c, "name"));
    size_t n = json_array_size(messages);
    assert_true(n <= MAX);
    for (size_t i = 0; i < n; i++) read_message(r, i, json_array_get(messages, i), declares_functions(messages));
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    enum td_harmony_mode how = strcmp(mode, "completion") == 0     ? TD_HARMONY_COMPLETION
                               : strcmp(mode, "conversation") == 0 ? TD_HARMONY_CONVERSATION
                                                                   : TD_HARMONY_TRAINING;
    enum td_harmony_drop drop =
        json_is_true(json_object_get(c, "auto_drop")) ? TD_HARMONY_DROP_FIRST : TD_HARMONY_DROP_NONE;
    if (td_harmony_render(harmony_of(f), r->messages, n, how, drop, &ids, &err) != TD_OK)
        fail_msg("%s: %s", name, err.text);
    assert_text(f->tokenizer, &ids, json_object_get(c, "text"), name);
    if (has_ids) assert_ids(&ids, json_object_get(c, "ids"), name);
    for (size_t i = 0; i < n; i++) td_buf_free(&r->texts[i]);
    td_token_list_free(&ids);
    free(r);
}

static void messages_are_rendered_as_the_reference_renders_them(void **state)
{
    (void)state;
    size_t i;
    json_t *c;
    assert_true(json_array_size(json_object_get(cases, "render")) > 20);
    json_array_foreach (json_object_get(cases, "render"), i, c) {
        check_render_case(tiny_format, c, false);
        if (released_format != NULL) check_render_case(released_format, c, true);
    }
}

/* --- conversations ------------------------------------------------------------------------------------------------ */

struct talk {
    struct td_chat_message messages[MAX];
    struct td_text parts[MAX][MAX];
    struct td_chat_call calls[MAX][MAX];
    struct td_chat_tool tools[MAX];
    const char *call_ids[MAX * MAX];
    struct td_text call_names[MAX * MAX];
    size_t n_calls;
    struct td_chat_conversation c;
};

static void read_chat_message(struct talk *t, size_t i, const json_t *m)
{
    struct td_chat_message *out = &t->messages[i];
    const json_t *content = json_object_get(m, "content"), *calls = json_object_get(m, "tool_calls");
    assert_true(td_chat_role_parse(json_string_value(json_object_get(m, "role")), &out->role));
    out->parts = t->parts[i];
    if (json_is_string(content)) {
        t->parts[i][0] = text_of(content);
        out->n_parts = 1;
    } else {
        out->n_parts = json_array_size(content);
        for (size_t k = 0; k < out->n_parts; k++)
            t->parts[i][k] = text_of(json_object_get(json_array_get(content, k), "text"));
    }
    out->reasoning = text_of(json_object_get(m, "reasoning"));
    if (out->reasoning.p == NULL) out->reasoning = text_of(json_object_get(m, "reasoning_content"));
    out->calls = t->calls[i];
    out->n_calls = json_array_size(calls);
    for (size_t k = 0; k < out->n_calls; k++) {
        const json_t *call = json_array_get(calls, k), *f = json_object_get(call, "function");
        t->calls[i][k] =
            (struct td_chat_call){text_of(json_object_get(f, "name")), text_of(json_object_get(f, "arguments"))};
        t->call_ids[t->n_calls] = json_string_value(json_object_get(call, "id"));
        t->call_names[t->n_calls++] = t->calls[i][k].name;
    }
    const char *answers = json_string_value(json_object_get(m, "tool_call_id"));
    for (size_t k = 0; answers != NULL && k < t->n_calls; k++) {
        if (strcmp(t->call_ids[k], answers) == 0) out->name = t->call_names[k];
    }
}

static void check_chat_case(const struct td_chat_format *f, const json_t *c, bool has_ids)
{
    struct talk *t = calloc(1, sizeof *t);
    assert_non_null(t);
    const json_t *request = json_object_get(c, "request"), *messages = json_object_get(request, "messages");
    const json_t *tools = json_object_get(request, "tools"), *choice = json_object_get(request, "tool_choice");
    const char *name = json_string_value(json_object_get(c, "name"));
    const char *effort = json_string_value(json_object_get(request, "reasoning_effort"));
    t->c = (struct td_chat_conversation){.messages = t->messages,
                                         .n_messages = json_array_size(messages),
                                         .tools = t->tools,
                                         .current_date = json_string_value(json_object_get(c, "date"))};
    assert_true(td_chat_effort_parse(effort == NULL ? "" : effort, &t->c.effort));
    for (size_t i = 0; i < t->c.n_messages; i++) read_chat_message(t, i, json_array_get(messages, i));
    if (!(json_is_string(choice) && strcmp(json_string_value(choice), "none") == 0))
        t->c.n_tools = json_array_size(tools);
    for (size_t i = 0; i < t->c.n_tools; i++) {
        const json_t *fn = json_object_get(json_array_get(tools, i), "function");
        t->tools[i] = (struct td_chat_tool){.name = text_of(json_object_get(fn, "name")),
                                            .description = text_of(json_object_get(fn, "description")),
                                            .parameters = json_object_get(fn, "parameters")};
    }
    const json_t *format = json_object_get(json_object_get(request, "response_format"), "json_schema");
    char *schema = NULL;
    if (format != NULL) {
        schema = json_dumps(json_object_get(format, "schema"), JSON_COMPACT);
        t->c.response_format.name = text_of(json_object_get(format, "name"));
        t->c.response_format.description = text_of(json_object_get(format, "description"));
        t->c.response_format.schema = (struct td_text){schema, strlen(schema)};
    }
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    if (f->render(f, &t->c, &ids, &err) != TD_OK) fail_msg("%s: %s", name, err.text);
    assert_text(f->tokenizer, &ids, json_object_get(c, "text"), name);
    if (has_ids) assert_ids(&ids, json_object_get(c, "ids"), name);
    td_token_list_free(&ids);
    free(schema);
    free(t);
}

static void conversations_become_the_prompts_that_the_model_knows(void **state)
{
    (void)state;
    size_t i;
    json_t *c;
    assert_true(json_array_size(json_object_get(cases, "chat")) > 5);
    json_array_foreach (json_object_get(cases, "chat"), i, c) {
        check_chat_case(tiny_format, c, false);
        if (released_format != NULL) check_chat_case(released_format, c, true);
    }
}

static void reasoning_of_finished_turns_goes_unless_kept(void **state)
{
    (void)state;
    struct td_text t[] = {{"q1", 2}, {"a1", 2}, {"q2", 2}, {"a2", 2}, {"q3", 2}, {"{}", 2}};
    struct td_text r[] = {{"old one", 7}, {"old two", 7}, {"going on", 8}};
    struct td_chat_call call = {{"f", 1}, {"{}", 2}};
    struct td_chat_message messages[] = {
        {.role = TD_CHAT_USER, .parts = &t[0], .n_parts = 1},
        {.role = TD_CHAT_ASSISTANT, .parts = &t[1], .n_parts = 1, .reasoning = r[0]},
        {.role = TD_CHAT_USER, .parts = &t[2], .n_parts = 1},
        {.role = TD_CHAT_ASSISTANT, .parts = &t[3], .n_parts = 1, .reasoning = r[1]},
        {.role = TD_CHAT_USER, .parts = &t[4], .n_parts = 1},
        {.role = TD_CHAT_ASSISTANT, .reasoning = r[2], .calls = &call, .n_calls = 1},
        {.role = TD_CHAT_TOOL, .parts = &t[5], .n_parts = 1, .name = call.name},
    };
    struct td_chat_conversation c = {.messages = messages, .n_messages = TD_COUNT(messages)};
    for (unsigned kept = 0; kept < 2; kept++) {
        struct td_token_list ids = {0};
        struct td_buf text = {0};
        c.keep_reasoning = kept == 1;
        assert_int_equal(tiny_format->render(tiny_format, &c, &ids, NULL), TD_OK);
        td_tokenizer_decode(tiny, ids.ids, ids.n, true, &text);
        assert_true((strstr(td_buf_cstr(&text), "old one") != NULL) == c.keep_reasoning);
        assert_true((strstr(td_buf_cstr(&text), "old two") != NULL) == c.keep_reasoning);
        assert_non_null(strstr(td_buf_cstr(&text), "going on"));
        assert_non_null(
            strstr(td_buf_cstr(&text), "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"));
        td_buf_free(&text);
        td_token_list_free(&ids);
    }
}

static void a_bad_conversation_is_refused_with_the_message_and_adds_nothing(void **state)
{
    (void)state;
    struct td_text part = {"ok", 2}, bad = {"\xff", 1};
    struct td_chat_message messages[] = {
        {.role = TD_CHAT_USER, .parts = &part, .n_parts = 1},
        {.role = TD_CHAT_TOOL, .parts = &part, .n_parts = 1},
    };
    struct td_chat_conversation c = {.messages = messages, .n_messages = 2};
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    assert_int_equal(tiny_format->render(tiny_format, &c, &ids, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "messages[1]"));
    messages[1] = (struct td_chat_message){.role = TD_CHAT_USER, .parts = &bad, .n_parts = 1};
    assert_int_equal(tiny_format->render(tiny_format, &c, &ids, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "user"));
    assert_int_equal(ids.n, 0);
    td_token_list_free(&ids);
}

/* --- parsing ------------------------------------------------------------------------------------------------------ */

/* Events, checked for order, gathered as the cases file has them. */
struct gathered {
    json_t *messages, *stream;
    struct td_buf reasoning, content;
    bool is_open, is_over;
    uint32_t n_started, n_hidden, n_calls;
    struct td_chat_event now;
    struct td_buf body;
    char *recipient, *channel, *content_type;
};

static json_t *string_or_null(const char *s) { return s == NULL ? json_null() : json_string(s); }

static bool same(const char *a, const char *b) { return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0); }

static void add_to_stream(struct gathered *g, const char *kind, const struct td_chat_event *e)
{
    json_t *last = json_array_get(g->stream, json_array_size(g->stream) - 1);
    bool is_call = e->kind == TD_CHAT_CALL;
    bool joins = last != NULL && strcmp(json_string_value(json_object_get(last, "kind")), kind) == 0;
    if (is_call) joins = joins && json_integer_value(json_object_get(last, "index")) == (json_int_t)e->call;
    struct td_buf text = {0};
    if (joins) td_buf_str(&text, json_string_value(json_object_get(last, "text")));
    if (e->starts_line) td_buf_str(&text, "\n");
    td_buf_put(&text, e->text.p, e->text.n);
    if (!joins) {
        last = json_object();
        json_object_set_new(last, "kind", json_string(kind));
        if (is_call) json_object_set_new(last, "index", json_integer(e->call));
        json_array_append_new(g->stream, last);
    }
    json_object_set_new(last, "text", json_stringn((char *)text.data, text.n));
    td_buf_free(&text);
}

static void on_event(void *user, const struct td_chat_event *e)
{
    struct gathered *g = user;
    assert_false(g->is_over);
    switch (e->type) {
    case TD_CHAT_MESSAGE_START:
        assert_false(g->is_open);
        assert_int_equal(e->message, g->n_started);
        g->n_started++;
        g->is_open = true;
        g->now = *e;
        g->recipient = e->recipient == NULL ? NULL : strdup(e->recipient);
        g->channel = e->channel == NULL ? NULL : strdup(e->channel);
        g->content_type = e->content_type == NULL ? NULL : strdup(e->content_type);
        td_buf_clear(&g->body);
        if (e->kind == TD_CHAT_HIDDEN) g->n_hidden++;
        if (e->kind == TD_CHAT_CALL) assert_int_equal(e->call, g->n_calls++);
        if (e->kind == TD_CHAT_CALL) assert_non_null(e->function);
        return;
    case TD_CHAT_TEXT:
        assert_true(g->is_open && e->kind == g->now.kind && e->text.n > 0);
        assert_true(td_utf8_is_valid(e->text.p, e->text.n));
        assert_true(same(e->recipient, g->recipient) && same(e->channel, g->channel));
        td_buf_put(&g->body, e->text.p, e->text.n);
        struct td_buf *whole = e->kind == TD_CHAT_REASONING                                ? &g->reasoning
                               : e->kind == TD_CHAT_CONTENT || e->kind == TD_CHAT_PREAMBLE ? &g->content
                                                                                           : NULL;
        if (e->starts_line) assert_true(whole != NULL && whole->n > 0);
        if (whole != NULL && e->starts_line) td_buf_str(whole, "\n");
        if (whole != NULL) td_buf_put(whole, e->text.p, e->text.n);
        if (e->kind == TD_CHAT_CALL)
            add_to_stream(g, "tool", e);
        else if (whole != NULL)
            add_to_stream(g, whole == &g->reasoning ? "reasoning" : "content", e);
        return;
    case TD_CHAT_MESSAGE_END:
        assert_true(g->is_open && e->kind == g->now.kind);
        assert_true(same(e->recipient, g->recipient) && same(e->channel, g->channel));
        g->is_open = false;
        if (e->kind != TD_CHAT_HIDDEN) {
            json_t *m = json_object();
            json_object_set_new(m, "channel", string_or_null(g->channel));
            json_object_set_new(m, "recipient", string_or_null(g->recipient));
            json_object_set_new(m, "content_type", string_or_null(g->content_type));
            json_object_set_new(m, "content", json_stringn(td_buf_cstr(&g->body), g->body.n));
            json_object_set_new(m, "complete", json_boolean(e->is_complete));
            json_array_append_new(g->messages, m);
        }
        free(g->recipient);
        free(g->channel);
        free(g->content_type);
        g->recipient = g->channel = g->content_type = NULL;
        return;
    case TD_CHAT_TURN_END:
        assert_false(g->is_open);
        g->is_over = true;
        return;
    }
    fail();
}

static void gather(const struct td_chat_format *f, const uint32_t *ids, size_t n, bool hit_limit,
                   const json_t *functions, struct gathered *g)
{
    struct td_text names[MAX];
    struct td_chat_parser_options o = {
        .on_event = on_event, .user = g, .functions = names, .n_functions = json_array_size(functions)};
    for (size_t i = 0; i < o.n_functions; i++) names[i] = text_of(json_array_get(functions, i));
    *g = (struct gathered){.messages = json_array(), .stream = json_array()};
    struct td_chat_parser *p = NULL;
    assert_int_equal(f->parser_create(f, &o, &p), TD_OK);
    for (size_t i = 0; i < n; i++) td_chat_parser_feed(p, ids[i]);
    td_chat_parser_end(p, hit_limit);
    assert_false(p->failed);
    assert_true(g->is_over);
    td_chat_parser_destroy(p);
}

static void gathered_free(struct gathered *g)
{
    json_decref(g->messages);
    json_decref(g->stream);
    td_buf_free(&g->reasoning);
    td_buf_free(&g->content);
    td_buf_free(&g->body);
}

static void assert_equal_json(const json_t *got, const json_t *expected, const char *name)
{
    if (json_equal(got, expected)) return;
    char *a = json_dumps(got, JSON_COMPACT | JSON_ENCODE_ANY),
         *b = json_dumps(expected, JSON_COMPACT | JSON_ENCODE_ANY);
    fail_msg("%s:\n--- got\n%s\n--- expected\n%s", name, a, b);
}

static void check_parse_case(const struct td_chat_format *f, const json_t *c, const uint32_t *ids, size_t n)
{
    const char *name = json_string_value(json_object_get(c, "name"));
    const json_t *chat = json_object_get(c, "chat");
    bool hit_limit = strcmp(json_string_value(json_object_get(c, "stopped_by")), "length") == 0;
    struct gathered g;
    gather(f, ids, n, hit_limit, json_object_get(c, "tools"), &g);
    assert_equal_json(g.messages, json_object_get(c, "messages"), name);
    assert_equal_json(g.stream, json_object_get(c, "stream"), name);
    assert_int_equal(g.n_hidden, json_integer_value(json_object_get(c, "hidden")));
    assert_int_equal(g.n_calls, json_array_size(json_object_get(chat, "tool_calls")));
    const json_t *content = json_object_get(chat, "content"), *reasoning = json_object_get(chat, "reasoning");
    assert_string_equal(td_buf_cstr(&g.content), json_is_string(content) ? json_string_value(content) : "");
    assert_string_equal(td_buf_cstr(&g.reasoning), json_is_string(reasoning) ? json_string_value(reasoning) : "");
    gathered_free(&g);
}

static void what_a_model_wrote_is_read_as_the_cases_say(void **state)
{
    (void)state;
    size_t i, k;
    json_t *c, *id;
    assert_true(json_array_size(json_object_get(cases, "parse")) > 30);
    json_array_foreach (json_object_get(cases, "parse"), i, c) {
        const json_t *text = json_object_get(c, "text");
        struct td_token_list ids = {0};
        if (released_format != NULL) {
            json_array_foreach (json_object_get(c, "ids"), k, id)
                td_token_list_push(&ids, (uint32_t)json_integer_value(id));
            check_parse_case(released_format, c, ids.ids, ids.n);
        }
        td_token_list_clear(&ids);
        if (json_string_length(text) > 0) { /* the small vocabulary cuts the same text differently */
            assert_int_equal(td_tokenizer_encode(tiny, json_string_value(text), json_string_length(text),
                                                 TD_TEXT_SPECIAL, &ids, NULL),
                             TD_OK);
            check_parse_case(tiny_format, c, ids.ids, ids.n);
        }
        td_token_list_free(&ids);
    }
}

static void parse_text(const char *text, bool hit_limit, struct gathered *g)
{
    struct td_token_list ids = {0};
    assert_int_equal(td_tokenizer_encode(tiny, text, strlen(text), TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    gather(tiny_format, ids.ids, ids.n, hit_limit, NULL, g);
    td_token_list_free(&ids);
}

static void a_blank_call_that_ends_has_empty_arguments_and_a_cut_one_what_it_had(void **state)
{
    (void)state;
    struct gathered g;
    parse_text("<|channel|>commentary to=functions.f json<|message|> \n<|call|>", false, &g);
    assert_string_equal(json_string_value(json_object_get(json_array_get(g.stream, 0), "text")), "{}");
    gathered_free(&g);
    parse_text("<|channel|>commentary to=functions.f json<|message|> \n", true, &g);
    assert_string_equal(json_string_value(json_object_get(json_array_get(g.stream, 0), "text")), " \n");
    gathered_free(&g);
    parse_text("<|channel|>commentary to=functions.f json<|message|> \n{\"a\": 1} <|call|>", false, &g);
    assert_string_equal(json_string_value(json_object_get(json_array_get(g.stream, 0), "text")), " \n{\"a\": 1} ");
    gathered_free(&g);
}

static void odd_headers_are_read_by_the_rules(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        enum td_chat_kind kind;
        const char *channel, *recipient, *content_type, *body;
    } odd[] = {
        {"<|channel|>analysisx<|message|>a<|end|>", TD_CHAT_REASONING, "analysis", NULL, NULL, "a"},
        {"<|channel|><|channel|>final<|message|>a<|end|>", TD_CHAT_CONTENT, "final", NULL, NULL, "a"},
        {"<|channel|>final<|channel|>analysis<|message|>a<|end|>", TD_CHAT_REASONING, "analysis", NULL, NULL, "a"},
        {"<|channel|>talk to=assistant<|message|>a<|end|>", TD_CHAT_PREAMBLE, "commentary", "assistant", NULL, "a"},
        {"<|channel|>commentary to=all<|message|>a<|end|>", TD_CHAT_PREAMBLE, "commentary", NULL, NULL, "a"},
        {"<|channel|>commentary functions.g code<|message|>a<|end|>", TD_CHAT_CALL, "commentary", "functions.g", "code",
         "a"},
        {"<|channel|>commentary python<|message|>a<|end|>", TD_CHAT_UNKNOWN_CALL, "commentary", "python", NULL, "a"},
        {"<|start|>assistant<|channel|>final<|message|>a<|end|>", TD_CHAT_CONTENT, "final", NULL, NULL, "a"},
        {"<|start|>assistant:x to=functions.g<|channel|>commentary<|message|>a<|end|>", TD_CHAT_CALL, "commentary",
         "functions.g", NULL, "a"},
        {"<|start|>functions.g to=assistant<|channel|>commentary<|message|>a<|end|>", TD_CHAT_HIDDEN, "commentary",
         "assistant", NULL, "a"},
        {"<|start|>user hello there<|end|>", TD_CHAT_HIDDEN, NULL, NULL, NULL, "hello there"},
        {"assistant<|message|>a<|end|>", TD_CHAT_CONTENT, NULL, NULL, NULL, "a"},
        {"<|channel|>commentary to=functions.g json {}<|call|>", TD_CHAT_CALL, "commentary", "functions.g", "json",
         "{}"},
        {"<|reserved_2018|><|channel|>final<|message|>a<|reserved_2018|>b<|return|>", TD_CHAT_CONTENT, "final", NULL,
         NULL, "ab"},
        {"<|channel|>final a<|constrain|>b<|return|>", TD_CHAT_CONTENT, "final", NULL, NULL, "a b"},
    };
    for (size_t i = 0; i < TD_COUNT(odd); i++) {
        struct gathered g;
        parse_text(odd[i].text, false, &g);
        assert_int_equal(g.n_started, 1);
        if (g.now.kind != odd[i].kind) fail_msg("%s: kind %d", odd[i].text, g.now.kind);
        if (odd[i].kind != TD_CHAT_HIDDEN) {
            json_t *m = json_array_get(g.messages, 0);
            const char *channel = json_string_value(json_object_get(m, "channel"));
            const char *recipient = json_string_value(json_object_get(m, "recipient"));
            const char *type = json_string_value(json_object_get(m, "content_type"));
            if (!same(channel, odd[i].channel) || !same(recipient, odd[i].recipient) ||
                !same(type, odd[i].content_type))
                fail_msg("%s: channel %s, recipient %s, type %s", odd[i].text, channel, recipient, type);
        }
        assert_string_equal(td_buf_cstr(&g.body), odd[i].body);
        gathered_free(&g);
    }
}

static void headers_without_text_give_no_message(void **state)
{
    (void)state;
    static const char *const blank[] = {
        "",
        " ",
        "<|end|>",
        "<|start|><|start|>assistant<|end|>",
        "<|channel|>final<|return|>",
        "<|start|>assistant<|channel|>",
        "<|start|>user<|end|>",
        "<|constrain|>",
        "to=all<|end|>",
        "<|return|><|call|><|end|>",
        "<|endoftext|>",
    };
    for (size_t i = 0; i < TD_COUNT(blank); i++) {
        struct gathered g;
        parse_text(blank[i], false, &g);
        if (g.n_started != 0) fail_msg("%s: a message", blank[i]);
        gathered_free(&g);
    }
}

static void random_tokens_always_parse_and_special_tokens_never_show(void **state)
{
    (void)state;
    uint64_t seed = 7;
    for (unsigned round = 0; round < 4000; round++) {
        uint32_t ids[200];
        size_t n = draw(&seed, TD_COUNT(ids));
        for (size_t i = 0; i < n; i++) {
            switch (draw(&seed, 4)) {
            case 0: ids[i] = 2016 + draw(&seed, 40); break; /* special, and rows without a token */
            case 1: ids[i] = draw(&seed, 256); break;       /* single bytes */
            case 2: ids[i] = 2020 + draw(&seed, 11); break; /* the format's own */
            default: ids[i] = draw(&seed, 2016); break;
            }
        }
        struct gathered g;
        gather(tiny_format, ids, n, draw(&seed, 2) == 0,
               json_object_get(json_array_get(json_object_get(cases, "parse"), 2), "tools"), &g);
        size_t i;
        json_t *s;
        json_array_foreach (g.stream, i, s) {
            const char *text = json_string_value(json_object_get(s, "text"));
            assert_null(strstr(text, "<|start|>"));
            assert_null(strstr(text, "<|message|>"));
            assert_null(strstr(text, "<|reserved"));
            assert_null(strstr(text, "<|constrain|>"));
        }
        gathered_free(&g);
    }
}

static void reasoning_tokens_are_the_bodies_of_reasoning_messages(void **state)
{
    (void)state;
    static const char text[] =
        "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>";
    struct td_token_list ids = {0}, body = {0};
    struct gathered g = {.messages = json_array(), .stream = json_array()};
    struct td_chat_parser_options o = {.on_event = on_event, .user = &g};
    struct td_chat_parser *p = NULL;
    assert_int_equal(td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    assert_int_equal(td_tokenizer_encode(tiny, "abc", 3, TD_TEXT_ORDINARY, &body, NULL), TD_OK);
    assert_int_equal(tiny_format->parser_create(tiny_format, &o, &p), TD_OK);
    for (size_t i = 0; i < ids.n; i++) td_chat_parser_feed(p, ids.ids[i]);
    td_chat_parser_end(p, false);
    assert_int_equal(p->n_reasoning_tokens, body.n);
    td_chat_parser_destroy(p);
    gathered_free(&g);
    td_token_list_free(&ids);
    td_token_list_free(&body);
}

static void ignore_event(void *user, const struct td_chat_event *e) { (void)user, (void)e; }

static void any_failed_allocation_is_survived(void **state)
{
    (void)state;
    static const char text[] =
        "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|> {}<|call|>to=functions.g json {}<|call|>";
    struct td_token_list ids = {0};
    assert_int_equal(td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    struct td_text part = {"Hello", 5};
    struct td_chat_message messages[] = {{.role = TD_CHAT_SYSTEM, .parts = &part, .n_parts = 1},
                                         {.role = TD_CHAT_USER, .parts = &part, .n_parts = 1},
                                         {.role = TD_CHAT_TOOL, .parts = &part, .n_parts = 1, .name = part}};
    struct td_chat_conversation c = {.messages = messages, .n_messages = 3};
    bool is_done = false;
    for (uint32_t k = 0; !is_done && k < 300; k++) {
        struct td_chat_parser_options o = {.on_event = ignore_event};
        struct td_chat_parser *p = NULL;
        struct td_token_list prompt = {0};
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = tiny_format->parser_create(tiny_format, &o, &p);
        for (size_t i = 0; st == TD_OK && i < ids.n; i++) td_chat_parser_feed(p, ids.ids[i]);
        if (st == TD_OK) td_chat_parser_end(p, false);
        enum td_status rendered = tiny_format->render(tiny_format, &c, &prompt, NULL);
        td_fault_disarm_all();
        assert_true(rendered == TD_OK || rendered == TD_E_NO_MEMORY);
        is_done = st == TD_OK && !p->failed && rendered == TD_OK;
        if (rendered != TD_OK) assert_int_equal(prompt.n, 0);
        td_chat_parser_destroy(p);
        td_token_list_free(&prompt);
    }
    assert_true(is_done);
    td_token_list_free(&ids);
}

/* --- the other format ----------------------------------------------------------------------------------------------
 */

static void the_plain_format_goes_through_the_same_interface(void **state)
{
    (void)state;
    struct td_chat_format *f = NULL;
    struct td_err err = {{0}};
    assert_int_equal(td_chat_format_open("plain", tiny, &f, &err), TD_OK);
    struct td_text parts[] = {{"Be brief.", 9}, {"Hi", 2}};
    struct td_chat_message messages[] = {{.role = TD_CHAT_SYSTEM, .parts = &parts[0], .n_parts = 1},
                                         {.role = TD_CHAT_USER, .parts = &parts[1], .n_parts = 1}};
    struct td_chat_conversation c = {.messages = messages, .n_messages = 2};
    struct td_token_list ids = {0};
    struct td_buf text = {0};
    assert_int_equal(f->render(f, &c, &ids, &err), TD_OK);
    td_tokenizer_decode(tiny, ids.ids, ids.n, true, &text);
    assert_string_equal(td_buf_cstr(&text), "System: Be brief.\n\nUser: Hi\n\nAssistant:");
    td_token_list_clear(&ids);
    assert_int_equal(td_tokenizer_encode(tiny, " Hello \xF0\x9F\xA7\xAA!<|return|>", 22, TD_TEXT_SPECIAL, &ids, NULL),
                     TD_OK);
    struct gathered g;
    gather(f, ids.ids, ids.n, false, NULL, &g);
    assert_string_equal(td_buf_cstr(&g.content), "Hello \xF0\x9F\xA7\xAA!");
    assert_int_equal(g.n_started, 1);
    gathered_free(&g);
    gather(f, NULL, 0, false, NULL, &g);
    assert_int_equal(g.n_started, 0);
    gathered_free(&g);
    td_buf_free(&text);
    td_token_list_free(&ids);
    td_chat_format_destroy(f);
}

static void a_format_is_chosen_by_name_or_by_the_vocabulary(void **state)
{
    (void)state;
    struct td_chat_format *f = NULL;
    struct td_err err = {{0}};
    assert_int_equal(td_chat_format_open("nonsense", tiny, &f, &err), TD_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "nonsense"));
    assert_int_equal(td_chat_format_open("auto", tiny, &f, &err), TD_OK);
    assert_string_equal(f->name, "harmony");
    td_chat_format_destroy(f);
    json_t *root = load_json(TINY_MODEL "/tokenizer.json");
    json_array_remove(json_object_get(root, "added_tokens"), 14); /* <|call|> */
    char *text = json_dumps(root, 0);
    struct td_tokenizer *t = NULL;
    assert_int_equal(td_tokenizer_parse_json(text, strlen(text), "f", &t, &err), TD_OK);
    assert_int_equal(td_chat_format_open("harmony", t, &f, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "<|call|>"));
    assert_int_equal(td_chat_format_open("auto", t, &f, &err), TD_OK);
    assert_string_equal(f->name, "plain");
    td_chat_format_destroy(f);
    td_tokenizer_destroy(t);
    free(text);
    json_decref(root);
}

static int load(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    tiny = load_tokenizer(TINY_MODEL);
    cases = load_json("tests/cases/harmony-cases.json");
    if (td_chat_format_open("harmony", tiny, &tiny_format, &err) != TD_OK) fail_msg("%s", err.text);
    if (released_tokenizer() != NULL &&
        td_chat_format_open("harmony", released_tokenizer(), &released_format, &err) != TD_OK)
        fail_msg("%s", err.text);
    return 0;
}

static int unload(void **state)
{
    (void)state;
    td_chat_format_destroy(tiny_format);
    td_chat_format_destroy(released_format);
    td_tokenizer_destroy(tiny);
    td_tokenizer_destroy(released_tokenizer());
    json_decref(cases);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_are_rendered_as_the_reference_renders_them),
        cmocka_unit_test(conversations_become_the_prompts_that_the_model_knows),
        cmocka_unit_test(reasoning_of_finished_turns_goes_unless_kept),
        cmocka_unit_test(a_bad_conversation_is_refused_with_the_message_and_adds_nothing),
        cmocka_unit_test(what_a_model_wrote_is_read_as_the_cases_say),
        cmocka_unit_test(a_blank_call_that_ends_has_empty_arguments_and_a_cut_one_what_it_had),
        cmocka_unit_test(odd_headers_are_read_by_the_rules),
        cmocka_unit_test(headers_without_text_give_no_message),
        cmocka_unit_test(random_tokens_always_parse_and_special_tokens_never_show),
        cmocka_unit_test(reasoning_tokens_are_the_bodies_of_reasoning_messages),
        cmocka_unit_test(any_failed_allocation_is_survived),
        cmocka_unit_test(the_plain_format_goes_through_the_same_interface),
        cmocka_unit_test(a_format_is_chosen_by_name_or_by_the_vocabulary),
    };
    return cmocka_run_group_tests_name("harmony", tests, load, unload);
}
