/* The decode daemon: what main.c builds and methods.c serves. */
#ifndef TD_DECODE_DAEMON_H
#define TD_DECODE_DAEMON_H

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
#include "decode/recv.h"
#include "decode/worker.h"

enum td_decode_phase {
    TD_DECODE_STARTING,
    TD_DECODE_SERVING,
    TD_DECODE_DRAINING, /* requests that run end, new ones are refused */
    TD_DECODE_STOPPING  /* streams and ports close */
};

struct td_decode_daemon {
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
    struct td_decode_recv *recv;
    struct td_decode_worker *worker;
    struct td_rpc *rpc;
    struct td_http *http;
    struct td_admin admin;
    struct td_descriptor descriptor;
    char rpc_address[300], http_address[300]; /* under which others reach us */
    struct td_fleet_member *member;           /* NULL without --router */
    uint32_t max_context_tokens;

    enum td_decode_phase phase;
    int exit_status;
    struct td_timer drain_timer;    /* --drain-timeout */
    struct td_timer watchdog_timer; /* --step-timeout */
    struct td_mail stop_mail;       /* stop, from inside the worker's calls */
    bool is_stop_posted;
    bool is_hung; /* a step will never end: do not wait for it */
};

/* Pieces for main.c. */
struct td_decode_ports td_decode_daemon_ports(struct td_decode_daemon *d);
void td_decode_daemon_on_step(struct td_engine *e, struct td_batch *b, enum td_status st, void *user);
void td_decode_daemon_watch(struct td_decode_daemon *d); /* from now on, a step that hangs ends the process */
void td_decode_daemon_on_signal(int signum, unsigned nth, void *user);
bool td_decode_daemon_is_ready(void *user);
void td_decode_daemon_write_statez(void *user, struct td_buf *out);
void td_decode_daemon_load(void *user, Tandem__V1__Load *out);

/* Not ready at once, new requests are refused, running ones end within --drain-timeout; then stop. */
void td_decode_daemon_drain(struct td_decode_daemon *d);
/* Leaves the fleet, ends streams, closes ports, then the loop ends. */
void td_decode_daemon_stop(struct td_decode_daemon *d);
void td_decode_daemon_describe(struct td_decode_daemon *d, struct td_buf *json_out);

extern const struct td_rpc_method td_decode_methods[]; /* service: struct td_decode_daemon */

#endif
