/* The server's life: listening, hostile bytes, shutdown with grace, destruction with calls open. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/metrics/metrics.h"
#include "proto/inference.pb-c.h"
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

static void on_shut(void *user) { *(bool *)user = true; }

/* --- listening --------------------------------------------------------------------------------------------- */
static const struct td_rpc_method no_methods[] = {{.path = NULL}};

static void expect_refused(struct rpc_pair *p, const char *address, const char *why)
{
    struct td_rpc *r = NULL;
    struct td_err err = {.text = ""};
    assert_int_equal(td_rpc_create(p->loop, NULL, &r), TD_OK);
    assert_int_equal(td_rpc_serve(r, address, no_methods, NULL, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, address));
    if (strstr(err.text, why) == NULL) fail_msg("\"%s\" does not say \"%s\"", err.text, why);
    assert_int_equal(td_rpc_port(r), 0);
    td_rpc_destroy(r);
}

static void port_in_use_is_named_with_the_cause(void **state)
{
    struct rpc_pair *p = *state;
    expect_refused(p, p->address, "Address already in use");
}

static void address_that_is_no_address_is_named(void **state)
{
    struct rpc_pair *p = *state;
    expect_refused(p, "127.0.0.1", "host:port");
    expect_refused(p, "127.0.0.1:", "host:port");
    expect_refused(p, ":5000", "host:port");
    expect_refused(p, "127.0.0.1:99999", "host:port");
    expect_refused(p, "127.0.0.1:http", "host:port");
    expect_refused(p, "192.0.2.1:0", "Cannot assign requested address");
}

static int connect_to(const struct rpc_pair *p)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(td_rpc_port(p->server))};
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void garbage_on_the_port_hurts_nobody_else(void **state)
{
    struct rpc_pair *p = *state;
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const char settings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
    unsigned seed = 1;
    for (int i = 0; i < 50; i++) {
        int fd = connect_to(p);
        unsigned char junk[512];
        for (size_t j = 0; j < sizeof junk; j++) junk[j] = (unsigned char)(rand_r(&seed) >> 7);
        if (i % 3 > 0) assert_true(send(fd, preface, sizeof preface - 1, MSG_NOSIGNAL) > 0);
        if (i % 3 > 1) (void)!send(fd, settings, sizeof settings, MSG_NOSIGNAL);
        (void)!send(fd, junk, sizeof junk, MSG_NOSIGNAL);
        close(fd);
    }
    p->next_echoes = p->next_finishes = true;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 5, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_OK);
    assert_int_equal(p->n_served, 1);
}

/* --- shutdown ---------------------------------------------------------------------------------------------- */
static void shutdown_lets_running_calls_finish(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end running, late;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &running);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    td_rpc_shutdown(p->server, 60000, on_shut, &p->is_shut);
    rpc_pair_for_ms(p, 50);
    assert_false(p->is_shut);
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &late);
    RPC_PAIR_UNTIL(p, late.n_closed == 1);
    assert_int_equal(late.st, TD_E_PEER_LOST);
    assert_int_equal(rpc_pair_send(p->served[0].call, 1, "", 0), TD_OK);
    td_rpc_finish(p->served[0].call, TD_OK, NULL);
    RPC_PAIR_UNTIL(p, p->is_shut);
    RPC_PAIR_UNTIL(p, running.n_closed == 1);
    assert_int_equal(running.st, TD_OK);
    assert_int_equal(running.n_messages, 1);
    assert_int_equal(p->n_served_closed, 1);
}

static void shutdown_cancels_what_outlives_the_grace(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    uint64_t began = td_clock_ns();
    td_rpc_shutdown(p->server, 100, on_shut, &p->is_shut);
    RPC_PAIR_UNTIL(p, p->is_shut);
    assert_true(td_clock_ns() - began >= 100 * TD_NS_PER_MS);
    assert_int_equal(p->n_served_closed, 1); /* before done */
    assert_int_equal(p->served[0].st, TD_E_CANCELED);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_PEER_LOST);
    assert_int_equal(td_metric_value(TD_M_rpc_calls_open), 0);
}

static void second_shutdown_shortens_the_grace(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    td_rpc_shutdown(p->server, 3600000, on_shut, &p->is_shut);
    td_rpc_shutdown(p->server, 0, NULL, NULL);
    RPC_PAIR_UNTIL(p, p->is_shut);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
}

static void shutdown_without_a_server_is_told_later(void **state)
{
    struct rpc_pair *p = *state;
    bool is_shut = false;
    td_rpc_shutdown(p->client, 0, on_shut, &is_shut);
    assert_false(is_shut);
    RPC_PAIR_UNTIL(p, is_shut);
}

static void port_is_free_again_after_shutdown(void **state)
{
    struct rpc_pair *p = *state;
    rpc_pair_destroy_server(p);
    rpc_pair_serve(p); /* the same address */
    p->next_finishes = true;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, true, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_OK);
}

/* --- destruction ------------------------------------------------------------------------------------------- */
static void destroying_a_server_closes_its_calls_inside(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e[3];
    for (unsigned i = 0; i < 3; i++) rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e[i]);
    RPC_PAIR_UNTIL(p, p->n_served == 3);
    rpc_pair_send(p->served[0].call, 1, "", 100);
    rpc_pair_send(e[1].call, 1, "", 100);
    td_rpc_destroy(p->server);
    p->server = NULL;
    assert_int_equal(p->n_served_closed, 3);
    for (unsigned i = 0; i < 3; i++) {
        RPC_PAIR_UNTIL(p, e[i].n_closed == 1);
        assert_int_equal(e[i].st, TD_E_PEER_LOST);
        assert_string_not_equal(e[i].text, "");
    }
}

static void destroying_a_client_closes_its_calls_inside(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e[2];
    for (unsigned i = 0; i < 2; i++) rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e[i]);
    RPC_PAIR_UNTIL(p, p->n_served == 2);
    struct rpc_end fresh;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &fresh); /* nothing of it has left yet */
    td_rpc_destroy(p->client);
    p->client = NULL;
    p->channel = NULL; /* went with it */
    assert_int_equal(e[0].n_closed, 1);
    assert_int_equal(e[1].n_closed, 1);
    assert_int_equal(fresh.n_closed, 1);
    assert_int_equal(e[0].st, TD_E_CANCELED);
    RPC_PAIR_UNTIL(p, p->n_served_closed == p->n_served);
    assert_int_equal(p->served[0].st, TD_E_CANCELED);
}

static void pair_without_any_call_comes_and_goes(void **state) { (void)state; }

int main(void)
{
    td_log_open("test", TD_LOG_ERROR);
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(port_in_use_is_named_with_the_cause),         T(address_that_is_no_address_is_named),
        T(garbage_on_the_port_hurts_nobody_else),       T(shutdown_lets_running_calls_finish),
        T(shutdown_cancels_what_outlives_the_grace),    T(second_shutdown_shortens_the_grace),
        T(shutdown_without_a_server_is_told_later),     T(port_is_free_again_after_shutdown),
        T(destroying_a_server_closes_its_calls_inside), T(destroying_a_client_closes_its_calls_inside),
        T(pair_without_any_call_comes_and_goes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
