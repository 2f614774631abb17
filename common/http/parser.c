#include "common/http/parser_int.h"

#include <string.h>
#include <strings.h>

#include "common/base/check.h"

#define MAX_TARGET_BYTES 8192u
/* Chunked coding of one-byte chunks is six bytes for one; more than that is a client that plays with chunk extensions.
 */
#define MAX_CHUNK_OVERHEAD 8u

void td_http_message_free(struct td_http_message *m)
{
    td_buf_free(&m->text);
    td_buf_free(&m->body);
    *m = (struct td_http_message){0};
}

static const char *text_at(const struct td_http_message *m, size_t at) { return (const char *)m->text.data + at; }

const char *td_http_message_header(const struct td_http_message *m, const char *name)
{
    for (unsigned i = 0; i < m->n_headers; i++)
        if (strcasecmp(text_at(m, m->headers[i].name), name) == 0) return text_at(m, m->headers[i].value);
    return NULL;
}

const char *td_http_message_query(const struct td_http_message *m, const char *name)
{
    for (size_t at = m->query; at < m->text.n;) {
        const char *k = text_at(m, at), *v = k + strlen(k) + 1;
        if (strcmp(k, name) == 0) return v;
        at += (size_t)(v - k) + strlen(v) + 1;
    }
    return NULL;
}

bool td_http_is_token(const char *s)
{
    static const char others[] = "!#$%&'*+-.^_`|~"; /* RFC 9110, 5.6.2 */
    if (*s == 0) return false;
    for (; *s != 0; s++) {
        bool is_alnum = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z') || (*s >= '0' && *s <= '9');
        if (!is_alnum && strchr(others, *s) == NULL) return false;
    }
    return true;
}

/* The first refusal counts. Returns what tells llhttp to stop. */
static int refuse(struct td_http_parser *p, unsigned status, const char *reason)
{
    if (p->status == 0) {
        p->status = status;
        p->reason = reason;
    }
    return HPE_USER;
}

/* --- the request target --------------------------------------------------------------------------------------------
 */
static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Appends text[from, to) decoded, and a NUL. False: it holds %00. A percent sign that starts no escape stands for
 * itself. */
static bool put_decoded(struct td_buf *text, size_t from, size_t to, bool plus_is_space)
{
    bool is_fine = true;
    if (!td_buf_reserve(text, to - from + 1)) return true; /* the caller looks at failed */
    for (size_t i = from; i < to; i++) {
        char c = (char)text->data[i];
        if (c == '%' && to - i > 2) {
            int hi = hex_digit((char)text->data[i + 1]), lo = hex_digit((char)text->data[i + 2]);
            if (hi >= 0 && lo >= 0) {
                c = (char)(hi * 16 + lo);
                i += 2;
            }
        } else if (c == '+' && plus_is_space) {
            c = ' ';
        }
        is_fine &= c != 0;
        td_buf_u8(text, (uint8_t)c);
    }
    td_buf_u8(text, 0);
    return is_fine;
}

static size_t find(const struct td_buf *text, size_t from, size_t to, char c)
{
    const uint8_t *p = from < to ? memchr(text->data + from, c, to - from) : NULL;
    return p == NULL ? to : (size_t)(p - text->data);
}

/* The target lies at the start of text. Splits it into path and query, both decoded behind everything else. */
static int read_target(struct td_http_parser *p)
{
    struct td_http_message *m = &p->msg;
    size_t start = 0, end = strlen(text_at(m, 0));
    if (strncasecmp(text_at(m, 0), "http://", 7) == 0 || strncasecmp(text_at(m, 0), "https://", 8) == 0)
        start = find(&m->text, find(&m->text, 0, end, ':') + 3, end, '/'); /* absolute form: a proxy's habit */
    end = find(&m->text, start, end, '#');
    size_t path_end = find(&m->text, start, end, '?');
    m->path = m->text.n;
    bool is_fine = true;
    if (path_end == start)
        td_buf_put(&m->text, "/", 2);
    else
        is_fine = put_decoded(&m->text, start, path_end, false);
    m->query = m->text.n;
    for (size_t at = path_end + 1; at < end;) {
        size_t pair_end = find(&m->text, at, end, '&'), key_end = find(&m->text, at, pair_end, '=');
        is_fine &= put_decoded(&m->text, at, key_end, true);
        is_fine &= put_decoded(&m->text, key_end < pair_end ? key_end + 1 : pair_end, pair_end, true);
        at = pair_end + 1;
    }
    return is_fine ? 0 : refuse(p, 400, "the request target holds a zero byte");
}

