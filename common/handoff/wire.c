#include "common/handoff/wire.h"

#include <string.h>

const char *td_wire_name(uint8_t id)
{
    switch (id) {
#define X(name, n, fields)                                                                                             \
    case n: return #name;
        TD_WIRE_MESSAGES(X)
#undef X
    default: return "?";
    }
}

void td_wire_encode(uint8_t id, const struct td_wire *m, struct td_buf *out)
{
    td_buf_u8(out, TD_WIRE_VERSION);
    td_buf_u64(out, m->to);
    td_buf_u64(out, m->generation);
    switch (id) {
    case TD_WIRE_COMPLETE:
        td_buf_u32(out, m->first_token);
        td_buf_u8(out, (uint8_t)m->n_ranks);
        for (uint32_t r = 0; r < m->n_ranks; r++) td_buf_u64(out, m->kv_bytes[r]);
        break;
    case TD_WIRE_ABORTED: {
        const char *name = td_status_name(m->status);
        td_buf_blob(out, name, (uint32_t)strlen(name));
        break;
    }
    case TD_WIRE_STOP:
        td_buf_u64(out, m->lowest_live);
        td_buf_blob(out, m->address, m->n_address);
        break;
    default: break;
    }
}

/* Numbers of statuses may differ between versions, names do not. One that we do not know is still a failure. */
static enum td_status status_of_name(const uint8_t *name, uint32_t n)
{
    for (int st = 0; st < TD_N_STATUS; st++) {
        const char *s = td_status_name((enum td_status)st);
        if (strlen(s) == n && memcmp(s, name, n) == 0) return (enum td_status)st;
    }
    return TD_E_INTERNAL;
}

enum td_status td_wire_decode(uint8_t id, const void *data, size_t n, struct td_wire *out, struct td_err *err)
{
    struct td_reader r = {.p = data, .n = n};
    memset(out, 0, sizeof *out);
    uint8_t version = td_read_u8(&r);
    if (!r.failed && version != TD_WIRE_VERSION)
        return td_err_set(err, TD_E_PROTOCOL, "hand-off message %u has version %u, this is %u", id, version,
                          TD_WIRE_VERSION);
    out->to = td_read_u64(&r);
    out->generation = td_read_u64(&r);
    switch (id) {
    case TD_WIRE_BEGUN:
    case TD_WIRE_STOPPED: break;
    case TD_WIRE_COMPLETE:
        out->first_token = td_read_u32(&r);
        out->n_ranks = td_read_u8(&r);
        if (!r.failed && (out->n_ranks == 0 || out->n_ranks > TD_MAX_RANKS))
            return td_err_set(err, TD_E_PROTOCOL, "COMPLETE speaks of %u ranks", out->n_ranks);
        for (uint32_t i = 0; i < out->n_ranks; i++) out->kv_bytes[i] = td_read_u64(&r);
        break;
    case TD_WIRE_ABORTED: {
        uint32_t n_name;
        const uint8_t *name = td_read_blob(&r, &n_name);
        if (!r.failed) out->status = status_of_name(name, n_name);
        break;
    }
    case TD_WIRE_STOP:
        out->lowest_live = td_read_u64(&r);
        out->address = td_read_blob(&r, &out->n_address);
        if (out->n_address == 0) out->address = NULL;
        if (!r.failed && out->n_address > TD_WIRE_MAX_ADDRESS)
            return td_err_set(err, TD_E_PROTOCOL, "STOP has an address of %u bytes", out->n_address);
        break;
    default: return td_err_set(err, TD_E_PROTOCOL, "unknown hand-off message %u of %zu bytes", id, n);
    }
    if (r.failed) return td_err_set(err, TD_E_PROTOCOL, "hand-off message %s is cut short", td_wire_name(id));
    return TD_OK;
}
