/* What the files of a forward pass share: forward.c runs layers, draws.c makes tokens of them, ahead.c has passes of
 * which one waits on the device while another runs. */
#ifndef TD_ENGINE_FORWARD_INT_H
#define TD_ENGINE_FORWARD_INT_H

#include "common/engine/plan_int.h"
#include "common/engine/sample.h"

/* The rows that go through a layer: all of the batch, or its tail. */
struct td_rows {
    uint32_t n, n_seqs, n_single;
    float *x, *t, *cos, *sin;
    const uint32_t *positions;
    const struct td_seq_rows *seqs[TD_KV_N_GROUPS], *seqs_host[TD_KV_N_GROUPS];
};

/* --- forward.c --------------------------------------------------------------------------------------------- */
/* From the embedding to the tail rows' final norm. tail: unset if there are none. */
enum td_status td_forward_layers(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                                 void *user, struct td_rows *tail);
struct td_rows td_forward_tail(const struct td_forward *f);
/* This rank's heads of the pages; in stream order before all that reads or writes them. */
enum td_status td_forward_copy_pages(struct td_forward *f, const struct td_batch *b);
/* One rank's part of a pass whose plan is there. All ranks leave together: what they shared may change after. */
enum td_status td_forward_rank(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                               void *user);
static inline enum td_status td_forward_meet(struct td_forward *f)
{
    return f->group == NULL ? TD_OK : td_coll_barrier(f->group->coll);
}

/* --- draws.c ----------------------------------------------------------------------------------------------- */
/* What the tail rows first .. first + n - 1 want drawn, into the host's buffers. */
void td_draws_ask(struct td_forward *f, const struct td_batch *b, uint32_t first, uint32_t n, struct td_asked *out);
enum td_status td_draws_copy_lists(struct td_forward *f, const struct td_asked *asked);
/* Logits of tail rows and, where the device draws, what is plain among them: the same launches for any settings. */
enum td_status td_draws_compute(struct td_forward *f, const struct td_rows *tail, uint32_t first, uint32_t n);
enum td_status td_draws_filtered(struct td_forward *f, const struct td_asked *asked); /* the others */
/* All of them to the host. Enqueues only. */
enum td_status td_draws_fetch(struct td_forward *f, const struct td_asked *asked);
/* Fetched, and the stream has passed: did the device find a token for every row that asked? */
bool td_draws_are_complete(const struct td_forward *f, const struct td_asked *asked);
/* Into the segments; what is left to the host is drawn from the logits, which must be there still. */
enum td_status td_draws_take(struct td_forward *f, struct td_batch *b, const struct td_asked *asked);
/* All of it for all tail rows, some at a time. */
enum td_status td_draws_finish(struct td_forward *f, struct td_batch *b, const struct td_rows *tail);
/* The same among ranks: each computes its columns, the leader draws. */
enum td_status td_draws_finish_together(struct td_forward *f, struct td_batch *b, const struct td_rows *tail);

/* --- ahead.c ----------------------------------------------------------------------------------------------- */
/* The pass of that turn begins: its plan is made. */
struct td_pass *td_pass_open(struct td_forward *f, struct td_batch *b, uint32_t turn);
/* Its tokens are in the batch: the pass behind it may take them from the host. */
void td_pass_close(struct td_forward *f, struct td_pass *p);

#endif
