#include "tests/sim/cluster.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/transfer/memory.h"

#define TRY(expr)                                                                                                      \
    do {                                                                                                               \
        enum td_status st_ = (expr);                                                                                   \
        if (st_ != TD_OK) sim_fail(c->world, "%s: %s %s", #expr, td_status_name(st_), err.text);                       \
    } while (0)

/* --- what both workers have in common: common/worker/start.c on twins -------------------------------------- */

static void lay_out(struct sim_cluster *c, struct sim_process *p)
{
    struct td_err err = {{0}};
    struct td_worker *w = p->worker;
    const struct sim_shape *s = &p->place->shape;
    w->loop = &p->host;
    while (w->incarnation == 0) w->incarnation = p->host.env.random(&p->host.env);
    snprintf(w->cfg.name, sizeof w->cfg.name, "%s", p->place->name);
    snprintf(w->cfg.model_name, sizeof w->cfg.model_name, "%s", SIM_MODEL_NAME);
    w->cfg.tp = s->tp;
    w->cfg.max_batch = s->max_batch;
    w->cfg.prefill_chunk_tokens = w->cfg.local_prefill_tokens = s->chunk_tokens;
    w->cfg.max_prefill_batch = s->max_batch;
    w->cfg.prefix_cache = s->has_prefix_cache;
    w->cfg.quarantine = s->quarantine_ms;
    w->cfg.step_timeout = s->step_timeout_ms;
    w->cfg.drain_timeout = s->drain_timeout_ms;
    w->max_context_tokens = SIM_MAX_CONTEXT;
    sim_kv_layout(s->tp, s->n_pages, w->kv_layout);
    td_peer_layout_of(&sim_model, "0123456789abcdef0123456789abcdef", "bf16", w->kv_layout, &w->descriptor.layout);
    TRY(td_kv_pages_create(s->n_pages, &w->kv));
}

static void on_land(struct td_xfer *x, uint64_t from, void *at, size_t n, const void *data, void *user)
{
    struct sim_process *p = user;
    (void)x;
    p->cluster->on_land(p, from, at, n, data);
}

static void open_transfer(struct sim_cluster *c, struct sim_process *p, const struct td_xfer_handlers *h, void *user)
{
    struct td_err err = {{0}};
    struct td_worker *w = p->worker;
    w->xfer_ops = &td_xfer_memory;
    struct td_xfer_options o = {.transport = "memory", .incarnation = w->incarnation};
    TRY(td_xfer_memory_open_env(&c->world->network.env, w->incarnation ^ c->world->seed, &p->place->shape.trouble, &o,
                                h, user, &w->xfer, &err));
    td_xfer_memory_watch(w->xfer, on_land, p);
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++)
            TRY(w->xfer_ops->pool_create(w->xfer, td_kv_pool_bytes(&w->kv_layout[g]), &w->pools[r][g], &err));
}

static void create_engine(struct sim_process *p, const struct td_engine_handlers *h, void *user, uint32_t max_tokens,
                          uint32_t max_segments)
{
    struct td_worker *w = p->worker;
    struct sim_engine_options o = {.host = &p->host,
                                   .n_ranks = w->cfg.tp,
                                   .pages = w->kv,
                                   .layer_ns = p->place->shape.layer_ns,
                                   .token_ns = p->place->shape.token_ns,
                                   .max_batch_tokens = max_tokens,
                                   .max_batch_segments = max_segments};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.kv[g] = w->kv_layout[g];
        for (uint32_t r = 0; r < w->cfg.tp; r++) o.base[r][g] = w->xfer_ops->pool_base(w->pools[r][g]);
    }
    w->engine = sim_engine_create(&o, h, user);
}

