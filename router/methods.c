/* The router's gRPC methods: the table, the small ones whole, and the router's end of Fleet.Join. Generate and Chat are
 * in front.c. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "proto/fleet.pb-c.h"
#include "proto/inference.pb-c.h"
#include "router/chat.h"
#include "router/encode.h"
#include "router/router_int.h"

#define MAX_REQUEST_BYTES (4u << 20) /* the longest context as token ids or text, several times over */
#define MAX_JOIN_BYTES    (1u << 20) /* addresses and keys of eight ranks are a few KB */

/* --- Tokenize, Detokenize, ListModels -------------------------------------------------------------------- */

struct unary {
    struct td_router *router;
    struct td_rpc_call *call; /* NULL: closed */
    struct td_encode encode;
    bool is_working, is_detokenize;
};

static void free_unary_if_over(struct unary *u)
{
    if (u->call != NULL || u->is_working) return;
    td_encode_deinit(&u->encode);
    free(u);
}

static void on_unary_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct unary *u = td_rpc_call_user(c);
    (void)st;
    (void)text;
    u->call = NULL;
    free_unary_if_over(u);
}

static void reply(struct unary *u, const ProtobufCMessage *msg)
{
    enum td_status st = td_rpc_send(u->call, msg);
    td_rpc_finish(u->call, st, st == TD_OK ? NULL : td_status_text(st));
}

static void on_unary_done(struct td_encode *e)
{
    struct unary *u = TD_CONTAINER_OF(e, struct unary, encode);
    u->is_working = false;
    if (u->call != NULL && e->st != TD_OK) {
        td_rpc_finish(u->call, e->st, e->err.text);
    } else if (u->call != NULL && u->is_detokenize) {
        Tandem__V1__DetokenizeReply m = TANDEM__V1__DETOKENIZE_REPLY__INIT;
        m.text = (ProtobufCBinaryData){.data = e->lossy.data, .len = e->lossy.n};
        m.raw = (ProtobufCBinaryData){.data = e->raw.data, .len = e->raw.n};
        reply(u, &m.base);
    } else if (u->call != NULL) {
        Tandem__V1__TokenizeReply m = TANDEM__V1__TOKENIZE_REPLY__INIT;
        m.token_ids = e->ids.ids;
        m.n_token_ids = e->ids.n;
        reply(u, &m.base);
    }
    free_unary_if_over(u);
}

/* The model named must be the one served. */
static bool check_model(struct unary *u, const char *model)
{
    struct td_err err = {{0}};
    struct td_params_facts f = td_front_facts(u->router);
    enum td_status st = td_params_check_model(&f, model, &err);
    if (st != TD_OK) td_rpc_finish(u->call, st, err.text);
    return st == TD_OK;
}

static void on_tokenize(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct unary *u = td_rpc_call_user(c);
    const Tandem__V1__TokenizeRequest *m = (const Tandem__V1__TokenizeRequest *)msg;
    if (!check_model(u, m->model)) return;
    u->is_working = true;
    enum td_status st = td_encode_text(&u->encode, u->router->loop, u->router->tokenizer, m->text.data, m->text.len,
                                       m->parse_special ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY, on_unary_done);
    if (st == TD_OK) return;
    u->is_working = false;
    td_rpc_finish(c, st, NULL);
}

static void on_detokenize(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct unary *u = td_rpc_call_user(c);
    const Tandem__V1__DetokenizeRequest *m = (const Tandem__V1__DetokenizeRequest *)msg;
    if (!check_model(u, m->model)) return;
    u->is_working = u->is_detokenize = true;
    enum td_status st = td_encode_detokenize(&u->encode, u->router->loop, u->router->tokenizer, m, on_unary_done);
    if (st == TD_OK) return;
    u->is_working = false;
    td_rpc_finish(c, st, NULL);
}

