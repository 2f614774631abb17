#include "tests/unit/common/text/text_cases.h"

#include <openssl/evp.h>
#include <pthread.h>

#include "common/base/fault.h"
#include "common/text/utf8.h"

static struct td_tokenizer *tiny;

static void encode(const struct td_tokenizer *t, const char *text, size_t n, enum td_text_mode mode,
                   struct td_token_list *out)
{
    struct td_err err = {{0}};
    if (td_tokenizer_encode(t, text, n, mode, out, &err) != TD_OK) fail_msg("%.60s: %s", text, err.text);
}

static void assert_round_trip(const struct td_tokenizer *t, const char *text, size_t n)
{
    struct td_token_list ids = {0};
    struct td_buf back = {0};
    encode(t, text, n, TD_TEXT_ORDINARY, &ids);
    for (size_t i = 0; i < ids.n; i++) assert_false(td_tokenizer_is_special(t, ids.ids[i]));
    td_tokenizer_decode(t, ids.ids, ids.n, true, &back);
    assert_int_equal(back.n, n);
    assert_true(n == 0 || memcmp(back.data, text, n) == 0);
    td_token_list_free(&ids);
    td_buf_free(&back);
}

/* --- cases -------------------------------------------------------------------------------------------------------- */

static void the_small_checkpoint_encodes_as_its_goldens_say(void **state)
{
    (void)state;
    json_t *goldens = load_json("tests/tiny/goldens.json");
    const json_t *cases = json_object_get(goldens, "tokenizer");
    assert_true(json_array_size(cases) > 0);
    size_t i;
    json_t *c;
    json_array_foreach (cases, i, c) {
        const json_t *text = json_object_get(c, "text");
        struct td_token_list ids = {0};
        encode(tiny, json_string_value(text), json_string_length(text), TD_TEXT_SPECIAL, &ids);
        assert_ids(&ids, json_object_get(c, "ids"), json_string_value(text));
        td_token_list_free(&ids);
    }
    json_decref(goldens);
}

static void check_encode_cases(const struct td_tokenizer *t, const json_t *cases)
{
    size_t i;
    json_t *c;
    assert_true(json_array_size(cases) > 100);
    json_array_foreach (cases, i, c) {
        const json_t *text = json_object_get(c, "text");
        enum td_text_mode mode = json_is_true(json_object_get(c, "special")) ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY;
        struct td_token_list ids = {0};
        encode(t, json_string_value(text), json_string_length(text), mode, &ids);
        assert_ids(&ids, json_object_get(c, "ids"), json_string_value(text));
        td_token_list_free(&ids);
    }
}

static void check_segment_cases(const struct td_tokenizer *t, const json_t *cases)
{
    size_t i, k;
    json_t *c, *s;
    assert_true(json_array_size(cases) > 0);
    json_array_foreach (cases, i, c) {
        struct td_token_list ids = {0};
        json_array_foreach (json_object_get(c, "segments"), k, s) {
            const json_t *text = json_object_get(s, "text");
            if (text != NULL)
                encode(t, json_string_value(text), json_string_length(text), TD_TEXT_ORDINARY, &ids);
            else
                td_token_list_push(&ids, td_tokenizer_special(t, json_string_value(json_object_get(s, "special"))));
        }
        assert_ids(&ids, json_object_get(c, "ids"), "segments");
        td_token_list_free(&ids);
    }
}

static void check_decode_cases(const struct td_tokenizer *t, const json_t *cases)
{
    size_t i, k;
    json_t *c, *id;
    assert_true(json_array_size(cases) > 0);
    json_array_foreach (cases, i, c) {
        struct td_token_list ids = {0};
        struct td_buf bytes = {0}, hex = {0};
        json_array_foreach (json_object_get(c, "ids"), k, id)
            td_token_list_push(&ids, (uint32_t)json_integer_value(id));
        td_tokenizer_decode(t, ids.ids, ids.n, true, &bytes);
        for (k = 0; k < bytes.n; k++) td_buf_printf(&hex, "%02x", bytes.data[k]);
        assert_string_equal(td_buf_cstr(&hex), json_string_value(json_object_get(c, "bytes_hex")));
        td_token_list_free(&ids);
        td_buf_free(&bytes);
        td_buf_free(&hex);
    }
}

