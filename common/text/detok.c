#include "common/text/detok.h"

#include <string.h>

#include "common/text/utf8.h"

static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */

void td_detok_init(struct td_detok *d, const struct td_tokenizer *t, bool keep_special)
{
    *d = (struct td_detok){.tokenizer = t, .keep_special = keep_special};
}

/* Emits what is certain of p[0 .. n) and returns how many bytes that was; the rest, at most 3, is a partial character.
 */
static size_t emit_certain(const uint8_t *p, size_t n, struct td_buf *out)
{
    size_t i = 0;
    while (i < n) {
        size_t len = td_utf8_valid_prefix(p + i, n - i);
        if (len > 0) td_buf_put(out, p + i, len);
        i += len;
        if (i == n) break;
        if (td_utf8_step(p + i, n - i, &len) == TD_UTF8_PARTIAL) break;
        td_buf_put(out, replacement, 3);
        i += len;
    }
    return i;
}

void td_detok_feed_bytes(struct td_detok *d, const uint8_t *bytes, size_t n, struct td_buf *out)
{
    /* Settle the pending tail byte by byte: at most 3 steps until it is complete or refuted. */
    while (d->n_pending > 0 && n > 0) {
        uint8_t head[4];
        memcpy(head, d->pending, d->n_pending);
        head[d->n_pending] = *bytes;
        size_t len;
        enum td_utf8_step step = td_utf8_step(head, d->n_pending + 1u, &len);
        if (step == TD_UTF8_BAD) {
            /* The pending bytes were possible until now, so the new byte is the offender and is looked at afresh. */
            td_buf_put(out, replacement, 3);
            d->n_pending = 0;
            break;
        }
        bytes++;
        n--;
        if (step == TD_UTF8_CHAR) {
            td_buf_put(out, head, len);
            d->n_pending = 0;
        } else {
            d->pending[d->n_pending] = head[d->n_pending];
            d->n_pending++;
        }
    }
    if (n == 0) return;
    size_t done = emit_certain(bytes, n, out);
    d->n_pending = (uint8_t)(n - done);
    memcpy(d->pending, bytes + done, n - done);
}

void td_detok_feed(struct td_detok *d, uint32_t id, struct td_buf *out)
{
    if (!d->keep_special && td_tokenizer_is_special(d->tokenizer, id)) return;
    size_t n;
    const uint8_t *bytes = td_tokenizer_bytes(d->tokenizer, id, &n);
    if (bytes != NULL) td_detok_feed_bytes(d, bytes, n, out);
}

void td_detok_end(struct td_detok *d, struct td_buf *out)
{
    if (d->n_pending > 0) td_buf_put(out, replacement, 3);
    d->n_pending = 0;
}
