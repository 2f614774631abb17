/* Bounded decompression: what fits comes out whole, what does not stops at the limit, damage is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <zlib.h>

#include "common/base/fault.h"
#include "common/rpc/inflate.h"

enum format { ZLIB = 0, GZIP = 16 };

static uint8_t *deflate_all(const void *data, size_t n, enum format format, size_t *n_out)
{
    z_stream z = {0};
    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, MAX_WBITS + (int)format, 8, Z_DEFAULT_STRATEGY), Z_OK);
    size_t cap = deflateBound(&z, n) + 64;
    uint8_t *out = malloc(cap);
    assert_non_null(out);
    z.next_in = (Bytef *)(uintptr_t)data;
    z.avail_in = (uInt)n;
    z.next_out = out;
    z.avail_out = (uInt)cap;
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    *n_out = cap - z.avail_out;
    deflateEnd(&z);
    return out;
}

static void expect(const void *data, size_t n, size_t max_bytes, enum td_status want, const void *plain, size_t n_plain)
{
    struct td_err err = {.text = ""};
    uint8_t *out = NULL;
    size_t n_out = 12345;
    assert_int_equal(td_inflate(data, n, max_bytes, &out, &n_out, &err), want);
    if (want == TD_OK) {
        assert_non_null(out);
        assert_int_equal(n_out, n_plain);
        assert_memory_equal(out, plain, n_plain);
    } else {
        assert_null(out);
        assert_true(err.text[0] != 0);
    }
    free(out);
}

static void what_was_compressed_comes_back_in_both_formats(void **state)
{
    (void)state;
    enum { MOST = 100000 };
    uint8_t *plain = malloc(MOST);
    assert_non_null(plain);
    const size_t sizes[] = {0, 1, 4095, 4096, 4097, 65536, MOST};
    for (int noise = 0; noise < 2; noise++)
        for (unsigned i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (int f = 0; f < 2; f++) {
                for (size_t j = 0; j < sizes[i]; j++) plain[j] = noise ? (uint8_t)(j * j * 2654435761u >> 13) : 'a';
                size_t n;
                uint8_t *z = deflate_all(plain, sizes[i], f ? GZIP : ZLIB, &n);
                expect(z, n, sizes[i], TD_OK, plain, sizes[i]); /* exactly the limit */
                expect(z, n, MOST, TD_OK, plain, sizes[i]);
                if (sizes[i] > 0) expect(z, n, sizes[i] - 1, TD_E_TOO_LARGE, NULL, 0);
                free(z);
            }
    free(plain);
}

static void a_bomb_is_refused_at_the_limit(void **state)
{
    (void)state;
    size_t n_plain = 64u << 20, n;
    uint8_t *plain = calloc(1, n_plain);
    assert_non_null(plain);
    uint8_t *z = deflate_all(plain, n_plain, GZIP, &n);
    free(plain);
    assert_true(n < 100000);
    expect(z, n, 1000, TD_E_TOO_LARGE, NULL, 0);
    expect(z, n, 0, TD_E_TOO_LARGE, NULL, 0);
    free(z);
}

static void every_cut_and_tail_is_refused(void **state)
{
    (void)state;
    char plain[] = "the quick brown fox jumps over the lazy dog, the lazy dog jumps over the quick brown fox";
    for (int f = 0; f < 2; f++) {
        size_t n;
        uint8_t *z = deflate_all(plain, sizeof plain, f ? GZIP : ZLIB, &n);
        for (size_t cut = 0; cut < n; cut++) expect(z, cut, 4096, TD_E_INVALID, NULL, 0);
        uint8_t *more = malloc(2 * n);
        assert_non_null(more);
        memcpy(more, z, n);
        memcpy(more + n, z, n);
        expect(more, n + 1, 4096, TD_E_INVALID, NULL, 0);
        expect(more, 2 * n, 4096, TD_E_INVALID, NULL, 0);
        free(more);
        free(z);
    }
}

static void damaged_bytes_never_give_the_wrong_text(void **state)
{
    (void)state;
    char plain[512];
    for (size_t i = 0; i < sizeof plain; i++) plain[i] = (char)('a' + i * i % 26);
    size_t n;
    uint8_t *z = deflate_all(plain, sizeof plain, GZIP, &n);
    for (size_t i = 10; i < n; i++) { /* behind the header, whose time and flags may change */
        z[i] ^= 0x55;
        expect(z, n, 4096, TD_E_INVALID, NULL, 0);
        z[i] ^= 0x55;
    }
    expect("not compressed at all", 21, 4096, TD_E_INVALID, NULL, 0);
    free(z);
}

static void a_preset_dictionary_is_refused(void **state)
{
    (void)state;
    const uint8_t z[] = {0x78, 0xBB, 0, 0, 0, 1, 3, 0, 0, 0, 0, 1};
    expect(z, sizeof z, 4096, TD_E_INVALID, NULL, 0);
}

static void failed_allocations_are_said(void **state)
{
    (void)state;
    char *plain = calloc(1, 100000);
    assert_non_null(plain);
    size_t n;
    uint8_t *z = deflate_all(plain, 100000, GZIP, &n);
    for (uint32_t i = 0; i < 4; i++) {
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        expect(z, n, 1 << 20, TD_E_NO_MEMORY, NULL, 0);
        td_fault_disarm_all();
    }
    free(z);
    free(plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_compressed_comes_back_in_both_formats),
        cmocka_unit_test(a_bomb_is_refused_at_the_limit),
        cmocka_unit_test(every_cut_and_tail_is_refused),
        cmocka_unit_test(damaged_bytes_never_give_the_wrong_text),
        cmocka_unit_test(a_preset_dictionary_is_refused),
        cmocka_unit_test(failed_allocations_are_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
