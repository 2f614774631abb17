#include "tests/sim/trouble.h"

#include <stdio.h>

#include "common/transfer/memory.h"
#include "prefill/sched.h"

#define SPAN_NS (3 * TD_NS_PER_S) /* orders and troubles begin within this */
#define KEEPALIVE_NS                                                                                                   \
    (15 * TD_NS_PER_S) /* gRPC notices a machine that vanished: a ping after 10 s, given up after 5                    \
                        */

static const char *const names[] = {
#define X(name) #name,
    SIM_TROUBLES(X)
#undef X
};

/* --- what happens ------------------------------------------------------------------------------------------ */

static void start_again(struct td_timer *t)
{
    struct sim_trouble *tr = TD_CONTAINER_OF(t, struct sim_trouble, end);
    struct td_env *net = &tr->plot->cluster->world->network.env;
    if (tr->place->now == NULL)
        sim_start(tr->plot->cluster, tr->place);
    else if (tr->kind == SIM_LEAVE && tr->place->now->host.has_stopped == false)
        net->timer_start(net, t, SIM_MS(200)); /* still draining */
}

static void go_on(struct td_timer *t)
{
    struct sim_trouble *tr = TD_CONTAINER_OF(t, struct sim_trouble, end);
    if (tr->place->now != NULL && tr->place->now->host.is_paused) sim_pause(tr->place, false);
}

static void as_usual(struct td_timer *t)
{
    struct sim_trouble *tr = TD_CONTAINER_OF(t, struct sim_trouble, end);
    struct sim_world *w = tr->plot->cluster->world;
    sim_link_of(w, tr->place->address, tr->other->address)->slowness = 1;
}

static void lose_none(struct td_timer *t)
{
    struct sim_trouble *tr = TD_CONTAINER_OF(t, struct sim_trouble, end);
    if (tr->place->now != NULL) td_xfer_memory_set_trouble(tr->place->now->worker->xfer, &tr->place->shape.trouble);
}

static void lose_messages(struct sim_trouble *tr)
{
    struct td_xfer_memory_trouble m = tr->place->shape.trouble;
    if (tr->amount % 2 == 0) {
        m.lose_message_ppm = 300000;
        tr->place->is_losing = true;
        tr->plot->cluster->n_losses++;
    } else {
        m.double_message_ppm = 300000;
    }
    td_xfer_memory_set_trouble(tr->place->now->worker->xfer, &m);
}

static void strike(struct td_timer *t)
{
    struct sim_trouble *tr = TD_CONTAINER_OF(t, struct sim_trouble, begin);
    struct sim_world *w = tr->plot->cluster->world;
    struct td_env *net = &w->network.env;
    struct sim_process *p = tr->place->now;
    if (p == NULL) return; /* it is down already */
    if (tr->aim != SIM_AT_TIME && !tr->is_waiting) {
        tr->is_waiting = true;
        return;
    }
    tr->is_waiting = false;
    tr->aim = SIM_AT_TIME;
    sim_trace(w, "* %s: %s%s%s, amount %u for %llu ms", names[tr->kind], p->host.name, tr->other != NULL ? " and " : "",
              tr->other != NULL ? tr->other->name : "", tr->amount, (unsigned long long)(tr->for_ns / TD_NS_PER_MS));
    tr->plot->cluster->n_struck[tr->kind]++;
    tr->place->n_troubles++;
    struct sim_link *l = tr->other != NULL ? sim_link_of(w, tr->place->address, tr->other->address) : NULL;
    switch (tr->kind) {
    case SIM_CRASH:
        sim_kill(tr->place, tr->notice_ns);
        tr->end.fire = start_again;
        break;
    case SIM_LEAVE:
        if (p->host.is_paused) return;
        sim_terminate(tr->place);
        tr->end.fire = start_again;
        break;
    case SIM_STALL:
        if (p->host.is_paused) return;
        sim_pause(tr->place, true);
        tr->end.fire = go_on;
        break;
    case SIM_JUMP: sim_host_jump(&p->host, tr->for_ns); return;
    case SIM_SLOW:
        l->slowness = tr->amount;
        tr->end.fire = as_usual;
        break;
    case SIM_BLOCK: sim_rpc_block(w, tr->place->address, tr->other->address, w->now_ns + tr->for_ns); return;
    case SIM_BREAK: sim_rpc_break(w, tr->place->address, tr->other->address); return;
    case SIM_LOSE:
        lose_messages(tr);
        tr->end.fire = lose_none;
        break;
    case SIM_FAIL:
        sim_engine_fail(p->worker->engine);
        tr->end.fire = start_again; /* a worker whose device failed leaves */
        break;
    case SIM_HANG:
        sim_engine_hang(p->worker->engine);
        tr->end.fire = start_again;
        break;
    default: return;
    }
    net->timer_start(net, &tr->end, tr->for_ns);
}

