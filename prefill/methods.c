/* The prefill worker's gRPC methods: the table, and the way between calls and prefill/worker.c. */
#include <stdlib.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "prefill/daemon.h"

#define MAX_RUN_BYTES   (12u << 20) /* token ids and page numbers of the longest context (2^20), a descriptor */
#define MAX_SMALL_BYTES 4096u

/* ---- Prefill.Run ---------------------------------------------------------------------------------------------------
 */

struct run_call {
    struct td_prefill_daemon *d;
    struct td_rpc_call *c;
    struct td_prefill_run *run; /* NULL: not begun, or answered */
};

enum td_status td_prefill_call_event(void *self, void *call, const Tandem__V1__RunEvent *ev)
{
    (void)self;
    return td_rpc_send(((struct run_call *)call)->c, &ev->base);
}

void td_prefill_call_finish(void *self, void *call, enum td_status st, const char *text)
{
    struct run_call *rc = call;
    (void)self;
    rc->run = NULL;
    td_rpc_finish(rc->c, st, text);
}

static void on_run(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct run_call *rc = td_rpc_call_user(c);
    rc->run =
        td_prefill_worker_on_run(rc->d->worker, rc, td_rpc_call_deadline_ns(c), (const Tandem__V1__RunRequest *)msg);
}

static void on_run_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct run_call *rc = td_rpc_call_user(c);
    (void)text;
    if (rc->run != NULL) td_prefill_worker_on_gone(rc->d->worker, rc->run, st);
    free(rc);
}

static void open_run(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_run, .on_closed = on_run_closed};
    struct run_call *rc = td_calloc(1, sizeof *rc);
    if (rc == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    *rc = (struct run_call){.d = service, .c = c};
    td_rpc_call_accept(c, &handlers, rc);
}

/* ---- Worker.Drain, Worker.Status -----------------------------------------------------------------------------------
 */

static void on_unary_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)c;
    (void)st;
    (void)text;
}

static void on_drain(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    struct td_prefill_daemon *d = td_rpc_call_user(c);
    Tandem__V1__DrainReply reply = TANDEM__V1__DRAIN_REPLY__INIT;
    td_rpc_finish(c, td_rpc_send(c, &reply.base), NULL);
    td_prefill_daemon_drain(d);
}

static void open_drain(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_drain, .on_closed = on_unary_closed};
    td_rpc_call_accept(c, &handlers, service);
}

static void on_status(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    struct td_buf json = {0};
    td_prefill_daemon_describe(td_rpc_call_user(c), &json);
    Tandem__V1__StatusReply reply = TANDEM__V1__STATUS_REPLY__INIT;
    reply.state_json = (char *)(uintptr_t)td_buf_cstr(&json); /* only read */
    td_rpc_finish(c, json.failed ? TD_E_NO_MEMORY : td_rpc_send(c, &reply.base), NULL);
    td_buf_free(&json);
}

static void open_status(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_status, .on_closed = on_unary_closed};
    td_rpc_call_accept(c, &handlers, service);
}

const struct td_rpc_method td_prefill_methods[] = {
    {.path = "/tandem.v1.Prefill/Run",
     .request = &tandem__v1__run_request__descriptor,
     .reply = &tandem__v1__run_event__descriptor,
     .max_request_bytes = MAX_RUN_BYTES,
     .on_open = open_run},
    {.path = "/tandem.v1.Worker/Drain",
     .request = &tandem__v1__drain_request__descriptor,
     .reply = &tandem__v1__drain_reply__descriptor,
     .max_request_bytes = MAX_SMALL_BYTES,
     .on_open = open_drain},
    {.path = "/tandem.v1.Worker/Status",
     .request = &tandem__v1__status_request__descriptor,
     .reply = &tandem__v1__status_reply__descriptor,
     .max_request_bytes = MAX_SMALL_BYTES,
     .on_open = open_status},
    {0},
};
