/* Query, key and value of each row: product, bias, rotation (q and k), then q to its buffer and K, V to the row's place
 * in its page, rounded to the pages' type. A task is some rows by one head. */
#include "kernels/cpu/cpu_int.h"

struct job {
    struct td_cpu_stream *s;
    const struct td_qkv_args *a;
    uint32_t n_row_blocks, first_head;
};

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
            j->s->micro->store((char *)a->kv.pool + at, v, dim, a->kv.layout.dtype);
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