/* Those that wait for it strike now, or a moment later. */
static void on_moment(struct sim_cluster *c, enum sim_moment m, uint32_t a, uint32_t b)
{
    struct sim_plot *plot = c->plot;
    struct td_env *net = &c->world->network.env;
    for (uint32_t i = 0; i < plot->n_troubles; i++) {
        struct sim_trouble *tr = &plot->troubles[i];
        if (!tr->is_waiting || tr->begin.is_armed || tr->aim != m) continue;
        if (tr->place->address == a || tr->place->address == b) net->timer_start(net, &tr->begin, tr->aim_ns);
    }
}

/* --- what a seed means ------------------------------------------------------------------------------------- */

static void draw_shape(struct sim_draws *d, enum sim_role role, bool is_tight, struct sim_shape *out)
{
    *out = (struct sim_shape){
        .tp = sim_chance(d, 30) ? 2 : 1,
        .max_batch = (uint32_t)sim_draw(d, 2, 16),
        .chunk_tokens = (uint32_t)sim_draw(d, 4, 40),
        .has_prefix_cache = sim_chance(d, 70),
        .quarantine_ms = 250,
        .step_timeout_ms = 1000,
        .drain_timeout_ms = (uint32_t)sim_draw(d, 100, 3000),
        .layer_ns = sim_draw(d, SIM_US(200), SIM_US(3000)),
        .token_ns = sim_draw(d, SIM_US(1), SIM_US(100)),
        .trouble = {.delay_min_ns = SIM_US(5),
                    .delay_max_ns = sim_draw(d, SIM_US(50), SIM_MS(20)),
                    .notice_min_ns = SIM_MS(1),
                    .notice_max_ns = sim_draw(d, SIM_MS(2), sim_chance(d, 50) ? SIM_MS(20) : SIM_MS(600)),
                    .hang_put_ppm = 300000},
    };
    /* A put may land as late as delay_max after its sender died: the quarantine covers that. */
    uint32_t longest = SIM_MAX_CONTEXT / SIM_PAGE_TOKENS;
    out->n_pages[TD_KV_FULL] = longest + (uint32_t)(is_tight ? sim_draw(d, 0, 20) : sim_draw(d, 60, 160));
    out->n_pages[TD_KV_SLIDING] = (uint32_t)(is_tight ? sim_draw(d, 16, 40) : sim_draw(d, 60, 100));
    if (sim_chance(d, 30)) out->rpc_queue_bytes = (uint32_t)sim_draw(d, 100, 4000);
    if (sim_chance(d, 40)) {
        out->window_bytes = sim_draw(d, 500, 8000);
        out->put_bytes = sim_draw(d, 100, 1000);
    }
    if (role == SIM_DECODE) return;
    out->max_batch = (uint32_t)sim_draw(d, 1, 3);
    if (is_tight)
        out->n_pages[TD_KV_SLIDING] = td_prefill_sched_sliding_compute(SIM_WINDOW, out->chunk_tokens, SIM_PAGE_TOKENS) +
                                      (uint32_t)sim_draw(d, 0, 8);
}

