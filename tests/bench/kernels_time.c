#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_bench_mode td_bench_mode = {.prefix = ""};

#define L2_BYTES (256u << 20) /* rotate through at least this */

void td_bench_gpu_must(struct pair *p, enum td_status st, const char *what)
{
    if (st == TD_OK) return;
    printf("tandem-bench: %s: %s %s\n", what, td_status_name(st), td_device_last_error(p->gpu));
    exit(1);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double td_bench_time(struct pair *p, struct td_bench_call c, uint32_t n_turns, uint32_t n)
{
    for (uint32_t i = 0; i < 3 && td_bench_mode.is_profile; i++)
        td_bench_gpu_must(p, c.run(p, c.args, i % n_turns), "call");
    if (td_bench_mode.is_profile) {
        td_bench_gpu_must(p, td_stream_sync(p->gpu_stream), "call");
        return 1;
    }
    struct td_graph *g = NULL;
    double t[9];
    for (uint32_t i = 0; i < n_turns; i++) td_bench_gpu_must(p, c.run(p, c.args, i), "warm-up");
    td_bench_gpu_must(p, td_stream_sync(p->gpu_stream), "warm-up");
    td_bench_gpu_must(p, td_graph_begin(p->gpu_stream), "capture");
    for (uint32_t i = 0; i < n; i++) td_bench_gpu_must(p, c.run(p, c.args, i % n_turns), "capture");
    td_bench_gpu_must(p, td_graph_end(p->gpu_stream, &g), "capture");
    for (int k = -2; k < 9; k++) {
        double begun = td_bench_now();
        td_bench_gpu_must(p, td_graph_launch(p->gpu_stream, g), "graph");
        td_bench_gpu_must(p, td_stream_sync(p->gpu_stream), "graph");
        if (k >= 0) t[k] = (td_bench_now() - begun) / n;
    }
    td_graph_destroy(p->gpu, g);
    qsort(t, 9, sizeof t[0], by_value);
    return t[4];
}

void td_bench_row_bytes(const char *what, double s, double bytes)
{
    double floor_s = bytes / (TD_BENCH_TB_S * 1e12);
    printf("%s%-52s %9.2f us  floor %8.2f us  %5.1f %%  %6.2f TB/s\n", td_bench_mode.prefix, what, s * 1e6,
           floor_s * 1e6, 100 * floor_s / s, bytes / s * 1e-12);
    fflush(stdout);
}

void td_bench_row_flops(const char *what, double s, double flops)
{
    printf("%s%-52s %9.1f us  floor %8.1f us  %5.1f %%  %6.1f TFLOP/s\n", td_bench_mode.prefix, what, s * 1e6,
           flops / TD_BENCH_BF16_FLOPS * 1e6, 100 * flops / TD_BENCH_BF16_FLOPS / s, flops / s * 1e-12);
    fflush(stdout);
}

void *td_bench_values(struct pair *p, size_t n_bf16)
{
    void *out;
    static uint16_t block[1 << 20];
    if (block[0] == 0)
        for (size_t i = 0; i < sizeof block / 2; i++) {
            float f = pair_random(p);
            uint32_t bits;
            memcpy(&bits, &f, 4);
            block[i] = (uint16_t)(bits >> 16 | 1);
        }
    td_bench_gpu_must(p, td_device_alloc(p->gpu, n_bf16 * 2, &out), "memory");
    for (size_t at = 0; at < n_bf16; at += sizeof block / 2) {
        size_t m = n_bf16 - at < sizeof block / 2 ? n_bf16 - at : sizeof block / 2;
        td_bench_gpu_must(p, td_device_upload(p->gpu, (uint16_t *)out + at, block, m * 2), "upload");
    }
    return out;
}

uint32_t td_bench_turns(double bytes)
{
    double n = ceil(L2_BYTES / bytes);
    return n < 1 ? 1 : n > TD_BENCH_MAX_TURNS ? TD_BENCH_MAX_TURNS : (uint32_t)n;
}
