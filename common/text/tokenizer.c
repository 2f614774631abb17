#include "common/text/tokenizer.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/mem.h"
#include "common/text/bpe.h"
#include "common/text/tokenizer_int.h"
#include "common/text/utf8.h"

#define MAX_TEXT_BYTES (1ull << 30) /* places inside a piece are 32 bits wide, with room */
#define MAX_FILE_BYTES (1ull << 30) /* the released file has 28 MB */

/* --- loading ------------------------------------------------------------------------------------------------------ */

static enum td_status read_file(const char *path, struct td_buf *out, struct td_err *err)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) return td_err_set(err, errno == ENOENT ? TD_E_NOT_FOUND : TD_E_IO, "%s: %s", path, strerror(errno));
    size_t n;
    do {
        if (!td_buf_reserve(out, 1u << 20)) break;
        n = fread(out->data + out->n, 1, out->cap - out->n, f);
        out->n += n;
    } while (n > 0 && out->n <= MAX_FILE_BYTES);
    int failed = ferror(f) ? errno : 0;
    fclose(f);
    if (out->failed) return td_err_set(err, TD_E_NO_MEMORY, "%s: out of memory", path);
    if (failed != 0) return td_err_set(err, TD_E_IO, "%s: %s", path, strerror(failed));
    if (out->n > MAX_FILE_BYTES) return td_err_set(err, TD_E_TOO_LARGE, "%s: more than 1 GiB", path);
    return TD_OK;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

/* The directory's tokenizer.json, else its only rank file. */
static enum td_status find_in_dir(const char *dir, char *path, size_t cap, struct td_err *err)
{
    struct stat sb;
    int n = snprintf(path, cap, "%s/tokenizer.json", dir);
    if (n < 0 || (size_t)n >= cap) return td_err_set(err, TD_E_INVALID, "%s: path is too long", dir);
    if (stat(path, &sb) == 0) return TD_OK;
    DIR *d = opendir(dir);
    if (d == NULL) return td_err_set(err, TD_E_IO, "%s: %s", dir, strerror(errno));
    unsigned n_found = 0;
    enum td_status st = TD_OK;
    for (struct dirent *e; (e = readdir(d)) != NULL && st == TD_OK;) {
        if (!ends_with(e->d_name, ".tiktoken")) continue;
        n_found++;
        n = snprintf(path, cap, "%s/%s", dir, e->d_name);
        if (n < 0 || (size_t)n >= cap) st = td_err_set(err, TD_E_INVALID, "%s: path is too long", dir);
    }
    closedir(d);
    if (st != TD_OK) return st;
    if (n_found == 0) return td_err_set(err, TD_E_NOT_FOUND, "%s: no tokenizer.json and no *.tiktoken file", dir);
    if (n_found > 1) return td_err_set(err, TD_E_INVALID, "%s: no tokenizer.json, and several *.tiktoken files", dir);
    return TD_OK;
}

enum td_status td_tokenizer_load(const char *path, struct td_tokenizer **out, struct td_err *err)
{
    char found[4096];
    struct stat sb;
    if (stat(path, &sb) != 0)
        return td_err_set(err, errno == ENOENT ? TD_E_NOT_FOUND : TD_E_IO, "%s: %s", path, strerror(errno));
    if (S_ISDIR(sb.st_mode)) {
        enum td_status st = find_in_dir(path, found, sizeof found, err);
        if (st != TD_OK) return st;
        path = found;
    }
    struct td_buf text = {0};
    enum td_status st = read_file(path, &text, err);
    if (st == TD_OK) {
        const char *p = td_buf_cstr(&text);
        st = ends_with(path, ".tiktoken") ? td_tokenizer_parse_ranks(p, text.n, path, out, err)
                                          : td_tokenizer_parse_json(p, text.n, path, out, err);
    }
    td_buf_free(&text);
    return st;
}

void td_tokenizer_destroy(struct td_tokenizer *t)
{
    if (t == NULL) return;
    td_vocab_deinit(&t->vocab);
    td_split_destroy(t->split);
    free(t);
}

/* --- encoding ----------------------------------------------------------------------------------------------------- */

struct encoder {
    const struct td_tokenizer *t;
    struct td_split_iter split;
    struct td_bpe_scratch scratch;
    struct td_token_list *out;
};

