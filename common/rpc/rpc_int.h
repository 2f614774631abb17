/* What the files of this folder share. Everything below belongs to the loop thread, except the inbox, which the pollers
 * fill.
 *
 * A completion travels: gRPC core -> poller thread (cq_next, nothing else) -> inbox -> loop thread, where rpc_tag.done
 * runs. A tag is in one place at a time, so an operation of each kind is in flight at most once per call. */
#ifndef TD_RPC_RPC_INT_H
#define TD_RPC_RPC_INT_H

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <pthread.h>

#include "common/base/list.h"
#include "common/rpc/rpc.h"

#define RPC_N_POLLERS        2u  /* one alone starves reads while writes complete (measured) */
#define RPC_N_SLOTS          64u /* calls that may arrive while the loop is busy before core queues them */
#define RPC_MAX_REPLY_BYTES  (4u << 20)
#define RPC_MAX_STATUS_BYTES 1024u /* of a status text; headers are limited to 16 KiB and escapes triple it */
#define RPC_STATUS_KEY       "tandem-status"
#define RPC_DETAILS_KEY      "grpc-status-details-bin"
#define RPC_REFLECTION       "grpc.reflection.v1.ServerReflection"
#define RPC_REFLECTION_ALPHA "grpc.reflection.v1alpha.ServerReflection" /* served for older tools, not listed */

/* An element of a grpc_arg array; core's key is not const but is not written. */
#define RPC_INT_ARG(k, v)                                                                                              \
    {                                                                                                                  \
        .type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)(k), .value.integer = (int)(v)                             \
    }

/* One operation in flight. done runs on the loop thread, once per start. */
struct rpc_tag {
    struct rpc_tag *next;
    void (*done)(struct rpc_tag *t, bool ok);
    struct td_rpc *rpc;
    bool ok;
};

/* The loop's mail. Its own allocation: it may still lie in the loop's queue when the td_rpc is gone. */
struct rpc_wake {
    struct td_mail mail;
    struct td_rpc *rpc; /* NULL: destroyed */
    bool is_posted;     /* inbox lock, until the pollers have ended */
};

/* A place for one call to arrive. */
struct rpc_slot {
    struct rpc_tag tag;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
};

struct td_rpc {
    uint32_t magic;
    struct td_loop *loop;
    struct td_rpc_options opt; /* zeros replaced by defaults */
    bool is_destroying, is_delivering;

    grpc_completion_queue *cq;
    pthread_t pollers[RPC_N_POLLERS];
    uint32_t n_pollers;
    uint32_t n_in_flight; /* tags given to core and not yet run */

    pthread_mutex_t inbox_lock;
    pthread_cond_t inbox_filled;
    struct rpc_tag *inbox_first, **inbox_last;
    struct rpc_wake *wake;

    struct td_loop_idle idle; /* starts the sends that the callbacks of one turn asked for */
    struct td_list dirty;     /* td_rpc_call.dirty_link: calls with something to start */
    struct td_list calls;     /* td_rpc_call.link: all */
    struct td_list channels;  /* td_rpc_channel.link */

    /* server.c */
    grpc_server *server;
    const struct td_rpc_method *methods;
    void *service;
    uint16_t port;
    uint32_t n_server_calls;
    struct rpc_slot *slots;
    struct rpc_tag shutdown_tag;
    struct td_timer grace;
    enum { RPC_NO_SERVER, RPC_SERVING, RPC_SHUTTING_DOWN, RPC_SHUT } server_state;
    void (*shutdown_done)(void *user);
    void *shutdown_user;
    struct td_mail shutdown_mail; /* only where there is nothing to wait for */
    bool is_shutdown_mail_posted;

    /* health.c */
    bool is_serving;
    struct td_list watchers; /* health_watch.link */
};

struct td_rpc_channel {
    struct td_rpc *rpc;
    struct td_list link;
    grpc_channel *channel;
    char *address;
    uint32_t n_calls;
    bool is_closed; /* freed with its last call */
};

/* A message or the end of the call, waiting until the one before it was taken by core. */
struct rpc_out {
    struct td_list link;
    grpc_byte_buffer *bytes;
    size_t n;
};