static void the_released_vocabulary_gives_every_id_of_the_cases(void **state)
{
    (void)state;
    struct td_tokenizer *t = released_tokenizer();
    if (t == NULL) skip();
    json_t *cases = load_json("tests/cases/tokenizer-cases.json");
    check_encode_cases(t, json_object_get(cases, "encode"));
    check_segment_cases(t, json_object_get(cases, "segments"));
    check_decode_cases(t, json_object_get(cases, "decode"));
    json_decref(cases);
}

/* Writes the released vocabulary as a rank file. */
static void write_ranks(const struct td_tokenizer *t, struct td_buf *out)
{
    for (uint32_t id = 0; id < 199998; id++) {
        size_t n;
        const uint8_t *bytes = td_tokenizer_bytes(t, id, &n);
        unsigned char text[256];
        assert_true(bytes != NULL && n < 180);
        td_buf_put(out, text, (size_t)EVP_EncodeBlock(text, bytes, (int)n));
        td_buf_printf(out, " %u\n", id);
    }
    assert_false(out->failed);
}

static void the_released_ranks_have_the_published_digest_and_load_as_a_rank_file(void **state)
{
    (void)state;
    struct td_tokenizer *t = released_tokenizer(), *u = NULL;
    if (t == NULL) skip();
    struct td_buf ranks = {0}, hex = {0};
    struct td_err err = {{0}};
    write_ranks(t, &ranks);
    uint8_t digest[32];
    assert_true(EVP_Digest(ranks.data, ranks.n, digest, NULL, EVP_sha256(), NULL));
    for (unsigned i = 0; i < 32; i++) td_buf_printf(&hex, "%02x", digest[i]);
    assert_string_equal(td_buf_cstr(&hex), "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d");
    if (td_tokenizer_parse_ranks((char *)ranks.data, ranks.n, "ranks", &u, &err) != TD_OK) fail_msg("%s", err.text);
    json_t *cases = load_json("tests/cases/tokenizer-cases.json");
    check_encode_cases(u, json_object_get(cases, "encode"));
    check_segment_cases(u, json_object_get(cases, "segments"));
    check_decode_cases(u, json_object_get(cases, "decode"));
    assert_int_equal(td_tokenizer_special(u, "<|call|>"), 200012);
    assert_int_equal(td_tokenizer_special(u, "<|reserved_200017|>"), 200017);
    json_decref(cases);
    td_buf_free(&ranks);
    td_buf_free(&hex);
    td_tokenizer_destroy(u);
}

/* --- properties --------------------------------------------------------------------------------------------------- */

static void text_that_names_special_tokens_stays_text_unless_asked(void **state)
{
    (void)state;
    static const char text[] = "a<|end|><|start|>b<|nothing|><|en";
    struct td_token_list ids = {0};
    assert_round_trip(tiny, text, sizeof text - 1);
    encode(tiny, text, sizeof text - 1, TD_TEXT_SPECIAL, &ids);
    uint32_t end = td_tokenizer_special(tiny, "<|end|>"), start = td_tokenizer_special(tiny, "<|start|>");
    assert_int_equal(end, 2025);
    assert_int_equal(start, 2024);
    assert_int_equal(ids.ids[1], end);
    assert_int_equal(ids.ids[2], start);
    size_t n_special = 0;
    for (size_t i = 0; i < ids.n; i++) n_special += td_tokenizer_is_special(tiny, ids.ids[i]);
    assert_int_equal(n_special, 2);
    struct td_buf with = {0}, without = {0};
    td_tokenizer_decode(tiny, ids.ids, ids.n, true, &with);
    td_tokenizer_decode(tiny, ids.ids, ids.n, false, &without);
    assert_string_equal(td_buf_cstr(&with), text);
    assert_string_equal(td_buf_cstr(&without), "ab<|nothing|><|en");
    td_buf_free(&with);
    td_buf_free(&without);
    td_token_list_free(&ids);
}

