/* How fast the CPU backend runs a checkpoint: prefill, one stream, many streams. Numbers of a small shared machine are
 * only good for comparing two builds run side by side. cpu_bench [directory] [prompt tokens] [threads] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/engine/engine.h"
#include "kernels/device.h"

#define MAX_STREAMS 32u

struct bench {
    struct td_model *model;
    const struct td_model_config *c;
    struct td_engine *engine;
    struct td_engine_options o;
    uint32_t *pages; /* 0, 1, 2, ... */
    uint32_t *ids;
};

static void must(enum td_status st, const struct td_err *err)
{
    if (st == TD_OK) return;
    fprintf(stderr, "cpu_bench: %s: %s\n", td_status_name(st), err->text);
    exit(1);
}

/* Stream i owns the pages from i * per_stream on. */
static struct td_segment segment(struct bench *b, uint32_t stream, uint32_t per_stream, uint32_t start, uint32_t n)
{
    static const struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    struct td_segment s = {
        .tokens = b->ids + start, .n_tokens = n, .start = start, .want_token = true, .sampling = &greedy};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        s.table[g] = (struct td_page_table){.pages = b->pages + (size_t)stream * per_stream, .n_blocks = per_stream};
    return s;
}

static void run(struct bench *b, struct td_segment *s, uint32_t n)
{
    struct td_err none = {{0}};
    struct td_batch batch = {.segments = s, .n_segments = n};
    must(td_engine_run_now(b->engine, &batch, NULL, NULL), &none);
}

/* Wall and processor time: on a busy machine only the latter says something. */
struct watch {
    double wall, cpu;
};

static struct watch now(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (struct watch){.wall = (double)td_clock_ns() / 1e9,
                          .cpu = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                                 (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6};
}

static void keep_best(struct watch *best, struct watch begin)
{
    struct watch end = now();
    if (end.wall - begin.wall < best->wall) best->wall = end.wall - begin.wall;
    if (end.cpu - begin.cpu < best->cpu) best->cpu = end.cpu - begin.cpu;
}

static void bench_prefill(struct bench *b, uint32_t n, uint32_t chunk, uint32_t per_stream)
{
    struct watch best = {1e9, 1e9};
    for (int round = 0; round < 3; round++) {
        struct watch begin = now();
        for (uint32_t at = 0; at < n; at += chunk) {
            struct td_segment s = segment(b, 0, per_stream, at, n - at < chunk ? n - at : chunk);
            s.want_token = at + s.n_tokens == n;
            run(b, &s, 1);
        }
        keep_best(&best, begin);
    }
    printf("prefill %u tokens in chunks of %u: %.0f tokens/s, %.0f a processor second\n", n, chunk, n / best.wall,
           n / best.cpu);
}

static void bench_decode(struct bench *b, uint32_t streams, uint32_t context, uint32_t steps, uint32_t per_stream)
{
    struct td_segment s[MAX_STREAMS];
    for (uint32_t i = 0; i < streams; i++) {
        s[i] = segment(b, i, per_stream, 0, context);
        run(b, &s[i], 1);
    }
    struct watch best = {1e9, 1e9};
    for (int round = 0; round < 3; round++) {
        struct watch begin = now();
        for (uint32_t k = 0; k < steps; k++) {
            for (uint32_t i = 0; i < streams; i++) s[i] = segment(b, i, per_stream, context + k, 1);
            run(b, s, streams);
        }
        keep_best(&best, begin);
    }
    printf("decode %2u streams at %u tokens: %.0f tokens/s, %.0f a processor second, %.2f ms a step\n", streams,
           context, streams * steps / best.wall, streams * steps / best.cpu, 1e3 * best.wall / steps);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "tests/tiny/tiny-model";
    uint32_t n = argc > 2 ? (uint32_t)atoi(argv[2]) : 3000, n_threads = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    struct td_err err = {{0}};
    struct bench b = {0};
    td_log_open("cpu_bench", TD_LOG_WARN);
    if (n < 64) n = 64;
    struct td_device *device = NULL;
    must(td_device_open(&(struct td_device_options){.cpu_path = argc > 5 ? argv[5] : NULL}, &device, &err), &err);
    must(td_model_load(dir, &(struct td_model_options){.tp = 1, .device = device}, &b.model, &err), &err);
    b.c = td_model_config_of(b.model);
    uint32_t per_stream = (n + 1024) / 64 + 1, n_pages = per_stream * MAX_STREAMS;
    b.o = (struct td_engine_options){.max_batch_tokens = n,
                                     .max_batch_segments = MAX_STREAMS,
                                     .max_context_tokens = n + 1024,
                                     .n_threads = n_threads};
    b.pages = calloc(n_pages, sizeof *b.pages);
    b.ids = calloc(n + 1024, sizeof *b.ids);
    TD_CHECK(b.pages != NULL && b.ids != NULL);
    for (uint32_t i = 0; i < n_pages; i++) b.pages[i] = i;
    for (uint32_t i = 0, r = 1; i < n + 1024; i++)
        b.ids[i] = (r = r * 1664525u + 1013904223u) / 65536 % b.c->n_token_ids;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        b.o.kv[g] = (struct td_kv_group_layout){.n_layers = b.c->n_group_layers[g],
                                                .n_pages = n_pages,
                                                .n_heads = b.c->n_kv_heads,
                                                .head_dim = b.c->head_dim,
                                                .page_tokens = 64,
                                                .dtype = TD_BF16};
        b.o.kv_base[g] = calloc(td_kv_pool_bytes(&b.o.kv[g]), 1);
        TD_CHECK(b.o.kv_base[g] != NULL);
    }
    must(td_engine_create(b.model, &b.o, NULL, NULL, NULL, &b.engine, &err), &err);
    const char *only = argc > 4 ? argv[4] : "both";
    if (strcmp(only, "decode") != 0) {
        bench_prefill(&b, n, n, per_stream);
        bench_prefill(&b, n, 512, per_stream);
        bench_prefill(&b, n < 300 ? n : 300, 300, per_stream);
    }
    if (strcmp(only, "prefill") != 0) {
        bench_decode(&b, 1, 200, 100, per_stream);
        bench_decode(&b, 8, 200, 100, per_stream);
        bench_decode(&b, 32, 200, 50, per_stream);
        bench_decode(&b, 1, n, 50, per_stream);
    }
    td_engine_destroy(b.engine);
    td_model_destroy(b.model);
    td_device_close(device);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) free(b.o.kv_base[g]);
    free(b.pages);
    free(b.ids);
    return 0;
}
