/* Decoding what a peer may send: limits, memory budget, text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "common/base/fault.h"
#include "common/rpc/codec.h"
#include "proto/fleet.pb-c.h"
#include "proto/inference.pb-c.h"
#include "proto/worker.pb-c.h"

#define MIB (1u << 20)

static void message_survives_the_round_trip(void **state)
{
    (void)state;
    Tandem__V1__GenerateRequest q = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;
    s.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    s.temperature = 0.0f;
    q.model = (char *)(uintptr_t) "gpt-oss-20b";
    q.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    q.text = (ProtobufCBinaryData){5, (uint8_t *)(uintptr_t) "a\0b\xFF"
                                                             "c"}; /* bytes: anything goes */
    q.sampling = &s;
    uint8_t wire[256];
    size_t n = protobuf_c_message_pack(&q.base, wire);
    struct td_codec k;
    ProtobufCMessage *m = NULL;
    struct td_err err = {.text = ""};
    assert_int_equal(td_codec_unpack(&k, &tandem__v1__generate_request__descriptor, wire, n, 256, &m, &err), TD_OK);
    const Tandem__V1__GenerateRequest *got = (const void *)m;
    assert_string_equal(got->model, "gpt-oss-20b");
    assert_int_equal(got->prompt_case, TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT);
    assert_int_equal(got->text.len, 5);
    assert_int_equal(got->sampling->temperature_opt_case, TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE);
    assert_int_equal(got->sampling->top_p_opt_case, TANDEM__V1__SAMPLING__TOP_P_OPT__NOT_SET);
    td_codec_release(&k, m);
}

static enum td_status unpack(const ProtobufCMessageDescriptor *type, const void *wire, size_t n, size_t max,
                             struct td_err *err)
{
    struct td_codec k;
    ProtobufCMessage *m = NULL;
    memset(err, 0, sizeof *err);
    enum td_status st = td_codec_unpack(&k, type, wire, n, max, &m, err);
    if (st == TD_OK)
        td_codec_release(&k, m);
    else
        assert_null(m);
    return st;
}

static void empty_message_decodes(void **state)
{
    (void)state;
    struct td_err err;
    assert_int_equal(unpack(&tandem__v1__drain_request__descriptor, "", 0, 0, &err), TD_OK);
    assert_int_equal(unpack(&tandem__v1__generate_request__descriptor, NULL, 0, 100, &err), TD_OK);
}

static void message_over_the_limit_is_too_large(void **state)
{
    (void)state;
    struct td_err err;
    uint8_t wire[101] = {0x0A, 99};
    memset(wire + 2, 'x', 99);
    assert_int_equal(unpack(&tandem__v1__generate_request__descriptor, wire, 101, 101, &err), TD_OK);
    assert_int_equal(unpack(&tandem__v1__generate_request__descriptor, wire, 101, 100, &err), TD_E_TOO_LARGE);
    assert_non_null(strstr(err.text, "101"));
    assert_non_null(strstr(err.text, "100"));
    assert_non_null(strstr(err.text, "tandem.v1.GenerateRequest"));
}

static void message_that_grows_in_memory_is_stopped(void **state)
{
    (void)state;
    struct td_err err;
    uint8_t *wire = malloc(MIB);
    for (size_t i = 0; i < MIB; i += 2) memcpy(wire + i, "\x12\x00", 2); /* half a million empty ChatMessages */
    assert_int_equal(unpack(&tandem__v1__chat_request__descriptor, wire, MIB, MIB, &err), TD_E_TOO_LARGE);
    assert_non_null(strstr(err.text, "memory"));
    assert_int_equal(unpack(&tandem__v1__chat_request__descriptor, wire, 64, MIB, &err), TD_OK);
    free(wire);
}

static void longest_prompt_fits_the_budget(void **state)
{
    (void)state;
    enum { N = 131072 };
    uint32_t *ids = calloc(N, sizeof *ids);
    Tandem__V1__TokenIds t = TANDEM__V1__TOKEN_IDS__INIT;
    t.n_ids = N;
    t.ids = ids; /* one byte each on the wire, four in memory */
    Tandem__V1__GenerateRequest q = TANDEM__V1__GENERATE_REQUEST__INIT;
    q.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKEN_IDS;
    q.token_ids = &t;
    size_t n = protobuf_c_message_get_packed_size(&q.base);
    uint8_t *wire = malloc(n);
    protobuf_c_message_pack(&q.base, wire);
    struct td_err err;
    assert_int_equal(unpack(&tandem__v1__generate_request__descriptor, wire, n, n, &err), TD_OK);
    free(wire);
    free(ids);
}

