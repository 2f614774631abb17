/* HTTP/1.1 server on the loop, for the router's JSON API and every daemon's admin pages. Routes are rows; a handler may
 * answer at once, later, or piece by piece (server-sent events). One thread: the loop's.
 *
 * A request object belongs to its handler until exactly one of these ends it: td_http_respond, td_http_error,
 * td_http_end, or the on_gone callback, after which it is freed. A handler that does not answer before it returns must
 * have set on_gone.
 *
 * What the server takes care of: keep-alive, pipelining (one request at a time, the rest waits), HEAD, OPTIONS and
 * cross-origin requests, chunked bodies both ways, Expect: 100-continue, limits (400 408 413 414 417 431 503 505), 404
 * and 405, slow and vanished clients, draining. */
#ifndef TD_HTTP_HTTP_H
#define TD_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/loop/loop.h"

struct td_http;
struct td_http_req;

struct td_http_route {
    const char *method; /* "GET" answers HEAD too */
    const char *path;   /* "/v1/models"; with "*" at its end everything below: "/v1/models/" and a star */
    void (*handle)(struct td_http_req *r, void *user);
    void *user;
};

struct td_http_options {        /* 0: the value in brackets */
    uint32_t max_connections;   /* [4096] more are answered 503 */
    uint32_t max_header_bytes;  /* [16384] request line and headers */
    uint32_t max_body_bytes;    /* [8 MiB] */
    uint32_t max_backlog_bytes; /* [256 KiB] unsent bytes of a streamed response before its client is dropped */
    uint32_t header_timeout_ms; /* [10000] first byte of a request (or connection) to the end of its headers */
    uint32_t body_timeout_ms;   /* [60000] end of headers to end of body */
    uint32_t idle_timeout_ms;   /* [75000] between requests of a connection */
    uint32_t stall_timeout_ms;  /* [30000] a client that takes none of what is unsent for this long is dropped */
    uint32_t sndbuf_bytes;      /* [65536] kernel's send buffer; without it a slow client hides behind megabytes */
    const char *cors_origin;    /* [none] whose pages may read answers of public routes: an origin, or "*" */
};

/* --- the server ----------------------------------------------------------------------------------------------------
 */
enum td_status td_http_create(struct td_loop *l, const struct td_http_options *o,
                              struct td_http **out); /* o may be NULL */
/* Rows are copied, their strings are not. The first that matches is taken. Before td_http_listen. */
enum td_status td_http_add_routes(struct td_http *h, const struct td_http_route *rows, unsigned n);
/* The same for paths that pages from cors_origin may use. */
enum td_status td_http_add_public_routes(struct td_http *h, const struct td_http_route *rows, unsigned n);
enum td_status td_http_listen(struct td_http *h, const char *address, struct td_err *err); /* once; "host:port" */
const char *td_http_address(const struct td_http *h); /* as bound; "" before td_http_listen */
/* Stops listening, lets running requests end for at most grace_ms (then on_gone with DRAINING), calls done when the
 * last connection is closed; never from within. Call once. */
void td_http_shutdown(struct td_http *h, uint32_t grace_ms, void (*done)(void *user), void *user);
/* At any time, before the loop's destruction. Drops every connection; requests still open get on_gone(CANCELED) from
 * here. */
void td_http_destroy(struct td_http *h);
uint32_t td_http_n_connections(const struct td_http *h);

/* --- a request -----------------------------------------------------------------------------------------------------
 */
/* Strings live as long as r. */
const char *td_http_method(const struct td_http_req *r);
const char *td_http_path(const struct td_http_req *r);      /* percent-decoded, without query */
const char *td_http_path_rest(const struct td_http_req *r); /* what the star matched; "" for a path without star */
const char *td_http_query(const struct td_http_req *r, const char *name);  /* decoded; NULL: absent */
const char *td_http_header(const struct td_http_req *r, const char *name); /* any case; first one; NULL: absent */
const char *td_http_body(const struct td_http_req *r, size_t *n_out);      /* NUL-terminated, "" when empty */
/* Moves the body to *out, which must be empty; NUL-terminated. td_http_body finds nothing afterwards. */
void td_http_take_body(struct td_http_req *r, struct td_buf *out);
const char *td_http_peer(const struct td_http_req *r);
struct td_loop *td_http_loop(const struct td_http_req *r);

struct td_http_handlers {
    /* The client hung up (PEER_LOST), read too slowly (SLOW_CLIENT), the server drains (DRAINING) or is destroyed
     * (CANCELED). Nothing may be called on r any more but td_http_user. Never from within a call on r. */
    void (*on_gone)(struct td_http_req *r, enum td_status why);
    void (*on_writable)(struct td_http_req *r); /* the backlog fell to zero after a write left some; may be NULL */
};
void td_http_set_handlers(struct td_http_req *r, const struct td_http_handlers *h, void *user); /* h outlives r */
void *td_http_user(const struct td_http_req *r);

/* --- its response --------------------------------------------------------------------------------------------------
 */
/* Before the response begins. INVALID: a name or value that does not fit on a header line. */
enum td_status td_http_set_header(struct td_http_req *r, const char *name, const char *value);
/* A whole response; ends r. body is copied as far as the client does not take it at once. type NULL: no body. */
void td_http_respond(struct td_http_req *r, unsigned status, const char *type, const void *body, size_t n);
/* {"error":{"message":..,"type":..,"param":..,"code":..}} as OpenAI's API has it; type follows from status, param and
 * code may be NULL. Ends r. */
void td_http_error(struct td_http_req *r, unsigned status, const char *param, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* The inside of that object, {"message":..}, for answers that carry it elsewhere. */
void td_http_put_error(struct td_buf *b, unsigned status, const char *param, const char *code, const char *message);

void td_http_begin(struct td_http_req *r, unsigned status, const char *type); /* headers of a streamed response */
/* A piece of it. OK: sent or queued. SLOW_CLIENT: the backlog is over its bound, the connection is dropped; CANCELED:
 * it was already. In both cases on_gone follows, unless r is ended first. */
enum td_status td_http_write(struct td_http_req *r, const void *p, size_t n);
void td_http_end(struct td_http_req *r);             /* ends r */
size_t td_http_backlog(const struct td_http_req *r); /* unsent bytes */

/* Server-sent events: begin with status 200 and the headers that keep proxies from buffering; then events, whose data
 * may hold line breaks; event NULL: unnamed. Results as td_http_write. */
void td_http_sse_begin(struct td_http_req *r);
enum td_status td_http_sse(struct td_http_req *r, const char *event, const char *data, size_t n);

/* The HTTP status that tells a client of st: 400, 404, 413, 429, 499, 500, 501, 503, 504. */
unsigned td_http_status_of(enum td_status st);

#endif
