/* The decode worker: commands of routers, hand-offs and finished steps in; reservations, steps and news out. Every
 * decision about a request is made here or in sched.c. Pure: the world is reached through struct td_decode_ports. Loop
 * thread only. */
#ifndef TD_DECODE_WORKER_H
#define TD_DECODE_WORKER_H

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/engine/batch.h"
#include "common/engine/kv_pages.h"
#include "common/handoff/receiver.h"
#include "proto/fleet.pb-c.h"
#include "proto/worker.pb-c.h"

struct td_decode_worker;
struct td_decode_stream; /* one router's */

/* None of these calls back into the worker before it returns, except introduce. */
struct td_decode_ports {
    struct td_env *env;
    void *self;
    /* Computes a batch, after those submitted before; td_decode_worker_on_step follows if OK. */
    enum td_status (*submit)(void *self, struct td_batch *b);
    /* To a router. BUSY: not now (td_decode_worker_on_writable follows). */
    enum td_status (*send)(void *self, void *call, const Tandem__V1__DecodeEvents *ev);
    /* Ends a router's stream; td_decode_worker_on_stream_closed follows. OK: everything sent is delivered first. */
    void (*close)(void *self, void *call, enum td_status st, const char *text);
    /* A prefill worker is introduced. */
    void (*introduce)(void *self, const Tandem__V1__PeerDescriptor *peer);
    /* Can KV come from that life of a prefill worker? UNKNOWN_PEER, MISMATCH, PEER_LOST: no, err says why. */
    enum td_status (*check_peer)(void *self, uint64_t prefill, struct td_err *err);
    enum td_status (*send_peer)(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n);
    const char *(*transport)(void *self, uint64_t prefill); /* for DecodeFinished; "?" if not known */
    /* KV of these pages came from a prefill worker: before anything reads it. May be NULL. */
    void (*arrived)(void *self, const uint32_t *const pages[TD_KV_N_GROUPS], const uint32_t n_pages[TD_KV_N_GROUPS]);
    void (*drained)(void *self);                                    /* once, after td_decode_worker_drain */
    void (*broken)(void *self, enum td_status st, const char *why); /* the process can do no more work */
};

struct td_decode_worker_options {
    uint64_t incarnation;
    const void *xfer_address; /* for td_rx; borrowed */
    size_t n_xfer_address;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint32_t window_tokens, n_ranks, n_vocab, max_context_tokens;
    uint32_t max_batch, chunk_tokens;
    uint32_t step_depth;           /* batches in flight at a time (decode/sched.h) */
    uint32_t return_margin_tokens; /* beyond its tokens, for a request that was running elsewhere or here before */
    bool has_prefix_cache;
    uint32_t quarantine_ms;
};

/* kv outlives the worker. */
enum td_status td_decode_worker_create(const struct td_decode_worker_options *o, struct td_kv_pages *kv,
                                       const struct td_decode_ports *ports, struct td_decode_worker **out);
void td_decode_worker_destroy(struct td_decode_worker *w); /* sends nothing; no step may be in flight that still runs */

/* --- events ------------------------------------------------------------------------------------------------ */
/* A router opened a stream. call goes with every send. NULL: out of memory. */
struct td_decode_stream *td_decode_worker_on_stream(struct td_decode_worker *w, void *call);
void td_decode_worker_on_command(struct td_decode_worker *w, struct td_decode_stream *s,
                                 const Tandem__V1__DecodeCommand *cmd);
void td_decode_worker_on_writable(struct td_decode_worker *w, struct td_decode_stream *s);
void td_decode_worker_on_stream_closed(struct td_decode_worker *w, struct td_decode_stream *s); /* s is gone */
void td_decode_worker_on_step(struct td_decode_worker *w, enum td_status st); /* the first of those in flight is done */
void td_decode_worker_on_peer_message(struct td_decode_worker *w, uint64_t from, uint8_t id, const void *data,
                                      size_t n);
void td_decode_worker_on_peer_lost(struct td_decode_worker *w, uint64_t prefill);
void td_decode_worker_on_peer_reachable(struct td_decode_worker *w, uint64_t prefill);

/* --- the operator's ---------------------------------------------------------------------------------------- */
/* New requests are refused; `drained` runs once the others ended and their news is on its way. */
void td_decode_worker_drain(struct td_decode_worker *w);
/* Ends every request as lost: its router goes on elsewhere. */
void td_decode_worker_end_all(struct td_decode_worker *w, enum td_status st, const char *why);
/* Ends every stream after what was sent. */
void td_decode_worker_close_streams(struct td_decode_worker *w);
const struct td_kv_prefix *td_decode_worker_prefix(const struct td_decode_worker *w); /* NULL: no cache */
void td_decode_worker_load(const struct td_decode_worker *w, Tandem__V1__Load *out);  /* all but last_step_age_us */
uint32_t td_decode_worker_n_requests(const struct td_decode_worker *w);
bool td_decode_worker_is_draining(const struct td_decode_worker *w);
void td_decode_worker_describe(const struct td_decode_worker *w, struct td_buf *json_out);

#endif
