/* A connection's life: OPEN -> (td_tcp_finish) FINISHING: unsent bytes, FIN, linger -> CLOSING -> freed.
 *                      OPEN or FINISHING -> (td_tcp_reset, an error) CLOSING -> freed.
 * At most one uv_write is in flight. It owns `sending`; what is written meanwhile collects in `unsent` and goes out as
 * one piece when it is done, so that many small writes to a slow peer cost few system calls. */
#include "common/loop/tcp.h"

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/loop/loop_int.h"

#define LISTEN_BACKLOG 511
#define RETRY_MS       50u /* after an accept for which there was no memory */
#define MAX_VECS       8u

struct td_tcp_listener {
    struct td_uv_owner owner;
    uv_tcp_t handle;
    struct td_loop *loop;
    void (*on_accept)(struct td_tcp_listener *s, struct td_tcp *c);
    void *user;
    struct td_timer retry;
    char address[80];
};

enum conn_state { CONN_OPEN, CONN_FINISHING, CONN_CLOSING };

struct td_tcp {
    struct td_uv_owner owner;
    uv_tcp_t handle;
    struct td_loop *loop;
    enum conn_state state;
    enum td_status why;
    const struct td_tcp_handlers *h; /* NULL: refused before it was accepted */
    void *user;
    bool saw_eof, is_sending, is_fin_sent;

    struct td_buf unsent, sending;
    uint64_t n_sent_bytes;
    uv_write_t write_req;
    uv_shutdown_t shutdown_req;
    struct td_timer linger;
    uint32_t linger_ms;

    char peer[80];
};

/* --- addresses -----------------------------------------------------------------------------------------------------
 */
static void print_address(const struct sockaddr *sa, char *out, size_t n)
{
    char host[64] = "?";
    if (sa->sa_family == AF_INET6) {
        const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)(const void *)sa;
        uv_ip6_name(a, host, sizeof host);
        snprintf(out, n, "[%s]:%u", host, ntohs(a->sin6_port));
    } else {
        const struct sockaddr_in *a = (const struct sockaddr_in *)(const void *)sa;
        uv_ip4_name(a, host, sizeof host);
        snprintf(out, n, "%s:%u", host, ntohs(a->sin_port));
    }
}

static enum td_status split_address(const char *address, char *host, size_t n, const char **port, struct td_err *err)
{
    const char *colon = strrchr(address, ':');
    char *end;
    unsigned long v = colon == NULL || colon[1] < '0' || colon[1] > '9' ? 65536 : strtoul(colon + 1, &end, 10);
    if (v > 65535 || *end != 0) return td_err_set(err, TD_E_INVALID, "\"%s\" is not host:port", address);
    size_t len = (size_t)(colon - address);
    if (len >= 2 && address[0] == '[' && colon[-1] == ']') {
        address++;
        len -= 2;
    }
    if (len >= n) return td_err_set(err, TD_E_INVALID, "\"%s\": the host name is too long", address);
    memcpy(host, address, len);
    host[len] = 0;
    *port = colon + 1;
    return TD_OK;
}

/* --- listening -----------------------------------------------------------------------------------------------------
 */
static void listener_closed(uv_handle_t *h) { free(h->data); }
static void listener_close(uv_handle_t *h)
{
    struct td_tcp_listener *s = h->data;
    struct td_env *env = td_loop_env(s->loop);
    env->timer_stop(env, &s->retry);
    uv_close(h, listener_closed);
}

static void tcp_close(uv_handle_t *h) { td_tcp_reset(h->data, TD_E_CANCELED); }

