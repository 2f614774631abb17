/* A .tiktoken rank file: a line "base64(bytes) SP rank" per token, ranks 0, 1, 2, ... without gaps. Regex and special
 * tokens are not in the file; they are those of gpt-oss (spec of the harmony format, section 2), at their fixed ids. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/text/tokenizer_int.h"

static const char pattern[] = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
                              "+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                              "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
                              "]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                              "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

#define FIRST_SPECIAL 199998u
#define END_SPECIAL   200019u
static const struct {
    uint32_t id;
    const char *name;
} named[] = {
    {199998, "<|startoftext|>"}, {199999, "<|endoftext|>"},   {200002, "<|return|>"}, {200003, "<|constrain|>"},
    {200005, "<|channel|>"},     {200006, "<|start|>"},       {200007, "<|end|>"},    {200008, "<|message|>"},
    {200012, "<|call|>"},        {200018, "<|endofprompt|>"},
};

static enum td_status add_specials(struct td_vocab *v, struct td_err *err)
{
    size_t k = 0;
    for (uint32_t id = FIRST_SPECIAL; id < END_SPECIAL; id++) {
        char name[32];
        if (id == named[k].id)
            snprintf(name, sizeof name, "%s", named[k++].name);
        else
            snprintf(name, sizeof name, "<|reserved_%u|>", id);
        enum td_status st = td_vocab_add(v, id, name, strlen(name), true, err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

static int base64_value(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Strict: padded, nothing else in between. Bytes are appended to out; false: not base64. */
static bool base64_decode(const char *p, size_t n, struct td_buf *out)
{
    if (n == 0 || n % 4 != 0) return false;
    for (size_t i = 0; i < n; i += 4) {
        int v[4];
        unsigned n_pad = 0;
        for (unsigned k = 0; k < 4; k++) {
            v[k] = base64_value(p[i + k]);
            if (v[k] >= 0 && n_pad == 0) continue;
            if (p[i + k] != '=' || k < 2 || i + 4 != n) return false;
            v[k] = 0;
            n_pad++;
        }
        uint32_t w = (uint32_t)v[0] << 18 | (uint32_t)v[1] << 12 | (uint32_t)v[2] << 6 | (uint32_t)v[3];
        td_buf_u8(out, (uint8_t)(w >> 16));
        if (n_pad < 2) td_buf_u8(out, (uint8_t)(w >> 8));
        if (n_pad < 1) td_buf_u8(out, (uint8_t)w);
    }
    return true;
}

static enum td_status add_lines(struct td_vocab *v, const char *p, size_t n, struct td_err *err)
{
    struct td_buf bytes = {0};
    enum td_status st = TD_OK;
    size_t n_line = 0;
    for (size_t at = 0; at < n && st == TD_OK; n_line++) {
        const char *line = p + at;
        const char *end = memchr(line, '\n', n - at);
        size_t len = end == NULL ? n - at : (size_t)(end - line);
        at += len + 1;
        if (len > 0 && line[len - 1] == '\r') len--;
        const char *space = memchr(line, ' ', len);
        td_buf_clear(&bytes);
        if (space == NULL || !base64_decode(line, (size_t)(space - line), &bytes)) {
            st = td_err_set(err, TD_E_BAD_FILE, "line %zu is not \"base64 rank\"", n_line + 1);
            break;
        }
        char rank[16];
        snprintf(rank, sizeof rank, "%zu", n_line);
        size_t n_rank = len - (size_t)(space - line) - 1;
        if (n_rank != strlen(rank) || memcmp(space + 1, rank, n_rank) != 0) {
            st = td_err_set(err, TD_E_BAD_FILE, "line %zu: rank is not %s", n_line + 1, rank);
            break;
        }
        if (n_line >= FIRST_SPECIAL) {
            st = td_err_set(err, TD_E_BAD_FILE, "line %zu: more ranks than gpt-oss has below its special tokens",
                            n_line + 1);
            break;
        }
        st = bytes.failed ? TD_E_NO_MEMORY : td_vocab_add(v, (uint32_t)n_line, bytes.data, bytes.n, false, err);
        if (st != TD_OK) td_err_prefix(err, st, "line %zu", n_line + 1);
    }
    td_buf_free(&bytes);
    return st;
}

enum td_status td_tokenizer_parse_ranks(const char *text, size_t n, const char *name, struct td_tokenizer **out,
                                        struct td_err *err)
{
    enum td_status st;
    struct td_tokenizer *t = td_calloc(1, sizeof *t);
    if (t == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: out of memory", name);
    t->ignore_merges = true;
    TD_TRY(td_vocab_init(&t->vocab, END_SPECIAL));
    TD_TRY(add_lines(&t->vocab, text, n, err));
    TD_TRY(add_specials(&t->vocab, err));
    TD_TRY(td_vocab_index(&t->vocab, err));
    TD_TRY(td_vocab_merges_from_ids(&t->vocab));
    TD_TRY(td_split_compile(pattern, sizeof pattern - 1, &t->split, err));
    *out = t;
    t = NULL;
out:
    td_tokenizer_destroy(t);
    if (st == TD_E_NO_MEMORY) td_err_set(err, st, "out of memory");
    return st == TD_OK ? TD_OK : td_err_prefix(err, st, "%s", name);
}
