/* Channels: addresses that nobody serves, peers that die and come back, closing with calls open. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/log.h"
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

static void call_to_nobody_fails_at_once(void **state)
{
    struct rpc_pair *p = *state;
    rpc_pair_destroy_server(p);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_PEER_LOST);
    assert_string_equal(td_status_grpc_name(e.st), "UNAVAILABLE");
    assert_string_not_equal(e.text, "");
}

static void address_that_cannot_be_parsed_fails_its_calls(void **state)
{
    struct rpc_pair *p = *state;
    td_rpc_channel_close(p->channel);
    assert_int_equal(td_rpc_channel_open(p->client, "unix-or-what://:::/", &p->channel), TD_OK);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, rpc_pair_in_ms(20000), false, &e);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_not_equal(e.st, TD_OK);
}

static void waiting_call_goes_through_once_the_server_is_there(void **state)
{
    struct rpc_pair *p = *state;
    rpc_pair_destroy_server(p);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, true, &e);
    rpc_pair_send(e.call, 1, "", 0);
    rpc_pair_for_ms(p, 250);
    assert_int_equal(e.n_closed, 0);
    p->next_finishes = true;
    uint64_t began = td_clock_ns();
    rpc_pair_serve(p);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_OK);
    assert_true(td_clock_ns() - began < 10 * TD_NS_PER_S); /* back-off is short */
}

static void waiting_call_keeps_its_deadline(void **state)
{
    struct rpc_pair *p = *state;
    rpc_pair_destroy_server(p);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, rpc_pair_in_ms(100), true, &e);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_DEADLINE);
}

static void deadline_in_the_past_fails(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, 1, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_DEADLINE);
}

static void lost_connection_ends_calls_as_peer_lost(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    rpc_pair_send(p->served[0].call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_messages == 1);
    td_rpc_destroy(p->server);
    p->server = NULL;
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_PEER_LOST);
    assert_string_not_equal(e.text, "");
}

/* A listener that accepts in its backlog and never answers: a hung host. Only keepalive or the deadline see it. */
static void server_that_never_answers_is_left_at_the_deadline(void **state)
{
    struct rpc_pair *p = *state;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    assert_int_equal(bind(fd, (struct sockaddr *)&a, len), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%u", ntohs(a.sin_port));
    td_rpc_channel_close(p->channel);
    assert_int_equal(td_rpc_channel_open(p->client, address, &p->channel), TD_OK);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, rpc_pair_in_ms(300), false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_DEADLINE);
    close(fd);
}

static void closing_a_channel_cancels_its_calls_and_no_others(void **state)
{
    struct rpc_pair *p = *state;
    struct td_rpc_channel *other = NULL, *first = p->channel;
    assert_int_equal(td_rpc_channel_open(p->client, p->address, &other), TD_OK);
    struct rpc_end a, b;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &a);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    p->channel = other;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &b);
    RPC_PAIR_UNTIL(p, p->n_served == 2);
    td_rpc_channel_close(first);
    assert_int_equal(a.n_closed, 0);
    RPC_PAIR_UNTIL(p, a.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(a.st, TD_E_CANCELED);
    assert_int_equal(p->served[0].st, TD_E_CANCELED);
    assert_int_equal(b.n_closed, 0);
    td_rpc_finish(p->served[1].call, TD_OK, NULL);
    RPC_PAIR_UNTIL(p, b.n_closed == 1);
    assert_int_equal(b.st, TD_OK);
}

/* A call may still be given to the dying connection; then it says so, and the next one finds the new server. */
static void client_finds_a_server_that_came_back(void **state)
{
    struct rpc_pair *p = *state;
    p->next_finishes = true;
    for (unsigned life = 0; life < 3; life++) {
        struct rpc_end e;
        unsigned n_tries = 0;
        do {
            rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, true, &e);
            rpc_pair_send(e.call, 1, "", 0);
            RPC_PAIR_UNTIL(p, e.n_closed == 1);
            assert_true(e.st == TD_OK || e.st == TD_E_PEER_LOST);
            assert_true(++n_tries <= 3);
        } while (e.st != TD_OK);
        RPC_PAIR_UNTIL(p, p->n_served_closed == p->n_served);
        rpc_pair_destroy_server(p);
        rpc_pair_serve(p);
    }
}

int main(void)
{
    td_log_open("test", TD_LOG_ERROR);
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(call_to_nobody_fails_at_once),
        T(address_that_cannot_be_parsed_fails_its_calls),
        T(waiting_call_goes_through_once_the_server_is_there),
        T(waiting_call_keeps_its_deadline),
        T(deadline_in_the_past_fails),
        T(lost_connection_ends_calls_as_peer_lost),
        T(server_that_never_answers_is_left_at_the_deadline),
        T(closing_a_channel_cancels_its_calls_and_no_others),
        T(client_finds_a_server_that_came_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