static void damaged_bytes_are_invalid_and_named(void **state)
{
    (void)state;
    static const struct {
        const char *wire;
        size_t n;
    } cases[] = {
        {"\x0A\x05"
         "abc",
         5},                                                      /* string shorter than announced */
        {"\x0A\xFF\xFF\xFF\xFF\x0F", 6},                          /* 4 GiB string */
        {"\x80", 1},                                              /* tag cut off */
        {"\x2A\x02\x0D\x00", 4},                                  /* sub-message cut off */
        {"\x48\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 12}, /* endless varint */
        {"\x0F\x00", 2},                                          /* wire type 7 */
        {"\x0B\x0C", 2},                                          /* groups */
    };
    struct td_err err;
    for (unsigned i = 0; i < TD_COUNT(cases); i++) {
        enum td_status st = unpack(&tandem__v1__generate_request__descriptor, cases[i].wire, cases[i].n, 1000, &err);
        if (st != TD_E_INVALID) fail_msg("case %u: %s", i, td_status_name(st));
        assert_non_null(strstr(err.text, "tandem.v1.GenerateRequest"));
    }
}

static void text_fields_are_checked_wherever_they_are(void **state)
{
    (void)state;
    struct td_err err;
    static const char top[] = "\x0A\x02\xC3\x28";                             /* model */
    static const char list[] = "\x12\x00\x12\x03\x0A\x01\x80";                /* messages[1].role */
    static const char nested[] = "\x0A\x09\x12\x01x\x4A\x04\x12\x02\xC0\x80"; /* identity.descriptor.name, in a oneof */
    assert_int_equal(unpack(&tandem__v1__chat_request__descriptor, top, sizeof top - 1, 99, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "model: is not valid UTF-8, in tandem.v1.ChatRequest"));
    assert_int_equal(unpack(&tandem__v1__chat_request__descriptor, list, sizeof list - 1, 99, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "role: "));
    assert_int_equal(unpack(&tandem__v1__join_update__descriptor, nested, sizeof nested - 1, 99, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "name: "));
}

static bool is_clean(const char *text)
{
    char out[64];
    td_codec_clean_text(text, out, sizeof out);
    return strcmp(text, out) == 0;
}

static void text_cleaner_knows_utf8(void **state)
{
    (void)state;
    static const char *const good[] = {"",
                                       "plain",
                                       "\xC2\x80",
                                       "\xDF\xBF",
                                       "\xE0\xA0\x80",
                                       "\xED\x9F\xBF",
                                       "\xEE\x80\x80",
                                       "\xEF\xBF\xBF",
                                       "\xF0\x90\x80\x80",
                                       "\xF4\x8F\xBF\xBF",
                                       "z\xE2\x82\xACz"};
    static const char *const bad[] = {"\x80",
                                      "\xBF",
                                      "\xC0\x80",
                                      "\xC1\xBF",
                                      "\xC2",
                                      "\xE0\x9F\xBF",
                                      "\xE2\x82",
                                      "\xED\xA0\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\xF4\x90\x80\x80",
                                      "\xF5\x80\x80\x80",
                                      "\xFF"};
    for (unsigned i = 0; i < TD_COUNT(good); i++)
        if (!is_clean(good[i])) fail_msg("good %u", i);
    for (unsigned i = 0; i < TD_COUNT(bad); i++)
        if (is_clean(bad[i])) fail_msg("bad %u", i);
    char out[6];
    assert_int_equal(td_codec_clean_text("a\xC3(b", out, sizeof out), 4);
    assert_string_equal(out, "a?(b");
    assert_int_equal(td_codec_clean_text("abcd\xE2\x82\xAC", out, sizeof out), 4); /* no half characters */
    assert_string_equal(out, "abcd");
    assert_int_equal(td_codec_clean_text("abcdefgh", out, sizeof out), 5);
    assert_int_equal(td_codec_clean_text("abc", out, 1), 0);
    assert_string_equal(out, "");
}

static void every_failed_allocation_is_survived(void **state)
{
    (void)state;
    static const char wire[] = "\x12\x03\x0A\x01u\x12\x03\x0A\x01v"; /* two ChatMessages with roles */
    struct td_err err;
    uint32_t n = 0;
    enum td_status st;
    do {
        td_fault_arm(TD_FAULT_ALLOC, n++, 1);
        st = unpack(&tandem__v1__chat_request__descriptor, wire, sizeof wire - 1, 99, &err);
        td_fault_disarm_all();
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        assert_true(n < 100);
    } while (st != TD_OK);
    assert_true(n > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(message_survives_the_round_trip),
        cmocka_unit_test(empty_message_decodes),
        cmocka_unit_test(message_over_the_limit_is_too_large),
        cmocka_unit_test(message_that_grows_in_memory_is_stopped),
        cmocka_unit_test(longest_prompt_fits_the_budget),
        cmocka_unit_test(damaged_bytes_are_invalid_and_named),
        cmocka_unit_test(text_fields_are_checked_wherever_they_are),
        cmocka_unit_test(text_cleaner_knows_utf8),
        cmocka_unit_test(every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
