/* tandem-bench load: how fast a checkpoint reaches the device, beside what the page cache gives to a plain read of the
 * same file, by one thread and by several. The file has the shape of gpt-oss, or of some of its layers, and noise. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/model/model.h"
#include "kernels/device.h"
#include "tests/bench/bench.h"
#include "tests/bench/shape.h"

#define BLOCK     (8u << 20)
#define N_READERS 8u

/* ---- the file ---- */

struct file {
    struct td_buf header;
    uint64_t n; /* of data so far */
    struct {
        uint64_t n;
        enum { NOISE, BYTES, SCALES } kind;
    } parts[2560];
    uint32_t n_parts;
};

static void add(struct file *f, const char *name, const char *type, uint32_t n_dims, const uint64_t shape[4])
{
    uint64_t n = strcmp(type, "BF16") == 0 ? 2 : 1;
    td_buf_printf(&f->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", f->n_parts > 0 ? "," : "{", name, type);
    for (uint32_t i = 0; i < n_dims; i++) {
        td_buf_printf(&f->header, "%s%llu", i > 0 ? "," : "", (unsigned long long)shape[i]);
        n *= shape[i];
    }
    td_buf_printf(&f->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)f->n,
                  (unsigned long long)(f->n + n));
    TD_CHECK(f->n_parts < TD_COUNT(f->parts));
    f->parts[f->n_parts].n = n;
    f->parts[f->n_parts++].kind = n_dims == 3 && strcmp(type, "U8") == 0 ? SCALES
                                  : strcmp(type, "U8") == 0              ? BYTES
                                                                         : NOISE;
    f->n += n;
}

static void add_layer(struct file *f, const struct td_model_config *c, uint32_t layer)
{
    const uint64_t h = c->hidden, i = c->intermediate, e = c->n_experts, q = (uint64_t)c->n_heads * c->head_dim,
                   kv = (uint64_t)c->n_kv_heads * c->head_dim;
    const struct {
        const char *name, *type;
        uint32_t n_dims;
        uint64_t shape[4];
    } tensors[] = {{"input_layernorm.weight", "BF16", 1, {h}},
                   {"post_attention_layernorm.weight", "BF16", 1, {h}},
                   {"self_attn.sinks", "BF16", 1, {c->n_heads}},
                   {"self_attn.q_proj.weight", "BF16", 2, {q, h}},
                   {"self_attn.q_proj.bias", "BF16", 1, {q}},
                   {"self_attn.k_proj.weight", "BF16", 2, {kv, h}},
                   {"self_attn.k_proj.bias", "BF16", 1, {kv}},
                   {"self_attn.v_proj.weight", "BF16", 2, {kv, h}},
                   {"self_attn.v_proj.bias", "BF16", 1, {kv}},
                   {"self_attn.o_proj.weight", "BF16", 2, {h, q}},
                   {"self_attn.o_proj.bias", "BF16", 1, {h}},
                   {"mlp.router.weight", "BF16", 2, {e, h}},
                   {"mlp.router.bias", "BF16", 1, {e}},
                   {"mlp.experts.gate_up_proj_blocks", "U8", 4, {e, 2 * i, h / 32, 16}},
                   {"mlp.experts.gate_up_proj_scales", "U8", 3, {e, 2 * i, h / 32}},
                   {"mlp.experts.gate_up_proj_bias", "BF16", 2, {e, 2 * i}},
                   {"mlp.experts.down_proj_blocks", "U8", 4, {e, h, i / 32, 16}},
                   {"mlp.experts.down_proj_scales", "U8", 3, {e, h, i / 32}},
                   {"mlp.experts.down_proj_bias", "BF16", 2, {e, h}}};
    for (size_t k = 0; k < TD_COUNT(tensors); k++) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.%u.%s", layer, tensors[k].name);
        add(f, name, tensors[k].type, tensors[k].n_dims, tensors[k].shape);
    }
}

static void put(int fd, const void *p, size_t n)
{
    for (const char *at = p; n > 0;) {
        ssize_t k = write(fd, at, n);
        if (k <= 0) {
            fprintf(stderr, "tandem-bench load: the file cannot be written: %s\n", strerror(errno));
            exit(1);
        }
        at += k;
        n -= (size_t)k;
    }
}

