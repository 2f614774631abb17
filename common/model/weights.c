#include "common/model/weights.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/model/dummy_int.h"
#include "common/model/safetensors.h"

/* ---- where tensors come from
 * ------------------------------------------------------------------------------------------ */

enum { DATA, SCALES, FLOATS, N_SCRATCH };

struct loader {
    const struct td_model_config *c;
    const struct td_safetensors *files; /* NULL: dummy */
    uint64_t seed;
    struct td_stream *stream; /* for packing */
    struct td_weights *w;
    uint8_t *scratch[N_SCRATCH]; /* made-up or realigned tensors, so that a matrix, its scales and its bias coexist */
    size_t scratch_bytes[N_SCRATCH];
    float *floats; /* small tensors, widened */
    size_t n_floats;
    uint64_t n_inexact; /* elements of experts that were rounded */
    struct td_err *err;
};

static enum td_status no_memory(struct loader *l, const char *name)
{
    return td_err_set(l->err, TD_E_NO_MEMORY, "tensor \"%s\": no memory", name);
}

static enum td_status scratch_reserve(struct loader *l, int which, size_t n, const char *name)
{
    if (n <= l->scratch_bytes[which]) return TD_OK;
    uint8_t *p = td_realloc(l->scratch[which], n, 1);
    if (p == NULL) return no_memory(l, name);
    l->scratch[which] = p;
    l->scratch_bytes[which] = n;
    return TD_OK;
}

static void print_shape(char *out, size_t n, const uint64_t *shape, uint32_t n_dims)
{
    size_t at = (size_t)snprintf(out, n, "[");
    for (uint32_t i = 0; i < n_dims && at < n; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (at < n) snprintf(out + at, n - at, "]");
}

struct want {
    enum td_tensor_type type;
    bool or_f32; /* norms, biases and sinks: some converters write F32 */
    uint32_t n_dims;
    uint64_t shape[4];
};

/* The tensor called for, its data aligned to its elements; `which` names the scratch it may use. */
static enum td_status fetch(struct loader *l, const char *name, const struct want *want, int which,
                            struct td_tensor *out)
{
    if (l->files == NULL) {
        *out = (struct td_tensor){.name = name, .file = "dummy", .type = want->type, .n_dims = want->n_dims};
        uint64_t n = 1;
        for (uint32_t i = 0; i < want->n_dims; i++) n *= out->shape[i] = want->shape[i];
        out->n_bytes = n * td_tensor_type_bytes(want->type);
        enum td_status st = scratch_reserve(l, which, out->n_bytes, name);
        if (st != TD_OK) return st;
        td_dummy_tensor(l->seed, name, out->type, out->shape, out->n_dims, l->scratch[which]);
        out->data = l->scratch[which];
        return TD_OK;
    }
    const struct td_tensor *t = td_safetensors_find(l->files, name);
    if (t == NULL) return td_err_set(l->err, TD_E_BAD_FILE, "tensor \"%s\" is missing", name);
    if (t->type != want->type && !(want->or_f32 && t->type == TD_T_F32))
        return td_err_set(l->err, TD_E_BAD_FILE, "%s: tensor \"%s\": dtype: %s where %s%s is expected", t->file, name,
                          td_tensor_type_name(t->type), td_tensor_type_name(want->type), want->or_f32 ? " or F32" : "");
    if (t->n_dims != want->n_dims || memcmp(t->shape, want->shape, want->n_dims * sizeof want->shape[0]) != 0) {
        char have[128], need[128];
        print_shape(have, sizeof have, t->shape, t->n_dims);
        print_shape(need, sizeof need, want->shape, want->n_dims);
        return td_err_set(l->err, TD_E_BAD_FILE, "%s: tensor \"%s\": shape: %s where config.json calls for %s", t->file,
                          name, have, need);
    }
    *out = *t;
    if ((uintptr_t)t->data % td_tensor_type_bytes(t->type) != 0) {
        enum td_status st = scratch_reserve(l, which, (size_t)t->n_bytes, name);
        if (st != TD_OK) return st;
        memcpy(l->scratch[which], t->data, (size_t)t->n_bytes);
        out->data = l->scratch[which];
    }
    return TD_OK;
}

/* ---- device memory
 * ---------------------------------------------------------------------------------------------------- */

static enum td_status device_alloc(struct loader *l, size_t bytes, const char *name, bool is_sharded, void **out)
{
    struct td_weights *w = l->w;
    if (w->n_blocks == w->cap_blocks) {
        uint32_t cap = w->cap_blocks == 0 ? 64 : 2 * w->cap_blocks;
        void **grown = td_realloc(w->blocks, cap, sizeof *grown);
        if (grown == NULL) return no_memory(l, name);
        w->blocks = grown;
        w->cap_blocks = cap;
    }
    enum td_status st = td_device_alloc(w->device, bytes, out);
    if (st != TD_OK) return td_err_set(l->err, st, "tensor \"%s\": no memory for %zu bytes of weights", name, bytes);
    w->blocks[w->n_blocks++] = *out;
    w->n_bytes += bytes;
    if (is_sharded) w->n_sharded_bytes += bytes;
    return TD_OK;
}

/* A small tensor of n values in [1 or 2 dimensions] as host f32, valid until the next call. */
static enum td_status fetch_floats(struct loader *l, const char *name, const struct want *want, const float **out)
{
    struct td_tensor t;
    enum td_status st = fetch(l, name, want, FLOATS, &t);
    if (st != TD_OK) return st;
    size_t n = (size_t)(t.n_bytes / td_tensor_type_bytes(t.type));
    if (n > l->n_floats) {
        float *p = td_realloc(l->floats, n, sizeof *p);
        if (p == NULL) return no_memory(l, name);
        l->floats = p;
        l->n_floats = n;
    }
    if (t.type == TD_T_F32) {
        memcpy(l->floats, t.data, n * sizeof(float));
    } else {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)(const void *)t.data)[i] << 16;
            memcpy(&l->floats[i], &bits, sizeof bits);
        }
    }
    *out = l->floats;
    return TD_OK;
}

