#include "tests/support/rpc_pair.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/inference.pb-c.h"

#define PATIENCE_MS 30000u

/* --- turning the loop -------------------------------------------------------------------------------------- */
static void on_guard(struct td_timer *t) { TD_CONTAINER_OF(t, struct rpc_pair_guard, timer)->is_over = true; }

static void guard_for(struct rpc_pair *p, struct rpc_pair_guard *g, const char *what, uint64_t ms)
{
    *g = (struct rpc_pair_guard){.pair = p, .what = what, .timer.fire = on_guard};
    td_loop_env(p->loop)->timer_start(td_loop_env(p->loop), &g->timer, ms * TD_NS_PER_MS);
}

void rpc_pair_guard_start(struct rpc_pair *p, struct rpc_pair_guard *g, const char *what)
{
    guard_for(p, g, what, PATIENCE_MS);
}

void rpc_pair_guard_turn(struct rpc_pair_guard *g)
{
    td_loop_run_once(g->pair->loop, true);
    if (g->is_over) fail_msg("waited %u ms for: %s", PATIENCE_MS, g->what);
}

void rpc_pair_guard_stop(struct rpc_pair_guard *g)
{
    td_loop_env(g->pair->loop)->timer_stop(td_loop_env(g->pair->loop), &g->timer);
}

void rpc_pair_for_ms(struct rpc_pair *p, uint64_t ms)
{
    struct rpc_pair_guard g;
    guard_for(p, &g, "", ms);
    while (!g.is_over) td_loop_run_once(p->loop, true);
}

uint64_t rpc_pair_in_ms(uint64_t ms) { return td_clock_ns() + ms * TD_NS_PER_MS; }

/* --- messages ---------------------------------------------------------------------------------------------- */
enum td_status rpc_pair_send(struct td_rpc_call *c, uint32_t number, const char *model, size_t n_filler_ids)
{
    Tandem__V1__DetokenizeRequest m = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    m.model = (char *)(uintptr_t)model;
    m.n_token_ids = n_filler_ids + 1;
    m.token_ids = calloc(m.n_token_ids, sizeof *m.token_ids);
    assert_non_null(m.token_ids);
    m.token_ids[0] = number;
    enum td_status st = td_rpc_send(c, &m.base);
    free(m.token_ids);
    return st;
}

static void record(struct rpc_end *e, const ProtobufCMessage *msg)
{
    const Tandem__V1__DetokenizeRequest *m = (const void *)msg;
    uint32_t number = m->n_token_ids > 0 ? m->token_ids[0] : 0;
    if (e->n_messages > 0 && number != e->last_number + 1) e->is_out_of_order = true;
    e->n_messages++;
    e->last_number = number;
    snprintf(e->last_model, sizeof e->last_model, "%s", m->model);
}

static void record_closed(struct rpc_end *e, enum td_status st, const char *text)
{
    e->n_closed++;
    e->call = NULL;
    e->st = st;
    snprintf(e->text, sizeof e->text, "%s", text);
}

static void on_half_close(struct td_rpc_call *c)
{
    struct rpc_end *e = td_rpc_call_user(c);
    e->n_half_closes++;
    if (e->does_finish) td_rpc_finish(c, TD_OK, NULL);
}

static void on_writable(struct td_rpc_call *c) { ((struct rpc_end *)td_rpc_call_user(c))->n_writable++; }

/* --- the server's end -------------------------------------------------------------------------------------- */
static void on_request(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct rpc_end *e = td_rpc_call_user(c);
    record(e, msg);
    if (e->does_echo) assert_int_equal(td_rpc_send(c, msg), TD_OK);
}

static void on_only_request(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    on_request(c, msg);
    if (((struct rpc_end *)td_rpc_call_user(c))->does_finish) td_rpc_finish(c, TD_OK, NULL);
}

static void on_served_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct rpc_end *e = td_rpc_call_user(c);
    record_closed(e, st, text);
    e->pair->n_served_closed++;
}

