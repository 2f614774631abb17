/* router/encode.c: text to tokens and back, at once or on a pool thread, with the small checkpoint's tokenizer. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "router/encode.h"

#define MODEL "tests/tiny/tiny-model"

struct world {
    struct td_loop *loop;
    struct td_tokenizer *tokenizer;
};

static struct world world;
static unsigned n_done;
static bool is_waiting; /* the loop runs until the job is done */

static void on_done(struct td_encode *e)
{
    (void)e;
    n_done++;
    if (is_waiting) td_loop_stop(world.loop);
}

static int open_world(void **state)
{
    struct td_err err = {{0}};
    assert_int_equal(td_loop_create(&world.loop), TD_OK);
    assert_int_equal(td_tokenizer_load(MODEL, &world.tokenizer, &err), TD_OK);
    *state = &world;
    return 0;
}
static int close_world(void **state)
{
    (void)state;
    td_loop_destroy(world.loop);
    td_tokenizer_destroy(world.tokenizer);
    return 0;
}

static void wait_for(unsigned n)
{
    is_waiting = true;
    while (n_done < n) td_loop_run(world.loop);
    is_waiting = false;
}

static void short_text_is_done_at_once_and_long_text_later(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, TD_ENCODE_INLINE_BYTES, TD_ENCODE_INLINE_BYTES + 1, 200000};
    for (size_t i = 0; i < TD_COUNT(sizes); i++) {
        struct td_encode e;
        size_t n = sizes[i];
        char *text = malloc(n + 1);
        for (size_t k = 0; k < n; k++) text[k] = "What is 47 + 38? "[k % 17];
        n_done = 0;
        assert_int_equal(td_encode_text(&e, world.loop, world.tokenizer, text, n, TD_TEXT_ORDINARY, on_done), TD_OK);
        assert_int_equal(n_done, n <= TD_ENCODE_INLINE_BYTES);
        free(text); /* the job works on a copy */
        wait_for(1);
        assert_int_equal(e.st, TD_OK);
        struct td_buf back = {0};
        td_tokenizer_decode(world.tokenizer, e.ids.ids, e.ids.n, false, &back);
        assert_int_equal(back.n, n);
        td_buf_free(&back);
        td_encode_deinit(&e);
    }
}

static void special_strings_become_tokens_only_if_asked(void **state)
{
    (void)state;
    struct td_encode e;
    td_encode_text(&e, world.loop, world.tokenizer, "<|end|>", 7, TD_TEXT_SPECIAL, on_done);
    assert_int_equal(e.ids.n, 1);
    td_encode_deinit(&e);
    td_encode_text(&e, world.loop, world.tokenizer, "<|end|>", 7, TD_TEXT_ORDINARY, on_done);
    assert_true(e.ids.n > 1);
    td_encode_deinit(&e);
}

static void bad_text_is_named_with_its_offset(void **state)
{
    (void)state;
    struct td_encode e;
    td_encode_text(&e, world.loop, world.tokenizer, "abc\xff", 4, TD_TEXT_ORDINARY, on_done);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_non_null(strstr(e.err.text, "text"));
    assert_non_null(strstr(e.err.text, "3"));
    td_encode_deinit(&e);
}

static void tokens_become_text_exact_and_lossy(void **state)
{
    (void)state;
    struct td_token_list ids = {0};
    struct td_err err;
    static const char text[] = "caf\xc3\xa9 \xf0\x9f\xa6\x8a"; /* the fox falls apart into byte tokens */
    assert_int_equal(td_tokenizer_encode(world.tokenizer, text, strlen(text), TD_TEXT_ORDINARY, &ids, &err), TD_OK);
    Tandem__V1__DetokenizeRequest m = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    m.token_ids = ids.ids;
    m.n_token_ids = ids.n - 1; /* its last byte is missing */
    struct td_encode e;
    assert_int_equal(td_encode_detokenize(&e, world.loop, world.tokenizer, &m, on_done), TD_OK);
    assert_int_equal(e.st, TD_OK);
    assert_int_equal(e.raw.n, strlen(text) - 1);
    assert_memory_equal(e.raw.data, text, e.raw.n);
    assert_string_equal(td_buf_cstr(&e.lossy), "caf\xc3\xa9 \xef\xbf\xbd");
    td_encode_deinit(&e);
    ids.ids[0] = td_tokenizer_n_ids(world.tokenizer);
    td_encode_detokenize(&e, world.loop, world.tokenizer, &m, on_done);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_non_null(strstr(e.err.text, "token_ids"));
    td_encode_deinit(&e);
    td_token_list_free(&ids);
}

static void failed_allocations_are_statuses(void **state)
{
    (void)state;
    uint32_t ids[] = {1, 2, 3};
    Tandem__V1__DetokenizeRequest d = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    d.token_ids = ids;
    d.n_token_ids = 3;
    for (int what = 0; what < 2; what++)
        for (uint32_t k = 0; k < 60; k++) {
            struct td_encode e;
            n_done = 0;
            td_fault_arm(TD_FAULT_ALLOC, k, 1);
            enum td_status st =
                what == 0 ? td_encode_text(&e, world.loop, world.tokenizer, "Hello", 5, TD_TEXT_ORDINARY, on_done)
                          : td_encode_detokenize(&e, world.loop, world.tokenizer, &d, on_done);
            td_fault_disarm_all();
            assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
            assert_int_equal(n_done, st == TD_OK);
            if (st == TD_OK) assert_true(e.st == TD_OK || e.st == TD_E_NO_MEMORY);
            if (k == 0) assert_int_equal(st, TD_E_NO_MEMORY);
            td_encode_deinit(&e);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_text_is_done_at_once_and_long_text_later),
        cmocka_unit_test(special_strings_become_tokens_only_if_asked),
        cmocka_unit_test(bad_text_is_named_with_its_offset),
        cmocka_unit_test(tokens_become_text_exact_and_lossy),
        cmocka_unit_test(failed_allocations_are_statuses),
    };
    return cmocka_run_group_tests(tests, open_world, close_world);
}
