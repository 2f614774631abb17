/* Tensor-parallel collectives among the ranks of one process: the contract. One implementation so far: local.c (ranks
 * that share the CPU's memory). Others (NCCL, peer-mapped memory) fit behind the same calls.
 *
 * A rank is a thread. Every rank calls the same collectives with the same counts in the same order; each call returns
 * on a rank when that rank may go on. A rank that cannot go on says so with td_coll_fail: from then on every call on
 * every rank returns that status, those that wait included, and the group is of no use any more. */
#ifndef TD_COLL_COLL_H
#define TD_COLL_COLL_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/coll/barrier.h"
#include "kernels/device.h"
#include "kernels/kv_layout.h"

struct td_coll;

struct td_coll_ops {
    const char *name;
    enum td_status (*create)(uint32_t n_ranks, struct td_coll **out, struct td_err *err);
    void (*destroy)(struct td_coll *c);
    enum td_status (*all_reduce)(struct td_coll *c, uint32_t rank, struct td_stream *s, float *x, size_t n);
};

struct td_coll { /* an implementation's own struct begins with it */
    const struct td_coll_ops *ops;
    uint32_t n_ranks;
    struct td_barrier barrier;
};
extern const struct td_coll_ops td_coll_local;

/* By name ("local"); NULL: no such collectives. */
const struct td_coll_ops *td_coll_find(const char *name);

/* n_ranks: 1 .. TD_MAX_RANKS. spin: ranks have a processor each, so that waiting a little awake pays. */
enum td_status td_coll_create(const struct td_coll_ops *ops, uint32_t n_ranks, bool spin, struct td_coll **out,
                              struct td_err *err);
void td_coll_destroy(struct td_coll *c); /* no rank is inside a call; NULL is fine */

/* x [n], device memory of the rank: becomes the sum over ranks, the same bits on all of them, ordered as the halving
 * tree over ranks (kernels/args.h: what td_pieces leaves to do), so that it does not matter how many ranks share the
 * pieces. In stream order; x may be read on s afterwards. */
enum td_status td_coll_all_reduce(struct td_coll *c, uint32_t rank, struct td_stream *s, float *x, size_t n);
/* Of the threads, not the streams: what a rank wrote to host memory before is seen by all after. May wait long; a rank
 * that waits sleeps. */
enum td_status td_coll_barrier(struct td_coll *c);
void td_coll_fail(struct td_coll *c, enum td_status st); /* the first one counts; any thread */
enum td_status td_coll_status(const struct td_coll *c);

#endif
