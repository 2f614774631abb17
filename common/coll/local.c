/* Ranks that share memory. An all-reduce is one pass: each rank sums its share of the elements over all ranks' buffers
 * and writes the sums back into all of them, between two barriers. Element by element the order of additions is the
 * halving tree over ranks, whoever does it. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/coll/coll.h"

#define BLOCK 512u /* elements summed at a time: a few of them lie on the stack */

struct local {
    struct td_coll base; /* first */
    float *x[TD_MAX_RANKS];
};

static enum td_status create(uint32_t n_ranks, struct td_coll **out, struct td_err *err)
{
    (void)n_ranks;
    struct local *l = td_calloc(1, sizeof *l);
    if (l == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the ranks' group");
    *out = &l->base;
    return TD_OK;
}

static void destroy(struct td_coll *c) { free(c); }

/* out [n] = the subtree of ranks [lo, hi) at elements at .. at + n - 1. */
static void sum(float *const *x, uint32_t lo, uint32_t hi, size_t at, uint32_t n, float *restrict out)
{
    float right[BLOCK];
    uint32_t mid = lo + (hi - lo) / 2;
    if (hi - lo == 1) {
        memcpy(out, x[lo] + at, n * sizeof *out);
        return;
    }
    sum(x, lo, mid, at, n, out);
    sum(x, mid, hi, at, n, right);
    for (uint32_t i = 0; i < n; i++) out[i] += right[i];
}

static enum td_status all_reduce(struct td_coll *c, uint32_t rank, struct td_stream *s, float *x, size_t n)
{
    struct local *l = (struct local *)c;
    (void)s; /* the CPU's streams have nothing pending between two ops */
    l->x[rank] = x;
    enum td_status st = td_coll_barrier(c);
    if (st != TD_OK) return st;
    size_t n_blocks = (n + BLOCK - 1) / BLOCK;
    size_t first = n_blocks * rank / c->n_ranks * BLOCK, end = n_blocks * (rank + 1) / c->n_ranks * BLOCK;
    if (end > n) end = n;
    for (size_t at = first; at < end; at += BLOCK) {
        float out[BLOCK];
        uint32_t m = end - at < BLOCK ? (uint32_t)(end - at) : BLOCK;
        sum(l->x, 0, c->n_ranks, at, m, out);
        for (uint32_t r = 0; r < c->n_ranks; r++) memcpy(l->x[r] + at, out, m * sizeof *out);
    }
    return td_coll_barrier(c);
}

const struct td_coll_ops td_coll_local = {
    .name = "local", .create = create, .destroy = destroy, .all_reduce = all_reduce};
