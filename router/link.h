/* The router's end of the wire to one worker: a channel; for a decode worker the one long-lived stream that carries
 * every request's start, cancel and events; for a prefill worker a call per run. Turns messages into the request's and
 * the fleet's events and their wishes into messages; decides nothing. Loop thread only. */
#ifndef TD_ROUTER_LINK_H
#define TD_ROUTER_LINK_H

#include "common/rpc/rpc.h"
#include "router/fleet.h"
#include "router/request.h"

struct td_link;

struct td_link_options {
    struct td_rpc *rpc;
    struct td_env *env;
    struct td_fleet *fleet;
    uint64_t router; /* this router's incarnation */
};

/* Opens what is not open of w's channel and, if w decodes, its stream; w->wire is set. The stream is opened again when
 * it breaks, for as long as w is live. o outlives the link. */
enum td_status td_link_open(const struct td_link_options *o, struct td_worker *w);
/* Requests that still talk over it are told that w is lost, with this reason. w->wire is NULL afterwards. */
void td_link_close(struct td_worker *w, const char *why);

/* At r->decode. BUSY: its stream is full of unsent commands. PEER_LOST: no stream now. */
enum td_status td_link_start(struct td_request *r, struct td_err *err);
void td_link_cancel(struct td_request *r);
void td_link_first(struct td_request *r);
/* At r->prefill. PEER_LOST: no channel. introduce: with the descriptor of r->decode. */
enum td_status td_link_run(struct td_request *r, bool introduce, struct td_err *err);
void td_link_run_end(struct td_request *r, bool cancel);

#endif
