/* How stored tensors reach a device: through lanes, each a stream and host memory that the device copies from fast. A
 * lane is filled, by several threads, while the device still takes in what the others held. A device that shares the
 * host's memory has one lane, and reads files where they lie. */
#ifndef TD_MODEL_LANES_INT_H
#define TD_MODEL_LANES_INT_H

#include "common/model/safetensors.h"
#include "kernels/device.h"

struct td_lanes;

/* n_bytes: of a turn at most. dummy_seed: of tensors without data. On failure err says what there was no memory for. */
enum td_status td_lanes_create(struct td_device *d, size_t n_bytes, uint64_t dummy_seed, struct td_lanes **out,
                               struct td_err *err);
void td_lanes_destroy(struct td_lanes *l);      /* NULL is fine; waits */
size_t td_lanes_room(const struct td_lanes *l); /* n_bytes */

/* The next lane's turn: waits until the device has taken in what it held. All that td_lanes_bytes gave in its last turn
 * may change from here on. */
enum td_status td_lanes_turn(struct td_lanes *l, struct td_stream **out);
/* n bytes of t from `at` on, aligned to 16 where that is a multiple of an element; made up if t has no data. */
enum td_status td_lanes_bytes(struct td_lanes *l, const struct td_tensor *t, uint64_t at, uint64_t n,
                              const uint8_t **out);
/* Other n bytes of the host's. */
enum td_status td_lanes_put(struct td_lanes *l, const void *from, size_t n, const void **out);
/* All is there, or INVALID (struct td_pack_weight_args). *n_inexact_out: elements that were rounded since the last
 * call. */
enum td_status td_lanes_finish(struct td_lanes *l, uint64_t *n_inexact_out);

#endif
