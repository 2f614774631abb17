/* Reads tokenizer.json. Everything that could change ids is looked at; what is not understood is refused by name rather
 * than ignored, because a wrong id shows only as bad answers. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/text/tokenizer_int.h"
#include "common/text/utf8.h"

/* Vocabulary keys write one character per byte: printable ones stand for themselves, the other 68 bytes follow from
 * U+0100. */
struct byte_map {
    int16_t byte_of[0x144]; /* by code point; -1: not in use */
};

static void byte_map_init(struct byte_map *m)
{
    for (size_t i = 0; i < TD_COUNT(m->byte_of); i++) m->byte_of[i] = -1;
    int16_t next = 0x100;
    for (int16_t b = 0; b < 256; b++) {
        bool is_itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        m->byte_of[is_itself ? b : next++] = b;
    }
}

/* Appends the bytes that text[0 .. n) (valid UTF-8) stands for; false: a character stands for no byte. */
static bool map_to_bytes(const struct byte_map *m, const char *text, size_t n, struct td_buf *out)
{
    for (size_t i = 0; i < n;) {
        size_t len;
        uint32_t c = td_utf8_decode((const uint8_t *)text + i, &len);
        if (c >= TD_COUNT(m->byte_of) || m->byte_of[c] < 0) return false;
        td_buf_u8(out, (uint8_t)m->byte_of[c]);
        i += len;
    }
    return true;
}

/* --- the parts that must be as expected ----------------------------------------------------------------------------
 */

static bool is_absent(const json_t *v) { return v == NULL || json_is_null(v); }

static const char *type_of(const json_t *v)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    return type != NULL ? type : "without type";
}

static bool has_type(const json_t *v, const char *type) { return json_is_object(v) && strcmp(type_of(v), type) == 0; }

/* A flag that must be absent or have this value. */
static enum td_status expect_flag(const json_t *v, const char *where, const char *name, bool value, struct td_err *err)
{
    const json_t *flag = json_object_get(v, name);
    if (is_absent(flag) || (json_is_boolean(flag) && json_is_true(flag) == value)) return TD_OK;
    return td_err_set(err, TD_E_BAD_FILE, "%s.%s: only %s is supported", where, name, value ? "true" : "false");
}

static enum td_status expect_absent(const json_t *v, const char *where, const char *name, struct td_err *err)
{
    const json_t *field = json_object_get(v, name);
    /* An empty string is how some writers say "none". */
    if (is_absent(field) || (json_is_string(field) && json_string_length(field) == 0)) return TD_OK;
    return td_err_set(err, TD_E_BAD_FILE, "%s%s%s: not supported", where, *where ? "." : "", name);
}

static enum td_status read_pre_tokenizer(const json_t *root, struct td_split **out, struct td_err *err)
{
    enum td_status st;
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    if (!has_type(pre, "Sequence"))
        return td_err_set(err, TD_E_BAD_FILE,
                          "pre_tokenizer: only a Sequence of Split and ByteLevel is supported, not %s",
                          json_is_object(pre) ? type_of(pre) : "none");
    const json_t *list = json_object_get(pre, "pretokenizers");
    const json_t *split = json_array_get(list, 0), *bytes = json_array_get(list, 1);
    if (json_array_size(list) != 2 || !has_type(split, "Split") || !has_type(bytes, "ByteLevel"))
        return td_err_set(err, TD_E_BAD_FILE, "pre_tokenizer.pretokenizers: only Split then ByteLevel is supported");
    TD_TRY(expect_flag(split, "pre_tokenizer Split", "invert", false, err));
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    if (behavior == NULL || strcmp(behavior, "Isolated") != 0)
        return td_err_set(err, TD_E_BAD_FILE, "pre_tokenizer Split.behavior: only Isolated is supported");
    if (!json_is_boolean(json_object_get(bytes, "use_regex")) ||
        !json_is_boolean(json_object_get(bytes, "add_prefix_space")))
        return td_err_set(err, TD_E_BAD_FILE, "pre_tokenizer ByteLevel: use_regex and add_prefix_space must be given");
    TD_TRY(expect_flag(bytes, "pre_tokenizer ByteLevel", "use_regex", false, err));
    TD_TRY(expect_flag(bytes, "pre_tokenizer ByteLevel", "add_prefix_space", false, err));
    const json_t *regex = json_object_get(json_object_get(split, "pattern"), "Regex");
    if (!json_is_string(regex))
        return td_err_set(err, TD_E_BAD_FILE, "pre_tokenizer Split.pattern: only Regex is supported");
    st = td_split_compile(json_string_value(regex), json_string_length(regex), out, err);
    if (st != TD_OK) td_err_prefix(err, st, "pre_tokenizer Split.pattern.Regex");
out:
    return st;
}

