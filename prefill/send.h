/* The decode workers that this prefill worker writes to, and the way to each: made from the descriptor that a Run
 * brings when we do not know the worker yet, kept until its process dies. Joins common/handoff's sender to a transfer.
 * Loop thread only. */
#ifndef TD_PREFILL_SEND_H
#define TD_PREFILL_SEND_H

#include "common/base/bytes.h"
#include "common/handoff/descriptor.h"
#include "common/handoff/sender.h"
#include "common/transfer/xfer.h"

struct td_prefill_send;

struct td_prefill_send_options {
    struct td_env *env;
    const struct td_xfer_ops *xfer;
    uint64_t incarnation;         /* ours */
    struct td_peer_layout layout; /* ours */
    struct td_tx_source source;
    bool is_staged; /* source is a copy in host memory of pages that lie on a device */
    void *self;
    void (*ended)(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes); /* sender.h */
};

/* The transfer's handlers need a user before there is a transfer: create, open the transfer with
 * td_prefill_send_handlers, start. */
enum td_status td_prefill_send_create(struct td_prefill_send **out);
struct td_xfer_handlers td_prefill_send_handlers(void); /* user: the td_prefill_send */
enum td_status td_prefill_send_start(struct td_prefill_send *ps, struct td_xfer *x,
                                     const struct td_prefill_send_options *o);
void td_prefill_send_detach(struct td_prefill_send *ps);  /* before the transfer goes */
void td_prefill_send_destroy(struct td_prefill_send *ps); /* after it went; NULL is fine */

struct td_tx *td_prefill_send_tx(const struct td_prefill_send *ps);
/* Makes sure that that life of a decode worker is known. m: its descriptor, NULL if the Run brought none. UNKNOWN_PEER:
 * not known and no descriptor. MISMATCH: it cannot work with us; err names the field. INVALID: m is damaged, or of
 * another life. */
enum td_status td_prefill_send_introduce(struct td_prefill_send *ps, uint64_t decode,
                                         const Tandem__V1__PeerDescriptor *m, struct td_err *err);
/* How pages get there: xfer.h's peer_transport, with " staged" behind it where they leave the GPU by host memory; "?":
 * not known. Until the next call. */
const char *td_prefill_send_transport(struct td_prefill_send *ps, uint64_t decode);

#endif
