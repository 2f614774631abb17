/* The messages of a hand-off: packed, little-endian. Each begins
 *   u8 version, u64 to (incarnation of the life it is meant for), u64 generation
 * and goes on as its row below says. Who speaks is known from the transfer (its incarnation goes with every message).
 * Within a version fields are only added at the end: a reader ignores what follows those it knows. Ids and meanings are
 * told at the top of receiver.c.
 *
 * Decoding is total: any bytes give a message or an error. Pure; any thread. */
#ifndef TD_HANDOFF_WIRE_H
#define TD_HANDOFF_WIRE_H

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "kernels/kv_layout.h"

#define TD_WIRE_VERSION     1u
#define TD_WIRE_MAX_ADDRESS (64u << 10) /* as common/transfer allows */

/* X(name, id, fields) */
#define TD_WIRE_MESSAGES(X)                                                                                            \
    X(BEGUN, 1, "")                                                          /* P to D: puts may come now */           \
    X(COMPLETE, 2, "u32 first_token, u8 n_ranks, n_ranks * u64 kv_bytes")    /* P to D: all KV is there */             \
    X(ABORTED, 3, "blob name of a td_status; \"OK\": the first token ended") /* P to D: no put follows */              \
    X(STOP, 4, "u64 lowest_live, blob address of D, may be empty")           /* D to P: write no more */               \
    X(STOPPED, 5, "")                                                        /* P to D: every put is done or undone */

enum td_wire_id {
#define X(name, id, fields) TD_WIRE_##name = id,
    TD_WIRE_MESSAGES(X)
#undef X
};

struct td_wire {
    uint64_t to, generation;
    uint32_t first_token;            /* COMPLETE */
    uint32_t n_ranks;                /* COMPLETE: of the receiver */
    uint64_t kv_bytes[TD_MAX_RANKS]; /* COMPLETE: put into each rank */
    enum td_status status;           /* ABORTED: why; OK: the request ended with its first token */
    uint64_t lowest_live;            /* STOP: the receiver's lowest live generation */
    const uint8_t *address;          /* STOP: borrowed from the bytes read; NULL when empty */
    uint32_t n_address;
};

/* Appends; a failed allocation shows in out->failed. */
void td_wire_encode(uint8_t id, const struct td_wire *m, struct td_buf *out);
/* PROTOCOL: not a message that we know; err says what is wrong. out is zeroed first. */
enum td_status td_wire_decode(uint8_t id, const void *data, size_t n, struct td_wire *out, struct td_err *err);
const char *td_wire_name(uint8_t id); /* "COMPLETE"; "?" */

/* Which blocks of a group travel for a prompt of n_tokens of which the receiver holds the first cached_tokens: [*first,
 * *end). Full layers: blocks that are not wholly cached; sliding layers: of those only what the next token can still
 * see. A receiver that says cached also holds the blocks before that which the next token sees. */
static inline void td_handoff_blocks(const struct td_kv_group_layout *g, enum td_kv_group which, uint32_t window,
                                     uint32_t n_tokens, uint32_t cached_tokens, uint32_t *first, uint32_t *end)
{
    td_kv_blocks(g, which, window, n_tokens, first, end);
    if (*first < cached_tokens / g->page_tokens) *first = cached_tokens / g->page_tokens;
    if (*first > *end) *first = *end;
}

/* Bytes that one rank receives: the closed form that `complete` is checked against. */
static inline uint64_t td_handoff_bytes(const struct td_kv_group_layout kv[TD_KV_N_GROUPS], uint32_t window,
                                        uint32_t n_tokens, uint32_t cached_tokens)
{
    uint64_t sum = 0;
    for (unsigned g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t first, end;
        td_handoff_blocks(&kv[g], (enum td_kv_group)g, window, n_tokens, cached_tokens, &first, &end);
        sum += (uint64_t)(end - first) * td_kv_page_bytes(&kv[g]) * kv[g].n_layers;
    }
    return sum;
}

#endif