static void random_text_comes_back_unchanged(void **state)
{
    (void)state;
    static const uint32_t odd[] = {0,       9,      10,       13,     32,     39,    0x85,   0xA0,
                                   0x17F,   0x180E, 0x2028,   0x3000, 0xFEFF, 0x301, 0x4E00, 0x1F9EA,
                                   0x1F1E6, 0x200D, 0x10FFFF, 0xD7FF, 0xE000, 0x663, 0x1C5};
    uint64_t seed = 20240601;
    for (unsigned round = 0; round < 3000; round++) {
        struct td_buf text = {0};
        unsigned n = draw(&seed, 120);
        for (unsigned i = 0; i < n; i++) {
            uint32_t c = odd[draw(&seed, TD_COUNT(odd))];
            switch (draw(&seed, 6)) {
            case 0: c = draw(&seed, 0x80); break;
            case 1: c = 'a' + draw(&seed, 3); break;
            case 2: c = 'A' + draw(&seed, 26); break;
            case 3: c = 0x800 + draw(&seed, 0xC000); break;
            default: break;
            }
            uint8_t bytes[4];
            td_buf_put(&text, bytes, td_utf8_encode(c, bytes));
        }
        assert_round_trip(tiny, td_buf_cstr(&text), text.n);
        if (released_tokenizer() != NULL) assert_round_trip(released_tokenizer(), td_buf_cstr(&text), text.n);
        td_buf_free(&text);
    }
}

/* With quadratic behaviour anywhere these take minutes each. */
static void a_megabyte_in_one_piece_is_encoded_quickly(void **state)
{
    (void)state;
    static const char *const units[] = {"a",  "A",    " ", "\n", "\xE4\xB8\x80", "\xCC\x81", "!", "<",
                                        "Aa", "\r\n", "/", "0",  "\xE2\x80\x8D", " \n"};
    size_t n = 1u << 20;
    for (size_t u = 0; u < TD_COUNT(units); u++) {
        size_t n_unit = strlen(units[u]), n_whole = n / n_unit * n_unit;
        char *text = malloc(n + 1);
        assert_non_null(text);
        for (size_t i = 0; i < n_whole; i++) text[i] = units[u][i % n_unit];
        assert_round_trip(tiny, text, n_whole);
        text[n_whole] = 'x'; /* spaces, then a letter */
        assert_round_trip(tiny, text, n_whole + 1);
        if (released_tokenizer() != NULL) assert_round_trip(released_tokenizer(), text, n_whole + 1);
        free(text);
    }
}

static void invalid_utf8_is_refused_with_its_place(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n, at;
    } cases[] = {
        {"ab\xff", 3, 2},
        {"\xC0\x80", 2, 0},
        {"a\xED\xA0\x80", 4, 1}, /* a surrogate */
        {"\xF4\x90\x80\x80", 4, 0},
        {"0123456789\xE4\xB8", 12, 10},
        {"\x80", 1, 0},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct td_token_list ids = {0};
        struct td_err err = {{0}};
        td_token_list_push(&ids, 7);
        assert_int_equal(td_tokenizer_encode(tiny, cases[i].text, cases[i].n, TD_TEXT_ORDINARY, &ids, &err),
                         TD_E_INVALID);
        char place[32];
        snprintf(place, sizeof place, "at byte %zu", cases[i].at);
        assert_non_null(strstr(err.text, place));
        assert_int_equal(ids.n, 1);
        td_token_list_free(&ids);
    }
}

