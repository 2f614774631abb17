/* The steps of a worker's start, and the same backwards. */
#include "common/worker/worker.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/process.h"
#include "common/base/rng.h"
#include "common/config/address_file.h"
#include "common/engine/kv_split.h"
#include "common/worker/canary.h"

#define LAST_STEP_MS 5000 /* patience with a step in flight when everything else is over */

static enum td_status check_config(const struct td_config *c, struct td_err *err)
{
    enum td_status st = td_worker_check_device(c, err);
    if (st != TD_OK) return st;
    if (strcmp(c->load_format, "safetensors") != 0 && strcmp(c->load_format, "dummy") != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--load-format: \"%s\" is not safetensors or dummy", c->load_format);
    if (c->router[0] != '\0' && strchr(c->router, ':') == NULL)
        return td_err_set(err, TD_E_BAD_CONFIG, "--router: \"%s\" is not host:port", c->router);
    return TD_OK;
}

enum td_config_result td_worker_configure(struct td_worker *w, const struct td_worker_role *role, void *self, int argc,
                                          char **argv)
{
    td_process_hold_std_fds();
    w->role = role;
    w->self = self;
    enum td_config_result r = td_config_load(&w->cfg, role->daemon, argc, argv);
    if (r != TD_CONFIG_RUN) return r;
    struct td_err err = {0};
    enum td_status st = check_config(&w->cfg, &err);
    td_log_open(w->cfg.name, (enum td_log_level)td_log_level_parse(w->cfg.log_level));
    if (st == TD_OK) st = td_process_prepare(&err);
    if (st == TD_OK) st = td_loop_create(&w->loop);
    if (st != TD_OK) {
        td_worker_exit_status(w, st, &err);
        return TD_CONFIG_EXIT_BAD;
    }
    while (w->incarnation == 0) w->incarnation = td_rng_system(); /* 0 means none */
    return TD_CONFIG_RUN;
}

enum td_status td_worker_load_model(struct td_worker *w, struct td_err *err)
{
    struct td_model_options o = {.use_dummy_weights = strcmp(w->cfg.load_format, "dummy") == 0,
                                 .dummy_seed = 1,
                                 .tp = w->cfg.tp,
                                 .ep = w->cfg.ep};
    uint64_t begun = td_clock_ns();
    enum td_status st = td_worker_open_device(w, err);
    if (st != TD_OK) return st;
    o.device = w->device;
    st = td_model_load(w->cfg.model, &o, &w->model, err);
    if (st == TD_E_BAD_CONFIG) return st; /* names --tp or --ep itself */
    if (st != TD_OK) return td_err_prefix(err, st, "--model");
    TD_INFO("model_loaded", "model=%s bytes=%" PRIu64 " ms=%" PRIu64 " fingerprint=%s", w->cfg.model_name,
            td_model_weight_bytes(w->model), (td_clock_ns() - begun) / TD_NS_PER_MS, td_model_fingerprint(w->model));
    if (w->cfg.explain_kernels) td_worker_explain_kernels(w);
    return TD_OK;
}

/* What the flags and the pages allow. */
static enum td_status choose_context(struct td_worker *w, struct td_err *err)
{
    const struct td_model_config *c = td_model_config_of(w->model);
    uint64_t holds = (uint64_t)w->kv_layout[TD_KV_FULL].n_pages * w->cfg.kv_page_tokens;
    if (w->cfg.max_context > c->max_context)
        return td_err_set(err, TD_E_BAD_CONFIG, "--max-context: %u is above the model's %u", w->cfg.max_context,
                          c->max_context);
    if (w->cfg.max_context > holds)
        return td_err_set(err, TD_E_BAD_CONFIG,
                          "--max-context %u does not fit --kv-bytes %" PRIu64 ", which holds %" PRIu64 " tokens",
                          w->cfg.max_context, w->cfg.kv_bytes, holds);
    w->max_context_tokens = w->cfg.max_context > 0 ? w->cfg.max_context : c->max_context;
    if (w->max_context_tokens > holds) {
        w->max_context_tokens = (uint32_t)holds;
        TD_WARN("context_cut", "max_context=%u model=%u: --kv-bytes holds no more", w->max_context_tokens,
                c->max_context);
    }
    return TD_OK;
}

