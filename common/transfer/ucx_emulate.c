/* Puts where nothing can store directly: plain memory, or another machine without an RDMA network. UCX would emulate
 * them too, but its receiver (1.13 to 1.22) aborts the process when it cannot acknowledge to a sender that has died,
 * and it writes wherever it is told. So:
 *
 *   sender    copies each segment in chunks, at most WINDOW of them under way, into active messages: "into the pool
 *             with this secret, at this offset"; copied, so that a put can be canceled while its bytes wait in a socket
 *   receiver  checks secret and bounds, writes, acknowledges with the put's ticket
 *   sender    the put is done when every chunk is acknowledged; a flush waits for the puts before it
 *
 * The receiver keeps no state; an acknowledgement that fits no put is dropped. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/tsan.h"
#include "common/transfer/ucx_int.h"

#define CHUNK_BYTES   (256u << 10)
#define WINDOW        16u         /* chunks: 4 MiB under way to a peer */
#define CHUNK_MAGIC   0x4b434454u /* "TDCK" */
#define ACK_MAGIC     0x414b4454u /* "TDKA" */
#define CHUNK_VERSION 1u

/* --- sender --------------------------------------------------------------------------------------------------------
 */

struct chunk {
    struct ucx_peer *peer;
    struct ucx_chunk_header header; /* UCX reads both until the send completes */
    uint8_t data[];
};

static struct ucx_op *find_put(struct ucx_peer *p, uint64_t ticket)
{
    TD_LIST_FOREACH (it, &p->ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (op->item.kind == UCX_PUT && op->n_unacked != 0 && op->ticket == ticket) return op;
    }
    return NULL;
}

bool td_ucx_emulate_is_over(const struct ucx_op *op)
{
    if (op->item.kind != UCX_PUT || !op->peer->pools[op->pool].is_emulated) return true;
    return op->n_unacked == 0 && (op->is_all_sent || op->status != TD_OK);
}

static void chunk_is_sent(struct chunk *c, ucs_status_t s)
{
    struct ucx_op *op = s == UCS_OK ? NULL : find_put(c->peer, c->header.ticket);
    c->peer->n_wire--;
    if (s != UCS_OK && c->header.secret != 0) c->peer->n_window--;
    free(c);
    if (op == NULL) return;
    if (op->status == TD_OK) op->status = td_ucx_status(s);
    op->n_unacked--; /* it never left: nobody will acknowledge it */
    td_ucx_wire_settle(op);
}

static void on_chunk_sent(void *request, ucs_status_t s, void *user)
{
    ucp_request_free(request);
    chunk_is_sent(user, s);
}

/* False: no memory. What else goes wrong comes to chunk_is_sent, maybe at once. */
static bool send_chunk(struct ucx_peer *p, const struct ucx_chunk_header *h, const void *src, size_t n)
{
    struct chunk *c = td_realloc(NULL, 1, sizeof *c + n);
    if (c == NULL) return false;
    c->peer = p;
    c->header = *h;
    c->header.magic = CHUNK_MAGIC;
    c->header.version = CHUNK_VERSION;
    if (n != 0) memcpy(c->data, src, n);
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                                 .cb.send = on_chunk_sent,
                                 .user_data = c,
                                 .flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY};
    p->n_wire++;
    ucs_status_ptr_t r = ucp_am_send_nbx(p->ep, UCX_AM_CHUNK, &c->header, sizeof c->header, c->data, n, &param);
    if (r == NULL || UCS_PTR_IS_ERR(r)) chunk_is_sent(c, UCS_PTR_STATUS(r));
    return true;
}

/* Connects the two now rather than with the first put. */
void td_ucx_emulate_hello(struct ucx_peer *p)
{
    p->hello_ticket = ++p->x->last_ticket;
    struct ucx_chunk_header h = {.ticket = p->hello_ticket};
    if (!send_chunk(p, &h, NULL, 0)) p->hello_ticket = 0;
}

static void send_next(struct ucx_op *op)
{
    while (op->next_seg < op->n_segs && op->next_byte == op->segs[op->next_seg].n_bytes) {
        op->next_seg++;
        op->next_byte = 0;
    }
    if (op->next_seg == op->n_segs) {
        op->is_all_sent = true;
        return;
    }
    const struct td_xfer_seg *s = &op->segs[op->next_seg];
    uint64_t at = op->next_byte, n = s->n_bytes - at < CHUNK_BYTES ? s->n_bytes - at : CHUNK_BYTES;
    op->next_byte += n;
    struct ucx_chunk_header h = {
        .secret = op->peer->pools[op->pool].secret, .offset = s->dst_offset + at, .ticket = op->ticket};
    op->n_unacked++;
    op->peer->n_window++;
    if (send_chunk(op->peer, &h, (const uint8_t *)s->src + at, n)) return;
    op->n_unacked--;
    op->peer->n_window--;
    op->status = TD_E_NO_MEMORY;
}

static struct ucx_op *next_put(struct ucx_peer *p)
{
    TD_LIST_FOREACH (it, &p->ops) {
        struct ucx_op *op = TD_LIST_ENTRY(it, struct ucx_op, item.link);
        if (op->item.kind == UCX_PUT && p->pools[op->pool].is_emulated && !op->is_all_sent && op->status == TD_OK)
            return op;
    }
    return NULL;
}

