#include "tests/unit/common/text/harmony_cases.h"

#include "common/base/fault.h"
#include "common/text/chat.h"
#include "deploy/ctl/cases.h"

static void assert_text(const struct td_tokenizer *t, const struct td_token_list *ids, const json_t *expected,
                        const char *name)
{
    struct td_buf got = {0};
    td_tokenizer_decode(t, ids->ids, ids->n, true, &got);
    if (strcmp(td_buf_cstr(&got), json_string_value(expected)) != 0)
        fail_msg("%s:\n--- got\n%s\n--- expected\n%s", name, td_buf_cstr(&got), json_string_value(expected));
    td_buf_free(&got);
}

/* --- the cases ---------------------------------------------------------------------------------------------------- */

static void check_case(const struct td_chat_format *f, json_t *c, bool has_ids)
{
    const char *name = json_string_value(json_object_get(c, "name"));
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    if (td_case_render(f, c, NULL, &ids, &err) != TD_OK) fail_msg("%s: %s", name, err.text);
    assert_text(f->tokenizer, &ids, json_object_get(c, "text"), name);
    if (has_ids) assert_ids(&ids, json_object_get(c, "ids"), name);
    td_token_list_free(&ids);
}

static void check_section(const char *section, size_t n_at_least)
{
    size_t i;
    json_t *c;
    assert_true(json_array_size(json_object_get(cases, section)) >= n_at_least);
    json_array_foreach (json_object_get(cases, section), i, c) {
        check_case(tiny_format, c, false);
        if (released_format != NULL) check_case(released_format, c, true);
    }
}

static void messages_are_rendered_as_the_reference_renders_them(void **state)
{
    (void)state;
    check_section("render", 26);
}

static void conversations_become_the_prompts_that_the_model_knows(void **state)
{
    (void)state;
    check_section("chat", 8);
}

static void a_response_format_ends_the_developer_message(void **state)
{
    (void)state;
    static const char request[] =
        "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\", \"content\": "
        "\"Go\"}],"
        "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}],"
        "\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"city\", \"description\": \"A "
        "city.\","
        "\"schema\": {\"type\": \"object\", \"properties\": {\"b\": {\"type\": \"string\"}, \"a\": {}}}}}}";
    static const char expected[] =
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\nnamespace functions "
        "{\n\n"
        "type f = () => any;\n\n} // namespace functions\n\n# Response Formats\n\n## city\n\n// A city.\n"
        "{\"type\":\"object\",\"properties\":{\"b\":{\"type\":\"string\"},\"a\":{}}}<|end|><|start|>user<|message|>Go";
    json_t *c = json_loads(request, 0, NULL);
    struct td_token_list ids = {0};
    struct td_buf text = {0};
    struct td_err err = {{0}};
    assert_non_null(c);
    assert_int_equal(td_case_render(tiny_format, c, NULL, &ids, &err), TD_OK);
    td_tokenizer_decode(tiny, ids.ids, ids.n, true, &text);
    if (strstr(td_buf_cstr(&text), expected) == NULL) fail_msg("%s", td_buf_cstr(&text));
    td_buf_free(&text);
    td_token_list_free(&ids);
    json_decref(c);
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
static void tools_whose_text_would_fill_memory_are_refused(void **state)
{
    (void)state;
    json_t *schema = json_object(), *wide = json_object();
    for (unsigned i = 0; i < 100000; i++) {
        char key[16];
        snprintf(key, sizeof key, "k%u", i);
        json_object_set_new(wide, key, json_object());
    }
    json_object_set_new(schema, "type", json_string("object"));
    json_object_set_new(schema, "properties", wide);
    for (unsigned i = 0; i < 45; i++)
        schema = json_pack("{s: s, s: {s: o}}", "type", "object", "properties", "a", schema);
    struct td_chat_tool tool = {.name = {"f", 1}, .parameters = schema};
    struct td_text part = {"Hi", 2};
    struct td_chat_message m = {.role = TD_CHAT_USER, .parts = &part, .n_parts = 1};
    struct td_chat_conversation c = {.messages = &m, .n_messages = 1, .tools = &tool, .n_tools = 1};
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    assert_int_equal(tiny_format->render(tiny_format, &c, &ids, &err), TD_E_TOO_LARGE);
    assert_non_null(strstr(err.text, "tools: "));
    td_token_list_free(&ids);
    json_decref(schema);
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
    td_token_list_clear(&ids);
    assert_int_equal(td_tokenizer_encode(tiny, " Hello \xF0\x9F\xA7\xAA!<|return|>", 22, TD_TEXT_SPECIAL, &ids, NULL),
                     TD_OK);
    json_t *got = NULL;
    assert_int_equal(td_case_parse(f, ids.ids, ids.n, false, NULL, &got, &err), TD_OK);
    assert_string_equal(json_string_value(json_object_get(json_object_get(got, "chat"), "content")),
                        "Hello \xF0\x9F\xA7\xAA!");
    assert_int_equal(json_array_size(json_object_get(got, "messages")), 1);
    json_decref(got);
    assert_int_equal(td_case_parse(f, NULL, 0, false, NULL, &got, &err), TD_OK);
    assert_int_equal(json_array_size(json_object_get(got, "messages")), 0);
    json_decref(got);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_are_rendered_as_the_reference_renders_them),
        cmocka_unit_test(conversations_become_the_prompts_that_the_model_knows),
        cmocka_unit_test(a_response_format_ends_the_developer_message),
        cmocka_unit_test(reasoning_of_finished_turns_goes_unless_kept),
        cmocka_unit_test(a_bad_conversation_is_refused_with_the_message_and_adds_nothing),
        cmocka_unit_test(tools_whose_text_would_fill_memory_are_refused),
        cmocka_unit_test(any_failed_allocation_is_survived),
        cmocka_unit_test(the_plain_format_goes_through_the_same_interface),
        cmocka_unit_test(a_format_is_chosen_by_name_or_by_the_vocabulary),
    };
    return cmocka_run_group_tests_name("harmony", tests, load, unload);
}
