/* The UCX transfer from inside: what the loop thread and the transfer thread share. Each field belongs to one of the
 * two, or is handed over through the two queues (commands one way, events the other); nothing else is shared.
 *
 *   loop thread                                      transfer thread (the only one that calls ucp_*)
 *   put, flush, send, peer_close  --- commands --->  posts to UCX, counts its completions
 *   done, on_message, on_lost     <-- events ------  ops that ended, messages, losses
 *
 * A command is an op; it comes back as the same op, and the loop thread reuses it. */
#ifndef TD_TRANSFER_UCX_INT_H
#define TD_TRANSFER_UCX_INT_H

#include <pthread.h>
#include <semaphore.h>
#include <ucp/api/ucp.h>

#include "common/base/bytes.h"
#include "common/transfer/card_int.h"
#include "common/transfer/liveness_int.h"
#include "common/transfer/xfer.h"

#define UCX_MAGIC      0x75637821u
#define UCX_POOL_MAGIC 0x75637822u
#define UCX_PEER_MAGIC 0x75637823u

/* What a queued message may cost while the loop (received) or the peer (sent) is behind: beyond it, received ones are
 * dropped and counted, sent ones refused with BUSY. */
#define UCX_BACKLOG_MAX_BYTES (64u << 20)
/* Our active messages as UCX numbers them; a message's own id is in its header. */
#define UCX_AM_MESSAGE 7u
#define UCX_AM_CHUNK   8u
#define UCX_AM_ACK     9u

enum ucx_kind {
    UCX_PUT,
    UCX_FLUSH,
    UCX_SEND,
    UCX_CLOSE, /* as a command: close the peer; as an event: it is closed */
    UCX_CALL,  /* run a function on the transfer thread while the loop thread waits */
    UCX_MESSAGE,
    UCX_LOST,
};

/* First member of everything that travels through a queue. */
struct ucx_item {
    struct td_list link;
    enum ucx_kind kind;
};

/* Headers of our active messages, as they lie on the wire (x86-64 and aarch64 alike: little-endian, no padding). */
struct ucx_header {
    uint32_t magic;
    uint8_t id, version;
    uint16_t zero;
    uint64_t incarnation;
};
struct ucx_chunk_header { /* write this into that pool */
    uint32_t magic, version;
    uint64_t secret, offset; /* of the pool, 0: only acknowledge; in it */
    uint64_t ticket;         /* comes back in the acknowledgement */
};
struct ucx_ack_header {
    uint32_t magic, version;
    uint64_t ticket;
    uint64_t is_refused; /* no such pool, or outside of it */
};
#define UCX_HEADER_MAGIC   0x4d414454u /* "TDAM" */
#define UCX_HEADER_VERSION 1u

struct ucx_op {
    struct ucx_item item;
    struct ucx_peer *peer;
    struct td_xfer_req *req; /* NULL: a message */
    struct td_xfer_seg *segs;
    unsigned n_segs, cap_segs, pool;
    unsigned n_left;         /* UCX's completions still to come, and one for the posting itself */
    bool is_waiting;         /* a flush, for emulated puts before it: counts in n_left */
    struct ucx_flush *flush; /* UCX's end of a flush */
    /* an emulated put */
    uint64_t ticket;
    unsigned next_seg; /* what goes out next */
    uint64_t next_byte;
    unsigned n_unacked; /* chunks that the peer has not confirmed */
    bool is_all_sent;
    struct td_list landed_link; /* a put by the device: in x->landed */
    enum td_status status;
    struct ucx_header header; /* of a message */
    void *data;
    size_t n;
};

struct ucx_message {
    struct ucx_item item;
    struct ucx *x;
    uint64_t from;
    uint8_t id;
    size_t n;
    uint8_t data[];
};

struct ucx_call {
    struct ucx_item item;
    void (*run)(struct ucx_call *c);
    struct ucx *x;
    sem_t finished;
};

struct ucx_pool {
    uint32_t magic;
    struct ucx *x;
    struct td_list link;     /* x->pools; loop thread */
    struct td_list map_link; /* x->mapped; transfer thread */
    void *base;
    size_t n_bytes;
    enum td_pool_kind kind;
    uint64_t secret;
    ucp_mem_h memh;
    struct td_buf key;
};

struct ucx_remote {
    uint64_t base, n_bytes, secret;
    enum td_pool_kind kind;
    ucp_rkey_h rkey;
    /* How puts go there; constant after open. */
    char transport[48];
    bool is_one_sided;
    bool is_emulated; /* by us (ucx_emulate.c) */
    uint8_t *here;    /* its base as mapped here, for puts by our own stores (ucx_mapped.c); NULL: not */
};

