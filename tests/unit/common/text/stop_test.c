#include "tests/unit/common/text/text_cases.h"

#include "common/base/fault.h"
#include "common/text/stop.h"
#include "common/text/utf8.h"

static struct td_stop *open_stop(const char *const *strings, size_t n)
{
    struct td_text list[8];
    struct td_stop *s = NULL;
    for (size_t i = 0; i < n; i++) list[i] = (struct td_text){strings[i], strlen(strings[i])};
    assert_int_equal(td_stop_create(list, n, &s), TD_OK);
    return s;
}

/* Feeds the text cut in pieces of `piece` bytes and returns what is shown, joined. */
static char *shown(const char *const *strings, size_t n_strings, const char *text, size_t piece, int *found_out)
{
    struct td_stop *s = open_stop(strings, n_strings);
    struct td_buf out = {0};
    size_t n = strlen(text);
    for (size_t i = 0; i < n; i += piece) {
        bool is_found = td_stop_feed(s, text + i, n - i < piece ? n - i : piece, &out);
        assert_true(is_found == (td_stop_found(s) >= 0));
    }
    td_stop_end(s, &out);
    *found_out = td_stop_found(s);
    td_stop_destroy(s);
    char *copy = strdup(td_buf_cstr(&out));
    td_buf_free(&out);
    return copy;
}

static void a_stop_string_never_shows_wherever_the_pieces_end(void **state)
{
    (void)state;
    static const struct {
        const char *strings[4];
        const char *text, *expected;
        int found;
    } rows[] = {
        {{"END"}, "one END two", "one ", 0},
        {{"END"}, "one EN two", "one EN two", -1},
        {{"END"}, "one EN", "one EN", -1},
        {{"END"}, "ENEND", "EN", 0},
        {{"END"}, "END", "", 0},
        {{"END"}, "", "", -1},
        {{"aab"}, "aaaab", "aa", 0},
        {{"abab"}, "abaabab", "aba", 0},
        {{"\n\n"}, "a\nb\n\nc", "a\nb", 0},
        {{"abcd", "bc"}, "xabcd", "xa", 1}, /* complete first */
        {{"bcd", "abcd"}, "xabcd", "x", 1}, /* complete together: the longest */
        {{"abcd", "bcd"}, "xabcd", "x", 0}, /* whatever the order */
        {{"abcx", "bcd"}, "abcd", "a", 1},  /* the longer one held the text, the shorter one came true */
        {{"abcx", "c"}, "ab", "ab", -1},    /* held to the end */
        {{"\xC3\xA9t\xC3\xA9"}, "un \xC3\xA9t\xC3\xA8, un \xC3\xA9t\xC3\xA9!", "un \xC3\xA9t\xC3\xA8, un ", 0},
        {{"a", "a"}, "ba", "b", 0},
        {{NULL}, "anything", "anything", -1},
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        size_t n = 0;
        while (n < 4 && rows[i].strings[n] != NULL) n++;
        for (size_t piece = 1; piece <= strlen(rows[i].text) + 1; piece++) {
            int found;
            char *got = shown(rows[i].strings, n, rows[i].text, piece, &found);
            if (strcmp(got, rows[i].expected) != 0 || found != rows[i].found)
                fail_msg("row %zu in pieces of %zu: \"%s\", found %d", i, piece, got, found);
            free(got);
        }
    }
}

static void text_waits_only_while_it_may_begin_a_stop_string(void **state)
{
    (void)state;
    static const char *const strings[] = {"Observation:", "Ohm"};
    struct td_stop *s = open_stop(strings, 2);
    struct td_buf out = {0};
    assert_false(td_stop_feed(s, "Look O", 6, &out));
    assert_string_equal(td_buf_cstr(&out), "Look ");
    assert_int_equal(td_stop_held(s), 1);
    assert_false(td_stop_feed(s, "b", 1, &out));
    assert_string_equal(td_buf_cstr(&out), "Look ");
    assert_false(td_stop_feed(s, "jects", 5, &out));
    assert_string_equal(td_buf_cstr(&out), "Look Objects");
    assert_int_equal(td_stop_held(s), 0);
    assert_false(td_stop_feed(s, " ObsO", 5, &out));
    assert_string_equal(td_buf_cstr(&out), "Look Objects Obs"); /* the new O alone may still begin one */
    assert_true(td_stop_feed(s, "hm's law", 8, &out));
    assert_true(td_stop_feed(s, "more", 4, &out));
    td_stop_end(s, &out);
    assert_string_equal(td_buf_cstr(&out), "Look Objects Obs");
    assert_int_equal(td_stop_found(s), 1);
    td_buf_free(&out);
    td_stop_destroy(s);
}