static void listen_and_join(struct sim_cluster *c, struct sim_process *p)
{
    struct td_err err = {{0}};
    struct td_worker *w = p->worker;
    w->methods[0] = w->role->method;
    w->methods[1] = td_worker_drain_method;
    w->methods[2] = td_worker_status_method;
    TRY(td_rpc_create(w->loop, &(struct td_rpc_options){.max_queued_bytes = p->place->shape.rpc_queue_bytes}, &w->rpc));
    TRY(td_rpc_serve(w->rpc, p->place->name, w->methods, w, &err));
    snprintf(w->rpc_address, sizeof w->rpc_address, "%s", p->place->name);
    struct td_descriptor *d = &w->descriptor;
    d->incarnation = w->incarnation;
    snprintf(d->name, sizeof d->name, "%s", p->place->name);
    d->n_ranks = w->cfg.tp;
    for (uint32_t r = 0; r < d->n_ranks; r++) {
        struct td_peer_rank *rank = &d->ranks[r];
        rank->address = w->xfer_ops->address(w->xfer, &rank->n_address);
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            rank->n_pages[g] = w->kv_layout[g].n_pages;
            rank->pools[g].base = (uint64_t)(uintptr_t)w->xfer_ops->pool_base(w->pools[r][g]);
            rank->pools[g].key = w->xfer_ops->pool_key(w->pools[r][g], &rank->pools[g].n_key);
        }
    }
    td_worker_watch(w);
    w->phase = TD_WORKER_SERVING;
    struct td_fleet_identity id = {
        .role = w->role->role,
        .name = w->cfg.name,
        .rpc_address = w->rpc_address,
        .http_address = "",
        .model = w->cfg.model_name,
        .version = TD_VERSION,
        .max_context_tokens = w->max_context_tokens,
        .vocab_size = SIM_VOCAB,
        .step_timeout_ms = w->cfg.step_timeout,
        .eos_ids = sim_model.eos_ids,
        .n_eos = sim_model.n_eos,
        .descriptor = &w->descriptor,
    };
    struct td_fleet_handlers h = {.load = td_worker_load, .prefixes = td_worker_prefixes};
    TRY(td_fleet_member_create(w->rpc, td_loop_env(w->loop), "R", &id, &h, w, &w->member));
}

static void close_ports(struct td_worker *w)
{
    td_fleet_member_leave(w->member);
    td_rpc_destroy(w->rpc);
    td_engine_destroy(w->engine);
}

/* life.c ends the admin page before the loop; here is none. */
void td_http_shutdown(struct td_http *h, uint32_t grace_ms, void (*done)(void *user), void *user)
{
    (void)h;
    (void)grace_ms;
    done(user);
}

/* --- the prefill worker ------------------------------------------------------------------------------------ */

static void start_prefill(struct sim_cluster *c, struct sim_process *p)
{
    struct td_err err = {{0}};
    struct td_prefill_daemon *d = p->prefill = calloc(1, sizeof *d);
    TD_CHECK(d != NULL);
    struct td_worker *w = p->worker = &d->host;
    w->role = &td_prefill_role;
    w->self = d;
    struct td_xfer_handlers xfer = td_prefill_send_handlers();
    struct td_engine_handlers engine = {.on_layer = td_prefill_daemon_on_layer, .on_done = td_prefill_daemon_on_done};
    lay_out(c, p);
    d->chunk_tokens = w->cfg.prefill_chunk_tokens;
    TRY(td_prefill_send_create(&d->send));
    open_transfer(c, p, &xfer, d->send);
    struct td_prefill_send_options so = {
        .env = td_loop_env(w->loop),
        .xfer = w->xfer_ops,
        .incarnation = w->incarnation,
        .layout = w->descriptor.layout,
        .self = d,
        .ended = td_prefill_daemon_on_send_ended,
    };
    so.source.n_ranks = w->cfg.tp;
    struct td_prefill_worker_options o = {.model = &sim_model,
                                          .max_context_tokens = w->max_context_tokens,
                                          .has_prefix_cache = w->cfg.prefix_cache != 0,
                                          .chunk_tokens = d->chunk_tokens,
                                          .max_batch = w->cfg.max_prefill_batch,
                                          .max_waiting = 16};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.kv[g] = so.source.kv[g] = w->kv_layout[g];
        for (uint32_t r = 0; r < w->cfg.tp; r++) so.source.base[r][g] = w->xfer_ops->pool_base(w->pools[r][g]);
    }
    TRY(td_prefill_send_start(d->send, w->xfer, &so));
    if (p->place->shape.window_bytes > 0)
        td_tx_set_window(td_prefill_send_tx(d->send), p->place->shape.window_bytes, p->place->shape.put_bytes);
    create_engine(p, &engine, d, d->chunk_tokens, w->cfg.max_prefill_batch);
    struct td_prefill_ports ports = td_prefill_daemon_ports(d);
    TRY(td_prefill_worker_create(&o, w->kv, d->send, &ports, &d->worker));
    listen_and_join(c, p);
}

