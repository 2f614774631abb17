#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_fp8; /* pages of the rows */

struct attn {
    struct td_attention_args a;
    size_t q_step, layers; /* turns walk the layers of the pool */
};

static enum td_status run_attn(struct pair *p, void *args, uint32_t turn)
{
    struct attn *t = args;
    struct td_attention_args a = t->a;
    a.kv.layer = turn;
    return p->gpu_ops->attention(p->gpu_stream, &a);
}

double td_bench_attn(struct pair *p, uint32_t n_seqs, uint32_t ctx, uint32_t rows, uint32_t window, uint32_t turns,
                     uint32_t n)
{
    enum { NQ = 64, NKV = 8, P = 64 };
    uint32_t n_blocks = (ctx + P - 1) / P, n_pages = n_blocks * n_seqs;
    struct td_kv_group_layout l = {.n_layers = turns,
                                   .n_pages = n_pages,
                                   .n_heads = NKV,
                                   .head_dim = 64,
                                   .page_tokens = P,
                                   .dtype = is_fp8 ? TD_E4M3 : TD_BF16};
    struct td_seq_rows *seqs = calloc(n_seqs, sizeof *seqs);
    uint32_t *pages = malloc(n_pages * sizeof *pages);
    for (uint32_t i = 0; i < n_pages; i++) pages[i] = (uint32_t)(((uint64_t)i * 7919 + 11) % n_pages);
    if (n_pages % 7919 == 0) exit(1);
    for (uint32_t i = 0; i < n_seqs; i++)
        seqs[i] = (struct td_seq_rows){
            .row = i * rows, .n_rows = rows, .start = ctx - rows, .pages = i * n_blocks, .fresh = ctx - rows};
    float sinks[NQ];
    for (uint32_t i = 0; i < NQ; i++) sinks[i] = pair_random(p);
    void *d_seqs, *d_pages, *d_sinks, *out;
    td_bench_gpu_must(p, td_device_alloc(p->gpu, n_seqs * sizeof *seqs, &d_seqs), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, n_pages * 4ul, &d_pages), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, sizeof sinks, &d_sinks), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, (size_t)n_seqs * rows * NQ * 64 * 2, &out), "memory");
    td_device_upload(p->gpu, d_seqs, seqs, n_seqs * sizeof *seqs);
    td_device_upload(p->gpu, d_pages, pages, n_pages * 4ul);
    td_device_upload(p->gpu, d_sinks, sinks, sizeof sinks);
    const size_t scratch_bytes = is_fp8 && rows > 1 ? td_kv_layer_bytes(&l) * 2 : 16; /* pages widened */
    void *scratch;
    td_bench_gpu_must(p, td_device_alloc(p->gpu, scratch_bytes, &scratch), "memory");
    struct attn t = {.a = {.kv = {.layout = l},
                           .seqs = d_seqs,
                           .seqs_host = seqs,
                           .scratch = scratch,
                           .scratch_bytes = scratch_bytes,
                           .pages = d_pages,
                           .n_seqs = n_seqs,
                           .n_rows = n_seqs * rows,
                           .n_single = rows == 1 ? n_seqs : 0,
                           .sinks = d_sinks,
                           .out = out,
                           .n_heads = NQ,
                           .n_kv_heads = NKV,
                           .head_dim = 64,
                           .window = window,
                           .scale = 0.125f}};
    void *q = td_bench_values(p, (size_t)n_seqs * rows * NQ * 64);
    t.a.q = q;
    t.a.kv.pool = td_bench_values(p, td_kv_pool_bytes(&l) / 2);
    double s = td_bench_time(p, (struct td_bench_call){run_attn, &t}, turns, n);
    td_device_free(p->gpu, t.a.kv.pool);
    td_device_free(p->gpu, scratch);
    td_device_free(p->gpu, q);
    td_device_free(p->gpu, out);
    td_device_free(p->gpu, d_seqs);
    td_device_free(p->gpu, d_pages);
    td_device_free(p->gpu, d_sinks);
    free(seqs);
    free(pages);
    return s;
}

void td_bench_attention(struct pair *p)
{
    char what[96];
    static const uint32_t lengths[] = {2048, 8192, 32768};
    double full_8k = 0;
    for (int i = 0; i < 3 && !td_bench_mode.is_short; i++) {
        double t = lengths[i], s = td_bench_attn(p, 1, lengths[i], lengths[i], 0, 4, i == 2 ? 4 : 12);
        snprintf(what, sizeof what, "prefill attention, full, %u tokens", lengths[i]);
        td_bench_row_flops(what, s, 2.0 * t * (t + 1) * 64 * 64);
        if (i == 1) full_8k = s;
    }
    double s = td_bench_mode.is_short ? 0 : td_bench_attn(p, 1, 8192, 8192, 128, 4, 12);
    if (!td_bench_mode.is_short)
        printf("%-52s %9.1f us  %.1f %% of the full layer's\n", "prefill attention, window, 8192 tokens", s * 1e6,
               100 * s / full_8k);
    if (!td_bench_mode.is_short) {
        is_fp8 = 1;
        s = td_bench_attn(p, 1, 8192, 8192, 0, 4, 12);
        is_fp8 = 0;
        td_bench_row_flops("prefill attention, full, FP8 pages, 8192 tokens", s, 2.0 * 8192 * 8193 * 64 * 64);
    }
    static const uint32_t shapes[][2] = {{1, 1024},  {1, 8192},   {1, 32768}, {8, 8192},
                                         {32, 8192}, {128, 8192}, {32, 1024}, {128, 1024}};
    for (int i = td_bench_mode.is_short ? 6 : 0; i < 8; i++) {
        double bytes = (double)shapes[i][0] * shapes[i][1] * 2048;
        uint32_t turns = td_bench_turns(bytes);
        snprintf(what, sizeof what, "decode attention, full, %u x %u", shapes[i][0], shapes[i][1]);
        td_bench_row_bytes(
            what,
            td_bench_attn(p, shapes[i][0], shapes[i][1], 1, 0, turns, turns < 20 ? 20 / turns * turns + turns : turns),
            bytes);
    }
    for (int i = 2; i < 8 && !td_bench_mode.is_short; i++) {
        double bytes = (double)shapes[i][0] * shapes[i][1] * 1024;
        uint32_t turns = td_bench_turns(bytes), n = turns < 20 ? 20 / turns * turns + turns : turns;
        is_fp8 = 1;
        snprintf(what, sizeof what, "decode attention, FP8 pages, %u x %u", shapes[i][0], shapes[i][1]);
        td_bench_row_bytes(what, td_bench_attn(p, shapes[i][0], shapes[i][1], 1, 0, turns, n), bytes);
        is_fp8 = 0;
    }
    static const uint32_t batches[] = {1, 32, 128};
    for (int i = 0; i < 3; i++) {
        double bytes = (double)batches[i] * 128 * 2048;
        snprintf(what, sizeof what, "decode attention, window, %u x 1000", batches[i]);
        td_bench_row_bytes(what, td_bench_attn(p, batches[i], 1000, 1, 128, 16, 32), bytes);
    }
}
