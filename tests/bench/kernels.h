/* tandem-bench kernels: what its files share. Each file times the ops of its name on a GPU; a row is a graph of many
 * launches over buffers that rotate through more than the L2, launched again and again, of which the median is printed
 * beside the floor: bytes over the read bandwidth or operations over the tensor rate, as measured on this card. */
#ifndef TESTS_BENCH_KERNELS_H
#define TESTS_BENCH_KERNELS_H

#include "tests/bench/bench.h"
#include "tests/kernels/pair.h"

#define TD_BENCH_TB_S       4.31 /* sum over 4 GiB */
#define TD_BENCH_BF16_FLOPS 750e12
#define TD_BENCH_FP8_FLOPS  1307e12
#define TD_BENCH_MAX_TURNS  64u

struct td_bench_mode {
    const char *prefix; /* of every row */
    const char *row;    /* of the experts' rows, only those whose name has this in it; NULL: all */
    int is_short;       /* only the rows that show what a mode costs */
    int is_fp8_weights; /* of the dense rows */
    int is_profile;     /* a few bare calls, for a profiler that counts launches */
};
extern struct td_bench_mode td_bench_mode;

struct td_bench_call {
    enum td_status (*run)(struct pair *p, void *args, uint32_t turn);
    void *args;
};

/* Ends the program after a failure. */
void td_bench_gpu_must(struct pair *p, enum td_status st, const char *what);
/* Median seconds of one call. n_turns: different buffers; n: calls in a graph, a multiple of it. */
double td_bench_time(struct pair *p, struct td_bench_call c, uint32_t n_turns, uint32_t n);
void td_bench_row_bytes(const char *what, double s, double bytes);
void td_bench_row_flops(const char *what, double s, double flops);
/* Random bf16 values on the GPU, none of them zero. td_device_free releases them. */
void *td_bench_values(struct pair *p, size_t n_bf16);
/* How many buffers of so many bytes are more than the L2. */
uint32_t td_bench_turns(double bytes);

void td_bench_attention(struct pair *p);
/* One shape: seconds of a layer. */
double td_bench_attn(struct pair *p, uint32_t n_seqs, uint32_t ctx, uint32_t rows, uint32_t window, uint32_t turns,
                     uint32_t n);
void td_bench_dense(struct pair *p);
void td_bench_rows(struct pair *p);
void td_bench_sample(struct pair *p);
/* Experts in every form; opens devices of its own. */
void td_bench_experts(bool is_batch_invariant);

#endif
