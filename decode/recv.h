/* The prefill workers that this decode worker knows, and the way to each: introduced by a router's command, watched
 * until their process dies. Joins the hand-off's decisions (decode/worker.c) to a transfer. Loop thread only. */
#ifndef TD_DECODE_RECV_H
#define TD_DECODE_RECV_H

#include "common/base/bytes.h"
#include "common/handoff/descriptor.h"
#include "common/transfer/xfer.h"
#include "decode/worker.h"

struct td_decode_recv;

/* layout: ours, copied. The transfer is opened afterwards (its handlers need the receiver): td_decode_recv_start. */
enum td_status td_decode_recv_create(const struct td_xfer_ops *ops, const struct td_peer_layout *layout,
                                     struct td_decode_recv **out);
void td_decode_recv_start(struct td_decode_recv *rv, struct td_xfer *x, struct td_decode_worker *w);
void td_decode_recv_destroy(struct td_decode_recv *rv); /* before the transfer goes: closes its peers */
struct td_xfer_handlers td_decode_recv_handlers(void);  /* user: the td_decode_recv */

/* Keeps the way to that life of a prefill worker. What does not fit together is remembered, so that a start that names
 * it is told why. */
void td_decode_recv_introduce(struct td_decode_recv *rv, const Tandem__V1__PeerDescriptor *m);
enum td_status td_decode_recv_check(const struct td_decode_recv *rv, uint64_t prefill, struct td_err *err);
enum td_status td_decode_recv_send(struct td_decode_recv *rv, uint64_t prefill, uint8_t id, const void *data, size_t n);
const char *td_decode_recv_transport(const struct td_decode_recv *rv, uint64_t prefill); /* "": not known */
void td_decode_recv_describe(const struct td_decode_recv *rv, struct td_buf *json_out);

#endif
