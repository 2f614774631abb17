#include "common/engine/request.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"

#define VOCAB   100u
#define CONTEXT 16u

/* A request that is good, to be spoilt. */
struct fixture {
    Tandem__V1__TokenRequest m;
    Tandem__V1__Sampling s;
    Tandem__V1__Sampling__LogitBiasEntry bias[3];
    Tandem__V1__Sampling__LogitBiasEntry *bias_ptrs[3];
    uint32_t tokens[32], stop[300];
};

static void fill(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    f->m = (Tandem__V1__TokenRequest)TANDEM__V1__TOKEN_REQUEST__INIT;
    f->s = (Tandem__V1__Sampling)TANDEM__V1__SAMPLING__INIT;
    for (uint32_t i = 0; i < 32; i++) f->tokens[i] = i;
    for (uint32_t i = 0; i < 3; i++) {
        f->bias[i] = (Tandem__V1__Sampling__LogitBiasEntry)TANDEM__V1__SAMPLING__LOGIT_BIAS_ENTRY__INIT;
        f->bias[i].key = 30 - 10 * i;
        f->bias[i].value = (float)i;
        f->bias_ptrs[i] = &f->bias[i];
    }
    f->m.request_id = "req-1";
    f->m.token_ids = f->tokens;
    f->m.n_token_ids = 8;
    f->m.n_prompt = 6;
    f->m.max_tokens = 5;
    f->m.sampling = &f->s;
    f->s.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    f->s.seed = 42;
    f->m.stop_ids = f->stop;
    f->m.n_stop_ids = 3;
    f->stop[0] = 99;
    f->stop[1] = 50;
    f->stop[2] = 99;
}

static void unset_fields_mean_their_defaults(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    struct td_err err;
    fill(&f);
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, &err), TD_OK);
    assert_string_equal(r.id, "req-1");
    assert_int_equal(r.n_tokens, 8);
    assert_int_equal(td_token_request_n_generated(&r), 2);
    assert_int_equal(r.n_tokens_max, 11);
    assert_true(r.sampling.temperature == 1 && r.sampling.top_p == 1 && r.sampling.repetition_penalty == 1);
    assert_int_equal(r.sampling.seed, 42);
    assert_int_equal(r.n_stop_ids, 2); /* sorted, once each */
    assert_int_equal(r.stop_ids[0], 50);
    assert_false(r.want_logprobs);
    td_token_request_deinit(&r);
}

static void set_fields_are_taken_over(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    struct td_err err;
    fill(&f);
    f.s.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    f.s.temperature = 0;
    f.s.n_logit_bias = 3;
    f.s.logit_bias = f.bias_ptrs;
    f.m.n_logprobs = 4;
    f.m.timeout_us = 9;
    f.m.max_tokens = UINT32_MAX;
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, &err), TD_OK);
    assert_true(r.sampling.temperature == 0);
    assert_int_equal(r.n_tokens_max, CONTEXT);
    assert_int_equal(r.sampling.n_logit_bias, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(r.sampling.bias_ids[i], 10 + 10 * i); /* sorted */
        assert_true(r.sampling.bias_values[i] == (float)(2 - i));
    }
    assert_true(r.want_logprobs);
    assert_int_equal(r.n_logprobs, 4);
    assert_int_equal(r.timeout_us, 9);
    td_token_request_deinit(&r);
}

static void bad_fields_are_refused_by_name(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    struct td_err err;
#define BAD(name, ...)                                                                                                 \
    do {                                                                                                               \
        fill(&f);                                                                                                      \
        __VA_ARGS__;                                                                                                   \
        assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, &err), TD_E_INVALID);                        \
        if (strncmp(err.text, name ":", sizeof(name)) != 0) fail_msg("%s does not begin with %s", err.text, name);     \
        assert_null(r.tokens);                                                                                         \
    } while (0)
    BAD("token_ids", f.m.n_token_ids = 0);
    BAD("token_ids", f.tokens[3] = VOCAB);
    BAD("token_ids", f.m.n_token_ids = CONTEXT; f.m.max_tokens = 20);
    BAD("n_prompt", f.m.n_prompt = 0);
    BAD("n_prompt", f.m.n_prompt = 9);
    BAD("max_tokens", f.m.max_tokens = 0);
    BAD("max_tokens", f.m.max_tokens = 2);
    BAD("min_tokens", f.m.min_tokens = 6);
    BAD("stop_ids", f.stop[1] = VOCAB);
    BAD("stop_ids", f.m.n_stop_ids = TD_MAX_STOP_IDS + 1);
    BAD("n_logprobs", f.m.n_logprobs = TD_MAX_LOGPROBS + 1);
    BAD("sampling", f.m.sampling = NULL);
    BAD("sampling.seed", f.s.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT__NOT_SET);
    BAD("sampling.min_p", f.s.min_p = NAN);
    BAD("sampling.logit_bias", f.s.n_logit_bias = 3; f.s.logit_bias = f.bias_ptrs; f.bias[1].key = 10);
    BAD("sampling.logit_bias", f.s.n_logit_bias = 3; f.s.logit_bias = f.bias_ptrs; f.bias[1].key = VOCAB);
