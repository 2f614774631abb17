/* router/answer.c: what a client is shown of its request's tokens, with the small checkpoint's tokenizer. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "router/answer.h"

#define MODEL "tests/tiny/tiny-model"

static struct td_tokenizer *tokenizer;
static struct virtual_env env;
static struct td_router_ports ports = {.env = &env.env};

struct world {
    struct td_answer a;
    struct td_request r;
    uint32_t n_tokens, tokens[512];
    Tandem__V1__Sampling sampling;
    enum td_status send_st;
    unsigned n_events;
    char text[2048]; /* Generate: all text */
    char first_id[80];
    uint64_t seed;
    Tandem__V1__FinishReason finish;
    uint32_t completion_tokens, n_logprobs;
};

static void append(char *out, size_t size, const void *p, size_t n)
{
    size_t at = strlen(out);
    assert_true(at + n < size);
    if (n > 0) memcpy(out + at, p, n);
    out[at + n] = '\0';
}

static void see_generate(struct world *t, const Tandem__V1__GenerateEvent *e)
{
    if (t->n_events == 0) {
        snprintf(t->first_id, sizeof t->first_id, "%s", e->request_id);
        t->seed = e->seed;
    } else {
        assert_string_equal(e->request_id, "");
    }
    append(t->text, sizeof t->text, e->text.data, e->text.len);
    t->n_logprobs += (uint32_t)e->n_logprobs;
    assert_int_equal(t->finish, 0); /* nothing follows the end */
    t->finish = e->finish_reason;
    assert_int_equal(e->usage != NULL, e->finish_reason != 0);
    assert_int_equal(e->timing != NULL, e->finish_reason != 0);
    if (e->usage != NULL) t->completion_tokens = e->usage->completion_tokens;
}

static enum td_status see(void *user, const ProtobufCMessage *event)
{
    struct world *t = user;
    see_generate(t, (const Tandem__V1__GenerateEvent *)event);
    t->n_events++;
    return t->send_st;
}

static struct world *open_answer(void)
{
    struct world *t = calloc(1, sizeof *t);
    tandem__v1__sampling__init(&t->sampling);
    t->sampling.seed = 99;
    td_request_init(&t->r, &ports);
    snprintf(t->r.id, sizeof t->r.id, "req-test");
    t->r.tokens = t->tokens;
    t->r.sampling = &t->sampling;
    td_answer_init(&t->a, tokenizer, see, t);
    return t;
}
static void close_answer(struct world *t)
{
    td_answer_deinit(&t->a);
    free(t);
}

static enum td_status say_ids(struct world *t, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) t->tokens[t->r.n_tokens++] = ids[i];
    return td_answer_tokens(&t->a, &t->r, (uint32_t)n, NULL);
}
/* One event per token, as a model writes. */
static void say(struct world *t, const char *text)
{
    struct td_token_list ids = {0};
    struct td_err err;
    assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, &err), TD_OK);
    for (size_t i = 0; i < ids.n; i++) assert_int_equal(say_ids(t, &ids.ids[i], 1), TD_OK);
    td_token_list_free(&ids);
}
static void end(struct world *t, Tandem__V1__FinishReason reason)
{
    t->r.finish_reason = reason;
    assert_int_equal(td_answer_end(&t->a, &t->r), TD_OK);
    assert_int_equal(t->finish, reason);
    assert_int_equal(t->completion_tokens, t->r.n_tokens);
}

static int open_model(void **state)
{
    struct td_err err = {{0}};
    (void)state;
    virtual_env_init(&env);
    assert_int_equal(td_tokenizer_load(MODEL, &tokenizer, &err), TD_OK);
    return 0;
}
static int close_model(void **state)
{
    (void)state;
    td_tokenizer_destroy(tokenizer);
    return 0;
}

static void the_first_event_carries_id_and_seed_the_last_usage(void **state)
{
    (void)state;
    struct world *t = open_answer();
    say(t, "What is 47 + 38?");
    end(t, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    assert_string_equal(t->first_id, "req-test");
    assert_int_equal(t->seed, 99);
    assert_string_equal(t->text, "What is 47 + 38?");
    assert_int_equal(t->n_events, t->r.n_tokens + 1);
    close_answer(t);
}

static void characters_are_never_cut_and_a_torn_tail_is_replaced(void **state)
{
    (void)state;
    struct world *t = open_answer();
    struct td_token_list ids = {0};
    struct td_err err;
    static const char fox[] = "\xf0\x9f\xa6\x8a";
    assert_int_equal(td_tokenizer_encode(tokenizer, fox, 4, TD_TEXT_ORDINARY, &ids, &err), TD_OK);
    assert_true(ids.n > 1); /* it falls apart into pieces of bytes */
    for (size_t i = 0; i < ids.n; i++) {
        say_ids(t, &ids.ids[i], 1);
        assert_int_equal(strlen(t->text), i + 1 < ids.n ? 0 : 4);
    }
    say_ids(t, ids.ids, ids.n - 1);
    end(t, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    assert_string_equal(t->text, "\xf0\x9f\xa6\x8a\xef\xbf\xbd");
    td_token_list_free(&ids);
    close_answer(t);
}

static void special_tokens_are_ids_without_text(void **state)
{
    (void)state;
    struct world *t = open_answer();
    say(t, "<|start|>Hi<|return|>");
    end(t, TANDEM__V1__FINISH_REASON__FINISH_STOP);
    assert_string_equal(t->text, "Hi");
    close_answer(t);
}

static void what_the_client_cannot_take_is_passed_on(void **state)
{
    (void)state;
    struct world *t = open_answer();
    uint32_t id = 1;
    t->send_st = TD_E_SLOW_CLIENT;
    assert_int_equal(say_ids(t, &id, 1), TD_E_SLOW_CLIENT);
    close_answer(t);
}

static void failed_allocations_end_the_answer_not_the_process(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < 60; k++) {
        struct td_token_list ids = {0};
        struct td_err err;
        static const char text[] = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
        assert_int_equal(td_tokenizer_encode(tokenizer, text, strlen(text), TD_TEXT_SPECIAL, &ids, &err), TD_OK);
        struct world *t = open_answer();
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = TD_OK;
        for (size_t i = 0; i < ids.n && st == TD_OK; i++) st = say_ids(t, &ids.ids[i], 1);
        t->r.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
        if (st == TD_OK) st = td_answer_end(&t->a, &t->r);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        if (k == 0) assert_int_equal(st, TD_E_NO_MEMORY);
        if (k == 59) assert_int_equal(st, TD_OK);
        close_answer(t);
        td_token_list_free(&ids);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_event_carries_id_and_seed_the_last_usage),
        cmocka_unit_test(characters_are_never_cut_and_a_torn_tail_is_replaced),
        cmocka_unit_test(special_tokens_are_ids_without_text),
        cmocka_unit_test(what_the_client_cannot_take_is_passed_on),
        cmocka_unit_test(failed_allocations_end_the_answer_not_the_process),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
