/* grpc.health.v1 as a client of ours sees it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/log.h"
#include "proto/health.pb-c.h"
#include "tests/support/rpc_pair.h"

static struct rpc_pair pair;

static int set_up(void **state)
{
    rpc_pair_open(&pair);
    *state = &pair;
    return 0;
}

static int tear_down(void **state)
{
    rpc_pair_close(*state);
    return 0;
}

struct asked {
    struct td_rpc_call *call;
    unsigned n, n_closed;
    int last;
    enum td_status st;
};

static void on_state(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct asked *a = td_rpc_call_user(c);
    a->n++;
    a->last = (int)((const Grpc__Health__V1__HealthCheckResponse *)(const void *)msg)->status;
}

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)text;
    struct asked *a = td_rpc_call_user(c);
    a->st = st;
    a->n_closed++;
    a->call = NULL;
}

static void ask(struct rpc_pair *p, const char *path, const char *service, struct asked *a)
{
    static const struct td_rpc_handlers h = {.on_message = on_state, .on_closed = on_closed};
    *a = (struct asked){.last = -1};
    assert_int_equal(td_rpc_call_start(p->channel, path, &grpc__health__v1__health_check_response__descriptor,
                                       TD_NEVER_NS, false, NULL, &h, a, &a->call),
                     TD_OK);
    Grpc__Health__V1__HealthCheckRequest m = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    m.service = (char *)(uintptr_t)service;
    assert_int_equal(td_rpc_send(a->call, &m.base), TD_OK);
    td_rpc_half_close(a->call);
}

#define CHECK "/grpc.health.v1.Health/Check"
#define WATCH "/grpc.health.v1.Health/Watch"
enum {
    SERVING = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING,
    NOT_SERVING = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING,
    SERVICE_UNKNOWN = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN,
};

static void expect_answer(struct rpc_pair *p, const char *service, enum td_status st, int state)
{
    struct asked a;
    ask(p, CHECK, service, &a);
    RPC_PAIR_UNTIL(p, a.n_closed == 1);
    assert_int_equal(a.st, st);
    assert_int_equal(a.last, state);
}

static void check_tells_what_the_daemon_said(void **state)
{
    struct rpc_pair *p = *state;
    expect_answer(p, "", TD_OK, NOT_SERVING); /* until told otherwise */
    td_rpc_set_serving(p->server, true);
    expect_answer(p, "", TD_OK, SERVING);
    expect_answer(p, "tandem.test.Echo", TD_OK, SERVING);
    expect_answer(p, "grpc.health.v1.Health", TD_OK, SERVING);
    expect_answer(p, "tandem.test.Ech", TD_E_NOT_FOUND, -1);
    expect_answer(p, "tandem.test.Echo/Unary", TD_E_NOT_FOUND, -1);
    td_rpc_set_serving(p->server, false);
    expect_answer(p, "", TD_OK, NOT_SERVING);
}

static void watch_tells_each_change(void **state)
{
    struct rpc_pair *p = *state;
    struct asked all, one, unknown;
    ask(p, WATCH, "", &all);
    ask(p, WATCH, "tandem.test.Echo", &one);
    ask(p, WATCH, "no.such.Service", &unknown);
    RPC_PAIR_UNTIL(p, all.n == 1 && one.n == 1 && unknown.n == 1);
    assert_int_equal(all.last, NOT_SERVING);
    assert_int_equal(unknown.last, SERVICE_UNKNOWN);
    td_rpc_set_serving(p->server, true);
    td_rpc_set_serving(p->server, true); /* no change, no message */
    RPC_PAIR_UNTIL(p, all.n == 2 && one.n == 2);
    assert_int_equal(all.last, SERVING);
    assert_int_equal(one.last, SERVING);
    td_rpc_cancel(one.call);
    RPC_PAIR_UNTIL(p, one.n_closed == 1);
    td_rpc_set_serving(p->server, false);
    RPC_PAIR_UNTIL(p, all.n == 3);
    assert_int_equal(all.last, NOT_SERVING);
    assert_int_equal(unknown.last, SERVICE_UNKNOWN);
    td_rpc_cancel(all.call);
    td_rpc_cancel(unknown.call);
    RPC_PAIR_UNTIL(p, all.n_closed == 1 && unknown.n_closed == 1);
}

static void on_shut(void *user) { *(bool *)user = true; }

static void watch_does_not_hold_up_a_shutdown(void **state)
{
    struct rpc_pair *p = *state;
    td_rpc_set_serving(p->server, true);
    struct asked a;
    ask(p, WATCH, "", &a);
    RPC_PAIR_UNTIL(p, a.n == 1);
    td_rpc_shutdown(p->server, 3600000, on_shut, &p->is_shut);
    RPC_PAIR_UNTIL(p, p->is_shut && a.n_closed == 1);
    assert_int_equal(a.n, 2);
    assert_int_equal(a.last, NOT_SERVING);
    assert_int_equal(a.st, TD_E_DRAINING);
}

int main(void)
{
    td_log_open("test", TD_LOG_ERROR);
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(check_tells_what_the_daemon_said),
        T(watch_tells_each_change),
        T(watch_does_not_hold_up_a_shutdown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
