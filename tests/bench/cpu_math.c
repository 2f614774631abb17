/* The CPU backend's products beside OpenBLAS, and the rate at which one row reads weights beside a plain loop that
 * reads memory. Both sides of a pair run in turn, the best of some rounds each, on the same threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "kernels/cpu/pool.h"
#include "kernels/device.h"
#include "tests/bench/bench.h"
#include "tests/bench/blas.h"

#define ROUNDS          7
#define ROUND_S         0.04 /* a round repeats its product for at least this long */
#define BF16_ABOUT_HALF 0x3f00u

struct side {
    struct td_device *device;
    struct td_stream *stream;
    const struct td_ops *ops;
    uint32_t n_threads;
};

static void open_side(struct side *s, uint32_t n_threads, const char *path)
{
    struct td_err err = {{0}};
    struct td_pool *count = NULL;
    td_bench_must(td_device_open(&(struct td_device_options){.cpu_path = path}, &s->device, &err), &err);
    td_bench_must(td_stream_create(s->device, n_threads, &s->stream), &err);
    td_bench_must(td_pool_create(n_threads, &count), &err);
    s->n_threads = td_pool_n_threads(count);
    td_pool_destroy(count);
    s->ops = td_device_ops(s->device);
}

static void close_side(struct side *s)
{
    td_stream_destroy(s->stream);
    td_device_close(s->device);
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    TD_CHECK(p != NULL);
    return p;
}

/* Numbers near 0.5 and -0.5: none is special, and any arrangement of them is a packed matrix. */
static struct td_weight make_weight(struct side *s, uint32_t n_out, uint32_t n_in)
{
    size_t bias, bytes = td_device_packed_bytes(s->device, n_out, n_in, TD_ROWS_PLAIN, &bias);
    uint16_t *w = memory(bytes);
    for (size_t i = 0, r = 1; i < bytes / 2; i++) {
        r = (uint32_t)r * 1664525u + 1013904223u;
        w[i] = (uint16_t)(BF16_ABOUT_HALF | (r >> 24 & 0x7f) | (r >> 9 & 0x8000));
    }
    return (struct td_weight){.data = w, .n_out = n_out, .n_in = n_in};
}

static float *make_rows(uint32_t n, uint32_t dim)
{
    float *x = memory((size_t)n * dim * sizeof *x);
    for (size_t i = 0, r = 7; i < (size_t)n * dim; i++) {
        r = (uint32_t)r * 1664525u + 1013904223u;
        x[i] = (float)(r >> 16) / 65536.0f - 0.5f;
    }
    return x;
}

/* ---- products -------------------------------------------------------------------------------------------------- */

/* n_pieces 0: one chain over k, as the head has it; else a sum of pieces, as the projections back have it. */
struct shape {
    const char *name;
    uint32_t rows, n_out, n_in, n_pieces;
};

static const struct shape shapes[] = {
    {"small model, q k v", 512, 2048, 288, 0},
    {"small model, heads back", 512, 288, 1024, 8},
    {"small model, gate and up", 512, 640, 288, 0},
    {"small model, down", 512, 288, 320, 8},
    {"20b, q k v", 512, 5120, 2880, 0},
    {"20b, heads back", 512, 2880, 4096, 8},
};

static void ours(struct side *s, const struct shape *p, const float *x, const struct td_weight *w, float *y)
{
    struct td_err none = {{0}};
    if (p->n_pieces == 0) {
        struct td_lm_head_args a = {.x = x, .w = *w, .logits = y, .n_rows = p->rows};
        td_bench_must(s->ops->lm_head(s->stream, &a), &none);
    } else {
        struct td_o_proj_args a = {.x = x, .w = *w, .y = y, .n_rows = p->rows};
        td_pieces_init(&a.pieces, p->n_in, p->n_pieces, 0, p->n_pieces);
        td_bench_must(s->ops->o_proj(s->stream, &a), &none);
    }
}

