/* The prefill worker's end of KV hand-offs: puts the pages of each layer as soon as the layer is computed, flushes,
 * completes. Either end may have any number of ranks: each source rank's heads go to the target ranks that have them.
 * The protocol is told at the top of receiver.c. Pure apart from its ports; loop thread only. */
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
    struct td_xfer *x;              /* for the way back to a decode worker that asks to stop before it was introduced */
    /* The hand-off is over: OK (complete was sent after the flush), STALE (stopped by the receiver), PEER_LOST, or the
     * status given to td_tx_abort, or of what failed. No put of it is in flight any more, so the source pages are free
     * to reuse. Exactly once, never from within a call on s; s is freed when it returns. kv_bytes: put in all. */
    void (*ended)(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes);
};

/* KV heads are divided evenly: rank r of n has heads [r H / n, (r + 1) H / n) of the model's H. A page has the same
 * number on all ranks. */
struct td_tx_source {                             /* where the KV lies here */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS]; /* of a rank */
    uint32_t n_ranks;
    const uint8_t *base[TD_MAX_RANKS][TD_KV_N_GROUPS];
};
struct td_tx_remote_layout { /* where it goes; pool of group g of rank r: r * TD_KV_N_GROUPS + g of the peer's */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS]; /* of a rank */
    uint32_t n_ranks;
};
/* pages[i] is block first_block + i. Source covers at least the blocks of the target; a source block that is not known
 * yet may be UINT32_MAX until td_tx_set_source. */
struct td_tx_pages {
    uint32_t first_block, n_pages;
    const uint32_t *pages;
};

enum td_status td_tx_create(const struct td_tx_ports *ports, const struct td_tx_source *src, uint64_t incarnation,
                            struct td_tx **out);
/* Bytes in flight per send and per put at most (a single page may be more); defaults 64 MiB and 16 MiB. */
void td_tx_set_window(struct td_tx *tx, uint64_t window_bytes, uint64_t put_bytes);
/* The transfer is about to be destroyed: sends end as its requests come back, nothing is posted or told any more. */
void td_tx_detach(struct td_tx *tx);
/* After td_tx_detach and the transfer's destruction: what is still in flight never comes back. Sends get no ended any
 * more. NULL is fine. */
void td_tx_destroy(struct td_tx *tx);
/* A decode worker's life is known from its descriptor; the peer stays until lost or replaced. Takes peer over: tx
 * closes it. */
enum td_status td_tx_add_peer(struct td_tx *tx, uint64_t decode, struct td_xfer_peer *peer,
                              const struct td_tx_remote_layout *remote);
struct td_xfer_peer *td_tx_peer(const struct td_tx *tx, uint64_t decode); /* NULL: unknown incarnation */
const struct td_tx_remote_layout *td_tx_peer_layout(const struct td_tx *tx, uint64_t decode); /* NULL: unknown */
/* UNKNOWN_PEER. STALE: that generation was stopped or used before, or lies below the receiver's lowest live one.
 * INVALID: the page lists do not fit the pools or each other. Page lists and holder (for people) are copied. */
enum td_status td_tx_begin(struct td_tx *tx, uint64_t decode, uint64_t generation, uint64_t lowest_live,
                           const struct td_tx_pages src[TD_KV_N_GROUPS], const struct td_tx_pages dst[TD_KV_N_GROUPS],
                           const char *holder, void *owner, struct td_tx_send **out);
void *td_tx_owner(const struct td_tx_send *s);
/* Tells where a block lies here, for those that td_tx_begin did not know. Before the first layer_ready that covers it.
 */
void td_tx_set_source(struct td_tx_send *s, enum td_kv_group g, uint32_t block, uint32_t page);
/* Which pages of this layer are ready: all of its blocks before end_block that have not been put yet. Call after the
 * layer is stored; chunked prefill calls it once per chunk with the full pages so far. */
void td_tx_layer_ready(struct td_tx *tx, struct td_tx_send *s, uint32_t layer_in_group, enum td_kv_group g,
                       uint32_t end_block);
/* All layers ready and the first token known: flush, then `complete`. */
void td_tx_finish(struct td_tx *tx, struct td_tx_send *s, uint32_t first_token);
/* Ours failed or was cancelled (or, with OK, the first token ended the request): what was not posted is dropped, the
 * rest is flushed, the receiver told `aborted`. */
void td_tx_abort(struct td_tx *tx, struct td_tx_send *s, enum td_status why);

void td_tx_on_message(struct td_tx *tx, uint64_t from, uint8_t id, const void *data, size_t n);
void td_tx_on_peer_lost(struct td_tx *tx, uint64_t decode);
uint32_t td_tx_n_sends(const struct td_tx *tx);
void td_tx_describe(const struct td_tx *tx, struct td_buf *json_out);

/* ---- the geometry of one layer, pure ---------------------------------------------------------------------------- */
/* What one source rank must put into one target rank: KV heads are numbered over the whole model; this source rank
 * holds [src_first_head, + src->n_heads), the target rank [dst_first_head, + dst->n_heads). */
struct td_tx_geometry {
    const struct td_kv_group_layout *src, *dst;
    const uint8_t *src_base;
    uint32_t src_first_head, dst_first_head;
};
/* Segments for n_pages blocks of a layer (src_pages[i] goes to dst_pages[i]), as few as possible: whatever lies next to
 * each other on both sides is one. segs_out has room for n_pages. Returns their number, 0 if the ranks share no head;
 * bytes_out: sum. */
uint32_t td_tx_segments(const struct td_tx_geometry *geo, uint32_t layer_in_group, const uint32_t *src_pages,
                        const uint32_t *dst_pages, uint32_t n_pages, struct td_xfer_seg *segs_out, uint64_t *bytes_out);

#endif