static struct rpc_end *arrive(struct td_rpc_call *c, void *service)
{
    struct rpc_pair *p = service;
    assert_true(p->n_served < RPC_PAIR_MAX_SERVED);
    struct rpc_end *e = &p->served[p->n_served++];
    *e = (struct rpc_end){.pair = p, .call = c, .does_echo = p->next_echoes, .does_finish = p->next_finishes};
    return e;
}

static void open_unary(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_only_request, .on_closed = on_served_closed};
    td_rpc_call_accept(c, &h, arrive(c, service));
}

static void open_stream(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_request,
                                             .on_half_close = on_half_close,
                                             .on_writable = on_writable,
                                             .on_closed = on_served_closed};
    td_rpc_call_accept(c, &h, arrive(c, service));
}

static void open_refuse(struct td_rpc_call *c, void *service)
{
    (void)service;
    td_rpc_finish(c, TD_E_NO_PAGES, "no room");
}

#define MESSAGE &tandem__v1__detokenize_request__descriptor
static const struct td_rpc_method methods[] = {
    {RPC_PAIR_UNARY, MESSAGE, MESSAGE, RPC_PAIR_LIMIT, open_unary, false},
    {RPC_PAIR_STREAM, MESSAGE, MESSAGE, RPC_PAIR_LIMIT, open_stream, true},
    {RPC_PAIR_REFUSE, MESSAGE, MESSAGE, RPC_PAIR_LIMIT, open_refuse, false},
    {.path = NULL},
};

/* --- the client's end -------------------------------------------------------------------------------------- */
static void on_reply(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct rpc_end *e = td_rpc_call_user(c);
    record(e, msg);
    if (e->does_half_close_at_reply) td_rpc_half_close(c);
}

static void on_client_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    record_closed(td_rpc_call_user(c), st, text);
}

const struct td_rpc_handlers rpc_pair_client_handlers = {
    .on_message = on_reply, .on_writable = on_writable, .on_closed = on_client_closed};

void rpc_pair_call(struct rpc_pair *p, const char *path, uint64_t deadline_ns, bool wait_for_ready, struct rpc_end *e)
{
    *e = (struct rpc_end){.pair = p};
    assert_int_equal(td_rpc_call_start(p->channel, path, MESSAGE, deadline_ns, wait_for_ready, NULL,
                                       &rpc_pair_client_handlers, e, &e->call),
                     TD_OK);
}

/* --- life -------------------------------------------------------------------------------------------------- */
static const struct td_rpc_options options = {.max_queued_bytes = RPC_PAIR_MAX_QUEUED};

void rpc_pair_serve(struct rpc_pair *p)
{
    struct td_err err = {.text = ""};
    assert_int_equal(td_rpc_create(p->loop, &options, &p->server), TD_OK);
    enum td_status st = td_rpc_serve(p->server, p->address, methods, p, &err);
    if (st != TD_OK) fail_msg("%s", err.text);
    assert_int_not_equal(td_rpc_port(p->server), 0);
    snprintf(p->address, sizeof p->address, "127.0.0.1:%u", td_rpc_port(p->server));
}

void rpc_pair_open(struct rpc_pair *p)
{
    memset(p, 0, sizeof *p);
    assert_int_equal(td_loop_create(&p->loop), TD_OK);
    snprintf(p->address, sizeof p->address, "127.0.0.1:0");
    rpc_pair_serve(p);
    assert_int_equal(td_rpc_create(p->loop, &options, &p->client), TD_OK);
    assert_int_equal(td_rpc_channel_open(p->client, p->address, &p->channel), TD_OK);
}

static void on_shut(void *user) { ((struct rpc_pair *)user)->is_shut = true; }

void rpc_pair_destroy_server(struct rpc_pair *p)
{
    if (p->server == NULL) return;
    if (!p->is_shut) {
        td_rpc_shutdown(p->server, 0, on_shut, p);
        RPC_PAIR_UNTIL(p, p->is_shut);
    }
    td_rpc_destroy(p->server);
    p->server = NULL;
    p->is_shut = false;
}

void rpc_pair_close(struct rpc_pair *p)
{
    td_rpc_channel_close(p->channel);
    td_rpc_destroy(p->client);
    rpc_pair_destroy_server(p);
    td_loop_destroy(p->loop);
}
