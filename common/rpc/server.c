/* The listening end. RPC_N_SLOTS requests for a call lie with core; each that comes back becomes a td_rpc_call and goes
 * out again. Shutdown: the port closes, running calls go on, after the grace period they are cancelled, then
 * shutdown_tag comes back and every slot with ok false. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "common/rpc/rpc_int.h"

#define MIN_PING_MS        100  /* more often than any client of ours pings */
#define MAX_STREAMS        8192 /* per connection */
#define MAX_METADATA_BYTES (16 << 10)
#define HANDSHAKE_MS       20000
#define OVER_LIMIT_BYTES                                                                                               \
    (64u << 10) /* a message up to this much too large is refused with our text, else with core's */

/* --- arrivals ---------------------------------------------------------------------------------------------- */
static void request_call(struct td_rpc *r, struct rpc_slot *s)
{
    s->call = NULL;
    grpc_call_details_init(&s->details);
    grpc_metadata_array_init(&s->metadata);
    rpc_tag_begin(&s->tag);
    grpc_call_error e = grpc_server_request_call(r->server, &s->call, &s->details, &s->metadata, r->cq, r->cq, &s->tag);
    TD_CHECK(e == GRPC_CALL_OK);
}

static bool slice_is(grpc_slice s, const char *text)
{
    size_t n = strlen(text);
    return GRPC_SLICE_LENGTH(s) == n && memcmp(GRPC_SLICE_START_PTR(s), text, n) == 0;
}

static const struct td_rpc_method *find_method(const struct td_rpc_method *m, grpc_slice path)
{
    for (; m->path != NULL; m++)
        if (slice_is(path, m->path)) return m;
    return NULL;
}

static void open_call(struct td_rpc *r, struct rpc_slot *s)
{
    td_metric_add(TD_M_rpc_calls, 1);
    struct td_rpc_call *c = rpc_call_create(r, s->call);
    if (c == NULL) {
        td_metric_add(TD_M_rpc_errors, 1);
        return;
    }
    c->is_server = true;
    r->n_server_calls++;
    td_metric_add(TD_M_rpc_calls_open, 1);
    grpc_metadata_array_destroy(&c->metadata);
    c->metadata = s->metadata;
    grpc_metadata_array_init(&s->metadata);
    c->deadline_ns = rpc_until_ns(s->details.deadline);
    c->timeout_ns = c->deadline_ns == TD_NEVER_NS ? TD_NEVER_NS : c->deadline_ns - td_clock_ns();
    if (c->timeout_ns > c->deadline_ns) c->timeout_ns = 0; /* passed already */

    void *service = r->service;
    c->method = find_method(r->methods, s->details.method);
    if (c->method == NULL) {
        service = r;
        c->is_builtin = true;
        c->method = find_method(rpc_builtin_methods, s->details.method);
    }
    rpc_call_begin_server(c);
    if (c->method == NULL) {
        char path[128], text[192];
        snprintf(path, sizeof path, "%.*s", (int)(GRPC_SLICE_LENGTH(s->details.method) & 0xFFFF),
                 (const char *)GRPC_SLICE_START_PTR(s->details.method));
        snprintf(text, sizeof text, "unknown method %s", path);
        td_rpc_finish(c, TD_E_UNIMPLEMENTED, text);
        return;
    }
    c->incoming = c->method->request;
    c->max_incoming_bytes = c->method->max_request_bytes;
    c->method->on_open(c, service);
    TD_CHECK(c->h.on_closed != NULL || c->wants_end || c->is_cut);
}

static void on_arrival(struct rpc_tag *t, bool ok)
{
    struct rpc_slot *s = TD_CONTAINER_OF(t, struct rpc_slot, tag);
    struct td_rpc *r = t->rpc;
    if (ok) open_call(r, s);
    grpc_call_details_destroy(&s->details);
    grpc_metadata_array_destroy(&s->metadata);
    if (ok && r->server_state == RPC_SERVING) request_call(r, s);
}

