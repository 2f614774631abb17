#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dense_format.h"

struct dense {
    struct td_qkv_args qkv;
    struct td_lm_head_args head;
    struct td_weight w[TD_BENCH_MAX_TURNS];
    uint32_t which; /* 0 qkv, 1 plain */
};

static enum td_status run_dense(struct pair *p, void *args, uint32_t turn)
{
    struct dense *d = args;
    if (d->which == 0) {
        struct td_qkv_args a = d->qkv;
        a.w = d->w[turn];
        return p->gpu_ops->qkv(p->gpu_stream, &a);
    }
    struct td_lm_head_args a = d->head;
    a.w = d->w[turn];
    return p->gpu_ops->lm_head(p->gpu_stream, &a);
}

void td_bench_dense(struct pair *p)
{
    static const struct {
        const char *name;
        uint32_t n_out, n_in, which;
    } shapes[] = {{"QKV", 5120, 2880, 0},
                  {"O", 2880, 4096, 1},
                  {"router, 128 experts", 128, 2880, 1},
                  {"LM head", 201088, 2880, 1}};
    static const uint32_t rows[] = {1, 8, 16, 32, 64, 128, 2048, 8192};
    for (int k = 0; k < 4; k++) {
        struct dense d = {.which = shapes[k].which};
        if (td_bench_mode.is_fp8_weights && k == 2) continue;
        size_t n = (size_t)shapes[k].n_out * shapes[k].n_in,
               bytes = td_bench_mode.is_fp8_weights
                           ? (size_t)shapes[k].n_out * td_dense_fp8_row_bytes(shapes[k].n_in)
                           : n * 2;
        uint32_t turns = td_bench_turns((double)bytes), most = k == 3 ? 128 : 8192;
        float *bias;
        void *b;
        td_bench_gpu_must(p, td_device_alloc(p->gpu, shapes[k].n_out * 4ul, &b), "memory");
        bias = calloc(shapes[k].n_out, 4);
        td_device_upload(p->gpu, b, bias, shapes[k].n_out * 4ul);
        free(bias);
        for (uint32_t i = 0; i < turns; i++)
            d.w[i] = (struct td_weight){
                .data = td_bench_values(p, bytes / 2), .bias = b, .n_out = shapes[k].n_out, .n_in = shapes[k].n_in};
        void *x = td_bench_values(p, (size_t)most * shapes[k].n_in), *y, *cs = NULL, *pos = NULL, *page = NULL,
             *pool = NULL;
        td_bench_gpu_must(p, td_device_alloc(p->gpu, (size_t)most * shapes[k].n_out * 4, &y), "memory");
        if (k == 0) {
            uint32_t *h = malloc(most * 4ul);
            for (uint32_t i = 0; i < most; i++) h[i] = i % 64;
            td_bench_gpu_must(p, td_device_alloc(p->gpu, most * 4ul, &pos), "memory");
            td_device_upload(p->gpu, pos, h, most * 4ul);
            for (uint32_t i = 0; i < most; i++) h[i] = i / 64;
            td_bench_gpu_must(p, td_device_alloc(p->gpu, most * 4ul, &page), "memory");
            td_device_upload(p->gpu, page, h, most * 4ul);
            free(h);
            cs = td_bench_values(p, most * 64ul);
            struct td_kv_group_layout l = {
                .n_layers = 1, .n_pages = most / 64, .n_heads = 8, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};
            td_bench_gpu_must(p, td_device_alloc(p->gpu, td_kv_pool_bytes(&l), &pool), "memory");
            d.qkv = (struct td_qkv_args){.x = x,
                                         .cos = cs,
                                         .sin = cs,
                                         .positions = pos,
                                         .row_page = page,
                                         .kv = {.layout = l, .pool = pool},
                                         .q = y,
                                         .n_heads = 64,
                                         .n_kv_heads = 8,
                                         .head_dim = 64,
                                         .parts = TD_QKV_Q | TD_QKV_KV};
        }
        d.head = (struct td_lm_head_args){.x = x, .logits = y};
        for (int r = 0; r < 8 && rows[r] <= most; r++) {
            char what[96];
            if (td_bench_mode.is_short && rows[r] != 1 && rows[r] != 32 && rows[r] != 128) continue;
            d.qkv.n_rows = d.head.n_rows = rows[r];
            uint32_t calls = rows[r] > 1000 ? turns : (24 / turns + 1) * turns;
            double s = td_bench_time(p, (struct td_bench_call){run_dense, &d}, turns, calls);
            snprintf(what, sizeof what, "%s, %u rows", shapes[k].name, rows[r]);
            if (rows[r] > 1000)
                td_bench_row_flops(what, s, 2.0 * rows[r] * (double)n);
            else
                td_bench_row_bytes(what, s, (double)bytes);
        }
        for (uint32_t i = 0; i < turns; i++) td_device_free(p->gpu, (void *)(uintptr_t)d.w[i].data);
        td_device_free(p->gpu, b);
        td_device_free(p->gpu, x);
        td_device_free(p->gpu, y);
        td_device_free(p->gpu, cs);
        td_device_free(p->gpu, pos);
        td_device_free(p->gpu, page);
        td_device_free(p->gpu, pool);
    }
}