static void on_list_models(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct unary *u = td_rpc_call_user(c);
    struct td_params_facts f = td_front_facts(u->router);
    (void)msg;
    Tandem__V1__Model model = TANDEM__V1__MODEL__INIT, *list[] = {&model};
    model.id = (char *)f.model;
    model.max_context_tokens = f.served_context;
    model.vocab_size = f.n_vocab;
    model.created = u->router->created_s;
    Tandem__V1__ListModelsReply m = TANDEM__V1__LIST_MODELS_REPLY__INIT;
    m.models = list;
    m.n_models = 1;
    reply(u, &m.base);
}

static void open_unary(struct td_rpc_call *c, struct td_router *ro, const struct td_rpc_handlers *h)
{
    struct unary *u = td_calloc(1, sizeof *u);
    if (u == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    u->router = ro;
    u->call = c;
    td_rpc_call_accept(c, h, u);
}

static void open_tokenize(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_tokenize, .on_closed = on_unary_closed};
    open_unary(c, service, &h);
}
static void open_detokenize(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_detokenize, .on_closed = on_unary_closed};
    open_unary(c, service, &h);
}
static void open_list_models(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_list_models, .on_closed = on_unary_closed};
    open_unary(c, service, &h);
}

/* --- Fleet.Join ------------------------------------------------------------------------------------------ */

struct join {
    struct td_router *router;
    struct td_rpc_call *call;
    struct td_worker *worker; /* NULL: has not said who it is, or has been replaced or lost */
    struct td_list link;
    bool is_over; /* we have ended the call */
};

static void end_join(struct join *j, enum td_status st, const char *text)
{
    if (j->is_over) return;
    j->is_over = true;
    td_rpc_finish(j->call, st, text);
}

static void on_identity(struct join *j, const Tandem__V1__Identity *id)
{
    struct td_router *ro = j->router;
    struct td_err err = {{0}};
    void *old = NULL;
    if (j->worker != NULL) {
        end_join(j, TD_E_INVALID, "identity: said already");
        return;
    }
    enum td_status st = td_fleet_join(&ro->fleet, id, j, &j->worker, &old, &err);
    if (st != TD_OK) {
        TD_WARN("worker_refused", "peer=%s status=%s text=\"%s\"", td_rpc_call_peer(j->call), td_status_name(st),
                err.text);
        end_join(j, st, err.text);
        return;
    }
    if (old != NULL) {
        struct join *o = old;
        o->worker = NULL;
        end_join(o, TD_E_STALE, "this worker has joined again");
    }
    Tandem__V1__JoinReply m = TANDEM__V1__JOIN_REPLY__INIT;
    m.router = ro->incarnation;
    m.heartbeat_ms = ro->cfg.heartbeat;
    td_rpc_send(j->call, &m.base); /* cannot be too much; if the call is ending, on_closed says so */
}

static void on_join_update(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct join *j = td_rpc_call_user(c);
    const Tandem__V1__JoinUpdate *m = (const Tandem__V1__JoinUpdate *)msg;
    if (j->is_over) return;
    if (m->update_case == TANDEM__V1__JOIN_UPDATE__UPDATE_IDENTITY)
        on_identity(j, m->identity);
    else if (m->update_case != TANDEM__V1__JOIN_UPDATE__UPDATE_LOAD &&
             m->update_case != TANDEM__V1__JOIN_UPDATE__UPDATE_PREFIXES)
        ; /* a newer worker may know more than we */
    else if (j->worker == NULL)
        end_join(j, TD_E_INVALID, "load: identity must come first");
    else if (m->update_case == TANDEM__V1__JOIN_UPDATE__UPDATE_LOAD)
        td_fleet_report(&j->router->fleet, j->worker, m->load);
    else
        td_fleet_prefixes(&j->router->fleet, j->worker, m->prefixes);
}

static void leave(struct join *j)
{
    struct td_worker *w = j->worker;
    j->worker = NULL;
    if (w != NULL && w->join == j) td_fleet_leave(&j->router->fleet, w);
}