static void on_connection(uv_stream_t *server, int e)
{
    struct td_tcp_listener *s = server->data;
    if (e != 0) {
        TD_WARN("accept_failed", "address=%s error=\"%s\"", s->address, uv_strerror(e));
        return;
    }
    struct td_tcp *c = td_calloc(1, sizeof *c);
    if (c == NULL || uv_tcp_init(td_loop_uv(s->loop), &c->handle) != 0) {
        /* libuv holds the connection, and accepts no other, until it is taken. */
        TD_WARN("accept_failed", "address=%s error=\"out of memory\" retry_ms=%u", s->address, RETRY_MS);
        free(c);
        struct td_env *env = td_loop_env(s->loop);
        env->timer_start(env, &s->retry, RETRY_MS * TD_NS_PER_MS);
        return;
    }
    c->owner.close = tcp_close;
    c->handle.data = c;
    c->loop = s->loop;
    e = uv_accept(server, (uv_stream_t *)&c->handle);
    if (e != 0) {
        TD_WARN("accept_failed", "address=%s error=\"%s\"", s->address, uv_strerror(e));
        td_tcp_reset(c, td_status_from_uv(e));
        return;
    }
    struct sockaddr_storage sa;
    int n = sizeof sa;
    if (uv_tcp_getpeername(&c->handle, (struct sockaddr *)&sa, &n) == 0)
        print_address((struct sockaddr *)&sa, c->peer, sizeof c->peer);
    s->on_accept(s, c);
    TD_CHECK(c->h != NULL || c->state == CONN_CLOSING);
}

static void on_retry(struct td_timer *t)
{
    struct td_tcp_listener *s = TD_CONTAINER_OF(t, struct td_tcp_listener, retry);
    on_connection((uv_stream_t *)&s->handle, 0);
}

static int bind_and_listen(struct td_tcp_listener *s, const struct sockaddr *sa)
{
    int e = uv_tcp_bind(&s->handle, sa, 0);
    if (e == 0) e = uv_listen((uv_stream_t *)&s->handle, LISTEN_BACKLOG, on_connection);
    if (e != 0) return e;
    struct sockaddr_storage got;
    int n = sizeof got;
    e = uv_tcp_getsockname(&s->handle, (struct sockaddr *)&got, &n);
    if (e == 0) print_address((struct sockaddr *)&got, s->address, sizeof s->address);
    return e;
}

enum td_status td_tcp_listen(struct td_loop *l, const char *address,
                             void (*on_accept)(struct td_tcp_listener *s, struct td_tcp *c), void *user,
                             struct td_tcp_listener **out, struct td_err *err)
{
    char host[256];
    const char *port = NULL;
    enum td_status st = split_address(address, host, sizeof host, &port, err);
    if (st != TD_OK) return st;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *found = NULL;
    int e = getaddrinfo(host[0] == 0 ? NULL : host, port, &hints, &found); /* at start-up only: may wait for DNS */
    if (e != 0) return td_err_set(err, TD_E_IO, "cannot listen on %s: %s", address, gai_strerror(e));
    struct td_tcp_listener *s = td_calloc(1, sizeof *s);
    if (s == NULL || (e = uv_tcp_init(td_loop_uv(l), &s->handle)) != 0) {
        freeaddrinfo(found);
        free(s);
        return td_err_set(err, TD_E_NO_MEMORY, "cannot listen on %s: out of memory", address);
    }
    s->owner.close = listener_close;
    s->handle.data = s;
    s->loop = l;
    s->on_accept = on_accept;
    s->retry.fire = on_retry;
    s->user = user;
    e = bind_and_listen(s, found->ai_addr);
    freeaddrinfo(found);
    if (e != 0) {
        listener_close((uv_handle_t *)&s->handle);
        return td_err_set(err, TD_E_IO, "cannot listen on %s: %s", address, uv_strerror(e));
    }
    *out = s;
    return TD_OK;
}

void *td_tcp_listener_user(const struct td_tcp_listener *s) { return s->user; }
const char *td_tcp_listener_address(const struct td_tcp_listener *s) { return s->address; }
void td_tcp_unlisten(struct td_tcp_listener *s)
{
    if (s != NULL) listener_close((uv_handle_t *)&s->handle);
}

