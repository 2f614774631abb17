#include "common/base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void every_status_has_its_row(void **state)
{
    (void)state;
    assert_int_equal(TD_OK, 0);
    assert_string_equal(td_status_name(TD_OK), "OK");
    assert_string_equal(td_status_name(TD_E_NO_PAGES), "NO_PAGES");
    assert_string_equal(td_status_text(TD_E_NO_PAGES), "no free KV pages");
    assert_string_equal(td_status_grpc_name(TD_E_NO_PAGES), "RESOURCE_EXHAUSTED");
    assert_int_equal(td_status_retry(TD_E_PEER_LOST), TD_RETRY_OTHER);
    assert_int_equal(td_status_scope(TD_E_PEER_LOST), TD_SCOPE_PEER);
    for (int st = 0; st < TD_N_STATUS; st++) assert_true(strlen(td_status_text((enum td_status)st)) > 0);
    assert_string_equal(td_status_name((enum td_status) - 1), "INTERNAL"); /* a peer may send any number */
    assert_string_equal(td_status_name((enum td_status)9999), "INTERNAL");
}

static void messages_are_set_and_prefixed(void **state)
{
    (void)state;
    struct td_err err;
    assert_int_equal(td_err_set(&err, TD_E_INVALID, "field %s", "x"), TD_E_INVALID);
    assert_string_equal(err.text, "field x");
    assert_int_equal(td_err_prefix(&err, TD_E_BAD_FILE, "file %d", 7), TD_E_BAD_FILE);
    assert_string_equal(err.text, "file 7: field x");
    td_err_set(&err, TD_E_INVALID, "again: %s", err.text);
    assert_string_equal(err.text, "again: file 7: field x");
    assert_int_equal(td_err_set(NULL, TD_E_IO, "nobody listens"), TD_E_IO);
    assert_int_equal(td_err_prefix(NULL, TD_E_IO, "nobody listens"), TD_E_IO);
}

static void long_messages_are_cut_between_characters(void **state)
{
    (void)state;
    static const char *const characters[] = {"x", "\xC3\xBC", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    for (int c = 0; c < 4; c++) {
        size_t len = strlen(characters[c]);
        for (size_t shift = 0; shift < 4; shift++) {
            char text[700] = "";
            memset(text, 'a', shift);
            for (size_t n = shift; n + len < sizeof text; n += len) memcpy(text + n, characters[c], len + 1);
            struct td_err err;
            td_err_set(&err, TD_E_INVALID, "%s", text);
            size_t n = strlen(err.text);
            assert_in_range(n, sizeof err.text - 4, sizeof err.text - 1);
            assert_int_equal((n - shift) % len, 0);
            assert_memory_equal(err.text, text, n);
            td_err_prefix(&err, TD_E_INVALID, "p");
            n = strlen(err.text);
            assert_in_range(n, sizeof err.text - 4, sizeof err.text - 1);
            assert_int_equal((n - 3 - shift) % len, 0);
            td_err_prefix(&err, TD_E_INVALID, "%s", text); /* a prefix that fills it all */
            assert_in_range(strlen(err.text), sizeof err.text - 4, sizeof err.text - 1);
        }
    }
}

static enum td_status step(enum td_status st, int *n)
{
    ++*n;
    return st;
}

static enum td_status steps(enum td_status second, int *n)
{
    enum td_status st;
    TD_TRY(step(TD_OK, n));
    TD_TRY(step(second, n));
    TD_TRY(step(TD_OK, n));
out:
    return st;
}

static void try_stops_at_the_first_failure(void **state)
{
    (void)state;
    int n = 0;
    assert_int_equal(steps(TD_OK, &n), TD_OK);
    assert_int_equal(n, 3);
    assert_int_equal(steps(TD_E_IO, &n), TD_E_IO);
    assert_int_equal(n, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_its_row),
        cmocka_unit_test(messages_are_set_and_prefixed),
        cmocka_unit_test(long_messages_are_cut_between_characters),
        cmocka_unit_test(try_stops_at_the_first_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