static void ids_without_a_token_decode_to_nothing(void **state)
{
    (void)state;
    uint32_t ids[] = {64, 2040, UINT32_MAX, td_tokenizer_n_ids(tiny), 64};
    struct td_buf out = {0};
    td_tokenizer_decode(tiny, ids, TD_COUNT(ids), true, &out);
    assert_string_equal(td_buf_cstr(&out), "aa");
    size_t n;
    assert_null(td_tokenizer_bytes(tiny, 2040, &n));
    assert_int_equal(n, 0);
    td_buf_free(&out);
}

struct worker {
    pthread_t thread;
    const struct td_token_list *expected;
    const char *text;
    size_t n;
    bool is_equal;
};

static void *encode_repeatedly(void *user)
{
    struct worker *w = user;
    w->is_equal = true;
    for (unsigned i = 0; i < 20; i++) {
        struct td_token_list ids = {0};
        struct td_err err;
        bool ok = td_tokenizer_encode(tiny, w->text, w->n, TD_TEXT_ORDINARY, &ids, &err) == TD_OK;
        ok = ok && ids.n == w->expected->n && memcmp(ids.ids, w->expected->ids, ids.n * sizeof *ids.ids) == 0;
        w->is_equal = w->is_equal && ok;
        td_token_list_free(&ids);
    }
    return NULL;
}

static void threads_encode_with_one_tokenizer_at_once(void **state)
{
    (void)state;
    struct td_buf text = {0};
    struct td_token_list ids = {0};
    for (unsigned i = 0; i < 500; i++)
        td_buf_printf(&text, "Line %u: the quick brown f\xC3\xB6x's %u jumps!\n", i, i * i);
    for (unsigned i = 0; i < 300; i++) td_buf_str(&text, "longword");
    encode(tiny, td_buf_cstr(&text), text.n, TD_TEXT_ORDINARY, &ids);
    struct worker workers[4];
    for (unsigned i = 0; i < 4; i++) {
        workers[i] = (struct worker){.expected = &ids, .text = (char *)text.data, .n = text.n};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, encode_repeatedly, &workers[i]), 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_true(workers[i].is_equal);
    }
    td_buf_free(&text);
    td_token_list_free(&ids);
}

/* --- files that are not as they should be ------------------------------------------------------------------------- */

struct corruption {
    const char *path;  /* object keys and array indexes, separated by slashes */
    const char *value; /* JSON; NULL: remove */
    const char *culprit;
};

static json_t *step_into(json_t *v, const char *key)
{
    return json_is_array(v) ? json_array_get(v, (size_t)atoi(key)) : json_object_get(v, key);
}

static void corrupt(json_t *root, const struct corruption *c)
{
    char path[128];
    snprintf(path, sizeof path, "%s", c->path);
    char *rest = path, *key = strsep(&rest, "/");
    json_t *at = root;
    for (char *next; (next = strsep(&rest, "/")) != NULL; key = next) at = step_into(at, key);
    assert_non_null(at);
    json_t *value = c->value == NULL ? NULL : json_loads(c->value, JSON_DECODE_ANY, NULL);
    if (json_is_array(at) && value != NULL)
        assert_int_equal(json_array_set_new(at, (size_t)atoi(key), value), 0);
    else if (json_is_array(at))
        assert_int_equal(json_array_remove(at, (size_t)atoi(key)), 0);
    else if (value != NULL)
        assert_int_equal(json_object_set_new(at, key, value), 0);
    else
        assert_int_equal(json_object_del(at, key), 0);
}

