/* What a set of times looks like. */
#ifndef TESTS_BENCH_SPREAD_H
#define TESTS_BENCH_SPREAD_H

#include <stddef.h>

struct td_bench_spread {
    double p50, p90, p99, max, mean;
};

/* Sorts v. The p-th of n values is the one that at least p percent do not exceed. None: all zero. */
void td_bench_spread_of(double *v, size_t n, struct td_bench_spread *out);

#endif
