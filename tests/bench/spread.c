#include "tests/bench/spread.h"

#include <math.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double at(const double *v, size_t n, double share)
{
    size_t i = (size_t)ceil(share * (double)n);
    return v[i == 0 ? 0 : i - 1];
}

void td_bench_spread_of(double *v, size_t n, struct td_bench_spread *out)
{
    *out = (struct td_bench_spread){0};
    if (n == 0) return;
    qsort(v, n, sizeof *v, by_value);
    for (size_t i = 0; i < n; i++) out->mean += v[i] / (double)n;
    out->p50 = at(v, n, 0.50);
    out->p90 = at(v, n, 0.90);
    out->p99 = at(v, n, 0.99);
    out->max = v[n - 1];
}
