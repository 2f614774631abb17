/* gRPC for daemons and tools: unary, streaming both ways, deadlines, cancellation, metadata, limits, health, graceful
 * shutdown. gRPC core is seen only in this folder. Two poller threads turn completions into mail; every callback here
 * runs on the loop thread, every function is called on the loop thread. Messages are protobuf-c structs.
 *
 * Server: a daemon brings a table of methods. Client: open a channel, start calls on it. Both ends of a call get the
 * same struct of callbacks, and on_closed is always the last, exactly once. */
#ifndef TD_RPC_RPC_H
#define TD_RPC_RPC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/loop/loop.h"

struct td_rpc;         /* the process's gRPC: pollers, server, channels */
struct td_rpc_call;    /* one call, at either end */
struct td_rpc_channel; /* connection to one address */

/* What happens to a call. Unset callbacks are allowed except on_closed. The receiver of on_message borrows msg for the
 * call of the callback; all string fields of msg are valid UTF-8. After td_rpc_finish, td_rpc_abort or td_rpc_cancel
 * only on_closed comes. */
struct td_rpc_handlers {
    void (*on_message)(struct td_rpc_call *c, const ProtobufCMessage *msg);
    /* Server: the client sends no more. If it sent no message at all and this is unset, the call ends as INVALID. */
    void (*on_half_close)(struct td_rpc_call *c);
    void (*on_writable)(struct td_rpc_call *c); /* the queue of unsent messages fell to zero */
    /* Server: status OK if we finished it (with whatever status), CANCELED if the client left or cancelled, DEADLINE if
     * its deadline passed, the status of td_rpc_abort; INVALID or TOO_LARGE if rpc refused a message of the client.
     * Client: what the server said, or PEER_LOST, DEADLINE, CANCELED, PROTOCOL (a reply cannot be decoded); text is the
     * server's message, "" if none. The call object is freed after this returns. */
    void (*on_closed)(struct td_rpc_call *c, enum td_status st, const char *text);
};

struct td_rpc_method {
    const char *path; /* "/tandem.v1.Inference/Generate" */
    const ProtobufCMessageDescriptor *request, *reply;
    uint32_t max_request_bytes; /* per message, decompressed; a larger one ends the call with RESOURCE_EXHAUSTED */
    /* A call arrived; its deadline and metadata are known. Sets user and handlers with td_rpc_call_accept, or refuses
     * with td_rpc_finish (then no callback follows unless it was accepted before). */
    void (*on_open)(struct td_rpc_call *c, void *service);
    bool takes_stream; /* client may send many messages; otherwise a second one ends the call with INVALID_ARGUMENT */
};

struct td_rpc_options {
    uint32_t keepalive_ms;         /* 0: 10000 */
    uint32_t keepalive_timeout_ms; /* 0: 5000 */
    uint32_t max_queued_bytes;     /* unsent bytes per call before td_rpc_send says BUSY; 0: 1 MiB */
    /* A call without a deadline must bring its first message within this, or ends as DEADLINE; 0: 30000. */
    uint32_t first_message_ms;
};

enum td_status td_rpc_create(struct td_loop *loop, const struct td_rpc_options *o, struct td_rpc **out);
/* After td_rpc_shutdown's callback (or when no server was started). Cancels what is left: the on_closed of calls still
 * open run inside this function; blocks until the pollers ended. NULL is fine. Not from inside a callback of this r. */
void td_rpc_destroy(struct td_rpc *r);

/* Listens on "host:port"; port 0 picks a free one. methods (closed by path NULL) and service outlive r. The health
 * service answers by itself: SERVING for "" and every service in methods while td_rpc_set_serving(true). May be called
 * once. */
enum td_status td_rpc_serve(struct td_rpc *r, const char *address, const struct td_rpc_method *methods, void *service,
                            struct td_err *err);
uint16_t td_rpc_port(const struct td_rpc *r);
void td_rpc_set_serving(struct td_rpc *r, bool is_serving); /* starts false */
/* The port closes at once; running calls go on for at most grace_ms, then are cancelled; done runs once all ended.
 * Again while it runs: only shortens the grace, the first done counts. */
void td_rpc_shutdown(struct td_rpc *r, uint32_t grace_ms, void (*done)(void *user), void *user);

/* --- a call, either end ------------------------------------------------------------------------------------ */
void td_rpc_call_accept(struct td_rpc_call *c, const struct td_rpc_handlers *h,
                        void *user); /* server, inside on_open */
void *td_rpc_call_user(const struct td_rpc_call *c);
uint64_t td_rpc_call_deadline_ns(const struct td_rpc_call *c); /* td_clock_ns time; TD_NEVER_NS: none */
const char *td_rpc_call_metadata(const struct td_rpc_call *c, const char *key); /* server: request's; NULL: absent */
const char *td_rpc_call_peer(const struct td_rpc_call *c);
/* Packs now; queued and sent in order. BUSY: over max_queued_bytes (the message is not queued). CANCELED: call is
 * ending. */
enum td_status td_rpc_send(struct td_rpc_call *c, const ProtobufCMessage *msg);
uint64_t td_rpc_queued_bytes(const struct td_rpc_call *c);
/* Server: ends the call after everything queued. text may be NULL. on_closed follows. Further sends are refused.
 * An INVALID text that begins with the field's path ("sampling.top_p: is 3, ...") names it in the status details too.
 */
void td_rpc_finish(struct td_rpc_call *c, enum td_status st, const char *text);
void td_rpc_half_close(struct td_rpc_call *c); /* client: after everything queued */
void td_rpc_cancel(struct td_rpc_call *c);     /* client; on_closed follows */
/* Either end: ends the call now, without waiting for what is queued (a peer that does not read would hold it up). A
 * client sees st and text; our on_closed follows with the same. For a client that reads too slowly, a peer that breaks
 * the rules. */
void td_rpc_abort(struct td_rpc_call *c, enum td_status st, const char *text);

/* --- client ------------------------------------------------------------------------------------------------ */
enum td_status td_rpc_channel_open(struct td_rpc *r, const char *address, struct td_rpc_channel **out);
void td_rpc_channel_close(struct td_rpc_channel *ch); /* its calls are cancelled; NULL is fine */
struct td_rpc_metadata {
    const char *key, *value;
};
/* wait_for_ready: do not fail at once while the address cannot be connected. md may be NULL, closed by key NULL. */
enum td_status td_rpc_call_start(struct td_rpc_channel *ch, const char *path, const ProtobufCMessageDescriptor *reply,
                                 uint64_t deadline_ns, bool wait_for_ready, const struct td_rpc_metadata *md,
                                 const struct td_rpc_handlers *h, void *user, struct td_rpc_call **out);

#endif
