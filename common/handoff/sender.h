/* The prefill worker's end of KV hand-offs: puts the pages of each layer as soon as the layer is computed, flushes,
 * completes. The protocol is told at the top of receiver.c. Pure apart from its ports; loop thread only. */
#ifndef TD_HANDOFF_SENDER_H
#define TD_HANDOFF_SENDER_H

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/status.h"
#include "common/transfer/xfer.h"
#include "kernels/kv_layout.h"

struct td_tx;
struct td_tx_send; /* one request's hand-off */

struct td_tx_ports {
    struct td_env *env;
    void *self;
    const struct td_xfer_ops *xfer; /* puts, flushes and messages to peers */
    /* The hand-off is over: OK (complete was sent after the flush), STALE (stopped by the receiver), PEER_LOST,
     * CANCELED. No put of it is in flight any more, so the source pages are free to reuse. Exactly once. */
    void (*ended)(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes);
};

struct td_tx_source { /* where the KV lies here */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    const uint8_t *base[TD_KV_N_GROUPS];
};
struct td_tx_remote_layout { /* where it goes */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
};
/* pages[i] is block first_block + i. Source covers at least the blocks of the target. */
struct td_tx_pages {
    uint32_t first_block, n_pages;
    const uint32_t *pages;
};

enum td_status td_tx_create(const struct td_tx_ports *ports, const struct td_tx_source *src, uint64_t incarnation,
                            struct td_tx **out);
void td_tx_destroy(struct td_tx *tx);
/* A decode worker's life is known from its descriptor; the peer stays until lost or replaced. */
enum td_status td_tx_add_peer(struct td_tx *tx, uint64_t decode, struct td_xfer_peer *peer,
                              const struct td_tx_remote_layout *remote);
struct td_xfer_peer *td_tx_peer(const struct td_tx *tx, uint64_t decode); /* NULL: unknown incarnation */
/* STALE: that generation was stopped, or lies below the receiver's lowest live one. Page lists are copied. */
enum td_status td_tx_begin(struct td_tx *tx, uint64_t decode, uint64_t generation, uint64_t lowest_live,
                           const struct td_tx_pages src[TD_KV_N_GROUPS], const struct td_tx_pages dst[TD_KV_N_GROUPS],
                           const char *holder, void *owner, struct td_tx_send **out);
void *td_tx_owner(const struct td_tx_send *s);
/* Which pages of this layer are ready: all of its blocks in [first_block, end_block) that have not been put yet. Call
 * after the layer is stored; chunked prefill calls it once per chunk with the full pages so far. layer counts over the
 * whole model. */
void td_tx_layer_ready(struct td_tx *tx, struct td_tx_send *s, uint32_t layer_in_group, enum td_kv_group g,
                       uint32_t end_block);
/* All layers ready and the first token known: flush, then `complete`. */
void td_tx_finish(struct td_tx *tx, struct td_tx_send *s, uint32_t first_token);
/* Ours failed or was cancelled: flush or cancel puts, tell the receiver `aborted`. */
void td_tx_abort(struct td_tx *tx, struct td_tx_send *s, enum td_status why);

void td_tx_on_message(struct td_tx *tx, uint64_t from, uint8_t id, const void *data, size_t n);
void td_tx_on_peer_lost(struct td_tx *tx, uint64_t decode);
void td_tx_describe(const struct td_tx *tx, struct td_buf *json_out);

#endif
