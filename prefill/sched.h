/* Chunks of a prompt under a token budget, and the pages they need. Pages of full layers are taken for the whole prompt
 * before its first chunk; pages of sliding layers come with each chunk and go when the window has passed them, so that
 * a long prompt holds few. What the prefix cache knows of a prompt is shared, and computing begins behind it; what was
 * computed is entered there, so that a prompt that comes again, or goes on, costs the rest only. Which prompt s are
 * computed is the worker's queue: first come, first served. Pure; loop thread only. */
#ifndef TD_PREFILL_SCHED_H
#define TD_PREFILL_SCHED_H

#include "common/base/status.h"
#include "common/engine/batch.h"
#include "common/engine/kv_pages.h"
#include "common/engine/kv_prefix.h"

struct td_prefill_sched {
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint32_t window_tokens;
    struct td_kv_pages *pages;
    struct td_kv_prefix *prefix; /* NULL: no cache */
};

/* One prompt. All zero before init. */
struct td_prefill_seq {
    uint32_t n_tokens, n_blocks;
    uint32_t n_done;                 /* tokens computed */
    uint32_t n_chunk;                /* tokens of the chunk that is prepared or in flight; 0: none */
    uint32_t *pages[TD_KV_N_GROUPS]; /* [n_blocks] by block; TD_NO_PAGE: not held */
    uint32_t n_sliding; /* sliding pages held are those of blocks [sliding_first, sliding_first + n_sliding) */
    uint32_t sliding_first;
    bool has_full;
    uint32_t n_cached; /* of n_done: found in the cache */
    struct td_kv_hit hit;
    char holder[72];
};

/* Sliding pages that one prompt can hold while it is computed in chunks of n tokens, and after that while it is sent.
 */
uint32_t td_prefill_sched_sliding_compute(uint32_t window_tokens, uint32_t chunk_tokens, uint32_t page_tokens);
uint32_t td_prefill_sched_sliding_send(uint32_t window_tokens, uint32_t page_tokens);

enum td_status td_prefill_seq_init(struct td_prefill_seq *q, const struct td_prefill_sched *s, uint32_t n_tokens,
                                   const char *holder); /* NO_MEMORY */
/* Gives every page back; the chunk in flight must be done. */
void td_prefill_seq_deinit(struct td_prefill_seq *q, const struct td_prefill_sched *s);

/* How many of the prompt's tokens the cache knows now. Holds nothing. */
uint32_t td_prefill_sched_known(const struct td_prefill_sched *s, struct td_prefill_seq *q, const uint32_t *tokens);
/* What is known of the prompt, and the full layers' pages of the rest. NO_PAGES: not now (nothing is held). */
enum td_status td_prefill_sched_reserve(const struct td_prefill_sched *s, struct td_prefill_seq *q,
                                        const uint32_t *tokens);
/* The next chunk, of at most n_max tokens: takes its sliding pages and fills tokens, n_tokens, start and table of seg;
 * the rest of seg is the caller's. tokens: the whole prompt. NO_PAGES: not now. */
enum td_status td_prefill_sched_chunk(const struct td_prefill_sched *s, struct td_prefill_seq *q, uint32_t n_max,
                                      const uint32_t *tokens, struct td_segment *seg);
/* What must be copied before the prepared chunk is computed: 0 or TD_KV_N_GROUPS. */
uint32_t td_prefill_seq_copies(const struct td_prefill_seq *q, struct td_page_copy out[TD_KV_N_GROUPS]);
static inline bool td_prefill_seq_is_last_chunk(const struct td_prefill_seq *q)
{
    return q->n_done + q->n_chunk == q->n_tokens;
}
/* Blocks of a group that are complete once the prepared chunk's layer is stored: all before the result. Sliding layers
 * travel at the end only, since a later chunk moves the window. */
uint32_t td_prefill_seq_ready_end(const struct td_prefill_seq *q, const struct td_prefill_sched *s, enum td_kv_group g);
/* The chunk was computed: it is entered into the cache, and the sliding pages that no later position sees go back. */
void td_prefill_sched_chunk_done(const struct td_prefill_sched *s, struct td_prefill_seq *q, const uint32_t *tokens);
/* The chunk was not computed (not submitted, or failed). */
void td_prefill_sched_chunk_undone(struct td_prefill_seq *q);

/* How long tokens take at the least: what the fastest of the recent passes took, which slowly gives way when passes get
 * slower. All zero: nothing is known, and everything seems possible. */
struct td_prefill_pace {
    double ns_per_token;
};
void td_prefill_pace_observe(struct td_prefill_pace *p, uint32_t n_tokens, uint64_t took_ns);
uint64_t td_prefill_pace_ns(const struct td_prefill_pace *p, uint64_t n_tokens);

#endif
