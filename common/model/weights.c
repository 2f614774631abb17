#include "common/model/weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/model/loader_int.h"

#define LEAST_ROOM (32u << 20) /* of a lane: a matrix is loaded in pieces of rows that fit */
#define CHUNK_ROWS 64u         /* whole panels, whatever the backend's are */

/* ---- small tensors ---- */

/* Of n values, those from first on. */
static enum td_status load_some_floats(struct td_loader *l, const char *name, uint32_t n, uint32_t first,
                                       uint32_t n_part, const float **out)
{
    struct td_want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 1, .shape = {n}};
    const float *host;
    void *p;
    size_t bytes = (size_t)n_part * sizeof(float);
    enum td_status st = td_loader_floats(l, name, &want, &host);
    if (st == TD_OK) st = td_loader_alloc(l, bytes, name, true, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, host + first, bytes);
    if (st == TD_OK) *out = p;
    return st;
}

static enum td_status load_floats(struct td_loader *l, const char *name, uint32_t rows, uint32_t n, const float **out)
{
    struct td_want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = rows ? 2 : 1, .shape = {rows ? rows : n, n}};
    const float *host;
    void *p;
    size_t bytes = (size_t)(rows ? rows : 1) * n * sizeof(float);
    enum td_status st = td_loader_floats(l, name, &want, &host);
    if (st == TD_OK) st = td_loader_alloc(l, bytes, name, false, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, host, bytes);
    if (st == TD_OK) *out = p;
    return st;
}

/* ---- dense matrices
 * --------------------------------------------------------------------------------------------------- */

struct part { /* of one stored matrix among those stacked into a packed one: some of its rows */
    const char *name;
    uint32_t n_stored, first, n_out;
};
struct cols { /* and of those, some columns */
    uint32_t n_stored, first, n_in;
};

/* One of the parts, in pieces of rows that fit a lane; *to and *bias_to move on. */
static enum td_status load_part(struct td_loader *l, const char *name, const struct td_tensor *t, const struct part *p,
                                struct cols cols, enum td_row_order order, const float *bias, char **to,
                                char **bias_to)
{
    enum td_status st = TD_OK;
    const size_t row_bytes = (size_t)cols.n_stored * sizeof(uint16_t);
    const size_t n_fit = td_lanes_room(l->lanes) / (row_bytes + sizeof *bias) / CHUNK_ROWS * CHUNK_ROWS;
    for (uint32_t at = 0, n; at < p->n_out; at += n) {
        struct td_stream *stream;
        const uint8_t *data;
        const void *part_bias = NULL;
        size_t bias_bytes, bytes;
        n = p->n_out - at < n_fit ? p->n_out - at : (uint32_t)n_fit;
        TD_TRY(td_loader_turn(l, name, &stream));
        TD_TRY(td_loader_bytes(l, t, (p->first + at) * row_bytes, n * row_bytes, &data));
        if (bias != NULL) TD_TRY(td_loader_put(l, name, bias + p->first + at, n * sizeof *bias, &part_bias));
        bytes = td_device_packed_bytes(l->w->device, n, cols.n_in, order, &bias_bytes);
        struct td_pack_weight_args a = {.source = TD_SRC_BF16_ROWS,
                                        .order = order,
                                        .data = data,
                                        .ld = cols.n_stored,
                                        .col_begin = cols.first,
                                        .n_out = n,
                                        .n_in = cols.n_in,
                                        .bias = part_bias,
                                        .out = *to,
                                        .bias_out = bias != NULL ? (float *)(void *)*bias_to : NULL,
                                        .may_defer = true};
        TD_TRY(td_loader_pack(l, stream, name, &a));
        *to += bytes;
        if (bias != NULL) *bias_to += bias_bytes;
    }
out:
    return st;
}

