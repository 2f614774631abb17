/* Random numbers without hidden state. Philox4x32-10 (Salmon et al., SC'11): draw i of a seed is a pure function of
 * (seed, i), so a prefill and a decode worker give the same draw for the same request and index. */
#ifndef TD_BASE_RNG_H
#define TD_BASE_RNG_H
#include <stdint.h>
void td_rng_philox(uint64_t seed, uint64_t counter, uint32_t lane, uint32_t out[4]);
double td_rng_uniform(uint64_t seed, uint64_t counter, uint32_t lane); /* [0, 1), 53 bits */
uint64_t td_rng_system(void);                                          /* from the kernel: ids, default seeds */
#endif
