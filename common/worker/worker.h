/* What a worker process is, whatever its role: a model and an engine on a device, KV pools that peers may write, gRPC
 * and HTTP, membership in the fleet, draining, the watchdog. prefill/ and decode/ each add a role: their decisions,
 * their method, and a main.c that calls the steps below in order. Loop thread only.
 *
 * Life: STARTING -> SERVING -> DRAINING (SIGTERM or Worker.Drain: not ready, new requests are refused, running ones
 * end, bounded by --drain-timeout) -> STOPPING (streams and ports close) -> td_worker_run returns. A second signal ends
 * the requests at once. A step older than --step-timeout, or a device that failed, ends them as lost and exits
 * non-zero. */
#ifndef TD_WORKER_WORKER_H
#define TD_WORKER_WORKER_H

#include "common/config/config.h"
#include "common/engine/engine.h"
#include "common/engine/kv_pages.h"
#include "common/engine/kv_prefix.h"
#include "common/handoff/descriptor.h"
#include "common/handoff/fleet_member.h"
#include "common/http/admin.h"
#include "common/loop/loop.h"
#include "common/model/model.h"
#include "common/rpc/rpc.h"
#include "common/transfer/xfer.h"

enum td_worker_phase { TD_WORKER_STARTING, TD_WORKER_SERVING, TD_WORKER_DRAINING, TD_WORKER_STOPPING };

/* What the role brings; all functions get the role's self and are called between SERVING and the end. */
struct td_worker_role {
    enum td_daemon daemon;
    Tandem__V1__Role role;
    struct td_rpc_method method; /* its own; Worker.Drain and Worker.Status come on top. service: struct td_worker */
    uint32_t (*n_requests)(void *self);
    void (*drain)(void *self); /* refuse new requests; calls td_worker_drained once none is left */
    void (*end_all)(void *self, enum td_status st, const char *text); /* answer all that run now */
    void (*close_streams)(void *self);                                /* before gRPC shuts down; may be NULL */
    void (*load)(void *self, Tandem__V1__Load *out);
    const struct td_kv_prefix *(*prefix)(void *self);      /* its prefix cache; NULL or a NULL result: none */
    void (*describe)(void *self, struct td_buf *json_out); /* members of the state object, each after a comma */
    void (*refresh_metrics)(void *self);                   /* before a scrape; may be NULL */
};

struct td_worker {
    const struct td_worker_role *role;
    void *self;
    struct td_config cfg;
    uint64_t incarnation;
    struct td_loop *loop;
    struct td_device *device; /* NULL: the CPU, which the model opens itself */
    struct td_model *model;
    uint32_t max_context_tokens;
    struct td_kv_group_layout kv_layout[TD_KV_N_GROUPS]; /* of one rank */
    struct td_kv_pages *kv;
    const struct td_xfer_ops *xfer_ops;
    struct td_xfer *xfer;
    struct td_xfer_pool *pools[TD_MAX_RANKS][TD_KV_N_GROUPS];
    void *kv_base[TD_KV_N_GROUPS]; /* on a device: the pools the engine uses */
    struct td_stream *staging;     /* copies between them and what peers write; NULL: peers write them */
    bool is_pinned[TD_KV_N_GROUPS];
    uint64_t n_saturated; /* as last told to the metrics */
    struct td_descriptor descriptor; /* its layout is set by td_worker_lay_out_kv, the rest by td_worker_listen */
    struct td_engine *engine;
    struct td_rpc_method methods[4];
    struct td_rpc *rpc;
    struct td_http *http;
    struct td_admin admin;
    char rpc_address[300], http_address[300]; /* under which others reach us */
    struct td_fleet_member *member;           /* NULL without --router */
    struct td_kv_teller teller;               /* what the router has heard of the prefix cache */

    enum td_worker_phase phase;
    int exit_status;
    uint64_t drain_ns;              /* when draining began */
    struct td_timer drain_timer;    /* --drain-timeout */
    struct td_timer watchdog_timer; /* --step-timeout */
    struct td_timer stop_timer;     /* leaves what called us first */
    enum td_status end_status;      /* the answer to what still runs at the end */
    char end_text[160];
    bool is_hurried; /* do not wait for a step that may not end */
};

