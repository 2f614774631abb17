/* From SERVING to the end: signals, draining, stopping, the watchdog, and what others see of it. */
#include "common/worker/worker.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/metrics/metrics.h"
#include "common/model/weights.h"
#include "kernels/device.h"

#define SHUTDOWN_GRACE_MS 2000u /* for what is queued on streams */
#define HURRIED_GRACE_MS  250u
#define LINGER_MS         250u /* a request that the router sent before it knew is refused by name, not by a closed port */
#define HTTP_GRACE_MS     200u /* for an admin page that is being read while we leave */

static const char *const phase_names[] = {"starting", "serving", "draining", "stopping"};

/* --- the end ----------------------------------------------------------------------------------------------- */

static void on_http_ended(void *user) { td_loop_stop(((struct td_worker *)user)->loop); }

static void on_rpc_ended(void *user)
{
    struct td_worker *w = user;
    td_http_shutdown(w->http, HTTP_GRACE_MS, on_http_ended, w);
}

/* Requests that still run get their answer; leaves the fleet, closes ports, then the loop ends. */
static void on_stop(struct td_timer *t)
{
    struct td_worker *w = TD_CONTAINER_OF(t, struct td_worker, stop_timer);
    if (w->phase == TD_WORKER_STOPPING) return;
    TD_INFO("stopping", "requests=%u", w->role->n_requests(w->self));
    w->phase = TD_WORKER_STOPPING;
    struct td_env *env = td_loop_env(w->loop);
    env->timer_stop(env, &w->drain_timer);
    env->timer_stop(env, &w->watchdog_timer);
    td_rpc_set_serving(w->rpc, false);
    td_fleet_member_leave(w->member);
    w->member = NULL;
    w->role->drain(w->self);
    if (w->role->n_requests(w->self) > 0) w->role->end_all(w->self, w->end_status, w->end_text);
    if (w->role->close_streams != NULL) w->role->close_streams(w->self);
    td_rpc_shutdown(w->rpc, w->is_hurried ? HURRIED_GRACE_MS : SHUTDOWN_GRACE_MS, on_rpc_ended, w);
}

/* May be called from anywhere, the role's inside included: the stop itself comes from the timer. */
static void stop_in(struct td_worker *w, uint64_t ns)
{
    struct td_env *env = td_loop_env(w->loop);
    w->stop_timer.fire = on_stop;
    if (w->phase != TD_WORKER_STOPPING) env->timer_start(env, &w->stop_timer, ns);
}

/* The end, now; what still runs is answered with this. */
static void end_now(struct td_worker *w, enum td_status st, const char *text)
{
    w->end_status = st;
    snprintf(w->end_text, sizeof w->end_text, "%s", text);
    stop_in(w, 0);
}

static void on_drain_timer(struct td_timer *t)
{
    struct td_worker *w = TD_CONTAINER_OF(t, struct td_worker, drain_timer);
    TD_WARN("drain_timeout", "requests=%u", w->role->n_requests(w->self));
    end_now(w, TD_E_DRAINING, "the worker's grace period is over");
}

void td_worker_drain(struct td_worker *w)
{
    if (w->phase != TD_WORKER_SERVING) return;
    TD_INFO("draining", "requests=%u timeout_ms=%u", w->role->n_requests(w->self), w->cfg.drain_timeout);
    w->phase = TD_WORKER_DRAINING;
    td_rpc_set_serving(w->rpc, false);
    struct td_env *env = td_loop_env(w->loop);
    w->drain_ns = env->now_ns(env);
    w->drain_timer.fire = on_drain_timer;
    env->timer_start(env, &w->drain_timer, w->cfg.drain_timeout * TD_NS_PER_MS);
    w->role->drain(w->self);
    if (w->member != NULL) td_fleet_member_report(w->member);
}

void td_worker_drained(struct td_worker *w)
{
    struct td_env *env = td_loop_env(w->loop);
    if (w->stop_timer.is_armed) return;
    uint64_t since_ns = env->now_ns(env) - w->drain_ns, linger_ns = LINGER_MS * TD_NS_PER_MS;
    TD_DEBUG("drained", "name=%s", w->cfg.name);
    stop_in(w, since_ns < linger_ns ? linger_ns - since_ns : 0);
}

