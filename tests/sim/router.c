/* What main.c of the router does, and what holds of it after every event. */
#include "tests/sim/router.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "router/router_int.h"

static struct td_tokenizer *tokenizer; /* a token a byte */

/* --- main.c's part ------------------------------------------------------------------------------------------- */

void td_router_update_ready(struct td_router *ro) { (void)ro; }
void td_router_client_left(struct td_router *ro)
{
    if (ro->is_draining && ro->n_clients == 0) td_router_end_joins(ro);
}

static void on_ended(void *user) { td_loop_stop(((struct td_router *)user)->loop); }

void sim_router_drain(struct td_router *ro)
{
    if (ro->is_draining) return;
    ro->is_draining = true;
    td_rpc_shutdown(ro->rpc, ro->cfg.drain_timeout, on_ended, ro);
    td_router_client_left(ro);
}

static void make_tokenizer(const struct sim_world *w)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char ranks[256 * 12], *at = ranks;
    struct td_err err = {{0}};
    for (unsigned i = 0; i < 256; i++) /* one byte in base64, and its rank */
        at += sprintf(at, "%c%c== %u\n", digits[i >> 2], digits[(i & 3) << 4], i);
    if (td_tokenizer_parse_ranks(ranks, (size_t)(at - ranks), "sim.tiktoken", &tokenizer, &err) != TD_OK)
        sim_fail(w, "%s", err.text);
}

struct td_router *sim_router_start(struct td_loop *host, const struct td_config *cfg)
{
    struct td_router *ro = calloc(1, sizeof *ro);
    struct td_err err = {{0}};
    TD_CHECK(ro != NULL);
    if (tokenizer == NULL) make_tokenizer(host->world);
    ro->cfg = *cfg;
    ro->loop = host;
    ro->env = td_loop_env(ro->loop);
    ro->incarnation = ro->env->random(ro->env) | 1;
    ro->tokenizer = tokenizer;
    td_list_init(&ro->clients);
    td_list_init(&ro->joins);
    td_rpc_create(ro->loop, &(struct td_rpc_options){.max_queued_bytes = 64u << 20}, &ro->rpc);
    ro->link_options =
        (struct td_link_options){.rpc = ro->rpc, .env = ro->env, .fleet = &ro->fleet, .router = ro->incarnation};
    td_router_bind_fleet(ro);
    td_front_bind(ro);
    td_fleet_init(&ro->fleet, &ro->fleet_ports, ro->cfg.model_name, ro->cfg.worker_timeout);
    td_admit_init(&ro->admit, ro->env, &ro->fleet, ro->cfg.max_queue);
    if (!td_place_parse_on(ro->cfg.prefill_on, &ro->admit.prefill_on)) sim_fail(host->world, "--prefill-on");
    td_rpc_serve(ro->rpc, ro->cfg.rpc_address, td_router_methods, ro, &err);
    return ro;
}

void sim_router_end(struct td_router *ro)
{
    td_admit_deinit(&ro->admit);
    td_fleet_deinit(&ro->fleet);
    td_rpc_destroy(ro->rpc);
    free(ro);
}

/* --- judgement ------------------------------------------------------------------------------------------------ */

uint64_t sim_router_incarnation(const struct td_router *ro) { return ro->incarnation; }
uint32_t sim_router_n_requests(const struct td_router *ro) { return ro->n_clients; }

static void check_worker(const struct td_router *ro, const struct td_worker *k, bool is_end)
{
    const struct sim_world *w = ro->loop->world;
    /* A decode worker has room for as many as its batch holds, in chunks. */
    if (k->role == TANDEM__V1__ROLE__ROLE_PREFILL && k->n_prefilling > TD_PLACE_PREFILL_DEPTH)
        sim_fail(w, "%u requests at once prefill at %s", k->n_prefilling, k->identity->name);
    if (!is_end) return;
    if (k->n_requests > 0 || k->n_prefilling > 0 || k->prefill_tokens > 0)
        sim_fail(w, "in the end the router still counts %u requests at %s, %u of them in prefill", k->n_requests,
                 k->identity->name, k->n_prefilling);
}

void sim_router_check(const struct td_router *ro, bool is_end)
{
    if (is_end && (ro->n_clients > 0 || ro->n_running > 0 || ro->admit.n_waiting > 0))
        sim_fail(ro->loop->world, "in the end the router has %u clients, %u requests, %u waiting", ro->n_clients,
                 ro->n_running, ro->admit.n_waiting);
    TD_LIST_FOREACH (it, &ro->fleet.workers) check_worker(ro, TD_LIST_ENTRY(it, struct td_worker, link), is_end);
}
