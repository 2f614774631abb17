/* Turns a stream of token ids into a stream of valid UTF-8: a token may hold part of a character, and a model may write
 * bytes that are no UTF-8 at all. Whole characters are passed on at once; an incomplete tail of at most 3 bytes waits
 * for later tokens; a byte that cannot continue becomes U+FFFD, one per maximal invalid prefix, and decoding resumes at
 * the offending byte. One thread at a time; no allocation of its own. */
#ifndef TD_TEXT_DETOK_H
#define TD_TEXT_DETOK_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/text/tokenizer.h"

/* Lives in the caller's object; nothing to free. */
struct td_detok {
    const struct td_tokenizer *tokenizer; /* borrowed */
    uint8_t pending[3];
    uint8_t n_pending;
    bool keep_special;
};

/* keep_special: special tokens appear by name, else they leave no trace. */
void td_detok_init(struct td_detok *d, const struct td_tokenizer *t, bool keep_special);
/* Appends what becomes certain with this token: whole characters only, maybe nothing. */
void td_detok_feed(struct td_detok *d, uint32_t id, struct td_buf *out);
void td_detok_feed_bytes(struct td_detok *d, const uint8_t *bytes, size_t n, struct td_buf *out);
/* The text ends here: a pending tail becomes one U+FFFD. The decoder is ready for another text. */
void td_detok_end(struct td_detok *d, struct td_buf *out);

#endif