/* Matrices stacked by output row; each part's rows are a multiple of a panel unless it is the last. */
static enum td_status load_dense(struct td_loader *l, const char *prefix, const struct part *parts, uint32_t n_parts,
                                 struct cols cols, enum td_row_order order, bool has_bias, bool is_sharded,
                                 struct td_weight *out)
{
    enum td_status st;
    void *data, *bias = NULL;
    uint32_t n_out = 0;
    for (uint32_t i = 0; i < n_parts; i++) n_out += parts[i].n_out;
    size_t bias_bytes, bytes = td_device_packed_bytes(l->w->device, n_out, cols.n_in, order, &bias_bytes);
    TD_TRY(td_loader_alloc(l, bytes, prefix, is_sharded, &data));
    if (has_bias) TD_TRY(td_loader_alloc(l, bias_bytes, prefix, is_sharded, &bias));
    char *to = data, *bias_to = bias;
    for (uint32_t i = 0; i < n_parts; i++) {
        char name[256];
        struct td_tensor t;
        const float *host_bias = NULL;
        if (has_bias) {
            struct td_want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 1, .shape = {parts[i].n_stored}};
            snprintf(name, sizeof name, "%s%s.bias", prefix, parts[i].name);
            TD_TRY(td_loader_floats(l, name, &want, &host_bias));
        }
        struct td_want want = {.type = TD_T_BF16, .n_dims = 2, .shape = {parts[i].n_stored, cols.n_stored}};
        snprintf(name, sizeof name, "%s%s.weight", prefix, parts[i].name);
        TD_TRY(td_loader_find(l, name, &want, &t));
        TD_TRY(load_part(l, name, &t, &parts[i], cols, order, host_bias, &to, &bias_to));
    }
    *out = (struct td_weight){.data = data, .bias = bias, .n_out = n_out, .n_in = cols.n_in};
    st = TD_OK;
out:
    return st;
}

/* ---- experts
 * ------------------------------------------------------------------------------------------------------------ */

/* which: "gate_up_proj" or "down_proj"; one packed matrix an expert of this rank. */
static enum td_status load_experts(struct td_loader *l, const char *prefix, const char *which, struct part rows,
                                   struct cols cols, enum td_row_order order, bool pack_bias, struct td_weight **out)
{
    enum td_status st;
    const struct td_model_config *c = l->c;
    const struct td_shard *s = &l->w->shard;
    uint32_t n_out = rows.n_stored, n_in = cols.n_stored;
    char name[256], scales_name[256];
    struct td_tensor data, scales = {0};
    snprintf(name, sizeof name, "%s%s%s", prefix, which, c->is_mxfp4 ? "_blocks" : "");
    if (c->is_mxfp4) {
        struct td_want blocks = {.type = TD_T_U8, .n_dims = 4, .shape = {c->n_experts, n_out, n_in / 32, 16}};
        struct td_want scale = {.type = TD_T_U8, .n_dims = 3, .shape = {c->n_experts, n_out, n_in / 32}};
        snprintf(scales_name, sizeof scales_name, "%s%s_scales", prefix, which);
        TD_TRY(td_loader_find(l, name, &blocks, &data));
        TD_TRY(td_loader_find(l, scales_name, &scale, &scales));
    } else { /* unquantised experts are stored input-major */
        struct td_want plain = {.type = TD_T_BF16, .n_dims = 3, .shape = {c->n_experts, n_in, n_out}};
        TD_TRY(td_loader_find(l, name, &plain, &data));
    }
    struct td_weight *w = td_calloc(c->n_experts, sizeof *w);
    if (w == NULL) TD_TRY(td_loader_no_memory(l, name));
    *out = w; /* freed with the layer */

    void *packed, *bias = NULL;
    size_t bias_bytes, bytes = td_device_packed_bytes(l->w->device, rows.n_out, cols.n_in, order, &bias_bytes);
    TD_TRY(td_loader_alloc(l, bytes * s->n_experts, name, true, &packed));
    if (pack_bias) TD_TRY(td_loader_alloc(l, bias_bytes * s->n_experts, name, true, &bias));
    const float *host_bias = NULL; /* of all experts */
    if (pack_bias) {
        char bias_name[256];
        struct td_want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 2, .shape = {c->n_experts, n_out}};
        snprintf(bias_name, sizeof bias_name, "%s%s_bias", prefix, which);
        TD_TRY(td_loader_floats(l, bias_name, &want, &host_bias));
    }
    for (uint32_t i = 0; i < s->n_experts; i++) {
        const uint32_t e = s->first_expert + i;
        const uint64_t elements = (uint64_t)n_out * n_in, rows_at = e * elements + (uint64_t)rows.first * n_in,
                       n_rows = (uint64_t)rows.n_out * n_in;
        struct td_stream *stream;
        struct td_pack_weight_args a = {.order = order,
                                        .col_begin = cols.first,
                                        .n_out = rows.n_out,
                                        .n_in = cols.n_in,
                                        .out = (char *)packed + i * bytes,
                                        .bias_out = pack_bias ? (float *)(void *)((char *)bias + i * bias_bytes) : NULL,
                                        .n_inexact = &l->n_inexact,
                                        .may_defer = true};
        const uint8_t *stored;
        const void *part_bias = NULL;
        TD_TRY(td_loader_turn(l, name, &stream));
        if (c->is_mxfp4) {
            a.source = TD_SRC_MXFP4;
            a.ld = n_in;
            TD_TRY(td_loader_bytes(l, &data, rows_at / 2, n_rows / 2, &stored));
            TD_TRY(td_loader_bytes(l, &scales, rows_at / 32, n_rows / 32, &a.scales));
        } else {
            a.source = TD_SRC_BF16_COLS;
            a.ld = n_out;
            a.row_begin = rows.first;
            TD_TRY(td_loader_bytes(l, &data, e * elements * 2, elements * 2, &stored));
        }
        if (pack_bias)
            TD_TRY(td_loader_put(l, name, host_bias + (size_t)e * n_out + rows.first, rows.n_out * sizeof *host_bias,
                                 &part_bias));
        a.data = stored;
        a.bias = part_bias;
        TD_TRY(td_loader_pack(l, stream, c->is_mxfp4 ? scales_name : name, &a));
        w[e] = (struct td_weight){.data = a.out, .bias = a.bias_out, .n_out = rows.n_out, .n_in = cols.n_in};
    }
    st = td_loader_finish(l, c->is_mxfp4 ? scales_name : name);
