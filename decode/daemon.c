/* The daemon's own affairs: what the worker's ports do in the real world, load and state for others, draining, the
 * watchdog. */
#include "decode/daemon.h"

#include <inttypes.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/metrics/metrics.h"

#define SHUTDOWN_GRACE_MS 2000u /* for what is queued on router streams */
#define HUNG_GRACE_MS     500u

/* --- the end ----------------------------------------------------------------------------------------------- */

static void on_rpc_shut(void *user)
{
    struct td_decode_daemon *d = user;
    td_loop_stop(d->loop);
}

void td_decode_daemon_stop(struct td_decode_daemon *d)
{
    struct td_env *env = td_loop_env(d->loop);
    if (d->phase == TD_DECODE_STOPPING) return;
    TD_INFO("stopping", "requests=%u", td_decode_worker_n_requests(d->worker));
    d->phase = TD_DECODE_STOPPING;
    td_rpc_set_serving(d->rpc, false);
    env->timer_stop(env, &d->drain_timer);
    env->timer_stop(env, &d->watchdog_timer);
    td_fleet_member_leave(d->member);
    d->member = NULL;
    td_decode_worker_close_streams(d->worker);
    td_rpc_shutdown(d->rpc, d->is_hung ? HUNG_GRACE_MS : SHUTDOWN_GRACE_MS, on_rpc_shut, d);
}

static void deliver_stop(struct td_mail *m)
{
    struct td_decode_daemon *d = TD_CONTAINER_OF(m, struct td_decode_daemon, stop_mail);
    d->is_stop_posted = false;
    td_decode_daemon_stop(d);
}

static void stop_soon(struct td_decode_daemon *d)
{
    if (d->is_stop_posted || d->phase == TD_DECODE_STOPPING) return;
    d->is_stop_posted = true;
    d->stop_mail.deliver = deliver_stop;
    td_loop_post(d->loop, &d->stop_mail);
}

static void on_drain_timer(struct td_timer *t)
{
    struct td_decode_daemon *d = TD_CONTAINER_OF(t, struct td_decode_daemon, drain_timer);
    TD_WARN("drain_timeout", "requests=%u", td_decode_worker_n_requests(d->worker));
    td_decode_worker_end_all(d->worker, TD_E_DRAINING, "the worker's grace period is over");
    td_decode_daemon_stop(d);
}

void td_decode_daemon_drain(struct td_decode_daemon *d)
{
    if (d->phase >= TD_DECODE_DRAINING) return;
    TD_INFO("draining", "requests=%u timeout_ms=%u", td_decode_worker_n_requests(d->worker), d->cfg.drain_timeout);
    d->phase = TD_DECODE_DRAINING;
    td_rpc_set_serving(d->rpc, false);
    struct td_env *env = td_loop_env(d->loop);
    d->drain_timer.fire = on_drain_timer;
    env->timer_start(env, &d->drain_timer, d->cfg.drain_timeout * TD_NS_PER_MS);
    td_decode_worker_drain(d->worker);
    if (d->member != NULL) td_fleet_member_report(d->member);
}

void td_decode_daemon_on_signal(int signum, unsigned nth, void *user)
{
    struct td_decode_daemon *d = user;
    TD_INFO("signal", "number=%d nth=%u", signum, nth);
    if (nth == 1) {
        td_decode_daemon_drain(d);
        return;
    }
    td_decode_worker_end_all(d->worker, TD_E_DRAINING, "the worker was told to stop at once");
    td_decode_daemon_stop(d);
}

/* --- the worker's ports ------------------------------------------------------------------------------------ */

