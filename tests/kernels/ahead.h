/* Decode steps of which each is begun before the one ahead of it has ended, against the same steps one by one. */
#ifndef TESTS_KERNELS_AHEAD_H
#define TESTS_KERNELS_AHEAD_H

#include "tests/kernels/pair.h"

/* The small checkpoint, sequences that come and go, every kind of draw, steps recorded or not: the same tokens. */
void check_ahead(struct pair *p);

#endif
