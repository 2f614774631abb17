/* Prefill.Run: the way between calls and prefill/worker.c. */
#include <stdlib.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "prefill/daemon.h"

struct run_call {
    struct td_prefill_daemon *d;
    struct td_rpc_call *c;
    struct td_prefill_run *run; /* NULL: not begun, or answered */
};

enum td_status td_prefill_call_event(void *self, void *call, const Tandem__V1__RunEvent *ev)
{
    (void)self;
    return td_rpc_send(((struct run_call *)call)->c, &ev->base);
}

void td_prefill_call_finish(void *self, void *call, enum td_status st, const char *text)
{
    struct run_call *rc = call;
    (void)self;
    rc->run = NULL;
    td_rpc_finish(rc->c, st, text);
}

static void on_run(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct run_call *rc = td_rpc_call_user(c);
    rc->run =
        td_prefill_worker_on_run(rc->d->worker, rc, td_rpc_call_deadline_ns(c), (const Tandem__V1__RunRequest *)msg);
}

static void on_run_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct run_call *rc = td_rpc_call_user(c);
    (void)text;
    if (rc->run != NULL) td_prefill_worker_on_gone(rc->d->worker, rc->run, st);
    free(rc);
}

void td_prefill_open_run(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_run, .on_closed = on_run_closed};
    struct run_call *rc = td_calloc(1, sizeof *rc);
    if (rc == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    *rc = (struct run_call){.d = ((struct td_worker *)service)->self, .c = c};
    td_rpc_call_accept(c, &handlers, rc);
}