static void draw_order(struct sim_draws *d, struct sim_client *k, uint32_t nth, bool is_calm)
{
    uint32_t longest = sim_chance(d, 20) ? 150 : 40;
    k->n_prompt = (uint32_t)sim_draw(d, 1, longest);
    /* Some share beginnings, as the turns of a chat do. */
    uint64_t text = sim_chance(d, 40) ? sim_draw(d, 1, 3) : 100 + nth;
    struct sim_draws words = {.seed = text, .stream = 9};
    for (uint32_t i = 0; i < k->n_prompt; i++) k->prompt[i] = (uint32_t)sim_draw(&words, 2, SIM_VOCAB - 1);
    k->max_tokens = (uint32_t)(sim_chance(d, 15) ? sim_draw(d, 1, 2) : sim_draw(d, 3, 60));
    k->min_tokens = sim_chance(d, 20) ? (uint32_t)sim_draw(d, 0, k->max_tokens) : 0;
    k->sampling_seed = sim_draw(d, 0, 3);
    k->want_logprobs = sim_chance(d, 15);
    if (is_calm) return;
    if (sim_chance(d, 25)) k->deadline_ns = sim_draw(d, SIM_MS(1), sim_chance(d, 50) ? SIM_MS(200) : SIM_MS(4000));
    if (sim_chance(d, 10)) k->leaves_after = (uint32_t)sim_draw(d, 0, 10);
    if (sim_chance(d, 15)) k->leaves_ns = sim_draw(d, SIM_US(100), sim_chance(d, 50) ? SIM_MS(20) : SIM_MS(600));
    if (sim_chance(d, 8)) k->stalls_ns = sim_draw(d, SIM_MS(10), SIM_MS(3000));
}

static struct sim_place *any_place(struct sim_draws *d, struct sim_cluster *c, bool or_router)
{
    uint64_t i = sim_draw(d, 0, c->n_workers - 1 + (or_router ? 1 : 0));
    return i == c->n_workers ? &c->router : &c->workers[i];
}

static void draw_trouble(struct sim_draws *d, struct sim_plot *plot, enum sim_trouble_kind kind, struct sim_trouble *tr)
{
    struct sim_cluster *c = plot->cluster;
    tr->plot = plot;
    tr->kind = kind;
    bool is_of_workers = tr->kind == SIM_LOSE || tr->kind == SIM_FAIL || tr->kind == SIM_HANG;
    tr->place = any_place(d, c, !is_of_workers && sim_chance(d, 30));
    tr->for_ns = sim_chance(d, 30) ? sim_draw(d, SIM_MS(1), SIM_MS(100)) : sim_draw(d, SIM_MS(100), SIM_MS(4000));
    /* A machine that vanished is missed by keepalive, or says so itself once it is back and hears from a peer. */
    if (tr->kind == SIM_CRASH && sim_chance(d, 25)) {
        tr->notice_ns = sim_draw(d, 10 * TD_NS_PER_S, KEEPALIVE_NS);
        if (tr->notice_ns > tr->for_ns) tr->notice_ns = tr->for_ns + sim_draw(d, 0, SIM_MS(500));
    }
    tr->amount = (uint32_t)sim_draw(d, 2, 60);
    if (tr->kind == SIM_SLOW || tr->kind == SIM_BLOCK || tr->kind == SIM_BREAK) {
        tr->place = tr->kind == SIM_BLOCK && sim_chance(d, 60)
                        ? &c->workers[0]
                        : any_place(d, c, false); /* the router talks to workers: nobody else does by gRPC */
        tr->other = &c->router;
    }
    tr->aim = sim_chance(d, 60) ? (enum sim_moment)sim_draw(d, SIM_AT_TIME, SIM_N_MOMENTS - 1) : SIM_AT_TIME;
    tr->aim_ns = sim_chance(d, 50) ? 0 : sim_draw(d, 0, SIM_MS(8));
    if (tr->kind == SIM_BLOCK && tr->place->role == SIM_PREFILL && sim_chance(d, 70)) {
        tr->aim = SIM_AT_RUN; /* a run that comes late finds a world that has gone on */
        tr->aim_ns = 0;
    }
    if (tr->kind == SIM_STALL && sim_chance(d, 15)) tr->for_ns = sim_draw(d, SIM_MS(4000), SIM_MS(9000));
    if (tr->kind == SIM_JUMP && sim_chance(d, 50)) tr->for_ns *= 10;
    if (tr->kind == SIM_FAIL || tr->kind == SIM_HANG) tr->for_ns = SIM_MS(4000);
    tr->begin.fire = strike;
    struct td_env *net = &c->world->network.env;
    net->timer_start(net, &tr->begin, sim_draw(d, SIM_MS(150), SIM_MS(150) + SPAN_NS));
}