void td_worker_on_signal(int signum, unsigned nth, void *user)
{
    struct td_worker *w = user;
    TD_INFO("signal", "number=%d nth=%u", signum, nth);
    if (nth == 1) {
        td_worker_drain(w);
        return;
    }
    if (nth > 2) _exit(128 + signum); /* even the hurried way takes too long for somebody */
    w->is_hurried = true;
    w->exit_status = 128 + signum;
    if (w->phase == TD_WORKER_STOPPING)
        td_rpc_shutdown(w->rpc, HURRIED_GRACE_MS, on_rpc_ended, w); /* shortens the grace that runs */
    end_now(w, TD_E_DRAINING, "the worker was told to stop at once");
}

void td_worker_broken(struct td_worker *w, enum td_status st, const char *why)
{
    if (w->exit_status != 0) return;
    TD_ERROR("worker_broken", "status=%s why=\"%s\"", td_status_name(st), why);
    w->exit_status = 1;
    end_now(w, TD_E_DEVICE, why);
}

/* --- the watchdog ------------------------------------------------------------------------------------------ */

/* A step that does not end means a device that never will, and a transfer that hears nobody leaves every hand-off
 * waiting: this process can only say so and go. */
static void on_watchdog(struct td_timer *t)
{
    struct td_worker *w = TD_CONTAINER_OF(t, struct td_worker, watchdog_timer);
    struct td_xfer_stats x = {0};
    w->xfer_ops->stats(w->xfer, &x);
    if (x.is_deaf) {
        td_worker_broken(w, TD_E_IO, "the transfer receives no messages any more");
        return;
    }
    uint64_t age_ns = td_engine_step_age_ns(w->engine);
    if (age_ns <= w->cfg.step_timeout * TD_NS_PER_MS) {
        td_worker_watch(w);
        return;
    }
    TD_ERROR("step_hangs", "age_ms=%" PRIu64 " step_timeout_ms=%u", age_ns / TD_NS_PER_MS, w->cfg.step_timeout);
    w->is_hurried = true;
    td_worker_broken(w, TD_E_DEVICE, "a step of the engine hangs");
}

void td_worker_watch(struct td_worker *w)
{
    uint64_t ms = w->cfg.step_timeout / 4;
    w->watchdog_timer.fire = on_watchdog;
    struct td_env *env = td_loop_env(w->loop);
    env->timer_start(env, &w->watchdog_timer, (ms < 1000 ? ms : 1000) * TD_NS_PER_MS);
}

/* --- for others -------------------------------------------------------------------------------------------- */

static void describe_transfer(const struct td_worker *w, struct td_buf *out)
{
    struct td_xfer_stats x = {0};
    w->xfer_ops->stats(w->xfer, &x);
    td_buf_printf(out,
                  "{\"name\":\"%s\",\"puts\":%" PRIu64 ",\"segments\":%" PRIu64 ",\"put_bytes\":%" PRIu64
                  ",\"sent\":%" PRIu64 ",\"received\":%" PRIu64 ",\"bad_messages\":%" PRIu64
                  ",\"dropped_messages\":%" PRIu64 ",\"peers_lost\":%" PRIu64 "}",
                  w->xfer_ops->name, x.n_puts, x.n_put_segs, x.put_bytes, x.n_sent, x.n_received, x.n_bad_messages,
                  x.n_dropped_messages, x.n_peers_lost);
}