static enum td_status submit(void *self, struct td_batch *b)
{
    return td_engine_submit(((struct td_decode_daemon *)self)->engine, b);
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

/* Both come from inside the worker, which is not to be called back: the stop is mail. */
static void on_drained(void *self)
{
    struct td_decode_daemon *d = self;
    TD_INFO("drained", "name=%s", d->cfg.name);
    stop_soon(d);
}

static void on_broken(void *self, enum td_status st, const char *why)
{
    struct td_decode_daemon *d = self;
    TD_ERROR("worker_broken", "status=%s why=\"%s\"", td_status_name(st), why);
    d->exit_status = 1;
    stop_soon(d);
}

struct td_decode_ports td_decode_daemon_ports(struct td_decode_daemon *d)
{
    return (struct td_decode_ports){
        .env = td_loop_env(d->loop),
        .self = d,
        .submit = submit,
        .send = send_events,
        .close = close_call,
        .introduce = introduce,
        .check_peer = check_peer,
        .send_peer = send_peer,
        .transport = transport,
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

/* --- the watchdog ------------------------------------------------------------------------------------------ */

/* A step that does not end means a device that never will: this process can only say so and go. */
static void on_watchdog(struct td_timer *t)
{
    struct td_decode_daemon *d = TD_CONTAINER_OF(t, struct td_decode_daemon, watchdog_timer);
    uint64_t age_ns = td_engine_step_age_ns(d->engine);
    if (age_ns > d->cfg.step_timeout * TD_NS_PER_MS) {
        TD_ERROR("step_hangs", "age_ms=%" PRIu64 " step_timeout_ms=%u", age_ns / TD_NS_PER_MS, d->cfg.step_timeout);
        d->is_hung = true;
        d->exit_status = 1;
        td_decode_worker_drain(d->worker); /* nothing new */
        td_decode_worker_end_all(d->worker, TD_E_DEVICE, "a step of the engine hangs");
        td_decode_daemon_stop(d);
        return;
    }
    td_decode_daemon_watch(d);
}

void td_decode_daemon_watch(struct td_decode_daemon *d)
{
    uint64_t ms = d->cfg.step_timeout / 4;
    d->watchdog_timer.fire = on_watchdog;
    struct td_env *env = td_loop_env(d->loop);
    env->timer_start(env, &d->watchdog_timer, (ms < 1000 ? ms : 1000) * TD_NS_PER_MS);
}

/* --- for others -------------------------------------------------------------------------------------------- */

static const char *const phase_names[] = {"starting", "serving", "draining", "stopping"};

void td_decode_daemon_describe(struct td_decode_daemon *d, struct td_buf *out)
{
    td_buf_str(out, "{\"role\":\"decode\",\"name\":");
    td_json_quote_str(out, d->cfg.name);
    td_buf_printf(out, ",\"version\":\"%s\",\"incarnation\":\"%016" PRIx64 "\",\"phase\":\"%s\",\"model\":", TD_VERSION,
                  d->incarnation, phase_names[d->phase]);
    td_json_quote_str(out, d->cfg.model_name);
    td_buf_printf(
        out, ",\"fingerprint\":\"%s\",\"max_context_tokens\":%u,\"engine\":{\"step_age_ms\":%" PRIu64 "},\"worker\":",
        td_model_fingerprint(d->model), d->max_context_tokens, td_engine_step_age_ns(d->engine) / TD_NS_PER_MS);
    td_decode_worker_describe(d->worker, out);
    td_buf_str(out, ",\"peers\":");
    td_decode_recv_describe(d->recv, out);
    td_buf_str(out, ",\"fleet\":");
    if (d->member != NULL)
        td_fleet_member_describe(d->member, out);
    else
        td_buf_str(out, "null");
    td_buf_str(out, "}");
}

bool td_decode_daemon_is_ready(void *user) { return ((struct td_decode_daemon *)user)->phase == TD_DECODE_SERVING; }
void td_decode_daemon_write_statez(void *user, struct td_buf *out) { td_decode_daemon_describe(user, out); }

void td_decode_daemon_load(void *user, Tandem__V1__Load *out)
{
    struct td_decode_daemon *d = user;
    td_decode_worker_load(d->worker, out);
    out->last_step_age_us = td_engine_step_age_ns(d->engine) / 1000;
    out->is_draining = d->phase >= TD_DECODE_DRAINING;
}