/* --- the start, in this order (start.c); each names the flag that is to blame
 * ------------------------------------------ */
/* The result tells main to go on or to exit with it. */
enum td_config_result td_worker_configure(struct td_worker *w, const struct td_worker_role *role, void *self, int argc,
                                          char **argv);
enum td_status td_worker_load_model(struct td_worker *w, struct td_err *err);
/* Splits --kv-bytes; n_sliding: pages of sliding layers that the role can use at once. Sets max_context_tokens, makes
 * kv. */
enum td_status td_worker_lay_out_kv(struct td_worker *w, uint32_t n_sliding, struct td_err *err);
enum td_status td_worker_open_transfer(struct td_worker *w, const struct td_xfer_handlers *h, void *user,
                                       struct td_err *err);
enum td_status td_worker_create_engine(struct td_worker *w, uint32_t max_tokens, uint32_t max_segments,
                                       const struct td_engine_handlers *h, void *user, struct td_err *err);
enum td_status td_worker_listen(struct td_worker *w, struct td_err *err); /* gRPC, HTTP, signals, watchdog: SERVING */
enum td_status td_worker_join(struct td_worker *w, struct td_err *err);   /* from here on the router sends work */
/* Runs until stopped. Does not return if a step hangs (its thread cannot be joined): exits. */
enum td_status td_worker_run(struct td_worker *w);

/* --- the device (device.c), used by the steps above --------------------------------------------------------- */
enum td_status td_worker_check_device(const struct td_config *c, struct td_err *err);
enum td_status td_worker_open_device(struct td_worker *w, struct td_err *err);
void td_worker_explain_kernels(const struct td_worker *w);
enum td_status td_worker_create_pools(struct td_worker *w, struct td_err *err);
void *td_worker_kv_base(const struct td_worker *w, uint32_t rank, int group);
/* What arrived from a prefill worker is in the pages the engine reads. Waits for the copies, if there are any. */
void td_worker_stage_in(struct td_worker *w, const uint32_t *const pages[TD_KV_N_GROUPS],
                        const uint32_t n_pages[TD_KV_N_GROUPS]);
/* The engine's stage: pages of a layer go where they can be sent from. user: the worker. The rank's thread. */
enum td_status td_worker_stage_out(void *user, const struct td_batch *b, uint32_t layer);
void td_worker_unpin_pools(struct td_worker *w);  /* before the transfer frees them */
void td_worker_close_device(struct td_worker *w); /* after the model */

/* --- the end of main: what was started, backwards, around what the role destroys itself
 * -------------------------------- */
void td_worker_close_ports(struct td_worker *w); /* fleet, HTTP, gRPC (last callbacks of calls run in here), engine */
void td_worker_close_transfer(struct td_worker *w); /* puts that are under way come back in here; its pools go too */
void td_worker_free(struct td_worker *w);           /* pages, model, loop */
/* Prints what failed; returns the exit status. */
int td_worker_exit_status(const struct td_worker *w, enum td_status st, const struct td_err *err);

/* --- life (life.c)
 * ------------------------------------------------------------------------------------------------------ */
void td_worker_on_signal(int signum, unsigned nth, void *user);
void td_worker_drain(struct td_worker *w);
void td_worker_drained(struct td_worker *w); /* from the role, also from within its calls */
void td_worker_watch(struct td_worker *w);   /* starts the watchdog */
/* The device failed, or its answer cannot be used: all requests end as lost, exit status 1. Also from within the role's
 * calls. */
void td_worker_broken(struct td_worker *w, enum td_status st, const char *why);

bool td_worker_is_ready(void *user);
void td_worker_describe(void *user, struct td_buf *json_out);
void td_worker_refresh_metrics(void *user);
void td_worker_load(void *user, Tandem__V1__Load *out);
uint32_t td_worker_prefixes(void *user, bool from_start, uint64_t *out, bool *is_all_out);

/* Worker.Drain and Worker.Status (methods.c). */
extern const struct td_rpc_method td_worker_drain_method, td_worker_status_method;

#endif
