/* Puts into a peer's memory that is mapped here: stores of ours, in which UCX has no part. Without a device, from one
 * host memory to another, the transfer thread copies. With one the device does, one kernel a put on a stream of its
 * own, into its own memory or that of a device beside it, and says when it is done:
 *
 *   transfer thread: scatter, call -> the device's thread: into x->landed, wake -> transfer thread: the op has ended
 *
 * When may the peer be told? Once the kernel has come to its end: by then its stores are visible to the whole system
 * (kernels/cuda/scatter.cu), on this GPU or over NVLink, and what follows only orders later: the device's callback, our
 * event, the loop's message, the peer's loop, the peer's next launch.
 *
 * A peer that dies leaves its memory to us until its key goes: the driver keeps what somebody has mapped. So a kernel
 * that is under way writes into memory that nobody reads, and ends like any other; only then the key goes. A peer that
 * comes again has another incarnation, and with it another peer, key and mapping. */
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_int.h"
#include "kernels/device.h"

#define VECTOR 16u /* what a scatter moves by */

enum td_status td_ucx_mapped_open(struct ucx *x, struct td_err *err)
{
    if (x->device == NULL) return TD_OK;
    /* UCX asks the thread which device it means. */
    enum td_status st = td_device_enter(x->device);
    if (st == TD_OK) st = td_side_stream_create(x->device, &x->side);
    return st == TD_OK ? st : td_err_set(err, st, "a stream for puts: %s", td_device_last_error(x->device));
}

void td_ucx_mapped_close(struct ucx *x)
{
    td_stream_destroy(x->side); /* waits; what has landed by now nobody asks about */
    x->side = NULL;
    free(x->pieces);
    x->pieces = NULL;
}

/* With a device, sources lie there, and only it copies from it. */
bool td_ucx_mapped_suits(const struct ucx *x, enum td_pool_kind kind)
{
    bool is_on_host = x->device == NULL || x->device->backend->is_on_host;
    return !x->is_mapping_off && (kind != TD_POOL_DEVICE) == is_on_host;
}

static void on_landed(void *arg)
{
    struct ucx_op *op = arg;
    struct ucx *x = op->peer->x;
    pthread_mutex_lock(&x->lock);
    td_list_push_back(&x->landed, &op->landed_link);
    pthread_mutex_unlock(&x->lock);
    td_ucx_wake(x);
}

void td_ucx_mapped_landed(struct td_list *landed)
{
    while (!td_list_is_empty(landed)) {
        struct ucx_op *op = TD_LIST_ENTRY(landed->next, struct ucx_op, landed_link);
        td_list_remove(&op->landed_link);
        td_ucx_wire_step(op, UCS_OK);
    }
}

static enum td_status grow(struct ucx *x, unsigned n)
{
    if (n <= x->cap_pieces) return TD_OK;
    struct td_piece *grown = td_realloc(x->pieces, n, sizeof *grown);
    if (grown == NULL) return TD_E_NO_MEMORY;
    x->pieces = grown;
    x->cap_pieces = n;
    return TD_OK;
}

/* Enqueues all of it; what does not lie on vectors is a copy of its own (no page does). */
static enum td_status scatter(struct ucx *x, const struct ucx_op *op, const struct ucx_remote *r)
{
    enum td_status st = grow(x, op->n_segs);
    unsigned n = 0;
    for (unsigned i = 0; i < op->n_segs && st == TD_OK; i++) {
        const struct td_xfer_seg *s = &op->segs[i];
        uint8_t *to = r->here + s->dst_offset;
        if ((((uintptr_t)s->src | (uintptr_t)to | s->n_bytes) & (VECTOR - 1)) == 0)
            x->pieces[n++] = (struct td_piece){.from = s->src, .to = to, .n_bytes = s->n_bytes};
        else if (s->n_bytes != 0)
            st = td_stream_copy(x->side, to, s->src, s->n_bytes);
    }
    return st == TD_OK && n != 0 ? td_stream_scatter(x->side, x->pieces, n) : st;
}

void td_ucx_mapped_put(struct ucx_op *op)
{
    struct ucx *x = op->peer->x;
    const struct ucx_remote *r = &op->peer->pools[op->pool];
    if (x->side == NULL) {
        for (unsigned i = 0; i < op->n_segs; i++)
            if (op->segs[i].n_bytes != 0)
                memcpy(r->here + op->segs[i].dst_offset, op->segs[i].src, op->segs[i].n_bytes);
        return;
    }
    enum td_status st = scatter(x, op, r);
    op->n_left++;
    if (st == TD_OK && (st = td_stream_call(x->side, on_landed, op)) == TD_OK) return;
    op->n_left--;
    (void)td_stream_sync(x->side); /* the source may be used again once this has ended */
    op->status = st;
    TD_ERROR("xfer_scatter_failed", "status=%s error=\"%s\"", td_status_name(st), td_device_last_error(x->device));
}