static void pump(struct ucx_peer *p)
{
    struct ucx_op *op;
    while (p->n_window < WINDOW && !p->is_failed && !p->is_closing && (op = next_put(p)) != NULL) {
        op->n_left++; /* stays while we look at it */
        send_next(op);
        td_ucx_wire_step(op, UCS_OK);
    }
}

void td_ucx_emulate_put(struct ucx_op *op)
{
    op->ticket = ++op->peer->x->last_ticket;
    pump(op->peer);
}

static ucs_status_t on_ack(void *arg, const void *header, size_t n_header, void *data, size_t n,
                           const ucp_am_recv_param_t *param)
{
    (void)data, (void)n, (void)param;
    struct ucx *x = arg;
    struct ucx_ack_header h = {0};
    if (n_header == sizeof h) memcpy(&h, header, sizeof h);
    if (h.magic != ACK_MAGIC || h.version != CHUNK_VERSION) {
        atomic_fetch_add_explicit(&x->n_bad_messages, 1, memory_order_relaxed);
        return UCS_OK;
    }
    TD_LIST_FOREACH (it, &x->live) {
        struct ucx_peer *p = TD_LIST_ENTRY(it, struct ucx_peer, live_link);
        if (h.ticket != 0 && h.ticket == p->hello_ticket) {
            p->hello_ticket = 0;
            break;
        }
        struct ucx_op *op = find_put(p, h.ticket);
        if (op == NULL) continue; /* none at all: of a put that ended meanwhile */
        if (h.is_refused != 0 && op->status == TD_OK) op->status = TD_E_MISMATCH;
        op->n_unacked--;
        p->n_window--;
        td_ucx_wire_settle(op);
        pump(p);
        break;
    }
    return UCS_OK;
}

/* --- receiver ------------------------------------------------------------------------------------------------------
 */

/* Whoever reads a pool was told to by a message that its writer sent after our acknowledgement, perhaps to another
 * worker of this process: the way back is through another process, where ThreadSanitizer sees no order. */
static char written;
void td_ucx_emulate_see_written(void) { TD_TSAN_ACQUIRE(&written); }

static bool write_into_pool(struct ucx *x, const struct ucx_chunk_header *h, const void *data, size_t n)
{
    TD_LIST_FOREACH (it, &x->mapped) {
        struct ucx_pool *p = TD_LIST_ENTRY(it, struct ucx_pool, map_link);
        if (p->secret != h->secret || p->kind == TD_POOL_DEVICE) continue;
        if (h->offset > p->n_bytes || n > p->n_bytes - h->offset) return false;
        if (n != 0) memcpy((uint8_t *)p->base + h->offset, data, n);
        TD_TSAN_RELEASE(&written);
        return true;
    }
    return false;
}

static void on_ack_sent(void *request, ucs_status_t s, void *user)
{
    (void)s; /* to the dead: that shows elsewhere */
    ucp_request_free(request);
    free(user);
}

static void acknowledge(struct ucx *x, ucp_ep_h to, uint64_t ticket, bool is_written)
{
    struct ucx_ack_header *h = td_calloc(1, sizeof *h);
    if (h == NULL) { /* that put never ends at its sender; deadlines are for this */
        atomic_fetch_add_explicit(&x->n_dropped_messages, 1, memory_order_relaxed);
        return;
    }
    *h = (struct ucx_ack_header){
        .magic = ACK_MAGIC, .version = CHUNK_VERSION, .ticket = ticket, .is_refused = is_written ? 0 : 1};
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                                 .cb.send = on_ack_sent,
                                 .user_data = h,
                                 .flags = UCP_AM_SEND_FLAG_EAGER};
    ucs_status_ptr_t r = ucp_am_send_nbx(to, UCX_AM_ACK, h, sizeof *h, NULL, 0, &param);
    if (r == NULL || UCS_PTR_IS_ERR(r)) free(h);
}

static void drop(struct ucx *x, const char *why, size_t n)
{
    atomic_fetch_add_explicit(&x->n_bad_messages, 1, memory_order_relaxed);
    TD_WARN("xfer_chunk_dropped", "why=\"%s\" bytes=%zu", why, n);
}

static ucs_status_t on_chunk(void *arg, const void *header, size_t n_header, void *data, size_t n,
                             const ucp_am_recv_param_t *param)
{
    struct ucx *x = arg;
    struct ucx_chunk_header h = {0};
    if (n_header == sizeof h) memcpy(&h, header, sizeof h);
    if (h.magic != CHUNK_MAGIC || h.version != CHUNK_VERSION || n > CHUNK_BYTES ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
        drop(x, "not from Tandem, or another version", n);
        return UCS_OK;
    }
    bool is_written = (h.secret == 0 && n == 0) || write_into_pool(x, &h, data, n);
    if (!is_written) drop(x, "no such pool, or outside of it", n);
    acknowledge(x, param->reply_ep, h.ticket, is_written);
    return UCS_OK;
}

enum td_status td_ucx_emulate_listen(struct ucx *x, struct td_err *err)
{
    ucp_am_handler_param_t p = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                      UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = UCX_AM_CHUNK,
        .cb = on_chunk,
        .arg = x,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
    };
    ucs_status_t s = ucp_worker_set_am_recv_handler(x->worker, &p);
    if (s == UCS_OK) {
        p.id = UCX_AM_ACK;
        p.cb = on_ack;
        s = ucp_worker_set_am_recv_handler(x->worker, &p);
    }
    return s == UCS_OK ? TD_OK : td_ucx_err(err, s, "listening for chunks");
}
