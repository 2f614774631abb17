#include "deploy/ctl/client.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/loop/loop.h"
#include "common/rpc/rpc.h"
#include "deploy/ctl/cluster.h"

struct td_client {
    struct td_loop *loop;
    struct td_rpc *rpc;
    struct td_rpc_channel *channel;
    uint32_t timeout_s;
    bool was_interrupted;
    struct sigaction loop_action; /* what td_client_allow_interrupts puts back */

    struct td_rpc_call *call; /* NULL: no call is open */
    bool is_over;
    enum td_status st;
    struct td_err *err;
    void (*on_message)(void *user, const ProtobufCMessage *msg);
    void *user;
};

static void on_signal(int signum, unsigned nth, void *user)
{
    struct td_client *c = user;
    (void)nth;
    c->was_interrupted = true;
    if (c->call != NULL)
        td_rpc_cancel(c->call);
    else
        _Exit(128 + signum);
}

enum td_status td_client_open(const struct td_client_options *o, struct td_client **out, struct td_err *err)
{
    enum td_status st;
    struct td_address router;
    const char *address = o->router;
    struct td_client *c = td_calloc(1, sizeof *c);
    if (c == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    c->timeout_s = o->timeout_s;
    if (address == NULL) {
        TD_TRY(td_cluster_read_router(o->run_dir, &router, err));
        address = router.rpc;
    }
    TD_TRY(td_loop_create(&c->loop));
    TD_TRY(td_loop_on_signal(c->loop, on_signal, c));
    TD_TRY(td_rpc_create(c->loop, NULL, &c->rpc));
    TD_TRY(td_rpc_channel_open(c->rpc, address, &c->channel));
    *out = c;
    c = NULL;
out:
    td_client_close(c);
    if (st != TD_OK && err->text[0] == '\0') td_err_set(err, st, "%s: %s", address, td_status_text(st));
    return st;
}

void td_client_close(struct td_client *c)
{
    if (c == NULL) return;
    td_rpc_channel_close(c->channel);
    td_rpc_destroy(c->rpc);
    td_loop_destroy(c->loop);
    free(c);
}

static void on_rpc_message(struct td_rpc_call *call, const ProtobufCMessage *msg)
{
    struct td_client *c = td_rpc_call_user(call);
    c->on_message(c->user, msg);
}

static void on_closed(struct td_rpc_call *call, enum td_status st, const char *text)
{
    struct td_client *c = td_rpc_call_user(call);
    c->call = NULL;
    c->is_over = true;
    c->st = st;
    if (st != TD_OK) td_err_set(c->err, st, "%s", *text != '\0' ? text : td_status_text(st));
}

enum td_status td_client_call(struct td_client *c, const char *path, const ProtobufCMessage *request,
                              const ProtobufCMessageDescriptor *reply,
                              void (*on_message)(void *user, const ProtobufCMessage *msg), void *user,
                              struct td_err *err)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_rpc_message, .on_closed = on_closed};
    c->on_message = on_message;
    c->user = user;
    c->err = err;
    c->is_over = false;
    uint64_t deadline = c->timeout_s == 0 ? TD_NEVER_NS : td_clock_ns() + c->timeout_s * TD_NS_PER_S;
    enum td_status st = td_rpc_call_start(c->channel, path, reply, deadline, false, NULL, &handlers, c, &c->call);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    st = td_rpc_send(c->call, request);
    if (st == TD_OK)
        td_rpc_half_close(c->call);
    else
        td_rpc_cancel(c->call);
    while (!c->is_over) td_loop_run_once(c->loop, true);
    return st != TD_OK ? td_err_set(err, st, "request of this size: %s", td_status_text(st)) : c->st;
}

bool td_client_was_interrupted(const struct td_client *c) { return c->was_interrupted; }

void td_client_allow_interrupts(struct td_client *c, bool is_waiting_for_input)
{
    if (is_waiting_for_input) {
        struct sigaction usual = {.sa_handler = SIG_DFL};
        sigaction(SIGINT, &usual, &c->loop_action);
    } else {
        c->was_interrupted = false;
        sigaction(SIGINT, &c->loop_action, NULL);
    }
}
