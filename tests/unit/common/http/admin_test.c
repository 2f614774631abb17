#include "common/http/admin.h"

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
#include <jansson.h>

#include "common/base/clock.h"
#include "common/metrics/metrics.h"

static struct td_loop *loop;
static struct td_http *http;
static struct td_config config;
static bool is_ready;
static int n_refreshed;

static bool ready(void *user)
{
    assert_ptr_equal(user, &config);
    return is_ready;
}

static void write_statez(void *user, struct td_buf *out)
{
    assert_ptr_equal(user, &config);
    td_buf_str(out, "{\"requests\":[1,2]}");
}

static void refresh(void *user)
{
    assert_ptr_equal(user, &config);
    n_refreshed++;
    td_metric_set(TD_M_sequences_running, 17);
}

static struct td_admin admin = {
    .config = &config, .is_ready = ready, .write_statez = write_statez, .refresh_metrics = refresh, .user = &config};

static int start(void **state)
{
    (void)state;
    char *argv[] = {(char *)"x", (char *)"--model", (char *)"m", (char *)"--name", (char *)"d\"0"};
    if (td_config_parse(&config, TD_DECODE, 5, argv, NULL, NULL) != TD_OK) return -1;
    if (td_loop_create(&loop) != TD_OK || td_http_create(loop, NULL, &http) != TD_OK) return -1;
    return td_admin_add_routes(http, &admin) == TD_OK && td_http_listen(http, "127.0.0.1:0", NULL) == TD_OK ? 0 : -1;
}

static int stop(void **state)
{
    (void)state;
    td_http_destroy(http);
    td_loop_destroy(loop);
    return 0;
}

/* The response of a GET; the loop is turned by hand meanwhile. The caller frees it. */
static char *get(const char *path)
{
    struct sockaddr_in sa = {.sin_family = AF_INET};
    sa.sin_port = htons((uint16_t)atoi(strrchr(td_http_address(http), ':') + 1));
    inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    char text[100];
    int n = snprintf(text, sizeof text, "GET %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", path);
    assert_int_equal(send(fd, text, (size_t)n, 0), n);
    struct td_buf b = {0};
    char piece[4096];
    ssize_t r;
    uint64_t end = td_clock_ns() + 60 * TD_NS_PER_S;
    while ((r = recv(fd, piece, sizeof piece, MSG_DONTWAIT)) != 0) {
        if (r > 0)
            td_buf_put(&b, piece, (size_t)r);
        else if (errno != EAGAIN || td_clock_ns() > end)
            fail_msg("no answer to %s", path);
        else
            td_loop_run_once(loop, false);
    }
    close(fd);
    td_buf_cstr(&b);
    return (char *)b.data;
}

static const char *body_of(const char *response) { return strstr(response, "\r\n\r\n") + 4; }

static void healthz_says_that_it_runs_and_readyz_whether_it_wants_work(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        bool ready;
        const char *status, *body;
    } rows[] = {
        {"/healthz", false, "HTTP/1.1 200 ", "ok\n"},
        {"/readyz", false, "HTTP/1.1 503 ", "not ready\n"},
        {"/readyz", true, "HTTP/1.1 200 ", "ready\n"},
    };
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        is_ready = rows[i].ready;
        char *r = get(rows[i].path);
        assert_memory_equal(r, rows[i].status, strlen(rows[i].status));
        assert_string_equal(body_of(r), rows[i].body);
        free(r);
    }
}

static void metrics_are_refreshed_before_they_are_shown(void **state)
{
    (void)state;
    n_refreshed = 0;
    char *r = get("/metrics");
    assert_non_null(strstr(r, "Content-Type: text/plain; version=0.0.4"));
    assert_non_null(strstr(r, "\ntandem_sequences_running 17\n"));
    assert_non_null(strstr(r, "tandem_daemon_info{name=\"d\\\"0\"} 1\n"));
    assert_null(strstr(r, "tandem_workers_prefill")); /* the router's */
    assert_int_equal(n_refreshed, 1);
    free(r);
}

static void statez_is_json_with_identity_state_and_settings(void **state)
{
    (void)state;
    is_ready = true;
    for (int round = 0; round < 2; round++) {
        admin.write_statez = round == 0 ? write_statez : NULL;
        char *r = get("/statez");
        json_t *j = json_loads(body_of(r), 0, NULL), *requests = NULL;
        assert_non_null(j);
        const char *name, *role;
        int kv_page_tokens, is_ready_there;
        assert_int_equal(json_unpack(j, "{s:s, s:s, s:b, s:{s:i}}", "name", &name, "role", &role, "is_ready",
                                     &is_ready_there, "config", "kv_page_tokens", &kv_page_tokens),
                         0);
        assert_string_equal(name, "d\"0");
        assert_string_equal(role, "decode");
        assert_int_equal(kv_page_tokens, 64);
        assert_true(is_ready_there);
        requests = json_object_get(json_object_get(j, "state"), "requests");
        assert_int_equal(json_array_size(requests), round == 0 ? 2 : 0);
        json_decref(j);
        free(r);
    }
    admin.write_statez = write_statez;
}

#define T(name) cmocka_unit_test_setup_teardown(name, start, stop)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(healthz_says_that_it_runs_and_readyz_whether_it_wants_work),
        T(metrics_are_refreshed_before_they_are_shown),
        T(statez_is_json_with_identity_state_and_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