enum td_status td_worker_lay_out_kv(struct td_worker *w, uint32_t n_sliding, struct td_err *err)
{
    const struct td_model_config *c = td_model_config_of(w->model);
    enum td_dtype dtype;
    if (td_kv_dtype_parse(w->cfg.kv_dtype, &dtype) != TD_OK)
        return td_err_set(err, TD_E_BAD_CONFIG, "--kv-dtype: \"%s\" is not bf16, f32 or e4m3", w->cfg.kv_dtype);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        w->kv_layout[g] = (struct td_kv_group_layout){
            .n_layers = c->n_group_layers[g],
            .n_heads = c->n_kv_heads,
            .head_dim = c->head_dim,
            .page_tokens = w->cfg.kv_page_tokens,
            .dtype = dtype == TD_E4M3 && g == TD_KV_SLIDING ? TD_BF16 : dtype,
        };
    /* Windows of cached boundaries: 2 pages for every TD_KV_PREFIX_STRIDE of full layers. */
    if (w->cfg.prefix_cache != 0) {
        uint64_t both = 0;
        for (int g = 0; g < TD_KV_N_GROUPS; g++) both += td_kv_page_bytes(&w->kv_layout[g]) * w->kv_layout[g].n_layers;
        uint64_t extra = both > 0 ? w->cfg.kv_bytes / both / 4 : 0;
        n_sliding += extra < UINT32_MAX - n_sliding ? (uint32_t)extra : 0;
    }
    /* --kv-bytes is the worker's, shared by its ranks: the number of pages is the same for every --tp. */
    enum td_status st = td_kv_split(w->cfg.kv_bytes, n_sliding, w->kv_layout, err);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) w->kv_layout[g].n_heads /= w->cfg.tp;
    if (st == TD_OK) st = choose_context(w, err);
    if (st != TD_OK) return st;
    /* Experts in FP8 and in MXFP4 on a GPU give the same products, and with FP8 activations other ones than exact
     * arithmetic. */
    bool is_exact = strcmp(w->cfg.moe_weights, "bf16") == 0 || strcmp(w->cfg.moe_activations, "bf16") == 0;
    char form[16];
    snprintf(form, sizeof form, "%s%s",
             !is_exact     ? "fp8"
             : c->is_mxfp4 ? "mxfp4"
                           : "bf16",
             strcmp(w->cfg.dense_weights, "fp8") == 0 ? "+dense8" : "");
    td_peer_layout_of(c, td_model_fingerprint(w->model), form, w->kv_layout, &w->descriptor.layout);
    uint32_t n_pages[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++) n_pages[g] = w->kv_layout[g].n_pages;
    st = td_kv_pages_create(n_pages, &w->kv);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    TD_INFO("kv_pages", "page_tokens=%u sliding=%u full=%u", w->cfg.kv_page_tokens, n_pages[TD_KV_SLIDING],
            n_pages[TD_KV_FULL]);
    return TD_OK;
}

enum td_status td_worker_open_transfer(struct td_worker *w, const struct td_xfer_handlers *h, void *user,
                                       struct td_err *err)
{
    w->xfer_ops = &td_xfer_ucx;
    /* One transfer for all ranks, with a pool a rank and group: one flush then covers a hand-off and one COMPLETE tells
     * of it, peers come and go once, and a processor that the ranks share has one thread more instead of eight. Ranks
     * with a GPU each will want a transfer each; descriptors have an address a rank for that day. */
    struct td_xfer_options o = {.transport = w->xfer_ops->name,
                                .incarnation = w->incarnation,
                                .tls = w->cfg.ucx_tls,
                                .device = w->device,
                                .is_mapping_off = !w->cfg.xfer_mapped,
                                .keepalive_ms = w->cfg.xfer_keepalive};
    enum td_status st = w->xfer_ops->open(w->loop, &o, h, user, &w->xfer, err);
    if (st == TD_OK) st = td_worker_create_pools(w, err);
    return st == TD_OK ? td_worker_watch_pages(w, err) : st;
}

static enum td_status parse_graphs(const struct td_worker *w, enum td_graphs *out)
{
    static const char *const names[] = {
        [TD_GRAPHS_LAZY] = "lazy", [TD_GRAPHS_START] = "start", [TD_GRAPHS_OFF] = "off"};
    for (unsigned i = 0; i < TD_COUNT(names); i++) {
        if (strcmp(w->cfg.cuda_graphs, names[i]) != 0) continue;
        /* Recording writes into a page that nobody has: who looks after those would complain. */
        *out = i == TD_GRAPHS_START && w->cfg.page_canary != 0 ? TD_GRAPHS_LAZY : (enum td_graphs)i;
        return TD_OK;
    }
    return TD_E_BAD_CONFIG;
}

