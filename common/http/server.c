/* A connection's life. It always is in one of:
 *   reading     req NULL: bytes go to the parser; WAIT_IDLE, WAIT_HEAD or WAIT_BODY runs
 *   answering   req set: its handler has it; further bytes collect in input, up to MAX_INPUT_BYTES, then reading pauses
 *   flushing    req NULL, unsent bytes left: the next request waits until they are gone; WAIT_STALL runs
 *   ending      the last response was given (or the connection dropped): on_closed frees it
 * Trouble: a bad request is answered and the connection ended, as nobody knows where the next one would begin. A client
 * that hangs up (EOF counts: no client closes one half and waits) while answering is dropped, and its handler hears
 * on_gone. */
#include "common/http/http.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/http/server_int.h"
#include "common/metrics/metrics.h"

#define MAX_INPUT_BYTES 65536u /* of a pipelining client; beyond that its kernel and ours hold the bytes */
#define LINGER_MS       2000u

/* --- requests ------------------------------------------------------------------------------------------------------
 */
const char *td_http_method(const struct td_http_req *r) { return r->msg.method != NULL ? r->msg.method : ""; }
const char *td_http_path(const struct td_http_req *r)
{
    return r->msg.method != NULL ? (const char *)r->msg.text.data + r->msg.path : "";
}
const char *td_http_path_rest(const struct td_http_req *r) { return r->rest != NULL ? r->rest : ""; }
const char *td_http_query(const struct td_http_req *r, const char *name)
{
    return td_http_message_query(&r->msg, name);
}
const char *td_http_header(const struct td_http_req *r, const char *name)
{
    return td_http_message_header(&r->msg, name);
}
const char *td_http_peer(const struct td_http_req *r) { return td_tcp_peer(r->conn->tcp); }
struct td_loop *td_http_loop(const struct td_http_req *r) { return r->conn->http->loop; }
const char *td_http_body(const struct td_http_req *r, size_t *n_out)
{
    if (n_out != NULL) *n_out = r->msg.body.n;
    return r->msg.body.data != NULL ? (const char *)r->msg.body.data : "";
}

void td_http_take_body(struct td_http_req *r, struct td_buf *out)
{
    *out = r->msg.body;
    r->msg.body = (struct td_buf){0};
}

void td_http_set_handlers(struct td_http_req *r, const struct td_http_handlers *h, void *user)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(h->on_gone != NULL);
    r->h = h;
    r->user = user;
}

void *td_http_user(const struct td_http_req *r)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    return r->user;
}

void td_http_req_free(struct td_http_req *r)
{
    if (r == NULL) return;
    r->magic = 0;
    td_http_message_free(&r->msg);
    td_buf_free(&r->headers);
    free(r);
}

/* --- a connection's waits and its end ------------------------------------------------------------------------------
 */
static void conn_advance(struct td_http_conn *c);

void td_http_conn_drop(struct td_http_conn *c, enum td_status why)
{
    if (c->drop_why != TD_OK) return;
    if (why == TD_E_SLOW_CLIENT) td_metric_add(TD_M_http_clients_dropped, 1);
    c->is_ending = true;
    c->drop_why = why;
    td_tcp_reset(c->tcp, why);
}

static void end_in_order(struct td_http_conn *c)
{
    if (c->is_ending) return;
    c->is_ending = true;
    td_tcp_finish(c->tcp, LINGER_MS);
    td_http_conn_update_timer(c);
}

static bool is_mid_request(const struct td_http_conn *c) { return c->parser.has_begun; }

void td_http_conn_update_timer(struct td_http_conn *c)
{
    const struct td_http_options *o = &c->http->o;
    enum td_http_wait wait = WAIT_NOTHING;
    uint32_t ms = 0;
    if (td_tcp_unsent_bytes(c->tcp) > 0) {
        wait = WAIT_STALL;
        ms = o->stall_timeout_ms;
    } else if (c->req == NULL && !c->is_ending) {
        bool in_body = is_mid_request(c) && c->parser.is_head_done;
        bool in_head = is_mid_request(c) || c->n_requests == 0;
        wait = in_body ? WAIT_BODY : in_head ? WAIT_HEAD : WAIT_IDLE;
        ms = in_body ? o->body_timeout_ms : in_head ? o->header_timeout_ms : o->idle_timeout_ms;
    }
    if (wait == c->wait && c->wait_of_request == c->n_requests)
        return; /* one deadline, however often bytes trickle in */
    c->wait = wait;
    c->wait_of_request = c->n_requests;
    c->stall_mark = td_tcp_sent_bytes(c->tcp);
    if (wait == WAIT_NOTHING)
        c->http->env->timer_stop(c->http->env, &c->timer);
    else
        c->http->env->timer_start(c->http->env, &c->timer, ms * TD_NS_PER_MS);
}

