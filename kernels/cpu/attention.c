/* Paged attention with a sink. Keys are walked in blocks of 64 absolute positions, whatever the batch, the chunk and
 * the page size, and read from the pages as stored, also those of the same pass. For one query row: max = sink, sum =
 * 1, o = 0 for each block with a visible key:  s = q K^T scale;  max, sum, o as in online softmax;  o += exp(s - max) V
 *   out = o / sum
 * A row skips the blocks in which it sees nothing. A task is one KV head and up to 192 rows: positions times the heads
 * sharing it; it walks the union of its rows' blocks, unpacks each once, and takes the rows that see it 48 at a time.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_int.h"
#include "kernels/e4m3.h"

struct job {
    struct td_cpu_stream *s;
    const struct td_attention_args *a;
    uint32_t group;   /* query heads that share a KV head */
    uint32_t tile;    /* positions of a task */
    uint32_t n_tiles; /* of the longest sequence: tasks past a sequence's end do nothing */
};

/* Where keys [first, end) of the block at `block` are; entries outside point at nothing. */
static uint32_t find_rows(const struct td_attention_args *a, const struct td_seq_rows *q, uint32_t head, bool is_v,
                          uint32_t first, uint32_t end, const void **rows)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    uint32_t step = l->head_dim * td_dtype_bytes(l->dtype);
    for (uint32_t c = first; c < end;) {
        uint32_t page = a->pages[q->pages + (c / l->page_tokens - q->first_block)];
        const char *p = (const char *)a->kv.pool + td_kv_offset(l, a->kv.layer, page, head, is_v, c % l->page_tokens);
        uint32_t stop = td_min_u32(end, (c / l->page_tokens + 1) * l->page_tokens);
        for (; c < stop; c++, p += step) rows[c - first] = p;
    }
    return end - first;
}

/* FP8 rows as bf16 ones, which everything finite there is. */
static enum td_dtype widen_rows(const struct td_attention_args *a, const void **rows, uint32_t n,
                                uint16_t wide[][TD_HEAD_MAX])
{
    if (a->kv.layout.dtype != TD_E4M3) return a->kv.layout.dtype;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *from = rows[i];
        for (uint32_t d = 0; d < a->head_dim; d++) wide[i][d] = td_e4m3_to_bf16(from[d]);
        rows[i] = wide[i];
    }
    return TD_BF16;
}

struct tile {
    const struct job *j;
    struct td_cpu_scratch *z;
    uint32_t from, last; /* positions */
};

/* Keys of the block at `base` that the row of position p sees: [*lo, *hi), relative to base. */
static void visible(const struct td_attention_args *a, uint32_t p, uint32_t base, uint32_t *lo, uint32_t *hi)
{
    uint32_t low = a->window != 0 && p + 1 > a->window ? p + 1 - a->window : 0;
    *lo = low > base ? td_min_u32(low - base, TD_KEYS) : 0;
    *hi = p < base ? 0 : td_min_u32(p - base + 1, TD_KEYS);
}

/* Rows [r, r + m) of the tile, at most TD_ROW_BLOCK, meet the block at `base`, of which n keys are unpacked. Later rows
 * see later keys, so the first row's lo and the last one's hi bound what any of them sees; weights outside are 0, and
 * leaving them out changes nothing. */
static void meet(const struct tile *t, uint32_t r, uint32_t m, uint32_t base, uint32_t n)
{
    const struct td_attention_args *a = t->j->a;
    const struct td_micro *micro = t->j->s->micro;
    struct td_cpu_scratch *z = t->z;
    uint32_t dim = a->head_dim;
    for (uint32_t i = 0; i < m; i++) visible(a, t->from + (r + i) / t->j->group, base, &z->lo[i], &z->hi[i]);
    uint32_t lo = z->lo[0] / TD_LANES * TD_LANES, hi = z->hi[m - 1];

    float *to[TD_ROW_BLOCK];
    const float *weights[TD_ROW_BLOCK];
    for (uint32_t i = 0; i < m; i++) weights[i] = to[i] = z->s + (size_t)i * TD_KEYS + lo;
    struct td_gemm scores = {.a = z->a + r,
                             .c = to,
                             .w = z->k + (size_t)lo * dim,
                             .m = m,
                             .n_cols = td_ceil_div(hi - lo, TD_LANES) * TD_LANES,
                             .k = dim};
    micro->gemm_f32(&scores);
    struct td_softmax_block b = {.s = z->s,
                                 .lo = z->lo,
                                 .hi = z->hi,
                                 .max = z->max + r,
                                 .sum = z->sum + r,
                                 .o = z->o + (size_t)r * dim,
                                 .m = m,
                                 .dim = dim,
                                 .scale = a->scale};
    micro->softmax_block(&b);
    for (uint32_t i = 0; i < m; i++) to[i] = z->o + (size_t)(r + i) * dim;
    struct td_gemm mix = {.a = weights,
                          .c = to,
                          .w = z->v + (size_t)lo * TD_LANES,
                          .m = m,
                          .n_cols = dim,
                          .k = hi - lo,
                          .panel_k = n,
                          .accumulate = true};
    micro->gemm_f32(&mix);
}

