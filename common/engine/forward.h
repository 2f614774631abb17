/* One forward pass over a batch: plan (segments into rows), layers, logits, sampling. Written once for all backends: it
 * calls the ops of kernels/ops.def and nothing else of a device. One thread at a time.
 *
 * Tensor parallelism: one td_forward a rank, each on its own thread. Rank 0 (the leader) plans, the others follow the
 * same plan through memory they share; what a layer adds to the residual is summed over ranks, twice a layer; each rank
 * has some columns of the logits, and the leader samples. */
#ifndef TD_ENGINE_FORWARD_H
#define TD_ENGINE_FORWARD_H

#include "common/coll/coll.h"
#include "common/engine/engine.h"
#include "common/engine/workspace.h"
#include "common/model/weights.h"

/* What the ranks of a group share. Written by the leader between two barriers. */
struct td_forward_group {
    struct td_coll *coll;
    struct td_forward *leader;
    struct td_batch *batch; /* NULL: no pass will come any more */
    void (*on_layer)(uint32_t layer, void *user);
    void *user;
    /* The batch's flag may rise at any time; that all ranks leave at the same layer is the leader's word. */
    atomic_bool is_abandoned;
};

struct td_layer_note; /* who is told of a layer */

struct td_forward {
    struct td_forward_group *group; /* NULL: alone */
    const struct td_model_config *c;
    const struct td_weights *w;
    struct td_engine_options o;
    struct td_stream *stream;
    /* Tells of layers from beside the ops' stream, which does not stop for it; NULL: it stops. */
    struct td_stream *notes;
    struct td_layer_note *layer_notes; /* [n_layers] */
    const struct td_ops *ops;
    struct td_workspace ws;
    struct td_pieces o_pieces, down_pieces;
    /* Steps of nothing but decode, recorded by their number of rows: [max_batch_segments + 1]; NULL: no graphs here.
     * The first step of a size runs, the second is recorded, from then on it is replayed. */
    struct td_graph **graphs;
    bool *has_run;
    uint32_t n_pages_max[TD_KV_N_GROUPS]; /* of one segment */
    uint32_t n_rows, n_tail, n_single;    /* of the batch that runs; n_single: segments of one row */
    uint32_t n_segments, n_pages[TD_KV_N_GROUPS];
    /* For tests: hidden state after the embedding (layer -1), each layer, and the final norm (layer L): the rows that
     * are there, which for the last two are the tail rows. ids: experts chosen in the layer, or NULL. */
    void (*probe)(void *user, int32_t layer, const float *x, uint32_t n_rows, const uint32_t *ids);
    void *probe_user;
};

/* Of a model of one rank. */
enum td_status td_forward_create(struct td_model *model, const struct td_engine_options *o, struct td_forward *out,
                                 struct td_err *err);
/* One rank of several; o->n_threads are its own. group outlives it. */
enum td_status td_forward_create_rank(struct td_model *model, const struct td_engine_options *o, uint32_t rank,
                                      struct td_forward_group *group, struct td_forward *out, struct td_err *err);
void td_forward_free(struct td_forward *f); /* zero-initialised is fine */

/* Can this batch run here? INVALID: over the limits, a token out of vocabulary, a page table that misses a visible
 * position, or a table or copy that names a page that does not exist. Any thread: reads the batch and the options only.
 */
enum td_status td_forward_check(const struct td_forward *f, const struct td_batch *b);
/* Runs it: the leader's call. on_layer (may be NULL) is called when the layer's KV is in its pages, before the rest of
 * the layer is computed: by each rank for its own pages, on its own thread; or, where a device tells of it (notes), on
 * a thread of the device's, one at a time, in order, and before this returns. A failure other than CANCELED breaks the
 * group: td_forward_follow returns on the other ranks, and no pass runs any more. */
enum td_status td_forward_run(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                              void *user);
/* The other ranks' call: waits for a pass and takes part. false: the group has ended or is broken. */
bool td_forward_follow(struct td_forward *f);
void td_forward_end_group(struct td_forward *leader); /* td_forward_follow returns false */

#endif
