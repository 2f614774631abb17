#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum td_status run_sample(struct pair *p, void *args, uint32_t turn)
{
    (void)turn;
    return td_stream_sample(p->gpu_stream, args);
}

void td_bench_sample(struct pair *p)
{
    enum { V = 201088, N = 128 };
    static const struct {
        const char *name;
        struct td_sample_row row;
    } kinds[] = {
        {"greedy or by temperature", {.temperature = 1, .top_p = 1}},
        {"top-k 50", {.temperature = 1, .top_p = 1, .top_k = 50, .is_filtered = 1}},
        {"top-p 0.95", {.temperature = 1, .top_p = 0.95f, .is_filtered = 1}},
        {"top-k 50, top-p 0.95", {.temperature = 1, .top_p = 0.95f, .top_k = 50, .is_filtered = 1}},
        {"top-p 0.95, 20 likeliest listed", {.temperature = 1, .top_p = 0.95f, .n_top = 20, .is_filtered = 1}},
    };
    struct td_sample_row rows[N];
    uint32_t filtered[N];
    void *x = td_bench_values(p, (size_t)N * V * 2), *in, *out, *top, *parts, *list;
    td_bench_gpu_must(p, td_device_alloc(p->gpu, sizeof rows, &in), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, sizeof filtered, &list), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, N * sizeof(struct td_sampled), &out), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, N * TD_SAMPLE_TOPS * sizeof(struct td_sample_top), &top), "memory");
    td_bench_gpu_must(p, td_device_alloc(p->gpu, (size_t)N * TD_SAMPLE_SCRATCH, &parts), "memory");
    /* About normal, once as wide as a model's logits are, once much flatter than any. */
    float *h = malloc((size_t)N * V * sizeof *h);
    for (int wide = 1; wide >= 0; wide--) {
        for (size_t i = 0; i < (size_t)N * V; i++) h[i] = pair_random(p) * (wide ? 3.0f : 1.0f);
        td_device_upload(p->gpu, x, h, (size_t)N * V * sizeof *h);
        for (uint32_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
            for (uint32_t i = 0; i < N; i++) {
                rows[i] = kinds[k].row;
                rows[i].u = (double)i / N;
                rows[i].mask = TD_SAMPLE_NO_MASK;
                rows[i].repetition = 1;
                if (k == 0) rows[i].temperature = i % 2 ? 1.0f : 0.0f;
                filtered[i] = i;
            }
            td_device_upload(p->gpu, in, rows, sizeof rows);
            td_device_upload(p->gpu, list, filtered, sizeof filtered);
            struct td_sample_args a = {.logits = x,
                                       .rows = in,
                                       .filtered = list,
                                       .out = out,
                                       .top = top,
                                       .parts = parts,
                                       .vocab = V,
                                       .n_ids = 200019};
            static const uint32_t batches[] = {1, 32, 128};
            for (int i = 0; i < 3; i++) {
                char what[96];
                a.n_rows = batches[i];
                a.n_filtered = kinds[k].row.is_filtered ? a.n_rows : 0;
                snprintf(what, sizeof what, "draws, %s, %s, %u rows", kinds[k].name, wide ? "s 3" : "s 1", batches[i]);
                td_bench_row_bytes(what, td_bench_time(p, (struct td_bench_call){run_sample, &a}, 1, 20),
                                   (double)batches[i] * V * 4);
            }
        }
    }
    free(h);
    td_device_free(p->gpu, x), td_device_free(p->gpu, in), td_device_free(p->gpu, out), td_device_free(p->gpu, parts);
    td_device_free(p->gpu, top), td_device_free(p->gpu, list);
}
