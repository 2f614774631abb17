/* The twin of the engine's thread: batches are executed in the order submitted, layer by layer, in virtual time. What
 * it reads is checked, what it draws is the model's. */
#ifndef TESTS_SIM_ENGINE_H
#define TESTS_SIM_ENGINE_H

#include "common/engine/engine.h"
#include "common/engine/kv_pages.h"
#include "tests/sim/world.h"

struct sim_engine_options {
    struct td_loop *host;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS]; /* of a rank */
    uint32_t n_ranks;
    uint8_t *base[TD_MAX_RANKS][TD_KV_N_GROUPS];
    const struct td_kv_pages *pages; /* whoever writes a page must have it */
    uint64_t layer_ns, token_ns;     /* a layer takes this, and this more for each token of the batch */
    uint32_t max_batch_tokens, max_batch_segments;
};
struct td_engine *sim_engine_create(const struct sim_engine_options *o, const struct td_engine_handlers *h, void *user);

void sim_engine_fail(struct td_engine *e); /* the batch that ends next fails with DEVICE */
void sim_engine_hang(struct td_engine *e); /* no batch ends any more */
bool sim_engine_is_hung(const struct td_engine *e);

#endif
