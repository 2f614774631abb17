#include "common/loop/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/bytes.h"
#include "common/base/clock.h"

/* One server connection against one plain client socket in the same thread: the client's calls do not block, the loop
 * is turned by hand. */
static struct td_loop *loop;
static struct td_tcp_listener *listener;
static struct td_tcp *server;
static int client = -1;
static struct td_buf got;
static int n_eof, n_drained, n_closed;
static enum td_status closed_why;
static int sndbuf_bytes;
static bool refuses;

static void on_read(struct td_tcp *c, const uint8_t *p, size_t n)
{
    assert_ptr_equal(c, server);
    td_buf_put(&got, p, n);
}
static void on_eof(struct td_tcp *c)
{
    assert_ptr_equal(c, server);
    n_eof++;
}
static void on_drained(struct td_tcp *c)
{
    assert_ptr_equal(c, server);
    assert_int_equal(td_tcp_unsent_bytes(c), 0);
    n_drained++;
}
static void on_closed(struct td_tcp *c, enum td_status why)
{
    assert_ptr_equal(c, server);
    closed_why = why;
    n_closed++;
    server = NULL;
}
static const struct td_tcp_handlers handlers = {on_read, on_eof, on_drained, on_closed};

static void on_accept(struct td_tcp_listener *s, struct td_tcp *c)
{
    assert_ptr_equal(td_tcp_listener_user(s), &handlers);
    if (refuses) {
        td_tcp_reset(c, TD_E_BUSY);
        return;
    }
    server = c;
    td_tcp_accept(c, &handlers, &got, sndbuf_bytes);
    assert_ptr_equal(td_tcp_user(c), &got);
}