/* Ordinary text whose end counts as the end of the text. */
static enum td_status encode_stretch(struct encoder *e, const char *text, size_t n, struct td_err *err)
{
    const struct td_tokenizer *t = e->t;
    td_split_iter_start(&e->split, text, n);
    for (;;) {
        const uint8_t *piece;
        size_t n_piece;
        enum td_status st = td_split_iter_next(&e->split, &piece, &n_piece, err);
        if (st != TD_OK || n_piece == 0) return st;
        uint32_t id = TD_NO_TOKEN;
        if (n_piece == 1)
            id = t->vocab.byte_ids[*piece];
        else if (t->ignore_merges)
            id = td_vocab_find(&t->vocab, piece, n_piece);
        if (id != TD_NO_TOKEN) {
            td_token_list_push(e->out, id);
        } else {
            st = td_bpe_merge(&t->vocab, piece, n_piece, &e->scratch, e->out);
            if (st != TD_OK) return st;
        }
    }
}

/* The special token that starts at p, the longest if several do. */
static const struct td_special *special_at(const struct td_vocab *v, const uint8_t *p, size_t n)
{
    for (uint32_t i = 0; i < v->n_specials; i++) {
        const struct td_special *s = &v->specials[i];
        if (s->n_bytes <= n && memcmp(s->name, p, s->n_bytes) == 0) return s;
    }
    return NULL;
}

static enum td_status encode_with_specials(struct encoder *e, const char *text, size_t n, struct td_err *err)
{
    const struct td_vocab *v = &e->t->vocab;
    const uint8_t *p = (const uint8_t *)text;
    size_t begin = 0;
    for (size_t i = 0; i < n;) {
        const struct td_special *s = v->special_first[p[i]] ? special_at(v, p + i, n - i) : NULL;
        if (s == NULL) {
            i++;
            continue;
        }
        enum td_status st = encode_stretch(e, text + begin, i - begin, err);
        if (st != TD_OK) return st;
        td_token_list_push(e->out, s->id);
        i += s->n_bytes;
        begin = i;
    }
    return encode_stretch(e, text + begin, n - begin, err);
}

enum td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n, enum td_text_mode mode,
                                   struct td_token_list *out, struct td_err *err)
{
    if (n > MAX_TEXT_BYTES) return td_err_set(err, TD_E_TOO_LARGE, "text of %zu bytes", n);
    size_t valid = td_utf8_valid_prefix(text, n);
    if (valid != n) return td_err_set(err, TD_E_INVALID, "text is not UTF-8 at byte %zu", valid);
    struct encoder e = {.t = t, .out = out};
    size_t n_before = out->n;
    enum td_status st = td_split_iter_init(&e.split, t->split);
    if (st == TD_OK) {
        st = mode == TD_TEXT_SPECIAL ? encode_with_specials(&e, text, n, err) : encode_stretch(&e, text, n, err);
        td_split_iter_deinit(&e.split);
    }
    td_bpe_scratch_free(&e.scratch);
    if (st == TD_OK && out->failed) st = TD_E_NO_MEMORY;
    if (st == TD_E_NO_MEMORY) td_err_set(err, st, "out of memory while encoding %zu bytes", n);
    if (st != TD_OK) out->n = n_before;
    return st;
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

const uint8_t *td_tokenizer_bytes(const struct td_tokenizer *t, uint32_t id, size_t *n_out)
{
    *n_out = 0;
    if (id >= t->vocab.n_ids || t->vocab.tokens[id].n_bytes == 0) return NULL;
    *n_out = t->vocab.tokens[id].n_bytes;
    return td_vocab_bytes(&t->vocab, id);
}

bool td_tokenizer_is_special(const struct td_tokenizer *t, uint32_t id)
{
    return id < t->vocab.n_ids && t->vocab.tokens[id].is_special;
}

void td_tokenizer_decode(const struct td_tokenizer *t, const uint32_t *ids, size_t n, bool keep_special,
                         struct td_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        if (!keep_special && td_tokenizer_is_special(t, ids[i])) continue;
        size_t n_bytes;
        const uint8_t *bytes = td_tokenizer_bytes(t, ids[i], &n_bytes);
        if (bytes != NULL) td_buf_put(out, bytes, n_bytes);
    }
}

uint32_t td_tokenizer_special(const struct td_tokenizer *t, const char *name)
{
    size_t n = strlen(name);
    for (uint32_t i = 0; i < t->vocab.n_specials; i++) {
        const struct td_special *s = &t->vocab.specials[i];
        if (s->n_bytes == n && memcmp(s->name, name, n) == 0) return s->id;
    }
    return TD_NO_TOKEN;
}

uint32_t td_tokenizer_n_ids(const struct td_tokenizer *t) { return t->vocab.n_ids; }
uint32_t td_tokenizer_max_token_bytes(const struct td_tokenizer *t) { return t->vocab.max_token_bytes; }
