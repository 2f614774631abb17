/* What goes beside the ops: scatters on a side stream, and who is told of them. */
#ifndef TESTS_KERNELS_MOVES_H
#define TESTS_KERNELS_MOVES_H

#include "tests/kernels/pair.h"

void check_moves(struct pair *p);

#endif
