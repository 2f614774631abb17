/* Stop strings: finds the first one in a text that arrives in pieces, and holds text back only as long as it may be the
 * beginning of one. What comes out never shows any part of the string that was found, wherever the pieces' borders lie.
 *
 *   td_stop_create(strings, n, &s)
 *   if (td_stop_feed(s, piece, n, &out)) ... out is the rest of the text, generation may end
 *   td_stop_end(s, &out)                      the text ended by itself: what was held is text after all
 *
 * Pieces and strings are UTF-8 of whole characters, and so is what comes out. Of several strings the one that is
 * complete first counts; of those complete at the same place, the longest. One thread at a time; no clock. */
#ifndef TD_TEXT_STOP_H
#define TD_TEXT_STOP_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/text/chat.h"

struct td_stop;

/* Copies the strings. INVALID: one is empty. NO_MEMORY. n 0: everything passes. */
enum td_status td_stop_create(const struct td_text *strings, size_t n, struct td_stop **out);
void td_stop_destroy(struct td_stop *s); /* NULL is fine */

/* Appends to out what of the text so far is certain to be shown. true: a stop string was found, in this piece or an
 * earlier one; what follows it is dropped, as is all that is fed later. out->failed on no memory. */
bool td_stop_feed(struct td_stop *s, const char *text, size_t n, struct td_buf *out);
/* The text ends: appends what was held back; nothing if a string was found. */
void td_stop_end(struct td_stop *s, struct td_buf *out);

/* Index of the string found, in the order they were given; -1: none yet. */
int td_stop_found(const struct td_stop *s);
/* Bytes held back now: below the length of the longest string. */
size_t td_stop_held(const struct td_stop *s);

#endif
