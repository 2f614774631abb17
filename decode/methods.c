/* The decode worker's gRPC methods: the table, and the way between calls and decode/worker.c. */
#include <stdlib.h>

#include "common/base/log.h"
#include "decode/daemon.h"
#include "proto/worker.pb-c.h"

#define MAX_COMMAND_BYTES (4u << 20) /* token ids of the longest context (2^20) */
#define MAX_SMALL_BYTES   4096u

/* --- Decode.Generate --------------------------------------------------------------------------------------- */

struct router_call {
    struct td_decode_daemon *d;
    struct td_decode_stream *stream;
};

static struct router_call *router_of(struct td_rpc_call *c) { return td_rpc_call_user(c); }

static void on_command(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct router_call *r = router_of(c);
    td_decode_worker_on_command(r->d->worker, r->stream, (const Tandem__V1__DecodeCommand *)msg);
}

/* A router that sends no more wants no more: its stream lives as long as it does. */
static void on_half_close(struct td_rpc_call *c) { td_rpc_finish(c, TD_OK, NULL); }

static void on_writable(struct td_rpc_call *c)
{
    struct router_call *r = router_of(c);
    td_decode_worker_on_writable(r->d->worker, r->stream);
}

static void on_router_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct router_call *r = router_of(c);
    TD_INFO("router_stream_closed", "peer=%s status=%s text=\"%s\"", td_rpc_call_peer(c), td_status_name(st), text);
    td_decode_worker_on_stream_closed(r->d->worker, r->stream);
    free(r);
}

static void open_generate(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_command,
                                                    .on_half_close = on_half_close,
                                                    .on_writable = on_writable,
                                                    .on_closed = on_router_closed};
    struct td_decode_daemon *d = service;
    struct router_call *r = d->phase == TD_DECODE_STOPPING ? NULL : calloc(1, sizeof *r);
    struct td_decode_stream *s = r == NULL ? NULL : td_decode_worker_on_stream(d->worker, c);
    if (s == NULL) {
        free(r);
        td_rpc_finish(c, d->phase == TD_DECODE_STOPPING ? TD_E_DRAINING : TD_E_NO_MEMORY, NULL);
        return;
    }
    *r = (struct router_call){.d = d, .stream = s};
    td_rpc_call_accept(c, &handlers, r);
}

/* --- Worker.Drain, Worker.Status --------------------------------------------------------------------------- */

static void on_unary_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)c;
    (void)st;
    (void)text;
}

static void on_drain(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    Tandem__V1__DrainReply reply = TANDEM__V1__DRAIN_REPLY__INIT;
    enum td_status st = td_rpc_send(c, &reply.base);
    struct td_decode_daemon *d = td_rpc_call_user(c);
    td_rpc_finish(c, st, NULL);
    td_decode_daemon_drain(d);
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
    td_decode_daemon_describe(td_rpc_call_user(c), &json);
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

const struct td_rpc_method td_decode_methods[] = {
    {.path = "/tandem.v1.Decode/Generate",
     .request = &tandem__v1__decode_command__descriptor,
     .reply = &tandem__v1__decode_events__descriptor,
     .max_request_bytes = MAX_COMMAND_BYTES,
     .on_open = open_generate,
     .takes_stream = true},
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
