/* --batch-invariant: a row's bits do not depend on what else is in the batch, nor on how its sequence was cut. */
#ifndef TESTS_KERNELS_INVARIANCE_H
#define TESTS_KERNELS_INVARIANCE_H

#include "tests/kernels/pair.h"

/* On a device of its own; what it counts goes to p. */
void check_invariance(struct pair *p);

#endif