static void on_join_half_close(struct td_rpc_call *c)
{
    struct join *j = td_rpc_call_user(c);
    leave(j);
    end_join(j, TD_OK, NULL);
}

static void on_join_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct join *j = td_rpc_call_user(c);
    (void)st;
    (void)text;
    leave(j);
    td_list_remove(&j->link);
    free(j);
}

static void open_join(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {
        .on_message = on_join_update, .on_half_close = on_join_half_close, .on_closed = on_join_closed};
    struct td_router *ro = service;
    struct join *j = ro->is_draining ? NULL : td_calloc(1, sizeof *j);
    if (j == NULL) {
        td_rpc_finish(c, ro->is_draining ? TD_E_DRAINING : TD_E_NO_MEMORY, NULL);
        return;
    }
    j->router = ro;
    j->call = c;
    td_list_push_back(&ro->joins, &j->link);
    td_rpc_call_accept(c, &h, j);
}

void td_router_end_joins(struct td_router *ro)
{
    TD_LIST_FOREACH (it, &ro->joins)
        end_join(TD_LIST_ENTRY(it, struct join, link), TD_E_DRAINING, "this router leaves");
}

/* --- what the fleet wants of us -------------------------------------------------------------------------- */

static void port_up(void *self, struct td_worker *w)
{
    struct td_router *ro = self;
    enum td_status st = td_link_open(&ro->link_options, w);
    if (st != TD_OK) TD_ERROR("worker_unreachable", "name=%s status=%s", w->identity->name, td_status_name(st));
}

static void drop_join(struct td_worker *w, const char *why)
{
    struct join *j = w->join;
    w->join = NULL;
    if (j == NULL) return;
    j->worker = NULL;
    if (j->is_over) return;
    j->is_over = true;
    td_rpc_abort(j->call, TD_E_UNAVAILABLE, why); /* it may be silent, and then reads nothing that is queued */
}

static void port_lost(void *self, struct td_worker *w, const char *why)
{
    (void)self;
    td_link_close(w, why);
    drop_join(w, why);
}

static void port_forget(void *self, struct td_worker *w)
{
    (void)self;
    td_link_close(w, "it has left");
    drop_join(w, "this router leaves");
}

static void port_changed(void *self)
{
    struct td_router *ro = self;
    td_admit_kick(&ro->admit);
    td_router_update_ready(ro);
}

void td_router_bind_fleet(struct td_router *ro)
{
    ro->fleet_ports = (struct td_fleet_ports){
        .env = ro->env,
        .self = ro,
        .up = port_up,
        .lost = port_lost,
        .forget = port_forget,
        .changed = port_changed,
    };
}

/* --- the table ------------------------------------------------------------------------------------------- */

#define METHOD(service, name, in, out, limit, open, stream)                                                            \
    {                                                                                                                  \
        .path = "/tandem.v1." service "/" name, .request = &tandem__v1__##in##__descriptor,                            \
        .reply = &tandem__v1__##out##__descriptor, .max_request_bytes = limit, .on_open = open, .takes_stream = stream \
    }

const struct td_rpc_method td_router_methods[] = {
    METHOD("Inference", "Generate", generate_request, generate_event, MAX_REQUEST_BYTES, td_front_open_generate, false),
    METHOD("Inference", "Chat", chat_request, chat_event, MAX_REQUEST_BYTES, td_chat_open, false),
    METHOD("Inference", "Tokenize", tokenize_request, tokenize_reply, MAX_REQUEST_BYTES, open_tokenize, false),
    METHOD("Inference", "Detokenize", detokenize_request, detokenize_reply, MAX_REQUEST_BYTES, open_detokenize, false),
    METHOD("Inference", "ListModels", list_models_request, list_models_reply, 1024, open_list_models, false),
    METHOD("Fleet", "Join", join_update, join_reply, MAX_JOIN_BYTES, open_join, true),
    {.path = NULL},
};
