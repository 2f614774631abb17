/* config.json of a gpt-oss directory. Fields that must not be guessed are required; two that say the same thing must
 * agree. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/json_int.h"
#include "common/model/model.h"

#define MAX_CONFIG_BYTES    (16u << 20)
#define MAX_TOKENIZER_BYTES (512u << 20)

/* Two spellings of one integer. */
static void either_u32(struct td_json_fields *f, const char *a, const char *b, uint32_t max, uint32_t *out)
{
    uint32_t x = 0, y = 0;
    td_json_u32(f, a, 1, max, &x);
    td_json_u32(f, b, 1, max, &y);
    if (x == 0 && y == 0)
        td_json_fail(f, "%s: missing", a);
    else if (x != 0 && y != 0 && x != y)
        td_json_fail(f, "%s is %u but %s is %u", a, x, b, y);
    *out = x != 0 ? x : y;
}

static void required_u32(struct td_json_fields *f, const char *name, uint32_t max, uint32_t *out)
{
    td_json_require(f, name);
    td_json_u32(f, name, 1, max, out);
}

static void read_identity(struct td_json_fields *f)
{
    const char *type = td_json_str(f, "model_type");
    const json_t *names = td_json_array(f, "architectures");
    if (type == NULL && names == NULL) td_json_fail(f, "model_type: missing, and architectures too");
    if (type != NULL && strcmp(type, "gpt_oss") != 0) td_json_fail(f, "model_type: \"%.100s\" is not gpt_oss", type);
    if (names == NULL) return;
    bool is_found = false;
    for (size_t i = 0; i < json_array_size(names); i++) {
        const char *name = json_string_value(json_array_get(names, i));
        is_found = is_found || (name != NULL && strcmp(name, "GptOssForCausalLM") == 0);
    }
    if (!is_found) td_json_fail(f, "architectures: GptOssForCausalLM is not among them");
}

static void read_shape(struct td_json_fields *f, struct td_model_config *c)
{
    required_u32(f, "num_hidden_layers", TD_MAX_LAYERS, &c->n_layers);
    required_u32(f, "hidden_size", 1u << 16, &c->hidden);
    required_u32(f, "intermediate_size", 1u << 16, &c->intermediate);
    required_u32(f, "num_attention_heads", 1024, &c->n_heads);
    required_u32(f, "num_key_value_heads", 64, &c->n_kv_heads);
    required_u32(f, "vocab_size", 1u << 24, &c->vocab);
    either_u32(f, "num_local_experts", "num_experts", 512, &c->n_experts);
    either_u32(f, "num_experts_per_tok", "experts_per_token", 16, &c->top_k);
    td_json_u32(f, "head_dim", 1, 256, &c->head_dim);
    if (f->st != TD_OK) return;
    if (c->head_dim == 0 && c->hidden % c->n_heads == 0) c->head_dim = c->hidden / c->n_heads;
    if (c->head_dim == 0)
        td_json_fail(f, "head_dim: missing, and hidden_size is no multiple of num_attention_heads");
    else if (c->head_dim % 16 != 0 || c->head_dim > 256)
        td_json_fail(f, "head_dim: %u is not a multiple of 16 up to 256", c->head_dim);
    if (c->n_heads % c->n_kv_heads != 0)
        td_json_fail(f, "num_attention_heads: %u is no multiple of num_key_value_heads, %u", c->n_heads, c->n_kv_heads);
    else if (c->n_heads / c->n_kv_heads > 64)
        td_json_fail(f, "num_attention_heads: more than 64 share a key/value head");
    if (c->top_k > c->n_experts) td_json_fail(f, "num_experts_per_tok: %u of only %u experts", c->top_k, c->n_experts);
}

static void read_layers(struct td_json_fields *f, struct td_model_config *c)
{
    const json_t *types = td_json_array(f, "layer_types");
    if (types != NULL && json_array_size(types) != c->n_layers)
        td_json_fail(f, "layer_types: %zu entries but num_hidden_layers is %u", json_array_size(types), c->n_layers);
    if (f->st != TD_OK) return;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const char *type = types != NULL ? json_string_value(json_array_get(types, i)) : NULL;
        if (types == NULL)
            c->is_sliding[i] = i % 2 == 0;
        else if (type != NULL && strcmp(type, "sliding_attention") == 0)
            c->is_sliding[i] = true;
        else if (type == NULL || strcmp(type, "full_attention") != 0)
            td_json_fail(f, "layer_types: entry %u is neither sliding_attention nor full_attention", i);
        uint32_t group = c->is_sliding[i] ? TD_KV_SLIDING : TD_KV_FULL;
        c->layer_in_group[i] = c->n_group_layers[group]++;
    }
    c->window = 128;
    td_json_u32(f, "sliding_window", 1, 1u << 20, &c->window);
}

