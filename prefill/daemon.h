/* The prefill daemon: what main.c builds and methods.c serves. */
#ifndef TD_PREFILL_DAEMON_H
#define TD_PREFILL_DAEMON_H

#include "common/config/config.h"
#include "common/engine/engine.h"
#include "common/engine/kv_pages.h"
#include "common/handoff/descriptor.h"
#include "common/handoff/fleet_member.h"
#include "common/http/admin.h"
#include "common/loop/loop.h"
#include "common/model/model.h"
#include "common/rpc/rpc.h"
#include "common/transfer/xfer.h"
#include "prefill/send.h"
#include "prefill/worker.h"

enum td_prefill_phase {
    TD_PREFILL_STARTING,
    TD_PREFILL_SERVING,
    TD_PREFILL_DRAINING, /* requests that run end, new ones are refused */
    TD_PREFILL_STOPPING  /* streams and ports close */
};

struct td_prefill_daemon {
    struct td_config cfg;
    uint64_t incarnation;
    struct td_loop *loop;
    struct td_model *model;
    const struct td_xfer_ops *xfer_ops;
    struct td_xfer *xfer;
    struct td_xfer_pool *pools[TD_KV_N_GROUPS];
    struct td_kv_group_layout kv_layout[TD_KV_N_GROUPS];
    struct td_engine *engine;
    struct td_kv_pages *kv;
    struct td_prefill_send *send;
    struct td_prefill_worker *worker;
    struct td_rpc *rpc;
    struct td_http *http;
    struct td_admin admin;
    struct td_descriptor descriptor;
    char rpc_address[300], http_address[300]; /* under which others reach us */
    struct td_fleet_member *member;           /* NULL without --router */
    uint32_t max_context_tokens, chunk_tokens;

    enum td_prefill_phase phase;
    int exit_status;
    uint64_t drain_ns;              /* when draining began */
    struct td_timer drain_timer;    /* --drain-timeout */
    struct td_timer watchdog_timer; /* --step-timeout */
    struct td_timer stop_timer;     /* leaves what called us first */
    bool is_hung;                   /* a step will never end: do not wait for it */
};

struct td_prefill_ports td_prefill_daemon_ports(struct td_prefill_daemon *d);
void td_prefill_daemon_on_layer(struct td_engine *e, struct td_batch *b, uint32_t layer, void *user);
void td_prefill_daemon_on_done(struct td_engine *e, struct td_batch *b, enum td_status st, void *user);
void td_prefill_daemon_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes);

void td_prefill_daemon_on_signal(int signum, unsigned nth, void *user);
void td_prefill_daemon_drain(struct td_prefill_daemon *d);
void td_prefill_daemon_watch(struct td_prefill_daemon *d); /* from here on: --step-timeout */

bool td_prefill_daemon_is_ready(void *user);
void td_prefill_daemon_describe(void *user, struct td_buf *json_out);
void td_prefill_daemon_refresh_metrics(void *user);
void td_prefill_daemon_load(void *user, Tandem__V1__Load *out);

/* methods.c */
extern const struct td_rpc_method td_prefill_methods[]; /* service: struct td_prefill_daemon */
enum td_status td_prefill_call_event(void *self, void *call, const Tandem__V1__RunEvent *ev);
void td_prefill_call_finish(void *self, void *call, enum td_status st, const char *text);

#endif
