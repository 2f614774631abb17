/* The GPU's draws against their definition, common/engine/sample.c. */
#ifndef TESTS_KERNELS_DRAWS_H
#define TESTS_KERNELS_DRAWS_H

#include "tests/kernels/pair.h"

void check_draws(struct pair *p);
void check_few_draws(struct pair *p); /* for a sanitizer */

#endif
