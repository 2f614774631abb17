/* The inner loops for AVX-512 (F, BW, VL, DQ). */
#include "kernels/cpu/micro.h"

#if defined(__x86_64__)
/* Before the pragma: what these headers declare belongs to every processor. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))),                   \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define TD_LANES_AVX512
#define MICRO_TABLE td_micro_avx512
#define MICRO_NAME  "avx512"
#include "kernels/cpu/micro_body_int.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
