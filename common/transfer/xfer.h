/* Moving bytes between processes, one-sided: the contract. Two implementations: ucx.c (real) and memory.c (in-process,
 * for tests: seeded delays, losses, reorders and deaths; see memory.h).
 *
 * Words: a *pool* is registered memory that peers may write; a *peer* is the way to one life of another process, made
 * from that process's address; a *put* writes segments into a peer's pool; a *flush* tells when all earlier puts to
 * that peer are visible there; a *message* is a small active message that arrives in order with other messages, but not
 * with puts: flush first. A peer's pool may be *mapped*, its memory reachable here by address: puts there are stores of
 * ours, on a device one kernel a put, and messages go another way.
 *
 * Threads: every function here is called on the loop thread, every callback runs on the loop thread; a thread of the
 * transfer's own drives the network. open, destroy and the pool and peer_open functions may wait for that thread
 * (microseconds; a mapping of device memory, some milliseconds); put, flush, send and peer_close never wait.
 *
 * Requests live in the caller's object, are used for one operation at a time, and their done runs exactly once, also
 * after a close or the loss of the peer (CANCELED, PEER_LOST), never inside the call that posted it. A call that does
 * not return OK posted nothing, and its done does not run. The source bytes of a put must stay untouched until its
 * done.
 *
 * Dead or silent: a peer whose process is gone is lost (on_lost); a peer that is merely stopped or hung is not, and its
 * requests wait. Deadlines are the caller's. */
#ifndef TD_TRANSFER_XFER_H
#define TD_TRANSFER_XFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/list.h"
#include "common/base/status.h"
#include "common/loop/loop.h"

struct td_device;
struct td_xfer;
struct td_xfer_pool;
struct td_xfer_peer;

enum {
    TD_XFER_MESSAGE_MAX = 1 << 20,  /* bytes; send refuses more with TOO_LARGE, a receiver drops and counts more */
    TD_XFER_POOLS_MAX = 16,         /* per peer */
    TD_XFER_ADDRESS_MAX = 64 << 10, /* bytes of an address or a key: anything longer is not ours */
};

struct td_xfer_req {
    void (*done)(struct td_xfer_req *req, enum td_status st);
    struct td_mail mail; /* from here on: the implementation's */
    struct td_list link;
    void *impl[4];
    uint64_t impl_n[2];
    enum td_status status;
};

struct td_xfer_seg {
    const void *src;     /* in one of our pools (or any host memory) */
    uint64_t dst_offset; /* into the peer's pool */
    uint64_t n_bytes;
};

/* A pool of the peer's, as its descriptor says it. */
struct td_xfer_remote {
    uint64_t base;
    const void *key;
    size_t n_key;
};

struct td_xfer_handlers {
    /* A message arrived. from: the sender's incarnation as its message claims it (0: it did not introduce itself);
     * nothing proves it. data is borrowed. n and the bytes are whatever the peer sent, at most TD_XFER_MESSAGE_MAX. */
    void (*on_message)(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user);
    /* The peer's process is known dead (endpoint failed), or, over TCP, it has closed its end for good: either way no
     * put of it arrives any more, but for bytes that a network still carries. Once per peer. Its requests have had
     * their done. The peer stays the caller's until peer_close (which may be called from here); put, flush and send to
     * it say PEER_LOST. */
    void (*on_lost)(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user);
};

struct td_xfer_options {
    const char *transport;    /* "ucx" | "memory"; for td_xfer_find */
    uint64_t incarnation;     /* ours: goes with every message, so that the receiver knows who speaks */
    const char *tls;          /* UCX_TLS; NULL or "": shm and tcp (and cuda) as available */
    struct td_device *device; /* the one that pools may lie on; outlives the transfer. NULL: none */
    bool is_mapping_off;      /* UCX's puts also where a peer's memory is mapped here */
    uint32_t keepalive_ms;    /* 0: 200; how soon a dead peer is noticed on shared memory where nothing tells sooner */
};

