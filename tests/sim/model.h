/* The model of the simulation: no weights, but every property that the cluster relies on. Position p of a sequence has
 * a state that depends on all tokens up to it; that state is what its KV shows, in every layer and head, so whoever
 * reads a wrong, stale or unwritten page sees it. The next token depends on the last state, the seed and the draw's
 * index. All of it is computable without a cluster, which is how the right answer to a request is known beforehand. */
#ifndef TESTS_SIM_MODEL_H
#define TESTS_SIM_MODEL_H

#include "common/engine/batch.h"
#include "common/handoff/descriptor.h"
#include "common/model/model.h"

#define SIM_VOCAB       256u
#define SIM_MAX_CONTEXT 256u
#define SIM_PAGE_TOKENS 4u
#define SIM_WINDOW      10u /* not a multiple of the page */
#define SIM_KV_HEADS    2u
#define SIM_MODEL_NAME  "sim"

extern const struct td_model_config sim_model; /* sliding, full, sliding, full */
void sim_kv_layout(uint32_t n_ranks, const uint32_t n_pages[TD_KV_N_GROUPS],
                   struct td_kv_group_layout out[TD_KV_N_GROUPS]); /* of a rank */

/* State of position p: of the state before it (0 for p = 0) and its token. */
uint64_t sim_state(uint64_t before, uint32_t token);
uint32_t sim_next_token(uint64_t state, uint64_t seed, uint64_t draw_index, const uint32_t *banned, uint32_t n_banned);

/* What a page of a pool shows of a position (0 .. page_tokens - 1 in it), in one layer and head of the whole model. */
void sim_kv_write(uint8_t *pool, const struct td_kv_group_layout *l, uint32_t rank, uint32_t layer, uint32_t page,
                  uint32_t position, uint64_t state);
bool sim_kv_is(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t rank, uint32_t layer, uint32_t page,
               uint32_t position, uint64_t state);

/* The same of one head's part of a page, wherever it lies; head: of the whole model. */
bool sim_kv_part_is(const uint8_t *part, const struct td_kv_group_layout *l, uint32_t layer, uint32_t head,
                    uint32_t position, uint64_t state);

/* Free pages are filled with this: whoever writes one is seen. */
void sim_kv_fill_canary(uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page);
uint64_t sim_kv_sum(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page); /* of its content */
bool sim_kv_is_canary(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page);

#endif
