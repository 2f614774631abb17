/* What is known of the contents of KV pages: whole pages of tokens that sequences share, in P to save compute, in D to
 * save transfer. Loop thread only; holds numbers, not memory; allocates nothing after create.
 *
 * A block (page_tokens tokens at a multiple of page_tokens) is named by a 128-bit hash chained over all tokens before
 * it, and a find compares the tokens as well. A block has a page of full layers and, perhaps, one of sliding layers.
 * Pages that some sequence holds stay; the others go, least recently used first, when somebody needs a page
 * (kv_pages.h). A block that goes takes those behind it along: nobody could find them.
 *
 * A page in here is never written again: sequences write behind the blocks they share. Where even a part of the
 * boundary block is known, the finder copies its page and writes into the copy.
 *
 * Sliding layers. To go on from a boundary they need the window before it, 2 pages of 64 for a window of 128. Keeping
 * them at every boundary would double the cost of a cached token, so they are kept where going on is likely:
 *   - at the end of a prompt: the next turn of a chat begins with it;
 *   - where a prompt parted from what was known (the system prompt of many): the third request finds it;
 *   - at every TD_KV_PREFIX_STRIDE-th block, so that a long prompt that was never seen to end there is not lost;
 *   - at the last boundary of a sequence that is being decoded.
 * A find gives the longest boundary that has its window. The sliding pool is laid out with room for these pages beside
 * those of running sequences; when they compete, the cache gives way. */
#ifndef TD_ENGINE_KV_PREFIX_H
#define TD_ENGINE_KV_PREFIX_H

#include "common/base/bytes.h"
#include "common/engine/kv_pages.h"

#define TD_KV_PREFIX_STRIDE 8u

struct td_kv_prefix;

/* kv outlives the cache. At most one cache a kv. */
enum td_status td_kv_prefix_create(const struct td_kv_group_layout layout[TD_KV_N_GROUPS], uint32_t window_tokens,
                                   struct td_kv_pages *kv, struct td_kv_prefix **out);
void td_kv_prefix_destroy(struct td_kv_prefix *p); /* its pages are free as any other; NULL is fine */

/* What a sequence has put into the cache: how far it has come. All zero: nothing. */
struct td_kv_chain {
    uint64_t hash[2];
    uint32_t n_blocks;
    uint32_t node; /* of the last block, and which use of it: it may be evicted meanwhile */
    uint64_t node_use;
    uint32_t prompt_blocks; /* whole ones of the prompt: that boundary is kept */
    uint32_t branch_blocks; /* where the find stopped, 0: nowhere: kept as well */
};

struct td_kv_hit {
    uint32_t n_tokens; /* known: the first that must be computed or received. Never all of them */
    uint32_t n_blocks; /* shared whole: of full layers [0, n_blocks), of sliding ones [first_sliding, n_blocks) */
    uint32_t first_sliding;
    /* If n_tokens goes beyond n_blocks * page_tokens: the block there is known in part. Whoever wants it copies these
     * pages into its own before it computes. Held until td_kv_prefix_copied. */
    bool has_copy;
    uint32_t copy_from[TD_KV_N_GROUPS];
    struct td_kv_chain chain;
};

/* Both find the longest known prefix of tokens, one token short of all at most, and hold its pages for holder: page
 * numbers by block into pages_out, which has room for all blocks. The sequence lets go of them by td_kv_pages_unref.
 *
 * compute: the tokens behind the hit are computed here: the sliding pages that the first of them sees are there.
 * receive: their KV comes from elsewhere: whole blocks only; the sliding pages that are wanted in the end and are not
 * sent, since they lie before the hit, are there. */
void td_kv_prefix_find_compute(struct td_kv_prefix *p, const uint32_t *tokens, uint32_t n_tokens, const char *holder,
                               uint32_t *const pages_out[TD_KV_N_GROUPS], struct td_kv_hit *out);
void td_kv_prefix_find_receive(struct td_kv_prefix *p, const uint32_t *tokens, uint32_t n_tokens, const char *holder,
                               uint32_t *const pages_out[TD_KV_N_GROUPS], struct td_kv_hit *out);
/* The copy is made, or will not be. */
void td_kv_prefix_copied(struct td_kv_prefix *p, struct td_kv_hit *hit);
/* Lets go of everything that a find held. */
void td_kv_prefix_drop(struct td_kv_prefix *p, struct td_kv_hit *hit, uint32_t *const pages[TD_KV_N_GROUPS]);
/* The hit is made use of: counts it. */
void td_kv_prefix_count(const struct td_kv_hit *hit);

/* KV of the first n_tokens tokens is in pages (by block; TD_NO_PAGE where a sliding page is not held any more): enters
 * the whole blocks that are new since the last call, and the windows worth keeping. The caller holds these pages and
 * will not write them again. prompt_blocks and branch_blocks are set before the first call. */
void td_kv_prefix_enter(struct td_kv_prefix *p, struct td_kv_chain *c, const uint32_t *tokens, uint32_t n_tokens,
                        const uint32_t *const pages[TD_KV_N_GROUPS]);

/* How far a router has been told what is in here. All zero: nothing yet. */
struct td_kv_teller {
    bool has_begun;
    uint32_t node;   /* the next to be told of all that were there at first */
    uint64_t n_told; /* changes */
};
/* The next changes to tell, in order, at most max: short names (common/base/token_chain.h) of blocks that came; of
 * those that went, with the lowest bit set. is_all: what was told before is void, since it is the first time or too
 * much was missed. 0 and not is_all: the router knows everything. */
uint32_t td_kv_prefix_tell(const struct td_kv_prefix *p, struct td_kv_teller *t, uint64_t *out, uint32_t max,
                           bool *is_all_out);

uint32_t td_kv_prefix_n_blocks(const struct td_kv_prefix *p);
void td_kv_prefix_describe(const struct td_kv_prefix *p, struct td_buf *json_out);

#endif
