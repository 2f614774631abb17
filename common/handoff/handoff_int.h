/* What both ends of a hand-off share. */
#ifndef TD_HANDOFF_HANDOFF_INT_H
#define TD_HANDOFF_HANDOFF_INT_H

#include <stddef.h>

#define HOLDER_BYTES 72u /* a request id and a little */

/* Request ids come from clients and end up in logs and JSON: copied without what would need quoting there. */
static inline void holder_copy(char dst[HOLDER_BYTES], const char *src)
{
    size_t n = 0;
    for (; src != NULL && src[n] != 0 && n < HOLDER_BYTES - 1; n++) {
        char c = src[n];
        dst[n] = c > ' ' && c < 0x7f && c != '"' && c != '\\' ? c : '?';
    }
    dst[n] = 0;
}

#endif
