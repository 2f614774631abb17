/* tandem-bench cpu: how fast the CPU backend runs a checkpoint (a prompt, one stream, many streams), then its products
 * and its weight reading beside OpenBLAS and a loop that reads memory (cpu_math.c). A processor second counts what all
 * threads used: on a busy machine it says more than the clock on the wall. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/engine/engine.h"
#include "kernels/device.h"
#include "tests/bench/bench.h"

#define MAX_STREAMS 32u
#define SPARE       1024u /* tokens that a stream may still write */
#define ROUNDS      3

struct bench {
    struct td_device *device;
    struct td_model *model;
    struct td_engine *engine;
    struct td_engine_options o;
    uint32_t *pages; /* 0, 1, 2, ... */
    uint32_t *ids;
    uint32_t per_stream; /* pages of a stream */
};

/* Stream i owns the pages from i * per_stream on. */
static struct td_segment segment(struct bench *b, uint32_t stream, uint32_t start, uint32_t n)
{
    static const struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    struct td_segment s = {
        .tokens = b->ids + start, .n_tokens = n, .start = start, .want_token = true, .sampling = &greedy};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        s.table[g] =
            (struct td_page_table){.pages = b->pages + (size_t)stream * b->per_stream, .n_blocks = b->per_stream};
    return s;
}

static void run(struct bench *b, struct td_segment *s, uint32_t n)
{
    struct td_err none = {{0}};
    struct td_batch batch = {.segments = s, .n_segments = n};
    td_bench_must(td_engine_run_now(b->engine, &batch, NULL, NULL), &none);
}

/* Wall and processor time: on a busy machine only the latter says something. */
struct watch {
    double wall, cpu;
};

static struct watch now(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (struct watch){.wall = td_bench_now(),
                          .cpu = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                                 (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6};
}

static void keep_best(struct watch *best, struct watch begin)
{
    struct watch end = now();
    if (end.wall - begin.wall < best->wall) best->wall = end.wall - begin.wall;
    if (end.cpu - begin.cpu < best->cpu) best->cpu = end.cpu - begin.cpu;
}

static void bench_prefill(struct bench *b, uint32_t n, uint32_t chunk)
{
    struct watch best = {1e9, 1e9};
    for (int round = 0; round < ROUNDS; round++) {
        struct watch begin = now();
        for (uint32_t at = 0; at < n; at += chunk) {
            struct td_segment s = segment(b, 0, at, n - at < chunk ? n - at : chunk);
            s.want_token = at + s.n_tokens == n;
            run(b, &s, 1);
        }
        keep_best(&best, begin);
    }
    printf("prefill %u tokens in chunks of %u: %.0f tokens/s, %.0f a processor second\n", n, chunk, n / best.wall,
           n / best.cpu);
}

static void bench_decode(struct bench *b, uint32_t streams, uint32_t context, uint32_t steps)
{
    struct td_segment s[MAX_STREAMS];
    for (uint32_t i = 0; i < streams; i++) {
        s[i] = segment(b, i, 0, context);
        run(b, &s[i], 1);
    }
    struct watch best = {1e9, 1e9};
    for (int round = 0; round < ROUNDS; round++) {
        struct watch begin = now();
        for (uint32_t k = 0; k < steps; k++) {
            for (uint32_t i = 0; i < streams; i++) s[i] = segment(b, i, context + k, 1);
            run(b, s, streams);
        }
        keep_best(&best, begin);
    }
    printf("decode %2u streams at %u tokens: %.0f tokens/s, %.0f a processor second, %.2f ms a step\n", streams,
           context, streams * steps / best.wall, streams * steps / best.cpu, 1e3 * best.wall / steps);
}

/* Engine and pages for a prompt of n tokens, and MAX_STREAMS contexts of that length. */
static void open_bench(struct bench *b, const char *dir, const char *path, uint32_t n, uint32_t n_threads)
{
    struct td_err err = {{0}};
    td_bench_must(td_device_open(&(struct td_device_options){.cpu_path = path}, &b->device, &err), &err);
    td_bench_must(td_model_load(dir, &(struct td_model_options){.tp = 1, .device = b->device}, &b->model, &err), &err);
    const struct td_model_config *c = td_model_config_of(b->model);
    uint32_t n_pages = b->per_stream * MAX_STREAMS;
    b->o = (struct td_engine_options){.max_batch_tokens = n,
                                      .max_batch_segments = MAX_STREAMS,
                                      .max_context_tokens = n + SPARE,
                                      .n_threads = n_threads};
    b->pages = calloc(n_pages, sizeof *b->pages);
    b->ids = calloc(n + SPARE, sizeof *b->ids);
    TD_CHECK(b->pages != NULL && b->ids != NULL);
    for (uint32_t i = 0; i < n_pages; i++) b->pages[i] = i;
    for (uint32_t i = 0, r = 1; i < n + SPARE; i++)
        b->ids[i] = (r = r * 1664525u + 1013904223u) / 65536 % c->n_token_ids;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        b->o.kv[g] = (struct td_kv_group_layout){.n_layers = c->n_group_layers[g],
                                                 .n_pages = n_pages,
                                                 .n_heads = c->n_kv_heads,
                                                 .head_dim = c->head_dim,
                                                 .page_tokens = 64,
                                                 .dtype = TD_BF16};
        b->o.kv_base[g] = calloc(td_kv_pool_bytes(&b->o.kv[g]), 1);
        TD_CHECK(b->o.kv_base[g] != NULL);
    }
    td_bench_must(td_engine_create(b->model, &b->o, NULL, NULL, NULL, &b->engine, &err), &err);
}

