/* Moving bytes between processes, one-sided: the contract. Two implementations: ucx.c (real) and memory.c (in-process, for
 * tests: seeded delays, drops of peers, reorders).
 *
 * Words: a *pool* is registered memory that peers may write; a *peer* is the way to one life of another process, made from
 * that process's address; a *put* writes segments into a peer's pool; a *flush* tells when all earlier puts to that peer are
 * visible there; a *message* is a small active message that arrives in order with other messages, but not with puts:
 * flush first.
 *
 * Threads: every function here is called on the loop thread, every callback runs on the loop thread; a thread of the
 * transfer's own drives the network. No function blocks except open and destroy.
 * Requests live in the caller's object, are used for one operation at a time, and their done runs exactly once, also after
 * an abort or the loss of the peer (CANCELED, PEER_LOST), never inside the call that posted it. The source bytes of a put
 * must stay untouched until its done. */
#ifndef TD_TRANSFER_XFER_H
#define TD_TRANSFER_XFER_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/loop/loop.h"

struct td_xfer;
struct td_xfer_pool;
struct td_xfer_peer;

struct td_xfer_req {
    void (*done)(struct td_xfer_req *req, enum td_status st);
    struct td_mail mail; /* the implementation's */
    struct td_list link;
    void *impl[4];
    uint64_t impl_n[2];
    enum td_status status;
};

struct td_xfer_seg {
    const void *src;      /* in one of our pools (or any host memory) */
    uint64_t dst_offset;  /* into the peer's pool */
    uint64_t n_bytes;
};

/* A pool of the peer's, as its descriptor says it. */
struct td_xfer_remote {
    uint64_t base;
    const void *key;
    size_t n_key;
};

struct td_xfer_handlers {
    /* A message arrived. from: the peer as known here by its incarnation, 0 if it did not introduce itself. data is borrowed. */
    void (*on_message)(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user);
    /* The peer's process is known dead (endpoint failed). Once per peer. Its requests have had their done. */
    void (*on_lost)(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user);
};

struct td_xfer_options {
    const char *transport;       /* "ucx" | "memory" */
    uint64_t incarnation;        /* ours: goes with every message, so that the receiver knows who speaks */
    const char *tls;             /* UCX_TLS or NULL: shm and tcp (and cuda) as available */
    uint32_t keepalive_ms;       /* 0: 200; how soon a dead peer is noticed on shared memory */
};

struct td_xfer_ops {
    const char *name;
    enum td_status (*open)(struct td_loop *loop, const struct td_xfer_options *o, const struct td_xfer_handlers *h,
                           void *user, struct td_xfer **out, struct td_err *err);
    void (*destroy)(struct td_xfer *x); /* all peers and pools go; outstanding requests get CANCELED first */
    /* Allocates a pool that peers can write directly (n_bytes, zeroed). */
    enum td_status (*pool_create)(struct td_xfer *x, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err);
    /* Registers device memory that exists (CUDA); UNSUPPORTED where the transport cannot. */
    enum td_status (*pool_register)(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err);
    void (*pool_destroy)(struct td_xfer_pool *p);
    void *(*pool_base)(struct td_xfer_pool *p);
    /* What a peer needs: our address, and a pool's key. Borrowed until destroy. */
    const void *(*address)(struct td_xfer *x, size_t *n_out);
    const void *(*pool_key)(struct td_xfer_pool *p, size_t *n_out);
    /* The way to one life of a process. keys: its pools in a fixed order, with their base addresses there. No keys: messages only. */
    enum td_status (*peer_open)(struct td_xfer *x, uint64_t incarnation, const void *address, size_t n_address,
                                const struct td_xfer_remote *pools, unsigned n_pools, struct td_xfer_peer **out,
                                struct td_err *err);
    /* Outstanding requests get CANCELED; on_lost is not called any more. */
    void (*peer_close)(struct td_xfer_peer *p);
    enum td_status (*put)(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                          struct td_xfer_req *req);                /* segs are copied */
    enum td_status (*flush)(struct td_xfer_peer *p, struct td_xfer_req *req);
    enum td_status (*send)(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n); /* copied; loss shows in on_lost */
    /* Name of the transport that puts to this peer use ("posix", "tcp", "cuda_ipc", "memory"); "?" until the first put. */
    const char *(*peer_transport)(struct td_xfer_peer *p);
    bool (*peer_is_one_sided)(struct td_xfer_peer *p); /* false: UCX emulates puts in software there */
};
extern const struct td_xfer_ops td_xfer_ucx, td_xfer_memory;

#endif
