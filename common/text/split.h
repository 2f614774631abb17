/* Cuts a text into the pieces that are encoded on their own: the matches of a tokenizer's regex, and whatever lies
 * between two matches. PCRE2 is seen only behind this header. A compiled split is immutable and shared by threads; an
 * iterator belongs to one. */
#ifndef TD_TEXT_SPLIT_H
#define TD_TEXT_SPLIT_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"

struct td_split;

/* pattern as tokenizer.json has it. BAD_FILE: not understood; err gives the offset in the pattern. */
enum td_status td_split_compile(const char *pattern, size_t n, struct td_split **out, struct td_err *err);
void td_split_destroy(struct td_split *s); /* NULL is fine */
/* The pattern that PCRE2 gets: \s and \S become explicit classes, because PCRE2's \s has one character too many
 * (U+180E). Escapes that mean different things to different engines are refused. Appends to out. */
enum td_status td_split_rewrite(const char *pattern, size_t n, struct td_buf *out, struct td_err *err);

struct td_split_iter {
    const struct td_split *split;
    void *match; /* pcre2_match_data */
    const char *text;
    size_t n, at;
    size_t match_start, match_end; /* a match that is found but not yet handed out, when match_start >= at */
    size_t *bounds;
};
/* text must be valid UTF-8; its end counts as the end of text for the pattern. */
enum td_status td_split_iter_init(struct td_split_iter *it, const struct td_split *s);
void td_split_iter_start(struct td_split_iter *it, const char *text, size_t n);
void td_split_iter_deinit(struct td_split_iter *it);
/* The next piece; *n_out 0 at the end of the text. INTERNAL: a limit of the regex engine was hit. */
enum td_status td_split_iter_next(struct td_split_iter *it, const uint8_t **piece_out, size_t *n_out,
                                  struct td_err *err);

#endif
