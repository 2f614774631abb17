#include "common/engine/forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/plan_int.h"
#include "common/engine/sample.h"

/* Rows of logits that exist at a time. On a host few, 26 MB of the large models' vocabulary; where the device draws,
 * all of a step's, since each turn reads the whole head. */
#define LOGIT_ROWS        32u
#define LOGIT_ROWS_DEVICE 256u

struct td_layer_note {
    void (*on_layer)(uint32_t layer, void *user);
    void *user;
    uint32_t layer;
};

/* ---- life
 * ------------------------------------------------------------------------------------------------------------- */

static enum td_status check_layout(const struct td_forward *f, enum td_kv_group g, struct td_err *err)
{
    const struct td_kv_group_layout *l = &f->o.kv[g];
    const char *which = g == TD_KV_SLIDING ? "sliding" : "full";
    if (f->c->n_group_layers[g] == 0) return TD_OK;
    uint32_t n_heads = f->w->shard.n_kv_heads;
    if (l->n_layers != f->c->n_group_layers[g] || l->n_heads != n_heads || l->head_dim != f->c->head_dim)
        return td_err_set(err, TD_E_BAD_CONFIG,
                          "KV layout of %s layers: %u layers, %u heads of %u, but a rank has %u, %u of %u", which,
                          l->n_layers, l->n_heads, l->head_dim, f->c->n_group_layers[g], n_heads, f->c->head_dim);
    if (l->page_tokens == 0 || l->n_pages == 0 || f->o.kv_base[g] == NULL)
        return td_err_set(err, TD_E_BAD_CONFIG, "KV layout of %s layers: no pages", which);
    /* A window holds so little that FP8 saves nothing there. */
    bool is_known = l->dtype == TD_F32 || l->dtype == TD_BF16 || (l->dtype == TD_E4M3 && g == TD_KV_FULL);
    if (!is_known)
        return td_err_set(err, TD_E_UNSUPPORTED, "KV type of %s layers: only bf16, f32%s", which,
                          g == TD_KV_FULL ? ", e4m3" : "");
    return TD_OK;
}

enum td_status td_forward_create_rank(struct td_model *model, const struct td_engine_options *o, uint32_t rank,
                                      struct td_forward_group *group, struct td_forward *out, struct td_err *err)
{
    enum td_status st;
    const struct td_model_config *c = td_model_config_of(model);
    struct td_device *device = td_model_device_of(model);
    struct td_forward f = {
        .group = group, .c = c, .w = td_model_rank_weights(model, rank), .o = *o, .ops = td_device_ops(device)};
    const struct td_shard *shard = &f.w->shard;
    memcpy(f.o.kv_base, td_engine_kv_base(&f.o, rank), sizeof f.o.kv_base);
    if (shard->tp > 1 && group == NULL)
        TD_TRY(td_err_set(err, TD_E_BAD_CONFIG, "a rank of %u cannot run alone", shard->tp));
    if (o->max_batch_tokens == 0 || o->max_batch_segments == 0 || o->max_context_tokens == 0)
        TD_TRY(td_err_set(err, TD_E_BAD_CONFIG, "engine limits: none may be 0"));
    uint32_t n_pages = 0;
    for (enum td_kv_group g = 0; g < TD_KV_N_GROUPS; g++) {
        TD_TRY(check_layout(&f, g, err));
        if (c->n_group_layers[g] == 0) continue;
        uint32_t n = (o->max_context_tokens - 1) / o->kv[g].page_tokens + 1;
        if (n > n_pages) n_pages = n;
    }
    td_pieces_init(&f.o_pieces, c->n_heads * c->head_dim, c->n_kv_heads, shard->first_kv_head, shard->n_kv_heads);
    td_pieces_init(&f.down_pieces, c->intermediate, TD_EXPERT_PIECES, shard->first_piece, shard->n_pieces);
    struct td_scratch_shape scratch = {.n_rows = o->max_batch_tokens,
                                       .top_k = c->top_k,
                                       .n_experts = c->n_experts,
                                       .intermediate = shard->n_units,
                                       .hidden = c->hidden};
    if (o->kv[TD_KV_FULL].dtype == TD_E4M3)
        scratch.fp8_kv_bytes = (size_t)n_pages * td_kv_page_bytes(&o->kv[TD_KV_FULL]);
    uint32_t n_logit_rows = td_device_can_sample(device) ? LOGIT_ROWS_DEVICE : LOGIT_ROWS;
    struct td_workspace_shape shape = {.T = o->max_batch_tokens,
                                       .S = o->max_batch_segments,
                                       .H = c->hidden,
                                       .Q = (size_t)shard->n_heads * c->head_dim,
                                       .C = c->head_dim / 2,
                                       .K = c->top_k,
                                       .V = shard->n_vocab,
                                       .G = group != NULL && rank == 0 ? c->vocab : 0,
                                       .P = n_pages,
                                       .R = o->max_batch_segments < n_logit_rows ? o->max_batch_segments : n_logit_rows,
                                       .scratch_bytes = td_device_scratch_bytes(device, &scratch)};
    if (td_device_can_sample(device) && group == NULL) shape.D = shape.R;
    TD_TRY(td_workspace_create(device, &shape, &f.ws, err));
    st = td_stream_create(device, o->n_threads, &f.stream);
    if (st != TD_OK) TD_TRY(td_err_set(err, st, "the engine's stream cannot be created"));
    if (rank == 0) td_workspace_log(&f.ws);  /* the others need about the same */
    if (group == NULL && o->stage == NULL) { /* a stage needs the device, which a note may not call */
        TD_TRY(td_side_stream_create(device, &f.notes));
        f.layer_notes = td_calloc(c->n_layers, sizeof *f.layer_notes);
        if (f.layer_notes == NULL) TD_TRY(td_err_set(err, TD_E_NO_MEMORY, "no memory for the engine"));
    }
    if (group == NULL && td_device_has_graphs(device)) {
        f.graphs = td_calloc(o->max_batch_segments + 1, sizeof *f.graphs);
        f.has_run = td_calloc(o->max_batch_segments + 1, sizeof *f.has_run);
        if (f.graphs == NULL || f.has_run == NULL) TD_TRY(td_err_set(err, TD_E_NO_MEMORY, "no memory for graphs"));
    }
    *out = f;
    return TD_OK;
out:
    td_forward_free(&f);
    return st;
}

