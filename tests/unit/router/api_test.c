/* The JSON API's way from a body to an order: what each endpoint makes of its fields, and how it names what is wrong.
 */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "router/api_int.h"
#include "router/router_int.h"

static struct td_router router;

/* main.c's, which is not linked here: nothing begins, so nobody leaves. */
void td_router_client_left(struct td_router *ro) { (void)ro; }
void td_router_update_ready(struct td_router *ro) { (void)ro; }

struct world {
    struct td_api_call call;
    struct td_err err;
};

static struct world *new_world(const struct td_api_endpoint *e)
{
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->call = (struct td_api_call){.router = &router, .endpoint = e};
    td_order_init(&w->call.order);
    if (e->state_bytes > 0) w->call.state = calloc(1, e->state_bytes);
    return w;
}

static enum td_status read_as(struct world *w, const char *text)
{
    struct td_buf body = {0};
    td_buf_str(&body, text);
    enum td_status st = td_api_read_body(&w->call, &body, &w->err);
    td_buf_free(&body);
    return st;
}

static void over(struct world *w)
{
    if (w->call.endpoint->drop != NULL) w->call.endpoint->drop(&w->call);
    td_order_deinit(&w->call.order);
    free(w->call.state);
    free(w);
}

static const char everything[] =
    "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\"content\":\"Be.\"},{\"role\":\"user\",\"content\":[{"
    "\"type\":"
    "\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\\u0000c\"}]},{\"role\":\"assistant\",\"content\":null,"
    "\"reasoning\":\"r\",\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"f\","
    "\"arguments\":"
    "\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"ok\"}],\"tools\":[{\"type\":\"function\","
    "\"function\":{\"name\":\"f\",\"description\":\"d\",\"parameters\":{}}}],\"tool_choice\":\"required\","
    "\"parallel_tool_calls\":false,\"max_tokens\":9,\"max_completion_tokens\":7.0,\"n\":2,\"stop\":[\"x\",\"yy\"],"
    "\"seed\":-5,\"temperature\":0.5,\"top_p\":0,\"presence_penalty\":1,\"frequency_penalty\":-1,\"logit_bias\":{\"5\":"
    "-1.5},\"logprobs\":true,\"top_logprobs\":2,\"reasoning_effort\":\"low\",\"stream\":true,\"top_k\":3,\"min_p\":0."
    "25,"
    "\"repetition_penalty\":1.5,\"min_tokens\":1,\"ignore_eos\":true,\"stop_token_ids\":[4,5],\"include_reasoning\":"
    "false,\"user\":\"u\",\"metadata\":{\"a\":\"b\"},\"nobody\":[1,{}],\"response_format\":{\"type\":\"text\"}}";

static void a_chat_may_ask_for_everything_at_once(void **state)
{
    (void)state;
    struct world *w = new_world(&td_api_chat);
    assert_int_equal(read_as(w, everything), TD_OK);
    const struct td_order *o = &w->call.order;
    assert_true(o->is_chat && w->call.is_stream && o->want_logprobs && o->hides_reasoning && o->one_call);
    assert_string_equal(o->model, "m");
    assert_int_equal(o->chat.n_messages, 4);
    assert_int_equal(o->chat.messages[1].n_parts, 2);
    assert_int_equal(o->chat.messages[1].parts[1].n, 3);
    assert_memory_equal(o->chat.messages[1].parts[1].p, "b\0c", 3);
    assert_memory_equal(o->chat.messages[3].name.p, "f", 2);
    assert_int_equal(o->chat.effort, TD_CHAT_EFFORT_LOW);
    assert_int_equal(o->chat.n_tools, 1);
    assert_int_equal(o->tool_choice, TD_TOOL_CHOICE_REQUIRED);
    assert_int_equal(o->stop.max_tokens, 7); /* the newer name counts */
    assert_int_equal(o->stop.min_tokens, 1);
    assert_int_equal(o->stop.n_token_ids, 2);
    assert_true(o->stop.ignore_eos);
    assert_int_equal(o->n_choices, 2);
    assert_int_equal(o->n_stop_strings, 2);
    assert_true(o->sampling.seed == (uint64_t)-5 && o->sampling.temperature == 0.5f && o->sampling.top_k == 3);
    assert_true(o->sampling.top_p > 0 && o->sampling.top_p < 1e-3f); /* 0 means: the likeliest */
    assert_int_equal(o->sampling.n_logit_bias, 1);
    assert_true(o->sampling.logit_bias[0]->key == 5 && o->sampling.logit_bias[0]->value == -1.5f);
    assert_int_equal(o->n_logprobs, 2);
    over(w);
}

static void null_is_as_good_as_nothing(void **state)
{
    (void)state;
    struct world *w = new_world(&td_api_chat);
    assert_int_equal(read_as(w, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":null}],\"tools\":null,"
                                "\"temperature\":null,\"stop\":null,\"n\":null,\"logit_bias\":null,\"best_of\":null,"
                                "\"response_format\":null,\"stream_options\":null,\"functions\":[],\"suffix\":\"\"}"),
                     TD_OK);
    assert_int_equal(w->call.order.n_choices, 1);
    assert_int_equal(w->call.order.sampling.temperature_opt_case, TANDEM__V1__SAMPLING__TEMPERATURE_OPT__NOT_SET);
    over(w);
}

static void no_tools_are_offered_when_none_is_chosen(void **state)
{
    (void)state;
    struct world *w = new_world(&td_api_chat);
    assert_int_equal(read_as(w,
                             "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"type\":\"function\","
                             "\"function\":{\"name\":\"f\"}}],\"tool_choice\":\"none\"}"),
                     TD_OK);
    assert_int_equal(w->call.order.chat.n_tools, 0);
    over(w);
}

