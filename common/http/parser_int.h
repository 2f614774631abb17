/* llhttp as a pull parser: bytes in, a request out. Knows limits, but no sockets, routes or timers. */
#ifndef TD_HTTP_PARSER_INT_H
#define TD_HTTP_PARSER_INT_H

#include <llhttp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/bytes.h"

#define TD_HTTP_MAX_HEADERS 100u

struct td_http_message {
    const char *method;
    struct td_buf
        text; /* the strings below, each NUL-terminated; the fields are offsets, as text moves while it grows */
    size_t path, query; /* query: decoded name, value, name, value ...; ends with text */
    struct {
        size_t name, value;
    } headers[TD_HTTP_MAX_HEADERS];
    unsigned n_headers;
    struct td_buf body;
    unsigned minor; /* HTTP/1.minor */
    bool is_keep_alive, expects_continue, has_body;
};
bool td_http_is_token(const char *s); /* fit for a header's name */
void td_http_message_free(struct td_http_message *m);
const char *td_http_message_header(const struct td_http_message *m, const char *name); /* NULL: absent */
const char *td_http_message_query(const struct td_http_message *m, const char *name);

enum td_http_parse {
    TD_HTTP_PARSE_MORE, /* all bytes used, the request is not complete */
    TD_HTTP_PARSE_HEAD, /* headers are complete, a body follows; feed on */
    TD_HTTP_PARSE_DONE, /* msg is complete: take it (copy and zero it) before feeding on */
    TD_HTTP_PARSE_BAD   /* answer with status and reason, then close; feed no more */
};

struct td_http_parser {
    llhttp_t ll;
    struct td_http_message msg;
    size_t max_header_bytes, max_body_bytes;
    size_t n_head_bytes, n_body_raw_bytes;
    size_t name_at; /* of the header being read */
    bool has_begun, is_head_done, is_paused;
    unsigned status; /* of a bad request */
    const char *reason;
};
void td_http_parser_init(struct td_http_parser *p, size_t max_header_bytes, size_t max_body_bytes);
void td_http_parser_deinit(struct td_http_parser *p);
enum td_http_parse td_http_parser_feed(struct td_http_parser *p, const char *data, size_t n, size_t *n_used_out);

#endif
