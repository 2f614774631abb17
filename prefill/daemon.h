/* The prefill daemon: the prefill role over common/worker. What main.c builds and methods.c serves. */
#ifndef TD_PREFILL_DAEMON_H
#define TD_PREFILL_DAEMON_H

#include "common/worker/worker.h"
#include "prefill/send.h"
#include "prefill/worker.h"

struct td_prefill_daemon {
    struct td_worker host;
    struct td_prefill_send *send;
    struct td_prefill_worker *worker;
    uint32_t chunk_tokens;
};

extern const struct td_worker_role td_prefill_role; /* self: struct td_prefill_daemon */
struct td_prefill_ports td_prefill_daemon_ports(struct td_prefill_daemon *d);
void td_prefill_daemon_on_layer(struct td_engine *e, struct td_batch *b, uint32_t layer, void *user);
void td_prefill_daemon_on_done(struct td_engine *e, struct td_batch *b, enum td_status st, void *user);
void td_prefill_daemon_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes);

/* methods.c; service: struct td_worker */
void td_prefill_open_run(struct td_rpc_call *c, void *service);
enum td_status td_prefill_call_event(void *self, void *call, const Tandem__V1__RunEvent *ev);
void td_prefill_call_finish(void *self, void *call, enum td_status st, const char *text);
#define TD_PREFILL_MAX_RUN_BYTES                                                                                       \
    (12u << 20) /* token ids and page numbers of the longest context (2^20), a descriptor */

#endif