/* Answers a request that never became one and ends the connection. */
static void refuse(struct td_http_conn *c, unsigned status, const char *reason)
{
    struct td_http_req *r = td_calloc(1, sizeof *r);
    if (r == NULL) {
        td_http_conn_drop(c, TD_E_NO_MEMORY);
        return;
    }
    *r = (struct td_http_req){.magic = TD_HTTP_REQ_MAGIC, .conn = c};
    c->req = r;
    td_http_error(r, status, NULL, NULL, "%s", reason);
}

static void on_timer(struct td_timer *t)
{
    struct td_http_conn *c = TD_CONTAINER_OF(t, struct td_http_conn, timer);
    enum td_http_wait wait = c->wait;
    c->wait = WAIT_NOTHING;
    if (wait == WAIT_STALL && td_tcp_sent_bytes(c->tcp) != c->stall_mark) {
        td_http_conn_update_timer(c); /* slow, but moving */
    } else if (wait == WAIT_STALL) {
        TD_INFO("http_client_dropped", "peer=%s unsent_bytes=%zu reason=\"takes nothing any more\"",
                td_tcp_peer(c->tcp), td_tcp_unsent_bytes(c->tcp));
        td_http_conn_drop(c, TD_E_SLOW_CLIENT);
    } else if (is_mid_request(c)) {
        refuse(c, 408,
               c->parser.is_head_done ? "the request body did not arrive in time"
                                      : "the request headers did not arrive in time");
    } else {
        end_in_order(c); /* nothing was asked, so nothing is said */
    }
}

static void on_resume(struct td_timer *t) { conn_advance(TD_CONTAINER_OF(t, struct td_http_conn, resume)); }

void td_http_conn_req_ended(struct td_http_conn *c, struct td_http_req *r)
{
    TD_CHECK(c->req == r);
    bool goes_on = r->is_keep_alive;
    c->req = NULL;
    td_http_req_free(r);
    if (!goes_on)
        end_in_order(c);
    else if (!c->is_advancing && !c->is_ending) {
        /* Not from here: the caller is some handler that does not expect the next request's handler to run. */
        c->http->env->timer_start(c->http->env, &c->resume, 0);
        td_http_conn_update_timer(c);
    }
}

/* --- from bytes to handlers ----------------------------------------------------------------------------------------
 */
/* What the star of pattern matched, "" when it has none; NULL: no match. */
static const char *match(const char *pattern, const char *path)
{
    size_t n = strlen(pattern);
    if (n > 0 && pattern[n - 1] == '*')
        return strncmp(pattern, path, n - 1) == 0 && path[n - 1] != 0 ? path + n - 1 : NULL;
    return strcmp(pattern, path) == 0 ? "" : NULL;
}

/* The row for method and path; NULL: none, then *allow holds the methods that the path has ("": no such path), and
 * *is_public says whether one of them is for pages of other origins. */
static const struct td_http_route *find_route(const struct td_http *h, const struct td_http_message *m,
                                              const char **rest, char *allow, size_t allow_size, bool *is_public)
{
    const char *path = (const char *)m->text.data + m->path;
    const char *method = strcmp(m->method, "HEAD") == 0 ? "GET" : m->method;
    size_t n = 0;
    allow[0] = 0;
    *is_public = false;
    for (unsigned i = 0; i < h->n_rows; i++) {
        *rest = match(h->rows[i].route.path, path);
        if (*rest == NULL) continue;
        *is_public |= h->rows[i].is_public;
        if (strcmp(h->rows[i].route.method, method) == 0) return &h->rows[i].route;
        if (n + 24 < allow_size && strstr(allow, h->rows[i].route.method) == NULL) {
            if (n > 0) n = strlen(strcat(allow, ", "));
            strncat(allow, h->rows[i].route.method, 12);
            if (strcmp(h->rows[i].route.method, "GET") == 0) strcat(allow, ", HEAD");
            n = strlen(allow);
        }
    }
    return NULL;
}

