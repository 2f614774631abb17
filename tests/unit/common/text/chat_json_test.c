#include "tests/unit/common/text/text_cases.h"

#include "common/base/fault.h"
#include "common/text/chat_json.h"

/* What was read, and what it lies in. */
struct reading {
    json_t *doc;
    struct td_arena arena;
    struct td_chat_conversation chat;
    enum td_tool_choice choice;
    const char *name;
};

static enum td_status read_doc(json_t *doc, struct reading *r, struct td_err *err)
{
    *r = (struct reading){.doc = doc};
    struct td_fields f = td_fields_open(doc, err, "%s", "");
    td_chat_json_messages(&f, &r->arena, &r->chat);
    td_chat_json_tools(&f, &r->arena, false, &r->chat, &r->choice, &r->name);
    td_chat_json_effort(&f, "reasoning_effort", &r->chat.effort);
    td_chat_json_response_format(&f, &r->arena, &r->chat.response_format);
    return f.st;
}

static enum td_status read_json(const char *text, struct reading *r, struct td_err *err)
{
    json_error_t why;
    json_t *v = json_loads(text, JSON_ALLOW_NUL, &why);
    if (v == NULL) fail_msg("%s: %s", text, why.text);
    return read_doc(v, r, err);
}

static void reading_free(struct reading *r)
{
    td_arena_free(&r->arena);
    json_decref(r->doc);
}

static bool is(struct td_text t, const char *s) { return t.n == strlen(s) && memcmp(t.p, s, t.n) == 0; }

static const char whole[] =
    "{\"messages\": ["
    "{\"role\": \"developer\", \"content\": [{\"type\": \"text\", \"text\": \"Be \"}, {\"type\": \"text\", \"text\": "
    "\"brief.\"}]},"
    "{\"role\": \"user\", \"content\": \"Hi\"},"
    "{\"role\": \"assistant\", \"content\": null, \"reasoning_content\": \"Hm.\", \"tool_calls\": ["
    "  {\"id\": \"a\", \"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": \"{}\"}},"
    "  {\"id\": \"b\", \"type\": \"function\", \"function\": {\"name\": \"g\", \"arguments\": \"{1\"}},"
    "  {\"id\": \"c\", \"function\": {\"name\": \"f\", \"arguments\": \"\"}}]},"
    "{\"role\": \"tool\", \"tool_call_id\": \"b\", \"content\": \"4\"},"
    "{\"role\": \"tool\", \"tool_call_id\": \"a\", \"content\": [{\"type\": \"text\", \"text\": \"5\"}]},"
    "{\"role\": \"assistant\", \"content\": \"Nine.\", \"refusal\": null, \"tool_calls\": null}],"
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"F.\", \"strict\": false,"
    "  \"parameters\": {\"type\": \"object\"}}}, {\"type\": \"function\", \"function\": {\"name\": \"g\", "
    "\"parameters\": null}}],"
    "\"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"g\"}}, \"reasoning_effort\": \"high\","
    "\"unknown\": 1}";

static void a_request_becomes_a_conversation(void **state)
{
    (void)state;
    struct reading c;
    struct td_err err = {{0}};
    if (read_json(whole, &c, &err) != TD_OK) fail_msg("%s", err.text);
    const struct td_chat_message *m = c.chat.messages;
    assert_int_equal(c.chat.n_messages, 6);
    assert_true(m[0].role == TD_CHAT_DEVELOPER && m[0].n_parts == 2 && is(m[0].parts[1], "brief."));
    assert_true(m[1].role == TD_CHAT_USER && is(m[1].parts[0], "Hi"));
    assert_true(m[2].n_parts == 0 && is(m[2].reasoning, "Hm.") && m[2].n_calls == 3);
    assert_true(is(m[2].calls[1].name, "g") && is(m[2].calls[1].arguments, "{1") && is(m[2].calls[2].name, "f"));
    assert_true(m[3].role == TD_CHAT_TOOL && is(m[3].name, "g"));
    assert_true(is(m[4].name, "f") && is(m[4].parts[0], "5"));
    assert_true(is(m[5].parts[0], "Nine.") && m[5].reasoning.p == NULL);
    assert_int_equal(c.chat.n_tools, 2);
    assert_true(is(c.chat.tools[0].description, "F.") && json_is_object(c.chat.tools[0].parameters));
    assert_true(c.chat.tools[1].parameters == NULL && c.chat.tools[1].description.p == NULL);
    assert_int_equal(c.choice, TD_TOOL_CHOICE_NAMED);
    assert_int_equal(c.chat.effort, TD_CHAT_EFFORT_HIGH);
    reading_free(&c);
}

