/* router/params.c: what a client may ask for, and which field is named when it may not. */
#include "tests/unit/router/router_world.h"

#include <math.h>

#include "router/params.h"

static const uint32_t eos[] = {90, 91};
static const struct td_params_facts facts = {.model = "tiny",
                                             .n_vocab = 100,
                                             .max_context = 1000,
                                             .served_context = 500,
                                             .default_max_tokens = 64,
                                             .eos_ids = eos,
                                             .n_eos_ids = 2};
static const struct td_params_facts nobody = {.model = "tiny", .default_max_tokens = 64};

static void drop(struct td_request *r)
{
    if (r->sampling != NULL) tandem__v1__sampling__free_unpacked(r->sampling, NULL);
    free(r->stop_ids);
    free(r->tokens);
    memset(r, 0, sizeof *r);
}

static enum td_status options(struct td_request *r, const Tandem__V1__Sampling *s, const Tandem__V1__Stop *stop,
                              struct td_err *err)
{
    memset(r, 0, sizeof *r);
    return td_params_set_options(r, &facts, s, stop, false, 0, 1234, err);
}

static void another_model_is_not_found_and_none_is_the_one_served(void **state)
{
    (void)state;
    struct td_err err;
    assert_int_equal(td_params_check_model(&facts, "", &err), TD_OK);
    assert_int_equal(td_params_check_model(&facts, "tiny", &err), TD_OK);
    assert_int_equal(td_params_check_model(&facts, "huge", &err), TD_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "huge"));
}

static void request_ids_are_taken_or_made(void **state)
{
    (void)state;
    struct td_request r = {0};
    struct td_err err;
    assert_int_equal(td_params_set_id(&r, "find-me:17", 5, &err), TD_OK);
    assert_string_equal(r.id, "find-me:17");
    assert_int_equal(td_params_set_id(&r, "", 0xabcdef, &err), TD_OK);
    assert_string_equal(r.id, "req-0000000000abcdef");
    assert_int_equal(td_params_set_id(&r, NULL, 1, &err), TD_OK);
    static const char *const bad[] = {"two words", "line\nbreak", "quo\"te", "back\\slash", "\x7f", "caf\xc3\xa9"};
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        assert_int_equal(td_params_set_id(&r, bad[i], 1, &err), TD_E_INVALID);
        assert_non_null(strstr(err.text, "request_id"));
    }
    char long_id[100];
    memset(long_id, 'x', sizeof long_id);
    long_id[64] = '\0';
    assert_int_equal(td_params_set_id(&r, long_id, 1, &err), TD_OK);
    long_id[64] = 'x';
    long_id[65] = '\0';
    assert_int_equal(td_params_set_id(&r, long_id, 1, &err), TD_E_INVALID);
}

static void defaults_are_filled_in(void **state)
{
    (void)state;
    struct td_request r;
    assert_int_equal(options(&r, NULL, NULL, NULL), TD_OK);
    assert_int_equal(r.max_tokens, 64);
    assert_int_equal(r.n_stop_ids, 2);
    assert_int_equal(r.stop_ids[1], 91);
    assert_int_equal(r.sampling->seed_opt_case, TANDEM__V1__SAMPLING__SEED_OPT_SEED);
    assert_int_equal(r.sampling->seed, 1234);
    assert_false(r.want_logprobs);
    drop(&r);
}

static void a_clients_seed_is_kept_even_if_it_is_zero(void **state)
{
    (void)state;
    struct td_request r;
    Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;
    s.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    s.seed = 0;
    assert_int_equal(options(&r, &s, NULL, NULL), TD_OK);
    assert_int_equal(r.sampling->seed, 0);
    drop(&r);
}

static void stop_ids_come_on_top_of_the_models_own(void **state)
{
    (void)state;
    struct td_request r;
    uint32_t ids[] = {7, 8};
    Tandem__V1__Stop stop = TANDEM__V1__STOP__INIT;
    stop.token_ids = ids;
    stop.n_token_ids = 2;
    assert_int_equal(options(&r, NULL, &stop, NULL), TD_OK);
    assert_int_equal(r.n_stop_ids, 4);
    drop(&r);
    stop.ignore_eos = true;
    assert_int_equal(options(&r, NULL, &stop, NULL), TD_OK);
    assert_int_equal(r.n_stop_ids, 2);
    assert_int_equal(r.stop_ids[0], 7);
    drop(&r);
}

