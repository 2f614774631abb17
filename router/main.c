/* tandem-router: the public API in front, the fleet of workers behind. This file is the table of contents.
 *
 * SIGTERM or SIGINT: not ready at once, the gRPC port closes, running requests finish within --drain-timeout, workers
 * are told to look for another router, exit 0. A second SIGINT ends at once. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/process.h"
#include "common/config/address_file.h"
#include "common/http/admin.h"
#include "common/metrics/metrics.h"
#include "router/api.h"
#include "router/page.h"
#include "router/router_int.h"

#define HTTP_GRACE_MS 1000u /* for an admin page that is being read while we leave */

struct daemon {
    struct td_router router;
    struct td_http *http;
    struct td_admin admin;
    struct td_timer drain; /* --drain-timeout, for clients of HTTP */
    bool rpc_has_ended, http_is_ending, http_has_ended;
};

/* --- ready, draining, gone ------------------------------------------------------------------------------- */

void td_router_update_ready(struct td_router *ro)
{
    uint32_t n_prefill = td_fleet_n(&ro->fleet, TANDEM__V1__ROLE__ROLE_PREFILL);
    uint32_t n_decode = td_fleet_n(&ro->fleet, TANDEM__V1__ROLE__ROLE_DECODE);
    td_metric_set(TD_M_workers_prefill, n_prefill);
    td_metric_set(TD_M_workers_decode, n_decode);
    bool is_ready = n_decode > 0 && !ro->is_draining; /* decode workers can do without the others */
    if (is_ready == ro->is_ready) return;
    ro->is_ready = is_ready;
    TD_INFO(is_ready ? "ready" : "not_ready", "prefill=%u decode=%u draining=%d", n_prefill, n_decode, ro->is_draining);
    td_rpc_set_serving(ro->rpc, is_ready);
}

static void on_http_ended(void *user)
{
    struct daemon *d = user;
    d->http_has_ended = true;
    if (d->rpc_has_ended) td_loop_stop(d->router.loop);
}

/* The HTTP port stays open as long as somebody may ask it whether we are ready: until the last answer is out. */
static void end_http(struct daemon *d, bool is_overdue)
{
    bool is_idle = d->rpc_has_ended && d->router.n_clients == 0;
    if (!d->router.is_draining || d->http_is_ending || (!is_idle && !is_overdue)) return;
    d->http_is_ending = true;
    td_http_shutdown(d->http, HTTP_GRACE_MS, on_http_ended, d);
}

static void on_drain_over(struct td_timer *t) { end_http(TD_CONTAINER_OF(t, struct daemon, drain), true); }

static void on_rpc_ended(void *user)
{
    struct daemon *d = user;
    d->rpc_has_ended = true;
    end_http(d, false);
    if (d->http_has_ended) td_loop_stop(d->router.loop);
}

void td_router_client_left(struct td_router *ro)
{
    if (ro->is_draining && ro->n_clients == 0) td_router_end_joins(ro);
    end_http(TD_CONTAINER_OF(ro, struct daemon, router), false);
}

static void on_signal(int signum, unsigned nth, void *user)
{
    struct daemon *d = user;
    struct td_router *ro = &d->router;
    if (nth > 1 && signum == SIGINT) _exit(128 + signum);
    if (ro->is_draining) return;
    TD_INFO("draining", "signal=%d clients=%u drain_timeout_ms=%u", signum, ro->n_clients, ro->cfg.drain_timeout);
    ro->is_draining = true;
    td_router_update_ready(ro);
    td_rpc_set_serving(ro->rpc, false);
    td_rpc_shutdown(ro->rpc, ro->cfg.drain_timeout, on_rpc_ended, d);
    d->drain.fire = on_drain_over;
    ro->env->timer_start(ro->env, &d->drain, ro->cfg.drain_timeout * TD_NS_PER_MS);
    td_router_client_left(ro);
}

/* --- the pages ------------------------------------------------------------------------------------------- */

static bool is_ready(void *user)
{
    struct daemon *d = user;
    return d->router.is_ready;
}

static void write_statez(void *user, struct td_buf *out)
{
    struct daemon *d = user;
    const struct td_router *ro = &d->router;
    td_buf_printf(out,
                  "{\"incarnation\":\"%016" PRIx64 "\",\"is_draining\":%s,\"clients\":%u,\"running\":%u,"
                  "\"waiting\":%u,\"tokenizing\":%u,\"workers\":",
                  ro->incarnation, ro->is_draining ? "true" : "false", ro->n_clients, ro->n_running,
                  ro->admit.n_waiting, ro->admit.n_tokenizing);
    td_fleet_describe(&ro->fleet, out);
    td_buf_str(out, ",\"requests\":");
    td_front_describe(ro, out);
    td_buf_str(out, "}");
}

/* --- start ----------------------------------------------------------------------------------------------- */

static enum td_status open_model(struct td_router *ro, struct td_err *err)
{
    enum td_status st = td_tokenizer_load(ro->cfg.model, &ro->tokenizer, err);
    if (st != TD_OK) return st;
    return td_chat_format_open("auto", ro->tokenizer, &ro->format, err);
}

