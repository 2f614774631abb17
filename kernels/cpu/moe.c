/* The routed MLP of each row: router, then the chosen experts. Rows are sorted by expert so that an expert's weights
 * are read once for all of them; a slot is row * k + rank of the expert among the row's k, and y keeps one row a slot,
 * so that sorting leaves no trace in the result. Two products with the activation between: gate_up into u (scratch),
 * down into y. Many rows go some at a time, so that u is still in a cache when it is read. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_int.h"

/* Units (gate and up) and columns of one task. */
#define UNITS (2 * TD_LANES)
#define COLS  (4 * TD_LANES)

struct block {                 /* rows of one expert */
    uint32_t expert, first, n; /* in the sorted order */
};

struct job {
    struct td_cpu_stream *s;
    const struct td_moe_args *a;
    uint32_t first_slot, n_slots; /* of this turn's rows */
    uint32_t *order;              /* [slots] sorted by expert */
    uint32_t *begin;              /* [E + 1] */
    struct block *blocks;
    uint32_t n_blocks;
    float *u; /* [slots][I], in the sorted order */
};

static bool is_better(float z, float than) { return z > than || (z != z && than == than); }

static void choose(const struct td_moe_args *a, const struct td_micro *micro, uint32_t row, const float *z)
{
    uint32_t *ids = a->ids + (size_t)row * a->top_k;
    float *weights = a->weights + (size_t)row * a->top_k;
    for (uint32_t k = 0; k < a->top_k; k++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t e = 0; e < a->n_experts; e++) {
            bool is_taken = false;
            for (uint32_t i = 0; i < k; i++) is_taken |= ids[i] == e;
            if (!is_taken && (best == UINT32_MAX || is_better(z[e], z[best]))) best = e;
        }
        ids[k] = best;
        weights[k] = z[best] - z[ids[0]];
    }
    micro->exp(weights, weights, a->top_k);
    float sum = 0;
    for (uint32_t k = 0; k < a->top_k; k++) sum += weights[k];
    for (uint32_t k = 0; k < a->top_k; k++) weights[k] /= sum;
}

static void route(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    const struct td_moe_args *a = j->a;
    struct td_cpu_scratch *z = &j->s->scratch[thread];
    uint32_t row = index * TD_ROW_BLOCK, m = td_min_u32(TD_ROW_BLOCK, a->n_rows - row);
    for (uint32_t i = 0; i < m; i++) {
        z->a[i] = a->x + (size_t)(row + i) * a->hidden;
        z->c[i] = z->o + (size_t)i * a->n_experts;
    }
    struct td_gemm g = {.a = z->a, .c = z->c, .w = a->router.data, .m = m, .n_cols = a->n_experts, .k = a->hidden};
    j->s->micro->gemm_bf16(&g);
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t e = 0; e < a->n_experts; e++) z->c[i][e] += a->router.bias[e];
        choose(a, j->s->micro, row + i, z->c[i]);
    }
}

/* Counting sort, then blocks of about equal size. */
static void sort_slots(struct job *j)
{
    const struct td_moe_args *a = j->a;
    uint32_t end = j->first_slot + j->n_slots;
    memset(j->begin, 0, (a->n_experts + 1) * sizeof *j->begin);
    for (uint32_t i = j->first_slot; i < end; i++) j->begin[a->ids[i] + 1]++;
    for (uint32_t e = 0; e < a->n_experts; e++) j->begin[e + 1] += j->begin[e];
    for (uint32_t i = j->first_slot; i < end; i++) j->order[j->begin[a->ids[i]]++] = i;
    for (uint32_t e = a->n_experts; e > 0; e--) j->begin[e] = j->begin[e - 1]; /* filling moved each to its end */
    j->begin[0] = 0;
    j->n_blocks = 0;

    for (uint32_t e = 0; e < a->n_experts; e++) {
        uint32_t n = j->begin[e + 1] - j->begin[e];
        if (n == 0) continue;
        if (a->gate_up[e].data == NULL) { /* another rank's: a sum with -0.0 changes nothing */
            for (uint32_t i = j->begin[e]; i < j->begin[e + 1]; i++)
                for (uint32_t d = 0; d < a->hidden; d++) a->y[(size_t)j->order[i] * a->hidden + d] = -0.0f;
            continue;
        }
        uint32_t n_blocks = td_ceil_div(n, TD_ROW_BLOCK), size = td_ceil_div(td_ceil_div(n, n_blocks), 6) * 6;
        for (uint32_t first = 0; first < n; first += size)
            j->blocks[j->n_blocks++] =
                (struct block){.expert = e, .first = j->begin[e] + first, .n = td_min_u32(size, n - first)};
    }
}

/* A last pair in one panel, [8 gates, 8 ups], spread into the two that swiglu expects. */
static void spread_half_pair(float *pair)
{
    memcpy(pair + TD_LANES, pair + TD_LANES / 2, TD_LANES / 2 * sizeof *pair);
    memset(pair + TD_LANES / 2, 0, TD_LANES / 2 * sizeof *pair);
    memset(pair + TD_LANES + TD_LANES / 2, 0, TD_LANES / 2 * sizeof *pair);
}

