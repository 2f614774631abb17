/* Connections and requests as server.c and response.c share them. */
#ifndef TD_HTTP_SERVER_INT_H
#define TD_HTTP_SERVER_INT_H

#include "common/base/list.h"
#include "common/http/http.h"
#include "common/http/parser_int.h"
#include "common/loop/tcp.h"

#define TD_HTTP_REQ_MAGIC 0x48545251u

struct td_http_row {
    struct td_http_route route;
    bool is_public;
};

struct td_http {
    struct td_loop *loop;
    struct td_env *env;
    struct td_http_options o;
    struct td_http_row *rows;
    unsigned n_rows;
    struct td_tcp_listener *listener;
    struct td_list conns;
    uint32_t n_conns;
    bool is_draining;
    struct td_timer grace, all_closed;
    void (*drained)(void *user);
    void *drained_user;
    uint64_t date_s; /* the second that date is of */
    char date[40];
    struct td_buf scratch; /* one event or header block at a time */
};

/* What a connection's one timer waits for. */
enum td_http_wait { WAIT_NOTHING, WAIT_IDLE, WAIT_HEAD, WAIT_BODY, WAIT_STALL };

struct td_http_conn {
    struct td_http *http; /* NULL: the server was destroyed, only the socket is left to close */
    struct td_tcp *tcp;
    struct td_list link; /* http->conns */
    struct td_http_parser parser;
    struct td_buf input; /* read, not yet parsed: the next requests of a pipelining client */
    size_t input_at;
    struct td_http_req *req; /* being answered */
    bool is_advancing;       /* conn_advance is on the stack: it goes on by itself when req ends */
    bool is_reading;         /* false: input is full */
    bool is_ending;          /* td_tcp_finish or td_tcp_reset was called */
    enum td_status drop_why; /* of the reset; OK: none */
    enum td_http_wait wait;
    uint32_t n_requests, wait_of_request; /* a new request starts its waits anew */
    uint64_t stall_mark;                  /* td_tcp_sent_bytes when WAIT_STALL began */
    struct td_timer timer, resume;
};

struct td_http_req {
    uint32_t magic;
    struct td_http_conn *conn;
    struct td_http_message msg;
    const char *rest;
    const struct td_http_handlers *h;
    void *user;
    struct td_buf headers; /* extra lines */
    bool is_public, is_head, is_keep_alive, has_begun, is_chunked, has_no_body, owes_writable;
};

/* server.c, for response.c: the response is complete, r and what it holds is freed; the connection goes on or closes.
 */
void td_http_conn_req_ended(struct td_http_conn *c, struct td_http_req *r);
/* Drops the connection; on_gone(why) and on_closed follow. */
void td_http_conn_drop(struct td_http_conn *c, enum td_status why);
void td_http_conn_update_timer(struct td_http_conn *c);
void td_http_req_free(struct td_http_req *r);

#endif
