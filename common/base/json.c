#include "common/base/json.h"

#include <string.h>

/* Length of the valid UTF-8 sequence at s (no overlong forms, no surrogates, at most U+10FFFF); 0: not valid. */
static size_t utf8_len(const unsigned char *s, size_t n)
{
    unsigned char c = s[0];
    if (c < 0x80) return 1;
    size_t len = c >= 0xC2 && c <= 0xDF ? 2 : c >= 0xE0 && c <= 0xEF ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    if (len == 0 || len > n) return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if ((c == 0xE0 && s[1] < 0xA0) || (c == 0xED && s[1] > 0x9F)) return 0;
    if ((c == 0xF0 && s[1] < 0x90) || (c == 0xF4 && s[1] > 0x8F)) return 0;
    return len;
}

static void put_escaped(struct td_buf *b, unsigned char c)
{
    switch (c) {
    case '"': td_buf_put(b, "\\\"", 2); break;
    case '\\': td_buf_put(b, "\\\\", 2); break;
    case '\n': td_buf_put(b, "\\n", 2); break;
    case '\r': td_buf_put(b, "\\r", 2); break;
    case '\t': td_buf_put(b, "\\t", 2); break;
    default: td_buf_printf(b, "\\u%04x", c);
    }
}

void td_json_quote(struct td_buf *b, const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s, *end = p + n;
    td_buf_u8(b, '"');
    while (p < end) {
        const unsigned char *run = p; /* copied in one piece */
        size_t len = 1;
        while (p < end && *p >= 0x20 && *p != '"' && *p != '\\' && (len = utf8_len(p, (size_t)(end - p))) > 0) p += len;
        td_buf_put(b, run, (size_t)(p - run));
        if (p == end) break;
        if (len == 0)
            td_buf_put(b, "\xEF\xBF\xBD", 3);
        else
            put_escaped(b, *p);
        p++;
    }
    td_buf_u8(b, '"');
}

void td_json_quote_str(struct td_buf *b, const char *s) { td_json_quote(b, s, strlen(s)); }
