/* router/chat_order.c and chat_events.c: what a Chat request asks for, and what its client sees of a choice's events.
 */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "router/chat.h"

#define MODEL "tests/tiny/tiny-model"

static struct td_tokenizer *tokenizer;
static struct td_chat_format *format;

/* --- requests ----------------------------------------------------------------------------------------------------- */

static ProtobufCBinaryData bytes_of(const char *s)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)s, .len = strlen(s)};
}

static Tandem__V1__ChatMessage message_of(const char *role, const char *content)
{
    Tandem__V1__ChatMessage m = TANDEM__V1__CHAT_MESSAGE__INIT;
    m.role = (char *)role;
    m.content = bytes_of(content);
    return m;
}

/* A conversation with everything: instructions, parts, a call and its result, two tools. */
struct request {
    Tandem__V1__ChatRequest m;
    Tandem__V1__ChatMessage messages[4], *list[4];
    Tandem__V1__ContentPart parts[2], *part_list[2];
    Tandem__V1__ToolCall call, *calls[1];
    Tandem__V1__Tool tools[2], *tool_list[2];
    Tandem__V1__Sampling sampling;
    Tandem__V1__Stop stop;
    ProtobufCBinaryData stop_strings[1];
};

static struct request *whole_request(void)
{
    static struct request r;
    tandem__v1__chat_request__init(&r.m);
    r.messages[0] = message_of("developer", "Be brief.");
    r.messages[1] = message_of("user", "");
    r.messages[2] = message_of("assistant", "");
    r.messages[3] = message_of("tool", "4 degrees");
    for (int i = 0; i < 4; i++) r.list[i] = &r.messages[i];
    for (int i = 0; i < 2; i++) {
        tandem__v1__content_part__init(&r.parts[i]);
        r.parts[i].text = bytes_of(i == 0 ? "In Oslo " : "today?");
        r.part_list[i] = &r.parts[i];
        tandem__v1__tool__init(&r.tools[i]);
        r.tools[i].name = (char *)(i == 0 ? "get_weather" : "get_time");
        r.tool_list[i] = &r.tools[i];
    }
    r.messages[1].parts = r.part_list;
    r.messages[1].n_parts = 2;
    r.tools[0].description = (char *)"Weather.";
    r.tools[0].parameters = bytes_of("{\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}}}");
    tandem__v1__tool_call__init(&r.call);
    r.call.id = (char *)"call_1";
    r.call.name = (char *)"get_weather";
    r.call.arguments = bytes_of("{\"city\":\"Oslo\"}");
    r.calls[0] = &r.call;
    r.messages[2].reasoning = bytes_of("Look it up.");
    r.messages[2].tool_calls = r.calls;
    r.messages[2].n_tool_calls = 1;
    r.messages[3].tool_call_id = (char *)"call_1";
    tandem__v1__sampling__init(&r.sampling);
    tandem__v1__stop__init(&r.stop);
    r.sampling.top_k = 7;
    r.stop.max_tokens = 9;
    r.stop_strings[0] = bytes_of("END");
    r.m.messages = r.list;
    r.m.n_messages = 4;
    r.m.tools = r.tool_list;
    r.m.n_tools = 2;
    r.m.sampling = &r.sampling;
    r.m.stop = &r.stop;
    r.m.stop_strings = r.stop_strings;
    r.m.n_stop_strings = 1;
    r.m.current_date = (char *)"2025-11-03";
    r.m.reasoning_effort = (char *)"low";
    return &r;
}

static void a_request_becomes_an_order_of_its_own(void **state)
{
    (void)state;
    struct request *r = whole_request();
    struct td_order o;
    struct td_err err = {{0}};
    td_order_init(&o);
    if (td_chat_read_order(&r->m, &o, &err) != TD_OK) fail_msg("%s", err.text);
    memset(r, 0, sizeof *r); /* nothing of it is needed any more */
    assert_int_equal(o.sampling.top_k, 7);
    assert_int_equal(o.stop.max_tokens, 9);
    assert_int_equal(o.n_choices, 1);
    assert_true(o.n_stop_strings == 1 && memcmp(o.stop_strings[0].p, "END", 3) == 0);
    struct td_token_list ids = {0};
    struct td_buf text = {0};
    assert_int_equal(format->render(format, &o.chat, &ids, &err), TD_OK);
    td_tokenizer_decode(tokenizer, ids.ids, ids.n, true, &text);
    static const char *const expected[] = {
        "Current date: 2025-11-03\n\nReasoning: low",
        "# Instructions\n\nBe brief.\n\n# Tools",
        "// Weather.\ntype get_weather = (_: {\ncity?: string,\n}) => any;\n\ntype get_time = () => any;",
        "<|start|>user<|message|>In Oslo today?<|end|>",
        ("<|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.get_weather"
         "<|channel|>commentary json<|message|>{\"city\":\"Oslo\"}<|call|>"),
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>4 degrees<|end|><|start|>assistant",
    };
    for (size_t i = 0; i < TD_COUNT(expected); i++)
        if (strstr(td_buf_cstr(&text), expected[i]) == NULL)
            fail_msg("\"%s\" is not in:\n%s", expected[i], td_buf_cstr(&text));
    td_buf_free(&text);
    td_token_list_free(&ids);
    td_order_deinit(&o);
}

