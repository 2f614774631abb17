/* The model on one page: configuration, weights, shapes. Source: a Hugging Face gpt-oss directory as released.
 * Legend: H hidden, I expert width, E experts, V vocabulary rows, Nq/Nkv heads, D head size. */
#ifndef TD_MODEL_MODEL_H
#define TD_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "kernels/kv_layout.h"

#define TD_MAX_LAYERS 128u
#define TD_MAX_EOS    8u

struct td_model_config {
    char name[128]; /* directory's name unless told otherwise */
    uint32_t n_layers, hidden, intermediate, n_experts, top_k;
    uint32_t n_heads, n_kv_heads, head_dim, vocab, max_context, window;
    bool is_sliding[TD_MAX_LAYERS];
    uint32_t layer_in_group[TD_MAX_LAYERS]; /* index among the layers of its kind */
    uint32_t n_group_layers[TD_KV_N_GROUPS];
    float rms_eps, swiglu_limit, swiglu_alpha;
    double rope_theta, rope_factor, rope_beta_fast, rope_beta_slow,
        rope_attention_factor; /* attention_factor 0: from factor */
    uint32_t rope_original_context;
    bool rope_truncate;
    uint32_t eos_ids[TD_MAX_EOS], n_eos;
    bool is_mxfp4; /* experts as stored */
    uint32_t
        n_token_ids; /* ids below this name tokens (tokenizer.json), the other rows none; without that file: vocab */
};

/* config.json, generation_config.json and tokenizer.json of dir; every field checked, errors name file and field. */
enum td_status td_model_config_load(const char *dir, struct td_model_config *out, struct td_err *err);

/* The text of a config.json alone; ids that name tokens: all. */
enum td_status td_model_config_parse(const char *text, size_t n, struct td_model_config *out, struct td_err *err);
/* YaRN frequencies [head_dim / 2] and the factor that multiplies cos and sin. */
void td_model_rope(const struct td_model_config *c, float *freqs_out, float *factor_out);

struct td_device;
struct td_model; /* config + weights packed for the backend */
struct td_model_options {
    bool use_dummy_weights; /* --load-format dummy: seeded, routes evenly */
    uint64_t dummy_seed;
    uint32_t tp;              /* ranks of the group, all held by this process: 1, 2, 4 or 8; 0 is 1 */
    uint32_t ep;              /* 1: each rank has a slice of every expert; tp: whole experts, 1/tp of them; 0 is 1 */
    struct td_device *device; /* where the weights go, those of all ranks; outlives the model. NULL: a CPU device of
                               * the model's own */
};
/* BAD_CONFIG, naming --tp or --ep, when the model cannot be divided so. */
enum td_status td_model_check_ranks(const struct td_model_config *c, uint32_t tp, uint32_t ep, struct td_err *err);
/* BAD_CONFIG as above; else the file is at fault. */
enum td_status td_model_load(const char *dir, const struct td_model_options *o, struct td_model **out,
                             struct td_err *err);
void td_model_destroy(struct td_model *m);
const struct td_model_config *td_model_config_of(const struct td_model *m);
const char *
td_model_fingerprint(const struct td_model *m); /* 32 hex digits; equal where config, tensors and contents are */
uint32_t td_model_n_ranks(const struct td_model *m);
uint64_t td_model_weight_bytes(const struct td_model *m); /* of all ranks together */
/* What one rank holds: replicated is there on every rank (embedding, norms, router, biases of the residual width), the
 * rest is its share. */
void td_model_rank_bytes(const struct td_model *m, uint32_t rank, uint64_t *sharded_out, uint64_t *replicated_out);

#endif