/* Turns the loop until cond holds; a minute of nothing fails the test. */
#define TURN_UNTIL(cond)                                                                                               \
    do {                                                                                                               \
        uint64_t end_ = td_clock_ns() + 60 * TD_NS_PER_S;                                                              \
        while (!(cond)) {                                                                                              \
            td_loop_run_once(loop, false);                                                                             \
            if (td_clock_ns() > end_) fail_msg("never happened: %s", #cond);                                           \
        }                                                                                                              \
    } while (0)

static void connect_client(void)
{
    unsigned port = (unsigned)atoi(strrchr(td_tcp_listener_address(listener), ':') + 1);
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
    client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int small = 8192;
    setsockopt(client, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    assert_int_equal(connect(client, (struct sockaddr *)&sa, sizeof sa), 0);
}

static int open_pair(void **state)
{
    (void)state;
    n_eof = n_drained = n_closed = 0;
    closed_why = TD_E_INTERNAL;
    td_buf_clear(&got);
    if (td_loop_create(&loop) != TD_OK) return -1;
    if (td_tcp_listen(loop, "127.0.0.1:0", on_accept, (void *)(uintptr_t)&handlers, &listener, NULL) != TD_OK)
        return -1;
    connect_client();
    if (!refuses) TURN_UNTIL(server != NULL);
    return 0;
}

static int close_pair(void **state)
{
    (void)state;
    td_tcp_unlisten(listener);
    td_loop_destroy(loop);
    assert_null(server);
    if (client >= 0) close(client);
    client = -1;
    td_buf_free(&got);
    return 0;
}

static void say(const char *text) { assert_int_equal(send(client, text, strlen(text), 0), (ssize_t)strlen(text)); }
static void reply(const char *text) { td_tcp_write(server, &(struct td_tcp_vec){text, strlen(text)}, 1); }

static void bytes_go_both_ways(void **state)
{
    (void)state;
    say("ping");
    TURN_UNTIL(got.n == 4);
    assert_memory_equal(got.data, "ping", 4);
    struct td_tcp_vec v[3] = {{"po", 2}, {"", 0}, {"ng", 2}};
    td_tcp_write(server, v, 3);
    assert_int_equal(td_tcp_unsent_bytes(server), 0);
    assert_int_equal(td_tcp_sent_bytes(server), 4);
    char b[16];
    assert_int_equal(recv(client, b, sizeof b, 0), 4);
    assert_memory_equal(b, "pong", 4);
    assert_non_null(strstr(td_tcp_peer(server), "127.0.0.1:"));
}

static void half_close_of_the_peer_is_seen_and_it_can_still_be_answered(void **state)
{
    (void)state;
    shutdown(client, SHUT_WR);
    TURN_UNTIL(n_eof == 1);
    reply("bye");
    td_tcp_finish(server, 60000);
    TURN_UNTIL(n_closed == 1); /* no lingering: the peer's FIN was here already */
    assert_int_equal(closed_why, TD_OK);
    char b[16];
    assert_int_equal(recv(client, b, sizeof b, 0), 3);
    assert_int_equal(recv(client, b, sizeof b, 0), 0);
}

static void a_reset_by_the_peer_closes_with_peer_lost(void **state)
{
    (void)state;
    struct linger now = {1, 0};
    setsockopt(client, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(client);
    client = -1;
    TURN_UNTIL(n_closed == 1);
    assert_int_equal(closed_why, TD_E_PEER_LOST);
}

/* Fills until the kernel takes no more; returns the bytes written. */
static size_t fill(size_t n_extra)
{
    static char block[4096];
    size_t n = 0;
    for (size_t i = 0; i < sizeof block; i++) block[i] = (char)('a' + i % 23);
    while (td_tcp_unsent_bytes(server) <= n_extra) {
        td_tcp_write(server, &(struct td_tcp_vec){block, sizeof block}, 1);
        n += sizeof block;
        assert_true(n < 64u << 20);
    }
    return n;
}

static void a_slow_reader_shows_as_unsent_bytes_and_gets_everything_in_order(void **state)
{
    (void)state;
    size_t total = fill(100000), seen = 0;
    assert_true(total < 1u << 20); /* the small send buffer is why so little went to the kernel */
    assert_int_equal(td_tcp_sent_bytes(server) + td_tcp_unsent_bytes(server), total);
    assert_int_equal(n_drained, 0);
    char b[3000];
    while (seen < total) {
        ssize_t r = recv(client, b, sizeof b, MSG_DONTWAIT);
        for (ssize_t i = 0; i < r; i++, seen++) assert_int_equal(b[i], 'a' + seen % 4096 % 23);
        if (r <= 0) td_loop_run_once(loop, false);
    }
    TURN_UNTIL(n_drained == 1);
    assert_int_equal(td_tcp_sent_bytes(server), total);
}

static void finishing_sends_what_is_unsent_before_the_end(void **state)
{
    (void)state;
    size_t total = fill(50000), seen = 0;
    td_tcp_finish(server, 60000);
    reply("this is too late");
    char b[3000];
    ssize_t r;
    while ((r = recv(client, b, sizeof b, MSG_DONTWAIT)) != 0) {
        if (r > 0)
            seen += (size_t)r;
        else
            td_loop_run_once(loop, false);
    }
    assert_int_equal(seen, total);
    assert_int_equal(n_closed, 0); /* lingers */
    say("still talking");
    close(client);
    client = -1;
    TURN_UNTIL(n_closed == 1);
    assert_int_equal(closed_why, TD_OK);
    assert_int_equal(got.n, 0);
    assert_int_equal(n_drained, 0);
}

static void lingering_ends_by_itself(void **state)
{
    (void)state;
    td_tcp_finish(server, 10);
    TURN_UNTIL(n_closed == 1);
    assert_int_equal(closed_why, TD_OK);
}

static void resetting_tells_the_peer_and_reports_the_first_reason(void **state)
{
    (void)state;
    fill(10000);
    td_tcp_reset(server, TD_E_SLOW_CLIENT);
    td_tcp_reset(server, TD_E_IO);
    td_tcp_finish(server, 1);
    reply("dropped");
    assert_int_equal(n_closed, 0); /* never from within the call */
    TURN_UNTIL(n_closed == 1);
    assert_int_equal(closed_why, TD_E_SLOW_CLIENT);
    char b[65536];
    ssize_t r;
    while ((r = recv(client, b, sizeof b, 0)) > 0) {
    }
    assert_int_equal(r, -1);
    assert_int_equal(errno, ECONNRESET);
}

static void a_paused_connection_reads_nothing_until_resumed(void **state)
{
    (void)state;
    td_tcp_pause(server);
    say("wait");
    for (int i = 0; i < 20; i++) td_loop_run_once(loop, false);
    assert_int_equal(got.n, 0);
    td_tcp_resume(server);
    td_tcp_resume(server);
    TURN_UNTIL(got.n == 4);
}

static void writing_to_a_peer_that_left_closes_the_connection(void **state)
{
    (void)state;
    td_tcp_pause(server); /* so that only writing can notice */
    close(client);
    client = -1;
    TURN_UNTIL((n_closed == 1 ? true : (reply("anyone?"), false)));
    assert_int_equal(closed_why, TD_E_PEER_LOST);
}

static void a_connection_may_be_refused(void **state)
{
    (void)state;
    char b[4];
    td_loop_run_once(loop, true);
    while (recv(client, b, sizeof b, MSG_DONTWAIT) < 0 && errno == EAGAIN) td_loop_run_once(loop, false);
    assert_null(server);
    refuses = false;
}

static int open_refusing(void **state)
{
    refuses = true;
    return open_pair(state);
}

static int open_small_buffer(void **state)
{
    sndbuf_bytes = 32768;
    int r = open_pair(state);
    sndbuf_bytes = 0;
    return r;
}

static void bad_addresses_are_named_in_the_error(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:80x", "127.0.0.1:-1"};
    struct td_tcp_listener *s = NULL;
    struct td_err err;
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        assert_int_equal(td_tcp_listen(loop, bad[i], on_accept, NULL, &s, &err), TD_E_INVALID);
        assert_non_null(strstr(err.text, "host:port"));
        assert_non_null(strstr(err.text, bad[i]));
    }
    assert_int_equal(td_tcp_listen(loop, "no-such-host.invalid:0", on_accept, NULL, &s, &err), TD_E_IO);
    assert_non_null(strstr(err.text, "no-such-host.invalid"));
    char taken[80];
    snprintf(taken, sizeof taken, "%s", td_tcp_listener_address(listener));
    assert_int_equal(td_tcp_listen(loop, taken, on_accept, NULL, &s, &err), TD_E_IO);
    assert_non_null(strstr(err.text, taken));
    assert_non_null(strstr(err.text, "in use"));
    assert_null(s);
}

static void all_interfaces_and_v6_addresses_are_understood(void **state)
{
    (void)state;
    struct td_tcp_listener *s = NULL;
    assert_int_equal(td_tcp_listen(loop, ":0", on_accept, NULL, &s, NULL), TD_OK);
    td_tcp_unlisten(s);
    struct td_err err = {0};
    enum td_status st = td_tcp_listen(loop, "[::1]:0", on_accept, NULL, &s, &err);
    if (st != TD_OK) { /* a machine without IPv6 */
        print_message("[::1] not available: %s\n", err.text);
        return;
    }
    assert_memory_equal(td_tcp_listener_address(s), "[::1]:", 6);
    td_tcp_unlisten(s);
}

#define T(name)     cmocka_unit_test_setup_teardown(name, open_pair, close_pair)
#define SMALL(name) cmocka_unit_test_setup_teardown(name, open_small_buffer, close_pair)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(bytes_go_both_ways),
        T(half_close_of_the_peer_is_seen_and_it_can_still_be_answered),
        T(a_reset_by_the_peer_closes_with_peer_lost),
        SMALL(a_slow_reader_shows_as_unsent_bytes_and_gets_everything_in_order),
        SMALL(finishing_sends_what_is_unsent_before_the_end),
        T(lingering_ends_by_itself),
        SMALL(resetting_tells_the_peer_and_reports_the_first_reason),
        T(a_paused_connection_reads_nothing_until_resumed),
        T(writing_to_a_peer_that_left_closes_the_connection),
        cmocka_unit_test_setup_teardown(a_connection_may_be_refused, open_refusing, close_pair),
        T(bad_addresses_are_named_in_the_error),
        T(all_interfaces_and_v6_addresses_are_understood),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