static void a_file_that_is_not_understood_is_refused_by_the_culprits_name(void **state)
{
    (void)state;
    static const struct corruption cases[] = {
        {"normalizer", "{\"type\":\"NFC\"}", "normalizer"},
        {"model/type", "\"Unigram\"", "model.type"},
        {"model", NULL, "model.type"},
        {"model", "[]", "model.type"},
        {"model/vocab", "[]", "model.vocab"},
        {"model/vocab", NULL, "model.vocab"},
        {"model/merges", NULL, "model.merges"},
        {"model/merges", "{}", "model.merges"},
        {"model/byte_fallback", "true", "model.byte_fallback"},
        {"model/fuse_unk", "true", "model.fuse_unk"},
        {"model/dropout", "0.1", "model.dropout"},
        {"model/unk_token", "\"<unk>\"", "model.unk_token"},
        {"model/continuing_subword_prefix", "\"##\"", "model.continuing_subword_prefix"},
        {"model/end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix"},
        {"model/ignore_merges", "3", "model.ignore_merges"},
        {"model/vocab/!", NULL, "no token for byte 0x21"},
        {"model/vocab/!", "\"0\"", "model.vocab[\"!\"]"},
        {"model/vocab/!", "-1", "model.vocab[\"!\"]"},
        {"model/vocab/!", "0.5", "model.vocab[\"!\"]"},
        {"model/vocab/!", "99999999999", "model.vocab[\"!\"]"},
        {"model/vocab/!", "1", "id 1 is given to two tokens"},
        {"model/vocab/!", "2020", "model.vocab[\"!\"]"},
        {"model/vocab/", "2040", "model.vocab[\"\"]"},
        {"model/vocab/\xE4\xB8\x80", "2040", "model.vocab[\"\xE4\xB8\x80\"]"},
        {"model/vocab/a b", "2040", "model.vocab[\"a b\"]"},
        {"model/merges/3", "[\"t\"]", "model.merges[3]"},
        {"model/merges/3", "\"t\"", "model.merges[3]"},
        {"model/merges/3", "\"a b c\"", "model.merges[3]"},
        {"model/merges/3", "[\"zq\", \"t\"]", "model.merges[3]: its left part"},
        {"model/merges/3", "[\"t\", \"zq\"]", "model.merges[3]: its right part"},
        {"model/merges/3", "[\"q\", \"q\"]", "model.merges[3]: its result"},
        {"model/merges/3", "[\"\", \"q\"]", "model.merges[3]"},
        {"model/merges/3", "[\"0\", \"0\"]", "model.merges[3]: the pair is listed twice"},
        {"model/merges/3", "7", "model.merges[3]"},
        {"pre_tokenizer", "null", "pre_tokenizer"},
        {"pre_tokenizer/type", "\"Whitespace\"", "Whitespace"},
        {"pre_tokenizer/pretokenizers/1", NULL, "pre_tokenizer.pretokenizers"},
        {"pre_tokenizer/pretokenizers/0/type", "\"Digits\"", "pre_tokenizer.pretokenizers"},
        {"pre_tokenizer/pretokenizers/0/behavior", "\"Removed\"", "behavior"},
        {"pre_tokenizer/pretokenizers/0/invert", "true", "invert"},
        {"pre_tokenizer/pretokenizers/0/pattern", "{\"String\":\" \"}", "pattern"},
        {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"(a\"", "Regex"},
        {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"a*\"", "empty string"},
        {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"[[:alpha:]]+\"", "inside a class at offset 1"},
        {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"a\\\\h\"", "\\h at offset 1"},
        {"pre_tokenizer/pretokenizers/0/pattern/Regex", "\"a\\\\\"", "backslash"},
        {"pre_tokenizer/pretokenizers/1/use_regex", "true", "use_regex"},
        {"pre_tokenizer/pretokenizers/1/use_regex", NULL, "use_regex"},
        {"pre_tokenizer/pretokenizers/1/add_prefix_space", "true", "add_prefix_space"},
        {"post_processor", "{\"type\":\"TemplateProcessing\"}", "post_processor"},
        {"decoder", "{\"type\":\"WordPiece\"}", "decoder"},
        {"added_tokens", "{}", "added_tokens"},
        {"added_tokens/2", "1", "added_tokens[2]"},
        {"added_tokens/2/content", "1", "added_tokens[2]"},
        {"added_tokens/2/content", "\"\"", "added_tokens[2]"},
        {"added_tokens/2/content", "\"<|start|>\"", "same text"},
        {"added_tokens/2/id", "\"x\"", "added_tokens[2]"},
        {"added_tokens/2/id", "2016", "added_tokens[2]"},
        {"added_tokens/2/id", "5", "model.vocab"},
        {"added_tokens/2/special", "false", "added_tokens[2]"},
        {"added_tokens/2/lstrip", "true", "lstrip"},
        {"added_tokens/2/rstrip", "true", "rstrip"},
        {"added_tokens/2/single_word", "true", "single_word"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        json_t *root = load_json(TINY_MODEL "/tokenizer.json");
        corrupt(root, &cases[i]);
        char *text = json_dumps(root, JSON_COMPACT);
        assert_non_null(text);
        struct td_tokenizer *t = NULL;
        struct td_err err = {{0}};
        enum td_status st = td_tokenizer_parse_json(text, strlen(text), "the-file.json", &t, &err);
        if (st != TD_E_BAD_FILE) fail_msg("%s = %s: %s", cases[i].path, cases[i].value, td_status_name(st));
        assert_null(t);
        if (strncmp(err.text, "the-file.json: ", 15) != 0 || strstr(err.text, cases[i].culprit) == NULL)
            fail_msg("%s = %s: \"%s\" does not name %s", cases[i].path, cases[i].value, err.text, cases[i].culprit);
        free(text);
        json_decref(root);
    }
}

static void broken_json_and_truncation_are_refused(void **state)
{
    (void)state;
    static const char *const broken[] = {"", "{", "[]", "7", "null", "{\"model\":{}}", "{\"a\":1,\"a\":2}", "\xff"};
    struct td_tokenizer *t = NULL;
    struct td_err err;
    for (size_t i = 0; i < TD_COUNT(broken); i++)
        assert_int_equal(td_tokenizer_parse_json(broken[i], strlen(broken[i]), "f", &t, &err), TD_E_BAD_FILE);
    json_t *root = load_json(TINY_MODEL "/tokenizer.json");
    char *text = json_dumps(root, JSON_COMPACT);
    size_t n = strlen(text);
    for (size_t cut = 0; cut < n; cut += n / 40)
        assert_int_equal(td_tokenizer_parse_json(text, cut, "f", &t, &err), TD_E_BAD_FILE);
    free(text);
    json_decref(root);
    assert_null(t);
}

static void broken_rank_files_are_refused_with_the_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *culprit;
    } cases[] = {
        {"IQ== 0\nIg== 2\n", "line 2: rank"},
        {"IQ== 0\nIg==\n", "line 2"},
        {"IQ= 0\n", "line 1"},
        {"I=== 0\n", "line 1"},
        {"IQ== 00\n", "line 1: rank"},
        {"IQ== 0 \n", "line 1"},
        {"\n", "line 1"},
        {" 0\n", "line 1"},
        {"IQ== 0\nIQ== 1\n", "same text"},
        {"IQ== 0\n", "no token for"},
        {"=Q== 0\n", "line 1"},
        {"IQ==Ig== 0", "line 1"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {{0}};
        assert_int_equal(td_tokenizer_parse_ranks(cases[i].text, strlen(cases[i].text), "f", &t, &err), TD_E_BAD_FILE);
        if (strstr(err.text, cases[i].culprit) == NULL) fail_msg("case %zu: %s", i, err.text);
    }
}