/* --- the end of a connection ---------------------------------------------------------------------------------------
 */
static void on_uv_closed(uv_handle_t *h)
{
    struct td_tcp *c = h->data;
    if (c->h != NULL) c->h->on_closed(c, c->why);
    td_buf_free(&c->unsent);
    td_buf_free(&c->sending);
    free(c);
}

static void close_now(struct td_tcp *c, enum td_status why, bool resets)
{
    if (c->state == CONN_CLOSING) return;
    c->state = CONN_CLOSING;
    c->why = why;
    struct td_env *env = td_loop_env(c->loop);
    env->timer_stop(env, &c->linger);
    /* A reset is refused once FIN was sent; then an ordinary close is what is left. */
    if (!resets || uv_tcp_close_reset(&c->handle, on_uv_closed) != 0) uv_close((uv_handle_t *)&c->handle, on_uv_closed);
}

void td_tcp_reset(struct td_tcp *c, enum td_status why) { close_now(c, why, true); }

static void linger_over(struct td_timer *t) { close_now(TD_CONTAINER_OF(t, struct td_tcp, linger), TD_OK, false); }

static void on_uv_shutdown(uv_shutdown_t *req, int e)
{
    struct td_tcp *c = req->handle->data;
    if (c->state == CONN_CLOSING) return; /* its closing cancelled the request */
    if (e != 0 || c->saw_eof) {
        close_now(c, e == 0 ? TD_OK : td_status_from_uv(e), false);
        return;
    }
    c->linger.fire = linger_over;
    struct td_env *env = td_loop_env(c->loop);
    env->timer_start(env, &c->linger, c->linger_ms * TD_NS_PER_MS);
}

static void send_fin(struct td_tcp *c)
{
    if (c->is_fin_sent) return;
    c->is_fin_sent = true;
    if (uv_shutdown(&c->shutdown_req, (uv_stream_t *)&c->handle, on_uv_shutdown) != 0)
        close_now(c, TD_E_PEER_LOST, false);
}

void td_tcp_finish(struct td_tcp *c, uint32_t linger_ms)
{
    if (c->state != CONN_OPEN) return;
    c->state = CONN_FINISHING;
    c->linger_ms = linger_ms;
    td_tcp_resume(c);
    if (!c->is_sending) send_fin(c);
}

/* --- writing -------------------------------------------------------------------------------------------------------
 */
static void flush_unsent(struct td_tcp *c);

static void on_uv_written(uv_write_t *req, int e)
{
    struct td_tcp *c = req->handle->data;
    c->is_sending = false;
    if (c->state == CONN_CLOSING) return;
    if (e != 0) {
        close_now(c, td_status_from_uv(e), false);
        return;
    }
    c->n_sent_bytes += c->sending.n;
    td_buf_clear(&c->sending);
    if (c->unsent.n > 0)
        flush_unsent(c);
    else if (c->state == CONN_FINISHING)
        send_fin(c);
    else
        c->h->on_drained(c);
}

static void flush_unsent(struct td_tcp *c)
{
    struct td_buf b = c->sending; /* swap, so that both keep their memory */
    c->sending = c->unsent;
    c->unsent = b;
    uv_buf_t v = uv_buf_init((char *)c->sending.data, (unsigned)c->sending.n);
    int e = uv_write(&c->write_req, (uv_stream_t *)&c->handle, &v, 1, on_uv_written);
    if (e != 0)
        close_now(c, td_status_from_uv(e), false);
    else
        c->is_sending = true;
}

/* How much the kernel took at once; negative: error. */
static ssize_t write_now(struct td_tcp *c, const struct td_tcp_vec *v, unsigned n_vecs)
{
    uv_buf_t b[MAX_VECS];
    unsigned n = 0;
    for (unsigned i = 0; i < n_vecs; i++)
        if (v[i].n > 0) b[n++] = uv_buf_init((char *)(uintptr_t)v[i].p, (unsigned)v[i].n);
    if (n == 0) return 0;
    int r = uv_try_write((uv_stream_t *)&c->handle, b, n);
    return r == UV_EAGAIN ? 0 : r;
}

