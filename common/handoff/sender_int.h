/* What sender.c (sends and their puts) and sender_peers.c (receivers and the ways to them) share. */
#ifndef TD_HANDOFF_SENDER_INT_H
#define TD_HANDOFF_SENDER_INT_H

#include "common/handoff/handoff_int.h"
#include "common/handoff/refused.h"
#include "common/handoff/sender.h"
#include "common/handoff/wire.h"

#define TX_STATES(X)                                                                                                   \
    X(OPEN)                                                                                                            \
    X(CLOSING)                                                                                                         \
    X(FLUSHING)
#define TX_OUTCOMES(X)                                                                                                 \
    X(NONE)                                                                                                            \
    X(COMPLETE)                                                                                                        \
    X(ABORTED)                                                                                                         \
    X(STOPPED)                                                                                                         \
    X(LOST) /* by rising precedence */
enum tx_state {
#define X(name) TX_##name,
    TX_STATES(X)
#undef X
};
enum tx_outcome {
#define X(name) OUT_##name,
    TX_OUTCOMES(X)
#undef X
};

struct td_tx_life { /* one life of a decode worker; outlives the way to it, since it holds what was refused */
    struct td_list link;
    uint64_t incarnation;
    struct td_tx_path *path; /* NULL: lost, or never opened */
    struct td_refused refused;
};
struct td_tx_path {
    struct td_list link; /* tx->paths */
    struct td_xfer_peer *xp;
    bool has_pools; /* false: opened to answer a STOP */
    bool is_retired;
    uint32_t n_users; /* sends and replies */
    struct td_tx_remote_layout remote;
};

struct td_tx_send {
    struct td_tx *tx;
    struct td_list link;
    struct td_tx_life *peer;
    struct td_tx_path *path;
    uint64_t generation;
    void *owner;
    enum tx_state state;
    enum tx_outcome outcome;
    enum td_status why; /* ABORTED */
    bool is_touched;    /* something was posted: ending needs a flush */
    uint32_t first_token;
    uint32_t n_in_flight;
    uint64_t bytes_in_flight, bytes_waiting, bytes_done;
    uint64_t rank_bytes[TD_MAX_RANKS]; /* of bytes_done: put into each target rank */
    uint64_t blocks_left; /* over all layers: not yet ready */
    uint64_t begun_ns, finish_ns;
    struct td_list waiting; /* puts not yet posted */
    struct td_xfer_req flush;
    struct td_timer later; /* ends and posts never happen inside the owner's call */
    struct td_tx_pages src[TD_KV_N_GROUPS], dst[TD_KV_N_GROUPS];
    uint32_t *src_pages[TD_KV_N_GROUPS], *dst_pages[TD_KV_N_GROUPS]; /* storage; src from dst's first block on */
    uint32_t *ready_end[TD_KV_N_GROUPS];                             /* per layer: blocks before it are ready */
    char holder[HOLDER_BYTES];
    uint32_t storage[];
};

struct td_tx {
    struct td_tx_ports ports;
    struct td_tx_source src;
    uint64_t incarnation;
    struct td_list sends, peers, paths, replies, free_puts, flying_puts;
    uint32_t n_peers, n_replies;
    uint64_t window_bytes, put_bytes;
    bool is_detached;         /* the transfer goes away: nothing is posted, flushed or told any more */
    struct td_xfer_seg *segs; /* room for one put */
    uint32_t n_segs_max;
    struct td_timer reaper; /* closes paths outside of the transfer's callbacks */
};

static inline uint64_t td_tx_now(const struct td_tx *tx) { return tx->ports.env->now_ns(tx->ports.env); }
/* At the next turn of the loop: nothing ends inside an owner's or the transfer's call. */
static inline void td_tx_later(struct td_tx *tx, struct td_timer *t)
{
    if (!t->is_armed) tx->ports.env->timer_start(tx->ports.env, t, 0);
}

/* ---- sender_peers.c --------------------------------------------------------------------------------------------- */
struct td_tx_life *td_tx_peer_find(const struct td_tx *tx, uint64_t incarnation);
/* NULL: no memory, or too many lives are in use. */
struct td_tx_life *td_tx_peer_make(struct td_tx *tx, uint64_t incarnation);
void td_tx_peer_free(struct td_tx *tx, struct td_tx_life *p);
/* NULL remote: for messages only. On failure xp stays the caller's. */
enum td_status td_tx_path_set(struct td_tx *tx, struct td_tx_life *p, struct td_xfer_peer *xp,
                              const struct td_tx_remote_layout *remote);
void td_tx_path_retire(struct td_tx *tx, struct td_tx_path *path); /* closes when its last user is gone */
void td_tx_path_drop(struct td_tx *tx, struct td_tx_path *path);   /* one user less */
void td_tx_reap(struct td_timer *t);                               /* tx->reaper */
enum td_status td_tx_tell(struct td_tx *tx, struct td_tx_path *path, uint8_t id, const struct td_wire *m);
/* STOPPED for a generation that is not in progress, after a flush. */
void td_tx_answer(struct td_tx *tx, struct td_tx_life *p, uint64_t generation);
void td_tx_drop_replies(struct td_tx *tx); /* at the end of all */

#endif