#undef BAD
    assert_int_equal(td_token_request_parse(NULL, VOCAB, CONTEXT, &r, &err), TD_E_INVALID);
}

static void an_id_cannot_break_a_log_line(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    fill(&f);
    char id[200] = "a b\n\"\\\x80z";
    memset(id + 8, 'y', 150);
    f.m.request_id = id;
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, NULL), TD_OK);
    assert_memory_equal(r.id, "a?b????zyyy", 11);
    assert_int_equal(strlen(r.id), TD_REQUEST_ID_MAX);
    td_token_request_deinit(&r);
}

static void it_ends_at_a_stop_id_at_max_tokens_or_at_the_end_of_the_context(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    fill(&f);
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, NULL), TD_OK);
    assert_int_equal(td_token_request_append(&r, 1), TANDEM__V1__FINISH_REASON__FINISH_NONE);
    assert_int_equal(td_token_request_append(&r, 50), TANDEM__V1__FINISH_REASON__FINISH_STOP);
    assert_int_equal(td_token_request_append(&r, 3), TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    assert_int_equal(td_token_request_n_generated(&r), 5);
    td_token_request_deinit(&r);

    f.m.max_tokens = 100;
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, NULL), TD_OK);
    for (int i = 0; i < 7; i++)
        assert_int_equal(td_token_request_append(&r, 1), TANDEM__V1__FINISH_REASON__FINISH_NONE);
    assert_int_equal(td_token_request_append(&r, 99),
                     TANDEM__V1__FINISH_REASON__FINISH_STOP); /* a stop id counts more */
    assert_int_equal(r.n_tokens, CONTEXT);
    td_token_request_deinit(&r);
}

static void stop_ids_are_banned_until_min_tokens_and_the_draw_is_counted(void **state)
{
    (void)state;
    struct fixture f;
    struct td_token_request r;
    fill(&f);
    f.m.min_tokens = 3;
    f.m.n_logprobs = 2;
    assert_int_equal(td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, NULL), TD_OK);
    struct td_segment seg = {0};
    td_token_request_want_token(&r, 0, &seg);
    assert_true(seg.want_token && seg.want_logprobs);
    assert_int_equal(seg.n_top_logprobs, 2);
    assert_int_equal(seg.draw_index, 2);
    assert_int_equal(seg.n_history, 8);
    assert_int_equal(seg.n_prompt, 6);
    assert_int_equal(seg.n_banned, 2);
    td_token_request_append(&r, 1);
    td_token_request_want_token(&r, 0, &seg);
    assert_int_equal(seg.n_banned, 0);
    assert_int_equal(seg.draw_index, 3);
    td_token_request_deinit(&r);
}

static void parsing_survives_any_failed_allocation(void **state)
{
    (void)state;
    struct fixture f;
    unsigned n_failed = 0;
    for (uint32_t i = 0; i < 10; i++) {
        struct td_token_request r;
        fill(&f);
        f.s.n_logit_bias = 3;
        f.s.logit_bias = f.bias_ptrs;
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        enum td_status st = td_token_request_parse(&f.m, VOCAB, CONTEXT, &r, NULL);
        td_fault_disarm_all();
        if (st != TD_OK) assert_int_equal(st, TD_E_NO_MEMORY);
        n_failed += st != TD_OK;
        td_token_request_deinit(&r);
    }
    assert_int_equal(n_failed, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unset_fields_mean_their_defaults),
        cmocka_unit_test(set_fields_are_taken_over),
        cmocka_unit_test(bad_fields_are_refused_by_name),
        cmocka_unit_test(an_id_cannot_break_a_log_line),
        cmocka_unit_test(it_ends_at_a_stop_id_at_max_tokens_or_at_the_end_of_the_context),
        cmocka_unit_test(stop_ids_are_banned_until_min_tokens_and_the_draw_is_counted),
        cmocka_unit_test(parsing_survives_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