static void a_tool_choice_of_none_offers_no_tools(void **state)
{
    (void)state;
    struct reading c;
    assert_int_equal(
        read_json("{\"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000b\"}], \"tools\": [{\"type\": "
                  "\"function\", \"function\": {\"name\": \"f\"}}], \"tool_choice\": \"none\"}",
                  &c, NULL),
        TD_OK);
    assert_int_equal(c.choice, TD_TOOL_CHOICE_NONE);
    assert_int_equal(c.chat.n_tools, 0);
    assert_int_equal(c.chat.messages[0].parts[0].n, 3);
    reading_free(&c);
}

static void a_call_id_used_again_means_the_call_before_the_result(void **state)
{
    (void)state;
    static const char text[] = "{\"messages\": ["
                               "{\"role\": \"assistant\", \"tool_calls\": [{\"id\": \"x\", \"function\": {\"name\": "
                               "\"one\", \"arguments\": \"\"}}]},"
                               "{\"role\": \"tool\", \"tool_call_id\": \"x\", \"content\": \"1\"},"
                               "{\"role\": \"assistant\", \"tool_calls\": [{\"id\": \"x\", \"function\": {\"name\": "
                               "\"two\", \"arguments\": \"\"}}]},"
                               "{\"role\": \"tool\", \"tool_call_id\": \"x\", \"content\": \"2\"},"
                               "{\"role\": \"tool\", \"tool_call_id\": \"y\", \"content\": \"3\"},"
                               "{\"role\": \"assistant\", \"tool_calls\": [{\"id\": \"y\", \"function\": {\"name\": "
                               "\"late\", \"arguments\": \"\"}}]}]}";
    struct reading c;
    struct td_err err = {{0}};
    if (read_json(text, &c, &err) != TD_OK) fail_msg("%s", err.text);
    assert_true(is(c.chat.messages[1].name, "one"));
    assert_true(is(c.chat.messages[3].name, "two"));
    assert_true(is(c.chat.messages[4].name, "late"));
    reading_free(&c);
}

