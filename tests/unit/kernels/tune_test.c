#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernels/tune/product.h"

enum { SMS = 132 };

static void every_shape_of_the_models_gets_a_tile(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{5120, 2880},   {2880, 4096}, {128, 2880},
                                         {201088, 2880}, {5760, 2880}, {2048, 288}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (uint32_t rows = 1; rows <= 8192; rows *= 2) {
            enum td_product_tile t = td_product_pick(rows, 0, shapes[i][0], shapes[i][1], SMS);
            assert_true(t < TD_PRODUCT_N_TILES);
            const struct td_product_row *r = &td_product_rows[t];
            assert_true(rows <= r->most_rows && shapes[i][1] <= r->most_k);
        }
}

static void few_rows_get_narrow_tiles_and_many_get_wide_ones(void **state)
{
    (void)state;
    assert_int_equal(td_product_pick(32, 0, 5120, 2880, SMS), TD_PRODUCT_64x32);
    assert_int_equal(td_product_pick(32, 0, 2880, 4096, SMS), TD_PRODUCT_128x64); /* k is long: see the table */
    assert_int_equal(td_product_pick(65, 0, 5120, 2880, SMS), TD_PRODUCT_128x64);
    assert_int_equal(td_product_pick(2048, 0, 5120, 2880, SMS), TD_PRODUCT_128x128); /* 2.4 rounds of wide ones */
    assert_int_equal(td_product_pick(8192, 0, 5120, 2880, SMS), TD_PRODUCT_128x256);
    assert_int_equal(td_product_pick(16, 0, 201088, 2880, SMS), TD_PRODUCT_128x256);
}

static void grouped_rows_get_tiles_of_128_rows(void **state)
{
    (void)state;
    for (uint32_t tiles = 1; tiles < 2000; tiles = tiles * 3 / 2 + 1)
        assert_int_equal(td_product_rows[td_product_pick(8, tiles, 5760, 2880, SMS)].bm, 128);
}

static void some_rows_divide_k_so_that_all_multiprocessors_read(void **state)
{
    (void)state;
    assert_int_equal(td_product_split(32, 5120, 2880, SMS, false), 1); /* 80 tiles: whole ones fill the card better */
    assert_int_equal(td_product_split(32, 2880, 4096, SMS, false), 3);
    assert_int_equal(td_product_split(128, 2880, 4096, SMS, false), 1);
    assert_int_equal(td_product_split(32, 128, 2880, SMS, false), 6);
    assert_int_equal(td_product_split(128, 5120, 2880, SMS, false), 1);
    assert_int_equal(td_product_split(129, 2880, 4096, SMS, false), 1);
    assert_int_equal(td_product_split(32, 201088, 2880, SMS, false), 1);
    assert_int_equal(td_product_split(32, 2048, 288, SMS, false), 1);
    assert_int_equal(td_product_split(32, 5120, 2880, SMS, true), 1);
}

static void a_few_rows_get_a_block_of_columns_a_multiprocessor(void **state)
{
    (void)state;
    assert_int_equal(td_product_few(1, 5120, 2880, SMS, false), 40);
    assert_int_equal(td_product_few(8, 2880, 4096, SMS, false), 24);
    assert_int_equal(td_product_few(8, 128, 2880, SMS, false), 8);
    assert_int_equal(td_product_few(9, 5120, 2880, SMS, false), 0);
    assert_int_equal(td_product_few(8, 5120, 4096, SMS, false), 0); /* its share of W does not fit */
    assert_int_equal(td_product_few(1, 201088, 2880, SMS, false), 0);
    assert_int_equal(td_product_few(1, 2052, 2880, SMS, false), 0); /* eight columns at a time */
    assert_int_equal(td_product_few(1, 5120, 2880, SMS, true), 0);
}

static void weights_in_fp8_have_a_kernel_for_every_shape(void **state)
{
    (void)state;
    assert_int_equal(td_product_fp8(1, 5120, 2880, SMS, false), TD_FP8_FEW_40);
    assert_int_equal(td_product_fp8(8, 2880, 4096, SMS, false), TD_FP8_FEW_24);
    assert_int_equal(td_product_fp8(8, 201088, 2880, SMS, false), TD_FP8_FEW_40);
    assert_int_equal(td_product_fp8(8, 5120, 2880, SMS, true), TD_FP8_64x32);
    assert_int_equal(td_product_fp8(32, 5120, 2880, SMS, false), TD_FP8_64x32);
    assert_int_equal(td_product_fp8(64, 201088, 2880, SMS, false), TD_FP8_64x128);
    assert_int_equal(td_product_fp8(65, 5120, 2880, SMS, false), TD_FP8_128x128);
}

static void many_rows_of_one_matrix_go_in_pairs(void **state)
{
    (void)state;
    assert_true(td_product_is_paired(2048, 5120));
    assert_false(td_product_is_paired(128, 5120));
    assert_false(td_product_is_paired(2048, 128));
}

static void rows_that_must_not_depend_on_their_company_never_take_the_kernel_for_few(void **state)
{
    (void)state;
    assert_true(td_product_is_skinny(1, false, 5120, false));
    assert_true(td_product_is_skinny(8, false, 5120, false));
    assert_false(td_product_is_skinny(9, false, 5120, false));
    assert_true(td_product_is_skinny(64, true, 5760, false));
    assert_false(td_product_is_skinny(65, true, 5760, false));
    assert_false(td_product_is_skinny(1, false, 5121, false)); /* it stores pairs */
    assert_false(td_product_is_skinny(1, false, 5120, true));
    assert_false(td_product_is_skinny(1, true, 5760, true));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_of_the_models_gets_a_tile),
        cmocka_unit_test(few_rows_get_narrow_tiles_and_many_get_wide_ones),
        cmocka_unit_test(grouped_rows_get_tiles_of_128_rows),
        cmocka_unit_test(some_rows_divide_k_so_that_all_multiprocessors_read),
        cmocka_unit_test(a_few_rows_get_a_block_of_columns_a_multiprocessor),
        cmocka_unit_test(weights_in_fp8_have_a_kernel_for_every_shape),
        cmocka_unit_test(many_rows_of_one_matrix_go_in_pairs),
        cmocka_unit_test(rows_that_must_not_depend_on_their_company_never_take_the_kernel_for_few),
    };
    return cmocka_run_group_tests_name("kernels/tune", tests, NULL, NULL);
}
