/* router/choice.c: tokens of the small checkpoint's vocabulary become the events that clients are shown. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "router/choice.h"

#define MODEL   "tests/tiny/tiny-model"
#define TEXT(s) ((struct td_text){s, sizeof s - 1})

static struct td_tokenizer *tokenizer;
static struct td_chat_format *format;

struct world {
    struct td_order order;
    struct td_choice c;
    char shown[4096]; /* "[R0" a message begins, "text" its texts, "]" its end ("!" when cut), "=stop" the end */
    char call_ids[256];
    char logged[1024]; /* the tokens of log-probabilities, "token@at|" */
    unsigned n_texts;
    enum td_finish finish;
    unsigned n_ends;
    enum td_status say;
};

static void append(char *out, size_t size, const char *fmt, ...)
{
    va_list ap;
    size_t at = strlen(out);
    va_start(ap, fmt);
    int n = vsnprintf(out + at, size - at, fmt, ap);
    va_end(ap);
    assert_true(n >= 0 && (size_t)n < size - at);
}

static enum td_status see(void *user, const struct td_choice_event *e)
{
    struct world *w = user;
    switch (e->type) {
    case TD_CHOICE_BEGIN: append(w->shown, sizeof w->shown, "^"); break;
    case TD_CHOICE_MESSAGE_START:
        append(w->shown, sizeof w->shown, "[%c%u:%s", "RCPT"[e->kind], e -> message,
               e -> kind == TD_CHAT_CALL ? e -> function : "");
        if (e->kind == TD_CHAT_CALL) append(w->call_ids, sizeof w->call_ids, "%s ", e->call_id);
        break;
    case TD_CHOICE_TEXT:
        w->n_texts++;
        append(w->shown, sizeof w->shown, "%s%.*s", e->starts_line ? "\\" : "", (int)e->text.n, e->text.p);
        for (size_t i = 0; i < e->n_tokens; i++) {
            size_t n;
            const uint8_t *p = td_tokenizer_bytes(tokenizer, e->tokens[i].id, &n);
            append(w->logged, sizeof w->logged, "%.*s@%u|", (int)n, (const char *)p, e->tokens[i].at);
        }
        break;
    case TD_CHOICE_MESSAGE_END: append(w->shown, sizeof w->shown, e->is_complete ? "]" : "!"); break;
    case TD_CHOICE_END:
        w->finish = e->finish;
        w->n_ends++;
        append(w->shown, sizeof w->shown, "=%s", td_finish_name(e->finish));
        break;
    }
    return w->say;
}

static void begin(struct world *w)
{
    assert_int_equal(td_choice_init(&w->c, &w->order, format, tokenizer, 42, see, w), TD_OK);
}

static struct world *new_world(bool is_chat)
{
    struct world *w = td_calloc(1, sizeof *w);
    assert_non_null(w);
    td_order_init(&w->order);
    w->order.is_chat = is_chat;
    return w;
}

/* Feeds the tokens of text, step of them at a time, each with a log-probability if those are wanted. */
static void feed(struct world *w, const char *text, uint32_t step)
{
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, &err), TD_OK);
    Tandem__V1__TokenLogprob chosen = TANDEM__V1__TOKEN_LOGPROB__INIT;
    Tandem__V1__PositionLogprobs one = TANDEM__V1__POSITION_LOGPROBS__INIT, *list[64];
    one.chosen = &chosen;
    for (size_t i = 0; i < 64; i++) list[i] = &one;
    assert_true(step <= 64);
    for (size_t i = 0; i < ids.n && !w->c.is_stopped && w->c.st == TD_OK; i += step)
        td_choice_tokens(&w->c, ids.ids + i, (uint32_t)(ids.n - i < step ? ids.n - i : step),
                         w->order.want_logprobs ? list : NULL);
    td_token_list_free(&ids);
}

static void over(struct world *w)
{
    td_choice_deinit(&w->c);
    td_order_deinit(&w->order);
    free(w);
}

static void expect(bool is_chat, const char *tokens, bool hit_limit, const char *shown)
{
    for (uint32_t step = 1; step < 8; step++) {
        struct world *w = new_world(is_chat);
        begin(w);
        feed(w, tokens, step);
        td_choice_end(&w->c, hit_limit);
        assert_string_equal(w->shown, shown);
        assert_int_equal(w->n_ends, 1);
        over(w);
    }
}

static void an_answer_is_reasoning_and_content(void **state)
{
    (void)state;
    expect(true, "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>42.<|return|>",
           false, "^[R0:Easy.][C1:42.]=stop");
    expect(true, "<|channel|>final<|message|>42", true, "^[C0:42!=length");
}

