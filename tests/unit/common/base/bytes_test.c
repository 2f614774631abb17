#include "common/base/bytes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"

static void what_is_written_can_be_read_back(void **state)
{
    (void)state;
    struct td_buf b = {0};
    td_buf_u8(&b, 0xAB);
    td_buf_u16(&b, 0xBEEF);
    td_buf_u32(&b, 0xDEADBEEF);
    td_buf_u64(&b, 0x0123456789ABCDEFull);
    td_buf_blob(&b, "hello", 5);
    td_buf_blob(&b, NULL, 0);
    assert_false(b.failed);
    assert_int_equal(b.data[1], 0xEF); /* little-endian */
    struct td_reader r = {.p = b.data, .n = b.n};
    uint32_t n;
    assert_int_equal(td_read_u8(&r), 0xAB);
    assert_int_equal(td_read_u16(&r), 0xBEEF);
    assert_int_equal(td_read_u32(&r), 0xDEADBEEF);
    assert_true(td_read_u64(&r) == 0x0123456789ABCDEFull);
    const uint8_t *p = td_read_blob(&r, &n);
    assert_int_equal(n, 5);
    assert_memory_equal(p, "hello", 5);
    td_read_blob(&r, &n);
    assert_int_equal(n, 0);
    assert_int_equal(r.n, 0);
    assert_false(r.failed);
    td_buf_free(&b);
}

/* Every prefix of a valid message fails in the same quiet way. */
static void reading_past_the_end_fails_and_yields_zeros(void **state)
{
    (void)state;
    struct td_buf b = {0};
    td_buf_u32(&b, 7);
    td_buf_blob(&b, "abc", 3);
    td_buf_u16(&b, 9);
    for (size_t n = 0; n < b.n; n++) {
        uint8_t *exact = malloc(n == 0 ? 1 : n); /* so that the sanitizer sees a read beyond */
        memcpy(exact, b.data, n);
        struct td_reader r = {.p = exact, .n = n};
        uint32_t n_blob = 99;
        td_read_u32(&r);
        const uint8_t *p = td_read_blob(&r, &n_blob);
        if (n < 11) assert_true(p == NULL && n_blob == 0);
        assert_int_equal(td_read_u16(&r), 0);
        assert_true(r.failed);
        assert_true(td_read_u64(&r) == 0); /* and stays failed */
        free(exact);
    }
    td_buf_free(&b);
    static const uint8_t huge[] = {0xFF, 0xFF, 0xFF, 0xFF, 1, 2, 3};
    struct td_reader r = {.p = huge, .n = sizeof huge};
    uint32_t n;
    assert_null(td_read_blob(&r, &n));
    assert_true(r.failed);
}

static void an_empty_reader_has_nothing(void **state)
{
    (void)state;
    struct td_reader r = {0};
    td_read_bytes(&r, 0);
    assert_false(r.failed);
    assert_int_equal(td_read_u8(&r), 0);
    assert_true(r.failed);
    assert_null(td_read_bytes(&r, 0));
}

static void a_buffer_grows_and_keeps_its_contents(void **state)
{
    (void)state;
    struct td_buf b = {0};
    for (uint32_t i = 0; i < 10000; i++) td_buf_u32(&b, i);
    assert_int_equal(b.n, 40000);
    struct td_reader r = {.p = b.data, .n = b.n};
    for (uint32_t i = 0; i < 10000; i++) assert_int_equal(td_read_u32(&r), i);
    size_t cap = b.cap;
    td_buf_clear(&b);
    assert_int_equal(b.n, 0);
    assert_int_equal(b.cap, cap);
    td_buf_free(&b);
    td_buf_free(&b); /* twice does no harm */
    assert_null(b.data);
}

static void text_is_formatted_and_terminated(void **state)
{
    (void)state;
    struct td_buf b = {0};
    assert_string_equal(td_buf_cstr(&b), "");
    td_buf_str(&b, "a");
    td_buf_printf(&b, "%d-%s", 42, "x");
    assert_string_equal(td_buf_cstr(&b), "a42-x");
    assert_int_equal(b.n, 5); /* the NUL does not count */
    char big[5000];
    memset(big, 'y', sizeof big - 1);
    big[sizeof big - 1] = 0;
    td_buf_printf(&b, "%s", big);
    assert_int_equal(strlen(td_buf_cstr(&b)), 5 + 4999);
    td_buf_free(&b);
}

static void a_failed_allocation_stops_all_appends_but_harms_nothing(void **state)
{
    (void)state;
    struct td_buf b = {0};
    td_buf_str(&b, "kept");
    char big[1000] = {0};
    td_fault_arm(TD_FAULT_ALLOC, 0, 1);
    td_buf_put(&b, big, sizeof big);
    td_fault_disarm_all();
    assert_true(b.failed);
    td_buf_u8(&b, 1);
    td_buf_printf(&b, "more");
    assert_int_equal(b.n, 4);
    assert_memory_equal(b.data, "kept", 4);
    assert_string_equal(td_buf_cstr(&b), "");
    td_buf_clear(&b);
    assert_false(b.failed);
    assert_false(td_buf_reserve(&b, SIZE_MAX - 1));
    assert_true(b.failed);
    td_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_can_be_read_back),
        cmocka_unit_test(reading_past_the_end_fails_and_yields_zeros),
        cmocka_unit_test(an_empty_reader_has_nothing),
        cmocka_unit_test(a_buffer_grows_and_keeps_its_contents),
        cmocka_unit_test(text_is_formatted_and_terminated),
        cmocka_unit_test(a_failed_allocation_stops_all_appends_but_harms_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