out:
    return st;
}

/* ---- the whole
 * ------------------------------------------------------------------------------------------------------------ */

static enum td_status load_layer(struct td_loader *l, uint32_t i, struct td_layer_weights *w)
{
    enum td_status st;
    const struct td_model_config *c = l->c;
    char layer[64], name[256];
    const struct td_shard *s = &l->w->shard;
    uint32_t d = c->head_dim, q = c->n_heads * d, kv = c->n_kv_heads * d, group = c->n_heads / c->n_kv_heads;
    uint32_t first_q = s->first_kv_head * group * d, n_q = s->n_heads * d;
    uint32_t first_kv = s->first_kv_head * d, n_kv = s->n_kv_heads * d;
    snprintf(layer, sizeof layer, "model.layers.%u.", i);

    snprintf(name, sizeof name, "%sinput_layernorm.weight", layer);
    TD_TRY(load_floats(l, name, 0, c->hidden, &w->input_norm));
    snprintf(name, sizeof name, "%spost_attention_layernorm.weight", layer);
    TD_TRY(load_floats(l, name, 0, c->hidden, &w->post_norm));
    snprintf(name, sizeof name, "%sself_attn.sinks", layer);
    TD_TRY(load_some_floats(l, name, c->n_heads, s->first_kv_head * group, s->n_heads, &w->sinks));
    snprintf(name, sizeof name, "%sself_attn.o_proj.bias", layer);
    TD_TRY(load_floats(l, name, 0, c->hidden, &w->o_bias));

    snprintf(name, sizeof name, "%sself_attn.", layer);
    const struct part qkv[] = {
        {"q_proj", q, first_q, n_q}, {"k_proj", kv, first_kv, n_kv}, {"v_proj", kv, first_kv, n_kv}};
    const struct part o[] = {{"o_proj", c->hidden, 0, c->hidden}};
    const struct cols all = {c->hidden, 0, c->hidden}, heads = {q, first_q, n_q};
    TD_TRY(load_dense(l, name, qkv, 3, all, TD_ROWS_DENSE, true, true, &w->qkv));
    TD_TRY(load_dense(l, name, o, 1, heads, TD_ROWS_DENSE, false, true, &w->o));
    snprintf(name, sizeof name, "%smlp.", layer);
    const struct part router[] = {{"router", c->n_experts, 0, c->n_experts}};
    TD_TRY(load_dense(l, name, router, 1, all, TD_ROWS_PLAIN, true, false, &w->router));

    snprintf(name, sizeof name, "%smlp.experts.", layer);
    const struct part gate_up = {"gate_up_proj", 2 * c->intermediate, 2 * s->first_unit, 2 * s->n_units};
    const struct part down = {"down_proj", c->hidden, 0, c->hidden};
    const struct cols units = {c->intermediate, s->first_unit, s->n_units};
    TD_TRY(load_experts(l, name, gate_up.name, gate_up, all, TD_ROWS_GATE_UP, true, &w->gate_up));
    TD_TRY(load_experts(l, name, down.name, down, units, TD_ROWS_DOWN, false, &w->down));
    snprintf(name, sizeof name, "%smlp.experts.down_proj_bias", layer);
    TD_TRY(load_floats(l, name, c->n_experts, c->hidden, &w->down_bias));
    st = TD_OK;
out:
    return st;
}

