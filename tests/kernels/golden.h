/* The small checkpoint on the GPU against its recorded outputs. */
#ifndef TESTS_KERNELS_GOLDEN_H
#define TESTS_KERNELS_GOLDEN_H

#include "tests/kernels/pair.h"

/* Last logits of every prompt within 4e-2 of the recorded ones, KL of the next-token distribution below 3e-5 on average
 * and 5e-4 at most, greedy tokens equal wherever the recorded margin exceeds 0.2; chunked prefill too. */
void check_goldens(struct pair *p);

#endif
