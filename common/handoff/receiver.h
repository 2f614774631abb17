/* The decode worker's end of KV hand-offs: reservations of pages that a prefill worker may write, and when they may be
 * read or freed. The protocol is told at the top of receiver.c. Pure: no clock, socket or thread; loop thread only.
 *
 * A reservation lives in the sequence that owns it. From td_rx_reserve until its ended callback its pages are pinned;
 * then they either belong to the sequence (READY) or have gone back to the pool (FAILED). */
#ifndef TD_HANDOFF_RECEIVER_H
#define TD_HANDOFF_RECEIVER_H

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/status.h"
#include "common/engine/kv_pages.h"

struct td_rx;
struct td_rx_reservation;

/* What `complete` brought along. */
struct td_rx_complete {
    uint32_t first_token;
    uint64_t kv_bytes; /* over all ranks; already checked against the closed form */
};

struct td_rx_ports {
    struct td_env *env;
    void *self;
    /* A message to the prefill worker of that incarnation (wire.h). Not OK: it cannot be reached now. */
    enum td_status (*send)(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n);
    /* KV is complete and may be read: the sequence owns the pages now. */
    void (*ready)(void *self, struct td_rx_reservation *r, const struct td_rx_complete *c);
    /* The reservation failed without our asking (prefill worker lost, aborted, or broke the protocol). Its pages may
     * still be pinned; they go back on their own. The owner may forget the request, not the reservation. */
    void (*failed)(void *self, struct td_rx_reservation *r, enum td_status st, const char *why);
    /* The reservation holds nothing any more and its storage goes when this returns. Last callback, exactly once; also
     * after READY (right after ready returned). Not called once disowned. */
    void (*ended)(void *self, struct td_rx_reservation *r);
    /* The bytes of these pages are here: just before ready, for pools whose bytes arrive in a copy. May be NULL. */
    void (*arrived)(void *self, const uint32_t *const pages[TD_KV_N_GROUPS], const uint32_t n_pages[TD_KV_N_GROUPS]);
};

struct td_rx_options {
    uint64_t incarnation; /* ours */
    const void *address;  /* our transfer address: goes with `stop`, so that a sender that was never
                           * told of us can answer; borrowed for rx's life. NULL: left out */
    size_t n_address;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint32_t window_tokens;
    uint32_t n_ranks;
    uint32_t n_vocab;       /* `complete` with a token beyond it breaks the protocol; 0: not checked */
    uint32_t quarantine_ms; /* after a sender's known death, as it is (0: at the next turn) */
    uint32_t stop_retry_ms; /* resend `stop` to a silent sender; 0: 1000 */
};

enum td_status td_rx_create(const struct td_rx_options *o, struct td_kv_pages *kv, const struct td_rx_ports *ports,
                            struct td_rx **out);
void td_rx_destroy(struct td_rx *rx);

/* What the router is told (worker.proto KvTarget). Arrays are the reservation's. */
struct td_rx_target {
    uint64_t generation, lowest_live_generation;
    uint32_t cached_tokens;
    uint32_t first_block[TD_KV_N_GROUPS], n_pages[TD_KV_N_GROUPS];
    const uint32_t *pages[TD_KV_N_GROUPS];
};
/* Pages for the KV of n_tokens prompt positions, of which the first cached_tokens are here already (not reserved, not
 * sent). prefill: the incarnation that will send. holder: request id, copied. out and the arrays of target_out stay
 * until ended. NO_PAGES: nothing reserved. PEER_LOST: that incarnation is known dead. INVALID: no tokens, or all of
 * them cached. */
enum td_status td_rx_reserve(struct td_rx *rx, uint64_t prefill, uint32_t n_tokens, uint32_t cached_tokens,
                             const char *holder, void *owner, struct td_rx_reservation **out,
                             struct td_rx_target *target_out);
void *td_rx_owner(const struct td_rx_reservation *r);
uint64_t td_rx_generation(const struct td_rx_reservation *r);
/* The owner goes away now: no callback for r comes any more. Ends the reservation if that has not happened yet. */
void td_rx_disown(struct td_rx_reservation *r);
/* The owner wants no KV any more (cancel, deadline, finished by the first token). If the sender may still write, it is
 * asked to stop and pages stay pinned until it confirms. ended follows, maybe at once. */
void td_rx_end(struct td_rx *rx, struct td_rx_reservation *r);

void td_rx_on_message(struct td_rx *rx, uint64_t from, uint8_t id, const void *data, size_t n);
void td_rx_on_peer_lost(struct td_rx *rx, uint64_t prefill);      /* its process is known dead */
void td_rx_on_peer_reachable(struct td_rx *rx, uint64_t prefill); /* introduced or reconnected: pending stops go out */
uint32_t td_rx_n_quarantined_pages(const struct td_rx *rx);       /* pinned with no request that wants them */
uint64_t td_rx_lowest_live_generation(const struct td_rx *rx);
void td_rx_describe(const struct td_rx *rx, struct td_buf *json_out); /* states, ages, deadlines for /statez */

#endif
