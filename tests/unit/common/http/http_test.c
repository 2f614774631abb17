/* The server over real loopback sockets: the server's loop runs in a thread of its own, the test talks to it with
 * blocking sockets. What handlers note for the test is atomic. */
#include "common/http/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/fault.h"

static struct td_loop *loop;
static struct td_http *http;
static struct td_http_options options;
static pthread_t thread;
static char address[80];
static _Atomic int n_gone, gone_why, n_writable, n_handled, is_drained, write_status;

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); }
#define WAIT_FOR(cond)                                                                                                 \
    do {                                                                                                               \
        uint64_t end_ = td_clock_ns() + 60 * TD_NS_PER_S;                                                              \
        while (!(cond)) {                                                                                              \
            nap();                                                                                                     \
            if (td_clock_ns() > end_) fail_msg("never happened: %s", #cond);                                           \
        }                                                                                                              \
    } while (0)

/* --- handlers ------------------------------------------------------------------------------------------------------
 */
static void echo(struct td_http_req *r, void *user)
{
    (void)user;
    size_t n;
    const char *body = td_http_body(r, &n);
    n_handled++;
    td_http_respond(r, 200, "text/plain", body, n);
}

static void describe(struct td_http_req *r, void *user)
{
    (void)user;
    struct td_buf b = {0};
    const char *q = td_http_query(r, "q"), *x = td_http_header(r, "X-THING"), *empty = td_http_header(r, "x-empty");
    td_buf_printf(&b, "%s %s rest=[%s] q=[%s] x=[%s] empty=[%s]", td_http_method(r), td_http_path(r),
                  td_http_path_rest(r), q == NULL ? "(none)" : q, x == NULL ? "(none)" : x,
                  empty == NULL ? "(none)" : empty);
    TD_CHECK(td_http_set_header(r, "X-Bad", "a\r\nSet-Cookie: stolen") == TD_E_INVALID);
    TD_CHECK(td_http_set_header(r, "Bad Name", "a") == TD_E_INVALID);
    TD_CHECK(td_http_set_header(r, "X-Good", "yes") == TD_OK);
    td_http_respond(r, 200, "text/plain", b.data, b.n);
    td_buf_free(&b);
}

/* An answer that comes later, in pieces. */
struct task {
    struct td_timer timer;
    struct td_http_req *r;
    struct td_env *env;
    int n_left, piece;
    char *flood;
};

static void task_gone(struct td_http_req *r, enum td_status why)
{
    struct task *t = td_http_user(r);
    t->env->timer_stop(t->env, &t->timer);
    free(t->flood);
    free(t);
    gone_why = (int)why;
    n_gone++;
}

static void task_writable(struct td_http_req *r)
{
    TD_CHECK(td_http_backlog(r) == 0);
    n_writable++;
}

static const struct td_http_handlers task_handlers = {task_gone, task_writable};

static struct task *start_task(struct td_http_req *r, void (*fire)(struct td_timer *), uint64_t ns)
{
    struct task *t = calloc(1, sizeof *t);
    t->r = r;
    t->env = td_loop_env(td_http_loop(r));
    t->timer.fire = fire;
    t->env->timer_start(t->env, &t->timer, ns);
    td_http_set_handlers(r, &task_handlers, t);
    return t;
}

static void later_fire(struct td_timer *timer)
{
    struct task *t = TD_CONTAINER_OF(timer, struct task, timer);
    td_http_respond(t->r, 200, "text/plain", "later", 5);
    free(t);
}

static void later(struct td_http_req *r, void *user)
{
    (void)user;
    n_handled++;
    start_task(r, later_fire, 5 * TD_NS_PER_MS);
}

static void hold_fire(struct td_timer *timer) { (void)timer; }
static void hold(struct td_http_req *r, void *user)
{
    (void)user;
    n_handled++;
    start_task(r, hold_fire, TD_NEVER_NS);
}

static void events_fire(struct td_timer *timer)
{
    struct task *t = TD_CONTAINER_OF(timer, struct task, timer);
    char text[32];
    int n = snprintf(text, sizeof text, "piece %d", t->piece++);
    TD_CHECK(td_http_sse(t->r, NULL, text, (size_t)n) == TD_OK);
    if (--t->n_left > 0) {
        t->env->timer_start(t->env, timer, TD_NS_PER_MS);
        return;
    }
    TD_CHECK(td_http_sse(t->r, "end", "two\nlines\r\nor three", 19) == TD_OK);
    td_http_end(t->r);
    free(t);
}

static void events(struct td_http_req *r, void *user)
{
    (void)user;
    n_handled++;
    td_http_sse_begin(r);
    struct task *t = start_task(r, events_fire, 0);
    t->n_left = atoi(td_http_path_rest(r));
}

/* Writes as fast as it may until the server says that the client is too slow. */
static void flood_fire(struct td_timer *timer)
{
    struct task *t = TD_CONTAINER_OF(timer, struct task, timer);
    enum td_status st = td_http_write(t->r, t->flood, 8192);
    if (st == TD_OK) {
        t->env->timer_start(t->env, timer, 0);
        return;
    }
    write_status = (int)st;
    TD_CHECK(td_http_write(t->r, "x", 1) == st); /* and on_gone will follow, not from here */
    TD_CHECK(n_gone == 0);
}

static void flood(struct td_http_req *r, void *user)
{
    (void)user;
    td_http_begin(r, 200, "application/octet-stream");
    struct task *t = start_task(r, flood_fire, 0);
    t->flood = calloc(1, 8192);
}

/* Writes a piece whenever the one before it is out: the polite way. */
static void paced_next(struct td_http_req *r)
{
    struct task *t = td_http_user(r);
    n_writable++;
    if (t->n_left-- > 0) {
        while (td_http_backlog(r) == 0) TD_CHECK(td_http_write(r, t->flood, 8192) == TD_OK);
        return;
    }
    td_http_end(r);
    free(t->flood);
    free(t);
}

static const struct td_http_handlers paced_handlers = {task_gone, paced_next};
static void paced(struct td_http_req *r, void *user)
{
    (void)user;
    struct task *t = start_task(r, hold_fire, TD_NEVER_NS);
    t->env->timer_stop(t->env, &t->timer);
    t->flood = calloc(1, 8192);
    t->n_left = 5;
    td_http_set_handlers(r, &paced_handlers, t);
    td_http_begin(r, 200, "application/octet-stream");
    paced_next(r);
}

/* One piece far above the backlog bound, then the end: no reason to drop anybody. */
static void large_piece(struct td_http_req *r, void *user)
{
    (void)user;
    enum { N = 3000000 };
    char *p = malloc(N);
    memset(p, 'L', N);
    td_http_begin(r, 200, "text/plain");
    TD_CHECK(td_http_write(r, p, N) == TD_OK);
    free(p);
    td_http_end(r);
}

static void large_whole(struct td_http_req *r, void *user)
{
    (void)user;
    enum { N = 3000000 };
    char *p = malloc(N);
    memset(p, 'W', N);
    td_http_respond(r, 200, "text/plain", p, N);
    free(p);
}

static void failing(struct td_http_req *r, void *user)
{
    (void)user;
    td_http_error(r, 429, "max_tokens", "rate_limit", "quote \" and %s", "newline \n");
}

static const struct td_http_route routes[] = {
    {"GET", "/echo", echo, NULL},
    {"POST", "/echo", echo, NULL},
    {"GET", "/describe", describe, NULL},
    {"GET", "/models/*", describe, NULL},
    {"GET", "/later", later, NULL},
    {"GET", "/hold", hold, NULL},
    {"GET", "/events/*", events, NULL},
    {"GET", "/flood", flood, NULL},
    {"GET", "/paced", paced, NULL},
    {"GET", "/large-piece", large_piece, NULL},
    {"GET", "/large-whole", large_whole, NULL},
    {"GET", "/failing", failing, NULL},
};

/* --- the server's thread -------------------------------------------------------------------------------------------
 */
static void *run_loop(void *arg)
{
    td_loop_run(loop);
    return arg;
}

static void deliver_stop(struct td_mail *m)
{
    (void)m;
    td_loop_stop(loop);
}

static void note_drained(void *user)
{
    (void)user;
    is_drained = 1;
}

static uint32_t grace_ms;
static void deliver_shutdown(struct td_mail *m)
{
    (void)m;
    td_http_shutdown(http, grace_ms, note_drained, NULL);
}

static struct td_mail stop_mail = {.deliver = deliver_stop}, shutdown_mail = {.deliver = deliver_shutdown};

static int start(void **state)
{
    (void)state;
    n_gone = n_writable = n_handled = is_drained = 0;
    gone_why = write_status = -1;
    if (td_loop_create(&loop) != TD_OK || td_http_create(loop, &options, &http) != TD_OK) return -1;
    if (td_http_add_routes(http, routes, TD_COUNT(routes)) != TD_OK) return -1;
    if (td_http_listen(http, "127.0.0.1:0", NULL) != TD_OK) return -1;
    snprintf(address, sizeof address, "%s", td_http_address(http));
    return pthread_create(&thread, NULL, run_loop, NULL);
}

static int stop(void **state)
{
    (void)state;
    td_loop_post(loop, &stop_mail);
    pthread_join(thread, NULL);
    td_http_destroy(http);
    td_loop_destroy(loop);
    options = (struct td_http_options){0};
    return 0;
}

/* --- the client ----------------------------------------------------------------------------------------------------
 */
static int dial_with(int rcvbuf)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1))};
    inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (rcvbuf > 0) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof rcvbuf);
    struct timeval patience = {.tv_sec = 60};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&sa, sizeof sa) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static int dial(void) { return dial_with(0); }

