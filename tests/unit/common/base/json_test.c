#include "common/base/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include <jansson.h>

static struct td_buf b;

static const char *quoted(const char *s, size_t n)
{
    td_buf_clear(&b);
    td_json_quote(&b, s, n);
    return td_buf_cstr(&b);
}

static void special_characters_are_escaped(void **state)
{
    (void)state;
    assert_string_equal(quoted("plain", 5), "\"plain\"");
    assert_string_equal(quoted("", 0), "\"\"");
    assert_string_equal(quoted("a\"b\\c\n\r\t\x01\x7F", 10), "\"a\\\"b\\\\c\\n\\r\\t\\u0001\x7F\"");
    assert_string_equal(quoted("a\0b", 3), "\"a\\u0000b\"");
    assert_string_equal(quoted("gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80", 11), "\"gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80\"");
}

static void bytes_that_are_not_utf8_are_replaced(void **state)
{
    (void)state;
#define FFFD "\xEF\xBF\xBD"
    assert_string_equal(quoted("\xFFx", 2), "\"" FFFD "x\"");
    assert_string_equal(quoted("\xC3", 1), "\"" FFFD "\"");                              /* cut short */
    assert_string_equal(quoted("\xC0\xAF", 2), "\"" FFFD FFFD "\"");                     /* overlong */
    assert_string_equal(quoted("\xED\xA0\x80", 3), "\"" FFFD FFFD FFFD "\"");            /* a surrogate */
    assert_string_equal(quoted("\xF4\x90\x80\x80!", 5), "\"" FFFD FFFD FFFD FFFD "!\""); /* beyond U+10FFFF */
    assert_string_equal(quoted("\xE2\x82"
                               "a\"",
                               4),
                        "\"" FFFD FFFD "a\\\"\"");
}

/* Whatever the bytes, a strict reader takes the result. */
static void the_result_is_always_valid_json(void **state)
{
    (void)state;
    uint64_t x = 88172645463325252ull;
    for (int round = 0; round < 20000; round++) {
        char s[24];
        size_t n = 0, want = x % sizeof s;
        while (n < want) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            s[n++] = (char)(x >> 20);
        }
        x += 0x9E3779B97F4A7C15ull;
        const char *text = quoted(s, n);
        json_error_t e;
        json_t *j = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
        if (j == NULL) fail_msg("%s: %s", e.text, text);
        json_decref(j);
    }
}

static int free_buffer(void **state)
{
    (void)state;
    td_buf_free(&b);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(special_characters_are_escaped),
        cmocka_unit_test(bytes_that_are_not_utf8_are_replaced),
        cmocka_unit_test(the_result_is_always_valid_json),
    };
    return cmocka_run_group_tests(tests, NULL, free_buffer);
}