static struct td_http_req *take_request(struct td_http_conn *c)
{
    struct td_http_req *r = td_calloc(1, sizeof *r);
    if (r == NULL) return NULL;
    *r = (struct td_http_req){.magic = TD_HTTP_REQ_MAGIC, .conn = c, .msg = c->parser.msg};
    c->parser.msg = (struct td_http_message){0};
    r->is_head = strcmp(r->msg.method, "HEAD") == 0;
    r->is_keep_alive = r->msg.is_keep_alive;
    c->req = r;
    return r;
}

/* What may be done with a path; for a page of another origin, what its browser asks before it lets the page. */
static void answer_options(struct td_http_req *r, const char *allow)
{
    const char *origin = r->conn->http->o.cors_origin;
    if (r->is_public && origin != NULL && origin[0] != '\0') {
        const char *wanted = td_http_header(r, "access-control-request-headers");
        td_http_set_header(r, "Access-Control-Allow-Methods", allow);
        if (wanted != NULL) td_http_set_header(r, "Access-Control-Allow-Headers", wanted);
        td_http_set_header(r, "Access-Control-Max-Age", "600");
    }
    td_http_respond(r, 204, NULL, NULL, 0);
}

static void answer_no_route(struct td_http_req *r, const char *allow)
{
    if (allow[0] == 0) {
        td_http_error(r, 404, NULL, NULL, "there is no %s here", td_http_path(r));
        return;
    }
    td_http_set_header(r, "Allow", allow);
    if (strcmp(r->msg.method, "OPTIONS") == 0) {
        answer_options(r, allow);
        return;
    }
    td_http_error(r, 405, NULL, NULL, "%s does not take %s, only %s", td_http_path(r), td_http_method(r), allow);
}

/* Headers are complete: whatever can be refused without the body is refused now. */
static void on_head(struct td_http_conn *c)
{
    const struct td_http_message *m = &c->parser.msg;
    const char *rest;
    char allow[128];
    bool is_public;
    if (find_route(c->http, m, &rest, allow, sizeof allow, &is_public) != NULL) {
        if (m->expects_continue) td_tcp_write(c->tcp, &(struct td_tcp_vec){"HTTP/1.1 100 Continue\r\n\r\n", 25}, 1);
        return;
    }
    struct td_http_req *r = take_request(c);
    if (r == NULL) {
        td_http_conn_drop(c, TD_E_NO_MEMORY);
        return;
    }
    r->is_public = is_public;
    r->is_keep_alive = false; /* rather than read a body that nobody wants */
    answer_no_route(r, allow);
}

static void dispatch(struct td_http_conn *c)
{
    char allow[128];
    const char *rest;
    c->n_requests++;
    td_metric_add(TD_M_http_requests, 1);
    struct td_http_req *r = take_request(c);
    if (r == NULL) {
        td_http_conn_drop(c, TD_E_NO_MEMORY);
        return;
    }
    const struct td_http_route *route = find_route(c->http, &r->msg, &rest, allow, sizeof allow, &r->is_public);
    if (route == NULL) {
        answer_no_route(r, allow);
        return;
    }
    r->rest = rest;
    route->handle(r, route->user);
    TD_CHECK(c->req != r || r->h != NULL); /* answered, or somebody is there to hear on_gone */
}

static void parse_some(struct td_http_conn *c)
{
    size_t used;
    const char *data = (const char *)c->input.data + c->input_at;
    enum td_http_parse what = td_http_parser_feed(&c->parser, data, c->input.n - c->input_at, &used);
    c->input_at += used;
    switch (what) {
    case TD_HTTP_PARSE_MORE: break;
    case TD_HTTP_PARSE_HEAD: on_head(c); break;
    case TD_HTTP_PARSE_DONE: dispatch(c); break;
    case TD_HTTP_PARSE_BAD:
        TD_DEBUG("http_bad_request", "peer=%s status=%u reason=\"%s\"", td_tcp_peer(c->tcp), c->parser.status,
                 c->parser.reason);
        refuse(c, c->parser.status, c->parser.reason);
        break;
    }
}

