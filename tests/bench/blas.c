#include "tests/bench/blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cblas.h's numbers. */
enum { ROW_MAJOR = 101, NO_TRANS = 111 };

/* A function from a data pointer, as dlsym gives it. */
static void take(void *library, const char *name, void *to)
{
    void *p = dlsym(library, name);
    memcpy(to, &p, sizeof p);
}

const struct td_bench_blas *td_bench_blas_load(uint32_t n_threads)
{
    static struct td_bench_blas blas;
    if (blas.sgemm == NULL) {
        /* A type forced from outside would make it run another processor's kernels. */
        unsetenv("OPENBLAS_CORETYPE");
        void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            printf("OpenBLAS: not installed, so nothing beside it (Debian package libopenblas0-pthread): %s\n",
                   dlerror());
            return NULL;
        }
        char *(*config)(void) = NULL;
        void (*set_threads)(int) = NULL;
        take(library, "openblas_get_config", &config);
        take(library, "openblas_set_num_threads", &set_threads);
        take(library, "cblas_sgemm", &blas.sgemm);
        if (blas.sgemm == NULL || set_threads == NULL) {
            printf("OpenBLAS: the library that is installed has no cblas_sgemm\n");
            blas.sgemm = NULL;
            return NULL;
        }
        set_threads((int)n_threads);
        blas.config = config == NULL ? "unknown build" : config();
    }
    return &blas;
}

void td_bench_sgemm(const struct td_bench_blas *blas, uint32_t m, uint32_t n, uint32_t k, const float *a,
                    const float *b, float *c)
{
    blas->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, (int)m, (int)n, (int)k, 1.0f, a, (int)k, b, (int)n, 0.0f, c, (int)n);
}
