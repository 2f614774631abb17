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

#define TD_LOGIT_ROWS 32u /* that exist at a time; few where the host draws: 26 MB of the large models' vocabulary */
/* Where the device draws, all of a step's, since each turn reads the whole head. */
#define TD_LOGIT_ROWS_DEVICE 256u

/* Of the stream's marks those from here on are the pass's own. */
#define TD_FORWARD_FIRST_MARK (TD_STREAM_MARKS - 12u)

/* Draws that were asked of the device. */
struct td_asked {
    uint32_t first, n; /* tail rows */
    uint32_t n_filtered, n_edits;
    size_t n_mask_words;
    bool has_tops;
    bool needs_host; /* a row's logits are wanted there when the pass has ended */
    bool is_asked[TD_LOGIT_ROWS_DEVICE];
};

/* One of two passes in turn. */
struct td_pass {
    uint32_t turn;
    struct td_batch *batch;
    struct td_asked asked;
    uint64_t nth;          /* of those that were started, from 1 on */
    enum td_status failed; /* not OK: it could not be made again */
    bool is_ended;         /* its tokens are on the host */
};

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
    bool can_begin; /* the backend works while the host goes on */
    struct td_pass passes[2];
    uint32_t turn, n_begun; /* of the newest pass; passes that have not ended */
    uint64_t n_started;
    bool takes_times; /* marks where passes begin, too: td_forward_times */
    /* Steps of nothing but decode, recorded by their number of rows: [max_batch_segments + 1]; NULL: no graphs here.
     * The first step of a size runs, the second is recorded, from then on it is replayed. */
    struct td_graph **graphs;
    bool *has_run;
    uint32_t n_rows, n_tail, n_single; /* of the newest pass; n_single: segments of one row */
    uint32_t n_segments, n_pages;
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

/* --- passes that run while the host goes on (ahead.c): at most two, of which the second waits for the first on the
 * device, not on the host --------------------------------------------------------------------------------- */
/* Can the batch be begun now? Not if anything in it, or in a pass that runs, needs the host in between. */
bool td_forward_may_begin(const struct td_forward *f, const struct td_batch *b);
/* Puts it behind what runs. A failure is the batch's end; passes begun before are not touched. */
enum td_status td_forward_begin(struct td_forward *f, struct td_batch *b);
/* Has the first of the passes begun come to its end? (A failure is an end.) One at least was begun. */
bool td_forward_has_ended(struct td_forward *f);
/* Waits for it, and fills in what its batch asked for. */
enum td_status td_forward_end(struct td_forward *f);
/* Records the steps of every size, and says how long it took and how much memory. Their rows are garbage in page 0 of
 * either group. */
enum td_status td_forward_record_all(struct td_forward *f);
/* Of the pass that ended last, begun with takes_times as the one before: microseconds that the device computed, and
 * those from the last draw of the one before to its own first work (0: none was before). */
enum td_status td_forward_times(struct td_forward *f, double *busy_us, double *gap_us);

void td_forward_end_group(struct td_forward *leader); /* td_forward_follow returns false */

#endif
