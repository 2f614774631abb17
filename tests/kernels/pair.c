#include "tests/kernels/pair.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

#define GUARD 4096u

static void must(enum td_status st, const char *what)
{
    if (st == TD_OK) return;
    fprintf(stderr, "cuda_test: %s: %s\n", what, td_status_name(st));
    exit(1);
}

int pair_open(struct pair *p) { return pair_open_as(p, &(struct td_device_options){.backend = "cuda"}); }

int pair_open_as(struct pair *p, const struct td_device_options *gpu)
{
    struct td_err err = {0};
    *p = (struct pair){.seed = 1};
    struct td_device_options cpu = {0};
    must(td_device_open(&cpu, &p->cpu, &err), "the CPU's device");
    if (td_device_open(gpu, &p->gpu, &err) != TD_OK) {
        fprintf(stderr, "cuda_test: %s\n", err.text);
        td_device_close(p->cpu);
        return 0;
    }
    must(td_stream_create(p->cpu, 0, &p->cpu_stream), "the CPU's stream");
    must(td_stream_create(p->gpu, 0, &p->gpu_stream), "the GPU's stream");
    p->cpu_ops = td_device_ops(p->cpu);
    p->gpu_ops = td_device_ops(p->gpu);
    return 1;
}

void pair_close(struct pair *p)
{
    pair_free_all(p);
    td_stream_destroy(p->cpu_stream);
    td_stream_destroy(p->gpu_stream);
    td_device_close(p->cpu);
    td_device_close(p->gpu);
}

void pair_fail(struct pair *p, const char *format, ...)
{
    p->n_failed++;
    if (p->is_quiet) return;
    va_list args;
    va_start(args, format);
    printf("  ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

float pair_random(struct pair *p)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        p->seed = p->seed * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(p->seed >> 40) / 16777216.0f - 0.5f;
    }
    return sum * 1.7f;
}

static size_t cpu_size(enum kind k) { return k == RAW ? 1 : 4; }
static size_t gpu_size(enum kind k) { return k == RAW ? 1 : k == ACT ? 2 : 4; }

static struct both make(struct pair *p, enum kind kind, size_t n)
{
    struct both b = {.kind = kind, .n = n};
    void *gpu;
    if (p->n_list == sizeof p->list / sizeof p->list[0]) must(TD_E_NO_MEMORY, "too many buffers");
    must(td_device_alloc(p->cpu, n * cpu_size(kind), &b.cpu), "a buffer");
    must(td_device_alloc(p->gpu, n * gpu_size(kind) + 2 * GUARD, &gpu), "a buffer");
    b.gpu = (char *)gpu + GUARD;
    p->list[p->n_list++] = b;
    return b;
}

/* From the CPU's side, or all NaN, between guards of 0xa5. */
static void fill_gpu(struct pair *p, const struct both *b, int is_out)
{
    size_t bytes = b->n * gpu_size(b->kind);
    char *h = malloc(bytes + 2 * GUARD);
    if (h == NULL) must(TD_E_NO_MEMORY, "a buffer");
    memset(h, 0xa5, bytes + 2 * GUARD);
    if (is_out)
        memset(h + GUARD, 0xff, bytes);
    else if (b->kind == ACT)
        for (size_t i = 0; i < b->n; i++) ((uint16_t *)(void *)(h + GUARD))[i] = to_bf16(((const float *)b->cpu)[i]);
    else
        memcpy(h + GUARD, b->cpu, bytes);
    must(td_device_upload(p->gpu, b->gpu - GUARD, h, bytes + 2 * GUARD), "upload");
    free(h);
}

struct both pair_values(struct pair *p, enum kind kind, size_t n, float scale)
{
    struct both b = make(p, kind, n);
    for (size_t i = 0; i < n; i++) {
        float v = pair_random(p) * scale;
        if (i % 256 == 77) v *= 8;
        ((float *)b.cpu)[i] = kind == ACT ? from_bf16(to_bf16(v)) : v;
    }
    fill_gpu(p, &b, 0);
    return b;
}

struct both pair_out(struct pair *p, enum kind kind, size_t n)
{
    struct both b = make(p, kind, n);
    memset(b.cpu, 0xff, n * cpu_size(kind));
    fill_gpu(p, &b, 1);
    return b;
}