static void requests_are_refused_by_field(void **state)
{
    (void)state;
    static char names[129][8];
    static Tandem__V1__Tool many[129], *many_list[129];
    for (int i = 0; i < 129; i++) {
        tandem__v1__tool__init(&many[i]);
        snprintf(names[i], sizeof names[i], "f%d", i);
        many[i].name = names[i];
        many_list[i] = &many[i];
    }
#define REFUSE(change, field)                                                                                          \
    do {                                                                                                               \
        struct request *r = whole_request();                                                                           \
        struct td_order o;                                                                                             \
        struct td_err err = {{0}};                                                                                     \
        td_order_init(&o);                                                                                             \
        change;                                                                                                        \
        assert_int_equal(td_chat_read_order(&r->m, &o, &err), TD_E_INVALID);                                           \
        if (strncmp(err.text, field ": ", strlen(field) + 2) != 0) fail_msg("%s: %s", field, err.text);                \
        td_order_deinit(&o);                                                                                           \
    } while (0)
    REFUSE(r->m.n_messages = 0, "messages");
    REFUSE(r->messages[1].role = (char *)"", "messages[1].role");
    REFUSE(r->messages[1].role = (char *)"robot", "messages[1].role");
    REFUSE(r->messages[0].content = bytes_of("\xc3"), "messages[0].content");
    REFUSE(r->messages[1].content = bytes_of("beside parts"), "messages[1].content");
    REFUSE(r->parts[1].text = bytes_of("\xff"), "messages[1].parts[1].text");
    REFUSE(r->messages[2].reasoning = bytes_of("\xff"), "messages[2].reasoning");
    REFUSE(r->call.name = (char *)"", "messages[2].tool_calls[0].name");
    REFUSE(r->call.arguments = bytes_of("\xff"), "messages[2].tool_calls[0].arguments");
    REFUSE(r->messages[3].tool_call_id = (char *)"other", "messages[3].tool_call_id");
    REFUSE(r->messages[3].tool_call_id = (char *)"", "messages[3].name");
    REFUSE(r->m.reasoning_effort = (char *)"minimal", "reasoning_effort");
    REFUSE(r->m.current_date = (char *)"3.11.2025", "current_date");
    REFUSE(r->tools[1].name = (char *)"a.b", "tools[1].name");
    REFUSE(r->tools[1].name = (char *)"get_weather", "tools[1].name");
    REFUSE(r->tools[0].parameters = bytes_of("{"), "tools[0].parameters");
    REFUSE(r->tools[0].parameters = bytes_of("[]"), "tools[0].parameters");
    REFUSE((r->m.tools = many_list, r->m.n_tools = 129), "tools");
    REFUSE(r->m.tool_choice = TANDEM__V1__TOOL_CHOICE__TOOLS_NAMED, "tool_name");
    REFUSE((r->m.n_tools = 0, r->m.tool_choice = TANDEM__V1__TOOL_CHOICE__TOOLS_REQUIRED), "tool_choice");
    REFUSE(r->m.n = 1000, "n");
    REFUSE(r->m.n_logprobs = 21, "n_logprobs");
    REFUSE(r->stop_strings[0] = bytes_of(""), "stop_strings[0]");
    REFUSE(r->stop_strings[0] = bytes_of("\xff"), "stop_strings[0]");
}

static void the_choice_of_tools_is_taken_over(void **state)
{
    (void)state;
    for (int choice = 0; choice < 5; choice++) {
        struct request *r = whole_request();
        struct td_order o;
        td_order_init(&o);
        r->m.tool_choice = (Tandem__V1__ToolChoice)choice;
        r->m.tool_name = (char *)"get_time";
        assert_int_equal(td_chat_read_order(&r->m, &o, NULL), TD_OK);
        static const enum td_tool_choice expected[] = {TD_TOOL_CHOICE_AUTO, TD_TOOL_CHOICE_NONE,
                                                       TD_TOOL_CHOICE_REQUIRED, TD_TOOL_CHOICE_NAMED,
                                                       TD_TOOL_CHOICE_AUTO /* a newer client's */};
        assert_int_equal(o.tool_choice, expected[choice]);
        assert_int_equal(o.chat.n_tools, choice == TANDEM__V1__TOOL_CHOICE__TOOLS_NONE ? 0 : 2);
        if (o.tool_choice == TD_TOOL_CHOICE_NAMED) assert_string_equal(o.tool_name, "get_time");
        td_order_deinit(&o);
    }
}