static void put(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t w = send(fd, p, n, MSG_NOSIGNAL);
        if (w <= 0) return; /* the server may close early: the answer tells */
        p += w;
        n -= (size_t)w;
    }
}

static void say(int fd, const char *text) { put(fd, text, strlen(text)); }

/* Reads until the server closes, then closes. The result lives until the next call. */
static struct td_buf heard;
static const char *hear_all(int fd)
{
    char b[65536];
    ssize_t n;
    td_buf_clear(&heard);
    while ((n = recv(fd, b, sizeof b, 0)) > 0) td_buf_put(&heard, b, (size_t)n);
    if (n < 0 && errno == EAGAIN) fail_msg("the server went silent");
    close(fd);
    return td_buf_cstr(&heard);
}

/* Reads until the text holds what, without closing. */
static const char *hear_until(int fd, const char *what)
{
    char b[4096];
    td_buf_clear(&heard);
    while (strstr(td_buf_cstr(&heard), what) == NULL) {
        ssize_t n = recv(fd, b, sizeof b, 0);
        if (n <= 0) fail_msg("the connection ended before \"%s\" came: %s", what, td_buf_cstr(&heard));
        td_buf_put(&heard, b, (size_t)n);
    }
    return td_buf_cstr(&heard);
}

static const char *ask(const char *request)
{
    int fd = dial();
    say(fd, request);
    return hear_all(fd);
}

