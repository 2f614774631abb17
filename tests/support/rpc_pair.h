/* A gRPC server and a client on one loop, for unit tests: both ends of every call record what happened to them, and a
 * test plays both sides. Messages are tandem.v1.DetokenizeRequest in both directions: token_ids[0] numbers them. */
#ifndef TESTS_SUPPORT_RPC_PAIR_H
#define TESTS_SUPPORT_RPC_PAIR_H

#include "common/base/clock.h"
#include "common/rpc/rpc.h"

#define RPC_PAIR_MAX_SERVED 512u
#define RPC_PAIR_LIMIT      65536u /* max_request_bytes of the methods */
#define RPC_PAIR_MAX_QUEUED 4096u  /* max_queued_bytes of both ends */
#define RPC_PAIR_UNARY      "/tandem.test.Echo/Unary"
#define RPC_PAIR_STREAM     "/tandem.test.Echo/Stream"
#define RPC_PAIR_REFUSE     "/tandem.test.Echo/Refuse" /* finished in on_open, never accepted: NO_PAGES "no room" */

struct rpc_pair;

struct rpc_end {
    struct rpc_pair *pair;
    struct td_rpc_call *call; /* NULL once closed */
    unsigned n_messages, n_half_closes, n_writable, n_closed;
    bool is_out_of_order; /* a message's number was not one more than the last one's */
    uint32_t last_number;
    char last_model[128];
    enum td_status st;
    char text[2048];
    bool does_echo;   /* server: sends each message back */
    bool does_finish; /* server: ends with OK at the first message (unary) or at the half-close (stream) */
    bool does_half_close_at_reply;
};

struct rpc_pair {
    struct td_loop *loop;
    struct td_rpc *server, *client;
    struct td_rpc_channel *channel;
    char address[64];
    struct rpc_end served[RPC_PAIR_MAX_SERVED]; /* in order of arrival */
    unsigned n_served, n_served_closed;
    bool next_echoes, next_finishes; /* for calls that arrive from now on */
    bool is_shut;
};

void rpc_pair_open(struct rpc_pair *p);
void rpc_pair_close(struct rpc_pair *p); /* server may be destroyed already (set NULL) */
void rpc_pair_serve(struct rpc_pair *p); /* a fresh server at p->address; "127.0.0.1:0" after open */
void rpc_pair_destroy_server(struct rpc_pair *p);
void rpc_pair_call(struct rpc_pair *p, const char *path, uint64_t deadline_ns, bool wait_for_ready, struct rpc_end *e);
enum td_status rpc_pair_send(struct td_rpc_call *c, uint32_t number, const char *model, size_t n_filler_ids);
extern const struct td_rpc_handlers rpc_pair_client_handlers;

uint64_t rpc_pair_in_ms(uint64_t ms); /* a deadline */

/* Turns the loop until cond holds; fails the test after 30 s. */
#define RPC_PAIR_UNTIL(p, cond)                                                                                        \
    do {                                                                                                               \
        struct rpc_pair_guard guard_;                                                                                  \
        rpc_pair_guard_start((p), &guard_, #cond);                                                                     \
        while (!(cond)) rpc_pair_guard_turn(&guard_);                                                                  \
        rpc_pair_guard_stop(&guard_);                                                                                  \
    } while (0)
/* Turns the loop for that long. */
void rpc_pair_for_ms(struct rpc_pair *p, uint64_t ms);

struct rpc_pair_guard {
    struct rpc_pair *pair;
    const char *what;
    struct td_timer timer;
    bool is_over;
};
void rpc_pair_guard_start(struct rpc_pair *p, struct rpc_pair_guard *g, const char *what);
void rpc_pair_guard_turn(struct rpc_pair_guard *g);
void rpc_pair_guard_stop(struct rpc_pair_guard *g);

#endif