static void messages_without_text_are_not_shown(void **state)
{
    (void)state;
    expect(true, "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>42.<|return|>",
           false, "^[C0:42.]=stop");
    expect(true, "<|channel|>final<|message|><|return|>", false, "^=stop");
}

static void messages_of_other_parties_are_not_shown(void **state)
{
    (void)state;
    expect(true,
           "<|channel|>final<|message|>A<|end|><|start|>user<|message|>B<|end|><|start|>assistant<|channel|>final"
           "<|message|>C<|return|>",
           false, "^[C0:A][C1:\\C]=stop");
}

static void a_call_names_its_function_and_ends_the_turn(void **state)
{
    (void)state;
    expect(true, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\":1}<|call|>", false,
           "^[T0:f{\"a\":1}]=tool_calls");
    expect(true, "<|channel|>commentary to=functions.f<|message|>{\"a", true, "^[T0:f{\"a!=length");
}

static void ids_of_calls_differ_and_stay(void **state)
{
    (void)state;
    char first[256] = "";
    for (unsigned i = 0; i < 2; i++) {
        struct world *w = new_world(true);
        begin(w);
        feed(w,
             "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant to=functions.g<|message|>{}"
             "<|call|>",
             1);
        td_choice_end(&w->c, false);
        assert_string_equal(w->shown, "^[T0:f{}][T1:g{}]=tool_calls");
        assert_int_equal(strlen(w->call_ids), 2 * (5 + 24 + 1));
        assert_memory_not_equal(w->call_ids, w->call_ids + 30, 29);
        if (i == 0)
            strcpy(first, w->call_ids);
        else
            assert_string_equal(first, w->call_ids);
        over(w);
    }
}

static void one_call_may_be_all_that_is_wanted(void **state)
{
    (void)state;
    struct world *w = new_world(true);
    w->order.one_call = true;
    begin(w);
    feed(w, "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant to=functions.g<|message|>{}",
         3);
    assert_true(w->c.is_stopped);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[T0:f{}]=tool_calls");
    over(w);
}

