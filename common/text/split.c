#define PCRE2_CODE_UNIT_WIDTH 8
#include "common/text/split.h"

#include <pcre2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

struct td_split {
    pcre2_code *code;
    pcre2_match_context *limits;
    bool has_jit;
};

/* White space as Unicode has it; and everything else. */
#define WS "\\x{9}-\\x{D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define NOT_WS                                                                                                         \
    "\\x{0}-\\x{8}\\x{E}-\\x{1F}\\x{21}-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}"                    \
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-\\x{10FFFF}"

/* Steps of one match: the interpreter takes a few per character, so a 1 GiB piece would end here; heap in KiB. */
#define MATCH_LIMIT    1000000000u
#define HEAP_LIMIT_KIB (4u << 20)

static bool is_plain_escape(char c)
{
    if (c >= '0' && c <= '9') return false; /* back references and octal numbers */
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return strchr("rntpPdD", c) != NULL;
    return (unsigned char)c < 0x80; /* escaped punctuation */
}

enum td_status td_split_rewrite(const char *p, size_t n, struct td_buf *out, struct td_err *err)
{
    bool in_class = false;
    size_t class_start = 0;
    for (size_t i = 0; i < n; i++) {
        char c = p[i];
        if (c == '\0') return td_err_set(err, TD_E_BAD_FILE, "NUL at offset %zu", i);
        if (c == '\\') {
            if (++i == n) return td_err_set(err, TD_E_BAD_FILE, "lone backslash at its end");
            if (p[i] == 's' || p[i] == 'S') {
                const char *set = p[i] == 's' ? WS : NOT_WS;
                if (in_class)
                    td_buf_str(out, set);
                else
                    td_buf_printf(out, "[%s]", set);
                continue;
            }
            if (!is_plain_escape(p[i]))
                return td_err_set(err, TD_E_BAD_FILE, "escape \\%c at offset %zu is not understood", p[i], i - 1);
            td_buf_put(out, p + i - 1, 2);
            continue;
        }
        /* Nested classes, POSIX classes and intersections differ among engines. */
        if (in_class && (c == '[' || (c == '&' && i + 1 < n && p[i + 1] == '&')))
            return td_err_set(err, TD_E_BAD_FILE, "\"%c\" inside a class at offset %zu is not understood", c, i);
        if (!in_class && c == '[') {
            in_class = true;
            class_start = i + 1 + (i + 1 < n && p[i + 1] == '^');
        } else if (in_class && c == ']' && i > class_start) {
            in_class = false;
        }
        td_buf_put(out, &c, 1);
    }
    return out->failed ? TD_E_NO_MEMORY : TD_OK;
}

enum td_status td_split_compile(const char *pattern, size_t n, struct td_split **out, struct td_err *err)
{
    enum td_status st;
    struct td_buf text = {0};
    struct td_split *s = td_calloc(1, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    TD_TRY(td_split_rewrite(pattern, n, &text, err));
    int code;
    PCRE2_SIZE at;
    s->code = pcre2_compile(text.data, text.n, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (s->code == NULL) {
        PCRE2_UCHAR why[128] = "unknown error";
        pcre2_get_error_message(code, why, sizeof why);
        st = td_err_set(err, TD_E_BAD_FILE, "does not compile: %s", (char *)why);
        goto out;
    }
    uint32_t can_match_nothing = 0;
    pcre2_pattern_info(s->code, PCRE2_INFO_MATCHEMPTY, &can_match_nothing);
    if (can_match_nothing) {
        st = td_err_set(err, TD_E_BAD_FILE, "can match the empty string");
        goto out;
    }
    s->limits = pcre2_match_context_create(NULL);
    if (s->limits == NULL) {
        st = TD_E_NO_MEMORY;
        goto out;
    }
    pcre2_set_match_limit(s->limits, MATCH_LIMIT);
    pcre2_set_depth_limit(s->limits, MATCH_LIMIT);
    pcre2_set_heap_limit(s->limits, HEAP_LIMIT_KIB);
    s->has_jit = pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE) == 0;
    *out = s;
    s = NULL;
out:
    td_buf_free(&text);
    td_split_destroy(s);
    return st;
}

void td_split_destroy(struct td_split *s)
{
    if (s == NULL) return;
    pcre2_code_free(s->code);
    pcre2_match_context_free(s->limits);
    free(s);
}

enum td_status td_split_iter_init(struct td_split_iter *it, const struct td_split *s)
{
    *it = (struct td_split_iter){.split = s};
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (match == NULL) return TD_E_NO_MEMORY;
    it->match = match;
    it->bounds = pcre2_get_ovector_pointer(match);
    return TD_OK;
}

void td_split_iter_deinit(struct td_split_iter *it) { pcre2_match_data_free(it->match); }

void td_split_iter_start(struct td_split_iter *it, const char *text, size_t n)
{
    it->text = text;
    it->n = n;
    it->at = 0;
    it->match_start = it->match_end = 0;
}

/* Finds the next match at or behind `at`. No further match: it starts at the end. */
static enum td_status find_match(struct td_split_iter *it, struct td_err *err)
{
    const struct td_split *s = it->split;
    PCRE2_SPTR text = (PCRE2_SPTR)it->text;
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    /* The caller has checked the UTF-8 once; checking again on every call would make encoding quadratic. */
    if (s->has_jit) rc = pcre2_jit_match(s->code, text, it->n, it->at, PCRE2_NO_UTF_CHECK, it->match, s->limits);
    /* The JIT's stack is the machine's; the interpreter's is the heap. */
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_JIT_BADOPTION)
        rc = pcre2_match(s->code, text, it->n, it->at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, it->match, s->limits);
    if (rc == PCRE2_ERROR_NOMEMORY) return TD_E_NO_MEMORY;
    if (rc == PCRE2_ERROR_NOMATCH) {
        it->match_start = it->match_end = it->n;
    } else if (rc < 0) {
        PCRE2_UCHAR why[128] = "unknown error";
        pcre2_get_error_message(rc, why, sizeof why);
        return td_err_set(err, TD_E_INTERNAL, "splitting the text at offset %zu: %s", it->at, (char *)why);
    } else {
        it->match_start = it->bounds[0];
        it->match_end = it->bounds[1];
        /* \K and look-behind tricks of a foreign pattern must not make us go backwards or stand still. */
        if (it->match_start < it->at || it->match_end <= it->match_start)
            return td_err_set(err, TD_E_INTERNAL, "the split regex makes no progress at offset %zu", it->at);
    }
    return TD_OK;
}

enum td_status td_split_iter_next(struct td_split_iter *it, const uint8_t **piece_out, size_t *n_out,
                                  struct td_err *err)
{
    *n_out = 0;
    if (it->at == it->n) return TD_OK;
    if (it->match_end <= it->at) {
        enum td_status st = find_match(it, err);
        if (st != TD_OK) return st;
    }
    size_t end = it->match_start > it->at ? it->match_start : it->match_end; /* what no match covers is a piece, too */
    *piece_out = (const uint8_t *)it->text + it->at;
    *n_out = end - it->at;
    it->at = end;
    return TD_OK;
}
