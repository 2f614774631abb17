#include "common/model/fingerprint_int.h"

#include <stdio.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

/* Contents are sampled so that a 65 GB checkpoint takes no longer than its header: whole up to 64 KiB, else 16
 * stretches of 4 KiB, first and last included. */
#define WHOLE_BYTES  65536u
#define SAMPLE_BYTES 4096u
#define SAMPLES      16u

static void add_u64(XXH3_state_t *h, uint64_t v)
{
    uint8_t b[8];
    for (int i = 0; i < 8; i++) b[i] = (uint8_t)(v >> (8 * i));
    XXH3_128bits_update(h, b, sizeof b);
}

static void add_f64(XXH3_state_t *h, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    add_u64(h, bits);
}

/* Field by field: padding and the name, which is only a label, stay out. */
static void add_config(XXH3_state_t *h, const struct td_model_config *c)
{
    const uint32_t ints[] = {c->n_layers,
                             c->hidden,
                             c->intermediate,
                             c->n_experts,
                             c->top_k,
                             c->n_heads,
                             c->n_kv_heads,
                             c->head_dim,
                             c->vocab,
                             c->window,
                             c->rope_original_context,
                             c->rope_truncate,
                             c->is_mxfp4,
                             c->n_token_ids};
    const double reals[] = {c->rms_eps,     c->swiglu_limit,   c->swiglu_alpha,   c->rope_theta,
                            c->rope_factor, c->rope_beta_fast, c->rope_beta_slow, c->rope_attention_factor};
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) add_u64(h, ints[i]);
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) add_f64(h, reals[i]);
    for (uint32_t i = 0; i < c->n_layers; i++) add_u64(h, c->is_sliding[i]);
}

static void add_tensor(XXH3_state_t *h, const struct td_tensor *t)
{
    XXH3_128bits_update(h, t->name, strlen(t->name) + 1);
    add_u64(h, t->type);
    add_u64(h, t->n_dims);
    for (uint32_t i = 0; i < t->n_dims; i++) add_u64(h, t->shape[i]);
    if (t->n_bytes <= WHOLE_BYTES) {
        XXH3_128bits_update(h, t->data, (size_t)t->n_bytes);
        return;
    }
    uint64_t stride = (t->n_bytes - SAMPLE_BYTES) / (SAMPLES - 1);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint64_t at = i == SAMPLES - 1 ? t->n_bytes - SAMPLE_BYTES : i * stride;
        XXH3_128bits_update(h, t->data + at, SAMPLE_BYTES);
    }
}

void td_model_fingerprint_make(const struct td_model_config *c, const struct td_safetensors *files, uint64_t dummy_seed,
                               char out[33])
{
    XXH3_state_t h;
    XXH3_INITSTATE(&h);
    XXH3_128bits_reset(&h);
    add_config(&h, c);
    if (files == NULL) {
        XXH3_128bits_update(&h, "dummy", 6);
        add_u64(&h, dummy_seed);
    } else {
        for (uint32_t i = 0; i < td_safetensors_count(files); i++) add_tensor(&h, td_safetensors_at(files, i));
    }
    XXH128_hash_t d = XXH3_128bits_digest(&h);
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)d.high64, (unsigned long long)d.low64);
}