static void describe_ranks(const struct td_worker *w, struct td_buf *out)
{
    td_buf_str(out, "[");
    for (uint32_t r = 0; r < td_model_n_ranks(w->model); r++) {
        uint64_t sharded, replicated, kv_bytes = 0;
        td_model_rank_bytes(w->model, r, &sharded, &replicated);
        for (int g = 0; g < TD_KV_N_GROUPS; g++) kv_bytes += td_kv_pool_bytes(&w->kv_layout[g]);
        td_buf_printf(out,
                      "%s{\"rank\":%u,\"weight_bytes\":%" PRIu64 ",\"sharded_weight_bytes\":%" PRIu64
                      ",\"replicated_weight_bytes\":%" PRIu64 ",\"kv_bytes\":%" PRIu64 "}",
                      r == 0 ? "" : ",", r, sharded + replicated, sharded, replicated, kv_bytes);
    }
    td_buf_str(out, "]");
}

void td_worker_describe(void *user, struct td_buf *out)
{
    struct td_worker *w = user;
    td_buf_printf(out, "{\"role\":\"%s\",\"name\":", td_daemon_role(w->role->daemon));
    td_json_quote_str(out, w->cfg.name);
    td_buf_printf(out, ",\"version\":\"%s\",\"incarnation\":\"%016" PRIx64 "\",\"phase\":\"%s\",\"model\":", TD_VERSION,
                  w->incarnation, phase_names[w->phase]);
    td_json_quote_str(out, w->cfg.model_name);
    td_buf_printf(out,
                  ",\"fingerprint\":\"%s\",\"weight_bytes\":%" PRIu64
                  ",\"max_context_tokens\":%u,\"engine\":{\"step_age_ms\":%" PRIu64 "}",
                  td_model_fingerprint(w->model), td_model_weight_bytes(w->model), w->max_context_tokens,
                  td_engine_step_age_ns(w->engine) / TD_NS_PER_MS);
    td_buf_str(out, ",\"ranks\":");
    describe_ranks(w, out);
    td_buf_str(out, ",\"kv\":");
    td_kv_pages_describe(w->kv, out);
    w->role->describe(w->self, out);
    td_buf_str(out, ",\"transfer\":");
    describe_transfer(w, out);
    td_buf_str(out, ",\"fleet\":");
    if (w->member != NULL)
        td_fleet_member_describe(w->member, out);
    else
        td_buf_str(out, "null");
    td_buf_str(out, "}");
}

bool td_worker_is_ready(void *user) { return ((struct td_worker *)user)->phase == TD_WORKER_SERVING; }

void td_worker_refresh_metrics(void *user)
{
    struct td_worker *w = user;
    td_metric_set(TD_M_kv_pages_free_sliding, td_kv_pages_n_free(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_free_full, td_kv_pages_n_free(w->kv, TD_KV_FULL));
    td_metric_set(TD_M_kv_pages_cached_sliding, td_kv_pages_n_kept(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_cached_full, td_kv_pages_n_kept(w->kv, TD_KV_FULL));
    td_metric_set(TD_M_kv_pages_total_sliding, td_kv_pages_n_total(w->kv, TD_KV_SLIDING));
    td_metric_set(TD_M_kv_pages_total_full, td_kv_pages_n_total(w->kv, TD_KV_FULL));
    uint64_t n_saturated = td_device_n_saturated(td_model_device_of(w->model));
    td_metric_add(TD_M_kv_values_saturated, n_saturated - w->n_saturated);
    w->n_saturated = n_saturated;
    if (w->role->refresh_metrics != NULL) w->role->refresh_metrics(w->self);
}

void td_worker_load(void *user, Tandem__V1__Load *out)
{
    struct td_worker *w = user;
    w->role->load(w->self, out);
    out->last_step_age_us = td_engine_step_age_ns(w->engine) / 1000;
    out->is_draining = w->phase >= TD_WORKER_DRAINING;
}

uint32_t td_worker_prefixes(void *user, bool from_start, uint64_t *out, bool *is_all_out)
{
    struct td_worker *w = user;
    const struct td_kv_prefix *p = w->role->prefix != NULL ? w->role->prefix(w->self) : NULL;
    *is_all_out = false;
    if (p == NULL) return 0;
    if (from_start) w->teller = (struct td_kv_teller){0};
    return td_kv_prefix_tell(p, &w->teller, out, TD_FLEET_MAX_CHANGES, is_all_out);
}