struct both pair_raw(struct pair *p, const void *host, size_t bytes)
{
    struct both b = make(p, RAW, bytes);
    memcpy(b.cpu, host, bytes);
    fill_gpu(p, &b, 0);
    return b;
}

struct both pair_u32(struct pair *p, const uint32_t *values, size_t n)
{
    struct both b = make(p, U32, n);
    memcpy(b.cpu, values, n * sizeof *values);
    fill_gpu(p, &b, 0);
    return b;
}

static void pack(struct pair *p, struct td_device *d, struct td_stream *s, const struct td_pack_weight_args *from,
                 struct td_weight *out)
{
    size_t bias_bytes, bytes = td_device_packed_bytes(d, from->n_out, from->n_in, from->order, &bias_bytes);
    struct td_pack_weight_args a = *from;
    void *data, *bias = NULL;
    must(td_device_alloc(d, bytes, &data), "a matrix");
    if (a.bias != NULL) must(td_device_alloc(d, bias_bytes, &bias), "a bias");
    a.out = data;
    a.bias_out = bias;
    must(td_device_ops(d)->pack_weight(s, &a), "pack_weight");
    *out = (struct td_weight){.data = data, .bias = bias, .n_out = a.n_out, .n_in = a.n_in};
    /* Freed with the buffers: two entries, one side each. */
    struct both *b = &p->list[p->n_list++];
    if (p->n_list > sizeof p->list / sizeof p->list[0]) must(TD_E_NO_MEMORY, "too many buffers");
    *b = d == p->cpu ? (struct both){.kind = F32, .cpu = data, .gpu = NULL}
                     : (struct both){.kind = RAW, .gpu = (char *)data + GUARD};
    if (bias == NULL) return;
    b = &p->list[p->n_list++];
    *b = d == p->cpu ? (struct both){.kind = F32, .cpu = bias, .gpu = NULL}
                     : (struct both){.kind = RAW, .gpu = (char *)bias + GUARD};
}

void pair_weight(struct pair *p, uint32_t n_out, uint32_t n_in, enum td_row_order order, int has_bias, float scale,
                 struct td_weight *cpu, struct td_weight *gpu)
{
    size_t n = (size_t)n_out * n_in;
    uint16_t *w = malloc(n * sizeof *w);
    float *bias = malloc(n_out * sizeof *bias);
    if (w == NULL || bias == NULL) must(TD_E_NO_MEMORY, "a matrix");
    for (size_t i = 0; i < n; i++) w[i] = to_bf16(pair_random(p) * scale);
    for (size_t i = 0; i < n && p->is_e4m3 && order == TD_ROWS_DENSE; i++) { /* rows with a scale of 2^-11 */
        float v = from_bf16(w[i]) * 2048.0f;
        w[i] = to_bf16(td_e4m3_decode(td_e4m3_encode(i % n_in == 5 ? 448.0f : v)) / 2048.0f);
    }
    for (uint32_t i = 0; i < n_out; i++) bias[i] = from_bf16(to_bf16(pair_random(p)));
    struct td_pack_weight_args a = {.source = TD_SRC_BF16_ROWS,
                                    .order = order,
                                    .data = w,
                                    .ld = n_in,
                                    .n_out = n_out,
                                    .n_in = n_in,
                                    .bias = has_bias ? bias : NULL};
    pack(p, p->cpu, p->cpu_stream, &a, cpu);
    pack(p, p->gpu, p->gpu_stream, &a, gpu);
    free(w);
    free(bias);
}

void pair_free_all(struct pair *p)
{
    for (uint32_t i = 0; i < p->n_list; i++) {
        td_device_free(p->cpu, p->list[i].cpu);
        if (p->list[i].gpu != NULL) td_device_free(p->gpu, p->list[i].gpu - GUARD);
    }
    p->n_list = 0;
}