static void close_bench(struct bench *b)
{
    td_engine_destroy(b->engine);
    td_model_destroy(b->model);
    td_device_close(b->device);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) free(b->o.kv_base[g]);
    free(b->pages);
    free(b->ids);
}

int td_bench_cpu(int argc, char **argv)
{
    const char *dir = "tests/tiny/tiny-model", *path = NULL, *only = NULL;
    uint32_t n = 3000, chunk = 512, n_threads = 0;
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"prompt", required_argument, NULL, 'n'},
                                            {"chunk", required_argument, NULL, 'c'},
                                            {"threads", required_argument, NULL, 't'},
                                            {"path", required_argument, NULL, 'p'},
                                            {"only", required_argument, NULL, 'o'},
                                            {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'm': dir = optarg; break;
        case 'n': n = td_bench_number("prompt", optarg, 64); break;
        case 'c': chunk = td_bench_number("chunk", optarg, 1); break;
        case 't': n_threads = td_bench_number("threads", optarg, 0); break;
        case 'p': path = optarg; break;
        case 'o': only = optarg; break;
        default: return 2;
        }
    static const char *const parts[] = {"prefill", "decode", "products", "memory"};
    bool runs[TD_COUNT(parts)], is_known = only == NULL && optind == argc;
    for (size_t i = 0; i < TD_COUNT(parts); i++) {
        runs[i] = only == NULL || strcmp(only, parts[i]) == 0;
        is_known |= runs[i] && optind == argc;
    }
    if (!is_known) {
        fprintf(stderr, "tandem-bench cpu: %s%s\n",
                optind < argc ? "no such argument: " : "--only prefill, decode, products or memory, not ",
                optind < argc ? argv[optind] : only);
        return 2;
    }
    if (runs[0] || runs[1]) {
        struct bench b = {.per_stream = (n + SPARE) / 64 + 1};
        open_bench(&b, dir, path, n, n_threads);
        if (runs[0]) {
            bench_prefill(&b, n, n);
            if (chunk < n) bench_prefill(&b, n, chunk);
        }
        if (runs[1]) {
            bench_decode(&b, 1, 200, 100);
            bench_decode(&b, 8, 200, 100);
            bench_decode(&b, 32, 200, 50);
            bench_decode(&b, 1, n, 50);
        }
        close_bench(&b);
    }
    if (runs[2]) td_bench_cpu_products(n_threads, path);
    if (runs[3]) td_bench_cpu_memory(n_threads, path);
    return 0;
}
