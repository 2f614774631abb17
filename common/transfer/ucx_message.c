/* Active messages as they arrive. What is in them is the peer's affair; what they may cost us is bounded here. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_int.h"

static ucs_status_t drop(_Atomic uint64_t *counter, const char *why, size_t n)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
    TD_WARN("xfer_message_dropped", "why=\"%s\" bytes=%zu", why, n);
    return UCS_OK; /* we are through with UCX's buffer */
}

static ucs_status_t on_message(void *arg, const void *header, size_t n_header, void *data, size_t n,
                               const ucp_am_recv_param_t *param)
{
    struct ucx *x = arg;
    struct ucx_header h;
    if (n_header != sizeof h) return drop(&x->n_bad_messages, "not from Tandem: header size", n);
    memcpy(&h, header, sizeof h);
    if (h.magic != UCX_HEADER_MAGIC || h.version != UCX_HEADER_VERSION)
        return drop(&x->n_bad_messages, "not from Tandem, or another version", n);
    if (n > TD_XFER_MESSAGE_MAX) return drop(&x->n_bad_messages, "too long", n);
    /* Ours are always sent eagerly; anything else would have us fetch from the sender. */
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return drop(&x->n_bad_messages, "rendezvous", n);
    if (!td_ucx_backlog_take(x, n + sizeof(struct ucx_message)))
        return drop(&x->n_dropped_messages, "the loop is too far behind", n);
    struct ucx_message *m = td_calloc(1, sizeof *m + n);
    if (m == NULL) {
        td_ucx_backlog_give(x->mailbox, n + sizeof *m);
        return drop(&x->n_dropped_messages, "out of memory", n);
    }
    m->item.kind = UCX_MESSAGE;
    m->from = h.incarnation;
    m->id = h.id;
    m->n = n;
    if (n != 0) memcpy(m->data, data, n);
    td_ucx_event(x, &m->item);
    return UCS_OK;
}

enum td_status td_ucx_message_listen(struct ucx *x, struct td_err *err)
{
    ucp_am_handler_param_t p = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                      UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = UCX_AM_MESSAGE,
        .cb = on_message,
        .arg = x,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
    };
    ucs_status_t s = ucp_worker_set_am_recv_handler(x->worker, &p);
    return s == UCS_OK ? TD_OK : td_ucx_err(err, s, "listening for messages");
}
