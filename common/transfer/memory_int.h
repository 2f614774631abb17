/* The in-process twin from inside. A *node* is one td_xfer: a process, as far as its peers can tell. What travels is
 * either an op, which belongs to the sender and ends with its request, or an arrival, which is on the wire: it belongs
 * to the node it goes to and outlives its sender, as bytes in a network do. */
#ifndef TD_TRANSFER_MEMORY_INT_H
#define TD_TRANSFER_MEMORY_INT_H

#include "common/base/bytes.h"
#include "common/transfer/memory.h"

#define MEMORY_MAGIC      0x6d656d31u
#define MEMORY_POOL_MAGIC 0x6d656d32u
#define MEMORY_PEER_MAGIC 0x6d656d33u

enum memory_kind { MEMORY_PUT, MEMORY_FLUSH, MEMORY_MESSAGE, MEMORY_COPY /* a message once more */ };

struct memory_node {
    uint32_t magic;
    uint64_t id;         /* unique in this process; its address */
    struct td_list link; /* in the registry */
    struct td_env *env;
    uint64_t seed, n_random;
    struct td_xfer_memory_trouble trouble;
    uint64_t incarnation;
    struct td_xfer_handlers handlers;
    void *user;
    td_xfer_memory_land_fn *watch;
    void *watch_user;
    struct td_list pools, peers;
    struct td_list canceled; /* ops of closed peers, waiting for their done */
    struct td_list arrivals; /* on the wire to us */
    struct td_list parked;   /* messages for us while we are paused, in order */
    bool is_dead, is_paused, is_destroying;
    struct td_buf address;
    struct td_xfer_stats stats;
};

struct memory_pool {
    uint32_t magic;
    struct memory_node *node;
    struct td_list link;
    uint64_t id; /* unique in this process */
    uint8_t *base;
    size_t n_bytes;
    bool is_ours; /* free base */
    struct td_buf key;
};

struct memory_peer {
    uint32_t magic;
    struct memory_node *node;
    struct td_list link;
    uint64_t id, target, incarnation;
    unsigned n_pools;
    uint64_t pools[TD_XFER_POOLS_MAX], n_bytes[TD_XFER_POOLS_MAX];
    struct td_list ops; /* in the order posted */
    uint64_t n_landing; /* puts that were done here and have not landed there */
    struct td_timer notice;
    bool is_lost;
    bool is_notice_held; /* came due while we were paused */
};

struct memory_op {
    struct td_list link;
    enum memory_kind kind;
    struct memory_node *node;
    struct memory_peer *peer; /* NULL: closed, CANCELED is on its way */
    struct td_xfer_req *req;
    struct td_timer timer;
    bool is_due;  /* a flush whose own delay has passed; an op that came due while we were paused */
    bool is_hung; /* to the dead: waits until that is noticed */
    unsigned pool, n_segs;
    struct td_xfer_seg segs[];
};

struct memory_arrival {
    struct td_list link;
    enum memory_kind kind;
    struct memory_node *to;
    uint64_t from_node, from_peer, from_incarnation;
    struct td_timer timer;
    uint64_t pool, offset; /* of a put */
    bool is_counted;       /* in the peer's n_landing */
    uint8_t message_id;
    size_t n;
    uint8_t data[];
};

static inline struct memory_node *memory_node_of(const struct td_xfer *x)
{
    struct memory_node *n = (struct memory_node *)(uintptr_t)x;
    TD_MAGIC_CHECK(n, MEMORY_MAGIC);
    return n;
}
static inline struct memory_peer *memory_peer_of(struct td_xfer_peer *p)
{
    struct memory_peer *q = (struct memory_peer *)(void *)p;
    TD_MAGIC_CHECK(q, MEMORY_PEER_MAGIC);
    return q;
}

/* memory.c */
extern struct td_list td_memory_nodes; /* the registry: every node of this process, dead ones too */
struct memory_node *td_memory_find(uint64_t id);
struct memory_peer *td_memory_find_peer(uint64_t node, uint64_t peer);
bool td_memory_chance(struct memory_node *n, uint32_t ppm);
uint64_t td_memory_between(struct memory_node *n, uint64_t min, uint64_t max);
void td_memory_free_peer(struct memory_peer *p);

/* memory_wire.c */
enum td_status td_memory_put(struct td_xfer_peer *p, unsigned pool, const struct td_xfer_seg *segs, unsigned n_segs,
                             struct td_xfer_req *req);
enum td_status td_memory_flush(struct td_xfer_peer *p, struct td_xfer_req *req);
enum td_status td_memory_send(struct td_xfer_peer *p, uint8_t id, const void *data, size_t n);
void td_memory_watch(struct memory_peer *p);        /* its target is dead: notice it in a while */
void td_memory_cancel(struct memory_peer *p);       /* its ops end with CANCELED, later */
void td_memory_cancel_now(struct memory_node *n);   /* all ops of all peers, before this returns */
void td_memory_lose_wire(struct memory_node *dead); /* decides what of its puts and messages still arrives */
void td_memory_drop(struct memory_node *n);         /* everything on the wire to it */
void td_memory_resume(struct memory_node *n);       /* what waited while it was paused */
void td_memory_free_ops(struct td_list *ops);       /* without their done */

#endif