static void end_prefill(struct td_prefill_daemon *d)
{
    struct td_worker *w = &d->host;
    close_ports(w);
    td_prefill_send_detach(d->send);
    w->xfer_ops->destroy(w->xfer);
    td_prefill_send_destroy(d->send);
    td_prefill_worker_destroy(d->worker);
    td_kv_pages_destroy(w->kv);
    free(d);
}

/* --- the decode worker ------------------------------------------------------------------------------------- */

static void start_decode(struct sim_cluster *c, struct sim_process *p)
{
    struct td_err err = {{0}};
    struct td_decode_daemon *d = p->decode = calloc(1, sizeof *d);
    TD_CHECK(d != NULL);
    struct td_worker *w = p->worker = &d->host;
    w->role = &td_decode_role;
    w->self = d;
    struct td_xfer_handlers xfer = td_decode_recv_handlers();
    struct td_engine_handlers engine = {.on_done = td_decode_daemon_on_step};
    lay_out(c, p);
    TRY(td_decode_recv_create(&td_xfer_memory, &w->descriptor.layout, &d->recv));
    open_transfer(c, p, &xfer, d->recv);
    create_engine(p, &engine, d, w->cfg.max_batch + w->cfg.local_prefill_tokens, w->cfg.max_batch);
    struct td_decode_worker_options o = {
        .incarnation = w->incarnation,
        .window_tokens = SIM_WINDOW,
        .n_ranks = w->cfg.tp,
        .n_vocab = SIM_VOCAB,
        .max_context_tokens = w->max_context_tokens,
        .max_batch = w->cfg.max_batch,
        .chunk_tokens = w->cfg.local_prefill_tokens,
        .step_depth = c->world->seed % 4 == 0 ? 1 : 2,
        .has_prefix_cache = w->cfg.prefix_cache != 0,
        .return_margin_tokens = 2 * SIM_PAGE_TOKENS,
        .quarantine_ms = w->cfg.quarantine,
    };
    o.xfer_address = w->xfer_ops->address(w->xfer, &o.n_xfer_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) o.kv[g] = w->kv_layout[g];
    struct td_decode_ports ports = td_decode_daemon_ports(d);
    TRY(td_decode_worker_create(&o, w->kv, &ports, &d->worker));
    td_decode_recv_start(d->recv, w->xfer, d->worker);
    listen_and_join(c, p);
}

static void end_decode(struct td_decode_daemon *d)
{
    struct td_worker *w = &d->host;
    close_ports(w);
    td_decode_recv_destroy(d->recv);
    td_decode_worker_destroy(d->worker);
    w->xfer_ops->destroy(w->xfer);
    td_kv_pages_destroy(w->kv);
    free(d);
}

/* --- lives ------------------------------------------------------------------------------------------------- */

void sim_cluster_init(struct sim_cluster *c, struct sim_world *w)
{
    struct td_err err = {{0}};
    *c = (struct sim_cluster){.world = w};
    td_list_init(&c->dead);
    char *argv[] = {"tandem-router", "--model", SIM_MODEL_NAME, NULL};
    TRY(td_config_parse(&c->router_cfg, TD_ROUTER, 3, argv, NULL, &err));
    snprintf(c->router_cfg.model_name, sizeof c->router_cfg.model_name, "%s", SIM_MODEL_NAME);
    c->router = (struct sim_place){.name = "R", .role = SIM_ROUTER};
    c->router.address = sim_add_place(w, c->router.name);
}