static void prompts_come_in_four_forms(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        size_t n_prompts, n_ids; /* of the first; 0: a text */
    } forms[] = {
        {"\"text\"", 1, 0},    {"[\"a\",\"b\",\"c\"]", 3, 0}, {"[1,2,3]", 1, 3},
        {"[[1,2],[3]]", 2, 2}, {"[\"a\",[7]]", 2, 0},
    };
    for (size_t i = 0; i < TD_COUNT(forms); i++) {
        char body[128];
        struct world *w = new_world(&td_api_completions);
        snprintf(body, sizeof body, "{\"prompt\":%s}", forms[i].json);
        assert_int_equal(read_as(w, body), TD_OK);
        const struct td_order *o = &w->call.order;
        assert_int_equal(o->n_prompts, forms[i].n_prompts);
        assert_int_equal(o->prompts[0].n_ids, forms[i].n_ids);
        assert_int_equal(o->prompts[0].ids == NULL, forms[i].n_ids == 0);
        assert_int_equal(o->stop.max_tokens, 16);
        over(w);
    }
}

static void errors_begin_with_the_fields_path(void **state)
{
    (void)state;
    static const struct {
        const char *body, *text;
        enum td_status st;
    } cases[] = {
        {"{}", "messages: must be given", TD_E_INVALID},
        {"{\"messages\":{}}", "messages: must be an array, not an object", TD_E_INVALID},
        {"{\"messages\":[3]}", "messages[0]: must be an object", TD_E_INVALID},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
         "messages[0].content[0].text: must be given", TD_E_INVALID},
        {"{\"messages\":[{\"role\":\"user\",\"content\":7}]}",
         "messages[0].content: must be a string or an array of parts", TD_E_INVALID},
        {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c\",\"function\":{\"name\":\"f\"}}]}]}",
         "messages[0].tool_calls[0].function.arguments: must be given, as a string", TD_E_INVALID},
        {"{\"messages\":[],\"model\":7}", "model: must be a string, not a number", TD_E_INVALID},
        {"{\"temperature\":true}", "temperature: must be a number, not a boolean", TD_E_INVALID},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"n\":1.5}", "n: must be a whole number, not a number",
         TD_E_INVALID},
        {"{\"guided_json\":{}}", "guided_json: constrained output is not supported yet", TD_E_UNIMPLEMENTED},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct world *w = new_world(&td_api_chat);
        assert_int_equal(read_as(w, cases[i].body), cases[i].st);
        if (strncmp(w->err.text, cases[i].text, strlen(cases[i].text)) != 0)
            fail_msg("%s: \"%s\", not \"%s\"", cases[i].body, w->err.text, cases[i].text);
        over(w);
    }
}

static void a_conversation_has_no_more_calls_than_can_be_looked_up(void **state)
{
    (void)state;
    struct td_buf body = {0};
    td_buf_str(&body, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[");
    for (unsigned i = 0; i < 5000; i++)
        td_buf_printf(&body, "%s{\"id\":\"c\",\"function\":{\"name\":\"f\",\"arguments\":\"\"}}", i > 0 ? "," : "");
    td_buf_str(&body, "]}]}");
    struct world *w = new_world(&td_api_chat);
    assert_int_equal(read_as(w, td_buf_cstr(&body)), TD_E_INVALID);
    assert_non_null(strstr(w->err.text, "messages: "));
    over(w);
    td_buf_free(&body);
}

/* Each allocation fails once. */
static void no_memory_is_said_whenever_it_happens(void **state)
{
    (void)state;
    static const struct {
        const struct td_api_endpoint *endpoint;
        const char *body;
    } cases[] = {
        {&td_api_chat, everything},
        {&td_api_completions, "{\"prompt\":[[1],[2]],\"stop\":\"x\",\"logit_bias\":{\"1\":1},\"stop_token_ids\":[1]}"},
        {&td_api_completions, "{\"prompt\":\"text\",\"n\":3}"},
        {&td_api_tokenize, "{\"prompt\":\"Hello there\"}"},
        {&td_api_tokenize, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}"},
        {&td_api_detokenize, "{\"tokens\":[65,66,67]}"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        enum td_status st = TD_E_NO_MEMORY;
        for (uint32_t k = 0; st == TD_E_NO_MEMORY; k++) {
            struct world *w = new_world(cases[i].endpoint);
            struct td_buf body = {0};
            td_buf_str(&body, cases[i].body);
            td_fault_arm(TD_FAULT_ALLOC, k, 1);
            st = td_api_read_body(&w->call, &body, &w->err);
            td_fault_disarm_all();
            td_buf_free(&body);
            over(w);
            assert_true(k < 500);
        }
        assert_int_equal(st, TD_OK);
    }
}

static int set_up(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    strcpy(router.cfg.current_date, "2025-11-03");
    return td_tokenizer_load("tests/tiny/tiny-model", &router.tokenizer, &err) != TD_OK ||
           td_chat_format_open("harmony", router.tokenizer, &router.format, &err) != TD_OK;
}

static int tear_down(void **state)
{
    (void)state;
    td_chat_format_destroy(router.format);
    td_tokenizer_destroy(router.tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chat_may_ask_for_everything_at_once),
        cmocka_unit_test(null_is_as_good_as_nothing),
        cmocka_unit_test(no_tools_are_offered_when_none_is_chosen),
        cmocka_unit_test(prompts_come_in_four_forms),
        cmocka_unit_test(errors_begin_with_the_fields_path),
        cmocka_unit_test(a_conversation_has_no_more_calls_than_can_be_looked_up),
        cmocka_unit_test(no_memory_is_said_whenever_it_happens),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
