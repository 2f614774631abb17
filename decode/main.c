/* tandem-decode: owns the KV pages of running sequences and writes their tokens. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "common/config/address_file.h"
#include "common/engine/kv_split.h"
#include "decode/daemon.h"

#define LAST_STEP_MS 5000 /* patience with a step in flight when everything else is over */

/* --- steps of the start ------------------------------------------------------------------------------------ */

static enum td_status check_config(const struct td_config *c, struct td_err *err)
{
    if (strcmp(c->device, "cpu") != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--device: \"%s\" is not supported by this build (cpu is)", c->device);
    if (c->tp != 1) return td_err_set(err, TD_E_BAD_CONFIG, "--tp: %u ranks are not supported yet (1 is)", c->tp);
    if (c->router[0] != '\0' && strchr(c->router, ':') == NULL)
        return td_err_set(err, TD_E_BAD_CONFIG, "--router: \"%s\" is not host:port", c->router);
#ifdef TD_FAULTS
    const char *faults = getenv("TANDEM_FAULT");
    if (faults != NULL && !td_fault_parse(faults))
        return td_err_set(err, TD_E_BAD_CONFIG, "TANDEM_FAULT: \"%s\" is not understood", faults);
#endif
    return TD_OK;
}

static enum td_status load_model(struct td_decode_daemon *d, struct td_err *err)
{
    struct td_model_options o = {
        .use_dummy_weights = strcmp(d->cfg.load_format, "dummy") == 0, .dummy_seed = 1, .tp = d->cfg.tp, .rank = 0};
    enum td_status st = td_model_load(d->cfg.model, &o, &d->model, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--model");
    const struct td_model_config *c = td_model_config_of(d->model);
    if (d->cfg.max_context > c->max_context)
        return td_err_set(err, TD_E_BAD_CONFIG, "--max-context: %u is above the model's %u", d->cfg.max_context,
                          c->max_context);
    d->max_context_tokens = d->cfg.max_context > 0 ? d->cfg.max_context : c->max_context;
    return TD_OK;
}

/* How many pages of each kind, as the flags and the model say. */
static enum td_status lay_out_kv(struct td_decode_daemon *d, struct td_err *err)
{
    const struct td_model_config *c = td_model_config_of(d->model);
    enum td_dtype dtype;
    if (td_kv_dtype_parse(d->cfg.kv_dtype, &dtype) != TD_OK)
        return td_err_set(err, TD_E_BAD_CONFIG, "--kv-dtype: \"%s\" is not a type of KV pages", d->cfg.kv_dtype);
    uint32_t page = d->cfg.kv_page_tokens;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        d->kv_layout[g] = (struct td_kv_group_layout){
            .n_layers = c->n_group_layers[g],
            .n_heads = c->n_kv_heads / d->cfg.tp,
            .head_dim = c->head_dim,
            .page_tokens = page,
            .dtype = dtype,
        };
    /* Running sequences, as many again whose KV is on its way, and the chunk of a prompt computed here. */
    uint64_t sliding = 2ull * d->cfg.max_batch * td_kv_span_pages(c->window, page) +
                       td_kv_span_pages(c->window - 1 + d->cfg.prefill_chunk_tokens, page);
    enum td_status st =
        td_kv_split(d->cfg.kv_bytes, sliding < UINT32_MAX ? (uint32_t)sliding : UINT32_MAX, d->kv_layout, err);
    if (st == TD_OK)
        TD_INFO("kv_pages", "page_tokens=%u sliding=%u full=%u", page, d->kv_layout[TD_KV_SLIDING].n_pages,
                d->kv_layout[TD_KV_FULL].n_pages);
    return st;
}

static enum td_status open_transfer(struct td_decode_daemon *d, struct td_err *err)
{
    const struct td_model_config *c = td_model_config_of(d->model);
    td_peer_layout_of(c, td_model_fingerprint(d->model), c->is_mxfp4 ? "mxfp4" : "bf16", d->kv_layout,
                      &d->descriptor.layout);
    d->xfer_ops = &td_xfer_ucx;
    enum td_status st = td_decode_recv_create(d->xfer_ops, &d->descriptor.layout, &d->recv);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    struct td_xfer_options o = {.transport = d->xfer_ops->name,
                                .incarnation = d->incarnation,
                                .tls = d->cfg.ucx_tls,
                                .keepalive_ms = d->cfg.xfer_keepalive};
    struct td_xfer_handlers h = td_decode_recv_handlers();
    st = d->xfer_ops->open(d->loop, &o, &h, d->recv, &d->xfer, err);
    for (int g = 0; st == TD_OK && g < TD_KV_N_GROUPS; g++)
        st = d->xfer_ops->pool_create(d->xfer, td_kv_pool_bytes(&d->kv_layout[g]), &d->pools[g], err);
    return st;
}

static enum td_status create_engine(struct td_decode_daemon *d, struct td_err *err)
{
    struct td_engine_options o = {
        .max_batch_tokens = d->cfg.max_batch + d->cfg.prefill_chunk_tokens,
        .max_batch_segments = d->cfg.max_batch,
        .max_context_tokens = d->max_context_tokens,
        .n_threads = d->cfg.threads,
        .layer_delay_ms = d->cfg.layer_delay,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.kv[g] = d->kv_layout[g];
        o.kv_base[g] = d->xfer_ops->pool_base(d->pools[g]);
    }
    struct td_engine_handlers h = {.on_done = td_decode_daemon_on_step};
    return td_engine_create(d->model, &o, d->loop, &h, d, &d->engine, err);
}

static enum td_status create_worker(struct td_decode_daemon *d, struct td_err *err)
{
    const struct td_model_config *c = td_model_config_of(d->model);
    struct td_decode_worker_options o = {
        .incarnation = d->incarnation,
        .window_tokens = c->window,
        .n_ranks = d->cfg.tp,
        .n_vocab = c->vocab,
        .max_context_tokens = d->max_context_tokens,
        .max_batch = d->cfg.max_batch,
        .chunk_tokens = d->cfg.prefill_chunk_tokens,
        .quarantine_ms = d->cfg.quarantine,
    };
    o.xfer_address = d->xfer_ops->address(d->xfer, &o.n_xfer_address);
    uint32_t n_pages[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.kv[g] = d->kv_layout[g];
        n_pages[g] = d->kv_layout[g].n_pages;
    }
    struct td_decode_ports ports = td_decode_daemon_ports(d);
    enum td_status st = td_kv_pages_create(n_pages, &d->kv);
    if (st == TD_OK) st = td_decode_worker_create(&o, d->kv, &ports, &d->worker);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    td_decode_recv_start(d->recv, d->xfer, d->worker);
    return TD_OK;
}

/* What others dial: the configured host, the port that was bound. */
static void advertise(const struct td_decode_daemon *d, const char *configured, const char *port, char out[300])
{
    const char *colon = strrchr(configured, ':');
    int n = colon == NULL ? (int)strlen(configured) : (int)(colon - configured);
    char host[256];
    snprintf(host, sizeof host, "%.*s", n, configured);
    if (d->cfg.advertise_host[0] != '\0')
        snprintf(host, sizeof host, "%s", d->cfg.advertise_host);
    else if ((strcmp(host, "0.0.0.0") == 0 || strcmp(host, "[::]") == 0 || host[0] == '\0') &&
             gethostname(host, sizeof host) != 0)
        snprintf(host, sizeof host, "localhost");
    host[sizeof host - 1] = '\0';
    snprintf(out, 300, "%s:%s", host, port);
}

static enum td_status listen_rpc(struct td_decode_daemon *d, struct td_err *err)
{
    enum td_status st = td_rpc_create(d->loop, &(struct td_rpc_options){0}, &d->rpc);
    if (st != TD_OK) return td_err_set(err, st, "gRPC cannot start: %s", td_status_text(st));
    st = td_rpc_serve(d->rpc, d->cfg.rpc_address, td_decode_methods, d, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--rpc-address");
    char port[16];
    snprintf(port, sizeof port, "%u", td_rpc_port(d->rpc));
    advertise(d, d->cfg.rpc_address, port, d->rpc_address);
    return TD_OK;
}

static enum td_status listen_http(struct td_decode_daemon *d, struct td_err *err)
{
    d->admin = (struct td_admin){.config = &d->cfg,
                                 .is_ready = td_decode_daemon_is_ready,
                                 .write_statez = td_decode_daemon_write_statez,
                                 .user = d};
    enum td_status st = td_http_create(d->loop, NULL, &d->http);
    if (st == TD_OK) st = td_admin_add_routes(d->http, &d->admin);
    if (st != TD_OK) return td_err_set(err, st, "HTTP cannot start: %s", td_status_text(st));
    st = td_http_listen(d->http, d->cfg.http_address, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--http-address");
    const char *colon = strrchr(td_http_address(d->http), ':');
    advertise(d, d->cfg.http_address, colon == NULL ? "0" : colon + 1, d->http_address);
    return TD_OK;
}

static void describe_to_peers(struct td_decode_daemon *d)
{
    struct td_descriptor *out = &d->descriptor; /* layout is in */
    out->incarnation = d->incarnation;
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, d->cfg.name);
    out->n_ranks = 1;
    struct td_peer_rank *rank = &out->ranks[0];
    rank->address = d->xfer_ops->address(d->xfer, &rank->n_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        rank->n_pages[g] = d->kv_layout[g].n_pages;
        rank->pools[g].base = (uint64_t)(uintptr_t)d->xfer_ops->pool_base(d->pools[g]);
        rank->pools[g].key = d->xfer_ops->pool_key(d->pools[g], &rank->pools[g].n_key);
    }
}

static enum td_status join_fleet(struct td_decode_daemon *d, struct td_err *err)
{
    if (d->cfg.router[0] == '\0') return TD_OK;
    const struct td_model_config *c = td_model_config_of(d->model);
    struct td_fleet_identity id = {
        .role = TANDEM__V1__ROLE__ROLE_DECODE,
        .name = d->cfg.name,
        .rpc_address = d->rpc_address,
        .http_address = d->http_address,
        .model = d->cfg.model_name,
        .version = TD_VERSION,
        .max_context_tokens = d->max_context_tokens,
        .vocab_size = c->vocab,
        .eos_ids = c->eos_ids,
        .n_eos = c->n_eos,
        .descriptor = &d->descriptor,
    };
    struct td_fleet_handlers h = {.load = td_decode_daemon_load};
    enum td_status st = td_fleet_member_create(d->rpc, td_loop_env(d->loop), d->cfg.router, &id, &h, d, &d->member);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "--router: %s: %s", d->cfg.router, td_status_text(st));
}

static enum td_status tell_address(struct td_decode_daemon *d, struct td_err *err)
{
    TD_INFO("listening", "rpc=%s http=%s incarnation=%016" PRIx64, d->rpc_address, d->http_address, d->incarnation);
    if (d->cfg.address_file[0] == '\0') return TD_OK;
    return td_address_file_write(d->cfg.address_file, "decode", d->cfg.name, getpid(), d->rpc_address, d->http_address,
                                 err);
}

/* --- the daemon -------------------------------------------------------------------------------------------- */

/* Whether the step that may still run ends soon. Its requests are over and reported either way. */
static bool engine_rests(const struct td_decode_daemon *d)
{
    for (int i = 0; td_engine_step_age_ns(d->engine) > 0; i++) {
        if (d->is_hung || i == LAST_STEP_MS / 10) {
            TD_WARN("exit_in_mid_step", "age_ms=%" PRIu64, td_engine_step_age_ns(d->engine) / TD_NS_PER_MS);
            return false;
        }
        usleep(10000);
    }
    return true;
}

static void tear_down(struct td_decode_daemon *d)
{
    td_fleet_member_leave(d->member);
    td_http_destroy(d->http);
    td_rpc_destroy(d->rpc); /* the last callbacks of calls run in here: the worker goes later */
    td_engine_destroy(d->engine);
    td_decode_recv_destroy(d->recv);
    td_decode_worker_destroy(d->worker);
    td_kv_pages_destroy(d->kv);
    if (d->xfer != NULL) d->xfer_ops->destroy(d->xfer); /* its pools too */
    td_model_destroy(d->model);
    td_loop_destroy(d->loop);
}

int main(int argc, char **argv)
{
    static struct td_decode_daemon d;
    struct td_err err = {0};
    enum td_status st;
    switch (td_config_load(&d.cfg, TD_DECODE, argc, argv)) {
    case TD_CONFIG_RUN: break;
    case TD_CONFIG_EXIT_OK: return 0;
    case TD_CONFIG_EXIT_BAD: return 2;
    }
    TD_TRY(check_config(&d.cfg, &err));
    td_log_open(d.cfg.name, (enum td_log_level)td_log_level_parse(d.cfg.log_level));
    while (d.incarnation == 0) d.incarnation = td_rng_system(); /* 0 means none */
    TD_TRY(td_loop_create(&d.loop));
    TD_TRY(load_model(&d, &err));
    TD_TRY(lay_out_kv(&d, &err));
    TD_TRY(open_transfer(&d, &err)); /* and the KV pools */
    TD_TRY(create_engine(&d, &err));
    TD_TRY(create_worker(&d, &err));
    TD_TRY(listen_rpc(&d, &err));
    TD_TRY(listen_http(&d, &err));
    describe_to_peers(&d);
    TD_TRY(td_loop_on_signal(d.loop, td_decode_daemon_on_signal, &d)); /* SIGTERM becomes "drain" */
    td_decode_daemon_watch(&d);
    d.phase = TD_DECODE_SERVING;
    td_rpc_set_serving(d.rpc, true);
    TD_TRY(tell_address(&d, &err));
    TD_TRY(join_fleet(&d, &err));                /* from here on the router sends work */
    st = td_loop_run(d.loop);                    /* returns when drained */
    if (!engine_rests(&d)) _exit(d.exit_status); /* its thread cannot be joined */
out:
    if (st != TD_OK) {
        fprintf(stderr, "tandem-decode: %s\n", err.text[0] != '\0' ? err.text : td_status_text(st));
        d.exit_status = st == TD_E_BAD_CONFIG ? 2 : 1;
    }
    tear_down(&d);
    return d.exit_status;
}