enum td_status td_forward_create(struct td_model *model, const struct td_engine_options *o, struct td_forward *out,
                                 struct td_err *err)
{
    return td_forward_create_rank(model, o, 0, NULL, out, err);
}

void td_forward_free(struct td_forward *f)
{
    for (uint32_t i = 0; f->graphs != NULL && i <= f->o.max_batch_segments; i++)
        td_graph_destroy(f->ws.device, f->graphs[i]);
    free(f->graphs);
    free(f->has_run);
    td_stream_destroy(f->notes);
    free(f->layer_notes);
    td_stream_destroy(f->stream);
    td_workspace_free(&f->ws);
    *f = (struct td_forward){0};
}

/* ---- the other ranks
 * ---------------------------------------------------------------------------------------------------------- */

static enum td_status sum_over_ranks(struct td_forward *f, float *x, size_t n)
{
    return f->group == NULL ? TD_OK : td_coll_all_reduce(f->group->coll, f->w->shard.rank, f->stream, x, n);
}

static enum td_status meet(struct td_forward *f) { return f->group == NULL ? TD_OK : td_coll_barrier(f->group->coll); }

/* Asked by all ranks before a layer. The leader's answer is made while every other rank is between its last question
 * and the collective that ends before the next one, so all read the same. */
static bool is_abandoned(const struct td_forward *f, const struct td_batch *b)
{
    const atomic_bool *flag = f->group != NULL ? &f->group->is_abandoned : &b->is_abandoned;
    return atomic_load_explicit(flag, memory_order_relaxed);
}

static void decide_abandoned(struct td_forward *f, const struct td_batch *b)
{
    if (f->group != NULL && f->group->leader == f)
        atomic_store(&f->group->is_abandoned, atomic_load_explicit(&b->is_abandoned, memory_order_relaxed));
}

/* ---- one layer
 * ---------------------------------------------------------------------------------------------------------- */

/* The rows that go through a layer: all of the batch, or its tail. */
struct rows {
    uint32_t n, n_seqs, n_single;
    float *x, *t, *cos, *sin;
    const uint32_t *positions;
    const struct td_seq_rows *seqs[TD_KV_N_GROUPS], *seqs_host[TD_KV_N_GROUPS];
};

