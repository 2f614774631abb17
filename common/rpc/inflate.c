#include "common/rpc/inflate.h"

#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <zlib.h>

#include "common/base/mem.h"

#define EITHER_FORMAT 32 /* added to zlib's window bits: gzip or zlib, as the header says */
#define FIRST_BYTES   4096u
#define FIRST_FACTOR  4u /* ordinary messages shrink two- to fourfold */

/* Makes room, up to one byte more than may come out: that byte tells "just fits" from "too large". */
static bool grow(uint8_t **buf, size_t *cap, size_t n_in, size_t most)
{
    size_t first = n_in < FIRST_BYTES / FIRST_FACTOR ? FIRST_BYTES : n_in * FIRST_FACTOR;
    size_t n = *cap == 0 ? first : *cap > most / 2 ? most : *cap * 2;
    if (n > most) n = most;
    uint8_t *p = td_realloc(*buf, n, 1);
    if (p == NULL) return false;
    *buf = p;
    *cap = n;
    return true;
}

static enum td_status inflate_all(z_stream *z, size_t max_bytes, uint8_t **buf, size_t *n_out, struct td_err *err)
{
    for (size_t used = 0, cap = 0, n_in = z->avail_in;;) {
        if (used == cap && !grow(buf, &cap, n_in, max_bytes + 1))
            return td_err_set(err, TD_E_NO_MEMORY, "no memory to decompress");
        z->next_out = *buf + used;
        z->avail_out = (uInt)(cap - used);
        int e = inflate(z, Z_NO_FLUSH);
        used = cap - z->avail_out;
        if (used > max_bytes)
            return td_err_set(err, TD_E_TOO_LARGE, "decompresses to more than the limit of %zu bytes", max_bytes);
        if (e == Z_STREAM_END) {
            *n_out = used;
            return z->avail_in == 0 ? TD_OK : td_err_set(err, TD_E_INVALID, "has bytes behind its compressed data");
        }
        if (e == Z_MEM_ERROR) return td_err_set(err, TD_E_NO_MEMORY, "no memory to decompress");
        if (e != Z_OK || (z->avail_in == 0 && z->avail_out > 0))
            return td_err_set(err, TD_E_INVALID, "cannot be decompressed: %s", z->msg != NULL ? z->msg : "cut short");
    }
}

enum td_status td_inflate(const void *data, size_t n, size_t max_bytes, uint8_t **out, size_t *n_out,
                          struct td_err *err)
{
    if (n > UINT_MAX || max_bytes >= UINT_MAX)
        return td_err_set(err, TD_E_TOO_LARGE, "%zu compressed bytes are too many", n);
    z_stream z = {.next_in = (Bytef *)(uintptr_t)data, .avail_in = (uInt)n}; /* not written to */
    if (inflateInit2(&z, MAX_WBITS + EITHER_FORMAT) != Z_OK)
        return td_err_set(err, TD_E_NO_MEMORY, "no memory to decompress");
    uint8_t *buf = NULL;
    enum td_status st = inflate_all(&z, max_bytes, &buf, n_out, err);
    inflateEnd(&z);
    if (st != TD_OK) {
        free(buf);
        return st;
    }
    *out = buf;
    return TD_OK;
}
