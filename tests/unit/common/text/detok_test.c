#include "tests/unit/common/text/text_cases.h"

#include "common/text/detok.h"
#include "common/text/utf8.h"

static struct td_tokenizer *tiny;

/* Decodes in pieces of random size; after every piece what came out must be whole characters. */
static void decode_in_pieces(const uint8_t *bytes, size_t n, uint64_t *seed, struct td_buf *out)
{
    struct td_detok d;
    td_detok_init(&d, tiny, false);
    for (size_t i = 0; i < n;) {
        size_t k = 1 + draw(seed, 5);
        if (k > n - i) k = n - i;
        size_t n_before = out->n;
        td_detok_feed_bytes(&d, bytes + i, k, out);
        i += k;
        if (out->n > n_before) assert_true(td_utf8_is_valid(out->data + n_before, out->n - n_before));
        assert_true(d.n_pending <= 3);
    }
    td_detok_end(&d, out);
    assert_int_equal(d.n_pending, 0);
}

static void expect(const char *bytes, size_t n, const char *text)
{
    uint64_t seed = 1;
    for (unsigned round = 0; round < 20; round++) {
        struct td_buf out = {0};
        decode_in_pieces((const uint8_t *)bytes, n, &seed, &out);
        assert_string_equal(td_buf_cstr(&out), text);
        td_buf_free(&out);
    }
}

#define BAD "\xEF\xBF\xBD"
static void invalid_bytes_become_one_replacement_per_maximal_prefix(void **state)
{
    (void)state;
    expect("a\xff"
           "b",
           3, "a" BAD "b");
    expect(" \xF0\x9F"
           "XY",
           5, " " BAD "XY");
    expect("\xF0\x9F\xA7", 3, BAD);
    expect("\xF0\x9F\xA7\xAA", 4, "\xF0\x9F\xA7\xAA");
    expect("\xE4\xB8\xE4\xB8\x80", 5, BAD "\xE4\xB8\x80");
    expect("\xC0\x80", 2, BAD BAD);         /* C0 begins nothing */
    expect("\xED\xA0\x80", 3, BAD BAD BAD); /* a surrogate: ED may not be followed by A0 */
    expect("\xF4\x90\x80\x80", 4, BAD BAD BAD BAD);
    expect("\xE0\x80\xAF", 3, BAD BAD BAD); /* overlong */
    expect("\xF0\x9F\x98\xF0\x9F\x98\x80", 7, BAD "\xF0\x9F\x98\x80");
    expect("\x80\x80", 2, BAD BAD);
    expect("\xF1\x80\x80\xC3\xA9", 5, BAD "\xC3\xA9");
    expect("", 0, "");
}

static void any_cutting_of_valid_text_gives_the_text(void **state)
{
    (void)state;
    uint64_t seed = 99;
    for (unsigned round = 0; round < 2000; round++) {
        struct td_buf text = {0}, out = {0};
        unsigned n = draw(&seed, 40);
        for (unsigned i = 0; i < n; i++) {
            uint32_t top = (uint32_t[]){0x80, 0x800, 0x10000, 0x110000}[draw(&seed, 4)], c = draw(&seed, top);
            if (c >= 0xD800 && c < 0xE000) c = 'x';
            uint8_t bytes[4];
            size_t len = td_utf8_encode(c, bytes), back;
            assert_int_equal(td_utf8_decode(bytes, &back), c);
            assert_int_equal(back, len);
            td_buf_put(&text, bytes, len);
        }
        if (text.n > 0) assert_true(td_utf8_is_valid(text.data, text.n));
        decode_in_pieces(text.data, text.n, &seed, &out);
        assert_int_equal(out.n, text.n);
        assert_true(text.n == 0 || memcmp(out.data, text.data, text.n) == 0);
        td_buf_free(&text);
        td_buf_free(&out);
    }
}