static uint64_t write_checkpoint(const struct td_model_config *c, const char *path)
{
    struct file *f = calloc(1, sizeof *f);
    uint8_t *block = malloc(3 * (size_t)BLOCK), length[8];
    TD_CHECK(f != NULL && block != NULL);
    uint32_t state = 5;
    for (uint32_t i = 0; i < BLOCK / 2; i++) {
        state = state * 1664525u + 1013904223u;
        uint16_t v = (uint16_t)((state >> 16 & 0x807f) | (0x3c00 + (state >> 8 & 0xff))); /* 2^-7 to 2^-5 */
        memcpy(block + NOISE * (size_t)BLOCK + 2 * i, &v, 2);
        memcpy(block + BYTES * (size_t)BLOCK + 2 * i, (const uint8_t *)&state + 2, 2);
    }
    memset(block + SCALES * (size_t)BLOCK, 120, BLOCK);
    add(f, "model.embed_tokens.weight", "BF16", 2, (uint64_t[4]){c->vocab, c->hidden});
    for (uint32_t i = 0; i < c->n_layers; i++) add_layer(f, c, i);
    add(f, "model.norm.weight", "BF16", 1, (uint64_t[4]){c->hidden});
    add(f, "lm_head.weight", "BF16", 2, (uint64_t[4]){c->vocab, c->hidden});
    td_buf_str(&f->header, "}");
    while (f->header.n % 8 != 0) td_buf_str(&f->header, " ");
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)f->header.n >> 8 * i);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0) {
        fprintf(stderr, "tandem-bench load: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    put(fd, length, sizeof length);
    put(fd, f->header.data, f->header.n);
    for (uint32_t i = 0; i < f->n_parts; i++)
        for (uint64_t left = f->parts[i].n, n; left > 0; left -= n) {
            n = left < BLOCK ? left : BLOCK;
            put(fd, block + (size_t)f->parts[i].kind * BLOCK, (size_t)n);
        }
    close(fd);
    uint64_t n_bytes = f->n;
    td_buf_free(&f->header);
    free(f);
    free(block);
    return n_bytes;
}

/* ---- reading it ---- */

struct reader {
    const char *path;
    uint64_t begin, end;
    pthread_t thread;
};

static void *read_range(void *arg)
{
    const struct reader *r = arg;
    char *to = malloc(BLOCK);
    int fd = open(r->path, O_RDONLY);
    TD_CHECK(to != NULL && fd >= 0);
    for (uint64_t at = r->begin; at < r->end;) {
        ssize_t n = pread(fd, to, r->end - at < BLOCK ? r->end - at : BLOCK, (off_t)at);
        if (n <= 0) break;
        at += (uint64_t)n;
    }
    close(fd);
    free(to);
    return NULL;
}

static double read_with(const char *path, uint64_t n_bytes, uint32_t n_threads)
{
    struct reader r[N_READERS];
    double begun = td_bench_now();
    for (uint32_t i = 0; i < n_threads; i++) {
        r[i] = (struct reader){.path = path, .begin = n_bytes * i / n_threads, .end = n_bytes * (i + 1) / n_threads};
        TD_CHECK(pthread_create(&r[i].thread, NULL, read_range, &r[i]) == 0);
    }
    for (uint32_t i = 0; i < n_threads; i++) pthread_join(r[i].thread, NULL);
    return td_bench_now() - begun;
}

static void bench(const char *dir, const char *device, enum td_expert_form form)
{
    struct td_err err = {{0}};
    struct td_model_config c;
    char path[4096];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    td_bench_must(td_model_config_load(dir, &c, &err), &err);
    double n = (double)write_checkpoint(&c, path), one = 1e9, many = 1e9;
    printf("a checkpoint of %.2f GB in %s\n", n / 1e9, dir);
    for (int i = 0; i < 2; i++) {
        double a = read_with(path, (uint64_t)n, 1), b = read_with(path, (uint64_t)n, N_READERS);
        one = a < one ? a : one;
        many = b < many ? b : many;
    }
    printf("plain read, 1 thread %.2f GB/s, %u threads %.2f GB/s\n", n / one / 1e9, N_READERS, n / many / 1e9);
    for (int i = 0; i < 2; i++) {
        struct td_device *d = NULL;
        struct td_model *m = NULL;
        td_bench_must(td_device_open(&(struct td_device_options){.backend = device, .experts = form}, &d, &err), &err);
        double begun = td_bench_now();
        td_bench_must(td_model_load(dir, &(struct td_model_options){.tp = 1, .device = d}, &m, &err), &err);
        double took = td_bench_now() - begun;
        printf("loaded in %.2f s: %.2f GB/s, %.2f of one thread's read, %.2f of %u threads'\n", took, n / took / 1e9,
               one / took, many / took, N_READERS);
        fflush(stdout);
        td_model_destroy(m);
        td_device_close(d);
    }
}

int td_bench_load(int argc, char **argv)
{
    const char *config = "20b", *dir = "/dev/shm/tandem-bench-load", *device = "cuda", *form = "mxfp4";
    uint32_t n_layers = 6;
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},      {"layers", required_argument, NULL, 'l'},
        {"dir", required_argument, NULL, 'd'},         {"device", required_argument, NULL, 'g'},
        {"moe-weights", required_argument, NULL, 'w'}, {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'c': config = optarg; break;
        case 'l': n_layers = td_bench_number("layers", optarg, 1); break;
        case 'd': dir = optarg; break;
        case 'g': device = optarg; break;
        case 'w': form = optarg; break;
        default: return 2;
        }
    struct td_err err = {{0}};
    td_log_open("tandem-bench", TD_LOG_INFO);
    td_bench_must(td_bench_shape_write(config, n_layers, dir, NULL, &err), &err);
    bench(dir, device, td_bench_expert_form(form));
    td_bench_shape_remove(dir);
    return 0;
}
