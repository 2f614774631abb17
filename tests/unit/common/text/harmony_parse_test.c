#include "tests/unit/common/text/harmony_cases.h"

#include "common/text/chat.h"
#include "deploy/ctl/cases.h"

static json_t *declared;

static json_t *parse_ids(const struct td_chat_format *f, const struct td_token_list *ids, bool hit_limit,
                         const json_t *tools)
{
    struct td_err err = {{0}};
    json_t *got = NULL;
    if (td_case_parse(f, ids->ids, ids->n, hit_limit, tools, &got, &err) != TD_OK) fail_msg("%s", err.text);
    return got;
}

static json_t *parse(const char *text, bool hit_limit)
{
    struct td_token_list ids = {0};
    assert_int_equal(td_tokenizer_encode(tiny, text, strlen(text), TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    json_t *got = parse_ids(tiny_format, &ids, hit_limit, declared);
    td_token_list_free(&ids);
    return got;
}

static const char *field(const json_t *v, const char *key) { return json_string_value(json_object_get(v, key)); }
static bool same(const char *a, const char *b) { return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0); }

static void check_parse_case(const struct td_chat_format *f, const json_t *c, const struct td_token_list *ids)
{
    static const char *const keys[] = {"messages", "hidden", "stream", "chat"};
    json_t *got = parse_ids(f, ids, strcmp(field(c, "stopped_by"), "length") == 0, json_object_get(c, "tools"));
    for (size_t i = 0; i < TD_COUNT(keys); i++) {
        const json_t *a = json_object_get(got, keys[i]), *b = json_object_get(c, keys[i]);
        if (json_equal(a, b)) continue;
        fail_msg("%s: %s:\n--- got\n%s\n--- expected\n%s", field(c, "name"), keys[i],
                 json_dumps(a, JSON_COMPACT | JSON_ENCODE_ANY), json_dumps(b, JSON_COMPACT | JSON_ENCODE_ANY));
    }
    json_decref(got);
}

static void what_a_model_wrote_is_read_as_the_cases_say(void **state)
{
    (void)state;
    size_t i, k;
    json_t *c, *id;
    assert_true(json_array_size(json_object_get(cases, "parse")) >= 33);
    json_array_foreach (json_object_get(cases, "parse"), i, c) {
        const json_t *text = json_object_get(c, "text");
        struct td_token_list ids = {0};
        if (released_format != NULL) {
            json_array_foreach (json_object_get(c, "ids"), k, id)
                td_token_list_push(&ids, (uint32_t)json_integer_value(id));
            check_parse_case(released_format, c, &ids);
        }
        td_token_list_clear(&ids);
        if (json_string_length(text) > 0) { /* the small vocabulary cuts the same text differently */
            assert_int_equal(td_tokenizer_encode(tiny, json_string_value(text), json_string_length(text),
                                                 TD_TEXT_SPECIAL, &ids, NULL),
                             TD_OK);
            check_parse_case(tiny_format, c, &ids);
        }
        td_token_list_free(&ids);
    }
}

/* --- what goes wrong ---------------------------------------------------------------------------------------------- */

/* The events as one line: "kind: text" per message, in order. */
static void summarize(const json_t *events, struct td_buf *out)
{
    size_t i;
    json_t *e;
    td_buf_clear(out);
    json_array_foreach (events, i, e) {
        const char *event = field(e, "event"), *kind = field(e, "kind");
        if (strcmp(event, "message_start") == 0) {
            td_buf_printf(out, "%s%s", out->n > 0 ? "; " : "", kind);
            if (field(e, "function") != NULL) td_buf_printf(out, " %s", field(e, "function"));
            if (strcmp(kind, "unknown tool") == 0) td_buf_printf(out, " %s", field(e, "recipient"));
            td_buf_str(out, ": ");
        } else if (strcmp(event, "text") == 0) {
            td_buf_str(out, field(e, "text"));
        } else if (strcmp(event, "message_end") == 0 && json_is_false(json_object_get(e, "complete"))) {
            td_buf_str(out, " (cut)");
        }
    }
}

static void every_malformed_kind_yields_what_the_table_says(void **state)
{
    (void)state;
    enum { STOP, LENGTH };
    static const struct {
        const char *kind;
        bool hit_limit;
        const char *text, *expected;
    } rows[] = {
#define X(kind, how, text, yields) {kind, how == LENGTH, text, yields},
#include "common/text/harmony_malformed.def"
#undef X
    };
    struct td_buf got = {0};
    assert_true(TD_COUNT(rows) > 80);
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        json_t *v = parse(rows[i].text, rows[i].hit_limit);
        summarize(json_object_get(v, "events"), &got);
        if (strcmp(td_buf_cstr(&got), rows[i].expected) != 0)
            fail_msg("%s: \"%s\", not \"%s\"", rows[i].kind, td_buf_cstr(&got), rows[i].expected);
        json_decref(v);
    }
    td_buf_free(&got);
}