/* Of n values, those from first on. */
static enum td_status load_some_floats(struct loader *l, const char *name, uint32_t n, uint32_t first, uint32_t n_part,
                                       const float **out)
{
    struct want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 1, .shape = {n}};
    const float *host;
    void *p;
    size_t bytes = (size_t)n_part * sizeof(float);
    enum td_status st = fetch_floats(l, name, &want, &host);
    if (st == TD_OK) st = device_alloc(l, bytes, name, true, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, host + first, bytes);
    if (st == TD_OK) *out = p;
    return st;
}

static enum td_status load_floats(struct loader *l, const char *name, uint32_t rows, uint32_t n, const float **out)
{
    struct want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = rows ? 2 : 1, .shape = {rows ? rows : n, n}};
    const float *host;
    void *p;
    size_t bytes = (size_t)(rows ? rows : 1) * n * sizeof(float);
    enum td_status st = fetch_floats(l, name, &want, &host);
    if (st == TD_OK) st = device_alloc(l, bytes, name, false, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, host, bytes);
    if (st == TD_OK) *out = p;
    return st;
}

static enum td_status pack(struct loader *l, const char *name, const struct td_pack_weight_args *a)
{
    enum td_status st = td_device_ops(l->w->device)->pack_weight(l->stream, a);
    if (st == TD_E_INVALID)
        return td_err_set(l->err, TD_E_BAD_FILE, "tensor \"%s\": a scale is NaN (255) or too large for bf16", name);
    return st == TD_OK ? TD_OK : td_err_set(l->err, st, "tensor \"%s\": cannot be packed", name);
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

/* Matrices stacked by output row; each part's rows are a multiple of a panel unless it is the last. */
static enum td_status load_dense(struct loader *l, const char *prefix, const struct part *parts, uint32_t n_parts,
                                 struct cols cols, bool has_bias, bool is_sharded, struct td_weight *out)
{
    enum td_status st;
    void *data, *bias = NULL;
    uint32_t n_out = 0;
    for (uint32_t i = 0; i < n_parts; i++) n_out += parts[i].n_out;
    size_t bias_bytes, bytes = td_device_packed_bytes(l->w->device, n_out, cols.n_in, TD_ROWS_PLAIN, &bias_bytes);
    TD_TRY(device_alloc(l, bytes, prefix, is_sharded, &data));
    if (has_bias) TD_TRY(device_alloc(l, bias_bytes, prefix, is_sharded, &bias));
    char *to = data, *bias_to = bias;
    for (uint32_t i = 0; i < n_parts; i++) {
        char name[256];
        struct td_tensor t;
        const float *host_bias = NULL;
        if (has_bias) {
            struct want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 1, .shape = {parts[i].n_stored}};
            snprintf(name, sizeof name, "%s%s.bias", prefix, parts[i].name);
            TD_TRY(fetch_floats(l, name, &want, &host_bias));
        }
        struct want want = {.type = TD_T_BF16, .n_dims = 2, .shape = {parts[i].n_stored, cols.n_stored}};
        snprintf(name, sizeof name, "%s%s.weight", prefix, parts[i].name);
        TD_TRY(fetch(l, name, &want, DATA, &t));
        struct td_pack_weight_args a = {.source = TD_SRC_BF16_ROWS,
                                        .data = t.data,
                                        .ld = cols.n_stored,
                                        .row_begin = parts[i].first,
                                        .col_begin = cols.first,
                                        .n_out = parts[i].n_out,
                                        .n_in = cols.n_in,
                                        .bias = host_bias != NULL ? host_bias + parts[i].first : NULL,
                                        .out = to,
                                        .bias_out = (float *)(void *)bias_to};
        TD_TRY(pack(l, name, &a));
        to += td_device_packed_bytes(l->w->device, parts[i].n_out, cols.n_in, TD_ROWS_PLAIN, &bias_bytes);
        if (has_bias) bias_to += bias_bytes;
    }
    *out = (struct td_weight){.data = data, .bias = bias, .n_out = n_out, .n_in = cols.n_in};
    st = TD_OK;
out:
    return st;
}