/* --- start ------------------------------------------------------------------------------------------------- */
/* Core only says that it failed. Tries the same by hand to learn why. */
static void explain_listen(const char *address, struct td_err *err)
{
    char host[256];
    const char *colon = strrchr(address, ':');
    if (colon == NULL || (size_t)(colon - address) >= sizeof host) {
        td_err_set(err, TD_E_BAD_CONFIG, "cannot listen on %s: not of the form host:port", address);
        return;
    }
    size_t n = (size_t)(colon - address);
    memcpy(host, address, n);
    host[n] = 0;
    char *h = host;
    if (h[0] == '[' && n > 1 && h[n - 1] == ']') {
        h[n - 1] = 0;
        h++;
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    int e = getaddrinfo(h[0] != 0 ? h : NULL, colon + 1, &hints, &list);
    const char *why = e != 0 ? gai_strerror(e) : "no usable address";
    for (struct addrinfo *a = list; a != NULL; a = a->ai_next) {
        int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0), on = 1;
        if (fd < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 1) != 0) why = strerror(errno);
        close(fd);
    }
    if (list != NULL) freeaddrinfo(list);
    td_err_set(err, TD_E_BAD_CONFIG, "cannot listen on %s: %s", address, why);
}

static uint32_t largest_request(const struct td_rpc_method *m)
{
    uint32_t n = 0;
    for (; m->path != NULL; m++)
        if (m->max_request_bytes > n) n = m->max_request_bytes;
    return n;
}

enum td_status td_rpc_serve(struct td_rpc *r, const char *address, const struct td_rpc_method *methods, void *service,
                            struct td_err *err)
{
    TD_CHECK(r->server == NULL && r->server_state == RPC_NO_SERVER);
    const char *colon = strrchr(address, ':');
    char *port_end = NULL;
    unsigned long port = colon != NULL ? strtoul(colon + 1, &port_end, 10) : 0;
    if (colon == NULL || colon == address || port_end == colon + 1 || *port_end != 0 || port > 65535)
        return td_err_set(err, TD_E_BAD_CONFIG, "cannot listen on %s: not of the form host:port", address);
    r->slots = td_calloc(RPC_N_SLOTS, sizeof *r->slots);
    if (r->slots == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory to listen on %s", address);
    uint32_t max_bytes = largest_request(methods), builtin = largest_request(rpc_builtin_methods);
    if (max_bytes < builtin) max_bytes = builtin;
    grpc_arg args[] = {
        RPC_INT_ARG(GRPC_ARG_ALLOW_REUSEPORT, 0), /* else two daemons silently share a port */
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, r->opt.keepalive_ms),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, r->opt.keepalive_timeout_ms),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        RPC_INT_ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, MIN_PING_MS),
        RPC_INT_ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        RPC_INT_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, max_bytes + OVER_LIMIT_BYTES),
        RPC_INT_ARG(GRPC_ARG_MAX_CONCURRENT_STREAMS, MAX_STREAMS),
        RPC_INT_ARG(GRPC_ARG_MAX_METADATA_SIZE, MAX_METADATA_BYTES),
        RPC_INT_ARG(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_MS),
        RPC_INT_ARG(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0), /* core would unpack a bomb: inflate.c does it */
    };
    grpc_channel_args list = {TD_COUNT(args), args};
    r->server = grpc_server_create(&list, NULL);
    grpc_server_register_completion_queue(r->server, r->cq, NULL);
    grpc_server_credentials *creds = grpc_insecure_server_credentials_create();
    int bound = grpc_server_add_http2_port(r->server, address, creds);
    grpc_server_credentials_release(creds);
    r->methods = methods;
    r->service = service;
    if (bound == 0) {
        explain_listen(address, err);
        return TD_E_BAD_CONFIG; /* the server that never started goes with r */
    }
    r->port = (uint16_t)bound;
    rpc_accept_prepare();
    grpc_server_start(r->server);
    r->server_state = RPC_SERVING;
    for (uint32_t i = 0; i < RPC_N_SLOTS; i++) {
        r->slots[i].tag = (struct rpc_tag){.done = on_arrival, .rpc = r};
        request_call(r, &r->slots[i]);
    }
    TD_INFO("rpc_listening", "address=%s port=%u", address, r->port);
    return TD_OK;
}

uint16_t td_rpc_port(const struct td_rpc *r) { return r->port; }