static enum td_status load_embedding(struct td_loader *l)
{
    enum td_status st;
    const char *name = "model.embed_tokens.weight";
    struct td_want want = {.type = TD_T_BF16, .n_dims = 2, .shape = {l->c->vocab, l->c->hidden}};
    struct td_tensor t;
    void *p;
    TD_TRY(td_loader_find(l, name, &want, &t));
    TD_TRY(td_loader_alloc(l, (size_t)t.n_bytes, name, false, &p));
    for (uint64_t at = 0, n, room = td_lanes_room(l->lanes); at < t.n_bytes; at += n) {
        struct td_stream *stream;
        const uint8_t *bytes;
        n = t.n_bytes - at < room ? t.n_bytes - at : room;
        TD_TRY(td_loader_turn(l, name, &stream));
        TD_TRY(td_loader_bytes(l, &t, at, n, &bytes));
        TD_TRY(td_stream_copy_in(stream, (uint8_t *)p + at, bytes, (size_t)n));
    }
    l->w->embed = p;
out:
    return st;
}

static enum td_status load_rope(struct td_loader *l)
{
    float freqs[128];
    uint32_t half = l->c->head_dim / 2;
    void *p;
    TD_CHECK(half <= TD_COUNT(freqs));
    td_model_rope(l->c, freqs, &l->w->rope_factor);
    enum td_status st = td_loader_alloc(l, half * sizeof *freqs, "rope frequencies", false, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, freqs, half * sizeof *freqs);
    if (st == TD_OK) l->w->rope_freqs = p;
    return st;
}

/* What a lane holds in a turn: an expert's matrix, or as many rows of another one as fit. */
static size_t lane_bytes(const struct td_model_config *c)
{
    uint64_t matrix = 2ull * c->intermediate * c->hidden, out = 2ull * c->intermediate + c->hidden;
    uint64_t bytes = (c->is_mxfp4 ? matrix * 17 / 32 : matrix * 2) + out * sizeof(float) + 1024;
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, k = c->hidden > q ? c->hidden : q;
    uint64_t least = LEAST_ROOM > CHUNK_ROWS * (2 * k + 64) ? LEAST_ROOM : CHUNK_ROWS * (2 * k + 64);
    return (size_t)(bytes < least ? least : bytes);
}

uint64_t td_weights_bytes(const struct td_model_config *c, const struct td_shard *s, const struct td_device *d)
{
    const uint32_t h = c->hidden, q = s->n_heads * c->head_dim, kv = s->n_kv_heads * c->head_dim;
    const struct {
        uint32_t n_out, n_in, n;
        enum td_row_order order;
        bool has_bias;
    } layer[] = {{q, h, 1, TD_ROWS_DENSE, true},
                 {kv, h, 2, TD_ROWS_DENSE, true},
                 {h, q, 1, TD_ROWS_DENSE, false},
                 {c->n_experts, h, 1, TD_ROWS_PLAIN, true},
                 {2 * s->n_units, h, s->n_experts, TD_ROWS_GATE_UP, true},
                 {h, s->n_units, s->n_experts, TD_ROWS_DOWN, false}};
    uint64_t sum = 0;
    size_t bias;
    for (size_t i = 0; i < TD_COUNT(layer); i++) {
        uint64_t bytes = td_device_packed_bytes(d, layer[i].n_out, layer[i].n_in, layer[i].order, &bias);
        sum += layer[i].n * (bytes + (layer[i].has_bias ? bias : 0));
    }
    sum += (3ull * h + s->n_heads + (uint64_t)c->n_experts * h) * sizeof(float); /* norms, o's bias, sinks, down's */
    sum *= c->n_layers;
    sum += (uint64_t)c->vocab * h * 2 + (h + c->head_dim / 2) * sizeof(float);
    return sum + td_device_packed_bytes(d, s->n_vocab, h, TD_ROWS_DENSE, &bias);
}

/* The configuration's word on the experts' form against what is there: say which of the two is off, not "missing
 * tensor". */
static enum td_status check_form(const struct td_loader *l)
{
    if (l->files == NULL) return TD_OK;
    bool has_blocks = td_safetensors_find(l->files, "model.layers.0.mlp.experts.gate_up_proj_blocks") != NULL;
    bool has_plain = td_safetensors_find(l->files, "model.layers.0.mlp.experts.gate_up_proj") != NULL;
    if (l->c->is_mxfp4 && !has_blocks && has_plain)
        return td_err_set(l->err, TD_E_BAD_FILE,
                          "config.json: quantization_config: says mxfp4, but the experts are stored unquantised");
    if (!l->c->is_mxfp4 && has_blocks && !has_plain)
        return td_err_set(l->err, TD_E_BAD_FILE,
                          "config.json: quantization_config: missing, but the experts are MXFP4");
    return TD_OK;
}