static void read_rope(struct td_json_fields *f, struct td_model_config *c)
{
    const json_t *objects[2] = {td_json_object(f, "rope_parameters"), td_json_object(f, "rope_scaling")};
    const char *prefixes[2] = {"rope_parameters.", "rope_scaling."};
    if (f->st != TD_OK) return;
    if (objects[0] == NULL && objects[1] == NULL) {
        td_json_fail(
            f, "rope_scaling: missing, and rope_parameters too (plain RoPE would only look right on short texts)");
        return;
    }
    double theta = 0;
    td_json_f64(f, "rope_theta", 1.0001, 1e12, &theta);
    /* When both are there they must agree, since one of them would be ignored. */
    for (int i = 0; i < 2; i++) {
        const char *key;
        json_t *value;
        if (objects[i] == NULL || objects[1 - i] == NULL) continue;
        json_object_foreach ((json_t *)(uintptr_t)objects[i], key, value) {
            const json_t *other = json_object_get(objects[1 - i], key);
            if (other != NULL && !json_equal(value, other))
                td_json_fail(f, "rope_parameters.%.100s and rope_scaling.%.100s differ", key, key);
        }
    }
    bool is_new = objects[0] != NULL;
    struct td_json_fields r = {.file = f->file,
                               .prefix = prefixes[is_new ? 0 : 1],
                               .object = objects[is_new ? 0 : 1],
                               .st = f->st,
                               .err = f->err};
    const char *type = td_json_str(&r, "rope_type");
    if (type == NULL) type = td_json_str(&r, "type");
    double inner = 0;
    td_json_f64(&r, "rope_theta", 1.0001, 1e12, &inner);
    if (theta != 0 && inner != 0 && theta != inner)
        td_json_fail(&r, "rope_theta: %g but rope_theta outside is %g", inner, theta);
    c->rope_theta = inner != 0 ? inner : theta;
    if (c->rope_theta == 0) td_json_fail(f, "rope_theta: missing");

    uint32_t initial = 0;
    td_json_u32(f, "initial_context_length", 1, 1u << 24, &initial);
    c->rope_original_context = initial != 0 ? initial : 4096;
    c->rope_factor = 1;
    c->rope_beta_fast = 32;
    c->rope_beta_slow = 1;
    c->rope_truncate = true;
    if (type == NULL) {
        td_json_fail(&r, "rope_type: missing");
    } else if (strcmp(type, "yarn") == 0) {
        td_json_require(&r, "factor");
        td_json_f64(&r, "factor", 1e-3, 1e6, &c->rope_factor);
        td_json_f64(&r, "beta_fast", 1e-6, 1e6, &c->rope_beta_fast);
        td_json_f64(&r, "beta_slow", 1e-6, 1e6, &c->rope_beta_slow);
        td_json_f64(&r, "attention_factor", 1e-6, 1e6, &c->rope_attention_factor);
        td_json_bool(&r, "truncate", &c->rope_truncate);
        uint32_t original = 0;
        td_json_u32(&r, "original_max_position_embeddings", 1, 1u << 24, &original);
        if (original != 0 && initial != 0 && original != initial)
            td_json_fail(&r, "original_max_position_embeddings: %u but initial_context_length is %u", original,
                         initial);
        if (original != 0)
            c->rope_original_context = original;
        else if (initial == 0)
            td_json_fail(&r, "original_max_position_embeddings: missing");
        if (c->rope_beta_fast < c->rope_beta_slow) td_json_fail(&r, "beta_fast: less than beta_slow");
    } else if (strcmp(type, "default") != 0) {
        td_json_fail(&r, "rope_type: \"%.100s\" is neither yarn nor default", type);
    }
    if (f->st == TD_OK) f->st = r.st;
}

