/* The prefill role in the real world: what the worker's ports do, and the worker's side of common/worker. */
#include "prefill/daemon.h"

#include "proto/worker.pb-c.h"

/* --- the worker's ports ------------------------------------------------------------------------------------ */

static enum td_status submit(void *self, struct td_batch *b)
{
    return td_engine_submit(((struct td_prefill_daemon *)self)->host.engine, b);
}

static void on_drained(void *self) { td_worker_drained(&((struct td_prefill_daemon *)self)->host); }

struct td_prefill_ports td_prefill_daemon_ports(struct td_prefill_daemon *d)
{
    return (struct td_prefill_ports){
        .env = td_loop_env(d->host.loop),
        .self = d,
        .submit = submit,
        .event = td_prefill_call_event,
        .finish = td_prefill_call_finish,
        .drained = on_drained,
    };
}

void td_prefill_daemon_on_layer(struct td_engine *e, struct td_batch *b, uint32_t layer, void *user)
{
    (void)e;
    td_prefill_worker_on_layer(((struct td_prefill_daemon *)user)->worker, b, layer);
}

void td_prefill_daemon_on_done(struct td_engine *e, struct td_batch *b, enum td_status st, void *user)
{
    struct td_prefill_daemon *d = user;
    (void)e;
    td_prefill_worker_on_done(d->worker, b, st);
    /* A device that failed once is not trusted with the next request. */
    if (td_status_scope(st) == TD_SCOPE_PROCESS) td_worker_broken(&d->host, st, "the worker's device failed");
}

void td_prefill_daemon_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes)
{
    td_prefill_worker_on_send_ended(((struct td_prefill_daemon *)self)->worker, s, st, kv_bytes);
}

/* --- the role ---------------------------------------------------------------------------------------------- */

static struct td_prefill_worker *worker_of(void *self) { return ((struct td_prefill_daemon *)self)->worker; }
static uint32_t n_requests(void *self) { return td_prefill_worker_n_runs(worker_of(self)); }
static void drain(void *self) { td_prefill_worker_drain(worker_of(self)); }
static const struct td_kv_prefix *prefix(void *self) { return td_prefill_worker_prefix(worker_of(self)); }
static void load(void *self, Tandem__V1__Load *out) { td_prefill_worker_load(worker_of(self), out); }

static void end_all(void *self, enum td_status st, const char *text)
{
    td_prefill_worker_end_all(worker_of(self), st, text);
}

static void describe(void *self, struct td_buf *out)
{
    struct td_prefill_daemon *d = self;
    td_buf_printf(out, ",\"chunk_tokens\":%u,\"worker\":", d->chunk_tokens);
    td_prefill_worker_describe(d->worker, out);
    td_buf_str(out, ",\"handoff\":");
    td_tx_describe(td_prefill_send_tx(d->send), out);
}

const struct td_worker_role td_prefill_role = {
    .daemon = TD_PREFILL,
    .role = TANDEM__V1__ROLE__ROLE_PREFILL,
    .method = {.path = "/tandem.v1.Prefill/Run",
               .request = &tandem__v1__run_request__descriptor,
               .reply = &tandem__v1__run_event__descriptor,
               .max_request_bytes = TD_PREFILL_MAX_RUN_BYTES,
               .on_open = td_prefill_open_run},
    .n_requests = n_requests,
    .drain = drain,
    .end_all = end_all,
    .load = load,
    .prefix = prefix,
    .describe = describe,
};
