/* The ranks of a model as one: a forward pass and a thread each, except rank 0, who is whoever runs a pass. */
#ifndef TD_ENGINE_RANKS_H
#define TD_ENGINE_RANKS_H

#include "common/engine/forward.h"

struct td_ranks;

enum td_status td_ranks_create(struct td_model *model, const struct td_engine_options *o, struct td_ranks **out,
                               struct td_err *err);
void td_ranks_destroy(struct td_ranks *r);              /* no pass runs; NULL is fine */
struct td_forward *td_ranks_leader(struct td_ranks *r); /* rank 0's: checks batches, shows its hidden state */
/* Whose passes run while the host goes on (forward.h, td_forward_begin); NULL: there are several ranks. */
struct td_forward *td_ranks_alone(struct td_ranks *r);
/* Runs a batch that has passed td_forward_check; one at a time. on_layer (may be NULL) is called when every rank has
 * stored that layer's KV: once a layer, in order, on the thread of the rank that was last. After a failure other than
 * CANCELED a group of several ranks is broken: that status comes back from every later pass. */
enum td_status td_ranks_run(struct td_ranks *r, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                            void *user);

#endif
