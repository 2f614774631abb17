/* The daemon's own affairs: the worker's ports in the real world, draining and stopping, the watchdog, what others see.
 */
#include "prefill/daemon.h"

#include <inttypes.h>
#include <signal.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/metrics/metrics.h"

#define SHUTDOWN_GRACE_MS 2000u /* for what is queued on streams */
#define HUNG_GRACE_MS     500u
#define LINGER_MS         250u /* a Run that the router sent before it knew is refused by name, not by a closed port */
#define HTTP_GRACE_MS     200u /* for an admin page that is being read while we leave */

/* ---- the end -------------------------------------------------------------------------------------------------------
 */

static void on_http_ended(void *user) { td_loop_stop(((struct td_prefill_daemon *)user)->loop); }
static void on_rpc_ended(void *user)
{
    struct td_prefill_daemon *d = user;
    td_http_shutdown(d->http, HTTP_GRACE_MS, on_http_ended, d);
}

/* Leaves the fleet, closes ports, then the loop ends. */
static void on_stop(struct td_timer *t)
{
    struct td_prefill_daemon *d = TD_CONTAINER_OF(t, struct td_prefill_daemon, stop_timer);
    if (d->phase == TD_PREFILL_STOPPING) return;
    TD_INFO("stopping", "requests=%u", td_prefill_worker_n_runs(d->worker));
    d->phase = TD_PREFILL_STOPPING;
    struct td_env *env = td_loop_env(d->loop);
    env->timer_stop(env, &d->drain_timer);
    env->timer_stop(env, &d->watchdog_timer);
    td_rpc_set_serving(d->rpc, false);
    td_fleet_member_leave(d->member);
    d->member = NULL;
    td_rpc_shutdown(d->rpc, d->is_hung ? HUNG_GRACE_MS : SHUTDOWN_GRACE_MS, on_rpc_ended, d);
}

/* May be called from anywhere, the worker's inside included. */
static void stop_in(struct td_prefill_daemon *d, uint64_t ns)
{
    struct td_env *env = td_loop_env(d->loop);
    d->stop_timer.fire = on_stop;
    if (d->phase != TD_PREFILL_STOPPING) env->timer_start(env, &d->stop_timer, ns);
}

/* No new request; those that run get this answer now; then the end. */
static void end_now(struct td_prefill_daemon *d, enum td_status st, const char *text)
{
    td_prefill_worker_drain(d->worker);
    td_prefill_worker_end_all(d->worker, st, text);
    stop_in(d, 0);
}

static void on_drain_timer(struct td_timer *t)
{
    struct td_prefill_daemon *d = TD_CONTAINER_OF(t, struct td_prefill_daemon, drain_timer);
    TD_WARN("drain_timeout", "requests=%u", td_prefill_worker_n_runs(d->worker));
    end_now(d, TD_E_DRAINING, "the worker's grace period is over");
}

void td_prefill_daemon_drain(struct td_prefill_daemon *d)
{
    if (d->phase >= TD_PREFILL_DRAINING) return;
    TD_INFO("draining", "requests=%u timeout_ms=%u", td_prefill_worker_n_runs(d->worker), d->cfg.drain_timeout);
    d->phase = TD_PREFILL_DRAINING;
    td_rpc_set_serving(d->rpc, false);
    struct td_env *env = td_loop_env(d->loop);
    d->drain_ns = env->now_ns(env);
    d->drain_timer.fire = on_drain_timer;
    env->timer_start(env, &d->drain_timer, d->cfg.drain_timeout * TD_NS_PER_MS);
    td_prefill_worker_drain(d->worker);
    if (d->member != NULL) td_fleet_member_report(d->member);
}

void td_prefill_daemon_on_signal(int signum, unsigned nth, void *user)
{
    struct td_prefill_daemon *d = user;
    TD_INFO("signal", "number=%d nth=%u", signum, nth);
    if (nth == 1)
        td_prefill_daemon_drain(d);
    else if (signum == SIGINT && nth > 2)
        _exit(128 + signum);
    else
        end_now(d, TD_E_DRAINING, "the worker was told to stop at once");
}

/* ---- the worker's ports --------------------------------------------------------------------------------------------
 */

static enum td_status submit(void *self, struct td_batch *b)
{
    return td_engine_submit(((struct td_prefill_daemon *)self)->engine, b);
}

static void on_drained(void *self)
{
    struct td_prefill_daemon *d = self;
    struct td_env *env = td_loop_env(d->loop);
    if (d->stop_timer.is_armed) return;
    uint64_t since_ns = env->now_ns(env) - d->drain_ns, linger_ns = LINGER_MS * TD_NS_PER_MS;
    TD_DEBUG("drained", "name=%s", d->cfg.name);
    stop_in(d, since_ns < linger_ns ? linger_ns - since_ns : 0);
}