/* ---- experts
 * ------------------------------------------------------------------------------------------------------------ */

/* which: "gate_up_proj" or "down_proj"; one packed matrix an expert of this rank. */
static enum td_status load_experts(struct loader *l, const char *prefix, const char *which, struct part rows,
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
        struct want blocks = {.type = TD_T_U8, .n_dims = 4, .shape = {c->n_experts, n_out, n_in / 32, 16}};
        struct want scale = {.type = TD_T_U8, .n_dims = 3, .shape = {c->n_experts, n_out, n_in / 32}};
        snprintf(scales_name, sizeof scales_name, "%s%s_scales", prefix, which);
        TD_TRY(fetch(l, name, &blocks, DATA, &data));
        TD_TRY(fetch(l, scales_name, &scale, SCALES, &scales));
    } else { /* unquantised experts are stored input-major */
        struct want plain = {.type = TD_T_BF16, .n_dims = 3, .shape = {c->n_experts, n_in, n_out}};
        TD_TRY(fetch(l, name, &plain, DATA, &data));
    }
    struct td_weight *w = td_calloc(c->n_experts, sizeof *w);
    if (w == NULL) TD_TRY(no_memory(l, name));
    *out = w; /* freed with the layer */

    void *packed, *bias = NULL;
    size_t bias_bytes, bytes = td_device_packed_bytes(l->w->device, rows.n_out, cols.n_in, order, &bias_bytes);
    TD_TRY(device_alloc(l, bytes * s->n_experts, name, true, &packed));
    if (pack_bias) TD_TRY(device_alloc(l, bias_bytes * s->n_experts, name, true, &bias));
    const float *host_bias = NULL; /* of all experts */
    if (pack_bias) {
        char bias_name[256];
        struct want want = {.type = TD_T_BF16, .or_f32 = true, .n_dims = 2, .shape = {c->n_experts, n_out}};
        snprintf(bias_name, sizeof bias_name, "%s%s_bias", prefix, which);
        TD_TRY(fetch_floats(l, bias_name, &want, &host_bias));
    }
    for (uint32_t i = 0; i < s->n_experts; i++) {
        uint32_t e = s->first_expert + i;
        size_t elements = (size_t)n_out * n_in;
        struct td_pack_weight_args a = {.source = c->is_mxfp4 ? TD_SRC_MXFP4 : TD_SRC_BF16_COLS,
                                        .order = order,
                                        .data = data.data + e * (c->is_mxfp4 ? elements / 2 : elements * 2),
                                        .scales = c->is_mxfp4 ? scales.data + e * (elements / 32) : NULL,
                                        .ld = c->is_mxfp4 ? n_in : n_out,
                                        .row_begin = rows.first,
                                        .col_begin = cols.first,
                                        .n_out = rows.n_out,
                                        .n_in = cols.n_in,
                                        .bias = pack_bias ? host_bias + (size_t)e * n_out + rows.first : NULL,
                                        .out = (char *)packed + i * bytes,
                                        .bias_out = pack_bias ? (float *)(void *)((char *)bias + i * bias_bytes) : NULL,
                                        .n_inexact = &l->n_inexact};
        TD_TRY(pack(l, c->is_mxfp4 ? scales_name : name, &a));
        w[e] = (struct td_weight){.data = a.out, .bias = a.bias_out, .n_out = rows.n_out, .n_in = cols.n_in};
    }
    st = TD_OK;
