/* Layout, little-endian: u32 magic, u16 version, u16 zero, body, u64 checksum over everything before it.
 *   address  u64 incarnation, 16 bytes boot id, u64 pid namespace, u64 start time, u32 pid, blob worker address
 *   key      u64 base, u64 n_bytes, u64 secret, u8 kind, blob rkey */
#include "common/transfer/card_int.h"

#include <string.h>

#define MAGIC_ADDRESS 0x41584454u /* "TDXA" */
#define MAGIC_KEY     0x4b584454u /* "TDXK" */
#define VERSION       1u

/* FNV-1a (Fowler, Noll, Vo). */
static uint64_t checksum(const uint8_t *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    return h;
}

static void begin(struct td_buf *out, uint32_t magic)
{
    td_buf_clear(out);
    td_buf_u32(out, magic);
    td_buf_u16(out, VERSION);
    td_buf_u16(out, 0);
}

static void end(struct td_buf *out)
{
    if (!out->failed) td_buf_u64(out, checksum(out->data, out->n));
}

void td_card_pack_address(const struct td_card_address *a, struct td_buf *out)
{
    begin(out, MAGIC_ADDRESS);
    td_buf_u64(out, a->incarnation);
    td_buf_put(out, a->process.boot_id, sizeof a->process.boot_id);
    td_buf_u64(out, a->process.pid_namespace);
    td_buf_u64(out, a->process.start_time);
    td_buf_u32(out, a->process.pid);
    td_buf_blob(out, a->worker, a->n_worker);
    end(out);
}

void td_card_pack_key(const struct td_card_key *k, struct td_buf *out)
{
    begin(out, MAGIC_KEY);
    td_buf_u64(out, k->base);
    td_buf_u64(out, k->n_bytes);
    td_buf_u64(out, k->secret);
    td_buf_u8(out, (uint8_t)k->kind);
    td_buf_blob(out, k->rkey, k->n_rkey);
    end(out);
}

/* Checks the envelope; r is left at the body, without the checksum. */
static enum td_status open_envelope(const void *p, size_t n, uint32_t magic, const char *what, struct td_reader *r,
                                    struct td_err *err)
{
    if (p == NULL || n < 16 || n > TD_XFER_ADDRESS_MAX)
        return td_err_set(err, TD_E_INVALID, "%s of %zu bytes: not one of ours", what, n);
    *r = (struct td_reader){.p = p, .n = n};
    uint32_t m = td_read_u32(r);
    unsigned version = td_read_u16(r);
    if (m != magic) return td_err_set(err, TD_E_INVALID, "%s: not one of ours (starts with %08x)", what, m);
    if (version != VERSION)
        return td_err_set(err, TD_E_MISMATCH, "%s: version %u, this build speaks %u", what, version, VERSION);
    td_read_u16(r);
    struct td_reader tail = {.p = (const uint8_t *)p + n - 8, .n = 8};
    if (td_read_u64(&tail) != checksum(p, n - 8)) return td_err_set(err, TD_E_INVALID, "%s: checksum differs", what);
    r->n -= 8;
    return TD_OK;
}

enum td_status td_card_read_address(const void *p, size_t n, struct td_card_address *out, struct td_err *err)
{
    struct td_reader r;
    enum td_status st = open_envelope(p, n, MAGIC_ADDRESS, "transfer address", &r, err);
    if (st != TD_OK) return st;
    struct td_card_address a = {.incarnation = td_read_u64(&r)};
    const uint8_t *boot = td_read_bytes(&r, sizeof a.process.boot_id);
    if (boot != NULL) memcpy(a.process.boot_id, boot, sizeof a.process.boot_id);
    a.process.pid_namespace = td_read_u64(&r);
    a.process.start_time = td_read_u64(&r);
    a.process.pid = td_read_u32(&r);
    a.worker = td_read_blob(&r, &a.n_worker);
    if (r.failed || r.n != 0 || a.n_worker == 0)
        return td_err_set(err, TD_E_INVALID, "transfer address: its parts do not add up to %zu bytes", n);
    *out = a;
    return TD_OK;
}

enum td_status td_card_read_key(const void *p, size_t n, struct td_card_key *out, struct td_err *err)
{
    struct td_reader r;
    enum td_status st = open_envelope(p, n, MAGIC_KEY, "pool key", &r, err);
    if (st != TD_OK) return st;
    struct td_card_key k = {.base = td_read_u64(&r)};
    k.n_bytes = td_read_u64(&r);
    k.secret = td_read_u64(&r);
    unsigned kind = td_read_u8(&r);
    k.rkey = td_read_blob(&r, &k.n_rkey);
    if (r.failed || r.n != 0 || k.n_rkey == 0)
        return td_err_set(err, TD_E_INVALID, "pool key: its parts do not add up to %zu bytes", n);
    if (kind == 0 || kind >= TD_POOL_N_KINDS)
        return td_err_set(err, TD_E_INVALID, "pool key: kind %u is not known here", kind);
    if (k.n_bytes == 0 || k.base > UINT64_MAX - k.n_bytes)
        return td_err_set(err, TD_E_INVALID, "pool key: %llu bytes at %llx do not fit an address space",
                          (unsigned long long)k.n_bytes, (unsigned long long)k.base);
    k.kind = (enum td_pool_kind)kind;
    *out = k;
    return TD_OK;
}