static enum td_status project(struct td_forward *f, uint32_t layer, const struct rows *r, uint32_t parts)
{
    enum td_kv_group g = f->c->is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    struct td_workspace *ws = &f->ws;
    struct td_qkv_args a = {
        .x = r->t,
        .w = f->w->layers[layer].qkv,
        .cos = r->cos,
        .sin = r->sin,
        .positions = r->positions,
        .row_page = g == TD_KV_SLIDING ? ws->row_page_sliding.dev : ws->row_page_full.dev,
        .kv = {.layout = f->o.kv[g], .pool = f->o.kv_base[g], .layer = f->c->layer_in_group[layer]},
        .q = ws->q.dev,
        .n_rows = r->n,
        .n_heads = f->w->shard.n_heads,
        .n_kv_heads = f->w->shard.n_kv_heads,
        .head_dim = f->c->head_dim,
        .parts = parts,
    };
    return f->ops->qkv(f->stream, &a);
}

/* From q to the normalised input of the next layer. */
static enum td_status finish_layer(struct td_forward *f, const struct td_batch *b, uint32_t layer, const struct rows *r)
{
    enum td_status st;
    const struct td_model_config *c = f->c;
    const struct td_layer_weights *w = &f->w->layers[layer];
    enum td_kv_group g = c->is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    struct td_workspace *ws = &f->ws;
    struct td_attention_args attention = {
        .q = ws->q.dev,
        .kv = {.layout = f->o.kv[g], .pool = f->o.kv_base[g], .layer = c->layer_in_group[layer]},
        .seqs = r->seqs[g],
        .pages = g == TD_KV_SLIDING ? ws->pages_sliding.dev : ws->pages_full.dev,
        .n_seqs = r->n_seqs,
        .n_rows = r->n,
        .n_single = r->n_single,
        .seqs_host = r->seqs_host[g],
        .scratch = ws->scratch.dev,
        .scratch_bytes = ws->scratch.n,
        .sinks = w->sinks,
        .out = ws->heads.dev,
        .n_heads = f->w->shard.n_heads,
        .n_kv_heads = f->w->shard.n_kv_heads,
        .head_dim = c->head_dim,
        .window = g == TD_KV_SLIDING ? c->window : 0,
        .scale = 1.0f / sqrtf((float)c->head_dim),
    };
    TD_TRY(f->ops->attention(f->stream, &attention));
    struct td_o_proj_args o = {.x = ws->heads.dev, .w = w->o, .pieces = f->o_pieces, .y = ws->attn.dev, .n_rows = r->n};
    TD_TRY(f->ops->o_proj(f->stream, &o));
    TD_TRY(sum_over_ranks(f, ws->attn.dev, (size_t)r->n * c->hidden));
    struct td_add_norm_args add = {.x = r->x,
                                   .y = ws->attn.dev,
                                   .bias = w->o_bias,
                                   .w = w->post_norm,
                                   .t = r->t,
                                   .n_rows = r->n,
                                   .dim = c->hidden,
                                   .eps = c->rms_eps};
    TD_TRY(f->ops->add_norm(f->stream, &add));
    struct td_moe_args moe = {.x = r->t,
                              .router = w->router,
                              .gate_up = w->gate_up,
                              .down = w->down,
                              .pieces = f->down_pieces,
                              .n_rows = r->n,
                              .hidden = c->hidden,
                              .intermediate = f->w->shard.n_units,
                              .n_experts = c->n_experts,
                              .top_k = c->top_k,
                              .alpha = c->swiglu_alpha,
                              .limit = c->swiglu_limit,
                              .ids = ws->ids.dev,
                              .weights = ws->weights.dev,
                              .y = ws->experts.dev,
                              .scratch = ws->scratch.dev};
    TD_TRY(f->ops->moe(f->stream, &moe));
    decide_abandoned(f, b);
    TD_TRY(sum_over_ranks(f, ws->experts.dev, (size_t)r->n * c->top_k * c->hidden));
    bool is_last = layer + 1 == c->n_layers;
    struct td_moe_add_norm_args mix = {.x = r->x,
                                       .y = ws->experts.dev,
                                       .ids = ws->ids.dev,
                                       .weights = ws->weights.dev,
                                       .down_bias = w->down_bias,
                                       .w = is_last ? f->w->final_norm : f->w->layers[layer + 1].input_norm,
                                       .t = r->t,
                                       .n_rows = r->n,
                                       .dim = c->hidden,
                                       .top_k = c->top_k,
                                       .eps = c->rms_eps};
    TD_TRY(f->ops->moe_add_norm(f->stream, &mix));
    if (f->probe != NULL) f->probe(f->probe_user, (int32_t)layer, r->x, r->n, ws->ids.dev);
out:
    return st;
}