static void a_path_without_a_tokenizer_is_refused(void **state)
{
    (void)state;
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    assert_int_equal(td_tokenizer_load("tests/no-such-folder", &t, &err), TD_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "tests/no-such-folder"));
    assert_int_equal(td_tokenizer_load("tests/cases", &t, &err), TD_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    assert_null(t);
}

static void merges_may_be_single_strings_and_specials_may_be_in_the_vocabulary(void **state)
{
    (void)state;
    json_t *root = load_json(TINY_MODEL "/tokenizer.json");
    json_t *model = json_object_get(root, "model"), *merges = json_array(), *m, *c;
    size_t i;
    json_array_foreach (json_object_get(model, "merges"), i, m) {
        json_array_append_new(merges, json_sprintf("%s %s", json_string_value(json_array_get(m, 0)),
                                                   json_string_value(json_array_get(m, 1))));
    }
    json_object_set_new(model, "merges", merges);
    json_object_set_new(json_object_get(model, "vocab"), "<|end|>", json_integer(2025));
    char *text = json_dumps(root, 0);
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    if (td_tokenizer_parse_json(text, strlen(text), "f", &t, &err) != TD_OK) fail_msg("%s", err.text);
    json_t *goldens = load_json("tests/tiny/goldens.json");
    json_array_foreach (json_object_get(goldens, "tokenizer"), i, c) {
        const json_t *s = json_object_get(c, "text");
        struct td_token_list ids = {0};
        encode(t, json_string_value(s), json_string_length(s), TD_TEXT_SPECIAL, &ids);
        assert_ids(&ids, json_object_get(c, "ids"), json_string_value(s));
        td_token_list_free(&ids);
    }
    td_tokenizer_destroy(t);
    json_decref(goldens);
    json_decref(root);
    free(text);
}

