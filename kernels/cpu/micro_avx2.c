/* The inner loops for AVX2 and FMA. */
#include "kernels/cpu/micro.h"

#if defined(__x86_64__)
/* Before the pragma: what these headers declare belongs to every processor. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define TD_LANES_AVX2
#define MICRO_TABLE td_micro_avx2
#define MICRO_NAME  "avx2"
#include "kernels/cpu/micro_body_int.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