static enum td_status start_fleet(struct td_router *ro, struct td_err *err)
{
    ro->env = td_loop_env(ro->loop);
    ro->incarnation = ro->env->random(ro->env) | 1; /* never 0 */
    ro->created_s = td_clock_wall_ns() / TD_NS_PER_S;
    td_list_init(&ro->clients);
    td_list_init(&ro->joins);
    /* A command to a worker is never refused for want of queue before link.c's own bound; a client's backlog neither.
     */
    uint64_t queued = 64u << 20;
    if (ro->cfg.max_client_backlog > queued / 2) queued = ro->cfg.max_client_backlog * 2;
    struct td_rpc_options o = {.max_queued_bytes = queued < UINT32_MAX ? (uint32_t)queued : UINT32_MAX};
    enum td_status st = td_rpc_create(ro->loop, &o, &ro->rpc);
    if (st != TD_OK) return st;
    ro->link_options =
        (struct td_link_options){.rpc = ro->rpc, .env = ro->env, .fleet = &ro->fleet, .router = ro->incarnation};
    td_router_bind_fleet(ro);
    td_front_bind(ro);
    td_fleet_init(&ro->fleet, &ro->fleet_ports, ro->cfg.model_name, ro->cfg.worker_timeout);
    td_admit_init(&ro->admit, ro->env, &ro->fleet, ro->cfg.max_queue);
    if (!td_place_parse_on(ro->cfg.prefill_on, &ro->admit.prefill_on))
        return td_err_set(err, TD_E_BAD_CONFIG, "--prefill-on: \"%s\" is not auto, prefill or decode",
                          ro->cfg.prefill_on);
    return TD_OK;
}

static enum td_status listen_on_all(struct daemon *d, struct td_err *err)
{
    struct td_router *ro = &d->router;
    enum td_status st;
    d->admin = (struct td_admin){.config = &ro->cfg, .is_ready = is_ready, .write_statez = write_statez, .user = d};
    struct td_http_options http = {.max_body_bytes = (uint32_t)ro->cfg.max_body,
                                   .max_backlog_bytes = (uint32_t)ro->cfg.max_client_backlog,
                                   .cors_origin = ro->cfg.cors_origin};
    TD_TRY(td_http_create(ro->loop, &http, &d->http));
    TD_TRY(td_admin_add_routes(d->http, &d->admin));
    TD_TRY(td_api_add_routes(ro, d->http));
    TD_TRY(td_page_add_routes(d->http));
    TD_TRY(td_rpc_serve(ro->rpc, ro->cfg.rpc_address, td_router_methods, ro, err));
    TD_TRY(td_http_listen(d->http, ro->cfg.http_address, err));
out:
    return st;
}

static enum td_status write_address_file(struct daemon *d, struct td_err *err)
{
    struct td_router *ro = &d->router;
    const char *colon = strrchr(ro->cfg.rpc_address, ':');
    char rpc[320];
    snprintf(rpc, sizeof rpc, "%.*s:%u", colon != NULL ? (int)(colon - ro->cfg.rpc_address) : 0, ro->cfg.rpc_address,
             td_rpc_port(ro->rpc));
    TD_INFO("listening", "rpc=%s http=%s model=%s", rpc, td_http_address(d->http), ro->cfg.model_name);
    if (ro->cfg.address_file[0] == '\0') return TD_OK;
    return td_address_file_write(ro->cfg.address_file, "router", ro->cfg.name, (int)getpid(), rpc,
                                 td_http_address(d->http), err);
}

int main(int argc, char **argv)
{
    static struct daemon d; /* too large for a stack, one per process */
    struct td_router *ro = &d.router;
    enum td_status st;
    struct td_err err = {{0}};
    td_process_hold_std_fds();
    enum td_config_result how = td_config_load(&ro->cfg, TD_ROUTER, argc, argv);
    if (how != TD_CONFIG_RUN) return how == TD_CONFIG_EXIT_OK ? 0 : 2;
    td_log_open(ro->cfg.name, (enum td_log_level)td_log_level_parse(ro->cfg.log_level));
    TD_TRY(td_process_prepare(&err));
    TD_TRY(open_model(ro, &err));
    TD_TRY(td_loop_create(&ro->loop));
    TD_TRY(start_fleet(ro, &err));
    TD_TRY(listen_on_all(&d, &err));
    TD_TRY(td_loop_on_signal(ro->loop, on_signal, &d));
    TD_TRY(write_address_file(&d, &err));
    st = td_loop_run(ro->loop); /* returns when drained */
out:
    if (st != TD_OK)
        TD_ERROR("start_failed", "status=%s text=\"%s\"", td_status_name(st),
                 err.text[0] != '\0' ? err.text : td_status_text(st));
    td_http_destroy(d.http);
    td_admit_deinit(&ro->admit);
    td_fleet_deinit(&ro->fleet);
    td_rpc_destroy(ro->rpc);
    td_loop_destroy(ro->loop); /* waits for text on pool threads */
    td_chat_format_destroy(ro->format);
    td_tokenizer_destroy(ro->tokenizer);
    return st == TD_OK ? 0 : 1;
}
