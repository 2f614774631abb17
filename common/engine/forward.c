#include "common/engine/forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/forward_int.h"

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
    uint32_t n_logit_rows = td_device_can_sample(device) ? TD_LOGIT_ROWS_DEVICE : TD_LOGIT_ROWS;
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
    f.can_begin = group == NULL && td_device_can_sample(device) && td_device_runs_behind(device);
    if (f.can_begin && td_device_has_graphs(device) && o->graphs != TD_GRAPHS_OFF) {
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
    enum td_status st = td_forward_create_rank(model, o, 0, NULL, out, err);
    if (st == TD_OK && out->graphs != NULL && o->graphs == TD_GRAPHS_START) {
        st = td_forward_record_all(out);
        if (st != TD_OK) {
            td_err_set(err, st, "decode steps cannot be recorded: %s", td_device_last_error(out->ws.device));
            td_forward_free(out);
        }
    }
    return st;
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

static enum td_status project(struct td_forward *f, uint32_t layer, const struct td_rows *r, uint32_t parts)
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
static enum td_status finish_layer(struct td_forward *f, const struct td_batch *b, uint32_t layer,
                                   const struct td_rows *r)
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
        .pages = ws->pages.dev,
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

struct td_rows td_forward_tail(const struct td_forward *f)
{
    const struct td_workspace *ws = &f->ws;
    return (struct td_rows){.n = f->n_tail,
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
static enum td_status take_tail(struct td_forward *f, const struct td_rows *all, struct td_rows *out)
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
    *out = td_forward_tail(f);
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

enum td_status td_forward_layers(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                                 void *user, struct td_rows *tail)
{
    enum td_status st;
    const struct td_model_config *c = f->c;
    struct td_workspace *ws = &f->ws;
    struct td_rows all = {.n = f->n_rows,
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
    if (f->group == NULL) {
        embed.fed = ws->fed.dev;
        embed.drawn = ws->sampled.dev;
    }
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

static enum td_status run_pass(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                               void *user)
{
    enum td_status st;
    struct td_rows tail;
    TD_TRY(td_forward_layers(f, b, on_layer, user, &tail));
    if (f->n_tail > 0) TD_TRY(f->group == NULL ? td_draws_finish(f, b, &tail) : td_draws_finish_together(f, b, &tail));
    st = td_stream_sync(f->stream);
out:
    if (f->notes != NULL && on_layer != NULL) { /* all are told before anybody hears of the end */
        enum td_status told = td_stream_sync(f->notes);
        if (st == TD_OK) st = told;
    }
    if (st == TD_E_DEVICE) TD_ERROR("device_failed", "error=\"%s\"", td_device_last_error(f->ws.device));
    return st;
}

enum td_status td_forward_copy_pages(struct td_forward *f, const struct td_batch *b)
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

enum td_status td_forward_rank(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                               void *user)
{
    enum td_status st = td_plan_take(f, f->group != NULL ? f->group->leader : f);
    if (st == TD_OK) st = td_forward_copy_pages(f, b);
    if (st == TD_OK) st = run_pass(f, b, on_layer, user);
    if (st == TD_OK || st == TD_E_CANCELED) {
        enum td_status met = td_forward_meet(f);
        return met == TD_OK ? st : met;
    }
    if (f->group != NULL) td_coll_fail(f->group->coll, st);
    return st;
}

enum td_status td_forward_run(struct td_forward *f, struct td_batch *b, void (*on_layer)(uint32_t layer, void *user),
                              void *user)
{
    if (on_layer == NULL && td_forward_may_begin(f, b)) {
        enum td_status st = td_forward_begin(f, b);
        return st == TD_OK ? td_forward_end(f) : st;
    }
    struct td_pass *p = td_pass_open(f, b, 1 - f->turn);
    if (f->group != NULL) {
        f->group->batch = b;
        f->group->on_layer = on_layer;
        f->group->user = user;
        decide_abandoned(f, b);
        enum td_status st = td_forward_meet(f);
        if (st != TD_OK) return st;
    }
    enum td_status st = td_forward_rank(f, b, on_layer, user);
    td_pass_close(f, p);
    return st;
}

bool td_forward_follow(struct td_forward *f)
{
    struct td_forward_group *g = f->group;
    if (td_forward_meet(f) != TD_OK || g->batch == NULL) return false;
    enum td_status st = td_forward_rank(f, g->batch, g->on_layer, g->user);
    return st == TD_OK || st == TD_E_CANCELED;
}

void td_forward_end_group(struct td_forward *leader)
{
    leader->group->batch = NULL;
    (void)td_forward_meet(leader); /* broken: they have left */
}
