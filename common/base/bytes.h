/* Byte buffers: a growing writer, a bounded reader (little-endian), and text formatting into a buffer. */
#ifndef TD_BASE_BYTES_H
#define TD_BASE_BYTES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
/* Growing buffer. Zero-initialised is empty and valid. On allocation failure `failed` is set, further appends do
 * nothing, and data stays what it was: check once at the end. */
struct td_buf {
    uint8_t *data;
    size_t n, cap;
    bool failed;
};
void td_buf_free(struct td_buf *b);
void td_buf_clear(struct td_buf *b); /* keeps the memory, clears failed */
bool td_buf_reserve(struct td_buf *b, size_t extra);
void td_buf_put(struct td_buf *b, const void *p, size_t n);
void td_buf_str(struct td_buf *b, const char *s);
void td_buf_printf(struct td_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void td_buf_u8(struct td_buf *b, uint8_t v);
void td_buf_u16(struct td_buf *b, uint16_t v);
void td_buf_u32(struct td_buf *b, uint32_t v);
void td_buf_u64(struct td_buf *b, uint64_t v);
void td_buf_blob(struct td_buf *b, const void *p, uint32_t n); /* u32 length, then the bytes */
const char *td_buf_cstr(struct td_buf *b);                     /* NUL-terminated view; "" when empty or failed */
/* Bounded reader. Reading past the end sets `failed` and yields zeros: check once at the end. */
struct td_reader {
    const uint8_t *p;
    size_t n;
    bool failed;
};
uint8_t td_read_u8(struct td_reader *r);
uint16_t td_read_u16(struct td_reader *r);
uint32_t td_read_u32(struct td_reader *r);
uint64_t td_read_u64(struct td_reader *r);
const uint8_t *td_read_bytes(struct td_reader *r, size_t n);     /* view into the input, NULL when too short */
const uint8_t *td_read_blob(struct td_reader *r, uint32_t *n_out); /* u32 length, then the bytes */
#endif
