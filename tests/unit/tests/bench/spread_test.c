#include "tests/bench/spread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

static void percentiles_are_values_that_occurred(void **state)
{
    (void)state;
    double v[200];
    struct td_bench_spread s;
    for (int i = 0; i < 200; i++) v[i] = 200 - i; /* 200 .. 1 */
    td_bench_spread_of(v, 200, &s);
    assert_true(s.p50 == 100 && s.p90 == 180 && s.p99 == 198 && s.max == 200);
    assert_true(s.mean > 100.49 && s.mean < 100.51);
}

static void few_values_are_enough(void **state)
{
    (void)state;
    double one[] = {3}, two[] = {5, 1};
    struct td_bench_spread s;
    td_bench_spread_of(one, 0, &s);
    assert_true(s.p50 == 0 && s.max == 0 && s.mean == 0);
    td_bench_spread_of(one, 1, &s);
    assert_true(s.p50 == 3 && s.p99 == 3 && s.mean == 3);
    td_bench_spread_of(two, 2, &s);
    assert_true(s.p50 == 1 && s.p90 == 5 && s.mean == 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(percentiles_are_values_that_occurred),
                                       cmocka_unit_test(few_values_are_enough)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