static void product(struct side *s, const struct td_bench_blas *blas, const struct shape *p)
{
    struct td_weight w = make_weight(s, p->n_out, p->n_in);
    float *x = make_rows(p->rows, p->n_in), *y = memory((size_t)p->rows * p->n_out * sizeof *y);
    float *b = blas == NULL ? NULL : make_rows(p->n_in, p->n_out);
    double best[2] = {1e9, 1e9}, flop = 2.0 * p->rows * p->n_out * p->n_in;
    for (int round = 0; round < ROUNDS; round++) {
        for (int side = 0; side < (blas == NULL ? 1 : 2); side++) {
            double begin = td_bench_now(), took;
            uint32_t n = 0;
            do {
                if (side == 0)
                    ours(s, p, x, &w, y);
                else
                    td_bench_sgemm(blas, p->rows, p->n_out, p->n_in, x, b, y);
                n++;
                took = td_bench_now() - begin;
            } while (took < ROUND_S);
            if (took / n < best[side]) best[side] = took / n;
        }
    }
    printf("  %-26s %4u x %4u x %4u  %7.1f GFLOP/s", p->name, p->rows, p->n_out, p->n_in, flop / best[0] / 1e9);
    if (blas != NULL) printf("   OpenBLAS %7.1f   ratio %.2f", flop / best[1] / 1e9, best[1] / best[0]);
    printf("\n");
    fflush(stdout);
    free((void *)(uintptr_t)w.data);
    free(x);
    free(y);
    free(b);
}

void td_bench_cpu_products(uint32_t n_threads, const char *path)
{
    struct side s;
    open_side(&s, n_threads, path);
    printf("products, %u threads (rows x outputs x inputs; ours f32 by bf16, OpenBLAS's f32 by f32)\n", s.n_threads);
    const struct td_bench_blas *blas = td_bench_blas_load(s.n_threads);
    if (blas != NULL) printf("  beside %s\n", blas->config);
    for (size_t i = 0; i < TD_COUNT(shapes); i++) product(&s, blas, &shapes[i]);
    close_side(&s);
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

#define READ_BLOCK (1u << 20)
typedef uint64_t word4 __attribute__((vector_size(32)));

struct reading {
    const char *from;
    size_t bytes;
    uint64_t *sums; /* one a block, so that nothing is left out as useless */
};

static void read_block(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct reading *r = ctx;
    size_t begin = (size_t)index * READ_BLOCK, n = r->bytes - begin < READ_BLOCK ? r->bytes - begin : READ_BLOCK;
    const word4 *p = (const void *)(r->from + begin), *end = p + n / sizeof *p;
    word4 sum[4] = {{0}};
    for (; p + 4 <= end; p += 4)
        for (int i = 0; i < 4; i++) sum[i] += p[i];
    word4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    r->sums[index] = all[0] + all[1] + all[2] + all[3];
}

void td_bench_cpu_memory(uint32_t n_threads, const char *path)
{
    enum { N_OUT = 1 << 16, N_IN = 2880 }; /* 377 MB: far more than any cache keeps */
    struct side s;
    struct td_pool *pool = NULL;
    struct td_err err = {{0}};
    open_side(&s, n_threads, path);
    td_bench_must(td_pool_create(n_threads, &pool), &err);
    struct td_weight w = make_weight(&s, N_OUT, N_IN);
    float *x = make_rows(1, N_IN), *y = memory(N_OUT * sizeof *y);
    struct reading r = {.from = w.data, .bytes = (size_t)N_OUT * N_IN * 2};
    uint32_t n_blocks = (uint32_t)((r.bytes + READ_BLOCK - 1) / READ_BLOCK);
    r.sums = memory(n_blocks * sizeof *r.sums);
    double best[2] = {1e9, 1e9};
    const struct shape one = {"", 1, N_OUT, N_IN, 0};
    for (int round = 0; round < ROUNDS; round++) {
        for (int side = 0; side < 2; side++) {
            double begin = td_bench_now();
            if (side == 0)
                ours(&s, &one, x, &w, y);
            else
                td_pool_run(pool, read_block, &r, n_blocks);
            double took = td_bench_now() - begin;
            if (took < best[side]) best[side] = took;
        }
    }
    printf(
        "memory, %u threads: one row by %zu MB of weights %.1f GB/s   a loop that reads them %.1f GB/s   ratio %.2f\n",
        s.n_threads, r.bytes / 1000000, (double)r.bytes / best[0] / 1e9, (double)r.bytes / best[1] / 1e9,
        best[1] / best[0]);
    td_pool_destroy(pool);
    free((void *)(uintptr_t)w.data);
    free(x);
    free(y);
    free(r.sums);
    close_side(&s);
}