enum td_status td_worker_create_engine(struct td_worker *w, uint32_t max_tokens, uint32_t max_segments,
                                       const struct td_engine_handlers *h, void *user, struct td_err *err)
{
    struct td_engine_options o = {
        .max_batch_tokens = max_tokens,
        .max_batch_segments = max_segments,
        .max_context_tokens = w->max_context_tokens,
        .n_threads = w->cfg.threads,
        .layer_delay_ms = w->cfg.layer_delay,
    };
    if (w->role->daemon == TD_DECODE && parse_graphs(w, &o.graphs) != TD_OK)
        return td_err_set(err, TD_E_BAD_CONFIG, "--cuda-graphs: \"%s\" is not lazy, start or off", w->cfg.cuda_graphs);
    if (w->staging != NULL && w->role->daemon == TD_PREFILL) {
        o.stage = td_worker_stage_out;
        o.stage_user = w;
    }
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.kv[g] = w->kv_layout[g];
        for (uint32_t r = 0; r < w->cfg.tp; r++) td_engine_kv_base(&o, r)[g] = td_worker_kv_base(w, r, g);
    }
    return td_engine_create(w->model, &o, w->loop, h, user, &w->engine, err);
}

/* --- ports ------------------------------------------------------------------------------------------------- */

/* What others dial: the configured host, the port that was bound. */
static void advertise(const struct td_worker *w, const char *configured, const char *port, char out[300])
{
    const char *colon = strrchr(configured, ':');
    int n = colon == NULL ? (int)strlen(configured) : (int)(colon - configured);
    char host[256];
    snprintf(host, sizeof host, "%.*s", n, configured);
    if (w->cfg.advertise_host[0] != '\0')
        snprintf(host, sizeof host, "%s", w->cfg.advertise_host);
    else if ((strcmp(host, "0.0.0.0") == 0 || strcmp(host, "[::]") == 0 || host[0] == '\0') &&
             gethostname(host, sizeof host) != 0)
        snprintf(host, sizeof host, "localhost");
    host[sizeof host - 1] = '\0';
    snprintf(out, 300, "%s:%s", host, port);
}

static enum td_status listen_rpc(struct td_worker *w, struct td_err *err)
{
    w->methods[0] = w->role->method;
    w->methods[1] = td_worker_drain_method;
    w->methods[2] = td_worker_status_method;
    enum td_status st = td_rpc_create(w->loop, &(struct td_rpc_options){0}, &w->rpc);
    if (st != TD_OK) return td_err_set(err, st, "gRPC cannot start: %s", td_status_text(st));
    st = td_rpc_serve(w->rpc, w->cfg.rpc_address, w->methods, w, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--rpc-address");
    char port[16];
    snprintf(port, sizeof port, "%u", td_rpc_port(w->rpc));
    advertise(w, w->cfg.rpc_address, port, w->rpc_address);
    return TD_OK;
}

static enum td_status listen_http(struct td_worker *w, struct td_err *err)
{
    w->admin = (struct td_admin){.config = &w->cfg,
                                 .is_ready = td_worker_is_ready,
                                 .write_statez = td_worker_describe,
                                 .refresh_metrics = td_worker_refresh_metrics,
                                 .user = w};
    enum td_status st = td_http_create(w->loop, NULL, &w->http);
    if (st == TD_OK) st = td_admin_add_routes(w->http, &w->admin);
    if (st != TD_OK) return td_err_set(err, st, "HTTP cannot start: %s", td_status_text(st));
    st = td_http_listen(w->http, w->cfg.http_address, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--http-address");
    const char *colon = strrchr(td_http_address(w->http), ':');
    advertise(w, w->cfg.http_address, colon == NULL ? "0" : colon + 1, w->http_address);
    return TD_OK;
}

/* Who we are to peers; the layout is in already. */
static void describe_to_peers(struct td_worker *w)
{
    struct td_descriptor *out = &w->descriptor;
    out->incarnation = w->incarnation;
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, w->cfg.name);
    out->n_ranks = w->cfg.tp;
    for (uint32_t r = 0; r < out->n_ranks; r++) {
        struct td_peer_rank *rank = &out->ranks[r];
        rank->address = w->xfer_ops->address(w->xfer, &rank->n_address);
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            rank->n_pages[g] = w->kv_layout[g].n_pages;
            rank->pools[g].base = (uint64_t)(uintptr_t)w->xfer_ops->pool_base(w->pools[r][g]);
            rank->pools[g].key = w->xfer_ops->pool_key(w->pools[r][g], &rank->pools[g].n_key);
        }
    }
}

