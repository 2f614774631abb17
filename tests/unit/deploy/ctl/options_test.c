#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "deploy/ctl/options.h"

struct values {
    bool flag, has_x;
    const char *name;
    uint32_t count;
    uint64_t big;
    float x;
    struct td_option_list more;
    struct td_token_list ids;
};

static enum td_status read_line(struct values *v, const char **words, unsigned *n_words, struct td_err *err, int argc,
                                char **argv)
{
    struct td_option options[] = {
        {"flag", TD_OPTION_FLAG, &v->flag, NULL, "", 0, 0, NULL},
        {"name", TD_OPTION_STR, &v->name, "S", "", 0, 0, NULL},
        {"count", TD_OPTION_U32, &v->count, "N", "", 1, 8, NULL},
        {"big", TD_OPTION_U64, &v->big, "N", "", 0, 0, NULL},
        {"x", TD_OPTION_F32, &v->x, "X", "", 0, 1, &v->has_x},
        {"more", TD_OPTION_LIST, &v->more, "S", "", 0, 0, NULL},
        {"ids", TD_OPTION_IDS, &v->ids, "A,B", "", 0, 0, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    return td_options_read(options, argc, argv, words, 2, n_words, err);
}

#define READ(v, ...)                                                                                                   \
    char *argv[] = {"command", __VA_ARGS__};                                                                           \
    const char *words[2] = {NULL, NULL};                                                                               \
    unsigned n_words = 0;                                                                                              \
    struct td_err err = {{0}};                                                                                         \
    enum td_status st = read_line(&(v), words, &n_words, &err, (int)TD_COUNT(argv), argv)

static void options_come_with_equals_or_as_the_next_word(void **state)
{
    (void)state;
    struct values v = {0};
    READ(v, "--flag", "--name=a=b", "word", "--count", "3", "--big=18446744073709551615", "--x=0.5", "--more=--p=1",
         "--more", "q", "--ids=1,2, 4000", "--", "--flag");
    assert_int_equal(st, TD_OK);
    assert_true(v.flag && v.has_x);
    assert_string_equal(v.name, "a=b");
    assert_int_equal(v.count, 3);
    assert_true(v.big == UINT64_MAX);
    assert_true(v.x == 0.5f);
    assert_int_equal(v.more.n, 2);
    assert_string_equal(v.more.items[0], "--p=1");
    assert_string_equal(v.more.items[1], "q");
    assert_int_equal(v.ids.n, 3);
    assert_int_equal(v.ids.ids[2], 4000);
    assert_int_equal(n_words, 2);
    assert_string_equal(words[0], "word");
    assert_string_equal(words[1], "--flag");
    td_token_list_free(&v.ids);
}

static void expect_refusal(const char *argument, const char *culprit)
{
    struct values v = {0};
    READ(v, (char *)argument);
    assert_int_equal(st, TD_E_INVALID);
    if (strstr(err.text, culprit) == NULL) fail_msg("%s: %s", argument, err.text);
    td_token_list_free(&v.ids);
}

static void what_is_not_understood_is_named(void **state)
{
    (void)state;
    expect_refusal("--nonsense", "--nonsense");
    expect_refusal("--nam=x", "--nam");
    expect_refusal("--count", "--count needs a value");
    expect_refusal("--count=", "--count");
    expect_refusal("--count=0", "between 1 and 8");
    expect_refusal("--count=9", "between 1 and 8");
    expect_refusal("--count=-1", "--count");
    expect_refusal("--count=3x", "3x");
    expect_refusal("--count= 3", "--count");
    expect_refusal("--big=18446744073709551616", "--big");
    expect_refusal("--x=nan", "nan");
    expect_refusal("--x=1.5", "between 0 and 1");
    expect_refusal("--x=", "--x");
    expect_refusal("--flag=yes", "--flag takes no value");
    expect_refusal("--ids=1,x", "\"x\"");
    expect_refusal("--ids=1,-2", "\"-2\"");
    expect_refusal("--ids=4294967295", "4294967295");
    expect_refusal("--ids=99999999999999999999999", "9999");
}

static void too_many_words_and_too_many_repeats_are_refused(void **state)
{
    (void)state;
    struct values v = {0};
    {
        READ(v, "a", "b", "c");
        assert_int_equal(st, TD_E_INVALID);
        assert_non_null(strstr(err.text, "\"c\""));
    }
    char *many[TD_COUNT(v.more.items) + 2] = {"command"};
    const char *words[1];
    unsigned n;
    struct td_err err = {{0}};
    for (size_t i = 1; i < TD_COUNT(many); i++) many[i] = "--more=x";
    assert_int_equal(read_line(&v, words, &n, &err, (int)TD_COUNT(many), many), TD_E_INVALID);
    assert_non_null(strstr(err.text, "--more"));
}

static void ids_may_be_written_as_a_json_list(void **state)
{
    (void)state;
    struct td_token_list ids = {0};
    static const char text[] = " [ 1,\n\t20 ] 300\r\n";
    assert_int_equal(td_options_read_ids(text, sizeof text - 1, &ids, NULL), TD_OK);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.ids[1], 20);
    assert_int_equal(td_options_read_ids("1\0"
                                         "2",
                                         3, &ids, NULL),
                     TD_E_INVALID);
    td_token_list_free(&ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_come_with_equals_or_as_the_next_word),
        cmocka_unit_test(what_is_not_understood_is_named),
        cmocka_unit_test(too_many_words_and_too_many_repeats_are_refused),
        cmocka_unit_test(ids_may_be_written_as_a_json_list),
    };
    return cmocka_run_group_tests_name("options", tests, NULL, NULL);
}