/* Piece i of n_total of a width k begins here, as td_pieces_init cuts it. */
static uint32_t piece_begin(uint32_t k, uint32_t n_total, uint32_t i) { return (uint32_t)((uint64_t)i * k / n_total); }

void td_shard_of(const struct td_model_config *c, uint32_t tp, uint32_t ep, uint32_t rank, struct td_shard *out)
{
    TD_CHECK(rank < tp && (ep == 1 || ep == tp) && c->n_kv_heads % tp == 0 && TD_EXPERT_PIECES % tp == 0);
    struct td_shard s = {.rank = rank, .tp = tp, .ep = ep};
    s.n_heads = c->n_heads / tp;
    s.n_kv_heads = c->n_kv_heads / tp;
    s.first_kv_head = rank * s.n_kv_heads;
    s.n_pieces = ep > 1 ? TD_EXPERT_PIECES : TD_EXPERT_PIECES / tp;
    s.first_piece = ep > 1 ? 0 : rank * s.n_pieces;
    s.first_unit = piece_begin(c->intermediate, TD_EXPERT_PIECES, s.first_piece);
    s.n_units = piece_begin(c->intermediate, TD_EXPERT_PIECES, s.first_piece + s.n_pieces) - s.first_unit;
    s.n_experts = c->n_experts / ep;
    s.first_expert = ep > 1 ? rank * s.n_experts : 0;
    s.first_vocab = piece_begin(c->vocab, tp, rank);
    s.n_vocab = piece_begin(c->vocab, tp, rank + 1) - s.first_vocab;
    *out = s;
}

enum td_status td_weights_load(const struct td_model_config *c, const struct td_shard *shard,
                               const struct td_safetensors *files, uint64_t dummy_seed, struct td_device *device,
                               struct td_weights *out, struct td_err *err)
{
    enum td_status st;
    struct td_weights w = {.shard = *shard, .device = device, .n_layers = c->n_layers};
    struct td_loader l = {.c = c,
                          .files = files,
                          .dummy_seed = dummy_seed,
                          .w = &w,
                          .n_total = td_weights_bytes(c, shard, device),
                          .begun_ns = td_clock_ns(),
                          .said_ns = td_clock_ns(),
                          .err = err};
    TD_TRY(check_form(&l));
    TD_TRY(td_lanes_create(device, lane_bytes(c), dummy_seed, &l.lanes, err));
    w.layers = td_calloc(c->n_layers, sizeof *w.layers);
    if (w.layers == NULL) TD_TRY(td_loader_no_memory(&l, "layers"));
    TD_TRY(load_embedding(&l));
    for (uint32_t i = 0; i < c->n_layers; i++) TD_TRY(load_layer(&l, i, &w.layers[i]));
    TD_TRY(load_floats(&l, "model.norm.weight", 0, c->hidden, &w.final_norm));
    const struct part head[] = {{"lm_head", c->vocab, shard->first_vocab, shard->n_vocab}};
    TD_TRY(load_dense(&l, "", head, 1, (struct cols){c->hidden, 0, c->hidden}, TD_ROWS_DENSE, false, true, &w.lm_head));
    TD_TRY(load_rope(&l));
    TD_TRY(td_loader_finish(&l, "lm_head.weight"));
    TD_INFO("weights_loaded", "rank=%u read_gb=%.2f seconds=%.2f gb_per_s=%.2f device_gb=%.2f", shard->rank,
            (double)l.n_read / 1e9, (double)(td_clock_ns() - l.begun_ns) / 1e9,
            (double)l.n_read / (double)(td_clock_ns() - l.begun_ns), (double)w.n_bytes / 1e9);
    if (l.n_inexact > 0)
        TD_WARN("experts_rounded", "rank=%u elements=%llu: the form that holds them has no exact value", shard->rank,
                (unsigned long long)l.n_inexact);
    *out = w;
    w = (struct td_weights){0};
out:
    td_lanes_destroy(l.lanes); /* before the memory it writes */
    td_weights_free(&w);
    free(l.floats);
    return st;
}

void td_weights_free(struct td_weights *w)
{
    for (uint32_t i = 0; w->layers != NULL && i < w->n_layers; i++) {
        free(w->layers[i].gate_up);
        free(w->layers[i].down);
    }
    free(w->layers);
    for (uint32_t i = 0; i < w->n_blocks; i++) td_device_free(w->device, w->blocks[i]);
    free(w->blocks);
    *w = (struct td_weights){0};
}