enum td_status td_worker_listen(struct td_worker *w, struct td_err *err)
{
    enum td_status st;
    TD_TRY(listen_rpc(w, err));
    TD_TRY(listen_http(w, err));
    describe_to_peers(w);
    TD_TRY(td_loop_on_signal(w->loop, td_worker_on_signal, w)); /* SIGTERM becomes "drain" */
    td_worker_watch(w);
    w->phase = TD_WORKER_SERVING;
    td_rpc_set_serving(w->rpc, true);
    TD_INFO("listening", "rpc=%s http=%s incarnation=%016" PRIx64, w->rpc_address, w->http_address, w->incarnation);
    if (w->cfg.address_file[0] != '\0')
        TD_TRY(td_address_file_write(w->cfg.address_file, td_daemon_role(w->role->daemon), w->cfg.name, getpid(),
                                     w->rpc_address, w->http_address, err));
out:
    return st;
}

enum td_status td_worker_join(struct td_worker *w, struct td_err *err)
{
    if (w->cfg.router[0] == '\0') return TD_OK;
    const struct td_model_config *c = td_model_config_of(w->model);
    struct td_fleet_identity id = {
        .role = w->role->role,
        .name = w->cfg.name,
        .rpc_address = w->rpc_address,
        .http_address = w->http_address,
        .model = w->cfg.model_name,
        .version = TD_VERSION,
        .max_context_tokens = w->max_context_tokens,
        .vocab_size = c->vocab,
        .step_timeout_ms = w->cfg.step_timeout,
        .eos_ids = c->eos_ids,
        .n_eos = c->n_eos,
        .descriptor = &w->descriptor,
    };
    struct td_fleet_handlers h = {.load = td_worker_load, .prefixes = td_worker_prefixes};
    enum td_status st = td_fleet_member_create(w->rpc, td_loop_env(w->loop), w->cfg.router, &id, &h, w, &w->member);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "--router: %s: %s", w->cfg.router, td_status_text(st));
}

/* --- running and the end ----------------------------------------------------------------------------------- */

/* Whether the step that may still run ends soon. Its requests are over and reported either way. */
static bool engine_rests(const struct td_worker *w)
{
    for (int i = 0; td_engine_step_age_ns(w->engine) > 0; i++) {
        if (w->is_hurried || i == LAST_STEP_MS / 10) {
            TD_WARN("exit_in_mid_step", "age_ms=%" PRIu64, td_engine_step_age_ns(w->engine) / TD_NS_PER_MS);
            return false;
        }
        usleep(10000);
    }
    return true;
}

enum td_status td_worker_run(struct td_worker *w)
{
    enum td_status st = td_loop_run(w->loop);
    if (!engine_rests(w)) _exit(w->exit_status); /* its thread cannot be joined */
    return st;
}

void td_worker_close_ports(struct td_worker *w)
{
    td_fleet_member_leave(w->member);
    td_http_destroy(w->http);
    td_rpc_destroy(w->rpc);
    td_engine_destroy(w->engine);
}

void td_worker_close_transfer(struct td_worker *w)
{
    if (w->kv != NULL) td_kv_pages_set_watch(w->kv, NULL); /* its memory goes before its last pages are free */
    td_worker_unpin_pools(w);
    if (w->xfer != NULL) w->xfer_ops->destroy(w->xfer);
}

void td_worker_free(struct td_worker *w)
{
    td_kv_pages_destroy(w->kv);
    td_model_destroy(w->model);
    td_worker_close_device(w);
    td_loop_destroy(w->loop);
}

int td_worker_exit_status(const struct td_worker *w, enum td_status st, const struct td_err *err)
{
    if (st == TD_OK) return w->exit_status;
    fprintf(stderr, "tandem-%s: %s\n", td_daemon_role(w->role->daemon),
            err->text[0] != '\0' ? err->text : td_status_text(st));
    return st == TD_E_BAD_CONFIG ? 2 : 1;
}
