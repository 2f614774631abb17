/* Stop strings in a text that arrives piece by piece. What may be the beginning of one is held back until decided, so
 * no part of a stop string ever leaks, wherever token borders fall. Pure; one thread. */
#ifndef TD_ROUTER_STOPS_H
#define TD_ROUTER_STOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/text/chat.h"

struct td_stops {
    const struct td_text *strings; /* borrowed, none empty */
    size_t n;
    uint32_t *fallback; /* one array per string: how much of it still matches when the next byte does not (KMP) */
    uint32_t *matched;  /* bytes of each string that the text so far ends in */
    struct td_buf held; /* the longest of those */
};

/* s is zeroed. n may be 0: then everything passes. NO_MEMORY. */
enum td_status td_stops_init(struct td_stops *s, const struct td_text *strings, size_t n);
void td_stops_deinit(struct td_stops *s);

/* Appends to out what can be shown now. true: a stop string is complete; it and what follows it are not shown, and no
 * more is fed. Of several that end at the same byte the longest counts. */
bool td_stops_feed(struct td_stops *s, const char *text, size_t n, struct td_buf *out);
/* The text ends here: what was held back is no stop string. */
void td_stops_flush(struct td_stops *s, struct td_buf *out);

#endif