struct td_rpc_call {
    uint32_t magic;
    struct td_rpc *rpc;
    struct td_list link, dirty_link;
    grpc_call *call;
    bool is_server, is_builtin;
    const struct td_rpc_method *method; /* server; NULL: unknown path */
    struct td_rpc_channel *channel;     /* client */
    struct td_rpc_handlers h;
    void *user;
    uint64_t deadline_ns, timeout_ns; /* timeout as seen on arrival */
    char *peer;
    grpc_metadata_array metadata; /* server: request's; client: server's initial */
    char **metadata_text;         /* server: keys and values of metadata, made on first use */
    const ProtobufCMessageDescriptor *incoming;
    uint32_t max_incoming_bytes;

    struct rpc_tag read, send, end; /* end: RECV_CLOSE_ON_SERVER or RECV_STATUS_ON_CLIENT */
    uint32_t n_in_flight;

    /* reading */
    grpc_byte_buffer *arrived;
    uint64_t n_messages;
    bool is_read_started;
    struct td_timer first_wait; /* server: for the first message of a call without a deadline */

    /* sending */
    struct td_list out; /* rpc_out.link */
    struct rpc_out *sending;
    size_t queued_bytes;
    bool is_sending, has_sent_initial;
    bool wants_end, has_sent_end; /* server: status; client: half-close */
    bool is_end_done;             /* server: the status was taken by core */
    bool is_send_broken;
    bool is_cut; /* aborted or cancelled by us: nothing more is delivered but on_closed */
    enum td_status end_status;
    char *end_text; /* NULL: none */
    grpc_slice end_slice;
    grpc_metadata *md; /* client: request's; server: the trailers */
    size_t n_md;
    bool wait_for_ready;

    /* the end */
    bool is_end_received;  /* the end tag came back */
    bool is_closed;        /* on_closed ran */
    int was_cancelled;     /* server */
    grpc_status_code code; /* client */
    grpc_slice details;
    grpc_metadata_array trailing;
};

/* rpc.c */
bool rpc_start_batch(struct td_rpc_call *c, const grpc_op *ops, size_t n, struct rpc_tag *t);
void rpc_tag_begin(struct rpc_tag *t); /* before handing a tag to core; counts it */
void rpc_drain_until_idle(struct td_rpc *r);
uint64_t rpc_until_ns(gpr_timespec deadline); /* td_clock_ns time */
gpr_timespec rpc_timespec(uint64_t deadline_ns);

/* call.c */
struct td_rpc_call *rpc_call_create(struct td_rpc *r, grpc_call *call); /* takes over call, also on failure (NULL) */
void rpc_call_free(struct td_rpc_call *c);                              /* nothing of it may be in flight */
void rpc_call_mark_dirty(struct td_rpc_call *c);
void rpc_call_flush(struct td_rpc_call *c);
void rpc_call_begin_server(struct td_rpc_call *c);

/* accept.c: also what has the linker take that file, and with it our accept4. */
void rpc_accept_prepare(void);

/* server.c */
void rpc_server_call_gone(struct td_rpc *r);
void rpc_server_stop(struct td_rpc *r); /* for destroy: cancels, waits, frees */

/* client.c */
void rpc_channel_release(struct td_rpc_channel *ch); /* frees it once closed and without calls */

/* builtin.c: closed by path NULL; their service is the td_rpc. */
extern const struct td_rpc_method rpc_builtin_methods[];

/* health.c */
void rpc_health_check_open(struct td_rpc_call *c, void *service);
void rpc_health_watch_open(struct td_rpc_call *c, void *service);
void rpc_health_changed(struct td_rpc *r);

/* reflection.c */
void rpc_reflection_open(struct td_rpc_call *c, void *service);

/* details.c: packed, for RPC_DETAILS_KEY. text is clean UTF-8 of at most RPC_MAX_STATUS_BYTES. */
grpc_slice rpc_status_details(enum td_status st, const char *text);

/* status.c */
grpc_status_code rpc_status_to_grpc(enum td_status st);
/* What a client gets: by our own trailer (name, NULL if absent) when it fits the code, else by the code. */
enum td_status rpc_status_from_grpc(grpc_status_code code, const char *name);

#endif
