/* Allocation, its fault point, and the fault points themselves. */
#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"

static int disarm(void **state)
{
    (void)state;
    td_fault_disarm_all();
    return 0;
}

static void memory_is_zeroed_and_sizes_cannot_overflow(void **state)
{
    (void)state;
    unsigned char *p = td_calloc(10, 10);
    for (int i = 0; i < 100; i++) assert_int_equal(p[i], 0);
    p[99] = 7;
    volatile size_t many = SIZE_MAX / 2; /* volatile: the compiler would warn of the very thing that is tested */
    assert_null(td_realloc(p, many, 3));
    assert_int_equal(p[99], 7); /* still valid */
    p = td_realloc(p, 1000, 10);
    assert_int_equal(p[99], 7);
    free(p);
    assert_null(td_calloc(many, 3));
    void *none = td_calloc(0, 0), *still = td_realloc(NULL, 0, 8);
    assert_true(none != NULL && still != NULL); /* NULL always means failure */
    free(none);
    free(still);
}

static void strings_are_copied(void **state)
{
    (void)state;
    char *a = td_strdup("text"), *b = td_strndup("text", 2), *c = td_strndup("text", 100), *d = td_strdup("");
    assert_string_equal(a, "text");
    assert_string_equal(b, "te");
    assert_string_equal(c, "text");
    assert_string_equal(d, "");
    free(a);
    free(b);
    free(c);
    free(d);
    static const char unterminated[3] = {'a', 'b', 'c'};
    char *e = td_strndup(unterminated, 3);
    assert_string_equal(e, "abc");
    free(e);
}

static void a_fault_passes_then_hits_then_is_over(void **state)
{
    (void)state;
    assert_false(td_fault_hit(TD_FAULT_ALLOC));
    td_fault_arm(TD_FAULT_ALLOC, 2, 3);
    static const int want[] = {0, 0, 1, 1, 1, 0, 0};
    for (int i = 0; i < 7; i++) {
        void *p = td_calloc(1, 1);
        assert_int_equal(p == NULL, want[i]);
        free(p);
    }
    td_fault_arm(TD_FAULT_ALLOC, 0, 1);
    td_fault_disarm_all();
    assert_false(td_fault_hit(TD_FAULT_ALLOC));
}

static void faults_are_parsed_from_text(void **state)
{
    (void)state;
    assert_true(td_fault_parse("ALLOC:1:1"));
    assert_false(td_fault_hit(TD_FAULT_ALLOC));
    assert_true(td_fault_hit(TD_FAULT_ALLOC));
    assert_false(td_fault_hit(TD_FAULT_ALLOC));
    assert_true(td_fault_parse("ALLOC,ALLOC:0"));
    assert_true(td_fault_hit(TD_FAULT_ALLOC));
    assert_true(td_fault_parse(""));
    static const char *const bad[] = {"NOTHING",     "ALLO",     "ALLOC:",   "ALLOC:x",           "ALLOC:1:",
                                      "ALLOC:1:2:3", "ALLOC:1x", "ALLOC:-1", "ALLOC:99999999999", ","};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (td_fault_parse(bad[i])) fail_msg("\"%s\" was taken", bad[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_and_sizes_cannot_overflow),
        cmocka_unit_test(strings_are_copied),
        cmocka_unit_test_teardown(a_fault_passes_then_hits_then_is_over, disarm),
        cmocka_unit_test_teardown(faults_are_parsed_from_text, disarm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
