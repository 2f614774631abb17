#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/config/address_file.h"
#include "deploy/ctl/cluster.h"

static char dir[64], path[128];

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void an_address_file_is_read_if_it_is_of_the_process_asked_for(void **state)
{
    (void)state;
    struct td_address a;
    assert_false(td_address_file_read(path, 42, &a));
    assert_int_equal(td_address_file_write(path, "decode", "decode-0", 42, "h:1", "h:2", NULL), TD_OK);
    assert_false(td_address_file_read(path, 43, &a)); /* an earlier life's */
    assert_true(td_address_file_read(path, 42, &a));
    assert_string_equal(a.name, "decode-0");
    assert_string_equal(a.rpc, "h:1");
    assert_string_equal(a.http, "h:2");
}

static void files_that_are_not_whole_are_not_read(void **state)
{
    (void)state;
    static const char *const broken[] = {"",
                                         "{",
                                         "[]",
                                         "7",
                                         "{\"pid\":42}",
                                         "{\"pid\":42,\"rpc\":1,\"http\":\"x\"}",
                                         "{\"pid\":\"42\",\"rpc\":\"a\",\"http\":\"b\"}"};
    struct td_address a;
    for (size_t i = 0; i < TD_COUNT(broken); i++) {
        write_file(broken[i]);
        if (td_address_file_read(path, 42, &a)) fail_msg("%s was read", broken[i]);
    }
    /* Longer than any address may be. */
    char long_text[1000];
    snprintf(long_text, sizeof long_text, "{\"pid\":42,\"http\":\"b\",\"rpc\":\"%0*d\"}", 900, 1);
    write_file(long_text);
    assert_false(td_address_file_read(path, 42, &a));
}

static void the_routers_address_comes_back_from_cluster_json(void **state)
{
    (void)state;
    struct td_address router = {.name = "router", .rpc = "127.0.0.1:1", .http = "127.0.0.1:2", .pid = 7}, got;
    struct td_address workers[2] = {{.name = "a\"b", .rpc = "x:1", .http = "x:2", .pid = 8}, {.name = "c", .pid = 9}};
    struct td_cluster c = {
        .model = "m\\n", .router = &router, .prefill = workers, .n_prefill = 1, .decode = workers, .n_decode = 2};
    struct td_err err = {{0}};
    unlink(path);
    assert_int_equal(td_cluster_read_router(dir, &got, &err), TD_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "cluster.json"));
    assert_int_equal(td_cluster_write(path, &c, &err), TD_OK);
    assert_int_equal(td_cluster_read_router(dir, &got, &err), TD_OK);
    assert_string_equal(got.rpc, router.rpc);
    assert_string_equal(got.http, router.http);
    assert_int_equal(got.pid, 7);
    write_file("{\"router\":{}}");
    assert_int_equal(td_cluster_read_router(dir, &got, &err), TD_E_BAD_FILE);
    write_file("{");
    assert_int_equal(td_cluster_read_router(dir, &got, &err), TD_E_BAD_FILE);
}

/* --- GET -----------------------------------------------------------------------------------------------------------
 */

struct server {
    int fd;
    const char *reply;
    char request[512];
};

static void *serve_once(void *user)
{
    struct server *s = user;
    int fd = accept(s->fd, NULL, NULL);
    size_t n = 0;
    while (n + 1 < sizeof s->request) {
        ssize_t k = recv(fd, s->request + n, sizeof s->request - 1 - n, 0);
        if (k <= 0) break;
        n += (size_t)k;
        s->request[n] = '\0';
        if (strstr(s->request, "\r\n\r\n") != NULL) break;
    }
    if (s->reply != NULL) send(fd, s->reply, strlen(s->reply), MSG_NOSIGNAL);
    close(fd);
    return NULL;
}

static enum td_status get(const char *reply, unsigned *status, struct td_buf *body, struct server *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    *s = (struct server){.fd = socket(AF_INET, SOCK_STREAM, 0), .reply = reply};
    assert_int_equal(bind(s->fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(s->fd, 1), 0);
    assert_int_equal(getsockname(s->fd, (struct sockaddr *)&a, &len), 0);
    char address[32];
    snprintf(address, sizeof address, "127.0.0.1:%u", ntohs(a.sin_port));
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, serve_once, s), 0);
    struct td_err err = {{0}};
    enum td_status st = td_http_get(address, "/page", 60000, status, body, &err);
    pthread_join(thread, NULL);
    close(s->fd);
    return st;
}

static void a_page_comes_with_its_status(void **state)
{
    (void)state;
    struct server s;
    struct td_buf body = {0};
    unsigned status;
    assert_int_equal(get("HTTP/1.1 200 OK\r\nA: b\r\n\r\nthe body", &status, &body, &s), TD_OK);
    assert_int_equal(status, 200);
    assert_string_equal(td_buf_cstr(&body), "the body");
    assert_int_equal(strncmp(s.request, "GET /page HTTP/1.1\r\n", 20), 0);
    td_buf_clear(&body);
    assert_int_equal(get("HTTP/1.1 503 Service Unavailable\r\n\r\n", &status, &body, &s), TD_OK);
    assert_int_equal(status, 503);
    assert_int_equal(body.n, 0);
    td_buf_free(&body);
}

static void what_is_not_http_and_nobody_at_all_are_errors(void **state)
{
    (void)state;
    struct server s;
    unsigned status;
    assert_int_equal(get("SSH-2.0 hello\r\n\r\n", &status, NULL, &s), TD_E_PROTOCOL);
    assert_int_equal(get("", &status, NULL, &s), TD_E_PROTOCOL);
    assert_int_equal(get("HTTP/1.1 200 OK\r\n", &status, NULL, &s), TD_E_PROTOCOL);
    assert_int_equal(status, 0);
    assert_int_equal(td_http_get("127.0.0.1:1", "/", 1000, &status, NULL, NULL), TD_E_UNAVAILABLE);
    assert_int_equal(td_http_get("nonsense", "/", 1000, &status, NULL, NULL), TD_E_UNAVAILABLE);
    assert_int_equal(td_http_get("", "/", 1000, &status, NULL, NULL), TD_E_UNAVAILABLE);
    assert_int_equal(td_http_get(":", "/", 1000, &status, NULL, NULL), TD_E_UNAVAILABLE);
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tandem-cluster-test-XXXXXX");
    if (mkdtemp(dir) == NULL) return -1;
    snprintf(path, sizeof path, "%s/cluster.json", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_address_file_is_read_if_it_is_of_the_process_asked_for),
        cmocka_unit_test(files_that_are_not_whole_are_not_read),
        cmocka_unit_test(the_routers_address_comes_back_from_cluster_json),
        cmocka_unit_test(a_page_comes_with_its_status),
        cmocka_unit_test(what_is_not_http_and_nobody_at_all_are_errors),
    };
    return cmocka_run_group_tests_name("cluster", tests, make_dir, remove_dir);
}
