#include "common/text/utf8.h"

#include <string.h>

/* What may follow a lead byte: number of continuation bytes, and the narrower range of the first of them (Unicode table
 * 3-7: it excludes overlong forms, surrogates and code points above U+10FFFF). n 0: no lead byte. */
struct lead {
    uint8_t n, low, high;
};

static struct lead lead_of(uint8_t b)
{
    if (b >= 0xC2 && b <= 0xDF) return (struct lead){1, 0x80, 0xBF};
    if (b == 0xE0) return (struct lead){2, 0xA0, 0xBF};
    if (b == 0xED) return (struct lead){2, 0x80, 0x9F};
    if (b >= 0xE1 && b <= 0xEF) return (struct lead){2, 0x80, 0xBF};
    if (b == 0xF0) return (struct lead){3, 0x90, 0xBF};
    if (b >= 0xF1 && b <= 0xF3) return (struct lead){3, 0x80, 0xBF};
    if (b == 0xF4) return (struct lead){3, 0x80, 0x8F};
    return (struct lead){0, 0, 0};
}

enum td_utf8_step td_utf8_step(const uint8_t *p, size_t n, size_t *len_out)
{
    *len_out = 1;
    if (p[0] < 0x80) return TD_UTF8_CHAR;
    struct lead l = lead_of(p[0]);
    if (l.n == 0) return TD_UTF8_BAD;
    for (size_t i = 1; i <= l.n; i++) {
        *len_out = i;
        if (i == n) return TD_UTF8_PARTIAL;
        uint8_t low = i == 1 ? l.low : 0x80, high = i == 1 ? l.high : 0xBF;
        if (p[i] < low || p[i] > high) return TD_UTF8_BAD;
    }
    *len_out = l.n + 1u;
    return TD_UTF8_CHAR;
}

size_t td_utf8_valid_prefix(const void *text, size_t n)
{
    const uint8_t *p = text;
    size_t i = 0;
    while (i < n) {
        /* Most text is ASCII: eight bytes at a glance. */
        while (n - i >= 8) {
            uint64_t w;
            memcpy(&w, p + i, 8);
            if ((w & 0x8080808080808080ull) != 0) break;
            i += 8;
        }
        while (i < n && p[i] < 0x80) i++;
        while (i < n && p[i] >= 0x80) {
            size_t len;
            if (td_utf8_step(p + i, n - i, &len) != TD_UTF8_CHAR) return i;
            i += len;
        }
    }
    return n;
}

uint32_t td_utf8_decode(const uint8_t *p, size_t *len_out)
{
    uint32_t b = p[0];
    if (b < 0x80) {
        *len_out = 1;
        return b;
    }
    if (b < 0xE0) {
        *len_out = 2;
        return (b & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    }
    if (b < 0xF0) {
        *len_out = 3;
        return (b & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    }
    *len_out = 4;
    return (b & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

size_t td_utf8_encode(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xC0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xE0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
        out[2] = (uint8_t)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 0x3F));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    out[3] = (uint8_t)(0x80 | (c & 0x3F));
    return 4;
}