/* --- llhttp's callbacks --------------------------------------------------------------------------------------------
 */
static int on_begin(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    p->has_begun = true;
    p->is_head_done = false;
    p->n_head_bytes = p->n_body_raw_bytes = 0;
    return 0;
}

static int on_target(llhttp_t *ll, const char *s, size_t n)
{
    struct td_http_parser *p = ll->data;
    if (p->msg.text.n + n > MAX_TARGET_BYTES) return refuse(p, 414, "the request target is too long");
    td_buf_put(&p->msg.text, s, n);
    return 0;
}

static int on_target_end(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    td_buf_u8(&p->msg.text, 0);
    p->name_at = p->msg.text.n;
    for (size_t i = 0; i + 1 < p->msg.text.n; i++) /* llhttp as it is packaged lets tabs through */
        if (p->msg.text.data[i] <= ' ' || p->msg.text.data[i] == 0x7F)
            return refuse(p, 400, "bad byte in the request target");
    return 0;
}

static int on_name(llhttp_t *ll, const char *s, size_t n)
{
    struct td_http_parser *p = ll->data;
    if (!p->is_head_done) td_buf_put(&p->msg.text, s, n); /* else a trailer: read over */
    return 0;
}

static int on_name_end(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    if (p->is_head_done) return 0;
    if (p->msg.n_headers == TD_HTTP_MAX_HEADERS) return refuse(p, 431, "too many headers");
    td_buf_u8(&p->msg.text, 0);
    if (p->msg.text.failed) return refuse(p, 503, "out of memory");
    /* llhttp as it is packaged takes "Transfer-Encoding : chunked" for a header that it does not know; a proxy may not.
     */
    if (!td_http_is_token(text_at(&p->msg, p->name_at))) return refuse(p, 400, "bad header name");
    p->msg.headers[p->msg.n_headers].name = p->name_at;
    p->msg.headers[p->msg.n_headers].value = p->msg.text.n;
    return 0;
}

static int on_value_end(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    if (p->is_head_done) return 0;
    struct td_buf *text = &p->msg.text;
    size_t start = p->msg.headers[p->msg.n_headers].value;
    while (text->n > start && (text->data[text->n - 1] == ' ' || text->data[text->n - 1] == '\t')) text->n--;
    td_buf_u8(text, 0);
    p->msg.n_headers++;
    p->name_at = text->n;
    return 0;
}

