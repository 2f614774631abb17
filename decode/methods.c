/* Decode.Generate: the way between router streams and decode/worker.c. */
#include <stdlib.h>

#include "common/base/log.h"
#include "decode/daemon.h"
#include "proto/worker.pb-c.h"

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

void td_decode_open_generate(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_command,
                                                    .on_half_close = on_half_close,
                                                    .on_writable = on_writable,
                                                    .on_closed = on_router_closed};
    struct td_worker *w = service;
    struct td_decode_daemon *d = w->self;
    struct router_call *r = w->phase == TD_WORKER_STOPPING ? NULL : calloc(1, sizeof *r);
    struct td_decode_stream *s = r == NULL ? NULL : td_decode_worker_on_stream(d->worker, c);
    if (s == NULL) {
        free(r);
        td_rpc_finish(c, w->phase == TD_WORKER_STOPPING ? TD_E_DRAINING : TD_E_NO_MEMORY, NULL);
        return;
    }
    *r = (struct router_call){.d = d, .stream = s};
    td_rpc_call_accept(c, &handlers, r);
}