static void gate_up(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    const struct td_moe_args *a = j->a;
    struct td_cpu_scratch *z = &j->s->scratch[thread];
    const struct block *b = &j->blocks[index % j->n_blocks];
    const struct td_weight *w = &a->gate_up[b->expert];
    uint32_t unit = index / j->n_blocks * UNITS, n_units = td_min_u32(UNITS, a->intermediate - unit);
    uint32_t cols = td_cpu_gate_up_cols(n_units);
    for (uint32_t i = 0; i < b->n; i++) {
        z->a[i] = a->x + (size_t)(j->order[b->first + i] / a->top_k) * a->hidden;
        z->c[i] = z->s + (size_t)i * 2 * UNITS;
    }
    struct td_gemm g = {
        .a = z->a, .c = z->c, .w = td_cpu_panels(w, 2 * unit), .m = b->n, .n_cols = cols, .k = a->hidden};
    j->s->micro->gemm_bf16(&g);
    const float *bias = w->bias + 2 * unit;
    float spread[2 * UNITS];
    uint32_t full = n_units / TD_LANES * TD_LANES;
    if (td_cpu_is_half_pair(n_units - full)) {
        memcpy(spread, bias, cols * sizeof *bias);
        spread_half_pair(spread + 2 * full);
        for (uint32_t i = 0; i < b->n; i++) spread_half_pair(z->c[i] + 2 * full);
        bias = spread;
    }
    for (uint32_t i = 0; i < b->n; i++) z->c[i] = j->u + (size_t)(b->first + i) * a->intermediate + unit;
    j->s->micro->swiglu(z->c, z->s, 2 * UNITS, bias, b->n, n_units, a->alpha, a->limit);
}

static void down(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    const struct td_moe_args *a = j->a;
    struct td_cpu_scratch *z = &j->s->scratch[thread];
    const struct block *b = &j->blocks[index % j->n_blocks];
    uint32_t col = index / j->n_blocks * COLS, n_cols = td_min_u32(COLS, a->hidden - col);
    for (uint32_t i = 0; i < b->n; i++) {
        z->a[i] = j->u + (size_t)(b->first + i) * a->intermediate;
        z->c[i] = a->y + (size_t)j->order[b->first + i] * a->hidden + col;
    }
    struct td_gemm g = {.a = z->a,
                        .c = z->c,
                        .w = td_cpu_panels(&a->down[b->expert], col),
                        .m = b->n,
                        .n_cols = n_cols,
                        .k = a->intermediate,
                        .pieces = &a->pieces};
    j->s->micro->gemm_bf16(&g);
}

/* Rows of a turn: as few as keep u small, but enough for each expert's weights to serve many of them. */
static uint32_t turn_rows(uint32_t n_rows, uint32_t top_k, uint32_t n_experts)
{
    uint32_t enough = 128 * n_experts / top_k;
    return td_min_u32(n_rows, enough < 512 ? 512 : enough);
}

static void *take(char **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

size_t td_cpu_moe_scratch_bytes(uint32_t n_rows, uint32_t top_k, uint32_t n_experts, uint32_t intermediate)
{
    size_t slots = (size_t)turn_rows(n_rows, top_k, n_experts) * top_k;
    return slots * sizeof(uint32_t) + (n_experts + (size_t)1) * sizeof(uint32_t) +
           (slots / TD_ROW_BLOCK + n_experts + 1) * 2 * sizeof(struct block) + slots * intermediate * sizeof(float) +
           4 * 64;
}

enum td_status td_cpu_moe(struct td_stream *s, const struct td_moe_args *a)
{
    if (a->n_experts > 512 || a->top_k > TD_MAX_TOKEN_EXPERTS || a->top_k > a->n_experts) return TD_E_UNSUPPORTED;
    struct job j = {.s = td_cpu_stream(s), .a = a};
    uint32_t turn = turn_rows(a->n_rows, a->top_k, a->n_experts);
    size_t slots = (size_t)turn * a->top_k;
    char *at = a->scratch;
    j.order = take(&at, slots * sizeof *j.order);
    j.begin = take(&at, (a->n_experts + (size_t)1) * sizeof *j.begin);
    j.blocks = take(&at, (slots / TD_ROW_BLOCK + a->n_experts + 1) * 2 * sizeof *j.blocks);
    j.u = take(&at, slots * a->intermediate * sizeof *j.u);

    td_pool_run(j.s->pool, route, &j, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    for (uint32_t row = 0; row < a->n_rows; row += turn) {
        j.first_slot = row * a->top_k;
        j.n_slots = td_min_u32(turn, a->n_rows - row) * a->top_k;
        sort_slots(&j);
        td_pool_run(j.s->pool, gate_up, &j, j.n_blocks * td_ceil_div(a->intermediate, UNITS));
        td_pool_run(j.s->pool, down, &j, j.n_blocks * td_ceil_div(a->hidden, COLS));
    }
    return TD_OK;
}
