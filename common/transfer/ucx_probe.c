/* Are we deaf? Over shared memory all peers write their messages into one queue of ours. UCX lets a sender claim a
 * place in it and then fill it; a sender killed between the two leaves a place that never gets filled, and the queue
 * ends there for everyone. (A window of some ten nanoseconds per message; seen with UCX 1.22 in one of fifteen kills in
 * mid-burst.) So after a peer died we send a greeting to ourselves through that queue, and when it does not come back
 * we say so. */
#include <stdatomic.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/ucx_int.h"

#define WAIT_MS 500u
#define N_WAITS 3u /* more than one, since we may have been stopped meanwhile */

void td_ucx_probe_open(struct ucx *x, const struct td_card_address *ours)
{
    struct ucx_peer *p = &x->self;
    if (!x->has_shared_memory) return;
    p->magic = UCX_PEER_MAGIC;
    p->x = x;
    p->incarnation = x->incarnation;
    p->pidfd = -1;
    if (td_ucx_wire_open(p, ours, NULL, NULL) != TD_OK) TD_INFO("xfer_no_probe", "text=\"no way to ourselves\"");
}

void td_ucx_probe_start(struct ucx *x)
{
    struct ucx_peer *p = &x->self;
    if (p->ep == NULL || p->is_failed || p->is_closing || p->is_tcp) return;
    if (p->hello_ticket == 0) td_ucx_emulate_hello(p);
    x->n_probe_waits = 0;
    x->probe_due_ns = td_clock_ns() + WAIT_MS * TD_NS_PER_MS;
}

int td_ucx_probe_round(struct ucx *x, uint64_t now_ns)
{
    struct ucx_peer *p = &x->self;
    if (p->hello_ticket == 0 || p->is_failed || p->is_closing) {
        x->probe_due_ns = 0;
        if (p->hello_ticket == 0) atomic_store_explicit(&x->is_deaf, false, memory_order_relaxed);
        return -1;
    }
    if (now_ns >= x->probe_due_ns) {
        if (++x->n_probe_waits == N_WAITS) {
            atomic_store_explicit(&x->is_deaf, true, memory_order_relaxed);
            TD_ERROR("xfer_deaf",
                     "text=\"a peer died in the middle of a message: none comes through shared memory now, "
                     "restart this process\"");
        }
        x->probe_due_ns = now_ns + WAIT_MS * TD_NS_PER_MS; /* it goes on: should the queue move again, we hear again */
    }
    return (int)WAIT_MS / 5;
}
