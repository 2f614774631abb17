/* UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF. Any thread; no allocation. */
#ifndef TD_TEXT_UTF8_H
#define TD_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the longest prefix that consists of whole valid characters: n if all is valid, else the offset to name in
 * an error message. NUL is an ordinary character. */
size_t td_utf8_valid_prefix(const void *text, size_t n);
static inline bool td_utf8_is_valid(const void *text, size_t n) { return td_utf8_valid_prefix(text, n) == n; }

enum td_utf8_step {
    TD_UTF8_CHAR,    /* a whole character of *len_out bytes */
    TD_UTF8_PARTIAL, /* all n bytes begin a character that more bytes may complete */
    TD_UTF8_BAD,     /* *len_out bytes can begin no character with what follows: one U+FFFD ("maximal subpart") */
};
/* Looks at the start of p[0 .. n), n >= 1. */
enum td_utf8_step td_utf8_step(const uint8_t *p, size_t n, size_t *len_out);

/* The character at p, which must be valid UTF-8. *len_out: its bytes. */
uint32_t td_utf8_decode(const uint8_t *p, size_t *len_out);
/* Writes code point c (valid) and returns its bytes, 1..4. */
size_t td_utf8_encode(uint32_t c, uint8_t out[4]);

#endif