/* --- shutdown ---------------------------------------------------------------------------------------------- */
static void tell_shutdown(struct td_rpc *r)
{
    void (*done)(void *) = r->shutdown_done;
    r->shutdown_done = NULL;
    if (done != NULL) done(r->shutdown_user);
}

static void on_shutdown_mail(struct td_mail *m)
{
    struct td_rpc *r = TD_CONTAINER_OF(m, struct td_rpc, shutdown_mail);
    r->is_shutdown_mail_posted = false;
    tell_shutdown(r);
}

/* Core is done with the server, and our last call object is gone too. */
static void check_shut(struct td_rpc *r)
{
    if (r->server_state != RPC_SHUT || r->n_server_calls > 0) return;
    td_loop_env(r->loop)->timer_stop(td_loop_env(r->loop), &r->grace);
    tell_shutdown(r);
}

void rpc_server_call_gone(struct td_rpc *r)
{
    r->n_server_calls--;
    td_metric_add(TD_M_rpc_calls_open, (uint64_t)-1);
    check_shut(r);
}

static void on_shut(struct rpc_tag *t, bool ok)
{
    (void)ok;
    t->rpc->server_state = RPC_SHUT;
    check_shut(t->rpc);
}

static void on_grace_over(struct td_timer *t)
{
    struct td_rpc *r = TD_CONTAINER_OF(t, struct td_rpc, grace);
    TD_WARN("rpc_grace_over", "calls=%u", r->n_server_calls);
    grpc_server_cancel_all_calls(r->server);
}

/* Nobody waits for a watch of health: it would last as long as its client likes. */
static void end_builtin_calls(struct td_rpc *r)
{
    TD_LIST_FOREACH (it, &r->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->is_builtin) td_rpc_finish(c, TD_E_DRAINING, NULL);
    }
}

static void begin_shutdown(struct td_rpc *r)
{
    td_rpc_set_serving(r, false);
    end_builtin_calls(r);
    r->server_state = RPC_SHUTTING_DOWN;
    r->shutdown_tag = (struct rpc_tag){.done = on_shut, .rpc = r};
    rpc_tag_begin(&r->shutdown_tag);
    grpc_server_shutdown_and_notify(r->server, r->cq, &r->shutdown_tag);
}

static void start_grace(struct td_rpc *r, uint32_t grace_ms)
{
    struct td_env *env = td_loop_env(r->loop);
    uint64_t now = env->now_ns(env), due = now + (uint64_t)grace_ms * TD_NS_PER_MS;
    if (r->grace.is_armed && r->grace.due_ns < due) return;
    r->grace.fire = on_grace_over;
    env->timer_start(env, &r->grace, due - now);
}

void td_rpc_shutdown(struct td_rpc *r, uint32_t grace_ms, void (*done)(void *user), void *user)
{
    if (r->shutdown_done != NULL || r->server_state == RPC_SHUTTING_DOWN || r->is_shutdown_mail_posted) {
        /* Again, e.g. a second SIGTERM: at most makes it faster. */
        if (r->server_state == RPC_SHUTTING_DOWN && r->grace.is_armed) start_grace(r, grace_ms);
        return;
    }
    r->shutdown_done = done;
    r->shutdown_user = user;
    if (r->server_state != RPC_SERVING) { /* nothing runs: but done never runs inside this call */
        r->shutdown_mail.deliver = on_shutdown_mail;
        r->is_shutdown_mail_posted = true;
        td_loop_post(r->loop, &r->shutdown_mail);
        return;
    }
    begin_shutdown(r);
    start_grace(r, grace_ms);
}

void rpc_server_stop(struct td_rpc *r)
{
    if (r->server != NULL) {
        r->shutdown_done = NULL;
        td_loop_env(r->loop)->timer_stop(td_loop_env(r->loop), &r->grace);
        if (r->server_state == RPC_NO_SERVER || r->server_state == RPC_SERVING) begin_shutdown(r);
        if (r->server_state != RPC_SHUT) grpc_server_cancel_all_calls(r->server);
        rpc_drain_until_idle(r);
        grpc_server_destroy(r->server);
        r->server = NULL;
    }
    free(r->slots);
    r->slots = NULL;
}
