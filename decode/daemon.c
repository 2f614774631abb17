/* The decode role in the real world: what the worker's ports do, and the worker's side of common/worker. */
#include "decode/daemon.h"

#include "common/base/log.h"
#include "proto/worker.pb-c.h"

/* --- the worker's ports ------------------------------------------------------------------------------------ */

static enum td_status submit(void *self, struct td_batch *b)
{
    return td_engine_submit(((struct td_decode_daemon *)self)->host.engine, b);
}

static enum td_status send_events(void *self, void *call, const Tandem__V1__DecodeEvents *ev)
{
    (void)self;
    return td_rpc_send(call, &ev->base);
}

static void close_call(void *self, void *call, enum td_status st, const char *text)
{
    (void)self;
    if (st == TD_OK)
        td_rpc_finish(call, st, text);
    else
        td_rpc_abort(call, st, text); /* a router that does not read would hold up a finish */
}

static void introduce(void *self, const Tandem__V1__PeerDescriptor *peer)
{
    td_decode_recv_introduce(((struct td_decode_daemon *)self)->recv, peer);
}

static enum td_status check_peer(void *self, uint64_t prefill, struct td_err *err)
{
    return td_decode_recv_check(((struct td_decode_daemon *)self)->recv, prefill, err);
}

static enum td_status send_peer(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    return td_decode_recv_send(((struct td_decode_daemon *)self)->recv, prefill, id, data, n);
}

static const char *transport(void *self, uint64_t prefill)
{
    return td_decode_recv_transport(((struct td_decode_daemon *)self)->recv, prefill);
}

static void on_arrived(void *self, const uint32_t *const pages[TD_KV_N_GROUPS], const uint32_t n_pages[TD_KV_N_GROUPS])
{
    td_worker_stage_in(&((struct td_decode_daemon *)self)->host, pages, n_pages);
}

static void on_drained(void *self) { td_worker_drained(&((struct td_decode_daemon *)self)->host); }

static void on_broken(void *self, enum td_status st, const char *why)
{
    td_worker_broken(&((struct td_decode_daemon *)self)->host, st, why);
}

struct td_decode_ports td_decode_daemon_ports(struct td_decode_daemon *d)
{
    return (struct td_decode_ports){
        .env = td_loop_env(d->host.loop),
        .self = d,
        .submit = submit,
        .send = send_events,
        .close = close_call,
        .introduce = introduce,
        .check_peer = check_peer,
        .send_peer = send_peer,
        .transport = transport,
        .arrived = on_arrived,
        .drained = on_drained,
        .broken = on_broken,
    };
}

void td_decode_daemon_on_step(struct td_engine *e, struct td_batch *b, enum td_status st, void *user)
{
    (void)e;
    (void)b;
    td_decode_worker_on_step(((struct td_decode_daemon *)user)->worker, st);
}

/* --- the role ---------------------------------------------------------------------------------------------- */

static struct td_decode_worker *worker_of(void *self) { return ((struct td_decode_daemon *)self)->worker; }
static uint32_t n_requests(void *self) { return td_decode_worker_n_requests(worker_of(self)); }
static void drain(void *self) { td_decode_worker_drain(worker_of(self)); }
static void close_streams(void *self) { td_decode_worker_close_streams(worker_of(self)); }
static const struct td_kv_prefix *prefix(void *self) { return td_decode_worker_prefix(worker_of(self)); }
static void load(void *self, Tandem__V1__Load *out) { td_decode_worker_load(worker_of(self), out); }

static void end_all(void *self, enum td_status st, const char *text)
{
    td_decode_worker_end_all(worker_of(self), st, text);
}

static void describe(void *self, struct td_buf *out)
{
    td_buf_str(out, ",\"worker\":");
    td_decode_worker_describe(worker_of(self), out);
    td_buf_str(out, ",\"peers\":");
    td_decode_recv_describe(((struct td_decode_daemon *)self)->recv, out);
}

const struct td_worker_role td_decode_role = {
    .daemon = TD_DECODE,
    .role = TANDEM__V1__ROLE__ROLE_DECODE,
    .method = {.path = "/tandem.v1.Decode/Generate",
               .request = &tandem__v1__decode_command__descriptor,
               .reply = &tandem__v1__decode_events__descriptor,
               .max_request_bytes = TD_DECODE_MAX_COMMAND_BYTES,
               .on_open = td_decode_open_generate,
               .takes_stream = true},
    .n_requests = n_requests,
    .drain = drain,
    .end_all = end_all,
    .close_streams = close_streams,
    .load = load,
    .prefix = prefix,
    .describe = describe,
};