static enum td_status check_frame(const json_t *root, struct td_err *err)
{
    enum td_status st;
    TD_TRY(expect_absent(root, "", "normalizer", err));
    for (unsigned i = 0; i < 2; i++) {
        const char *name = i == 0 ? "post_processor" : "decoder";
        const json_t *v = json_object_get(root, name);
        if (!is_absent(v) && !has_type(v, "ByteLevel"))
            return td_err_set(err, TD_E_BAD_FILE, "%s: only ByteLevel is supported, not %s", name, type_of(v));
    }
out:
    return st;
}

static enum td_status check_model(const json_t *model, struct td_err *err)
{
    static const char *const absent[] = {"unk_token", "dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    enum td_status st;
    if (!has_type(model, "BPE"))
        return td_err_set(err, TD_E_BAD_FILE, "model.type: only BPE is supported, not %s",
                          json_is_object(model) ? type_of(model) : "none");
    for (size_t i = 0; i < TD_COUNT(absent); i++) TD_TRY(expect_absent(model, "model", absent[i], err));
    TD_TRY(expect_flag(model, "model", "fuse_unk", false, err));
    TD_TRY(expect_flag(model, "model", "byte_fallback", false, err));
    if (!json_is_object(json_object_get(model, "vocab")))
        st = td_err_set(err, TD_E_BAD_FILE, "model.vocab: not an object");
    else if (!json_is_array(json_object_get(model, "merges")))
        st = td_err_set(err, TD_E_BAD_FILE, "model.merges: not an array");
out:
    return st;
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

/* Ids have no gaps worth mentioning in any real file; the bound keeps a broken one from asking for gigabytes. */
static uint32_t id_limit(const json_t *root)
{
    size_t n = json_object_size(json_object_get(json_object_get(root, "model"), "vocab"));
    n += json_array_size(json_object_get(root, "added_tokens")) + 65536;
    return n > UINT32_MAX / 64 ? UINT32_MAX / 64 : (uint32_t)n;
}

static enum td_status read_id(const json_t *v, uint32_t limit, uint32_t *out, struct td_err *err)
{
    if (!json_is_integer(v)) return td_err_set(err, TD_E_BAD_FILE, "id is not an integer");
    json_int_t id = json_integer_value(v);
    if (id < 0 || id >= (json_int_t)limit)
        return td_err_set(err, TD_E_BAD_FILE, "id %lld is out of range (limit %u)", (long long)id, limit);
    *out = (uint32_t)id;
    return TD_OK;
}

static uint32_t count_ids(const json_t *root, uint32_t limit)
{
    uint32_t n = 0;
    const char *key;
    json_t *v;
    size_t i;
    json_object_foreach (json_object_get(json_object_get(root, "model"), "vocab"), key, v) {
        json_int_t id = json_integer_value(v);
        if (id >= n && id < (json_int_t)limit) n = (uint32_t)id + 1;
    }
    json_array_foreach (json_object_get(root, "added_tokens"), i, v) {
        json_int_t id = json_integer_value(json_object_get(v, "id"));
        if (id >= n && id < (json_int_t)limit) n = (uint32_t)id + 1;
    }
    return n;
}

static enum td_status read_added_token(const json_t *v, uint32_t limit, struct td_vocab *vocab, struct td_err *err)
{
    /* "normalized" is not looked at: without a normalizer it means nothing. */
    static const char *const off[] = {"single_word", "lstrip", "rstrip"};
    enum td_status st;
    const json_t *content = json_object_get(v, "content");
    if (!json_is_string(content)) return td_err_set(err, TD_E_BAD_FILE, "content is not a string");
    uint32_t id = 0;
    TD_TRY(read_id(json_object_get(v, "id"), limit, &id, err));
    if (!json_is_true(json_object_get(v, "special")))
        return td_err_set(err, TD_E_BAD_FILE, "\"%s\": only special tokens are supported", json_string_value(content));
    for (size_t i = 0; i < TD_COUNT(off); i++) TD_TRY(expect_flag(v, json_string_value(content), off[i], false, err));
    TD_TRY(td_vocab_add(vocab, id, json_string_value(content), json_string_length(content), true, err));
out:
    return st;
}

static enum td_status read_added_tokens(const json_t *root, struct td_vocab *vocab, struct td_err *err)
{
    const json_t *list = json_object_get(root, "added_tokens");
    if (is_absent(list)) return TD_OK;
    if (!json_is_array(list)) return td_err_set(err, TD_E_BAD_FILE, "added_tokens: not an array");
    size_t i;
    json_t *v;
    json_array_foreach (list, i, v) {
        enum td_status st = read_added_token(v, id_limit(root), vocab, err);
        if (st != TD_OK) return td_err_prefix(err, st, "added_tokens[%zu]", i);
    }
    return TD_OK;
}

/* Some writers list special tokens in the vocabulary as well, there in plain characters. */
static bool is_listed_special(const struct td_vocab *vocab, uint32_t id, const char *key)
{
    const struct td_token *t = &vocab->tokens[id];
    return t->is_special && t->n_bytes == strlen(key) && memcmp(td_vocab_bytes(vocab, id), key, t->n_bytes) == 0;
}

static enum td_status read_vocab(const json_t *root, const struct byte_map *map, struct td_vocab *vocab,
                                 struct td_err *err)
{
    struct td_buf bytes = {0};
    enum td_status st = TD_OK;
    const char *key;
    json_t *v;
    uint32_t limit = id_limit(root);
    json_object_foreach (json_object_get(json_object_get(root, "model"), "vocab"), key, v) {
        uint32_t id = 0;
        st = read_id(v, limit, &id, err);
        if (st == TD_OK && is_listed_special(vocab, id, key)) continue;
        td_buf_clear(&bytes);
        if (st == TD_OK && !map_to_bytes(map, key, strlen(key), &bytes))
            st = td_err_set(err, TD_E_BAD_FILE, "a character stands for no byte");
        if (st == TD_OK) st = bytes.failed ? TD_E_NO_MEMORY : td_vocab_add(vocab, id, bytes.data, bytes.n, false, err);
        if (st != TD_OK) {
            td_err_prefix(err, st, "model.vocab[\"%.64s\"]", key);
            break;
        }
    }
    td_buf_free(&bytes);
    return st;
}

/* --- merges ------------------------------------------------------------------------------------------------------- */

/* "left right" or ["left", "right"]. */
static bool merge_parts(const json_t *v, const char **left, size_t *n_left, const char **right, size_t *n_right)
{
    if (json_is_string(v)) {
        const char *s = json_string_value(v);
        size_t n = json_string_length(v);
        const char *space = memchr(s, ' ', n);
        if (space == NULL) return false;
        *left = s;
        *n_left = (size_t)(space - s);
        *right = space + 1;
        *n_right = n - *n_left - 1;
        return memchr(*right, ' ', *n_right) == NULL;
    }
    const json_t *l = json_array_get(v, 0), *r = json_array_get(v, 1);
    if (json_array_size(v) != 2 || !json_is_string(l) || !json_is_string(r)) return false;
    *left = json_string_value(l);
    *n_left = json_string_length(l);
    *right = json_string_value(r);
    *n_right = json_string_length(r);
    return true;
}

static enum td_status read_merge(const json_t *v, const struct byte_map *map, struct td_buf *bytes,
                                 struct td_vocab *vocab, struct td_err *err)
{
    const char *left, *right;
    size_t n_left, n_right;
    if (!merge_parts(v, &left, &n_left, &right, &n_right))
        return td_err_set(err, TD_E_BAD_FILE, "neither a pair of strings nor two words");
    td_buf_clear(bytes);
    if (!map_to_bytes(map, left, n_left, bytes))
        return td_err_set(err, TD_E_BAD_FILE, "a character stands for no byte");
    size_t n_bytes_left = bytes->n;
    if (!map_to_bytes(map, right, n_right, bytes))
        return td_err_set(err, TD_E_BAD_FILE, "a character stands for no byte");
    if (bytes->failed) return TD_E_NO_MEMORY;
    if (n_bytes_left == 0 || bytes->n == n_bytes_left) return td_err_set(err, TD_E_BAD_FILE, "an empty part");
    return td_vocab_merge_add(vocab, bytes->data, n_bytes_left, bytes->data + n_bytes_left, bytes->n - n_bytes_left,
                              err);
}

static enum td_status read_merges(const json_t *root, const struct byte_map *map, struct td_vocab *vocab,
                                  struct td_err *err)
{
    const json_t *list = json_object_get(json_object_get(root, "model"), "merges");
    enum td_status st = td_vocab_merges_begin(vocab, json_array_size(list));
    struct td_buf bytes = {0};
    size_t i;
    json_t *v;
    json_array_foreach (list, i, v) {
        if (st == TD_OK) st = read_merge(v, map, &bytes, vocab, err);
        if (st != TD_OK) {
            td_err_prefix(err, st, "model.merges[%zu]", i);
            break;
        }
    }
    td_buf_free(&bytes);
    if (st == TD_OK) td_vocab_merges_end(vocab);
    return st;
}

enum td_status td_tokenizer_parse_json(const char *text, size_t n, const char *name, struct td_tokenizer **out,
                                       struct td_err *err)
{
    enum td_status st;
    struct td_tokenizer *t = NULL;
    json_error_t why;
    /* jansson checks the UTF-8 of every string. */
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL) return td_err_set(err, TD_E_BAD_FILE, "%s: line %d: %s", name, why.line, why.text);
    if (!json_is_object(root)) {
        st = td_err_set(err, TD_E_BAD_FILE, "not a JSON object");
        goto out;
    }
    t = td_calloc(1, sizeof *t);
    if (t == NULL) {
        st = TD_E_NO_MEMORY;
        goto out;
    }
    struct byte_map map;
    byte_map_init(&map);
    const json_t *model = json_object_get(root, "model");
    TD_TRY(check_frame(root, err));
    TD_TRY(check_model(model, err));
    TD_TRY(expect_flag(model, "model", "ignore_merges", json_is_true(json_object_get(model, "ignore_merges")), err));
    t->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    TD_TRY(read_pre_tokenizer(root, &t->split, err));
    TD_TRY(td_vocab_init(&t->vocab, count_ids(root, id_limit(root))));
    TD_TRY(read_added_tokens(root, &t->vocab, err));
    TD_TRY(read_vocab(root, &map, &t->vocab, err));
    st = td_vocab_index(&t->vocab, err);
    if (st == TD_E_BAD_FILE) td_err_prefix(err, st, "model.vocab");
    if (st != TD_OK) goto out;
    TD_TRY(read_merges(root, &map, &t->vocab, err));
    *out = t;
    t = NULL;
out:
    td_tokenizer_destroy(t);
    json_decref(root);
    if (st == TD_E_NO_MEMORY) td_err_set(err, st, "out of memory");
    if (st == TD_E_TOO_LARGE) st = td_err_set(err, TD_E_BAD_FILE, "more tokens or merges than are supported");
    return st == TD_OK ? TD_OK : td_err_prefix(err, st, "%s", name);
}