static void a_stream_that_ends_anywhere_yields_a_beginning_of_the_whole(void **state)
{
    (void)state;
    static const char text[] =
        "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.f <|constrain|>json<|message|>{\"day\": \"today\"}<|call|>";
    struct td_token_list ids = {0};
    assert_int_equal(td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    size_t n = ids.n;
    json_t *whole = parse_ids(tiny_format, &ids, false, declared);
    for (ids.n = 0; ids.n < n; ids.n++) {
        json_t *part = parse_ids(tiny_format, &ids, true, declared), *message, *stream;
        size_t i;
        json_array_foreach (json_object_get(part, "stream"), i, stream) {
            const json_t *all = json_array_get(json_object_get(whole, "stream"), i);
            assert_string_equal(field(stream, "kind"), field(all, "kind"));
            assert_int_equal(strncmp(field(all, "text"), field(stream, "text"), strlen(field(stream, "text"))), 0);
        }
        /* Only the last message may be unfinished. */
        json_array_foreach (json_object_get(part, "messages"), i, message)
            if (i + 1 < json_array_size(json_object_get(part, "messages")))
                assert_true(json_is_true(json_object_get(message, "complete")));
        assert_string_equal(field(json_object_get(part, "chat"), "finish_reason"), "length");
        json_decref(part);
    }
    json_decref(whole);
    td_token_list_free(&ids);
}

static void a_blank_call_that_ends_has_empty_arguments_and_a_cut_one_what_it_had(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool hit_limit;
        const char *arguments;
    } rows[] = {
        {"<|channel|>commentary to=functions.f json<|message|> \n<|call|>", false, "{}"},
        {"<|channel|>commentary to=functions.f json<|message|> \n", true, " \n"},
        {"<|channel|>commentary to=functions.f json<|message|> \n{\"a\": 1} <|call|>", false, " \n{\"a\": 1} "},
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        json_t *v = parse(rows[i].text, rows[i].hit_limit);
        assert_string_equal(field(json_array_get(json_object_get(v, "stream"), 0), "text"), rows[i].arguments);
        json_decref(v);
    }
}

static void odd_headers_are_read_by_the_rules(void **state)
{
    (void)state;
    static const struct {
        const char *text, *kind, *channel, *recipient, *content_type, *body;
    } odd[] = {
        {"<|channel|>analysisx<|message|>a<|end|>", "reasoning", "analysis", NULL, NULL, "a"},
        {"<|channel|>final<|channel|>analysis<|message|>a<|end|>", "reasoning", "analysis", NULL, NULL, "a"},
        {"<|channel|>talk to=assistant<|message|>a<|end|>", "preamble", "commentary", "assistant", NULL, "a"},
        {"<|channel|>commentary to=all<|message|>a<|end|>", "preamble", "commentary", NULL, NULL, "a"},
        {"<|channel|>commentary functions.g code<|message|>a<|end|>", "tool", "commentary", "functions.g", "code", "a"},
        {"<|channel|>commentary python<|message|>a<|end|>", "unknown tool", "commentary", "python", NULL, "a"},
        {"<|start|>assistant:x to=functions.g<|channel|>commentary<|message|>a<|end|>", "tool", "commentary",
         "functions.g", NULL, "a"},
        {"assistant<|message|>a<|end|>", "content", NULL, NULL, NULL, "a"},
        {"<|channel|>commentary to=functions.g json {}<|call|>", "tool", "commentary", "functions.g", "json", "{}"},
        {"<|channel|>final<|constrain|>json{}<|return|>", "content", "final", NULL, "<|constrain|>json", "{}"},
        {"<|reserved_2018|><|channel|>final<|message|>a<|reserved_2018|>b<|return|>", "content", "final", NULL, NULL,
         "ab"},
    };
    for (size_t i = 0; i < TD_COUNT(odd); i++) {
        json_t *v = parse(odd[i].text, false), *m = json_array_get(json_object_get(v, "messages"), 0);
        const json_t *start = json_array_get(json_object_get(v, "events"), 0);
        assert_int_equal(json_array_size(json_object_get(v, "messages")), 1);
        if (!same(field(start, "kind"), odd[i].kind) || !same(field(m, "channel"), odd[i].channel) ||
            !same(field(m, "recipient"), odd[i].recipient) || !same(field(m, "content_type"), odd[i].content_type))
            fail_msg("%s: %s", odd[i].text, json_dumps(m, JSON_COMPACT));
        assert_string_equal(field(m, "content"), odd[i].body);
        json_decref(v);
    }
}

static void ignore_event(void *user, const struct td_chat_event *e) { (void)user, (void)e; }

static void reasoning_tokens_are_the_bodies_of_reasoning_messages(void **state)
{
    (void)state;
    static const char text[] =
        "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>";
    struct td_token_list ids = {0}, body = {0};
    struct td_chat_parser_options o = {.on_event = ignore_event};
    struct td_chat_parser *p = NULL;
    assert_int_equal(td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    assert_int_equal(td_tokenizer_encode(tiny, "abc", 3, TD_TEXT_ORDINARY, &body, NULL), TD_OK);
    assert_int_equal(tiny_format->parser_create(tiny_format, &o, &p), TD_OK);
    for (size_t i = 0; i < ids.n; i++) td_chat_parser_feed(p, ids.ids[i]);
    td_chat_parser_end(p, false);
    assert_int_equal(p->n_reasoning_tokens, body.n);
    td_chat_parser_destroy(p);
    td_token_list_free(&ids);
    td_token_list_free(&body);
}

static int set_up(void **state)
{
    declared = json_pack("[s, s, s]", "f", "g", "get_weather");
    return load(state);
}

static int tear_down(void **state)
{
    json_decref(declared);
    return unload(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_model_wrote_is_read_as_the_cases_say),
        cmocka_unit_test(every_malformed_kind_yields_what_the_table_says),
        cmocka_unit_test(a_stream_that_ends_anywhere_yields_a_beginning_of_the_whole),
        cmocka_unit_test(a_blank_call_that_ends_has_empty_arguments_and_a_cut_one_what_it_had),
        cmocka_unit_test(odd_headers_are_read_by_the_rules),
        cmocka_unit_test(reasoning_tokens_are_the_bodies_of_reasoning_messages),
    };
    return cmocka_run_group_tests_name("harmony_parse", tests, set_up, tear_down);
}
