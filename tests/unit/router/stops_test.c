/* router/stops.c: stop strings are found wherever the pieces of a text fall, and never leak. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"
#include "router/stops.h"

#define TEXT(s) ((struct td_text){s, sizeof s - 1})

/* Feeds text in pieces of the given size; returns what was shown, "#" at its end if it was stopped. */
static void run(const struct td_text *strings, size_t n, const char *text, size_t piece, struct td_buf *out)
{
    struct td_stops s = {0};
    bool is_stopped = false;
    assert_int_equal(td_stops_init(&s, strings, n), TD_OK);
    for (size_t at = 0, len = strlen(text); at < len && !is_stopped; at += piece)
        is_stopped = td_stops_feed(&s, text + at, piece < len - at ? piece : len - at, out);
    if (is_stopped)
        td_buf_str(out, "#");
    else
        td_stops_flush(&s, out);
    td_stops_deinit(&s);
}

static void expect(const struct td_text *strings, size_t n, const char *text, const char *shown)
{
    for (size_t piece = 1; piece <= strlen(text) + 1; piece++) {
        struct td_buf out = {0};
        run(strings, n, text, piece, &out);
        assert_string_equal(td_buf_cstr(&out), shown);
        td_buf_free(&out);
    }
}

static void without_strings_everything_passes(void **state)
{
    (void)state;
    expect(NULL, 0, "Hello", "Hello");
}

static void the_text_ends_before_a_stop_string(void **state)
{
    (void)state;
    const struct td_text end[] = {TEXT("END")};
    expect(end, 1, "abc END def", "abc #");
    expect(end, 1, "END", "#");
    expect(end, 1, "EEND", "E#");
    expect(end, 1, "ENEND", "EN#");
}

static void the_beginning_of_one_comes_out_when_it_is_none(void **state)
{
    (void)state;
    const struct td_text end[] = {TEXT("END")};
    expect(end, 1, "EN", "EN");
    expect(end, 1, "ENX", "ENX");
    expect(end, 1, "ENEN EN", "ENEN EN");
}

static void strings_that_overlap_themselves_are_found(void **state)
{
    (void)state;
    const struct td_text abab[] = {TEXT("ababc")};
    expect(abab, 1, "abababc!", "ab#");
    const struct td_text aab[] = {TEXT("aab")};
    expect(aab, 1, "aaaab", "aa#");
}

static void the_first_of_several_to_be_complete_counts(void **state)
{
    (void)state;
    const struct td_text some[] = {TEXT("abcX"), TEXT("bc"), TEXT("zz")};
    expect(some, 3, "aabcX", "aa#");
    expect(some, 3, "azbzzbc", "azb#");
    const struct td_text nested[] = {TEXT("c"), TEXT("abc")};
    expect(nested, 2, "xabcd", "x#"); /* both end at the same byte: the longer one */
}

static void characters_of_several_bytes_stay_whole(void **state)
{
    (void)state;
    const struct td_text umlaut[] = {TEXT("\xc3\xb6l")};
    expect(umlaut, 1, "Z\xc3\xb6llner", "Z#");
    expect(umlaut, 1, "Z\xc3\xbc \xc3\xb6", "Z\xc3\xbc \xc3\xb6");
}

/* Against the plain definition: the earliest end of any string, then its longest. */
static void random_texts_stop_where_they_should(void **state)
{
    (void)state;
    unsigned seed = 7;
    for (unsigned round = 0; round < 3000; round++) {
        char text[40], words[3][6];
        struct td_text strings[3];
        size_t n_text = (size_t)(rand_r(&seed) % 39), n = 1 + (size_t)(rand_r(&seed) % 3);
        for (size_t i = 0; i < n_text; i++) text[i] = "abc"[rand_r(&seed) % 3];
        text[n_text] = '\0';
        for (size_t k = 0; k < n; k++) {
            size_t len = 1 + (size_t)(rand_r(&seed) % 4);
            for (size_t i = 0; i < len; i++) words[k][i] = "abc"[rand_r(&seed) % 3];
            strings[k] = (struct td_text){words[k], len};
        }
        char want[48] = "";
        size_t end = 0, start = n_text;
        for (size_t at = 1; at <= n_text && end == 0; at++)
            for (size_t k = 0; k < n; k++)
                if (strings[k].n <= at && memcmp(text + at - strings[k].n, strings[k].p, strings[k].n) == 0) {
                    end = at;
                    if (at - strings[k].n < start) start = at - strings[k].n;
                }
        snprintf(want, sizeof want, "%.*s%s", (int)(end > 0 ? start : n_text), text, end > 0 ? "#" : "");
        expect(strings, n, text, want);
    }
}

static void no_memory_is_said(void **state)
{
    (void)state;
    const struct td_text end[] = {TEXT("END")};
    for (unsigned i = 0; i < 2; i++) {
        struct td_stops s = {0};
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        assert_int_equal(td_stops_init(&s, end, 1), TD_E_NO_MEMORY);
        td_fault_disarm_all();
        td_stops_deinit(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_strings_everything_passes),
        cmocka_unit_test(the_text_ends_before_a_stop_string),
        cmocka_unit_test(the_beginning_of_one_comes_out_when_it_is_none),
        cmocka_unit_test(strings_that_overlap_themselves_are_found),
        cmocka_unit_test(the_first_of_several_to_be_complete_counts),
        cmocka_unit_test(characters_of_several_bytes_stay_whole),
        cmocka_unit_test(random_texts_stop_where_they_should),
        cmocka_unit_test(no_memory_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