static void read_rest(struct td_json_fields *f, struct td_model_config *c)
{
    double eps = 1e-5, limit = 7, alpha = 1.702;
    bool is_tied = false, has_bias = true;
    td_json_u32(f, "max_position_embeddings", 1, 1u << 24, &c->max_context);
    if (c->max_context == 0) {
        double scaled = c->rope_original_context * (c->rope_factor > 1 ? c->rope_factor : 1);
        c->max_context = scaled < (double)(1u << 24) ? (uint32_t)scaled : 1u << 24;
    }
    td_json_f64(f, "rms_norm_eps", 0, 1, &eps);
    td_json_f64(f, "swiglu_limit", 1e-6, 1e30, &limit);
    td_json_f64(f, "swiglu_alpha", 1e-6, 1e6, &alpha);
    td_json_bool(f, "tie_word_embeddings", &is_tied);
    td_json_bool(f, "attention_bias", &has_bias);
    if (is_tied) td_json_fail(f, "tie_word_embeddings: true is not supported");
    if (!has_bias) td_json_fail(f, "attention_bias: false is not supported");
    c->rms_eps = (float)eps;
    c->swiglu_limit = (float)limit;
    c->swiglu_alpha = (float)alpha;

    const json_t *quant = td_json_object(f, "quantization_config");
    struct td_json_fields q = {
        .file = f->file, .prefix = "quantization_config.", .object = quant, .st = f->st, .err = f->err};
    if (quant != NULL) {
        const char *method = td_json_str(&q, "quant_method");
        if (method == NULL)
            td_json_fail(&q, "quant_method: missing");
        else if (strcmp(method, "mxfp4") != 0)
            td_json_fail(&q, "quant_method: \"%.100s\" is not mxfp4", method);
        c->is_mxfp4 = true;
        if (c->hidden % 32 != 0) td_json_fail(f, "hidden_size: %u is no multiple of 32, MXFP4's group", c->hidden);
        if (c->intermediate % 32 != 0)
            td_json_fail(f, "intermediate_size: %u is no multiple of 32, MXFP4's group", c->intermediate);
    }
    if (f->st == TD_OK) f->st = q.st;
}

/* An id or a list of ids. */
static void read_eos(struct td_json_fields *f, struct td_model_config *c)
{
    if (!td_json_has(f, "eos_token_id")) return;
    const json_t *ids = json_object_get(f->object, "eos_token_id");
    size_t n = json_is_array(ids) ? json_array_size(ids) : 1;
    if (n > TD_MAX_EOS) td_json_fail(f, "eos_token_id: more than %u", TD_MAX_EOS);
    c->n_eos = 0;
    for (size_t i = 0; i < n && f->st == TD_OK; i++) {
        const json_t *id = json_is_array(ids) ? json_array_get(ids, i) : ids;
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= (json_int_t)c->vocab)
            td_json_fail(f, "eos_token_id: not an id below vocab_size, %u", c->vocab);
        else
            c->eos_ids[c->n_eos++] = (uint32_t)json_integer_value(id);
    }
}

/* The ids that name tokens: highest of vocabulary and added tokens, plus one. */
static enum td_status read_token_ids(const char *path, struct td_model_config *c, struct td_err *err)
{
    json_t *root = NULL;
    enum td_status st = td_model_json_load(path, MAX_TOKENIZER_BYTES, &root, err);
    if (st == TD_E_NOT_FOUND) {
        c->n_token_ids = c->vocab;
        return TD_OK;
    }
    if (st != TD_OK) return st;
    json_int_t highest = -1;
    const char *key;
    json_t *value;
    size_t i;
    json_object_foreach (json_object_get(json_object_get(root, "model"), "vocab"), key, value) {
        if (json_is_integer(value) && json_integer_value(value) > highest) highest = json_integer_value(value);
    }
    json_array_foreach (json_object_get(root, "added_tokens"), i, value) {
        const json_t *id = json_object_get(value, "id");
        if (json_is_integer(id) && json_integer_value(id) > highest) highest = json_integer_value(id);
    }
    json_decref(root);
    if (highest < 0) return td_err_set(err, TD_E_BAD_FILE, "%s: model.vocab and added_tokens: no ids", path);
    if (highest >= (json_int_t)c->vocab)
        return td_err_set(err, TD_E_BAD_FILE, "%s: id %lld, but vocab_size is only %u", path, (long long)highest,
                          c->vocab);
    c->n_token_ids = (uint32_t)highest + 1;
    return TD_OK;
}