static void any_cutting_of_random_bytes_gives_the_same_text(void **state)
{
    (void)state;
    uint64_t seed = 5;
    static const uint8_t likely[] = {0xF0, 0x9F, 0x90, 0x80, 0xBF, 0xC2, 0xE0, 0xA0, 0xED, 0xF4, 0x8F, 'a', 0xFF, 0xC1};
    for (unsigned round = 0; round < 3000; round++) {
        uint8_t bytes[40];
        size_t n = draw(&seed, sizeof bytes);
        for (size_t i = 0; i < n; i++)
            bytes[i] = draw(&seed, 5) == 0 ? (uint8_t)draw(&seed, 256) : likely[draw(&seed, sizeof likely)];
        struct td_buf whole = {0}, pieces = {0};
        struct td_detok d;
        td_detok_init(&d, tiny, false);
        td_detok_feed_bytes(&d, bytes, n, &whole);
        td_detok_end(&d, &whole);
        decode_in_pieces(bytes, n, &seed, &pieces);
        assert_int_equal(whole.n, pieces.n);
        assert_true(whole.n == 0 || memcmp(whole.data, pieces.data, whole.n) == 0);
        td_buf_free(&whole);
        td_buf_free(&pieces);
    }
}

static void tokens_stream_as_they_decode_at_once(void **state)
{
    (void)state;
    static const char text[] = "plain, caf\xC3\xA9, \xF0\x9F\xA7\xAA\xF0\x9F\xA7\xAC, \xE4\xB8\x80<|end|>!";
    struct td_token_list ids = {0};
    assert_int_equal(td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids, NULL), TD_OK);
    for (unsigned keep = 0; keep < 2; keep++) {
        struct td_buf streamed = {0}, whole = {0};
        struct td_detok d;
        td_detok_init(&d, tiny, keep == 1);
        for (size_t i = 0; i < ids.n; i++) {
            size_t n_before = streamed.n;
            td_detok_feed(&d, ids.ids[i], &streamed);
            if (streamed.n > n_before) assert_true(td_utf8_is_valid(streamed.data + n_before, streamed.n - n_before));
        }
        td_detok_end(&d, &streamed);
        td_tokenizer_decode(tiny, ids.ids, ids.n, keep == 1, &whole);
        assert_string_equal(td_buf_cstr(&streamed), td_buf_cstr(&whole));
        assert_true((strstr(td_buf_cstr(&whole), "<|end|>") != NULL) == (keep == 1));
        td_buf_free(&streamed);
        td_buf_free(&whole);
    }
    td_token_list_free(&ids);
}

static void a_character_comes_with_its_last_byte_and_not_later(void **state)
{
    (void)state;
    struct td_detok d;
    struct td_buf out = {0};
    td_detok_init(&d, tiny, false);
    const uint8_t *emoji = (const uint8_t *)"a\xF0\x9F\xA7\xAA";
    td_detok_feed_bytes(&d, emoji, 4, &out);
    assert_string_equal(td_buf_cstr(&out), "a");
    td_detok_feed_bytes(&d, emoji + 4, 1, &out);
    assert_string_equal(td_buf_cstr(&out), "a\xF0\x9F\xA7\xAA");
    td_buf_free(&out);
}

static int load(void **state)
{
    (void)state;
    tiny = load_tokenizer(TINY_MODEL);
    return 0;
}

static int unload(void **state)
{
    (void)state;
    td_tokenizer_destroy(tiny);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invalid_bytes_become_one_replacement_per_maximal_prefix),
        cmocka_unit_test(any_cutting_of_valid_text_gives_the_text),
        cmocka_unit_test(any_cutting_of_random_bytes_gives_the_same_text),
        cmocka_unit_test(tokens_stream_as_they_decode_at_once),
        cmocka_unit_test(a_character_comes_with_its_last_byte_and_not_later),
    };
    return cmocka_run_group_tests_name("detok", tests, load, unload);
}