/* ---- the pass
 * ----------------------------------------------------------------------------------------------------------- */

static struct rows tail_rows(const struct td_forward *f)
{
    const struct td_workspace *ws = &f->ws;
    return (struct rows){.n = f->n_tail,
                         .n_seqs = f->n_tail,
                         .n_single = f->n_tail,
                         .x = ws->tail_x.dev,
                         .t = ws->tail_t.dev,
                         .cos = ws->tail_cos.dev,
                         .sin = ws->tail_sin.dev,
                         .seqs = {ws->tail_sliding.dev, ws->tail_full.dev},
                         .seqs_host = {ws->tail_sliding.host, ws->tail_full.host}};
}

/* Into tail_*: the rows that somebody samples from. Only they go on when the last layer's K and V are stored. */
static enum td_status take_tail(struct td_forward *f, const struct rows *all, struct rows *out)
{
    enum td_status st;
    struct td_workspace *ws = &f->ws;
    const uint32_t *rows = ws->tail_rows.dev;
    struct td_gather_args g = {
        .x = all->x, .rows = rows, .y = ws->tail_x.dev, .n_rows = f->n_tail, .dim = f->c->hidden};
    TD_TRY(f->ops->gather(f->stream, &g));
    g.x = all->t;
    g.y = ws->tail_t.dev;
    g.dim = f->c->hidden * td_device_act_bytes(ws->device) / (uint32_t)sizeof(float);
    TD_TRY(f->ops->gather(f->stream, &g));
    g.dim = f->c->head_dim / 2;
    g.x = all->cos;
    g.y = ws->tail_cos.dev;
    TD_TRY(f->ops->gather(f->stream, &g));
    g.x = all->sin;
    g.y = ws->tail_sin.dev;
    TD_TRY(f->ops->gather(f->stream, &g));
    *out = tail_rows(f);
out:
    return st;
}

/* One row's logits on the host, and what its segment wants of them. */
static enum td_status finish_row(struct td_forward *f, struct td_segment *s, const float *logits)
{
    struct td_workspace *ws = &f->ws;
    uint32_t vocab = f->c->vocab;
    float *row = ws->host_logits.host;
    enum td_status st = td_stream_copy_out(f->stream, row, logits, vocab * sizeof *row);
    if (st == TD_OK) st = td_stream_sync(f->stream);
    if (st != TD_OK) return st;
    if (s->logits_out != NULL) memcpy(s->logits_out, row, vocab * sizeof *row);
    /* Rows past n_token_ids name no token and cannot be drawn. */
    if (s->want_token) td_sample(row, f->c->n_token_ids, s, ws->sample_scratch.host);
    return TD_OK;
}

/* The device's draws for n rows; is_asked[i]: row i's is among them. */
static enum td_status draw_there(struct td_forward *f, const struct td_batch *b, uint32_t first, uint32_t n,
                                 bool *is_asked)
{
    enum td_status st;
    struct td_workspace *ws = &f->ws;
    struct td_sample_asked asked = {.rows = ws->sample_rows.host,
                                    .filtered = ws->sample_filtered.host,
                                    .edits = ws->sample_edits.host,
                                    .masks = ws->sample_masks.host,
                                    .max_edits = (uint32_t)ws->sample_edits.n,
                                    .max_masks = (uint32_t)ws->sample_rows.n,
                                    .mask_words = (f->c->vocab + 31) / 32,
                                    .n_ids = f->c->n_token_ids};
    bool has_tops = false;
    for (uint32_t i = 0; i < n; i++) {
        const struct td_segment *s = &b->segments[ws->tail_segments.host[first + i]];
        is_asked[i] = s->want_token && td_sample_ask(&asked, s, (uint32_t *)(void *)ws->sample_scratch.host);
        if (!s->want_token) td_sample_ask_nothing(&asked);
        has_tops |= asked.rows[i].n_top != 0;
    }
    struct td_sample_args a = {.logits = ws->logits.dev,
                               .rows = ws->sample_rows.dev,
                               .filtered = ws->sample_filtered.dev,
                               .edits = ws->sample_edits.dev,
                               .masks = ws->sample_masks.dev,
                               .out = ws->sampled.dev,
                               .top = ws->sample_tops.dev,
                               .parts = ws->sample_parts.dev,
                               .n_rows = n,
                               .n_filtered = asked.n_filtered,
                               .vocab = f->c->vocab,
                               .n_ids = f->c->n_token_ids};
#define COPY_IN(name, count)                                                                                           \
    if ((count) != 0) TD_TRY(td_stream_copy_in(f->stream, ws->name.dev, ws->name.host, (count) * sizeof *ws->name.host))
    COPY_IN(sample_rows, n);
    COPY_IN(sample_filtered, asked.n_filtered);
    COPY_IN(sample_edits, asked.n_edits);
    COPY_IN(sample_masks, (size_t)asked.n_masks * asked.mask_words);
#undef COPY_IN
    TD_TRY(td_stream_sample(f->stream, &a));
    TD_TRY(td_stream_copy_out(f->stream, ws->sampled.host, ws->sampled.dev, n * sizeof *ws->sampled.host));
    if (has_tops)
        TD_TRY(td_stream_copy_out(f->stream, ws->sample_tops.host, ws->sample_tops.dev,
                                  (size_t)n * TD_SAMPLE_TOPS * sizeof *ws->sample_tops.host));
    TD_TRY(td_stream_sync(f->stream));
out:
    return st;
}

