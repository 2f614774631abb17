#include "tests/bench/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rows {
    struct td_add_norm_args a;
    struct td_moe_add_norm_args m;
    int is_moe;
};

static enum td_status run_rows(struct pair *p, void *args, uint32_t turn)
{
    struct rows *r = args;
    (void)turn;
    return r->is_moe ? p->gpu_ops->moe_add_norm(p->gpu_stream, &r->m) : p->gpu_ops->add_norm(p->gpu_stream, &r->a);
}

void td_bench_rows(struct pair *p)
{
    enum { T = 8192, H = 2880 };
    void *x = td_bench_values(p, (size_t)T * H * 2), *y = td_bench_values(p, (size_t)T * 4 * H * 2),
         *w = td_bench_values(p, H * 2), *b = td_bench_values(p, 32 * H * 2), *t = td_bench_values(p, (size_t)T * H),
         *ids, *wt = td_bench_values(p, T * 4 * 2);
    td_bench_gpu_must(p, td_device_alloc(p->gpu, T * 4 * 4ul, &ids), "memory");
    uint32_t *h = malloc(T * 4 * 4ul);
    for (uint32_t i = 0; i < T * 4; i++) h[i] = i % 32;
    td_device_upload(p->gpu, ids, h, T * 4 * 4ul);
    free(h);
    struct rows r = {.a = {.x = x, .y = y, .bias = w, .w = w, .t = t, .dim = H, .eps = 1e-5f},
                     .m = {.x = x,
                           .y = y,
                           .ids = ids,
                           .weights = wt,
                           .down_bias = b,
                           .w = w,
                           .t = t,
                           .dim = H,
                           .top_k = 4,
                           .eps = 1e-5f}};
    static const uint32_t rows[] = {1, 128, 8192};
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 3; i++) {
            char what[96];
            r.is_moe = m;
            r.a.n_rows = r.m.n_rows = rows[i];
            double s = td_bench_time(p, (struct td_bench_call){run_rows, &r}, 1, 40);
            snprintf(what, sizeof what, "%s, %u rows", m ? "moe_add_norm" : "add_norm", rows[i]);
            td_bench_row_bytes(what, s, (double)rows[i] * H * (m ? 26.0 : 14.0));
        }
    td_device_free(p->gpu, x), td_device_free(p->gpu, y), td_device_free(p->gpu, w), td_device_free(p->gpu, b);
    td_device_free(p->gpu, t), td_device_free(p->gpu, ids), td_device_free(p->gpu, wt);
}