static void what_is_wrong_is_named_by_its_path(void **state)
{
    (void)state;
#define USER      "{\"role\": \"user\", \"content\": \"a\"}"
#define TOOL(x)   "{\"messages\": [" USER "], \"tools\": [{\"type\": \"function\", \"function\": " x "}]}"
#define CALL(x)   "{\"messages\": [" USER ", {\"role\": \"assistant\", \"tool_calls\": [" x "]}]}"
#define MORE(x)   "{\"messages\": [" USER "], " x "}"
#define SECOND(x) "{\"messages\": [" USER ", " x "]}"
    static const struct {
        const char *request, *path;
    } rows[] = {
        {"{}", "messages: "},
        {"{\"messages\": []}", "messages: "},
        {"{\"messages\": {}}", "messages: "},
        {"{\"messages\": [1]}", "messages[0]: "},
        {SECOND("{\"content\": \"a\"}"), "messages[1].role: "},
        {SECOND("{\"role\": \"robot\", \"content\": \"a\"}"), "messages[1].role: "},
        {SECOND("{\"role\": \"user\"}"), "messages[1].content: "},
        {SECOND("{\"role\": \"user\", \"content\": null}"), "messages[1].content: "},
        {SECOND("{\"role\": \"user\", \"content\": 7}"), "messages[1].content: "},
        {SECOND("{\"role\": \"user\", \"content\": []}"), "messages[1].content: "},
        {SECOND("{\"role\": \"user\", \"content\": [\"a\"]}"), "messages[1].content[0]: "},
        {SECOND("{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {}}]}"),
         "messages[1].content[0].type: "},
        {SECOND("{\"role\": \"user\", \"content\": [{\"type\": \"refusal\", \"refusal\": \"a\"}]}"),
         "messages[1].content[0].type: "},
        {SECOND("{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}"), "messages[1].content[0].text: "},
        {SECOND("{\"role\": \"assistant\"}"), "messages[1].content: "},
        {SECOND("{\"role\": \"assistant\", \"content\": \"a\", \"reasoning\": 1}"), "messages[1].reasoning: "},
        {SECOND("{\"role\": \"assistant\", \"function_call\": {}}"), "messages[1].content: "},
        {SECOND("{\"role\": \"assistant\", \"tool_calls\": {}}"), "messages[1].tool_calls: "},
        {CALL("1"), "messages[1].tool_calls[0]: "},
        {CALL("{\"type\": \"custom\"}"), "messages[1].tool_calls[0].type: "},
        {CALL("{\"id\": \"a\"}"), "messages[1].tool_calls[0].function: "},
        {CALL("{\"id\": \"c\", \"function\": {}}"), "messages[1].tool_calls[0].function.name: "},
        {CALL("{\"function\": {}}"), "messages[1].tool_calls[0].id: "},
        {CALL("{\"id\": \"c\", \"function\": {\"name\": \"f\", \"arguments\": {}}}"),
         "messages[1].tool_calls[0].function.arguments: "},
        {SECOND("{\"role\": \"tool\", \"content\": \"a\"}"), "messages[1].tool_call_id: "},
        {SECOND("{\"role\": \"tool\", \"content\": \"a\", \"tool_call_id\": \"nobody\"}"),
         "messages[1].tool_call_id: "},
        {MORE("\"tools\": {}"), "tools: "},
        {MORE("\"tools\": [{\"type\": \"web_search\"}]"), "tools[0].type: "},
        {MORE("\"tools\": [{\"type\": \"function\"}]"), "tools[0].function: "},
        {TOOL("{}"), "tools[0].function.name: "},
        {TOOL("{\"name\": \"a.b\"}"), "tools[0].function.name: "},
        {TOOL("{\"name\": \"\"}"), "tools[0].function.name: "},
        {TOOL("{\"name\": \"a23456789012345678901234567890123456789012345678901234567890123456\"}"),
         "tools[0].function.name: "},
        {TOOL("{\"name\": \"f\", \"parameters\": []}"), "tools[0].function.parameters: "},
        {TOOL("{\"name\": \"f\", \"description\": 1}"), "tools[0].function.description: "},
        {TOOL("{\"name\": \"f\", \"strict\": true}"), "tools[0].function.strict: "},
        {TOOL("{\"name\": \"f\"}}, {\"type\": \"function\", \"function\": {\"name\": \"f\"}"), "tools: "},
        {MORE("\"tool_choice\": \"any\""), "tool_choice: "},
        {MORE("\"tool_choice\": \"required\""), "tool_choice: "},
        {MORE("\"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"f\"}}"),
         "tool_choice.function.name: "},
        {MORE("\"tool_choice\": {\"type\": \"function\"}"), "tool_choice.function: "},
        {MORE("\"tool_choice\": 1"), "tool_choice: "},
        {MORE("\"reasoning_effort\": \"minimal\""), "reasoning_effort: "},
        {MORE("\"reasoning_effort\": \"\""), "reasoning_effort: "},
        {MORE("\"reasoning_effort\": 1"), "reasoning_effort: "},
        {MORE("\"response_format\": {}"), "response_format.type: "},
        {MORE("\"response_format\": {\"type\": \"json_schema\"}"), "response_format.json_schema: "},
        {MORE("\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {}}"),
         "response_format.json_schema.schema: "},
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        struct reading c;
        struct td_err err = {{0}};
        enum td_status st = read_json(rows[i].request, &c, &err);
        bool is_refused = st == TD_E_INVALID || st == TD_E_UNIMPLEMENTED;
        if (!is_refused || strncmp(err.text, rows[i].path, strlen(rows[i].path)) != 0)
            fail_msg("%s: %s: \"%s\"", rows[i].request, td_status_name(st), err.text);
        reading_free(&c);
    }
}

static void any_failed_allocation_is_survived(void **state)
{
    (void)state;
    enum td_status st = TD_E_NO_MEMORY;
    for (uint32_t k = 0; st != TD_OK && k < 100; k++) {
        struct reading c;
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        st = read_json(whole, &c, NULL);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        reading_free(&c);
    }
    assert_int_equal(st, TD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_becomes_a_conversation),
        cmocka_unit_test(a_tool_choice_of_none_offers_no_tools),
        cmocka_unit_test(a_call_id_used_again_means_the_call_before_the_result),
        cmocka_unit_test(what_is_wrong_is_named_by_its_path),
        cmocka_unit_test(any_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests_name("chat_json", tests, NULL, NULL);
}