static void failed_allocations_refuse_the_request(void **state)
{
    (void)state;
    enum td_status st = TD_E_NO_MEMORY;
    for (uint32_t k = 0; st != TD_OK && k < 200; k++) {
        struct td_order o;
        td_order_init(&o);
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        st = td_chat_read_order(&whole_request()->m, &o, NULL);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        td_order_deinit(&o);
    }
    assert_int_equal(st, TD_OK);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

struct world {
    struct td_order order;
    struct td_choice choice;
    struct td_chat_writer writer;
    enum td_status send_st;
    unsigned n_events, n_ends, n_logprobs;
    char shown[2048]; /* "R0:text|F1:text|..." in order of deltas */
    char per_channel[TD_CHAT_N_CHANNELS][1024];
    char first_id[80], recipient[80], call_id[80];
    Tandem__V1__FinishReason finish;
    uint32_t completion_tokens, reasoning_tokens;
};

static void append(char *out, size_t size, const void *p, size_t n)
{
    size_t at = strlen(out);
    assert_true(at + n < size);
    if (n > 0) memcpy(out + at, p, n);
    out[at + n] = '\0';
}

static void see_delta(struct world *t, const Tandem__V1__ChatDelta *d)
{
    t->n_ends += d->end != TANDEM__V1__CHAT_MESSAGE_END__MESSAGE_OPEN;
    t->n_logprobs += (unsigned)d->n_logprobs;
    if (d->recipient[0] != '\0') append(t->recipient, sizeof t->recipient, d->recipient, strlen(d->recipient));
    if (d->call_id[0] != '\0') append(t->call_id, sizeof t->call_id, d->call_id, strlen(d->call_id));
    if (d->text.len == 0) return;
    char head[16];
    snprintf(head, sizeof head, "%c%u:", "?RFPT"[d->channel], d -> message_index);
    append(t->shown, sizeof t->shown, head, strlen(head));
    append(t->shown, sizeof t->shown, d->text.data, d->text.len);
    append(t->shown, sizeof t->shown, "|", 1);
    append(t->per_channel[d->channel], sizeof t->per_channel[0], d->text.data, d->text.len);
}

static enum td_status see(void *user, const ProtobufCMessage *event)
{
    struct world *t = user;
    const Tandem__V1__ChatEvent *e = (const Tandem__V1__ChatEvent *)event;
    assert_int_equal(t->finish, 0); /* nothing follows the end */
    assert_int_equal(e->choice, 3);
    if (t->n_events++ == 0)
        snprintf(t->first_id, sizeof t->first_id, "%s", e->request_id);
    else
        assert_string_equal(e->request_id, "");
    for (size_t i = 0; i < e->n_deltas; i++) see_delta(t, e->deltas[i]);
    t->finish = e->finish_reason;
    assert_int_equal(e->usage != NULL, e->finish_reason != 0);
    if (e->usage != NULL) t->completion_tokens = e->usage->completion_tokens;
    t->reasoning_tokens = e->reasoning_tokens;
    return t->send_st;
}

static enum td_status on_event(void *user, const struct td_choice_event *e)
{
    struct world *t = user;
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    Tandem__V1__Timing timing = TANDEM__V1__TIMING__INIT;
    usage.completion_tokens = 5;
    struct td_chat_summary summary = {&usage, &timing, 2};
    return td_chat_write(&t->writer, e, e->type == TD_CHOICE_END ? &summary : NULL);
}

static struct world *open_world(void)
{
    struct world *t = calloc(1, sizeof *t);
    td_order_init(&t->order);
    t->order.is_chat = true;
    t->writer = (struct td_chat_writer){.send = see, .user = t, .choice = 3, .request_id = "req-test"};
    enum td_status st = td_choice_init(&t->choice, &t->order, format, tokenizer, 42, on_event, t);
    if (st == TD_OK) return t;
    td_choice_deinit(&t->choice);
    free(t);
    return NULL;
}

static void close_world(struct world *t)
{
    td_choice_deinit(&t->choice);
    td_order_deinit(&t->order);
    free(t);
}

/* By single tokens, or all at once. */
static enum td_status say(struct world *t, const char *text, bool at_once)
{
    struct td_token_list ids = {0};
    enum td_status st = TD_OK;
    assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    if (at_once) st = td_choice_tokens(&t->choice, ids.ids, (uint32_t)ids.n, NULL);
    for (size_t i = 0; i < ids.n && !at_once && st == TD_OK; i++)
        st = td_choice_tokens(&t->choice, &ids.ids[i], 1, NULL);
    td_token_list_free(&ids);
    return st;
}

static void reasoning_and_answer_come_apart(void **state)
{
    (void)state;
    static const char text[] = "<|channel|>analysis<|message|>Easy "
                               "sum.<|end|><|start|>assistant<|channel|>final<|message|>It is 85.<|return|>";
    for (int at_once = 0; at_once < 2; at_once++) {
        struct world *t = open_world();
        assert_int_equal(say(t, text, at_once), TD_OK);
        assert_int_equal(td_choice_end(&t->choice, false), TD_OK);
        assert_string_equal(t->first_id, "req-test");
        assert_string_equal(t->per_channel[TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING], "Easy sum.");
        assert_string_equal(t->per_channel[TANDEM__V1__CHAT_CHANNEL__CHANNEL_FINAL], "It is 85.");
        assert_int_equal(t->finish, TANDEM__V1__FINISH_REASON__FINISH_STOP);
        assert_true(t->completion_tokens == 5 && t->reasoning_tokens == 2 && t->n_ends == 2);
        if (at_once) assert_string_equal(t->shown, "R0:Easy sum.|F1:It is 85.|");
        close_world(t);
    }
}

static void the_first_event_comes_with_the_first_token_others_only_with_news(void **state)
{
    (void)state;
    struct world *t = open_world();
    say(t, "<|channel|>", false);
    assert_int_equal(t->n_events, 1);
    say(t, "final<|message|>", false);
    assert_int_equal(t->n_events, 1);
    say(t, "Hi", false);
    assert_true(t->n_events > 1);
    close_world(t);
}

static void texts_of_a_channel_put_end_to_end_are_lines(void **state)
{
    (void)state;
    struct world *t = open_world();
    say(t,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Three.<|return|>",
        false);
    assert_int_equal(td_choice_end(&t->choice, false), TD_OK);
    assert_string_equal(t->per_channel[TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING], "One.\nTwo.");
    assert_string_equal(t->per_channel[TANDEM__V1__CHAT_CHANNEL__CHANNEL_FINAL], "Three.");
    close_world(t);
}

static void a_tool_call_says_once_what_it_calls(void **state)
{
    (void)state;
    struct world *t = open_world();
    say(t, "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{\"city\":\"Paris\"}<|call|>",
        false);
    assert_int_equal(td_choice_end(&t->choice, false), TD_OK);
    assert_string_equal(t->per_channel[TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL], "{\"city\":\"Paris\"}");
    assert_string_equal(t->recipient, "functions.get_time");
    assert_int_equal(strncmp(t->call_id, "call_", 5), 0);
    assert_int_equal(t->finish, TANDEM__V1__FINISH_REASON__FINISH_TOOL_CALLS);
    close_world(t);
}

static void what_the_client_cannot_take_is_passed_on(void **state)
{
    (void)state;
    struct world *t = open_world();
    t->send_st = TD_E_SLOW_CLIENT;
    assert_int_equal(say(t, "<|channel|>final<|message|>Hi", false), TD_E_SLOW_CLIENT);
    close_world(t);
}

static void failed_allocations_end_the_choice_not_the_process(void **state)
{
    (void)state;
    static const char text[] =
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.f<|message|>{}<|call|>";
    struct td_token_list ids = {0};
    enum td_status st = TD_E_NO_MEMORY;
    assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    for (uint32_t k = 0; st != TD_OK && k < 200; k++) {
        struct world *t = open_world();
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        st = td_choice_tokens(&t->choice, ids.ids, (uint32_t)ids.n, NULL);
        if (st == TD_OK) st = td_choice_end(&t->choice, false);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        close_world(t);
    }
    assert_int_equal(st, TD_OK);
    td_token_list_free(&ids);
}

static int open_model(void **state)
{
    struct td_err err = {{0}};
    (void)state;
    assert_int_equal(td_tokenizer_load(MODEL, &tokenizer, &err), TD_OK);
    assert_int_equal(td_chat_format_open("harmony", tokenizer, &format, &err), TD_OK);
    return 0;
}
static int close_model(void **state)
{
    (void)state;
    td_chat_format_destroy(format);
    td_tokenizer_destroy(tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_becomes_an_order_of_its_own),
        cmocka_unit_test(requests_are_refused_by_field),
        cmocka_unit_test(the_choice_of_tools_is_taken_over),
        cmocka_unit_test(failed_allocations_refuse_the_request),
        cmocka_unit_test(reasoning_and_answer_come_apart),
        cmocka_unit_test(the_first_event_comes_with_the_first_token_others_only_with_news),
        cmocka_unit_test(texts_of_a_channel_put_end_to_end_are_lines),
        cmocka_unit_test(a_tool_call_says_once_what_it_calls),
        cmocka_unit_test(what_the_client_cannot_take_is_passed_on),
        cmocka_unit_test(failed_allocations_end_the_choice_not_the_process),
    };
    return cmocka_run_group_tests_name("chat", tests, open_model, close_model);
}