struct ucx_peer {
    uint32_t magic;
    struct ucx *x;
    uint64_t incarnation;
    struct ucx_remote pools[TD_XFER_POOLS_MAX];
    unsigned n_pools;
    /* loop thread */
    struct td_list link;     /* x->peers */
    unsigned n_open;         /* ops posted and not yet back */
    size_t send_bytes;       /* of those, in messages */
    bool is_lost, is_closed; /* the loss has arrived here; the owner has let go */
    bool is_loss_told;       /* on_lost ran */
    struct ucx_op close_op;
    /* transfer thread */
    struct td_list live_link; /* x->live */
    ucp_ep_h ep;
    struct td_list ops;    /* posted, not ended; in order */
    unsigned n_wire;       /* what UCX still holds of ours without an op: chunks, flushes */
    unsigned n_window;     /* chunks that are not acknowledged */
    bool is_tcp;           /* it has lanes over TCP */
    bool is_all_mapped;    /* its pools: UCX has no part in puts */
    uint64_t died_ns;      /* its process ended, and UCX has not noticed yet; 0: no */
    int pidfd;             /* -1: not watched */
    bool is_watched;       /* pidfd is in the epoll set */
    bool is_failed;        /* its process is gone */
    bool is_closing;       /* the owner asked */
    bool is_cutting;       /* forced close under way or done */
    bool is_cut;           /* the endpoint is gone */
    uint64_t hello_ticket; /* of the first thing sent, empty; 0: it was acknowledged, so both ends are introduced */
    bool is_unflushed;     /* messages were sent since the last flush */
    bool is_draining;      /* the flush before the close is under way */
    bool is_finished;      /* UCX_LOST or UCX_CLOSE was sent as an event */
    uint64_t drain_until_ns;
    struct ucx_item lost;
};

/* Events for the loop. Outlives the ucx object while its mail is posted. */
struct ucx_mailbox {
    struct td_mail mail;
    pthread_mutex_t lock;
    struct td_list events;
    bool is_posted;
    unsigned n_deliveries;        /* loop thread: nested in deliver, so it must stay */
    _Atomic size_t backlog_bytes; /* of messages received and not yet delivered */
    struct ucx *x;                /* loop thread; NULL: destroyed */
    struct td_list orphan_link;
};

struct ucx {
    uint32_t magic;
    struct td_loop *loop;
    struct td_xfer_handlers handlers;
    void *user;
    uint64_t incarnation;
    uint32_t keepalive_ms;
    struct td_device *device; /* NULL: none */
    bool is_mapping_off;
    char *tls;
    const char *tls_left;  /* with tls NULL: what is left after too little shared memory; NULL: all */
    struct td_buf address; /* the card; constant after open */
    /* loop thread */
    struct ucx_mailbox *mailbox;
    struct td_list inbox; /* taken from the mailbox, being delivered */
    struct td_list free_ops, peers, pools;
    bool is_destroying;
    pthread_t thread;
    bool has_thread;
    struct td_xfer_stats stats;
    /* commands */
    pthread_mutex_t lock;
    struct td_list commands;
    struct td_list landed; /* puts that the device has done, from a thread of its own */
    bool is_stopping;
    int wake_fd;
    /* transfer thread */
    ucp_context_h context;
    ucp_worker_h worker;
    int epoll_fd, ucx_fd;
    struct td_list live;    /* peers with an endpoint, or whose end has not been told */
    struct td_list out;     /* events of this round */
    struct td_list mapped;  /* pools */
    struct td_stream *side; /* the device's, for puts into mapped memory; NULL: no device */
    struct td_piece *pieces;
    unsigned cap_pieces;
    bool has_shared_memory; /* the context has sysv or posix */
    uint64_t last_ticket;
    struct ucx_peer
        self; /* a way to ourselves through the shared queue, to find out whether it still moves; ep NULL: none */
    uint64_t probe_due_ns;
    unsigned n_probe_waits;
    _Atomic bool is_deaf;
    _Atomic uint64_t n_bad_messages, n_dropped_messages;
};

static inline struct ucx *ucx_of(const struct td_xfer *x)
{
    struct ucx *u = (struct ucx *)(uintptr_t)x;
    TD_MAGIC_CHECK(u, UCX_MAGIC);
    return u;
}

/* ucx_status.c */
enum td_status td_ucx_status(ucs_status_t s);
enum td_status td_ucx_err(struct td_err *err, ucs_status_t s, const char *what);

/* ucx_config.c */
void td_ucx_quieten(void); /* no signal handlers, no printing of its own; once per process is enough */
enum td_status td_ucx_config(const struct ucx *x, ucp_config_t **out, struct td_err *err);

