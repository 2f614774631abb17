/* What the text tests share: files of cases, and the two vocabularies. Programs run in the repository's root. */
#ifndef TD_TEST_TEXT_CASES_H
#define TD_TEST_TEXT_CASES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "common/base/check.h"

#include "common/text/tokenizer.h"

#define TINY_MODEL "tests/tiny/tiny-model"

static inline json_t *load_json(const char *path)
{
    json_error_t why;
    json_t *v = json_load_file(path, JSON_ALLOW_NUL, &why);
    if (v == NULL) fail_msg("%s: line %d: %s", path, why.line, why.text);
    return v;
}

static inline struct td_tokenizer *load_tokenizer(const char *path)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    if (td_tokenizer_load(path, &t, &err) != TD_OK) fail_msg("%s", err.text);
    return t;
}

/* The released vocabulary; NULL (and a note) where this machine does not have it: skip then. Loaded once. */
static inline struct td_tokenizer *released_tokenizer(void)
{
    static struct td_tokenizer *t;
    const char *path = getenv("TANDEM_GPTOSS_TOKENIZER");
    if (path == NULL || *path == '\0') return NULL;
    if (t == NULL) t = load_tokenizer(path);
    return t;
}

static inline void assert_ids(const struct td_token_list *got, const json_t *expected, const char *what)
{
    size_t n = json_array_size(expected);
    for (size_t i = 0; i < n && i < got->n; i++) {
        uint32_t id = (uint32_t)json_integer_value(json_array_get(expected, i));
        if (got->ids[i] != id) fail_msg("%s: id %zu is %u, expected %u", what, i, got->ids[i], id);
    }
    if (got->n != n) fail_msg("%s: %zu ids, expected %zu", what, got->n, n);
}

/* Small, fast, seeded: xorshift64*. */
static inline uint32_t draw(uint64_t *state, uint32_t below)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (uint32_t)((*state * 0x2545F4914F6CDD1Dull >> 32) % below);
}

#endif
