#include "kernels/cpu/micro.h"

#include <stddef.h>
#include <string.h>

const struct td_micro *td_micro_find(const char *name)
{
#if defined(__x86_64__)
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512 && (name == NULL || strcmp(name, "avx512") == 0)) return &td_micro_avx512;
    if (has_avx2 && (name == NULL || strcmp(name, "avx2") == 0)) return &td_micro_avx2;
#endif
    if (name == NULL || strcmp(name, "scalar") == 0) return &td_micro_scalar;
    return NULL;
}
