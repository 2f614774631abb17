#include "common/base/bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

void td_buf_free(struct td_buf *b)
{
    free(b->data);
    *b = (struct td_buf){0};
}

void td_buf_clear(struct td_buf *b)
{
    b->n = 0;
    b->failed = false;
}

bool td_buf_reserve(struct td_buf *b, size_t extra)
{
    if (b->failed) return false;
    if (extra <= b->cap - b->n) return true;
    if (extra > SIZE_MAX / 2 - b->n) {
        b->failed = true;
        return false;
    }
    size_t cap = b->cap < 64 ? 64 : b->cap;
    while (cap < b->n + extra) cap += cap / 2;
    uint8_t *p = td_realloc(b->data, cap, 1);
    if (p == NULL) {
        b->failed = true;
        return false;
    }
    b->data = p;
    b->cap = cap;
    return true;
}

void td_buf_put(struct td_buf *b, const void *p, size_t n)
{
    if (n == 0 || !td_buf_reserve(b, n)) return;
    memcpy(b->data + b->n, p, n);
    b->n += n;
}

void td_buf_str(struct td_buf *b, const char *s) { td_buf_put(b, s, strlen(s)); }

void td_buf_printf(struct td_buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) b->failed = true;
    if (n < 0 || !td_buf_reserve(b, (size_t)n + 1)) return;
    va_start(ap, fmt);
    vsnprintf((char *)b->data + b->n, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->n += (size_t)n;
}

static void put_le(struct td_buf *b, uint64_t v, unsigned n)
{
    uint8_t bytes[8];
    for (unsigned i = 0; i < n; i++) bytes[i] = (uint8_t)(v >> (8 * i));
    td_buf_put(b, bytes, n);
}

void td_buf_u8(struct td_buf *b, uint8_t v) { put_le(b, v, 1); }
void td_buf_u16(struct td_buf *b, uint16_t v) { put_le(b, v, 2); }
void td_buf_u32(struct td_buf *b, uint32_t v) { put_le(b, v, 4); }
void td_buf_u64(struct td_buf *b, uint64_t v) { put_le(b, v, 8); }

void td_buf_blob(struct td_buf *b, const void *p, uint32_t n)
{
    td_buf_u32(b, n);
    td_buf_put(b, p, n);
}

const char *td_buf_cstr(struct td_buf *b)
{
    if (b->failed || !td_buf_reserve(b, 1)) return "";
    b->data[b->n] = 0;
    return (const char *)b->data;
}

const uint8_t *td_read_bytes(struct td_reader *r, size_t n)
{
    if (r->failed || n > r->n) {
        r->failed = true;
        return NULL;
    }
    const uint8_t *p = r->p;
    if (n == 0) return p; /* which may be NULL, and NULL + 0 is undefined */
    r->p += n;
    r->n -= n;
    return p;
}

static uint64_t get_le(struct td_reader *r, unsigned n)
{
    const uint8_t *p = td_read_bytes(r, n);
    uint64_t v = 0;
    for (unsigned i = 0; p != NULL && i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

uint8_t td_read_u8(struct td_reader *r) { return (uint8_t)get_le(r, 1); }
uint16_t td_read_u16(struct td_reader *r) { return (uint16_t)get_le(r, 2); }
uint32_t td_read_u32(struct td_reader *r) { return (uint32_t)get_le(r, 4); }
uint64_t td_read_u64(struct td_reader *r) { return get_le(r, 8); }

const uint8_t *td_read_blob(struct td_reader *r, uint32_t *n_out)
{
    uint32_t n = td_read_u32(r);
    const uint8_t *p = td_read_bytes(r, n);
    *n_out = p == NULL ? 0 : n;
    return p;
}
