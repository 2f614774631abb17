/* Files that lie about themselves. */
#include "common/model/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/check.h"

static char dir[64];

static void path_of(char *out, size_t n, const char *name) { snprintf(out, n, "%s/%s", dir, name); }

static void write_bytes(const char *name, const void *p, size_t n)
{
    char path[256];
    path_of(path, sizeof path, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static void remove_file(const char *name)
{
    char path[256];
    path_of(path, sizeof path, name);
    unlink(path);
}

/* A file of this header and n_data bytes 0, 1, 2, ... */
static size_t make(uint8_t *out, const char *header, size_t n_data)
{
    size_t n = strlen(header);
    for (uint32_t i = 0; i < 8; i++) out[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(out + 8, header, n);
    for (size_t i = 0; i < n_data; i++) out[8 + n + i] = (uint8_t)i;
    return 8 + n + n_data;
}

static enum td_status check(const char *header, size_t n_data, struct td_err *err)
{
    static uint8_t buffer[65536];
    size_t n = make(buffer, header, n_data);
    uint8_t *exact = malloc(n); /* so that reading past the end is seen */
    assert_non_null(exact);
    memcpy(exact, buffer, n);
    enum td_status st = td_safetensors_check(exact, n, err);
    free(exact);
    return st;
}

static void headers_that_are_right_pass(void **state)
{
    (void)state;
    static const char *const headers[] = {
        "{}",
        "{}      ",
        "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]}}",
        "{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_"
        "offsets\":[0,8]}}",
        "{\"scalar\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},\"none\":{\"dtype\":\"F32\",\"shape\":[0,"
        "5],\"data_offsets\":[8,8]}}",
    };
    struct td_err err;
    for (uint32_t i = 0; i < TD_COUNT(headers); i++)
        if (check(headers[i], 12, &err) != TD_OK) fail_msg("%s: %s", headers[i], err.text);
}

static void headers_that_lie_are_refused_with_the_field(void **state)
{
    (void)state;
    static const struct {
        const char *header, *words;
    } cases[] = {
        {"", "line"},
        {"[]", "not a JSON object"},
        {"{\"a\":1}", "tensor \"a\": entry is not an object"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,4]}}", "dtype: missing"},
        {"{\"a\":{\"dtype\":\"BF17\",\"shape\":[2],\"data_offsets\":[0,4]}}", "dtype: not a known"},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,4]}}", "dtype: missing or not a string"},
        {"{\"a\":{\"dtype\":\"BF16\",\"data_offsets\":[0,4]}}", "shape: missing"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[-2],\"data_offsets\":[0,4]}}", "shape: not a list of natural"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2.0],\"data_offsets\":[0,4]}}", "shape: not a list of natural"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,4]}}", "too many dimensions"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", "shape: too large"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", "shape: too large"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2]}}", "data_offsets: must be two"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4,8]}}", "data_offsets: must be two"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[\"0\",4]}}", "data_offsets: must be two"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[-4,0]}}", "data_offsets: not a range"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[8,4]}}", "data_offsets: not a range"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[12,16]}}", "ends at byte 16 of 12"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[9223372036854775803,9223372036854775807]}}",
         "cut short"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,4]}}", "4 bytes where the shape needs 6"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[5],\"data_"
         "offsets\":[7,12]}}",
         "\"a\" and \"b\" overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_"
         "offsets\":[3,5]}}",
         "overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_"
         "offsets\":[1,2]}}",
         "duplicate"},
        {"{\"__metadata__\":[]}", "__metadata__"},
        {"{\"__metadata__\":{\"a\":1}}", "__metadata__"},
    };
    for (uint32_t i = 0; i < TD_COUNT(cases); i++) {
        struct td_err err = {0};
        enum td_status st = check(cases[i].header, 12, &err);
        if (st != TD_E_BAD_FILE || strstr(err.text, cases[i].words) == NULL)
            fail_msg("%s: %s: \"%s\" does not say \"%s\"", cases[i].header, td_status_name(st), err.text,
                     cases[i].words);
    }
}

static void header_lengths_that_lie_are_refused(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {3, 1000, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    for (uint32_t i = 0; i < TD_COUNT(lengths); i++) {
        uint8_t bytes[10] = {0};
        memcpy(bytes, &lengths[i], 8);
        memcpy(bytes + 8, "{}", 2);
        struct td_err err;
        assert_int_equal(td_safetensors_check(bytes, sizeof bytes, &err), TD_E_BAD_FILE);
        assert_non_null(strstr(err.text, "header length"));
        for (size_t n = 0; n < 8; n++) assert_int_equal(td_safetensors_check(bytes, n, &err), TD_E_BAD_FILE);
    }
}

static void every_cut_and_every_flipped_byte_is_survived(void **state)
{
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[12,16]}}";
    uint8_t whole[512];
    size_t n = make(whole, header, 16);
    struct td_err err;
    assert_int_equal(td_safetensors_check(whole, n, &err), TD_OK);
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *part = malloc(cut + 1);
        assert_non_null(part);
        memcpy(part, whole, cut);
        assert_int_equal(td_safetensors_check(part, cut, &err), TD_E_BAD_FILE);
        free(part);
    }
    for (size_t at = 0; at < n - 16; at++)
        for (uint32_t bit = 0; bit < 8; bit++) {
            uint8_t *bent = malloc(n);
            assert_non_null(bent);
            memcpy(bent, whole, n);
            bent[at] ^= (uint8_t)(1u << bit);
            (void)td_safetensors_check(bent, n, &err);
            free(bent);
        }
}