static void who_names_the_function_is_told_stop(void **state)
{
    (void)state;
    struct td_token_list forced = {0};
    struct td_err err = {{0}};
    struct world *w = new_world(true);
    w->order.tool_choice = TD_TOOL_CHOICE_NAMED;
    begin(w);
    assert_int_equal(format->force_call(format, "f", &forced, &err), TD_OK);
    td_choice_force(&w->c, forced.ids, forced.n);
    feed(w, "{\"a\":2}<|call|>", 2);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[T0:f{\"a\":2}]=stop");
    over(w);
    td_token_list_clear(&forced);
    w = new_world(true);
    w->order.tool_choice = TD_TOOL_CHOICE_REQUIRED;
    begin(w);
    assert_int_equal(format->force_call(format, NULL, &forced, &err), TD_OK);
    td_choice_force(&w->c, forced.ids, forced.n);
    feed(w, ".f <|constrain|>json<|message|>{}<|call|>", 1);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[T0:f{}]=tool_calls");
    over(w);
    td_token_list_free(&forced);
}

static void reasoning_may_be_hidden_but_is_counted(void **state)
{
    (void)state;
    struct world *w = new_world(true);
    w->order.hides_reasoning = true;
    begin(w);
    feed(w, "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>42.<|return|>", 1);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[C0:42.]=stop");
    assert_true(td_choice_reasoning_tokens(&w->c) > 0);
    over(w);
}

static void stop_strings_are_searched_in_content_alone(void **state)
{
    (void)state;
    const struct td_text stops[] = {TEXT("stop")};
    for (uint32_t step = 1; step < 8; step++) {
        struct world *w = new_world(true);
        w->order.stop_strings = stops;
        w->order.n_stop_strings = 1;
        begin(w);
        feed(w,
             "<|channel|>analysis<|message|>I stop.<|end|><|start|>assistant<|channel|>final<|message|>Do not stop "
             "here.<|return|>",
             step);
        assert_true(w->c.is_stopped);
        td_choice_end(&w->c, false);
        assert_string_equal(w->shown, "^[R0:I stop.][C1:Do not ]=stop");
        over(w);
    }
}

static void what_is_held_back_comes_with_the_messages_end(void **state)
{
    (void)state;
    const struct td_text stops[] = {TEXT("stopper")};
    struct world *w = new_world(true);
    w->order.stop_strings = stops;
    w->order.n_stop_strings = 1;
    begin(w);
    feed(w, "<|channel|>final<|message|>Do not stop<|return|>", 1);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[C0:Do not stop]=stop");
    over(w);
}

static void logprobs_lie_along_the_content(void **state)
{
    (void)state;
    for (uint32_t step = 1; step < 8; step++) {
        struct world *w = new_world(true);
        w->order.want_logprobs = true;
        begin(w);
        feed(w,
             "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>9 + 8<|return|>",
             step);
        td_choice_end(&w->c, false);
        char tokens[64] = "";
        for (const char *p = w->logged; *p != '\0'; p++) {
            if (*p == '@') {
                p = strchr(p, '|');
                continue;
            }
            append(tokens, sizeof tokens, "%c", *p);
        }
        assert_string_equal(tokens, "9 + 8");
        over(w);
    }
}

static void logprobs_of_a_stop_string_are_not_shown(void **state)
{
    (void)state;
    const struct td_text stops[] = {TEXT("+ 8")};
    struct world *w = new_world(true);
    w->order.want_logprobs = true;
    w->order.stop_strings = stops;
    w->order.n_stop_strings = 1;
    begin(w);
    feed(w, "<|channel|>final<|message|>9 + 8 = 17<|return|>", 1);
    td_choice_end(&w->c, false);
    assert_string_equal(w->shown, "^[C0:9 ]=stop");
    assert_null(strstr(w->logged, "8@"));
    assert_non_null(strstr(w->logged, "9@0|"));
    over(w);
}

static void a_plain_prompts_answer_is_one_message(void **state)
{
    (void)state;
    expect(false, "Once upon a time<|return|>", false, "^[C0:Once upon a time]=stop");
    expect(false, "Once", true, "^[C0:Once!=length");
    expect(false, "<|return|>", false, "^=stop");
}

static void nothing_follows_a_listener_that_says_no(void **state)
{
    (void)state;
    struct world *w = new_world(true);
    begin(w);
    w->say = TD_E_SLOW_CLIENT;
    feed(w, "<|channel|>final<|message|>42.<|return|>", 1);
    assert_int_equal(td_choice_end(&w->c, false), TD_E_SLOW_CLIENT);
    assert_string_equal(w->shown, "^");
    over(w);
}

static void no_memory_is_said_whenever_it_happens(void **state)
{
    (void)state;
    const struct td_text stops[] = {TEXT("zz")};
    bool was_complete = false;
    for (uint32_t k = 0; !was_complete; k++) {
        struct world *w = new_world(true);
        w->order.want_logprobs = true;
        w->order.stop_strings = stops;
        w->order.n_stop_strings = 1;
        struct td_token_list ids = {0};
        struct td_err err = {{0}};
        const char *text = "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant<|channel|>final"
                           "<|message|>9 + z8<|return|>";
        assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, &err), TD_OK);
        Tandem__V1__PositionLogprobs one = TANDEM__V1__POSITION_LOGPROBS__INIT, *l = &one;
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = td_choice_init(&w->c, &w->order, format, tokenizer, 42, see, w);
        for (size_t i = 0; st == TD_OK && i < ids.n; i++) st = td_choice_tokens(&w->c, &ids.ids[i], 1, &l);
        if (st == TD_OK) st = td_choice_end(&w->c, false);
        td_fault_disarm_all();
        was_complete = st == TD_OK;
        if (was_complete)
            assert_string_equal(w->shown, "^[T0:f{}][C1:9 + z8]=tool_calls");
        else
            assert_int_equal(st, TD_E_NO_MEMORY);
        td_token_list_free(&ids);
        over(w);
        assert_true(k < 200);
    }
}

static int set_up(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    return td_tokenizer_load(MODEL, &tokenizer, &err) != TD_OK ||
           td_chat_format_open("harmony", tokenizer, &format, &err) != TD_OK;
}

static int tear_down(void **state)
{
    (void)state;
    td_chat_format_destroy(format);
    td_tokenizer_destroy(tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_is_reasoning_and_content),
        cmocka_unit_test(messages_without_text_are_not_shown),
        cmocka_unit_test(messages_of_other_parties_are_not_shown),
        cmocka_unit_test(a_call_names_its_function_and_ends_the_turn),
        cmocka_unit_test(ids_of_calls_differ_and_stay),
        cmocka_unit_test(one_call_may_be_all_that_is_wanted),
        cmocka_unit_test(who_names_the_function_is_told_stop),
        cmocka_unit_test(reasoning_may_be_hidden_but_is_counted),
        cmocka_unit_test(stop_strings_are_searched_in_content_alone),
        cmocka_unit_test(what_is_held_back_comes_with_the_messages_end),
        cmocka_unit_test(logprobs_lie_along_the_content),
        cmocka_unit_test(logprobs_of_a_stop_string_are_not_shown),
        cmocka_unit_test(a_plain_prompts_answer_is_one_message),
        cmocka_unit_test(nothing_follows_a_listener_that_says_no),
        cmocka_unit_test(no_memory_is_said_whenever_it_happens),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