/* The GPU's bytes on the host, guards checked. */
static char *fetch(struct pair *p, const struct both *b, const char *what)
{
    size_t bytes = b->n * gpu_size(b->kind);
    char *h = malloc(bytes + 2 * GUARD);
    if (h == NULL) must(TD_E_NO_MEMORY, "a buffer");
    enum td_status st = td_stream_sync(p->gpu_stream);
    if (st == TD_OK) st = td_device_download(p->gpu, h, b->gpu - GUARD, bytes + 2 * GUARD);
    if (st != TD_OK) {
        fprintf(stderr, "cuda_test: %s: %s: %s\n", what, td_status_name(st), td_device_last_error(p->gpu));
        exit(1); /* nothing after a device fault means anything */
    }
    p->n_checks++;
    for (size_t i = 0; i < GUARD; i++)
        if ((uint8_t)h[i] != 0xa5 || (uint8_t)h[GUARD + bytes + i] != 0xa5) {
            pair_fail(p, "%s: wrote outside its buffer, %s", what, (uint8_t)h[i] != 0xa5 ? "before" : "behind");
            break;
        }
    memmove(h, h + GUARD, bytes);
    return h;
}

/* Share of the allowance. */
static double measure(struct pair *p, const struct both *b, uint32_t dim, double allowed, const char *what,
                      size_t *worst_row)
{
    char *h = fetch(p, b, what);
    const float *want = b->cpu;
    double worst = 0, all_num = 0, all_den = 0;
    size_t n_rows = b->n / dim;
    *worst_row = 0;
    for (size_t r = 0; r < n_rows; r++) {
        double num = 0, den = 0, largest = 0, off = 0;
        for (size_t i = r * dim; i < (r + 1) * dim; i++) {
            double have = b->kind == ACT ? from_bf16(((const uint16_t *)(void *)h)[i]) : ((const float *)(void *)h)[i];
            double d = have - want[i];
            num += d * d;
            den += (double)want[i] * want[i];
            largest = fmax(largest, fabs((double)want[i]));
            if (!(fabs(d) <= off)) off = fabs(d); /* NaN stays */
        }
        all_num += num;
        all_den += den;
        /* A row whose terms cancel may be off by more of its own size, but not the whole. */
        double share = fmax(sqrt(num / fmax(den, 1e-30)) / 2, off / (16 * fmax(largest, 1e-30))) / allowed;
        if (isnan(num) || isnan(den)) share = INFINITY;
        if (share > worst) {
            worst = share;
            *worst_row = r;
        }
    }
    free(h);
    return fmax(worst, sqrt(all_num / fmax(all_den, 1e-30)) / allowed);
}

void pair_compare(struct pair *p, const struct both *b, uint32_t dim, double allowed, const char *what)
{
    size_t row;
    double share = measure(p, b, dim, allowed, what, &row);
    if (share > p->worst) p->worst = share;
    if (share > 1) {
        pair_fail(p, "%s: row %zu of %zu is off by %.3g of what is allowed (%.1g)", what, row, b->n / dim, share,
                  allowed);
    }
}

void pair_differs(struct pair *p, const struct both *b, uint32_t dim, double allowed, const char *mistake,
                  const char *what)
{
    size_t row;
    double share = measure(p, b, dim, allowed, what, &row);
    if (!(share > 1)) {
        pair_fail(p, "%s: a planted mistake passes: %s (%.3g of what is allowed)", what, mistake, share);
    }
}

void pair_same(struct pair *p, const struct both *b, const char *what)
{
    char *h = fetch(p, b, what);
    size_t bytes = b->n * gpu_size(b->kind);
    for (size_t i = 0; i < bytes; i++)
        if (h[i] != ((const char *)b->cpu)[i]) {
            pair_fail(p, "%s: byte %zu of %zu differs", what, i, bytes);
            break;
        }
    free(h);
}

void pair_status(struct pair *p, enum td_status cpu, enum td_status gpu, const char *what)
{
    if (cpu == TD_OK && gpu == TD_OK) return;
    pair_fail(p, "%s: CPU %s, GPU %s %s", what, td_status_name(cpu), td_status_name(gpu), td_device_last_error(p->gpu));
}

void pair_report(struct pair *p, const char *op)
{
    printf("%-28s worst %5.1f %% of the allowance\n", op, 100 * p->worst);
    fflush(stdout);
    p->worst = 0;
    pair_free_all(p);
}
