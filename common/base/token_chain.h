/* Names of beginnings: a block of tokens is named by a hash over itself and, chained, all blocks before it. Workers
 * name the pages of their prefix caches so, the router the beginnings of prompts; both must find the same. Pure. */
#ifndef TD_BASE_TOKEN_CHAIN_H
#define TD_BASE_TOKEN_CHAIN_H

#include <stdint.h>

/* out: the name of the block of n tokens behind the block named `before` ({0, 0}: it is the first). */
void td_token_chain(const uint64_t before[2], const uint32_t *tokens, uint32_t n, uint64_t out[2]);

/* What a worker tells a router of a block: half of its name. The lowest bit is free to say that the block went. */
static inline uint64_t td_token_chain_short(const uint64_t name[2]) { return name[0] & ~UINT64_C(1); }

#endif