struct sim_place *sim_cluster_add_worker(struct sim_cluster *c, enum sim_role role, const struct sim_shape *shape)
{
    TD_CHECK(c->n_workers < SIM_MAX_WORKERS);
    struct sim_place *p = &c->workers[c->n_workers++];
    uint32_t nth = 1;
    for (struct sim_place *q = c->workers; q < p; q++) nth += q->role == role;
    *p = (struct sim_place){.role = role, .shape = *shape};
    snprintf(p->name, sizeof p->name, "%c%u", role == SIM_PREFILL ? 'P' : 'D', nth);
    p->address = sim_add_place(c->world, p->name);
    return p;
}

void sim_start(struct sim_cluster *c, struct sim_place *place)
{
    TD_CHECK(place->now == NULL);
    struct sim_process *p = calloc(1, sizeof *p);
    TD_CHECK(p != NULL);
    sim_host_init(&p->host, c->world, place->address, ++place->n_lives);
    p->cluster = c;
    p->place = place;
    p->role = place->role;
    td_list_init(&p->link);
    place->now = p;
    c->world->running = &p->host;
    switch (p->role) {
    case SIM_ROUTER: p->router = sim_router_start(&p->host, &c->router_cfg); break;
    case SIM_PREFILL: start_prefill(c, p); break;
    case SIM_DECODE: start_decode(c, p); break;
    }
    c->world->running = &c->world->network;
    sim_trace(c->world, "* %s starts, incarnation %016llx", p->host.name,
              (unsigned long long)(p->worker != NULL ? p->worker->incarnation : sim_router_incarnation(p->router)));
}

void sim_kill(struct sim_place *place, uint64_t notice_ns)
{
    struct sim_process *p = place->now;
    sim_trace(p->host.world, "* %s dies", p->host.name);
    if (p->worker != NULL) td_xfer_memory_kill(p->worker->xfer);
    sim_rpc_kill(&p->host, notice_ns);
    sim_host_kill(&p->host);
    place->now = NULL;
    td_list_push_back(&p->cluster->dead, &p->link);
}

void sim_terminate(struct sim_place *place)
{
    struct sim_process *p = place->now;
    sim_trace(p->host.world, "* %s is told to leave", p->host.name);
    p->host.world->running = &p->host;
    if (p->role == SIM_ROUTER)
        sim_router_drain(p->router);
    else
        td_worker_on_signal(SIGTERM, 1, p->worker);
    p->host.world->running = &p->host.world->network;
}

void sim_pause(struct sim_place *place, bool is_paused)
{
    struct sim_process *p = place->now;
    sim_trace(p->host.world, "* %s %s", p->host.name, is_paused ? "stands still" : "goes on");
    sim_host_pause(&p->host, is_paused);
    if (p->worker != NULL) td_xfer_memory_pause(p->worker->xfer, is_paused);
    if (!is_paused) sim_rpc_resume(&p->host);
}

static void end_process(struct sim_place *place)
{
    struct sim_process *p = place->now;
    if (p->worker != NULL && sim_engine_is_hung(p->worker->engine)) { /* its thread cannot be joined: _exit */
        sim_kill(place, 0);
        return;
    }
    sim_trace(p->host.world, "* %s ends", p->host.name);
    p->host.world->running = &p->host;
    switch (p->role) {
    case SIM_ROUTER: sim_router_end(p->router); break;
    case SIM_PREFILL: end_prefill(p->prefill); break;
    case SIM_DECODE: end_decode(p->decode); break;
    }
    p->host.world->running = &p->host.world->network;
    sim_host_kill(&p->host);
    td_list_remove(&p->host.link);
    place->now = NULL;
    free(p);
}

struct sim_place *sim_place_of(struct sim_cluster *c, uint64_t incarnation)
{
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].now != NULL && c->workers[i].now->worker->incarnation == incarnation) return &c->workers[i];
    return NULL;
}

void sim_reap(struct sim_cluster *c)
{
    if (c->router.now != NULL && c->router.now->host.has_stopped) end_process(&c->router);
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].now != NULL && c->workers[i].now->host.has_stopped) end_process(&c->workers[i]);
}