void td_tcp_write(struct td_tcp *c, const struct td_tcp_vec *v, unsigned n_vecs)
{
    if (c->state != CONN_OPEN) return;
    TD_CHECK(n_vecs <= MAX_VECS);
    size_t skip = 0;
    if (!c->is_sending) {
        ssize_t r = write_now(c, v, n_vecs);
        if (r < 0) {
            close_now(c, td_status_from_uv((int)r), false);
            return;
        }
        skip = (size_t)r;
        c->n_sent_bytes += skip;
    }
    for (unsigned i = 0; i < n_vecs; i++) {
        size_t s = skip < v[i].n ? skip : v[i].n;
        skip -= s;
        td_buf_put(&c->unsent, (const char *)v[i].p + s, v[i].n - s);
    }
    if (c->unsent.failed)
        close_now(c, TD_E_NO_MEMORY, true);
    else if (!c->is_sending && c->unsent.n > 0)
        flush_unsent(c);
}

size_t td_tcp_unsent_bytes(const struct td_tcp *c)
{
    return c->unsent.n + (c->is_sending ? uv_stream_get_write_queue_size((const uv_stream_t *)&c->handle) : 0);
}

uint64_t td_tcp_sent_bytes(const struct td_tcp *c)
{
    size_t waiting = c->is_sending ? uv_stream_get_write_queue_size((const uv_stream_t *)&c->handle) : 0;
    return c->n_sent_bytes + (c->is_sending ? c->sending.n - waiting : 0);
}

/* --- reading -------------------------------------------------------------------------------------------------------
 */
static void alloc_read(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    (void)suggested;
    struct td_tcp *c = h->data;
    *out = uv_buf_init(td_loop_read_buf(c->loop), TD_LOOP_READ_BYTES); /* one for all: it is read on the spot */
}

static void on_uv_read(uv_stream_t *h, ssize_t n, const uv_buf_t *buf)
{
    struct td_tcp *c = h->data;
    if (n == 0 || c->state == CONN_CLOSING) return;
    if (n == UV_EOF) {
        uv_read_stop(h);
        c->saw_eof = true;
        if (c->state == CONN_OPEN)
            c->h->on_eof(c);
        else if (c->linger.is_armed)
            close_now(c, TD_OK, false); /* else FIN is still to go out: on_uv_shutdown closes */
    } else if (n < 0) {
        close_now(c, td_status_from_uv((int)n), false);
    } else if (c->state == CONN_OPEN) {
        c->h->on_read(c, (const uint8_t *)buf->base, (size_t)n);
    }
}

void td_tcp_resume(struct td_tcp *c)
{
    if (c->state == CONN_CLOSING || c->saw_eof) return;
    int e = uv_read_start((uv_stream_t *)&c->handle, alloc_read, on_uv_read);
    if (e != 0 && e != UV_EALREADY) close_now(c, td_status_from_uv(e), false);
}

void td_tcp_pause(struct td_tcp *c)
{
    if (c->state == CONN_OPEN) uv_read_stop((uv_stream_t *)&c->handle);
}

void td_tcp_accept(struct td_tcp *c, const struct td_tcp_handlers *h, void *user, int sndbuf_bytes)
{
    c->h = h;
    c->user = user;
    uv_tcp_nodelay(&c->handle, 1);
    if (sndbuf_bytes > 0) uv_send_buffer_size((uv_handle_t *)&c->handle, &sndbuf_bytes);
    td_tcp_resume(c);
}

void *td_tcp_user(const struct td_tcp *c) { return c->user; }
const char *td_tcp_peer(const struct td_tcp *c) { return c->peer; }
