#include "common/base/rng.h"

#include <sys/random.h>
#include <unistd.h>

#include "common/base/check.h"

void td_rng_philox(uint64_t seed, uint64_t counter, uint32_t lane, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = lane, c3 = 0;
    for (int round = 0; round < 10; round++) { /* multipliers and Weyl constants from the paper */
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)p1;
        c2 = n2;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double td_rng_uniform(uint64_t seed, uint64_t counter, uint32_t lane)
{
    uint32_t r[4];
    td_rng_philox(seed, counter, lane, r);
    uint64_t bits = ((uint64_t)r[0] << 32 | r[1]) >> 11;
    return (double)bits * 0x1p-53;
}

uint64_t td_rng_system(void)
{
    uint64_t v = 0;
    ssize_t n;
    do {
        n = getrandom(&v, sizeof v, 0);
    } while (n != (ssize_t)sizeof v);
    return v;
}