static void conn_advance(struct td_http_conn *c)
{
    if (c->is_advancing || c->http == NULL) return;
    struct td_http *h = c->http;
    c->is_advancing = true;
    while (!c->is_ending && c->req == NULL && td_tcp_unsent_bytes(c->tcp) == 0 && c->input_at < c->input.n) {
        parse_some(c);
        if (c->http == NULL) return; /* a handler destroyed the server; on_closed frees what is left */
    }
    c->is_advancing = false;
    size_t left = c->is_ending ? 0 : c->input.n - c->input_at;
    if (left > 0 && c->input_at > 0) memmove(c->input.data, c->input.data + c->input_at, left);
    c->input.n = left;
    c->input_at = 0;
    if (left == 0 && c->input.cap > MAX_INPUT_BYTES) td_buf_free(&c->input);
    if (!c->is_reading && left < MAX_INPUT_BYTES / 2) {
        c->is_reading = true;
        td_tcp_resume(c->tcp);
    }
    if (c->req == NULL && !c->is_ending && h->is_draining && !is_mid_request(c) && left == 0) end_in_order(c);
    td_http_conn_update_timer(c);
}

/* --- what the socket tells -----------------------------------------------------------------------------------------
 */
static void on_read(struct td_tcp *t, const uint8_t *p, size_t n)
{
    struct td_http_conn *c = td_tcp_user(t);
    if (c->http == NULL || c->is_ending) return;
    td_buf_put(&c->input, p, n);
    if (c->input.failed) {
        td_http_conn_drop(c, TD_E_NO_MEMORY);
        return;
    }
    conn_advance(c);
    if (c->http == NULL || c->is_ending || c->input.n < MAX_INPUT_BYTES) return;
    c->is_reading = false;
    td_tcp_pause(t);
}

static void on_eof(struct td_tcp *t)
{
    struct td_http_conn *c = td_tcp_user(t);
    if (c->http == NULL || c->is_ending) return;
    if (c->req != NULL)
        td_http_conn_drop(c, TD_E_PEER_LOST);
    else
        end_in_order(c); /* a response may still be on its way */
}

static void on_drained(struct td_tcp *t)
{
    struct td_http_conn *c = td_tcp_user(t);
    if (c->http == NULL) return;
    struct td_http_req *r = c->req;
    td_http_conn_update_timer(c);
    if (r == NULL) {
        conn_advance(c);
    } else if (r->owes_writable && !c->is_ending) {
        r->owes_writable = false;
        if (r->h != NULL && r->h->on_writable != NULL) r->h->on_writable(r);
    }
}

/* Takes the connection out of its server; its request hears why. */
static void detach(struct td_http_conn *c, enum td_status why)
{
    struct td_http *h = c->http;
    struct td_http_req *r = c->req;
    c->req = NULL;
    h->env->timer_stop(h->env, &c->timer);
    h->env->timer_stop(h->env, &c->resume);
    td_list_remove(&c->link);
    h->n_conns--;
    td_metric_add(TD_M_http_connections, (uint64_t)-1);
    if (r != NULL) {
        if (r->h != NULL) r->h->on_gone(r, why);
        td_http_req_free(r);
    }
    c->http = NULL;
    if (h->is_draining && h->n_conns == 0) h->env->timer_start(h->env, &h->all_closed, 0);
}

static void on_closed(struct td_tcp *t, enum td_status why)
{
    struct td_http_conn *c = td_tcp_user(t);
    if (c->http != NULL) detach(c, c->drop_why != TD_OK ? c->drop_why : why == TD_OK ? TD_E_PEER_LOST : why);
    td_http_parser_deinit(&c->parser);
    td_buf_free(&c->input);
    free(c);
}

static const struct td_tcp_handlers tcp_handlers = {on_read, on_eof, on_drained, on_closed};

static void on_accept(struct td_tcp_listener *s, struct td_tcp *t)
{
    struct td_http *h = td_tcp_listener_user(s);
    bool is_over = h->n_conns >= h->o.max_connections;
    struct td_http_conn *c = h->n_conns / 2 >= h->o.max_connections ? NULL : td_calloc(1, sizeof *c);
    if (c == NULL) { /* not even room to say that there is none */
        td_tcp_reset(t, TD_E_BUSY);
        return;
    }
    c->http = h;
    c->tcp = t;
    c->is_reading = true;
    c->timer.fire = on_timer;
    c->resume.fire = on_resume;
    td_http_parser_init(&c->parser, h->o.max_header_bytes, h->o.max_body_bytes);
    td_list_push_back(&h->conns, &c->link);
    h->n_conns++;
    td_metric_add(TD_M_http_connections, 1);
    td_tcp_accept(t, &tcp_handlers, c, (int)h->o.sndbuf_bytes);
    if (is_over)
        refuse(c, 503, "too many connections");
    else
        td_http_conn_update_timer(c);
}

/* --- the server ----------------------------------------------------------------------------------------------------
 */
