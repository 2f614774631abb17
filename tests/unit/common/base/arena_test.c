#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/arena.h"
#include "common/base/fault.h"

static void blocks_are_zeroed_aligned_and_apart(void **state)
{
    (void)state;
    struct td_arena a = {0};
    char *before = NULL;
    for (size_t n = 0; n < 100; n++) {
        char *p = td_arena_alloc(&a, n, 3);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % _Alignof(max_align_t), 0);
        for (size_t i = 0; i < 3 * n; i++) assert_int_equal(p[i], 0);
        memset(p, 0xAB, 3 * n);
        if (before != NULL) assert_int_equal((unsigned char)before[3 * (n - 1) - 1], 0xAB);
        before = n > 0 ? p : NULL;
    }
    td_arena_free(&a);
    assert_null(a.blocks);
    td_arena_free(&a);
}

static void what_cannot_be_had_is_null_and_harms_nothing(void **state)
{
    (void)state;
    struct td_arena a = {0};
    assert_null(td_arena_alloc(&a, SIZE_MAX / 2, 4));
    assert_null(td_arena_alloc(&a, SIZE_MAX, 1));
    td_fault_arm(TD_FAULT_ALLOC, 0, 1);
    assert_null(td_arena_alloc(&a, 1, 1));
    td_fault_disarm_all();
    assert_non_null(td_arena_alloc(&a, 1, 1));
    td_arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_zeroed_aligned_and_apart),
        cmocka_unit_test(what_cannot_be_had_is_null_and_harms_nothing),
    };
    return cmocka_run_group_tests_name("arena", tests, NULL, NULL);
}