struct td_prefill_ports td_prefill_daemon_ports(struct td_prefill_daemon *d)
{
    return (struct td_prefill_ports){
        .env = td_loop_env(d->loop),
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
    if (td_status_scope(st) != TD_SCOPE_PROCESS) return;
    /* A device that failed once is not trusted with the next request. */
    TD_ERROR("worker_broken", "status=%s", td_status_name(st));
    d->exit_status = 1;
    end_now(d, TD_E_DEVICE, "the worker's device failed");
}

void td_prefill_daemon_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes)
{
    td_prefill_worker_on_send_ended(((struct td_prefill_daemon *)self)->worker, s, st, kv_bytes);
}

/* ---- the watchdog --------------------------------------------------------------------------------------------------
 */

/* A step that does not end means a device that never will: this process can only say so and go. */
static void on_watchdog(struct td_timer *t)
{
    struct td_prefill_daemon *d = TD_CONTAINER_OF(t, struct td_prefill_daemon, watchdog_timer);
    uint64_t age_ns = td_engine_step_age_ns(d->engine);
    if (age_ns <= d->cfg.step_timeout * TD_NS_PER_MS) {
        td_prefill_daemon_watch(d);
        return;
    }
    TD_ERROR("step_hangs", "age_ms=%" PRIu64 " step_timeout_ms=%u", (uint64_t)(age_ns / TD_NS_PER_MS),
             d->cfg.step_timeout);
    d->is_hung = true;
    d->exit_status = 1;
    end_now(d, TD_E_DEVICE, "a step of the engine hangs");
}

void td_prefill_daemon_watch(struct td_prefill_daemon *d)
{
    uint64_t ms = d->cfg.step_timeout / 4;
    d->watchdog_timer.fire = on_watchdog;
    struct td_env *env = td_loop_env(d->loop);
    env->timer_start(env, &d->watchdog_timer, (ms < 1000 ? ms : 1000) * TD_NS_PER_MS);
}

/* ---- for others ----------------------------------------------------------------------------------------------------
 */

static const char *const phase_names[] = {"starting", "serving", "draining", "stopping"};

void td_prefill_daemon_describe(void *user, struct td_buf *out)
{
    struct td_prefill_daemon *d = user;
    struct td_xfer_stats x = {0};
    d->xfer_ops->stats(d->xfer, &x);
    td_buf_str(out, "{\"role\":\"prefill\",\"name\":");
    td_json_quote_str(out, d->cfg.name);
    td_buf_printf(out, ",\"version\":\"%s\",\"incarnation\":\"%016" PRIx64 "\",\"phase\":\"%s\",\"model\":", TD_VERSION,
                  d->incarnation, phase_names[d->phase]);
    td_json_quote_str(out, d->cfg.model_name);
    td_buf_printf(out,
                  ",\"fingerprint\":\"%s\",\"weight_bytes\":%" PRIu64
                  ",\"max_context_tokens\":%u,\"chunk_tokens\":%u,\"engine\":{\"step_age_ms\":%" PRIu64 "},\"worker\":",
                  td_model_fingerprint(d->model), td_model_weight_bytes(d->model), d->max_context_tokens,
                  d->chunk_tokens, (uint64_t)(td_engine_step_age_ns(d->engine) / TD_NS_PER_MS));
    td_prefill_worker_describe(d->worker, out);
    td_buf_str(out, ",\"handoff\":");
    td_tx_describe(td_prefill_send_tx(d->send), out);
    td_buf_str(out, ",\"kv\":");
    td_kv_pages_describe(d->kv, out);
    td_buf_printf(out,
                  ",\"transfer\":{\"name\":\"%s\",\"puts\":%" PRIu64 ",\"segments\":%" PRIu64 ",\"put_bytes\":%" PRIu64
                  ",\"sent\":%" PRIu64 ",\"received\":%" PRIu64 ",\"bad_messages\":%" PRIu64
                  ",\"dropped_messages\":%" PRIu64 ",\"peers_lost\":%" PRIu64 "},\"fleet\":",
                  d->xfer_ops->name, x.n_puts, x.n_put_segs, x.put_bytes, x.n_sent, x.n_received, x.n_bad_messages,
                  x.n_dropped_messages, x.n_peers_lost);
    if (d->member != NULL)
        td_fleet_member_describe(d->member, out);
    else
        td_buf_str(out, "null");
    td_buf_str(out, "}");
}

bool td_prefill_daemon_is_ready(void *user) { return ((struct td_prefill_daemon *)user)->phase == TD_PREFILL_SERVING; }

void td_prefill_daemon_refresh_metrics(void *user)
{
    struct td_prefill_daemon *d = user;
    td_metric_set(TD_M_kv_pages_free_sliding, td_kv_pages_n_free(d->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_free_full, td_kv_pages_n_free(d->kv, TD_KV_FULL));
    td_metric_set(TD_M_kv_pages_total_sliding, td_kv_pages_n_total(d->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_total_full, td_kv_pages_n_total(d->kv, TD_KV_FULL));
}

void td_prefill_daemon_load(void *user, Tandem__V1__Load *out)
{
    struct td_prefill_daemon *d = user;
    td_prefill_worker_load(d->worker, out);
    out->last_step_age_us = td_engine_step_age_ns(d->engine) / 1000;
    out->is_draining = d->phase >= TD_PREFILL_DRAINING;
}