static void settings_out_of_bounds_are_refused_by_field(void **state)
{
    (void)state;
    struct td_request r = {0};
    struct td_err err;
#define REFUSE(field, ...)                                                                                             \
    do {                                                                                                               \
        Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;                                                           \
        __VA_ARGS__;                                                                                                   \
        assert_int_equal(options(&r, &s, NULL, &err), TD_E_INVALID);                                                   \
        assert_non_null(strstr(err.text, "sampling." field));                                                          \
        assert_null(r.sampling);                                                                                       \
    } while (0)
    static const float wrong[] = {NAN, -1, INFINITY, -INFINITY, 1e9f};
    for (size_t i = 0; i < TD_COUNT(wrong); i++) {
        float x = wrong[i];
        REFUSE("temperature", s.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
               s.temperature = x);
        REFUSE("top_p", s.top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P; s.top_p = x);
        REFUSE("min_p", s.min_p = x);
        REFUSE("repetition_penalty",
               s.repetition_penalty_opt_case = TANDEM__V1__SAMPLING__REPETITION_PENALTY_OPT_REPETITION_PENALTY;
               s.repetition_penalty = x);
        if (x == -1) continue; /* these two may be negative */
        REFUSE("presence_penalty", s.presence_penalty = x);
        REFUSE("frequency_penalty", s.frequency_penalty = x);
    }
    REFUSE("top_p", s.top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P; s.top_p = 0);
    REFUSE("repetition_penalty",
           s.repetition_penalty_opt_case = TANDEM__V1__SAMPLING__REPETITION_PENALTY_OPT_REPETITION_PENALTY);
    REFUSE("top_k", s.top_k = 1u << 30);
    Tandem__V1__Sampling__LogitBiasEntry e = TANDEM__V1__SAMPLING__LOGIT_BIAS_ENTRY__INIT, *list[] = {&e};
    e.key = 100;
    REFUSE("logit_bias", s.logit_bias = list; s.n_logit_bias = 1);
    e.key = 99;
    e.value = NAN;
    REFUSE("logit_bias", s.logit_bias = list; s.n_logit_bias = 1);

    assert_int_equal(td_params_set_options(&r, &facts, NULL, NULL, true, 21, 1, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "n_logprobs"));
    uint32_t ids[200] = {100};
    Tandem__V1__Stop stop = TANDEM__V1__STOP__INIT;
    stop.token_ids = ids;
    stop.n_token_ids = 1;
    assert_int_equal(options(&r, NULL, &stop, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "stop.token_ids"));
    ids[0] = 0;
    stop.n_token_ids = 200;
    assert_int_equal(options(&r, NULL, &stop, &err), TD_E_INVALID);
    stop.n_token_ids = 0;
    stop.max_tokens = 2;
    stop.min_tokens = 3;
    assert_int_equal(options(&r, NULL, &stop, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "stop.min_tokens"));
}

static void asking_for_alternatives_asks_for_the_chosen_one_too(void **state)
{
    (void)state;
    struct td_request r = {0};
    assert_int_equal(td_params_set_options(&r, &facts, NULL, NULL, false, 20, 1, NULL), TD_OK);
    assert_true(r.want_logprobs);
    assert_int_equal(r.n_logprobs, 20);
    drop(&r);
}

static enum td_status prompt(struct td_request *r, const struct td_params_facts *f, size_t n, uint32_t last,
                             struct td_err *err)
{
    uint32_t *ids = td_calloc(n + 1, sizeof *ids);
    if (n > 0) ids[n - 1] = last;
    return td_params_set_prompt_take(r, f, "token_ids", ids, n, err);
}

static void prompts_are_checked_against_vocabulary_and_context(void **state)
{
    (void)state;
    struct td_request r = {.max_tokens = 64};
    struct td_err err;
    assert_int_equal(prompt(&r, &facts, 0, 0, &err), TD_E_INVALID);
    assert_int_equal(prompt(&r, &facts, 3, 100, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "token_ids: 100 at index 2"));
    assert_int_equal(prompt(&r, &facts, 3, UINT32_MAX, &err), TD_E_INVALID);
    assert_int_equal(prompt(&r, &facts, 1000, 1, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "1000"));
    assert_int_equal(prompt(&r, &facts, 999, 1, &err), TD_E_TOO_LARGE); /* the model could, these workers cannot */
    assert_non_null(strstr(err.text, "500"));
    assert_null(r.tokens);
    assert_int_equal(prompt(&r, &facts, 10, 99, &err), TD_OK);
    assert_int_equal(r.n_prompt, 10);
    assert_int_equal(r.max_tokens, 64);
    assert_int_equal(prompt(&r, &nobody, 3, 12345, &err), TD_OK); /* nobody there who could say how many there are */
    drop(&r);
}

static void max_tokens_ends_with_the_context(void **state)
{
    (void)state;
    struct td_request r = {.max_tokens = 64, .min_tokens = 50};
    assert_int_equal(prompt(&r, &facts, 499, 1, NULL), TD_OK);
    assert_int_equal(r.max_tokens, 1);
    assert_int_equal(r.min_tokens, 1);
    drop(&r);
}

static void dates_have_one_form(void **state)
{
    (void)state;
    static const char *const good[] = {"2025-11-03", "1999-12-31"};
    static const char *const bad[] = {"",           "2025-11-3",  "2025-11-031", "2025-13-01", "2025-00-01",
                                      "2025-01-32", "2025/01/01", "20250101",    "2025-01-0a", "today"};
    for (size_t i = 0; i < TD_COUNT(good); i++) assert_true(td_params_is_date(good[i]));
    for (size_t i = 0; i < TD_COUNT(bad); i++) assert_false(td_params_is_date(bad[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_model_is_not_found_and_none_is_the_one_served),
        cmocka_unit_test(request_ids_are_taken_or_made),
        cmocka_unit_test(defaults_are_filled_in),
        cmocka_unit_test(a_clients_seed_is_kept_even_if_it_is_zero),
        cmocka_unit_test(stop_ids_come_on_top_of_the_models_own),
        cmocka_unit_test(settings_out_of_bounds_are_refused_by_field),
        cmocka_unit_test(asking_for_alternatives_asks_for_the_chosen_one_too),
        cmocka_unit_test(prompts_are_checked_against_vocabulary_and_context),
        cmocka_unit_test(max_tokens_ends_with_the_context),
        cmocka_unit_test(dates_have_one_form),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
