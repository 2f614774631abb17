/* Query, key and value of each row: product, bias, rotation (q and k), then q to its buffer and K, V to the row's place
 * in its page, rounded to the pages' type. A task is some rows by one head. */
#include <math.h>
#include <stdatomic.h>

#include "kernels/cpu/cpu_int.h"
#include "kernels/e4m3.h"

struct job {
    struct td_cpu_stream *s;
    const struct td_qkv_args *a;
    uint32_t n_row_blocks, first_head;
};

/* How many values of all passes were beyond what E4M3 holds. */
static _Atomic uint64_t n_saturated;

uint64_t td_cpu_n_saturated(void) { return atomic_load_explicit(&n_saturated, memory_order_relaxed); }

static void store_fp8(uint8_t *to, const float *v, uint32_t n)
{
    uint32_t n_beyond = 0;
    for (uint32_t i = 0; i < n; i++) {
        to[i] = td_e4m3_encode(v[i]);
        n_beyond += fabsf(v[i]) > TD_E4M3_SATURATES_ABOVE;
    }
    if (n_beyond != 0) atomic_fetch_add_explicit(&n_saturated, n_beyond, memory_order_relaxed);
}

static void task(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    const struct td_qkv_args *a = j->a;
    struct td_cpu_scratch *scratch = &j->s->scratch[thread];
    uint32_t row = index % j->n_row_blocks * TD_ROW_BLOCK, head = j->first_head + index / j->n_row_blocks;
    uint32_t m = td_min_u32(TD_ROW_BLOCK, a->n_rows - row), dim = a->head_dim, half = dim / 2;
    for (uint32_t i = 0; i < m; i++) {
        scratch->a[i] = a->x + (size_t)(row + i) * a->w.n_in;
        scratch->c[i] = scratch->o + (size_t)i * dim;
    }
    struct td_gemm g = {
        .a = scratch->a, .c = scratch->c, .w = td_cpu_panels(&a->w, head * dim), .m = m, .n_cols = dim, .k = a->w.n_in};
    j->s->micro->gemm_bf16(&g);

    bool is_q = head < a->n_heads, is_v = head >= a->n_heads + a->n_kv_heads;
    uint32_t kv_head = is_q ? 0 : (head - a->n_heads) % a->n_kv_heads;
    const float *bias = a->w.bias + (size_t)head * dim;
    for (uint32_t i = 0; i < m; i++) {
        uint32_t t = row + i;
        float *v = scratch->c[i];
        j->s->micro->bias_rotate(v, bias, is_v ? NULL : a->cos + (size_t)t * half, a->sin + (size_t)t * half, dim);
        if (is_q) {
            j->s->micro->store(a->q + ((size_t)t * a->n_heads + head) * dim, v, dim, TD_F32);
        } else {
            uint32_t pos = a->positions[t] % a->kv.layout.page_tokens;
            size_t at = td_kv_offset(&a->kv.layout, a->kv.layer, a->row_page[t], kv_head, is_v, pos);
            char *to = (char *)a->kv.pool + at;
            if (a->kv.layout.dtype == TD_E4M3)
                store_fp8((uint8_t *)to, v, dim);
            else
                j->s->micro->store(to, v, dim, a->kv.layout.dtype);
        }
    }
}

enum td_status td_cpu_qkv(struct td_stream *s, const struct td_qkv_args *a)
{
    if (a->head_dim % TD_LANES != 0 || a->head_dim > TD_HEAD_MAX) return TD_E_UNSUPPORTED;
    struct job j = {.s = td_cpu_stream(s), .a = a, .n_row_blocks = td_ceil_div(a->n_rows, TD_ROW_BLOCK)};
    uint32_t n_heads = 0;
    if (a->parts & TD_QKV_Q)
        n_heads += a->n_heads;
    else
        j.first_head = a->n_heads;
    if (a->parts & TD_QKV_KV) n_heads += 2 * a->n_kv_heads;
    td_pool_run(j.s->pool, task, &j, j.n_row_blocks * n_heads);
    return TD_OK;
}
