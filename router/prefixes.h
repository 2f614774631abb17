/* What one worker's prefix cache holds, as it tells: a set of short names of blocks (common/base/token_chain.h). And
 * the question that it is kept for: how much of a prompt does it know? Pure; loop thread only. */
#ifndef TD_ROUTER_PREFIXES_H
#define TD_ROUTER_PREFIXES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of one worker; what goes beyond is not remembered (and not found). 4 M blocks of 64 tokens: 2.7e8 tokens. */
#define TD_PREFIXES_MAX (1u << 22)

struct td_prefixes { /* all zero: empty */
    uint64_t *names; /* open addressing, 0: free; room is a power of two */
    uint32_t n, room;
};

void td_prefixes_deinit(struct td_prefixes *s); /* empty again */
/* In order; the lowest bit set: that block went. What finds no memory is not remembered. */
void td_prefixes_apply(struct td_prefixes *s, bool is_all, const uint64_t *changes, size_t n);
bool td_prefixes_has(const struct td_prefixes *s, uint64_t name);
/* Blocks at the beginning of names that are known. */
uint32_t td_prefixes_match(const struct td_prefixes *s, const uint64_t *names, uint32_t n);

/* The names of a prompt's blocks, for the match; they grow with its answer. */
struct td_block_names { /* all zero: none */
    uint64_t *names;
    uint32_t n, room;
    uint64_t chain[2];
};
/* Names the blocks of page_tokens that lie wholly before the last of the tokens: somebody must compute that one.
 * Without memory there are fewer. The same page_tokens every time. */
void td_block_names_extend(struct td_block_names *b, const uint32_t *tokens, uint32_t n_tokens, uint32_t page_tokens);
void td_block_names_deinit(struct td_block_names *b);

#endif