static int check_head(struct td_http_parser *p)
{
    const llhttp_t *ll = &p->ll;
    struct td_http_message *m = &p->msg;
    unsigned n_hosts = 0;
    for (unsigned i = 0; i < m->n_headers; i++) n_hosts += strcasecmp(text_at(m, m->headers[i].name), "host") == 0;
    if (ll->http_major != 1) return refuse(p, 505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
    if (n_hosts > 1 || (n_hosts == 0 && ll->http_minor > 0)) return refuse(p, 400, "there must be one Host header");
    if (ll->http_minor == 0 && (ll->flags & F_TRANSFER_ENCODING) != 0)
        return refuse(p, 400, "HTTP/1.0 has no Transfer-Encoding");
    if ((ll->flags & F_CONTENT_LENGTH) != 0 && ll->content_length > p->max_body_bytes)
        return refuse(p, 413, "the request body is too large");
    const char *expect = td_http_message_header(m, "expect");
    if (expect != NULL && strcasecmp(expect, "100-continue") != 0)
        return refuse(p, 417, "this expectation cannot be met");
    m->expects_continue = expect != NULL && ll->http_minor > 0;
    return 0;
}

static int on_headers(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    struct td_http_message *m = &p->msg;
    p->is_head_done = true;
    ll->upgrade = 0; /* we never upgrade: go on as if it had not been asked for */
    m->method = llhttp_method_name((llhttp_method_t)ll->method);
    m->minor = ll->http_minor;
    m->is_keep_alive = llhttp_should_keep_alive(ll) != 0;
    m->has_body = (ll->flags & F_CHUNKED) != 0 || ((ll->flags & F_CONTENT_LENGTH) != 0 && ll->content_length > 0);
    if (m->text.failed) return refuse(p, 503, "out of memory");
    int e = check_head(p);
    if (e == 0) e = read_target(p);
    if (e == 0 && m->text.failed) e = refuse(p, 503, "out of memory");
    return e != 0 ? e : m->has_body ? HPE_PAUSED : 0;
}

static int on_body(llhttp_t *ll, const char *s, size_t n)
{
    struct td_http_parser *p = ll->data;
    if (n > p->max_body_bytes - p->msg.body.n) return refuse(p, 413, "the request body is too large");
    td_buf_put(&p->msg.body, s, n);
    return p->msg.body.failed ? refuse(p, 503, "out of memory") : 0;
}

static int on_complete(llhttp_t *ll)
{
    struct td_http_parser *p = ll->data;
    td_buf_cstr(&p->msg.body); /* NUL behind it, for whoever reads it as text */
    p->has_begun = false;
    return p->msg.body.failed ? refuse(p, 503, "out of memory") : HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_message_begin = on_begin,
    .on_url = on_target,
    .on_url_complete = on_target_end,
    .on_header_field = on_name,
    .on_header_field_complete = on_name_end,
    .on_header_value = on_name, /* name and value are collected alike */
    .on_header_value_complete = on_value_end,
    .on_headers_complete = on_headers,
    .on_body = on_body,
    .on_message_complete = on_complete,
};

void td_http_parser_init(struct td_http_parser *p, size_t max_header_bytes, size_t max_body_bytes)
{
    *p = (struct td_http_parser){.max_header_bytes = max_header_bytes, .max_body_bytes = max_body_bytes};
    llhttp_init(&p->ll, HTTP_REQUEST, &settings);
    p->ll.data = p;
}

void td_http_parser_deinit(struct td_http_parser *p) { td_http_message_free(&p->msg); }

/* Bytes that llhttp swallows without telling (spaces, chunk extensions, trailers) must be bounded too. */
static void check_raw_sizes(struct td_http_parser *p, bool was_in_head, size_t n_used)
{
    if (was_in_head) {
        p->n_head_bytes += n_used;
        if (p->n_head_bytes > p->max_header_bytes) refuse(p, 431, "the headers are too large");
    } else {
        p->n_body_raw_bytes += n_used;
        if (p->n_body_raw_bytes > MAX_CHUNK_OVERHEAD * p->max_body_bytes + p->max_header_bytes)
            refuse(p, 413, "the request body is too large");
    }
}

enum td_http_parse td_http_parser_feed(struct td_http_parser *p, const char *data, size_t n, size_t *n_used_out)
{
    bool was_in_head = !p->has_begun || !p->is_head_done;
    *n_used_out = 0;
    if (p->status != 0) return TD_HTTP_PARSE_BAD;
    if (p->is_paused) {
        llhttp_resume(&p->ll);
        p->is_paused = false;
    }
    llhttp_errno_t e = llhttp_execute(&p->ll, data, n);
    size_t n_used = e == HPE_OK ? n : (size_t)(llhttp_get_error_pos(&p->ll) - data);
    TD_CHECK(n_used <= n);
    check_raw_sizes(p, was_in_head, n_used);
    if (e != HPE_OK && e != HPE_PAUSED) refuse(p, 400, "this is not an HTTP request");
    if (p->status != 0) return TD_HTTP_PARSE_BAD;
    *n_used_out = n_used;
    if (e == HPE_OK) return TD_HTTP_PARSE_MORE;
    p->is_paused = true;
    return p->has_begun ? TD_HTTP_PARSE_HEAD : TD_HTTP_PARSE_DONE;
}