static void on_grace_over(struct td_timer *t)
{
    struct td_http *h = TD_CONTAINER_OF(t, struct td_http, grace);
    TD_LIST_FOREACH (it, &h->conns) td_http_conn_drop(TD_LIST_ENTRY(it, struct td_http_conn, link), TD_E_DRAINING);
}

static void on_all_closed(struct td_timer *t)
{
    struct td_http *h = TD_CONTAINER_OF(t, struct td_http, all_closed);
    h->env->timer_stop(h->env, &h->grace);
    if (h->drained != NULL) h->drained(h->drained_user);
}

static void or_default(uint32_t *v, uint32_t d)
{
    if (*v == 0) *v = d;
}

enum td_status td_http_create(struct td_loop *l, const struct td_http_options *o, struct td_http **out)
{
    struct td_http *h = td_calloc(1, sizeof *h);
    if (h == NULL) return TD_E_NO_MEMORY;
    h->loop = l;
    h->env = td_loop_env(l);
    if (o != NULL) h->o = *o;
    or_default(&h->o.max_connections, 4096);
    or_default(&h->o.max_header_bytes, 16384);
    or_default(&h->o.max_body_bytes, 8u << 20);
    or_default(&h->o.max_backlog_bytes, 256u << 10);
    or_default(&h->o.header_timeout_ms, 10000);
    or_default(&h->o.body_timeout_ms, 60000);
    or_default(&h->o.idle_timeout_ms, 75000);
    or_default(&h->o.stall_timeout_ms, 30000);
    or_default(&h->o.sndbuf_bytes, 65536);
    h->grace.fire = on_grace_over;
    h->all_closed.fire = on_all_closed;
    td_list_init(&h->conns);
    *out = h;
    return TD_OK;
}

static enum td_status add_rows(struct td_http *h, const struct td_http_route *routes, unsigned n, bool is_public)
{
    TD_CHECK(h->listener == NULL);
    struct td_http_row *p = td_realloc(h->rows, h->n_rows + n, sizeof *p);
    if (p == NULL) return TD_E_NO_MEMORY;
    h->rows = p;
    for (unsigned i = 0; i < n; i++) h->rows[h->n_rows++] = (struct td_http_row){routes[i], is_public};
    return TD_OK;
}

enum td_status td_http_add_routes(struct td_http *h, const struct td_http_route *rows, unsigned n)
{
    return add_rows(h, rows, n, false);
}

enum td_status td_http_add_public_routes(struct td_http *h, const struct td_http_route *rows, unsigned n)
{
    return add_rows(h, rows, n, true);
}

enum td_status td_http_listen(struct td_http *h, const char *address, struct td_err *err)
{
    TD_CHECK(h->listener == NULL);
    return td_tcp_listen(h->loop, address, on_accept, h, &h->listener, err);
}

const char *td_http_address(const struct td_http *h)
{
    return h->listener == NULL ? "" : td_tcp_listener_address(h->listener);
}

uint32_t td_http_n_connections(const struct td_http *h) { return h->n_conns; }

void td_http_shutdown(struct td_http *h, uint32_t grace_ms, void (*done)(void *user), void *user)
{
    TD_CHECK(!h->is_draining);
    h->is_draining = true;
    h->drained = done;
    h->drained_user = user;
    td_tcp_unlisten(h->listener);
    h->listener = NULL;
    if (h->n_conns == 0) h->env->timer_start(h->env, &h->all_closed, 0);
    h->env->timer_start(h->env, &h->grace, grace_ms * TD_NS_PER_MS);
    TD_LIST_FOREACH (it, &h->conns) { /* closing is asynchronous: nobody leaves the list here */
        struct td_http_conn *c = TD_LIST_ENTRY(it, struct td_http_conn, link);
        if (c->req == NULL && !is_mid_request(c) && c->input_at == c->input.n) end_in_order(c);
    }
}

void td_http_destroy(struct td_http *h)
{
    if (h == NULL) return;
    td_tcp_unlisten(h->listener);
    while (!td_list_is_empty(&h->conns)) {
        struct td_http_conn *c = TD_LIST_ENTRY(h->conns.next, struct td_http_conn, link);
        struct td_tcp *t = c->tcp;
        td_tcp_reset(t, TD_E_CANCELED); /* asynchronous: c lives on until its on_closed */
        detach(c, TD_E_CANCELED);
    }
    h->env->timer_stop(h->env, &h->grace);
    h->env->timer_stop(h->env, &h->all_closed);
    td_buf_free(&h->scratch);
    free(h->rows);
    free(h);
}
