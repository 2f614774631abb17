#include "common/coll/coll.h"

#include <string.h>

#include "common/base/check.h"

const struct td_coll_ops *td_coll_find(const char *name)
{
    return strcmp(name, td_coll_local.name) == 0 ? &td_coll_local : NULL;
}

enum td_status td_coll_create(const struct td_coll_ops *ops, uint32_t n_ranks, bool spin, struct td_coll **out,
                              struct td_err *err)
{
    TD_CHECK(n_ranks >= 1 && n_ranks <= TD_MAX_RANKS);
    enum td_status st = ops->create(n_ranks, out, err);
    if (st != TD_OK) return st;
    (*out)->ops = ops;
    (*out)->n_ranks = n_ranks;
    td_barrier_init(&(*out)->barrier, n_ranks, spin);
    return TD_OK;
}

void td_coll_destroy(struct td_coll *c)
{
    if (c != NULL) c->ops->destroy(c);
}

enum td_status td_coll_all_reduce(struct td_coll *c, uint32_t rank, struct td_stream *s, float *x, size_t n)
{
    TD_CHECK(rank < c->n_ranks);
    return c->n_ranks == 1 ? TD_OK : c->ops->all_reduce(c, rank, s, x, n);
}

enum td_status td_coll_barrier(struct td_coll *c) { return td_barrier_wait(&c->barrier); }
void td_coll_fail(struct td_coll *c, enum td_status st) { td_barrier_break(&c->barrier, st); }
enum td_status td_coll_status(const struct td_coll *c) { return td_barrier_status(&c->barrier); }
