#include "common/base/token_chain.h"

#include <xxhash.h>

void td_token_chain(const uint64_t before[2], const uint32_t *tokens, uint32_t n, uint64_t out[2])
{
    XXH128_hash_t h = XXH3_128bits_withSeed(tokens, n * sizeof *tokens,
                                            before[0] ^ (before[1] << 32 | before[1] >> 32) ^ 0x9e3779b97f4a7c15ull);
    /* The seed alone carries 64 bits of what came before; the rest goes in here. */
    uint64_t low = h.low64 ^ before[1], high = h.high64 + before[0];
    out[0] = low;
    out[1] = high;
}