#define ONE                                                                                                            \
    "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],"       \
    "\"data_offsets\":[12,16]}}"
#define TWO "{\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}  "

static void expect_failure(const char *words)
{
    struct td_safetensors *s = NULL;
    struct td_err err = {0};
    enum td_status st = td_safetensors_open(dir, &s, &err);
    if (st == TD_OK || strstr(err.text, words) == NULL)
        fail_msg("%s: \"%s\" does not say \"%s\"", td_status_name(st), err.text, words);
    assert_null(s);
}

static void files_are_found_alone_or_through_the_index(void **state)
{
    (void)state;
    uint8_t bytes[512];
    struct td_safetensors *s = NULL;
    struct td_err err;
    expect_failure("no model.safetensors.index.json, and no single file");
    write_bytes("model.safetensors", bytes, make(bytes, ONE, 16));
    assert_int_equal(td_safetensors_open(dir, &s, &err), TD_OK);
    assert_int_equal(td_safetensors_count(s), 2);
    const struct td_tensor *t = td_safetensors_find(s, "b");
    assert_non_null(t);
    assert_true(t->type == TD_T_U8 && t->n_dims == 1 && t->shape[0] == 4 && t->n_bytes == 4 && t->data[0] == 12);
    assert_string_equal(td_safetensors_at(s, 0)->name, "a");
    assert_null(td_safetensors_find(s, "c"));
    td_safetensors_close(s);

    write_bytes("one.safetensors", bytes, make(bytes, ONE, 16));
    write_bytes("two.safetensors", bytes, make(bytes, TWO, 4));
    static const char index[] = "{\"metadata\":{\"total_size\":20},\"weight_map\":{\"a\":\"one.safetensors\",\"b\":"
                                "\"one.safetensors\",\"c\":\"two.safetensors\"}}";
    write_bytes("model.safetensors.index.json", index, strlen(index));
    assert_int_equal(td_safetensors_open(dir, &s, &err), TD_OK);
    assert_int_equal(td_safetensors_count(s), 3);
    assert_int_equal(td_safetensors_find(s, "c")->type, TD_T_F32);
    assert_non_null(strstr(td_safetensors_find(s, "c")->file, "two.safetensors"));
    td_safetensors_close(s);
}

static void an_index_that_lies_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *index, *words;
    } cases[] = {
        {"{}", "weight_map: missing"},
        {"{\"weight_map\":[]}", "weight_map: missing or not an object"},
        {"{\"weight_map\":{\"a\":1}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "absent.safetensors: No such file"},
        {"{\"weight_map\":{\"a\":\".\"}}", "not a regular file"},
        {"{\"weight_map\":{\"z\":\"one.safetensors\"}}", "tensor \"z\" is missing"},
        {"{\"weight_map\":{\"a\":\"two.safetensors\"}}", "two.safetensors: tensor \"a\" is missing"},
        {"{\"weight_map\"", "index.json: line"},
    };
    for (uint32_t i = 0; i < TD_COUNT(cases); i++) {
        write_bytes("model.safetensors.index.json", cases[i].index, strlen(cases[i].index));
        expect_failure(cases[i].words);
    }
}

static void a_file_cut_anywhere_is_refused_not_read(void **state)
{
    (void)state;
    static const char index[] = "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\"}}";
    write_bytes("model.safetensors.index.json", index, strlen(index));
    uint8_t bytes[512];
    size_t n = make(bytes, ONE, 16);
    for (size_t cut = 0; cut < n; cut += 3) {
        write_bytes("one.safetensors", bytes, cut);
        expect_failure("one.safetensors");
    }
    remove_file("one.safetensors");
    char path[256];
    path_of(path, sizeof path, "one.safetensors");
    assert_int_equal(mkfifo(path, 0600), 0); /* opening it must not hang */
    expect_failure("not a regular file");
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tandem-tensors-XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    static const char *const names[] = {"model.safetensors", "one.safetensors", "two.safetensors",
                                        "model.safetensors.index.json"};
    for (uint32_t i = 0; i < TD_COUNT(names); i++) remove_file(names[i]);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers_that_are_right_pass),
        cmocka_unit_test(headers_that_lie_are_refused_with_the_field),
        cmocka_unit_test(header_lengths_that_lie_are_refused),
        cmocka_unit_test(every_cut_and_every_flipped_byte_is_survived),
        cmocka_unit_test(files_are_found_alone_or_through_the_index),
        cmocka_unit_test(an_index_that_lies_is_refused),
        cmocka_unit_test(a_file_cut_anywhere_is_refused_not_read),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
