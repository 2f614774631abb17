#include "common/worker/worker.h"

#include "proto/worker.pb-c.h"

#define MAX_SMALL_BYTES 4096u

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)c;
    (void)st;
    (void)text;
}

static void on_drain(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    struct td_worker *w = td_rpc_call_user(c);
    Tandem__V1__DrainReply reply = TANDEM__V1__DRAIN_REPLY__INIT;
    td_rpc_finish(c, td_rpc_send(c, &reply.base), NULL);
    td_worker_drain(w);
}

static void open_drain(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_drain, .on_closed = on_closed};
    td_rpc_call_accept(c, &handlers, service);
}

static void on_status(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    struct td_buf json = {0};
    td_worker_describe(td_rpc_call_user(c), &json);
    Tandem__V1__StatusReply reply = TANDEM__V1__STATUS_REPLY__INIT;
    reply.state_json = (char *)(uintptr_t)td_buf_cstr(&json); /* only read */
    td_rpc_finish(c, json.failed ? TD_E_NO_MEMORY : td_rpc_send(c, &reply.base), NULL);
    td_buf_free(&json);
}

static void open_status(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_status, .on_closed = on_closed};
    td_rpc_call_accept(c, &handlers, service);
}

const struct td_rpc_method td_worker_drain_method = {.path = "/tandem.v1.Worker/Drain",
                                                     .request = &tandem__v1__drain_request__descriptor,
                                                     .reply = &tandem__v1__drain_reply__descriptor,
                                                     .max_request_bytes = MAX_SMALL_BYTES,
                                                     .on_open = open_drain};
const struct td_rpc_method td_worker_status_method = {.path = "/tandem.v1.Worker/Status",
                                                      .request = &tandem__v1__status_request__descriptor,
                                                      .reply = &tandem__v1__status_reply__descriptor,
                                                      .max_request_bytes = MAX_SMALL_BYTES,
                                                      .on_open = open_status};