static int status_in(const char *response)
{
    int status = 0;
    sscanf(response, "HTTP/1.1 %d", &status);
    return status;
}

static const char *body_in(const char *response)
{
    const char *p = strstr(response, "\r\n\r\n");
    return p == NULL ? "" : p + 4;
}

static unsigned count(const char *text, const char *what)
{
    unsigned n = 0;
    size_t n_text = strlen(text), n_what = strlen(what);
    for (size_t i = 0; i + n_what <= n_text;) { /* not strstr: AddressSanitizer's measures the rest at each call */
        bool is_here = memcmp(text + i, what, n_what) == 0;
        n += is_here;
        i += is_here ? n_what : 1;
    }
    return n;
}

#define CLOSE "Host: h\r\nConnection: close\r\n\r\n"

/* --- plain requests ------------------------------------------------------------------------------------------------
 */
static void a_request_is_described_to_its_handler(void **state)
{
    (void)state;
    const char *r =
        ask("GET /describe?a=1&q=one%20two+three%26&q=second HTTP/1.1\r\nX-Thing: value \t\r\nX-Empty:\r\n" CLOSE);
    assert_int_equal(status_in(r), 200);
    assert_string_equal(body_in(r), "GET /describe rest=[] q=[one two three&] x=[value] empty=[]");
    assert_non_null(strstr(r, "\r\nX-Good: yes\r\n"));
    assert_non_null(strstr(r, "\r\nDate: "));
    assert_null(strstr(r, "stolen"));
    r = ask("GET /models/openai%2fgpt/x?q HTTP/1.1\r\n" CLOSE);
    assert_string_equal(body_in(r), "GET /models/openai/gpt/x rest=[openai/gpt/x] q=[] x=[(none)] empty=[(none)]");
    r = ask("GET http://somewhere:80/describe#part HTTP/1.1\r\n" CLOSE);
    assert_string_equal(body_in(r), "GET /describe rest=[] q=[(none)] x=[(none)] empty=[(none)]");
    assert_int_equal(status_in(ask("GET /models/ HTTP/1.1\r\n" CLOSE)), 404);
}

static void bodies_come_by_length_and_in_chunks(void **state)
{
    (void)state;
    const char *r = ask("POST /echo HTTP/1.1\r\nContent-Length: 5\r\n" CLOSE "hello");
    assert_string_equal(body_in(r), "hello");
    r = ask("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" CLOSE
            "5;ext=1\r\nhello\r\n1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n");
    assert_string_equal(body_in(r), "hello 0123456789");
    assert_non_null(strstr(r, "Content-Length: 16\r\n"));
    r = ask("POST /echo HTTP/1.1\r\nContent-Length: 0\r\n" CLOSE);
    assert_int_equal(status_in(r), 200);
    assert_string_equal(body_in(r), "");
}

static void a_body_may_arrive_byte_by_byte(void **state)
{
    (void)state;
    static const char text[] = "POST /echo HTTP/1.1\r\nContent-Length: 3\r\n" CLOSE "abc";
    int fd = dial();
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        put(fd, text + i, 1);
        if (i % 8 == 0) nap();
    }
    assert_string_equal(body_in(hear_all(fd)), "abc");
}

