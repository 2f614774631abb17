#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/base/fault.h"
#include "common/handoff/refused.h"

static void what_was_added_is_refused_and_nothing_else(void **state)
{
    (void)state;
    struct td_refused r = {0};
    static const uint64_t in[] = {9, 3, 7, 7, 100, 4};
    for (int i = 0; i < 6; i++) td_refused_add(&r, in[i]);
    assert_int_equal(r.n, 5);
    for (uint64_t g = 0; g < 120; g++)
        assert_int_equal(td_refused_has(&r, g), g == 3 || g == 4 || g == 7 || g == 9 || g == 100);
    td_refused_deinit(&r);
}

static void a_rising_floor_refuses_and_forgets(void **state)
{
    (void)state;
    struct td_refused r = {0};
    for (uint64_t g = 10; g < 20; g += 2) td_refused_add(&r, g);
    td_refused_raise_floor(&r, 15);
    assert_int_equal(r.n, 2);
    assert_true(td_refused_has(&r, 13));
    assert_false(td_refused_has(&r, 15));
    assert_true(td_refused_has(&r, 16));
    td_refused_raise_floor(&r, 3); /* never falls */
    assert_true(td_refused_has(&r, 13));
    td_refused_add(&r, 1);
    assert_int_equal(r.n, 2);
    td_refused_deinit(&r);
}

static void a_full_memory_refuses_more_never_less(void **state)
{
    (void)state;
    struct td_refused r = {0};
    uint64_t n = 3 * TD_REFUSED_MAX;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t g = i * 2;
        td_refused_add(&r, g);
        assert_true(r.n <= TD_REFUSED_MAX);
    }
    for (uint64_t i = 0; i < n; i++) assert_true(td_refused_has(&r, i * 2));
    assert_false(td_refused_has(&r, 2 * n));
    td_refused_deinit(&r);
}

static void without_memory_it_refuses_more_never_less(void **state)
{
    (void)state;
    struct td_refused r = {0};
    td_refused_add(&r, 5);
    for (uint64_t g = 6; g < 21; g++) td_refused_add(&r, g);
    td_fault_arm(TD_FAULT_ALLOC, 0, 1);
    td_refused_add(&r, 40);
    td_fault_disarm_all();
    assert_true(td_refused_has(&r, 5));
    assert_true(td_refused_has(&r, 40));
    assert_false(td_refused_has(&r, 41));
    td_refused_deinit(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_added_is_refused_and_nothing_else),
        cmocka_unit_test(a_rising_floor_refuses_and_forgets),
        cmocka_unit_test(a_full_memory_refuses_more_never_less),
        cmocka_unit_test(without_memory_it_refuses_more_never_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