static void task(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    const struct td_attention_args *a = j->a;
    const struct td_micro *micro = j->s->micro;
    struct td_cpu_scratch *z = &j->s->scratch[thread];
    uint32_t head = index % a->n_kv_heads, rest = index / a->n_kv_heads;
    const struct td_seq_rows *q = &a->seqs[rest % a->n_seqs];
    uint32_t number = j->n_tiles - 1 - rest / a->n_seqs; /* the longest walks first: better balance at the end */
    uint32_t first = number * j->tile;
    if (first >= q->n_rows) return;
    uint32_t n_pos = td_min_u32(j->tile, q->n_rows - first), dim = a->head_dim, m = n_pos * j->group;
    struct tile t = {.j = j, .z = z, .from = q->start + first, .last = q->start + first + n_pos - 1};

    for (uint32_t i = 0; i < m; i++) {
        uint32_t h = head * j->group + i % j->group;
        z->a[i] = a->q + ((size_t)(q->row + first + i / j->group) * a->n_heads + h) * dim;
        z->max[i] = a->sinks[h];
        z->sum[i] = a->sinks[h] == -INFINITY ? 0.0f : 1.0f;
    }
    memset(z->o, 0, (size_t)m * dim * sizeof *z->o);

    /* First key of the first row. */
    uint32_t seen = a->window != 0 && t.from + 1 > a->window ? t.from + 1 - a->window : 0;
    for (uint32_t block = seen / TD_KEYS; block * TD_KEYS <= t.last; block++) {
        /* Keys before `seen` may lie in pages that were given back; those past `last` need not be written yet. */
        uint32_t base = block * TD_KEYS, lo = base < seen ? seen - base : 0;
        uint32_t end = td_min_u32(TD_KEYS, t.last + 1 - base);
        const void *rows[TD_KEYS];
        uint16_t wide[TD_KEYS][TD_HEAD_MAX];
        /* Rows before lo stand in for themselves as row lo: masked, but finite memory. */
        find_rows(a, q, head, false, base + lo, base + end, rows + lo);
        for (uint32_t i = 0; i < lo; i++) rows[i] = rows[lo];
        micro->pack_keys(z->k, rows, end, dim, widen_rows(a, rows, end, wide));
        find_rows(a, q, head, true, base + lo, base + end, rows + lo);
        for (uint32_t i = 0; i < lo; i++) rows[i] = rows[lo];
        micro->pack_values(z->v, rows, end, dim, widen_rows(a, rows, end, wide));

        /* The positions that see some of it. */
        uint32_t p = base > t.from ? base : t.from;
        uint64_t stop = a->window == 0 ? UINT64_MAX : (uint64_t)base + TD_KEYS - 1 + a->window;
        uint32_t p_end = stop < t.last + 1 ? (uint32_t)stop : t.last + 1;
        uint32_t r_end = (p_end - t.from) * j->group;
        for (uint32_t r = (p - t.from) * j->group; r < r_end; r += TD_ROW_BLOCK)
            meet(&t, r, td_min_u32(TD_ROW_BLOCK, r_end - r), base, end);
    }

    for (uint32_t i = 0; i < m; i++) {
        uint32_t h = head * j->group + i % j->group;
        float *to = a->out + ((size_t)(q->row + first + i / j->group) * a->n_heads + h) * dim;
        micro->divide(to, z->o + (size_t)i * dim, z->sum[i], dim);
    }
}

enum td_status td_cpu_attention(struct td_stream *s, const struct td_attention_args *a)
{
    uint32_t group = a->n_heads / a->n_kv_heads, longest = 0;
    if (a->head_dim % TD_LANES != 0 || a->head_dim > TD_HEAD_MAX || group > TD_ATTN_ROWS) return TD_E_UNSUPPORTED;
    if (a->kv.layout.dtype == TD_U8) return TD_E_UNSUPPORTED;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (a->seqs[i].n_rows > longest) longest = a->seqs[i].n_rows;
    struct job j = {.s = td_cpu_stream(s), .a = a, .group = group, .tile = TD_ATTN_ROWS / group};
    j.n_tiles = td_ceil_div(longest, j.tile);
    td_pool_run(j.s->pool, task, &j, a->n_seqs * a->n_kv_heads * j.n_tiles);
    return TD_OK;
}