void sim_plot_make(struct sim_plot *plot, struct sim_cluster *c, struct sim_clients *clients, bool is_calm)
{
    struct sim_draws d = {.seed = c->world->seed, .stream = 10};
    c->plot = plot;
    c->on_moment = on_moment;
    *plot = (struct sim_plot){.cluster = c, .is_calm = is_calm || c->world->seed % 16 == 0};
    uint32_t n_prefill = (uint32_t)sim_draw(&d, 1, 3), n_decode = (uint32_t)sim_draw(&d, 1, 3);
    bool is_tight = !plot->is_calm && sim_chance(&d, 40);
    for (uint32_t i = 0; i < n_prefill + n_decode; i++) {
        struct sim_shape shape;
        enum sim_role role = i < n_prefill ? SIM_PREFILL : SIM_DECODE;
        draw_shape(&d, role, is_tight, &shape);
        sim_cluster_add_worker(c, role, &shape);
    }
    const char *on = sim_chance(&d, 40) ? "auto" : sim_chance(&d, 70) ? "prefill" : "decode";
    struct sim_draws t = {.seed = c->world->seed, .stream = 12};
    plot->n_troubles = plot->is_calm ? 0 : (uint32_t)sim_draw(&t, 0, 14);
    /* Some seeds have a theme: one kind of trouble, again and again. */
    enum sim_trouble_kind theme = (enum sim_trouble_kind)sim_draw(&t, 0, SIM_N_TROUBLES + 1);
    if (theme >= SIM_N_TROUBLES) theme = SIM_BLOCK; /* late runs are the rarest to do harm */
    bool has_theme = sim_chance(&t, 40);
    if (sim_chance(&d, 30)) c->router_cfg.max_client_backlog = 1000;
    bool has_late_runs = has_theme && theme == SIM_BLOCK && plot->n_troubles > 0;
    if (has_late_runs) on = "prefill"; /* and clients that do not wait for them */
    snprintf(c->router_cfg.prefill_on, sizeof c->router_cfg.prefill_on, "%s", on);
    sim_start(c, &c->router);
    for (uint32_t i = 0; i < c->n_workers; i++) sim_start(c, &c->workers[i]);

    struct sim_draws o = {.seed = c->world->seed, .stream = 11};
    uint32_t n_orders = (uint32_t)sim_draw(&o, 10, 120);
    uint64_t span = sim_chance(&o, 30) ? SIM_MS(300) : SPAN_NS;
    for (uint32_t i = 0; i < n_orders; i++) {
        struct sim_client *k = sim_client_new(clients);
        draw_order(&o, k, i, plot->is_calm);
        if (has_late_runs && sim_chance(&o, 50)) k->leaves_ns = sim_draw(&o, SIM_MS(1), SIM_MS(60));
        uint64_t at = SIM_MS(300) + sim_draw(&o, 0, span);
        if (at > plot->last_start_ns) plot->last_start_ns = at;
        sim_client_begin(k, at);
    }
    for (uint32_t i = 0; i < plot->n_troubles; i++) {
        enum sim_trouble_kind kind = has_theme ? theme : (enum sim_trouble_kind)sim_draw(&t, 0, SIM_N_TROUBLES - 1);
        draw_trouble(&t, plot, kind, &plot->troubles[i]);
    }
}

void sim_plot_end(struct sim_plot *plot)
{
    struct sim_cluster *c = plot->cluster;
    struct td_env *net = &c->world->network.env;
    for (uint32_t i = 0; i < plot->n_troubles; i++) {
        struct sim_trouble *tr = &plot->troubles[i];
        net->timer_stop(net, &tr->begin);
        tr->is_waiting = false;
        if (!tr->end.is_armed) continue;
        net->timer_stop(net, &tr->end);
        if (tr->end.fire != start_again) tr->end.fire(&tr->end);
    }
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].now == NULL) sim_start(c, &c->workers[i]);
    if (c->router.now == NULL) sim_start(c, &c->router);
}