/* ucx.c */
void td_ucx_command(struct ucx *x, struct ucx_item *item);        /* loop thread */
void td_ucx_call(struct ucx *x, struct ucx_call *c);              /* loop thread; waits */
void td_ucx_wake(struct ucx *x);                                  /* any thread */
void td_ucx_event(struct ucx *x, struct ucx_item *item);          /* transfer thread */
bool td_ucx_backlog_take(struct ucx *x, size_t n_bytes);          /* transfer thread; false: too much is waiting */
void td_ucx_backlog_give(struct ucx_mailbox *mb, size_t n_bytes); /* any thread */

/* ucx_pool.c */
enum td_status td_ucx_pool_create(struct td_xfer *x, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err);
enum td_status td_ucx_pool_register_device(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                           struct td_err *err);
enum td_status td_ucx_pool_register(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                    struct td_err *err);
void td_ucx_pool_destroy(struct td_xfer_pool *p);
void *td_ucx_pool_base(struct td_xfer_pool *p);
const void *td_ucx_pool_key(struct td_xfer_pool *p, size_t *n_out);
void td_ucx_pool_unmap(struct ucx_pool *p); /* transfer thread */
void td_ucx_free_pool(struct ucx_pool *p);  /* its storage */

/* ucx_probe.c: transfer thread */
void td_ucx_probe_open(struct ucx *x, const struct td_card_address *ours);
void td_ucx_probe_start(struct ucx *x);
int td_ucx_probe_round(struct ucx *x, uint64_t now_ns); /* in how many ms to look again; -1: nothing to look for */

/* ucx_peer.c: loop side */
enum td_status td_ucx_peer_open(struct td_xfer *x, uint64_t incarnation, const void *address, size_t n_address,
                                const struct td_xfer_remote *pools, unsigned n_pools, struct td_xfer_peer **out,
                                struct td_err *err);
void td_ucx_peer_close(struct td_xfer_peer *p);
enum td_status td_ucx_put(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                          struct td_xfer_req *req);
enum td_status td_ucx_flush(struct td_xfer_peer *p, struct td_xfer_req *req);
enum td_status td_ucx_send(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n);
const char *td_ucx_peer_transport(struct td_xfer_peer *p);
bool td_ucx_peer_is_one_sided(struct td_xfer_peer *p);
void td_ucx_peer_deliver(struct ucx *x, struct ucx_item *item); /* an op, a loss or a close has come back */
void td_ucx_free_peer(struct ucx_peer *p);                      /* its storage; transfer side is through with it */
void td_ucx_free_ops(struct ucx *x);

/* ucx_wire.c: transfer side of peers */
enum td_status td_ucx_wire_open(struct ucx_peer *p, const struct td_card_address *a, const struct td_card_key *keys,
                                struct td_err *err);
void td_ucx_wire_post(struct ucx_op *op); /* put, flush, send, close */
/* Failed and closing peers go one step on. Returns in how many ms the next step may be due, -1: when something comes.
 */
int td_ucx_wire_round(struct ucx *x, bool is_stopping);
void td_ucx_wire_died(struct ucx_peer *p); /* its process ended */
void td_ucx_wire_abandon(struct ucx *x);   /* the worker is gone: everything left ends with CANCELED */

void td_ucx_wire_step(struct ucx_op *op, ucs_status_t s); /* one of the op's completions has come */
void td_ucx_wire_settle(struct ucx_op *op);               /* its last acknowledgement has come, or none will */

/* ucx_emulate.c: transfer thread */
void td_ucx_emulate_hello(struct ucx_peer *p);
void td_ucx_emulate_put(struct ucx_op *op);
bool td_ucx_emulate_is_over(const struct ucx_op *op); /* sent and acknowledged, or failed; true for other ops */
void td_ucx_emulate_see_written(void); /* any thread, before a message is delivered: what it tells of is there */
enum td_status td_ucx_emulate_listen(struct ucx *x, struct td_err *err);

/* ucx_mapped.c */
enum td_status td_ucx_mapped_open(struct ucx *x, struct td_err *err);  /* transfer thread, before UCX */
void td_ucx_mapped_close(struct ucx *x);                               /* waits for what the device still has of ours */
bool td_ucx_mapped_suits(const struct ucx *x, enum td_pool_kind kind); /* stores of ours may go to such a pool */
void td_ucx_mapped_put(struct ucx_op *op);
void td_ucx_mapped_landed(struct td_list *landed); /* transfer thread: what was in x->landed */

/* ucx_path.c: transfer thread */
void td_ucx_find_paths(struct ucx_peer *p);
bool td_ucx_has_shared_memory(ucp_context_h c);
bool td_ucx_has_device_memory(ucp_context_h c); /* and peers on this machine can write it */

/* ucx_message.c */
enum td_status td_ucx_message_listen(struct ucx *x, struct td_err *err);

#endif
