/* The router's own parts, put together by main.c; each file here works on this struct or on less. */
#ifndef TD_ROUTER_ROUTER_INT_H
#define TD_ROUTER_ROUTER_INT_H

#include "common/config/config.h"
#include "common/loop/loop.h"
#include "common/rpc/rpc.h"
#include "common/text/chat.h"
#include "common/text/tokenizer.h"
#include "router/admit.h"
#include "router/fleet.h"
#include "router/link.h"
#include "router/params.h"
#include "router/request.h"

struct td_router {
    struct td_config cfg;
    struct td_loop *loop;
    struct td_env *env;
    struct td_rpc *rpc;
    struct td_tokenizer *tokenizer;
    struct td_chat_format *format;
    struct td_fleet fleet;
    struct td_fleet_ports fleet_ports;
    struct td_router_ports request_ports, run_ports; /* of gRPC calls' requests, of runs' */
    struct td_admit admit;
    struct td_link_options link_options;
    uint64_t incarnation;
    uint64_t created_s;
    struct td_list clients, runs, joins; /* front.c, run.c, methods.c */
    uint32_t n_clients, n_running;       /* calls of clients, and runs; requests of theirs that were accepted */
    bool is_ready;                       /* somebody could serve a request */
    bool is_draining;
};

/* methods.c */
extern const struct td_rpc_method td_router_methods[];
void td_router_bind_fleet(struct td_router *ro); /* fills fleet_ports */
void td_router_end_joins(struct td_router *ro);  /* tells every worker that this router leaves */

/* front.c */
void td_front_bind(struct td_router *ro); /* fills request_ports */
void td_front_open_generate(struct td_rpc_call *c, void *service);
void td_front_describe(const struct td_router *ro, struct td_buf *json_out);
/* What is known of the model now. Borrows from the fleet: do not keep. */
struct td_params_facts td_front_facts(const struct td_router *ro);
/* asked, or the date of the settings, or today: "YYYY-MM-DD". */
void td_front_today(const struct td_router *ro, const char *asked, char out[16]);
/* A request is over: the log line and the metrics of every front end. */
void td_front_note_done(struct td_router *ro, const struct td_request *r, bool has_begun, enum td_status st,
                        const char *text);

/* run.c */
void td_run_bind(struct td_router *ro); /* fills runs and run_ports; after request_ports */
void td_run_describe_all(const struct td_router *ro, bool *is_first, struct td_buf *json_out);

/* main.c */
void td_router_update_ready(struct td_router *ro);
void td_router_client_left(struct td_router *ro);

#endif
