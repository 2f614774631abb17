/* One client's call of Chat. The order is carried out by a run; this file is the call: messages in and out, a client
 * that leaves, one that reads too slowly (its run ends, nobody else notices), one that does not take the end of its
 * answer (the call is dropped after a minute). */
#include "router/chat.h"

#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/rpc/rpc.h"
#include "router/router_int.h"
#include "router/run.h"

#define CHAT_MAGIC 0x63686174u /* "chat" */
#define LINGER_NS  (60 * TD_NS_PER_S)

struct chat {
    uint32_t magic;
    struct td_router *router;
    struct td_rpc_call *call;
    struct td_run *run; /* NULL: none yet, or over */
    struct td_chat_writer *writers;
    uint32_t n_choices, n_ended;
    bool has_order;
    struct td_timer linger; /* from the end of the run to that of the call */
};

static struct chat *chat_of(void *user)
{
    struct chat *k = user;
    TD_MAGIC_CHECK(k, CHAT_MAGIC);
    return k;
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static void on_linger(struct td_timer *t)
{
    struct chat *k = TD_CONTAINER_OF(t, struct chat, linger);
    TD_WARN("client_does_not_read", "peer=%s unsent_bytes=%llu", td_rpc_call_peer(k->call),
            (unsigned long long)td_rpc_queued_bytes(k->call));
    td_rpc_abort(k->call, TD_E_SLOW_CLIENT, td_status_text(TD_E_SLOW_CLIENT));
}

static void finish(struct chat *k, enum td_status st, const char *text)
{
    k->run = NULL;
    if (st == TD_E_SLOW_CLIENT)
        td_rpc_abort(k->call, st, text); /* it would not read what is queued either */
    else
        td_rpc_finish(k->call, st, st == TD_OK ? NULL : text);
    k->router->env->timer_start(k->router->env, &k->linger, LINGER_NS);
}

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct chat *k = chat_of(td_rpc_call_user(c));
    (void)st;
    (void)text;
    k->router->env->timer_stop(k->router->env, &k->linger);
    if (k->run != NULL) td_run_cancel(k->run);
    free(k->writers);
    k->magic = 0;
    free(k);
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

static enum td_status send_event(void *user, const ProtobufCMessage *event)
{
    struct chat *k = chat_of(user);
    enum td_status st = td_rpc_send(k->call, event);
    if (st == TD_E_BUSY) return TD_E_SLOW_CLIENT;
    if (st != TD_OK) return st;
    return td_rpc_queued_bytes(k->call) > k->router->cfg.max_client_backlog ? TD_E_SLOW_CLIENT : TD_OK;
}

static enum td_status on_run_event(void *user, uint32_t choice, const struct td_choice_event *e)
{
    struct chat *k = chat_of(user);
    if (e->type != TD_CHOICE_END || ++k->n_ended < k->n_choices) return td_chat_write(&k->writers[choice], e, NULL);
    struct td_run_usage used = td_run_usage_of(k->run);
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    Tandem__V1__Timing timing;
    usage.prompt_tokens = (uint32_t)used.prompt_tokens;
    usage.completion_tokens = (uint32_t)used.completion_tokens;
    usage.cached_tokens = (uint32_t)used.cached_tokens;
    td_request_timing(td_run_request(k->run, choice), &timing);
    struct td_chat_summary summary = {&usage, &timing, (uint32_t)used.reasoning_tokens};
    return td_chat_write(&k->writers[choice], e, &summary);
}

static void on_run_done(void *user, enum td_status st, const char *text) { finish(chat_of(user), st, text); }

/* Before the run's first event, which comes from the loop. */
static enum td_status make_writers(struct chat *k)
{
    k->n_choices = td_run_n_choices(k->run);
    k->writers = td_calloc(k->n_choices, sizeof *k->writers);
    if (k->writers == NULL) return TD_E_NO_MEMORY;
    for (uint32_t i = 0; i < k->n_choices; i++)
        k->writers[i] = (struct td_chat_writer){.send = send_event, .user = k, .choice = i};
    k->writers[0].request_id = td_run_id(k->run);
    return TD_OK;
}

static enum td_status begin(struct chat *k, const Tandem__V1__ChatRequest *m, struct td_err *err)
{
    static const struct td_run_sink sink = {.on_event = on_run_event, .on_done = on_run_done};
    struct td_order order;
    td_order_init(&order);
    enum td_status st = td_chat_read_order(m, &order, err);
    if (st != TD_OK) {
        td_order_deinit(&order);
        return st;
    }
    if (order.request_id[0] == '\0') order.request_id = td_rpc_call_metadata(k->call, "x-request-id");
    order.deadline_ns = td_rpc_call_deadline_ns(k->call);
    st = td_run_start(k->router, &order, &sink, k, &k->run, err);
    if (st != TD_OK) return st;
    st = make_writers(k);
    if (st == TD_OK) return TD_OK;
    td_run_cancel(k->run);
    return td_err_set(err, st, "no memory for another request");
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

static void on_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct chat *k = chat_of(td_rpc_call_user(c));
    struct td_err err = {{0}};
    if (k->has_order) return;
    k->has_order = true;
    enum td_status st = begin(k, (const Tandem__V1__ChatRequest *)msg, &err);
    if (st != TD_OK) finish(k, st, err.text);
}

void td_chat_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_message, .on_closed = on_closed};
    struct chat *k = td_calloc(1, sizeof *k);
    if (k == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    k->magic = CHAT_MAGIC;
    k->router = service;
    k->call = c;
    k->linger.fire = on_linger;
    td_rpc_call_accept(c, &handlers, k);
}