out:
    return st;
}

/* ---- the whole
 * ------------------------------------------------------------------------------------------------------------ */

static enum td_status load_layer(struct loader *l, uint32_t i, struct td_layer_weights *w)
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
    TD_TRY(load_dense(l, name, qkv, 3, all, true, true, &w->qkv));
    TD_TRY(load_dense(l, name, o, 1, heads, false, true, &w->o));
    snprintf(name, sizeof name, "%smlp.", layer);
    const struct part router[] = {{"router", c->n_experts, 0, c->n_experts}};
    TD_TRY(load_dense(l, name, router, 1, all, true, false, &w->router));

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

static enum td_status load_embedding(struct loader *l)
{
    const char *name = "model.embed_tokens.weight";
    struct want want = {.type = TD_T_BF16, .n_dims = 2, .shape = {l->c->vocab, l->c->hidden}};
    struct td_tensor t;
    void *p;
    enum td_status st = fetch(l, name, &want, DATA, &t);
    if (st == TD_OK) st = device_alloc(l, (size_t)t.n_bytes, name, false, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, t.data, (size_t)t.n_bytes);
    if (st == TD_OK) l->w->embed = p;
    return st;
}

static enum td_status load_rope(struct loader *l)
{
    float freqs[128];
    uint32_t half = l->c->head_dim / 2;
    void *p;
    TD_CHECK(half <= TD_COUNT(freqs));
    td_model_rope(l->c, freqs, &l->w->rope_factor);
    enum td_status st = device_alloc(l, half * sizeof *freqs, "rope frequencies", false, &p);
    if (st == TD_OK) st = td_device_upload(l->w->device, p, freqs, half * sizeof *freqs);
    if (st == TD_OK) l->w->rope_freqs = p;
    return st;
}

/* The configuration's word on the experts' form against what is there: say which of the two is off, not "missing
 * tensor". */
static enum td_status check_form(const struct loader *l)
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
    struct loader l = {.c = c, .files = files, .seed = dummy_seed, .w = &w, .err = err};
    TD_TRY(check_form(&l));
    st = td_stream_create(device, 1, &l.stream);
    if (st != TD_OK) TD_TRY(td_err_set(err, st, "no stream to pack weights with"));
    w.layers = td_calloc(c->n_layers, sizeof *w.layers);
    if (w.layers == NULL) TD_TRY(no_memory(&l, "layers"));
    TD_TRY(load_embedding(&l));
    for (uint32_t i = 0; i < c->n_layers; i++) TD_TRY(load_layer(&l, i, &w.layers[i]));
    TD_TRY(load_floats(&l, "model.norm.weight", 0, c->hidden, &w.final_norm));
    const struct part head[] = {{"lm_head", c->vocab, shard->first_vocab, shard->n_vocab}};
    TD_TRY(load_dense(&l, "", head, 1, (struct cols){c->hidden, 0, c->hidden}, false, true, &w.lm_head));
    TD_TRY(load_rope(&l));
    if (l.n_inexact > 0)
        TD_WARN("experts_rounded", "rank=%u elements=%llu: the form that holds them has no exact value", shard->rank,
                (unsigned long long)l.n_inexact);
    *out = w;
    w = (struct td_weights){0};
out:
    td_weights_free(&w);
    td_stream_destroy(l.stream);
    for (uint32_t i = 0; i < N_SCRATCH; i++) free(l.scratch[i]);
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
