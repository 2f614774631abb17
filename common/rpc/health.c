/* grpc.health.v1: Check answers once, Watch answers at once and on each change, until the client leaves or we shut
 * down. The empty name stands for the whole server; a service of the daemon's table has the same state. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/rpc/rpc_int.h"
#include "proto/health.pb-c.h"

struct health_watch {
    struct td_list link;
    struct td_rpc_call *call;
    bool is_known;  /* the service asked for */
    bool has_asked; /* its request has come */
    bool must_tell; /* a state could not be queued */
};

static bool is_known_service(const struct td_rpc *r, const char *name)
{
    if (name[0] == 0) return true;
    size_t n = strlen(name);
    const struct td_rpc_method *tables[] = {r->methods, rpc_builtin_methods};
    for (unsigned i = 0; i < TD_COUNT(tables); i++)
        for (const struct td_rpc_method *m = tables[i]; m->path != NULL; m++)
            if (strncmp(m->path + 1, name, n) == 0 && m->path[1 + n] == '/') return true;
    return false;
}

static enum td_status send_state(struct td_rpc_call *c, const struct td_rpc *r, bool is_known)
{
    Grpc__Health__V1__HealthCheckResponse m = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    m.status = !is_known       ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
               : r->is_serving ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                               : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
    return td_rpc_send(c, &m.base);
}

/* --- Check ------------------------------------------------------------------------------------------------- */
static void check_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    const struct td_rpc *r = td_rpc_call_user(c);
    const Grpc__Health__V1__HealthCheckRequest *q = (const void *)msg;
    if (!is_known_service(r, q->service)) {
        td_rpc_finish(c, TD_E_NOT_FOUND, "unknown service");
        return;
    }
    td_rpc_finish(c, send_state(c, r, true), NULL);
}

static void check_closed(struct td_rpc_call *c, enum td_status st, const char *text) { (void)c, (void)st, (void)text; }

void rpc_health_check_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = check_message, .on_closed = check_closed};
    td_rpc_call_accept(c, &h, service);
}

/* --- Watch ------------------------------------------------------------------------------------------------- */
static void watch_tell(struct health_watch *w, const struct td_rpc *r)
{
    w->must_tell = w->has_asked && send_state(w->call, r, w->is_known) == TD_E_BUSY;
}

static void watch_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct health_watch *w = td_rpc_call_user(c);
    w->is_known = is_known_service(c->rpc, ((const Grpc__Health__V1__HealthCheckRequest *)(const void *)msg)->service);
    w->has_asked = true;
    watch_tell(w, c->rpc);
}

static void watch_writable(struct td_rpc_call *c)
{
    struct health_watch *w = td_rpc_call_user(c);
    if (w->must_tell) watch_tell(w, c->rpc);
}

static void watch_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)st, (void)text;
    struct health_watch *w = td_rpc_call_user(c);
    td_list_remove(&w->link);
    free(w);
}

void rpc_health_watch_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {
        .on_message = watch_message, .on_writable = watch_writable, .on_closed = watch_closed};
    struct td_rpc *r = service;
    struct health_watch *w = r->server_state == RPC_SERVING ? td_calloc(1, sizeof *w) : NULL;
    if (w == NULL) {
        td_rpc_finish(c, r->server_state == RPC_SERVING ? TD_E_NO_MEMORY : TD_E_DRAINING, NULL);
        return;
    }
    w->call = c;
    td_list_push_back(&r->watchers, &w->link);
    td_rpc_call_accept(c, &h, w);
}

/* --- the daemon's word ------------------------------------------------------------------------------------- */
void rpc_health_changed(struct td_rpc *r)
{
    TD_LIST_FOREACH (it, &r->watchers) watch_tell(TD_LIST_ENTRY(it, struct health_watch, link), r);
}

void td_rpc_set_serving(struct td_rpc *r, bool is_serving)
{
    if (r->is_serving == is_serving) return;
    r->is_serving = is_serving;
    rpc_health_changed(r);
}
