/* One CPU op on the small checkpoint's weights, for a reference in another language:
 *   cpu_ops MODEL OP LAYER N_ROWS START < inputs > outputs
 * Rows are positions START, START + 1, ... of one sequence. Inputs and outputs are f32 arrays, one after the other:
 *   embed      ids [T]                               -> x [T, H]
 *   rmsnorm    x [T, H] (input norm)                 -> y [T, H]
 *   qkv        t [T, H]                              -> q [T, Nq, D], k [T, Nkv, D], v [T, Nkv, D] (q, k rotated)
 *   attention  q [T, Nq, D], k, v [START + T, Nkv, D]-> o [T, Nq, D]
 *   o_proj     o [T, Nq D], x [T, H]                 -> x + projection [T, H], its post norm [T, H]
 *   moe        t [T, H], x [T, H]                    -> ids [T, k], weights [T, k], x + mix [T, H]
 *   lm_head    t [T, H]                              -> logits [T, V]
 * KV pages are f32, 16 positions each, and lie in falling order. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/weights.h"

#define PAGE 16u

static void die(const char *what)
{
    fprintf(stderr, "cpu_ops: %s\n", what);
    exit(1);
}

static float *take(size_t n)
{
    float *p = calloc(n + 1, sizeof *p);
    if (p == NULL) die("out of memory");
    return p;
}

static float *input(size_t n)
{
    float *p = take(n);
    if (fread(p, sizeof *p, n, stdin) != n) die("the input is too short");
    return p;
}

static void output(const float *p, size_t n)
{
    if (fwrite(p, sizeof *p, n, stdout) != n) die("cannot write");
}

struct job {
    const struct td_model_config *c;
    const struct td_weights *w;
    const struct td_layer_weights *l;
    struct td_device *device;
    struct td_stream *s;
    const struct td_ops *ops;
    uint32_t layer, T, start;
    uint32_t *positions, *row_page, *pages;
    struct td_kv_view kv;
    float *cos, *sin;
};

static void check(enum td_status st)
{
    if (st != TD_OK) die(td_status_text(st));
}

static void lay_out(struct job *j)
{
    uint32_t n = j->start + j->T, n_pages = (n + PAGE - 1) / PAGE, half = j->c->head_dim / 2;
    j->kv.layout = (struct td_kv_group_layout){.n_layers = 1,
                                               .n_pages = n_pages,
                                               .n_heads = j->c->n_kv_heads,
                                               .head_dim = j->c->head_dim,
                                               .page_tokens = PAGE,
                                               .dtype = TD_F32};
    j->kv.pool = take(td_kv_pool_bytes(&j->kv.layout) / sizeof(float));
    j->positions = calloc(j->T, sizeof(uint32_t));
    j->row_page = calloc(j->T, sizeof(uint32_t));
    j->pages = calloc(n_pages, sizeof(uint32_t));
    if (j->positions == NULL || j->row_page == NULL || j->pages == NULL) die("out of memory");
    for (uint32_t b = 0; b < n_pages; b++) j->pages[b] = n_pages - 1 - b;
    for (uint32_t t = 0; t < j->T; t++) {
        j->positions[t] = j->start + t;
        j->row_page[t] = j->pages[(j->start + t) / PAGE];
    }
    j->cos = take((size_t)j->T * half);
    j->sin = take((size_t)j->T * half);
    struct td_rope_args rope = {.positions = j->positions,
                                .freqs = j->w->rope_freqs,
                                .factor = j->w->rope_factor,
                                .cos = j->cos,
                                .sin = j->sin,
                                .n_rows = j->T,
                                .half = half};
    check(j->ops->rope(j->s, &rope));
}

static float *kv_row(const struct job *j, uint32_t pos, uint32_t head, bool is_v)
{
    return (float *)(void *)((char *)j->kv.pool +
                             td_kv_offset(&j->kv.layout, 0, j->pages[pos / PAGE], head, is_v, pos % PAGE));
}

static void run_embed(struct job *j)
{
    float *ids = input(j->T), *x = take((size_t)j->T * j->c->hidden);
    uint32_t *tokens = calloc(j->T, sizeof *tokens);
    if (tokens == NULL) die("out of memory");
    for (uint32_t t = 0; t < j->T; t++) tokens[t] = (uint32_t)ids[t];
    struct td_embed_args a = {.tokens = tokens, .table = j->w->embed, .x = x, .n_rows = j->T, .dim = j->c->hidden};
    check(j->ops->embed(j->s, &a));
    output(x, (size_t)j->T * j->c->hidden);
}

static void run_rmsnorm(struct job *j)
{
    size_t n = (size_t)j->T * j->c->hidden;
    struct td_rmsnorm_args a = {
        .x = input(n), .w = j->l->input_norm, .y = take(n), .n_rows = j->T, .dim = j->c->hidden, .eps = j->c->rms_eps};
    check(j->ops->rmsnorm(j->s, &a));
    output(a.y, n);
}

static void run_qkv(struct job *j)
{
    lay_out(j);
    size_t n_q = (size_t)j->T * j->c->n_heads * j->c->head_dim;
    struct td_qkv_args a = {.x = input((size_t)j->T * j->c->hidden),
                            .w = j->l->qkv,
                            .cos = j->cos,
                            .sin = j->sin,
                            .positions = j->positions,
                            .row_page = j->row_page,
                            .kv = j->kv,
                            .q = take(n_q),
                            .n_rows = j->T,
                            .n_heads = j->c->n_heads,
                            .n_kv_heads = j->c->n_kv_heads,
                            .head_dim = j->c->head_dim,
                            .parts = TD_QKV_Q | TD_QKV_KV};
    check(j->ops->qkv(j->s, &a));
    output(a.q, n_q);
    for (int is_v = 0; is_v < 2; is_v++)
        for (uint32_t t = 0; t < j->T; t++)
            for (uint32_t h = 0; h < j->c->n_kv_heads; h++) output(kv_row(j, j->start + t, h, is_v), j->c->head_dim);
}

static void run_attention(struct job *j)
{
    lay_out(j);
    uint32_t D = j->c->head_dim, K = j->c->n_kv_heads, n = j->start + j->T;
    size_t n_q = (size_t)j->T * j->c->n_heads * D;
    float *q = input(n_q);
    for (int is_v = 0; is_v < 2; is_v++) {
        float *rows = input((size_t)n * K * D);
        for (uint32_t p = 0; p < n; p++)
            for (uint32_t h = 0; h < K; h++)
                memcpy(kv_row(j, p, h, is_v), rows + ((size_t)p * K + h) * D, D * sizeof(float));
        free(rows);
    }
    struct td_seq_rows seq = {.row = 0, .n_rows = j->T, .start = j->start};
    struct td_attention_args a = {.q = q,
                                  .kv = j->kv,
                                  .seqs = &seq,
                                  .pages = j->pages,
                                  .n_seqs = 1,
                                  .n_rows = j->T,
                                  .n_single = j->T == 1,
                                  .sinks = j->l->sinks,
                                  .out = take(n_q),
                                  .n_heads = j->c->n_heads,
                                  .n_kv_heads = K,
                                  .head_dim = D,
                                  .window = j->c->is_sliding[j->layer] ? j->c->window : 0,
                                  .scale = 1.0f / sqrtf((float)D)};
    check(j->ops->attention(j->s, &a));
    output(a.out, n_q);
}

static void run_o_proj(struct job *j)
{
    uint32_t wide = j->c->n_heads * j->c->head_dim;
    size_t n = (size_t)j->T * j->c->hidden;
    struct td_o_proj_args a = {.x = input((size_t)j->T * wide), .w = j->l->o, .y = take(n), .n_rows = j->T};
    td_pieces_init(&a.pieces, wide, j->c->n_kv_heads, 0, j->c->n_kv_heads);
    check(j->ops->o_proj(j->s, &a));
    struct td_add_norm_args add = {.x = input(n),
                                   .y = a.y,
                                   .bias = j->l->o_bias,
                                   .w = j->l->post_norm,
                                   .t = take(n),
                                   .n_rows = j->T,
                                   .dim = j->c->hidden,
                                   .eps = j->c->rms_eps};
    check(j->ops->add_norm(j->s, &add));
    output(add.x, n);
    output(add.t, n);
}

static void run_moe(struct job *j)
{
    const struct td_model_config *c = j->c;
    size_t n = (size_t)j->T * c->hidden, slots = (size_t)j->T * c->top_k;
    struct td_scratch_shape shape = {.n_rows = j->T,
                                     .top_k = c->top_k,
                                     .n_experts = c->n_experts,
                                     .intermediate = c->intermediate,
                                     .hidden = c->hidden};
    struct td_moe_args a = {.x = input(n),
                            .router = j->l->router,
                            .gate_up = j->l->gate_up,
                            .down = j->l->down,
                            .n_rows = j->T,
                            .hidden = c->hidden,
                            .intermediate = c->intermediate,
                            .n_experts = c->n_experts,
                            .top_k = c->top_k,
                            .alpha = c->swiglu_alpha,
                            .limit = c->swiglu_limit,
                            .ids = calloc(slots, sizeof(uint32_t)),
                            .weights = take(slots),
                            .y = take(slots * c->hidden)};
    check(td_device_alloc(j->device, td_device_scratch_bytes(j->device, &shape), &a.scratch));
    td_pieces_init(&a.pieces, c->intermediate, TD_EXPERT_PIECES, 0, TD_EXPERT_PIECES);
    check(j->ops->moe(j->s, &a));
    struct td_moe_add_norm_args mix = {.x = input(n),
                                       .y = a.y,
                                       .ids = a.ids,
                                       .weights = a.weights,
                                       .down_bias = j->l->down_bias,
                                       .w = j->w->final_norm,
                                       .t = take(n),
                                       .n_rows = j->T,
                                       .dim = c->hidden,
                                       .top_k = c->top_k,
                                       .eps = c->rms_eps};
    check(j->ops->moe_add_norm(j->s, &mix));
    for (size_t i = 0; i < slots; i++) output(&(float){(float)a.ids[i]}, 1);
    output(a.weights, slots);
    output(mix.x, n);
}

static void run_lm_head(struct job *j)
{
    size_t n = (size_t)j->T * j->c->vocab;
    struct td_lm_head_args a = {
        .x = input((size_t)j->T * j->c->hidden), .w = j->w->lm_head, .logits = take(n), .n_rows = j->T};
    check(j->ops->lm_head(j->s, &a));
    output(a.logits, n);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(struct job *j);
    } list[] = {{"embed", run_embed},   {"rmsnorm", run_rmsnorm}, {"qkv", run_qkv},        {"attention", run_attention},
                {"o_proj", run_o_proj}, {"moe", run_moe},         {"lm_head", run_lm_head}};
    if (argc != 6) die("usage: cpu_ops MODEL OP LAYER N_ROWS START");
    struct td_err err = {0};
    struct td_model *model = NULL;
    if (td_model_load(argv[1], &(struct td_model_options){.tp = 1}, &model, &err) != TD_OK) die(err.text);
    struct job j = {
        .c = td_model_config_of(model), .w = td_model_weights_of(model), .device = td_model_device_of(model)};
    j.layer = (uint32_t)atoi(argv[3]);
    j.T = (uint32_t)atoi(argv[4]);
    j.start = (uint32_t)atoi(argv[5]);
    if (j.layer >= j.c->n_layers || j.T == 0) die("no such layer, or no rows");
    j.l = &j.w->layers[j.layer];
    j.ops = td_device_ops(j.device);
    check(td_stream_create(j.device, 2, &j.s));
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        if (strcmp(list[i].name, argv[2]) == 0) {
            list[i].run(&j);
            return fflush(stdout) == 0 ? 0 : 1;
        }
    die("no such op");
}
