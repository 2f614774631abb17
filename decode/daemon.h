/* The decode daemon: the decode role over common/worker. What main.c builds and methods.c serves. */
#ifndef TD_DECODE_DAEMON_H
#define TD_DECODE_DAEMON_H

#include "common/worker/worker.h"
#include "decode/recv.h"
#include "decode/worker.h"

struct td_decode_daemon {
    struct td_worker host;
    struct td_decode_recv *recv;
    struct td_decode_worker *worker;
};

extern const struct td_worker_role td_decode_role; /* self: struct td_decode_daemon */
struct td_decode_ports td_decode_daemon_ports(struct td_decode_daemon *d);
void td_decode_daemon_on_step(struct td_engine *e, struct td_batch *b, enum td_status st, void *user);

/* methods.c; service: struct td_worker */
void td_decode_open_generate(struct td_rpc_call *c, void *service);
#define TD_DECODE_MAX_COMMAND_BYTES (4u << 20) /* token ids of the longest context (2^20) */

#endif
