/* tandem-bench: what Tandem's parts reach, beside what they are measured by, in the same run. A subcommand is a row of
 * commands.def and a function in a file of its name. Nothing here is a test: a busy machine changes every figure, which
 * is why each stands beside another one. */
#ifndef TESTS_BENCH_BENCH_H
#define TESTS_BENCH_BENCH_H

#include <stdint.h>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "kernels/device.h"

/* argv[0] is the subcommand. Exit status: 0, 1 after a failure that was told, 2 after a wrong argument. */
#define X(name, arguments, meaning) int td_bench_##name(int argc, char **argv);
#include "tests/bench/commands.def"
#undef X

static inline double td_bench_now(void) { return (double)td_clock_ns() / 1e9; }

/* Says what failed and ends the program: a benchmark has nothing to go on with. */
void td_bench_must(enum td_status st, const struct td_err *err);

/* A whole number from an option, at least `least`; otherwise the program ends with 2. */
uint32_t td_bench_number(const char *option, const char *text, uint32_t least);

/* --moe-weights: bf16, fp8 or mxfp4; otherwise the program ends with 2. */
enum td_expert_form td_bench_expert_form(const char *text);

/* Products and memory of the CPU backend beside OpenBLAS and a loop that reads (cpu_math.c). n_threads 0: as many as
 * the process may use; path NULL: the best the processor has. */
void td_bench_cpu_products(uint32_t n_threads, const char *path);
void td_bench_cpu_memory(uint32_t n_threads, const char *path);

#endif