/* The definition: the first place where some string ends, and there the longest. */
static size_t search(const char *text, const char *const *strings, size_t n, int *found_out)
{
    *found_out = -1;
    for (size_t end = 1; end <= strlen(text); end++) {
        for (size_t k = 0; k < n; k++) {
            size_t len = strlen(strings[k]);
            bool is_here = len <= end && memcmp(text + end - len, strings[k], len) == 0;
            if (is_here && (*found_out < 0 || len > strlen(strings[*found_out]))) *found_out = (int)k;
        }
        if (*found_out >= 0) return end - strlen(strings[*found_out]);
    }
    return strlen(text);
}

static void random_texts_are_cut_where_a_plain_search_cuts_them(void **state)
{
    (void)state;
    uint64_t seed = 11;
    for (unsigned round = 0; round < 20000; round++) {
        char text[33] = {0}, store[3][6] = {{0}};
        const char *strings[3] = {store[0], store[1], store[2]};
        size_t n = draw(&seed, 33), n_strings = 1 + draw(&seed, 3);
        for (size_t i = 0; i < n; i++) text[i] = (char)('a' + draw(&seed, 3));
        for (size_t k = 0; k < n_strings; k++)
            for (size_t i = 0, len = 1 + draw(&seed, 5); i < len; i++) store[k][i] = (char)('a' + draw(&seed, 3));
        int expected, found;
        size_t cut = search(text, strings, n_strings, &expected);
        char *got = shown(strings, n_strings, text, 1 + draw(&seed, 5), &found);
        bool is_same = strlen(got) == cut && memcmp(got, text, cut) == 0;
        bool is_same_string =
            found == expected || (found >= 0 && expected >= 0 && strcmp(strings[found], strings[expected]) == 0);
        if (!is_same || !is_same_string)
            fail_msg("\"%s\" cut as \"%s\" by %d, expected %zu bytes by %d", text, got, found, cut, expected);
        free(got);
    }
}

static void what_is_held_is_always_a_beginning_and_pieces_stay_whole_characters(void **state)
{
    (void)state;
    static const char *const strings[] = {"\xE2\x82\xAC\xE2\x82\xAC!", "\xE2\x82\xAD"};
    static const char text[] = "5\xE2\x82\xAC and \xE2\x82\xAC\xE2\x82\xAC? \xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC!";
    struct td_stop *s = open_stop(strings, 2);
    struct td_buf out = {0};
    for (size_t i = 0; i + 1 < sizeof text;) {
        size_t len;
        td_utf8_decode((const uint8_t *)text + i, &len);
        td_buf_clear(&out);
        td_stop_feed(s, text + i, len, &out);
        assert_true(td_utf8_is_valid(out.data, out.n));
        i += len;
    }
    assert_int_equal(td_stop_found(s), 0);
    td_buf_free(&out);
    td_stop_destroy(s);
}

static void an_empty_string_is_refused_and_failed_allocations_are_survived(void **state)
{
    (void)state;
    struct td_text list[] = {{"ab", 2}, {"", 0}};
    struct td_stop *s = NULL;
    assert_int_equal(td_stop_create(list, 2, &s), TD_E_INVALID);
    assert_null(s);
    list[1] = (struct td_text){"c", 1};
    enum td_status st = TD_E_NO_MEMORY;
    for (uint32_t k = 0; st != TD_OK && k < 20; k++) {
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        st = td_stop_create(list, 2, &s);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
    }
    assert_int_equal(st, TD_OK);
    td_stop_destroy(s);
    td_stop_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_string_never_shows_wherever_the_pieces_end),
        cmocka_unit_test(text_waits_only_while_it_may_begin_a_stop_string),
        cmocka_unit_test(random_texts_are_cut_where_a_plain_search_cuts_them),
        cmocka_unit_test(what_is_held_is_always_a_beginning_and_pieces_stay_whole_characters),
        cmocka_unit_test(an_empty_string_is_refused_and_failed_allocations_are_survived),
    };
    return cmocka_run_group_tests_name("stop", tests, NULL, NULL);
}
