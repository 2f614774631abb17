#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/http/server_int.h"
#include "common/metrics/metrics.h"

static const struct {
    unsigned status;
    const char *reason;
} reasons[] = {
    {200, "OK"},
    {201, "Created"},
    {202, "Accepted"},
    {204, "No Content"},
    {304, "Not Modified"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {409, "Conflict"},
    {413, "Content Too Large"},
    {414, "URI Too Long"},
    {415, "Unsupported Media Type"},
    {417, "Expectation Failed"},
    {422, "Unprocessable Content"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {499, "Client Closed Request"}, /* by custom: nobody is left to read it, but it appears in logs */
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {502, "Bad Gateway"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
    {505, "HTTP Version Not Supported"},
};

static const char *reason_of(unsigned status)
{
    for (size_t i = 0; i < TD_COUNT(reasons); i++)
        if (reasons[i].status == status) return reasons[i].reason;
    return "Unknown";
}

unsigned td_http_status_of(enum td_status st)
{
    switch (st) {
    case TD_E_OK: return 200;
    case TD_E_INVALID: return 400;
    case TD_E_NOT_FOUND: return 404;
    case TD_E_TOO_LARGE: return 413;
    case TD_E_CANCELED:
    case TD_E_SLOW_CLIENT: return 499;
    case TD_E_NO_PAGES:
    case TD_E_PREEMPTED:
    case TD_E_BUSY:
    case TD_E_NO_MEMORY: return 429;
    case TD_E_UNIMPLEMENTED: return 501;
    case TD_E_DRAINING:
    case TD_E_UNAVAILABLE:
    case TD_E_STALE:
    case TD_E_UNKNOWN_PEER:
    case TD_E_PEER_LOST:
    case TD_E_DEVICE: return 503;
    case TD_E_DEADLINE: return 504;
    default: return 500;
    }
}

static struct td_tcp_vec vec_of(const struct td_buf *b) { return (struct td_tcp_vec){b->data, b->n}; }

/* --- headers -------------------------------------------------------------------------------------------------------
 */
enum td_status td_http_set_header(struct td_http_req *r, const char *name, const char *value)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(!r->has_begun);
    if (!td_http_is_token(name)) return TD_E_INVALID;
    for (const char *p = value; *p != 0; p++) /* a line break would let a client's value write headers of its own */
        if (((unsigned char)*p < 0x20 && *p != '\t') || *p == 0x7F) return TD_E_INVALID;
    td_buf_printf(&r->headers, "%s: %s\r\n", name, value);
    return TD_OK;
}

static const char *date_of_now(struct td_http *h)
{
    uint64_t s = td_clock_wall_ns() / TD_NS_PER_S;
    if (s != h->date_s) {
        static const char days[][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
        static const char months[][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                         "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
        time_t t = (time_t)s;
        struct tm tm;
        gmtime_r(&t, &tm); /* strftime would follow the locale */
        snprintf(h->date, sizeof h->date, "%s, %02d %s %04d %02d:%02d:%02d GMT", days[tm.tm_wday], tm.tm_mday,
                 months[tm.tm_mon], tm.tm_year + 1900, tm.tm_hour, tm.tm_min, tm.tm_sec);
        h->date_s = s;
    }
    return h->date;
}

/* Lets pages of the origin that the settings name read the answer. */
static void put_cors(struct td_buf *b, const struct td_http_req *r)
{
    const char *origin = r->conn->http->o.cors_origin;
    if (origin == NULL || origin[0] == '\0') return;
    td_buf_printf(b, "Access-Control-Allow-Origin: %s\r\n", origin);
    td_buf_str(b, "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n");
    if (strcmp(origin, "*") != 0) td_buf_str(b, "Vary: Origin\r\n");
}

/* Status line and headers into the server's scratch. n_body UINT64_MAX: streamed. */
static struct td_buf *put_head(struct td_http_req *r, unsigned status, const char *type, uint64_t n_body)
{
    struct td_http *h = r->conn->http;
    struct td_buf *b = &h->scratch;
    if (h->is_draining) r->is_keep_alive = false;
    r->has_begun = true;
    r->has_no_body = r->is_head || status == 204 || status == 304 || status < 200;
    bool is_streamed = n_body == UINT64_MAX;
    r->is_chunked = is_streamed && r->msg.minor > 0;
    if (is_streamed && !r->is_chunked && !r->has_no_body)
        r->is_keep_alive = false; /* 1.0: ends where the stream ends */
    td_buf_clear(b);
    td_buf_printf(b, "HTTP/1.1 %u %s\r\nDate: %s\r\n", status, reason_of(status), date_of_now(h));
    if (type != NULL) td_buf_printf(b, "Content-Type: %s\r\n", type);
    if (r->is_chunked && status != 204 && status != 304)
        td_buf_str(b, "Transfer-Encoding: chunked\r\n");
    else if (!is_streamed && status != 204 && status != 304)
        td_buf_printf(b, "Content-Length: %" PRIu64 "\r\n", n_body);
    if (!r->is_keep_alive)
        td_buf_str(b, "Connection: close\r\n");
    else if (r->msg.minor == 0)
        td_buf_str(b, "Connection: keep-alive\r\n");
    if (r->is_public) put_cors(b, r);
    td_buf_put(b, r->headers.data, r->headers.n);
    td_buf_str(b, "\r\n");
    if (b->failed || r->headers.failed) td_http_conn_drop(r->conn, TD_E_NO_MEMORY);
    TD_DEBUG("http_response", "peer=%s method=%s path=%s status=%u", td_http_peer(r), td_http_method(r),
             td_http_path(r), status);
    return b;
}

/* --- whole responses -----------------------------------------------------------------------------------------------
 */
void td_http_respond(struct td_http_req *r, unsigned status, const char *type, const void *body, size_t n)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(!r->has_begun);
    struct td_buf *head = put_head(r, status, type, n);
    struct td_tcp_vec v[2] = {vec_of(head), {body, n}};
    td_tcp_write(r->conn->tcp, v, r->has_no_body ? 1 : 2);
    td_http_conn_req_ended(r->conn, r);
}

static const char *error_type_of(unsigned status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 429: return "rate_limit_error";
    case 503: return "service_unavailable_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

static void put_or_null(struct td_buf *b, const char *s)
{
    if (s == NULL)
        td_buf_str(b, "null");
    else
        td_json_quote_str(b, s);
}

void td_http_put_error(struct td_buf *b, unsigned status, const char *param, const char *code, const char *message)
{
    td_buf_str(b, "{\"message\":");
    td_json_quote_str(b, message);
    td_buf_printf(b, ",\"type\":\"%s\",\"param\":", error_type_of(status));
    put_or_null(b, param);
    td_buf_str(b, ",\"code\":");
    put_or_null(b, code);
    td_buf_str(b, "}");
}

void td_http_error(struct td_http_req *r, unsigned status, const char *param, const char *code, const char *fmt, ...)
{
    char message[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    struct td_buf b = {0};
    td_buf_str(&b, "{\"error\":");
    td_http_put_error(&b, status, param, code, message);
    td_buf_str(&b, "}\n");
    td_http_respond(r, status, "application/json", b.data, b.failed ? 0 : b.n);
    td_buf_free(&b);
}

/* --- streamed responses --------------------------------------------------------------------------------------------
 */
size_t td_http_backlog(const struct td_http_req *r)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    return td_tcp_unsent_bytes(r->conn->tcp);
}

static void send_piece(struct td_http_req *r, const struct td_tcp_vec *v, unsigned n_vecs)
{
    td_tcp_write(r->conn->tcp, v, n_vecs);
    if (td_tcp_unsent_bytes(r->conn->tcp) == 0) return;
    r->owes_writable = true;
    td_http_conn_update_timer(r->conn);
}

void td_http_begin(struct td_http_req *r, unsigned status, const char *type)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(!r->has_begun);
    struct td_tcp_vec v = vec_of(put_head(r, status, type, UINT64_MAX));
    send_piece(r, &v, 1);
}

enum td_status td_http_write(struct td_http_req *r, const void *p, size_t n)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(r->has_begun);
    struct td_http_conn *c = r->conn;
    if (c->is_ending) return c->drop_why == TD_E_SLOW_CLIENT ? TD_E_SLOW_CLIENT : TD_E_CANCELED;
    if (n == 0 || r->has_no_body) return TD_OK; /* a chunk of length 0 would be the end */
    size_t unsent = td_tcp_unsent_bytes(c->tcp);
    if (unsent > 0 && unsent + n > c->http->o.max_backlog_bytes) { /* one large piece alone is no sign of slowness */
        TD_INFO("http_client_dropped", "peer=%s path=%s unsent_bytes=%zu reason=\"reads too slowly\"", td_http_peer(r),
                td_http_path(r), unsent);
        td_http_conn_drop(c, TD_E_SLOW_CLIENT);
        return TD_E_SLOW_CLIENT;
    }
    char size[24];
    int n_size = r->is_chunked ? snprintf(size, sizeof size, "%zx\r\n", n) : 0;
    struct td_tcp_vec v[3] = {{size, (size_t)n_size}, {p, n}, {"\r\n", r->is_chunked ? 2 : 0}};
    send_piece(r, v, 3);
    return TD_OK;
}

void td_http_end(struct td_http_req *r)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    TD_CHECK(r->has_begun);
    struct td_http_conn *c = r->conn;
    if (r->is_chunked && !r->has_no_body && !c->is_ending)
        td_tcp_write(c->tcp, &(struct td_tcp_vec){"0\r\n\r\n", 5}, 1);
    td_http_conn_req_ended(c, r);
}

/* --- server-sent events --------------------------------------------------------------------------------------------
 */
void td_http_sse_begin(struct td_http_req *r)
{
    td_http_set_header(r, "Cache-Control", "no-cache");
    td_http_set_header(r, "X-Accel-Buffering", "no"); /* nginx would hold events back */
    td_http_begin(r, 200, "text/event-stream; charset=utf-8");
}

enum td_status td_http_sse(struct td_http_req *r, const char *event, const char *data, size_t n)
{
    TD_MAGIC_CHECK(r, TD_HTTP_REQ_MAGIC);
    struct td_buf *b = &r->conn->http->scratch;
    td_buf_clear(b);
    if (event != NULL) td_buf_printf(b, "event: %s\n", event);
    for (size_t at = 0; at <= n;) { /* a line break in data, of any kind, becomes a further data line */
        size_t end = at;
        while (end < n && data[end] != '\n' && data[end] != '\r') end++;
        td_buf_str(b, "data: ");
        td_buf_put(b, data + at, end - at);
        td_buf_str(b, "\n");
        if (end + 1 < n && data[end] == '\r' && data[end + 1] == '\n') end++;
        at = end + 1;
    }
    td_buf_str(b, "\n");
    if (b->failed) {
        td_http_conn_drop(r->conn, TD_E_NO_MEMORY);
        return TD_E_CANCELED;
    }
    return td_http_write(r, b->data, b->n);
}
