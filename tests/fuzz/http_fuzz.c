/* The request parser without sockets: the input is a connection's bytes, cut into reads by its first byte. Whatever the
 * cut, the parser must say the same, stay within its limits, and keep every string within the request it hands out. */
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/http/parser_int.h"

#define MAX_HEADER_BYTES 1024u
#define MAX_BODY_BYTES   512u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Reads everything that a handler could ask for, and sums it up. */
static void check_message(const struct td_http_message *m, struct td_buf *log)
{
    TD_CHECK(m->method != NULL && m->path < m->text.n && m->query <= m->text.n);
    TD_CHECK(m->query == m->text.n || m->text.data[m->text.n - 1] == 0);
    TD_CHECK(m->n_headers <= TD_HTTP_MAX_HEADERS && m->body.n <= MAX_BODY_BYTES);
    TD_CHECK(m->body.data == NULL || m->body.data[m->body.n] == 0);
    td_buf_printf(log, "%s %s %u %d %d\n", m->method, (const char *)m->text.data + m->path, m->minor, m->is_keep_alive,
                  m->expects_continue);
    for (unsigned i = 0; i < m->n_headers; i++) {
        const char *name = (const char *)m->text.data + m->headers[i].name;
        TD_CHECK(td_http_is_token(name) && td_http_message_header(m, name) != NULL);
        td_buf_printf(log, "%s: %s\n", name, (const char *)m->text.data + m->headers[i].value);
    }
    const char *q = td_http_message_query(m, "q");
    td_buf_printf(log, "q=%s\n", q == NULL ? "" : q);
    td_buf_put(log, m->body.data, m->body.n);
}

static void parse_all(const uint8_t *data, size_t n, size_t step, struct td_buf *log)
{
    struct td_http_parser p;
    td_http_parser_init(&p, MAX_HEADER_BYTES, MAX_BODY_BYTES);
    enum td_http_parse what = TD_HTTP_PARSE_MORE;
    for (size_t at = 0; at < n && what != TD_HTTP_PARSE_BAD;) {
        size_t piece = step < n - at ? step : n - at, used;
        char *exact = malloc(piece); /* so that a read beyond is seen */
        memcpy(exact, data + at, piece);
        what = td_http_parser_feed(&p, exact, piece, &used);
        free(exact);
        TD_CHECK(used <= piece && (what == TD_HTTP_PARSE_MORE ? used == piece : true));
        at += used;
        if (what == TD_HTTP_PARSE_DONE) {
            check_message(&p.msg, log);
            bool goes_on = p.msg.is_keep_alive;
            td_http_message_free(&p.msg);
            if (!goes_on) break;
        } else if (what == TD_HTTP_PARSE_BAD) {
            TD_CHECK(p.status >= 400 && p.status < 600 && p.reason != NULL);
            td_buf_printf(log,
                          "refused\n"); /* 413 or 431 may come sooner in larger pieces: the number is not compared */
        }
    }
    td_http_parser_deinit(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 2) return 0;
    struct td_buf whole = {0}, cut = {0};
    parse_all(data + 1, n - 1, n, &whole);
    parse_all(data + 1, n - 1, data[0] % 61u + 1, &cut);
    TD_CHECK(whole.failed || cut.failed ||
             (whole.n == cut.n && (whole.n == 0 || memcmp(whole.data, cut.data, whole.n) == 0)));
    td_buf_free(&whole);
    td_buf_free(&cut);
    return 0;
}
