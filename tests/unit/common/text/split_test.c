#include "tests/unit/common/text/text_cases.h"

#include "common/text/split.h"

/* The pieces of text, separated by '|'. */
static void expect_pieces(const char *pattern, const char *text, size_t n, const char *pieces)
{
    struct td_split *s = NULL;
    struct td_split_iter it;
    struct td_err err = {{0}};
    struct td_buf got = {0};
    if (td_split_compile(pattern, strlen(pattern), &s, &err) != TD_OK) fail_msg("%s: %s", pattern, err.text);
    assert_int_equal(td_split_iter_init(&it, s), TD_OK);
    td_split_iter_start(&it, text, n);
    for (;;) {
        const uint8_t *piece;
        size_t n_piece;
        if (td_split_iter_next(&it, &piece, &n_piece, &err) != TD_OK) fail_msg("%s", err.text);
        if (n_piece == 0) break;
        if (got.n > 0) td_buf_str(&got, "|");
        td_buf_put(&got, piece, n_piece);
    }
    assert_string_equal(td_buf_cstr(&got), pieces);
    td_buf_free(&got);
    td_split_iter_deinit(&it);
    td_split_destroy(s);
}

static void white_space_is_what_unicode_says(void **state)
{
    (void)state;
    /* U+180E is no white space; U+0085, U+2028 and U+3000 are. */
    expect_pieces("\\s+|\\S+",
                  "a\xE1\xA0\x8E"
                  "b",
                  5,
                  "a\xE1\xA0\x8E"
                  "b");
    expect_pieces("\\s+|\\S+",
                  "a\xC2\x85"
                  "b\xE2\x80\xA8"
                  "c\xE3\x80\x80"
                  "d",
                  12, "a|\xC2\x85|b|\xE2\x80\xA8|c|\xE3\x80\x80|d");
    expect_pieces("[\\s]+|[^\\s]+", "a \t\nb", 5, "a| \t\n|b");
    expect_pieces("[\\S]+|[^\\S]+", "a \t\nb", 5, "a| \t\n|b");
    expect_pieces("[x\\Sy]+|\\s", "a b\xF4\x8F\xBF\xBF", 7, "a| |b\xF4\x8F\xBF\xBF");
}

static void what_no_match_covers_is_a_piece_too(void **state)
{
    (void)state;
    expect_pieces("[0-9]+", "ab12cd345", 9, "ab|12|cd|345");
    expect_pieces("[0-9]+", "none", 4, "none");
    expect_pieces("[0-9]", "", 0, "");
    expect_pieces("a(?=b)|b", "ab", 2, "a|b");
}

static void classes_are_rewritten_with_their_brackets(void **state)
{
    (void)state;
    expect_pieces("[]\\s]+|[^]\\s]+", "a] b", 4, "a|] |b");
    expect_pieces("[\\]]+|[^\\]]+", "a]]b", 4, "a|]]|b");
    expect_pieces("\\[+|[^\\[]+", "a[[b", 4, "a|[[|b");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(white_space_is_what_unicode_says),
        cmocka_unit_test(what_no_match_covers_is_a_piece_too),
        cmocka_unit_test(classes_are_rewritten_with_their_brackets),
    };
    return cmocka_run_group_tests_name("split", tests, NULL, NULL);
}