/* What this process's end has seen; counters since open. */
struct td_xfer_stats {
    uint64_t n_puts, n_put_segs, put_bytes;
    uint64_t n_sent, n_received;
    uint64_t n_bad_messages;     /* dropped: not from Tandem, or too long */
    uint64_t n_dropped_messages; /* dropped: no memory, or the loop is too far behind */
    uint64_t n_peers_lost;
    /* No message comes through shared memory any more: a peer died in the very middle of writing one into the queue
     * that all of them share. Nothing but a new process helps. Found out within two seconds of that peer's loss. */
    bool is_deaf;
};

struct td_xfer_ops {
    const char *name;
    enum td_status (*open)(struct td_loop *loop, const struct td_xfer_options *o, const struct td_xfer_handlers *h,
                           void *user, struct td_xfer **out, struct td_err *err);
    /* All peers and pools go; outstanding requests get CANCELED first, from inside this call; no callback runs after
     * it. Messages already sent are given a moment to leave (200 ms at most, for a peer that does not answer). NULL is
     * fine. */
    void (*destroy)(struct td_xfer *x);
    /* Allocates a pool that peers can write directly (n_bytes, zeroed). */
    enum td_status (*pool_create)(struct td_xfer *x, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err);
    /* Registers memory that exists (CUDA; host memory too, but then puts are emulated); UNSUPPORTED where the transport
     * cannot. */
    enum td_status (*pool_register)(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                    struct td_err *err);
    /* A device's memory, for peers to write there; UNSUPPORTED where the transport does not reach it. */
    enum td_status (*pool_register_device)(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                           struct td_err *err);
    void (*pool_destroy)(struct td_xfer_pool *p);
    void *(*pool_base)(struct td_xfer_pool *p);
    /* What a peer needs: our address, and a pool's key (which also says its size). Borrowed until destroy. */
    const void *(*address)(struct td_xfer *x, size_t *n_out);
    const void *(*pool_key)(struct td_xfer_pool *p, size_t *n_out);
    /* The way to one life of a process. keys: its pools in a fixed order, with their base addresses there. No keys:
     * messages only. INVALID: an address or key is damaged; UNSUPPORTED: no transport in common; PEER_LOST: that
     * process is gone. */
    enum td_status (*peer_open)(struct td_xfer *x, uint64_t incarnation, const void *address, size_t n_address,
                                const struct td_xfer_remote *pools, unsigned n_pools, struct td_xfer_peer **out,
                                struct td_err *err);
    /* Outstanding requests get CANCELED (their done runs later, from the loop); on_lost is not called any more. The
     * handle is gone after this. Messages sent before are given a moment to leave. */
    void (*peer_close)(struct td_xfer_peer *p);
    /* segs are copied. n_segs 0 is done at once. INVALID: no such pool, or a segment leaves the peer's pool. */
    enum td_status (*put)(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                          struct td_xfer_req *req);
    enum td_status (*flush)(struct td_xfer_peer *p, struct td_xfer_req *req);
    /* data is copied; loss shows in on_lost. BUSY: 64 MiB of messages wait for this peer to read. */
    enum td_status (*send)(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n);
    /* How puts to this peer's first pool go: a transport of UCX's ("posix", "sysv", "tcp", "cuda_ipc"), with " mapped"
     * behind it where they are stores of ours; "memory"; "?" without pools. */
    const char *(*peer_transport)(struct td_xfer_peer *p);
    /* Puts into all of its pools need nothing of its processor. false: emulated in software there; done is as late as
     * flush. */
    bool (*peer_is_one_sided)(struct td_xfer_peer *p);
    void (*stats)(const struct td_xfer *x, struct td_xfer_stats *out);
};
extern const struct td_xfer_ops td_xfer_ucx, td_xfer_memory;

/* By name ("ucx", "memory"); NULL: no such transport. */
const struct td_xfer_ops *td_xfer_find(const char *name);

#endif
