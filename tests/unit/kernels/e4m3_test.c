#include "kernels/e4m3.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static float value(uint8_t c)
{
    uint32_t bits = (uint32_t)td_e4m3_to_bf16(c) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void every_finite_code_survives_and_nan_stays_nan(void **state)
{
    (void)state;
    for (unsigned c = 0; c < 256; c++) {
        if ((c & 0x7f) == 0x7f) {
            assert_true(isnan(value((uint8_t)c)));
            continue;
        }
        assert_int_equal(td_e4m3_encode(value((uint8_t)c)), c);
    }
    assert_int_equal(td_e4m3_encode(NAN) & 0x7f, 0x7f);
    assert_true(value(0x7e) == 448 && value(0x08) == 0.015625f && value(0x01) == 0.001953125f && value(0x38) == 1);
}

static void values_between_two_codes_take_the_nearer_and_ties_the_even_one(void **state)
{
    (void)state;
    for (unsigned c = 0; c < 0x7e; c++) {
        float lo = value((uint8_t)c), hi = value((uint8_t)(c + 1)), mid = lo + (hi - lo) / 2;
        assert_int_equal(td_e4m3_encode(mid), c % 2 ? c + 1 : c);
        assert_int_equal(td_e4m3_encode(nextafterf(mid, 0)), c);
        assert_int_equal(td_e4m3_encode(nextafterf(mid, 1e9f)), c + 1);
        assert_int_equal(td_e4m3_encode(-nextafterf(mid, 1e9f)), (c + 1) | 0x80);
    }
    assert_int_equal(td_e4m3_encode(17), td_e4m3_encode(16));
    assert_true(value(td_e4m3_encode(19)) == 20);
}

static void what_is_too_large_becomes_the_largest(void **state)
{
    (void)state;
    assert_int_equal(td_e4m3_encode(449), 0x7e);
    assert_int_equal(td_e4m3_encode(464), 0x7e);
    assert_int_equal(td_e4m3_encode(1e30f), 0x7e);
    assert_int_equal(td_e4m3_encode(-INFINITY), 0xfe);
    assert_int_equal(td_e4m3_encode(ldexpf(1, -11)), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_finite_code_survives_and_nan_stays_nan),
        cmocka_unit_test(values_between_two_codes_take_the_nearer_and_ties_the_even_one),
        cmocka_unit_test(what_is_too_large_becomes_the_largest),
    };
    return cmocka_run_group_tests_name("kernels/e4m3", tests, NULL, NULL);
}