static void any_failed_allocation_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    static const char text[] = "Some text, and a rather long word: "
                               "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz";
    bool loaded = false, encoded = false;
    for (uint32_t k = 0; !loaded && k < 200; k++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {{0}};
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = td_tokenizer_load(TINY_MODEL, &t, &err);
        td_fault_disarm_all();
        loaded = st == TD_OK;
        if (!loaded) assert_int_equal(st, TD_E_NO_MEMORY);
        assert_true(loaded == (t != NULL));
        td_tokenizer_destroy(t);
    }
    assert_true(loaded);
    for (uint32_t k = 0; !encoded && k < 50; k++) {
        struct td_token_list ids = {0};
        struct td_err err = {{0}};
        td_fault_arm(TD_FAULT_ALLOC, k, 1);
        enum td_status st = td_tokenizer_encode(tiny, text, sizeof text - 1, TD_TEXT_ORDINARY, &ids, &err);
        td_fault_disarm_all();
        encoded = st == TD_OK;
        if (!encoded) assert_int_equal(st, TD_E_NO_MEMORY);
        if (!encoded) assert_int_equal(ids.n, 0);
        td_token_list_free(&ids);
    }
    assert_true(encoded);
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
    td_tokenizer_destroy(released_tokenizer());
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_small_checkpoint_encodes_as_its_goldens_say),
        cmocka_unit_test(the_released_vocabulary_gives_every_id_of_the_cases),
        cmocka_unit_test(the_released_ranks_have_the_published_digest_and_load_as_a_rank_file),
        cmocka_unit_test(text_that_names_special_tokens_stays_text_unless_asked),
        cmocka_unit_test(random_text_comes_back_unchanged),
        cmocka_unit_test(a_megabyte_in_one_piece_is_encoded_quickly),
        cmocka_unit_test(invalid_utf8_is_refused_with_its_place),
        cmocka_unit_test(ids_without_a_token_decode_to_nothing),
        cmocka_unit_test(threads_encode_with_one_tokenizer_at_once),
        cmocka_unit_test(a_file_that_is_not_understood_is_refused_by_the_culprits_name),
        cmocka_unit_test(broken_json_and_truncation_are_refused),
        cmocka_unit_test(broken_rank_files_are_refused_with_the_line),
        cmocka_unit_test(a_path_without_a_tokenizer_is_refused),
        cmocka_unit_test(merges_may_be_single_strings_and_specials_may_be_in_the_vocabulary),
        cmocka_unit_test(any_failed_allocation_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, load, unload);
}
