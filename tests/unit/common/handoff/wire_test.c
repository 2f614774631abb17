#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "common/base/check.h"
#include "common/handoff/wire.h"

static void every_message_survives_the_wire(void **state)
{
    (void)state;
    static const uint8_t ids[] = {TD_WIRE_BEGUN, TD_WIRE_COMPLETE, TD_WIRE_ABORTED, TD_WIRE_STOP, TD_WIRE_STOPPED};
    struct td_wire m = {
        .to = 0x1122334455667788ull,
        .generation = 1ull << 40,
        .first_token = 201087,
        .n_ranks = 2,
        .kv_bytes = {1, UINT64_MAX},
        .status = TD_E_PEER_LOST,
        .lowest_live = 77,
        .address = (const uint8_t *)"abc",
        .n_address = 3,
    };
    for (size_t i = 0; i < TD_COUNT(ids); i++) {
        struct td_buf b = {0};
        struct td_wire got;
        struct td_err err;
        td_wire_encode(ids[i], &m, &b);
        assert_false(b.failed);
        assert_int_equal(td_wire_decode(ids[i], b.data, b.n, &got, &err), TD_OK);
        assert_int_equal(got.to, m.to);
        assert_int_equal(got.generation, m.generation);
        if (ids[i] == TD_WIRE_COMPLETE) {
            assert_int_equal(got.first_token, m.first_token);
            assert_int_equal(got.n_ranks, 2);
            assert_int_equal(got.kv_bytes[1], UINT64_MAX);
        }
        if (ids[i] == TD_WIRE_ABORTED) assert_int_equal(got.status, TD_E_PEER_LOST);
        if (ids[i] == TD_WIRE_STOP) {
            assert_int_equal(got.lowest_live, 77);
            assert_int_equal(got.n_address, 3);
            assert_memory_equal(got.address, "abc", 3);
        }
        for (size_t n = 0; n < b.n; n++) /* cut anywhere */
            assert_int_equal(td_wire_decode(ids[i], b.data, n, &got, &err), TD_E_PROTOCOL);
        td_buf_u32(&b, 5); /* a later minor version says more */
        assert_int_equal(td_wire_decode(ids[i], b.data, b.n, &got, &err), TD_OK);
        b.data[0]++;
        assert_int_equal(td_wire_decode(ids[i], b.data, b.n, &got, &err), TD_E_PROTOCOL);
        td_buf_free(&b);
    }
}

static void nonsense_is_an_error_that_says_what(void **state)
{
    (void)state;
    struct td_wire got;
    struct td_err err;
    struct td_buf b = {0};
    struct td_wire m = {.n_ranks = 1};
    td_wire_encode(TD_WIRE_COMPLETE, &m, &b);
    assert_int_equal(td_wire_decode(77, b.data, b.n, &got, &err), TD_E_PROTOCOL);
    assert_non_null(strstr(err.text, "77"));
    b.data[1 + 8 + 8 + 4] = TD_MAX_RANKS + 1;
    assert_int_equal(td_wire_decode(TD_WIRE_COMPLETE, b.data, b.n, &got, &err), TD_E_PROTOCOL);
    assert_non_null(strstr(err.text, "9 ranks"));
    b.data[1 + 8 + 8 + 4] = 0;
    assert_int_equal(td_wire_decode(TD_WIRE_COMPLETE, b.data, b.n, &got, &err), TD_E_PROTOCOL);
    td_buf_clear(&b);
    td_wire_encode(TD_WIRE_STOP, &m, &b);
    memset(b.data + b.n - 4, 0xff, 4); /* an address of 4 GiB */
    assert_int_equal(td_wire_decode(TD_WIRE_STOP, b.data, b.n, &got, &err), TD_E_PROTOCOL);
    td_buf_clear(&b);
    td_buf_u8(&b, TD_WIRE_VERSION);
    td_buf_u64(&b, 1);
    td_buf_u64(&b, 2);
    td_buf_blob(&b, "SOME_STATUS_OF_TOMORROW", 23);
    assert_int_equal(td_wire_decode(TD_WIRE_ABORTED, b.data, b.n, &got, &err), TD_OK);
    assert_int_equal(got.status, TD_E_INTERNAL);
    assert_int_equal(td_wire_decode(TD_WIRE_ABORTED, NULL, 0, &got, &err), TD_E_PROTOCOL);
    td_buf_free(&b);
}

static void bytes_follow_in_closed_form(void **state)
{
    (void)state;
    /* gpt-oss-20b: 12 layers of each kind, 8 heads of 64, bf16: a page of 64 positions is 128 KiB a layer. */
    struct td_kv_group_layout g = {.n_layers = 12, .n_heads = 8, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};
    struct td_kv_group_layout kv[TD_KV_N_GROUPS] = {g, g};
    uint64_t page = 12 * 128 * 1024;
    static const struct {
        uint32_t n, cached, sliding, full;
    } rows[] = {
        {1, 0, 1, 1},       {64, 0, 1, 1},      {65, 0, 2, 2},
        {127, 0, 2, 2},     {128, 0, 2, 2}, /* positions 1..127 */
        {190, 0, 3, 3},                     /* 63..189 */
        {191, 0, 2, 3},                     /* 64..190 */
        {4096, 0, 2, 64},   {4096, 64, 2, 63},  {4096, 127, 2, 63},
        {4096, 4095, 1, 1}, {4097, 4096, 1, 1}, /* what lies before is cached too */
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++)
        assert_int_equal(td_handoff_bytes(kv, 128, rows[i].n, rows[i].cached), (rows[i].sliding + rows[i].full) * page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_message_survives_the_wire),
        cmocka_unit_test(nonsense_is_an_error_that_says_what),
        cmocka_unit_test(bytes_follow_in_closed_form),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
