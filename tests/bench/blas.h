/* OpenBLAS, if this machine has it: loaded while running, so that nothing needs it to build. */
#ifndef TESTS_BENCH_BLAS_H
#define TESTS_BENCH_BLAS_H

#include <stdint.h>

struct td_bench_blas {
    const char *config; /* which build, for which processor */
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                  const float *b, int ldb, float beta, float *c, int ldc);
};

/* NULL if it is not installed; the reason is printed. Loaded once and kept. */
const struct td_bench_blas *td_bench_blas_load(uint32_t n_threads);

/* c[m][n] = a[m][k] b[k][n], rows one after another. */
void td_bench_sgemm(const struct td_bench_blas *blas, uint32_t m, uint32_t n, uint32_t k, const float *a,
                    const float *b, float *c);

#endif