/* Logits of the tail rows, some at a time, and what their segments want of them. */
static enum td_status finish(struct td_forward *f, struct td_batch *b, const struct rows *tail)
{
    struct td_workspace *ws = &f->ws;
    uint32_t vocab = f->c->vocab, n_at_once = (uint32_t)(ws->logits.n / vocab);
    bool can_draw = td_device_can_sample(ws->device), is_asked[LOGIT_ROWS_DEVICE] = {false};
    for (uint32_t first = 0; first < tail->n; first += n_at_once) {
        uint32_t n = tail->n - first < n_at_once ? tail->n - first : n_at_once;
        const char *t = (const char *)tail->t + (size_t)first * f->c->hidden * td_device_act_bytes(ws->device);
        struct td_lm_head_args a = {
            .x = (const float *)(const void *)t, .w = f->w->lm_head, .logits = ws->logits.dev, .n_rows = n};
        enum td_status st = f->ops->lm_head(f->stream, &a);
        if (st == TD_OK) st = can_draw ? draw_there(f, b, first, n, is_asked) : td_stream_sync(f->stream);
        for (uint32_t i = 0; i < n && st == TD_OK; i++) {
            struct td_segment *s = &b->segments[ws->tail_segments.host[first + i]];
            bool is_drawn = is_asked[i] && ws->sampled.host[i].token != UINT32_MAX;
            if (is_drawn)
                td_sample_take(s, f->c->n_token_ids, &ws->sampled.host[i],
                               ws->sample_tops.host + (size_t)i * TD_SAMPLE_TOPS);
            if (!is_drawn || s->logits_out != NULL) st = finish_row(f, s, ws->logits.dev + (size_t)i * vocab);
        }
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

/* This rank's columns of n rows of logits, into their place in the leader's host memory. */
static enum td_status compute_columns(struct td_forward *f, const struct rows *tail, uint32_t first, uint32_t n)
{
    enum td_status st;
    struct td_workspace *ws = &f->ws;
    const struct td_shard *shard = &f->w->shard;
    const char *t = (const char *)tail->t + (size_t)first * f->c->hidden * td_device_act_bytes(ws->device);
    struct td_lm_head_args a = {
        .x = (const float *)(const void *)t, .w = f->w->lm_head, .logits = ws->logits.dev, .n_rows = n};
    TD_TRY(f->ops->lm_head(f->stream, &a));
    float *to = f->group->leader->ws.group_logits.host + shard->first_vocab;
    for (uint32_t i = 0; i < n; i++)
        TD_TRY(td_stream_copy_out(f->stream, to + (size_t)i * f->c->vocab, ws->logits.dev + (size_t)i * shard->n_vocab,
                                  shard->n_vocab * sizeof *to));
    TD_TRY(td_stream_sync(f->stream));
out:
    return st;
}

/* The same among ranks: each computes its columns, the leader draws. */
static enum td_status finish_together(struct td_forward *f, struct td_batch *b, const struct rows *tail)
{
    enum td_status st = TD_OK;
    struct td_workspace *ws = &f->ws;
    uint32_t vocab = f->c->vocab, n_at_once = (uint32_t)(ws->logits.n / f->w->shard.n_vocab);
    for (uint32_t first = 0; first < tail->n; first += n_at_once) {
        uint32_t n = tail->n - first < n_at_once ? tail->n - first : n_at_once;
        if (first > 0) TD_TRY(meet(f)); /* the leader is done with the rows before */
        TD_TRY(compute_columns(f, tail, first, n));
        TD_TRY(meet(f));
        for (uint32_t i = 0; i < n && f->group->leader == f; i++) {
            struct td_segment *s = &b->segments[ws->tail_segments.host[first + i]];
            const float *row = ws->group_logits.host + (size_t)i * vocab;
            if (s->logits_out != NULL) memcpy(s->logits_out, row, vocab * sizeof *row);
            if (s->want_token) td_sample(row, f->c->n_token_ids, s, ws->group_scratch.host);
        }
    }
out:
    return st;
}

static void call_on_layer(void *arg)
{
    const struct td_layer_note *n = arg;
    n->on_layer(n->layer, n->user);
}

/* The layer's KV is in its pages once the stream is here. Where the device tells of it, the stream goes on meanwhile,
 * and this thread stays less than two layers ahead of the news: an abandoned pass ends soon. */
static enum td_status tell_layer(struct td_forward *f, uint32_t layer, void (*on_layer)(uint32_t layer, void *user),
                                 void *user)
{
    enum td_status st;
    if (f->notes == NULL) {
        st = td_stream_sync(f->stream);
        if (st == TD_OK) on_layer(layer, user);
        return st;
    }
    struct td_layer_note *n = &f->layer_notes[layer];
    *n = (struct td_layer_note){on_layer, user, layer};
    TD_TRY(td_stream_sync(f->notes));
    TD_TRY(td_stream_follow(f->notes, f->stream));
    TD_TRY(td_stream_call(f->notes, call_on_layer, n));
out:
    return st;
}

/* From the embedding to the tail rows' final norm. */
static enum td_status run_layers(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                                 void *user, struct rows *tail)
{
    enum td_status st;
    const struct td_model_config *c = f->c;
    struct td_workspace *ws = &f->ws;
    struct rows all = {.n = f->n_rows,
                       .n_seqs = f->n_segments,
                       .n_single = f->n_single,
                       .x = ws->x.dev,
                       .t = ws->t.dev,
                       .cos = ws->cos.dev,
                       .sin = ws->sin.dev,
                       .positions = ws->positions.dev,
                       .seqs = {ws->seqs_sliding.dev, ws->seqs_full.dev},
                       .seqs_host = {ws->seqs_sliding.host, ws->seqs_full.host}};
    struct td_embed_args embed = {
        .tokens = ws->tokens.dev, .table = f->w->embed, .x = all.x, .n_rows = all.n, .dim = c->hidden};
    TD_TRY(f->ops->embed(f->stream, &embed));
    struct td_rope_args rope = {.positions = all.positions,
                                .freqs = f->w->rope_freqs,
                                .factor = f->w->rope_factor,
                                .cos = all.cos,
                                .sin = all.sin,
                                .n_rows = all.n,
                                .half = c->head_dim / 2};
    TD_TRY(f->ops->rope(f->stream, &rope));
    if (f->probe != NULL) f->probe(f->probe_user, -1, all.x, all.n, NULL);
    struct td_rmsnorm_args norm = {
        .x = all.x, .w = f->w->layers[0].input_norm, .y = all.t, .n_rows = all.n, .dim = c->hidden, .eps = c->rms_eps};
    TD_TRY(f->ops->rmsnorm(f->stream, &norm));
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        bool is_last = layer + 1 == c->n_layers;
        if (is_abandoned(f, b)) {
            st = TD_E_CANCELED;
            goto out;
        }
        TD_TRY(project(f, layer, &all, is_last ? TD_QKV_KV : TD_QKV_Q | TD_QKV_KV));
        if (on_layer != NULL) TD_TRY(tell_layer(f, layer, on_layer, user));
        if (!is_last) {
            TD_TRY(finish_layer(f, b, layer, &all));
            continue;
        }
        if (f->n_tail == 0) break;
        TD_TRY(take_tail(f, &all, tail));
        TD_TRY(project(f, layer, tail, TD_QKV_Q));
        TD_TRY(finish_layer(f, b, layer, tail));
        if (f->probe != NULL) f->probe(f->probe_user, (int32_t)c->n_layers, tail->t, tail->n, NULL);
    }
out:
    return st;
}

/* A step of nothing but decode is the same launches whatever the lengths: those are in memory. */
static bool is_recordable(const struct td_forward *f, void (*on_layer)(uint32_t layer, void *user))
{
    return f->graphs != NULL && on_layer == NULL && f->probe == NULL && f->n_rows == f->n_segments &&
           f->n_single == f->n_rows && f->n_tail == f->n_rows;
}

static enum td_status run_recorded(struct td_forward *f, struct td_batch *b, struct rows *tail)
{
    struct td_graph **g = &f->graphs[f->n_rows];
    if (*g == NULL) {
        enum td_status st = td_graph_begin(f->stream), recorded = st;
        if (st == TD_OK) recorded = run_layers(f, b, NULL, NULL, tail);
        if (st == TD_OK) st = td_graph_end(f->stream, g);
        if (recorded != TD_OK) {
            td_graph_destroy(f->ws.device, *g);
            *g = NULL;
            return recorded;
        }
        if (st != TD_OK) return st;
    }
    *tail = tail_rows(f);
    return td_graph_launch(f->stream, *g);
}

static enum td_status run_pass(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                               void *user)
{
    enum td_status st;
    struct rows tail;
    if (is_recordable(f, on_layer) && f->has_run[f->n_rows] && !is_abandoned(f, b)) {
        TD_TRY(run_recorded(f, b, &tail));
    } else {
        TD_TRY(run_layers(f, b, on_layer, user, &tail));
        if (is_recordable(f, on_layer)) f->has_run[f->n_rows] = true;
    }
    if (f->n_tail > 0) TD_TRY(f->group == NULL ? finish(f, b, &tail) : finish_together(f, b, &tail));
    st = td_stream_sync(f->stream);
out:
    if (f->notes != NULL && on_layer != NULL) { /* all are told before anybody hears of the end */
        enum td_status told = td_stream_sync(f->notes);
        if (st == TD_OK) st = told;
    }
    if (st == TD_E_DEVICE) TD_ERROR("device_failed", "error=\"%s\"", td_device_last_error(f->ws.device));
    return st;
}

/* This rank's heads of the pages; in stream order before all that reads or writes them. */
static enum td_status copy_pages(struct td_forward *f, const struct td_batch *b)
{
    for (uint32_t i = 0; i < b->n_copies; i++) {
        const struct td_page_copy *c = &b->copies[i];
        const struct td_kv_group_layout *l = &f->o.kv[c->group];
        uint8_t *base = f->o.kv_base[c->group];
        for (uint32_t layer = 0; layer < l->n_layers; layer++) {
            enum td_status st =
                td_stream_copy(f->stream, base + td_kv_offset(l, layer, c->to, 0, false, 0),
                               base + td_kv_offset(l, layer, c->from, 0, false, 0), td_kv_page_bytes(l));
            if (st != TD_OK) return st;
        }
    }
    return TD_OK;
}

/* One rank's part of a pass whose plan is there. All ranks leave together: what they shared may change after. */
static enum td_status run_rank(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                               void *user)
{
    enum td_status st = td_plan_take(f, f->group != NULL ? f->group->leader : f);
    if (st == TD_OK) st = copy_pages(f, b);
    if (st == TD_OK) st = run_pass(f, b, on_layer, user);
    if (st == TD_OK || st == TD_E_CANCELED) {
        enum td_status met = meet(f);
        return met == TD_OK ? st : met;
    }
    if (f->group != NULL) td_coll_fail(f->group->coll, st);
    return st;
}

enum td_status td_forward_run(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                              void *user)
{
    td_plan_make(f, b);
    if (f->group != NULL) {
        f->group->batch = b;
        f->group->on_layer = on_layer;
        f->group->user = user;
        decide_abandoned(f, b);
        enum td_status st = meet(f);
        if (st != TD_OK) return st;
    }
    return run_rank(f, b, on_layer, user);
}

bool td_forward_follow(struct td_forward *f)
{
    struct td_forward_group *g = f->group;
    if (meet(f) != TD_OK || g->batch == NULL) return false;
    enum td_status st = run_rank(f, g->batch, g->on_layer, g->user);
    return st == TD_OK || st == TD_E_CANCELED;
}

void td_forward_end_group(struct td_forward *leader)
{
    leader->group->batch = NULL;
    (void)meet(leader); /* broken: they have left */
}