static void connections_stay_open_for_further_requests(void **state)
{
    (void)state;
    int fd = dial();
    for (int i = 0; i < 3; i++) {
        say(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nok");
        const char *r = hear_until(fd, "\r\n\r\nok");
        assert_null(strstr(r, "Connection:"));
    }
    say(fd, "POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok");
    assert_non_null(strstr(hear_until(fd, "\r\n\r\nok"), "Connection: keep-alive\r\n"));
    say(fd, "POST /echo HTTP/1.0\r\nContent-Length: 2\r\n\r\nok");
    assert_non_null(strstr(hear_all(fd), "Connection: close\r\n"));
}

static void pipelined_requests_are_answered_one_by_one_in_order(void **state)
{
    (void)state;
    int fd = dial();
    struct td_buf b = {0};
    for (int i = 0; i < 200; i++) {
        td_buf_printf(&b, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\n<%04d>", i);
        if (i % 20 == 7) td_buf_str(&b, "GET /later HTTP/1.1\r\nHost: h\r\n\r\n");
        if (i % 50 == 9) td_buf_str(&b, "GET /events/2 HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    td_buf_str(&b, "GET /echo HTTP/1.1\r\n" CLOSE);
    put(fd, (char *)b.data, b.n);
    td_buf_free(&b);
    const char *r = hear_all(fd), *at = r;
    for (int i = 0; i < 200; i++) {
        char want[8];
        snprintf(want, sizeof want, "<%04d>", i);
        at = strstr(at, want);
        assert_non_null(at);
    }
    assert_int_equal(count(r, "HTTP/1.1 200 OK"), 215);
    assert_int_equal(count(r, "\r\n\r\nlater"), 10);
    assert_int_equal(count(r, "data: piece 1"), 4);
}

/* More than the server buffers while it answers: the rest waits in the kernel, and nothing is lost. */
static void a_long_pipeline_behind_a_slow_answer_is_not_lost(void **state)
{
    (void)state;
    int fd = dial();
    struct td_buf b = {0};
    td_buf_str(&b, "GET /events/200 HTTP/1.1\r\nHost: h\r\n\r\n");
    for (int i = 0; i < 30; i++) {
        td_buf_str(&b, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 10000\r\n\r\n");
        for (int k = 0; k < 1000; k++) td_buf_str(&b, "0123456789");
    }
    td_buf_str(&b, "GET /describe HTTP/1.1\r\n" CLOSE);
    put(fd, (char *)b.data, b.n);
    td_buf_free(&b);
    const char *r = hear_all(fd);
    assert_int_equal(count(r, "HTTP/1.1 200 OK"), 32);
    assert_int_equal(count(r, "0123456789"), 30000);
    assert_non_null(strstr(r, "GET /describe rest"));
    assert_int_equal(n_gone, 0);
}

static void head_gets_the_headers_of_get_only(void **state)
{
    (void)state;
    const char *r = ask("HEAD /describe HTTP/1.1\r\n" CLOSE);
    assert_int_equal(status_in(r), 200);
    assert_non_null(strstr(r, "Content-Length: "));
    assert_null(strstr(r, "Content-Length: 0\r\n"));
    assert_string_equal(body_in(r), "");
    r = ask("HEAD /events/2 HTTP/1.1\r\n" CLOSE);
    assert_string_equal(body_in(r), "");
    assert_string_equal(body_in(ask("HEAD /nowhere HTTP/1.1\r\n" CLOSE)), "");
}

static void unknown_paths_and_methods_are_404_and_405(void **state)
{
    (void)state;
    assert_int_equal(status_in(ask("GET /nowhere HTTP/1.1\r\n" CLOSE)), 404);
    assert_int_equal(status_in(ask("GET /echo/ HTTP/1.1\r\n" CLOSE)), 404);
    const char *r = ask("DELETE /echo HTTP/1.1\r\n" CLOSE);
    assert_int_equal(status_in(r), 405);
    assert_non_null(strstr(r, "Allow: GET, HEAD, POST\r\n"));
    /* With a body the connection ends rather than read it. */
    r = ask("POST /nowhere HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n");
    assert_int_equal(status_in(r), 404);
    assert_non_null(strstr(r, "Connection: close"));
    assert_int_equal(n_handled, 0);
}

static void errors_are_json_in_the_form_of_the_openai_api(void **state)
{
    (void)state;
    const char *r = ask("GET /failing HTTP/1.1\r\n" CLOSE);
    assert_int_equal(status_in(r), 429);
    assert_non_null(strstr(r, "application/json"));
    assert_string_equal(body_in(r),
                        "{\"error\":{\"message\":\"quote \\\" and newline \\n\",\"type\":\"rate_limit_error\","
                        "\"param\":\"max_tokens\",\"code\":\"rate_limit\"}}\n");
}

static void an_expectation_is_met_before_the_body_is_sent(void **state)
{
    (void)state;
    int fd = dial();
    say(fd, "POST /echo HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n" CLOSE);
    hear_until(fd, "HTTP/1.1 100 Continue\r\n\r\n");
    say(fd, "body");
    assert_string_equal(body_in(hear_all(fd)), "body");
    const char *r = ask("POST /nowhere HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n" CLOSE);
    assert_int_equal(status_in(r), 404); /* no 100 before it */
    assert_int_equal(status_in(ask("POST /echo HTTP/1.1\r\nExpect: a-miracle\r\nContent-Length: 4\r\n" CLOSE)), 417);
}

/* --- bad input -----------------------------------------------------------------------------------------------------
 */
static void malformed_requests_are_400_and_end_the_connection(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "garbage\r\n\r\n",
        "GET\r\n\r\n",
        "\x16\x03\x01\x02", /* a TLS hello */
        "GET /echo HTTP/1.1\r\nno colon\r\nHost: h\r\n\r\n",
        "GET /echo HTTP/1.1\r\nHost: h\r\nbad header: x\r\n\r\n",
        "GET /describe HTTP/1.1\r\nHost: h\r\n: empty\r\n\r\n",
        "GET /describe?a\tb HTTP/1.1\r\nHost: h\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "GET /describe HTTP/1.1\nHost: h\n\n",
        "GET /describe HTTP/1.1\r\nHost: h\nX: y\r\n\r\n",
        "GET /echo HTTP/1.1\r\n\r\n", /* no Host */
        "GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\nhello",
        "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\nhello",
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        "POST /echo HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        "GET /echo%00x HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET /describe?q=%00 HTTP/1.1\r\nHost: h\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    };
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        const char *r = ask(bad[i]);
        if (status_in(r) != 400) fail_msg("request %zu was answered: %s", i, r);
        assert_non_null(strstr(r, "Connection: close"));
        assert_non_null(strstr(r, "\"error\""));
    }
    assert_int_equal(n_handled, 0);
    assert_int_equal(status_in(ask("GET /echo\r\n\r\n")), 505); /* HTTP/0.9 */
    assert_int_equal(status_in(ask("GET /echo HTTP/1.1\r\n" CLOSE)), 200);
}

static void upgrades_are_not_taken_up(void **state)
{
    (void)state;
    const char *r = ask("GET /echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n");
    assert_int_equal(status_in(r), 200);
    assert_int_equal(status_in(ask("CONNECT h:80 HTTP/1.1\r\n" CLOSE)), 404);
}

static void random_bytes_never_hurt(void **state)
{
    (void)state;
    static const char *const words[] = {
        "GET ",
        "POST ",
        "/echo",
        " HTTP/1.1\r\n",
        "Host: h\r\n",
        "\r\n",
        "\r\n\r\n",
        "Content-Length: 3\r\n",
        "0\r\n\r\n",
        ":",
        "\n",
        "3\r\nabc\r\n",
        "Expect: 100-continue\r\n",
        "Transfer-Encoding: chunked\r\n",
    };
    unsigned seed = 11;
    for (int round = 0; round < 300; round++) {
        struct td_buf b = {0};
        for (int i = rand_r(&seed) % 30; i >= 0; i--) {
            if (rand_r(&seed) % 6 == 0)
                td_buf_u8(&b, (uint8_t)rand_r(&seed));
            else
                td_buf_str(&b, words[(unsigned)rand_r(&seed) % TD_COUNT(words)]);
        }
        int fd = dial();
        put(fd, (char *)b.data, b.n);
        td_buf_free(&b);
        shutdown(fd, SHUT_WR);
        hear_all(fd);
    }
    assert_int_equal(status_in(ask("GET /echo HTTP/1.1\r\n" CLOSE)), 200);
}

static int start_small(void **state)
{
    options = (struct td_http_options){.max_header_bytes = 2000, .max_body_bytes = 1000};
    return start(state);
}

static int status_of_many(const char *head, unsigned n, const char *piece, const char *tail)
{
    struct td_buf b = {0};
    td_buf_str(&b, head);
    for (unsigned i = 0; i < n; i++) td_buf_str(&b, piece);
    td_buf_str(&b, tail);
    int status = status_in(ask(td_buf_cstr(&b)));
    td_buf_free(&b);
    return status;
}

static void what_is_too_large_is_refused(void **state)
{
    (void)state;
    static const char chunked[] = "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" CLOSE;
    assert_int_equal(status_of_many("GET /echo HTTP/1.1\r\nX-Long: ", 3000, "x", "\r\n" CLOSE), 431);
    assert_int_equal(status_of_many("GET /echo HTTP/1.1\r\nX-Long: ", 3000, " ", "\r\n" CLOSE), 431); /* swallowed */
    assert_int_equal(status_of_many("GET /echo HTTP/1.1\r\n", 150, "A: b\r\n", CLOSE), 431);
    assert_int_equal(status_of_many("GET /echo HTTP/1.1\r\n", 90, "A: b\r\n", CLOSE), 200);
    assert_int_equal(status_of_many("GET /", 9000, "x", " HTTP/1.1\r\n" CLOSE), 414);
    assert_int_equal(status_of_many(chunked, 300, "5\r\nhello\r\n", "0\r\n\r\n"), 413);
    assert_int_equal(status_of_many(chunked, 900, "1\r\nx\r\n", "0\r\n\r\n"), 200);
    assert_int_equal(status_of_many("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" CLOSE "5;", 20000, "x", ""),
                     413);
    assert_int_equal(status_in(ask("POST /echo HTTP/1.1\r\nContent-Length: 1001\r\n" CLOSE)), 413);
    assert_int_equal(n_handled, 2);
}

/* --- time ----------------------------------------------------------------------------------------------------------
 */
static int start_impatient(void **state)
{
    options = (struct td_http_options){
        .header_timeout_ms = 400, .body_timeout_ms = 400, .idle_timeout_ms = 400, .stall_timeout_ms = 600};
    return start(state);
}

static void slow_headers_and_bodies_are_408(void **state)
{
    (void)state;
    const char *r = ask("GET /echo HTTP/1.1\r\nHost:");
    assert_int_equal(status_in(r), 408);
    assert_non_null(strstr(r, "headers"));
    r = ask("POST /echo HTTP/1.1\r\nContent-Length: 10\r\n" CLOSE "abc");
    assert_int_equal(status_in(r), 408);
    assert_non_null(strstr(r, "body"));
    /* Trickling does not help: the answer comes while headers still do. */
    int fd = dial();
    char first;
    bool is_answered = false;
    say(fd, "GET /echo HTTP/1.1\r\n");
    for (int i = 0; i < 95 && !is_answered; i++) {
        say(fd, "A: b\r\n");
        for (int k = 0; k < 5; k++) nap();
        is_answered = recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
    }
    assert_true(is_answered);
    assert_int_equal(status_in(hear_all(fd)), 408);
}

static void idle_connections_are_closed_without_a_word(void **state)
{
    (void)state;
    assert_string_equal(ask(""), "");
    int fd = dial();
    say(fd, "GET /echo HTTP/1.1\r\nHost: h\r\n\r\n");
    hear_until(fd, "\r\n\r\n");
    assert_string_equal(hear_all(fd), "");
}

static void a_client_that_takes_nothing_of_a_whole_response_is_dropped(void **state)
{
    (void)state;
    int fd = dial_with(4096);
    say(fd, "GET /large-whole HTTP/1.1\r\nHost: h\r\n\r\n");
    hear_until(fd, "200 OK");
    int e = 0;
    socklen_t n = sizeof e;
    WAIT_FOR(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n) != 0 || e != 0); /* the reset arrived */
    assert_int_equal(e, ECONNRESET);
    close(fd);
}

/* --- answers that take their time ----------------------------------------------------------------------------------
 */
static void events_are_streamed_in_chunks(void **state)
{
    (void)state;
    const char *r = ask("GET /events/3 HTTP/1.1\r\n" CLOSE);
    assert_int_equal(status_in(r), 200);
    assert_non_null(strstr(r, "Content-Type: text/event-stream"));
    assert_non_null(strstr(r, "Transfer-Encoding: chunked\r\n"));
    assert_non_null(strstr(r, "f\r\ndata: piece 0\n\n\r\nf\r\ndata: piece 1\n\n\r\nf\r\ndata: piece 2\n\n\r\n"));
    assert_non_null(strstr(r, "event: end\ndata: two\ndata: lines\ndata: or three\n\n\r\n0\r\n\r\n"));
    r = ask("GET /events/2 HTTP/1.0\r\n\r\n"); /* no chunks: ends with the connection */
    assert_null(strstr(r, "chunked"));
    assert_string_equal(body_in(r),
                        "data: piece 0\n\ndata: piece 1\n\nevent: end\ndata: two\ndata: lines\ndata: or three\n\n");
    assert_int_equal(n_gone, 0);
}

static void a_client_that_hangs_up_is_noticed_while_nothing_is_sent(void **state)
{
    (void)state;
    int fd = dial();
    say(fd, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_handled == 1);
    assert_int_equal(n_gone, 0);
    close(fd);
    WAIT_FOR(n_gone == 1);
    assert_int_equal(gone_why, TD_E_PEER_LOST);
    fd = dial();
    say(fd, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_handled == 2);
    shutdown(fd, SHUT_WR); /* half a hang-up counts as one */
    WAIT_FOR(n_gone == 2);
    close(fd);
}

static void a_client_that_hangs_up_mid_stream_is_noticed(void **state)
{
    (void)state;
    int fd = dial();
    say(fd, "GET /events/1000000 HTTP/1.1\r\nHost: h\r\n\r\n");
    hear_until(fd, "piece 3");
    close(fd);
    WAIT_FOR(n_gone == 1);
    assert_int_equal(gone_why, TD_E_PEER_LOST);
}

static void a_client_that_reads_too_slowly_is_dropped_at_the_bound(void **state)
{
    (void)state;
    int fd = dial_with(4096);
    say(fd, "GET /flood HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_gone == 1);
    assert_int_equal(write_status, TD_E_SLOW_CLIENT);
    assert_int_equal(gone_why, TD_E_SLOW_CLIENT);
    char b[65536];
    ssize_t n;
    size_t total = 0;
    while ((n = recv(fd, b, sizeof b, 0)) > 0) total += (size_t)n;
    assert_true(total < 4u << 20);
    close(fd);
}

static void a_handler_that_waits_until_writable_never_loses_its_client(void **state)
{
    (void)state;
    int fd = dial_with(4096);
    say(fd, "GET /paced HTTP/1.1\r\n" CLOSE);
    const char *r = hear_all(fd);
    assert_non_null(strstr(r, "chunked"));
    assert_int_equal(n_writable, 6);
    assert_int_equal(n_gone, 0);
    assert_memory_equal(heard.data + heard.n - 5, "0\r\n\r\n", 5);
}

static void large_answers_reach_a_client_that_reads(void **state)
{
    (void)state;
    const char *r = ask("GET /large-piece HTTP/1.1\r\n" CLOSE);
    assert_int_equal(count(body_in(r), "L"), 3000000);
    assert_int_equal(strlen(body_in(r)), 3000000 + strlen("2dc6c0\r\n\r\n0\r\n\r\n"));
    r = ask("GET /large-whole HTTP/1.1\r\n" CLOSE);
    assert_int_equal(strlen(body_in(r)), 3000000);
    /* And the next request of the connection waits until all of it is out. */
    r = ask("GET /large-whole HTTP/1.1\r\nHost: h\r\n\r\nGET /describe HTTP/1.1\r\n" CLOSE);
    assert_int_equal(count(r, "W"), 3000000);
    assert_non_null(strstr(r, "GET /describe"));
}

static void *one_of_many(void *arg)
{
    char b[8192];
    size_t n = 0;
    ssize_t r;
    int fd = dial();
    if (fd < 0) return NULL;
    say(fd, "GET /events/20 HTTP/1.1\r\n" CLOSE);
    while (n + 1 < sizeof b && (r = recv(fd, b + n, sizeof b - 1 - n, 0)) > 0) n += (size_t)r;
    b[n] = 0;
    close(fd);
    return strstr(b, "piece 19") != NULL && strstr(b, "\r\n0\r\n\r\n") != NULL ? arg : NULL;
}

static void two_hundred_clients_stream_at_once(void **state)
{
    (void)state;
    pthread_t t[200];
    for (int i = 0; i < 200; i++) assert_int_equal(pthread_create(&t[i], NULL, one_of_many, t), 0);
    int n_ok = 0;
    for (int i = 0; i < 200; i++) {
        void *ok;
        pthread_join(t[i], &ok);
        n_ok += ok != NULL;
    }
    assert_int_equal(n_ok, 200);
    assert_int_equal(n_handled, 200);
    assert_int_equal(n_gone, 0);
}

static int start_two(void **state)
{
    options = (struct td_http_options){.max_connections = 2};
    return start(state);
}

static void connections_beyond_the_limit_are_503(void **state)
{
    (void)state;
    int a = dial(), b = dial();
    say(a, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    say(b, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_handled == 2);
    assert_int_equal(status_in(hear_all(dial())), 503);
    close(a);
    WAIT_FOR(n_gone == 1);
    WAIT_FOR(status_in(ask("GET /echo HTTP/1.1\r\n" CLOSE)) == 200); /* once the refused one has left */
    close(b);
}

/* --- draining ------------------------------------------------------------------------------------------------------
 */
static void shutdown_lets_running_requests_end(void **state)
{
    (void)state;
    int idle = dial(), busy = dial();
    say(idle, "GET /echo HTTP/1.1\r\nHost: h\r\n\r\n");
    hear_until(idle, "\r\n\r\n");
    say(busy, "GET /events/300 HTTP/1.1\r\nHost: h\r\n\r\n");
    hear_until(busy, "piece 2");
    grace_ms = 60000;
    td_loop_post(loop, &shutdown_mail);
    assert_string_equal(hear_all(idle), "");
    assert_int_equal(dial(), -1); /* the port is closed */
    const char *r = hear_all(busy);
    assert_non_null(strstr(r, "piece 299"));
    assert_non_null(strstr(r, "\r\n0\r\n\r\n"));
    WAIT_FOR(is_drained);
    assert_int_equal(n_gone, 0);
}

static void shutdown_cuts_requests_that_outlast_the_grace_period(void **state)
{
    (void)state;
    int fd = dial();
    say(fd, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_handled == 1);
    grace_ms = 20;
    td_loop_post(loop, &shutdown_mail);
    WAIT_FOR(is_drained);
    assert_int_equal(n_gone, 1);
    assert_int_equal(gone_why, TD_E_DRAINING);
    close(fd);
}

static void shutdown_without_connections_is_done_at_once(void **state)
{
    (void)state;
    grace_ms = 60000;
    td_loop_post(loop, &shutdown_mail);
    WAIT_FOR(is_drained);
}

static void destroying_tells_the_requests_that_are_open(void **state)
{
    (void)state;
    int fd = dial();
    say(fd, "GET /hold HTTP/1.1\r\nHost: h\r\n\r\n");
    WAIT_FOR(n_handled == 1);
    stop(state);
    assert_int_equal(n_gone, 1);
    assert_int_equal(gone_why, TD_E_CANCELED);
    assert_string_equal(hear_all(fd), "");
}

static void statuses_have_an_http_status(void **state)
{
    (void)state;
    for (int st = 1; st < TD_N_STATUS; st++) assert_in_range(td_http_status_of((enum td_status)st), 400, 599);
    assert_int_equal(td_http_status_of(TD_OK), 200);
    assert_int_equal(td_http_status_of(TD_E_BUSY), 429);
    assert_int_equal(td_http_status_of(TD_E_UNAVAILABLE), 503);
}

/* Each allocation of a served request fails once: that client is refused or cut off, the next one is served. */
static void no_allocation_that_fails_harms_the_server(void **state)
{
    (void)state;
    static const char request[] = "POST /echo?q=1 HTTP/1.1\r\nX: y\r\nContent-Length: 4\r\n" CLOSE "body";
    int n_hurt = 0;
    for (uint32_t countdown = 0; countdown < 40; countdown++) {
        char b[2048];
        size_t n = 0;
        ssize_t r;
        int fd = dial();
        td_fault_arm(TD_FAULT_ALLOC, countdown, 1);
        say(fd, request);
        while (n < sizeof b - 1 && (r = recv(fd, b + n, sizeof b - 1 - n, 0)) > 0) n += (size_t)r;
        td_fault_disarm_all();
        b[n] = 0;
        close(fd);
        if (status_in(b) != 200) n_hurt++;
        if (n > 0) assert_true(status_in(b) == 200 || status_in(b) == 503);
        assert_string_equal(body_in(ask(request)), "body");
    }
    assert_in_range(n_hurt, 3, 39);
}

static int free_heard(void **state)
{
    (void)state;
    td_buf_free(&heard);
    return 0;
}

#define T(name)           cmocka_unit_test_setup_teardown(name, start, stop)
#define WITH(setup, name) cmocka_unit_test_setup_teardown(name, setup, stop)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_request_is_described_to_its_handler),
        T(bodies_come_by_length_and_in_chunks),
        T(a_body_may_arrive_byte_by_byte),
        T(connections_stay_open_for_further_requests),
        T(pipelined_requests_are_answered_one_by_one_in_order),
        T(a_long_pipeline_behind_a_slow_answer_is_not_lost),
        T(head_gets_the_headers_of_get_only),
        T(unknown_paths_and_methods_are_404_and_405),
        T(errors_are_json_in_the_form_of_the_openai_api),
        T(an_expectation_is_met_before_the_body_is_sent),
        T(malformed_requests_are_400_and_end_the_connection),
        T(upgrades_are_not_taken_up),
        T(random_bytes_never_hurt),
        WITH(start_small, what_is_too_large_is_refused),
        WITH(start_impatient, slow_headers_and_bodies_are_408),
        WITH(start_impatient, idle_connections_are_closed_without_a_word),
        WITH(start_impatient, a_client_that_takes_nothing_of_a_whole_response_is_dropped),
        T(events_are_streamed_in_chunks),
        T(a_client_that_hangs_up_is_noticed_while_nothing_is_sent),
        T(a_client_that_hangs_up_mid_stream_is_noticed),
        T(a_client_that_reads_too_slowly_is_dropped_at_the_bound),
        T(a_handler_that_waits_until_writable_never_loses_its_client),
        T(large_answers_reach_a_client_that_reads),
        T(two_hundred_clients_stream_at_once),
        T(no_allocation_that_fails_harms_the_server),
        WITH(start_two, connections_beyond_the_limit_are_503),
        T(shutdown_lets_running_requests_end),
        T(shutdown_cuts_requests_that_outlast_the_grace_period),
        T(shutdown_without_connections_is_done_at_once),
        cmocka_unit_test_setup(destroying_tells_the_requests_that_are_open, start),
        cmocka_unit_test(statuses_have_an_http_status),
    };
    return cmocka_run_group_tests(tests, NULL, free_heard);
}