static void take_name(const char *dir, char *out, size_t n)
{
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && dir[begin - 1] != '/') begin--;
    snprintf(out, n, "%.*s", (int)(end - begin < n ? end - begin : n - 1), dir + begin);
}

static enum td_status parse_config(const json_t *config, const char *file, struct td_model_config *c,
                                   struct td_err *err)
{
    struct td_json_fields f = {.file = file, .prefix = "", .object = config, .err = err};
    read_identity(&f);
    read_shape(&f, c);
    if (f.st == TD_OK) read_layers(&f, c);
    if (f.st == TD_OK) read_rope(&f, c);
    if (f.st == TD_OK) read_rest(&f, c);
    if (f.st == TD_OK) read_eos(&f, c);
    c->n_token_ids = c->vocab;
    return f.st;
}

enum td_status td_model_config_parse(const char *text, size_t n, struct td_model_config *out, struct td_err *err)
{
    json_t *config = NULL;
    struct td_model_config c = {0};
    enum td_status st = td_model_json_parse(text, n, "config.json", &config, err);
    if (st == TD_OK) st = parse_config(config, "config.json", &c, err);
    json_decref(config);
    if (st == TD_OK) *out = c;
    return st;
}

enum td_status td_model_config_load(const char *dir, struct td_model_config *out, struct td_err *err)
{
    char path[4096];
    struct td_model_config c = {0};
    json_t *config = NULL, *generation = NULL;
    enum td_status st;
    if (snprintf(path, sizeof path, "%s/generation_config.json", dir) >= (int)sizeof path)
        return td_err_set(err, TD_E_BAD_FILE, "%s: path too long", dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
    st = td_model_json_load(path, MAX_CONFIG_BYTES, &config, err);
    if (st == TD_E_NOT_FOUND) st = td_err_set(err, TD_E_BAD_FILE, "%s: no such file", path);
    if (st != TD_OK) goto out;
    TD_TRY(parse_config(config, path, &c, err));
    take_name(dir, c.name, sizeof c.name);

    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    st = td_model_json_load(path, MAX_CONFIG_BYTES, &generation, err);
    if (st == TD_OK) {
        struct td_json_fields g = {.file = path, .prefix = "", .object = generation, .err = err};
        read_eos(&g, &c);
        st = g.st;
    } else if (st == TD_E_NOT_FOUND) {
        st = TD_OK;
    }
    if (st != TD_OK) goto out;
    if (c.n_eos == 0) TD_TRY(td_err_set(err, TD_E_BAD_FILE, "%s: eos_token_id: missing, and in config.json too", path));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    TD_TRY(read_token_ids(path, &c, err));
    *out = c;
out:
    json_decref(config);
    json_decref(generation);
    return st;
}

void td_model_rope(const struct td_model_config *c, float *freqs_out, float *factor_out)
{
    uint32_t half = c->head_dim / 2;
    bool is_scaled = c->rope_factor > 1;
    double factor = 1, low = 0, high = 0;
    if (is_scaled) {
        double turns = log(c->rope_theta);
        low = half * log(c->rope_original_context / (c->rope_beta_fast * 2 * M_PI)) / turns;
        high = half * log(c->rope_original_context / (c->rope_beta_slow * 2 * M_PI)) / turns;
        if (c->rope_truncate) {
            low = floor(low);
            high = ceil(high);
        }
        if (low < 0) low = 0;
        if (high > c->head_dim - 1) high = c->head_dim - 1;
        factor = c->rope_attention_factor != 0 ? c->rope_attention_factor : 0.1 * log(c->rope_factor) + 1;
    }
    for (uint32_t j = 0; j < half; j++) {
        double e = pow(c->rope_theta, -(double)j / half), r = 0;
        if (is_scaled) {
            double width = high - low > 1e-3 ? high - low : 1e-3; /* equal bounds: a step */
            r = (j - low) / width;
            r = r < 0 ? 0 : r > 1 ? 1 : r;
            e = e / c->rope_factor * r + e * (1 - r);
        }
        freqs_out[j] = (float)e;
    }
    *factor_out = (float)factor;
}
