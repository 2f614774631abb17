#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "common/engine/kv_split.h"

static const struct td_kv_group_layout group = {
    .n_layers = 12, .n_heads = 8, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};

static void a_stretch_meets_at_most_so_many_pages(void **state)
{
    (void)state;
    for (uint32_t page = 1; page <= 70; page += 3)
        for (uint32_t n = 0; n <= 300; n++) {
            uint32_t most = 0;
            for (uint32_t at = 0; n > 0 && at < page; at++) {
                uint32_t meets = (at + n - 1) / page + 1;
                if (meets > most) most = meets;
            }
            assert_int_equal(td_kv_span_pages(n, page), most);
        }
}

static void sliding_gets_what_it_can_use_and_full_the_rest(void **state)
{
    (void)state;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS] = {group, group};
    struct td_err err;
    uint64_t page = 12 * 128 * 1024;
    assert_int_equal(td_kv_split(100 * page + page / 2, 30, kv, &err), TD_OK);
    assert_int_equal(kv[TD_KV_SLIDING].n_pages, 30);
    assert_int_equal(kv[TD_KV_FULL].n_pages, 70);
    assert_int_equal(td_kv_split(100 * page, 300, kv, &err), TD_OK); /* never more than full */
    assert_int_equal(kv[TD_KV_SLIDING].n_pages, 50);
    assert_int_equal(kv[TD_KV_FULL].n_pages, 50);
    kv[TD_KV_FULL].n_layers = 24; /* a full page is twice as much */
    assert_int_equal(td_kv_split(100 * page, 300, kv, &err), TD_OK);
    assert_int_equal(kv[TD_KV_SLIDING].n_pages, 33);
    assert_int_equal(kv[TD_KV_FULL].n_pages, 33);
}

static void too_little_memory_names_the_flag(void **state)
{
    (void)state;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS] = {group, group};
    struct td_err err;
    assert_int_equal(td_kv_split(1 << 20, 3, kv, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "--kv-bytes"));
    assert_non_null(strstr(err.text, "3145728"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stretch_meets_at_most_so_many_pages),
        cmocka_unit_test(sliding_gets_what_it_can_use_and_full_the_rest),
        cmocka_unit_test(too_little_memory_names_the_flag),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
