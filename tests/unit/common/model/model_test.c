/* Whole checkpoints: the tiny one rewritten in other legal forms gives the same bits; damaged ones are refused by name.
 */
#include "common/model/model.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/bytes.h"
#include "common/base/check.h"
#include "common/base/fault.h"
#include "common/model/dummy_int.h"
#include "common/model/safetensors.h"
#include "common/model/weights.h"
#include "kernels/device_cpu.h"
#include "tests/support/tiny_model.h"

static char dir[64];

/* ---- rewriting
 * ------------------------------------------------------------------------------------------------------------ */

struct rewrite {
    const char *drop;    /* tensor left out */
    const char *widen;   /* tensors whose name contains this become F32 */
    const char *reshape; /* tensor that loses its first row */
    const char *poke;    /* tensor whose first byte becomes poke_byte */
    uint8_t poke_byte;
    bool unquantised;        /* experts as bf16, input-major */
    bool keeps_quantization; /* though unquantised */
    bool drops_quantization; /* though mxfp4 */
    uint32_t header_pad;     /* spaces after the header */
};

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

static float element(const uint8_t *blocks, const uint8_t *scales, size_t i)
{
    static const float v[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    uint8_t byte = blocks[i / 2], code = i % 2 ? byte >> 4 : byte & 15;
    float x = ldexpf(v[code & 7], scales[i / 32] - 127);
    return code & 8 ? -x : x;
}

/* [E, rows, groups, 16] to bf16 [E, K, rows]. */
static void put_unquantised(struct td_buf *data, const struct td_tensor *blocks, const struct td_tensor *scales)
{
    uint64_t n_experts = blocks->shape[0], rows = blocks->shape[1], k = blocks->shape[2] * 32;
    for (uint64_t e = 0; e < n_experts; e++)
        for (uint64_t c = 0; c < k; c++)
            for (uint64_t r = 0; r < rows; r++) {
                float x = element(blocks->data, scales->data, (size_t)((e * rows + r) * k + c));
                uint32_t bits;
                memcpy(&bits, &x, sizeof bits);
                td_buf_u16(data, (uint16_t)(bits >> 16));
            }
}

static void put_tensor(struct td_buf *header, struct td_buf *data, const char *name, const char *type,
                       const uint64_t *shape, uint32_t n_dims, size_t begin)
{
    td_buf_printf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", header->n > 1 ? "," : "", name, type);
    for (uint32_t i = 0; i < n_dims; i++) td_buf_printf(header, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
    td_buf_printf(header, "],\"data_offsets\":[%zu,%zu]}", begin, data->n);
}

static void write_file(const char *name, const void *p, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static void write_config(const struct rewrite *w)
{
    json_error_t e;
    json_t *j = json_load_file(TINY_DIR "/config.json", 0, &e);
    assert_non_null(j);
    if ((w->unquantised && !w->keeps_quantization) || w->drops_quantization) json_object_del(j, "quantization_config");
    char *text = json_dumps(j, 0);
    write_file("config.json", text, strlen(text));
    free(text);
    json_decref(j);
}

/* The tiny checkpoint as one file in dir. */
static void rewrite(const struct rewrite *w)
{
    struct td_safetensors *s = NULL;
    struct td_err err;
    struct td_buf header = {0}, data = {0}, file = {0};
    if (td_safetensors_open(TINY_DIR, &s, &err) != TD_OK) fail_msg("%s", err.text);
    td_buf_str(&header, "{");
    for (uint32_t i = 0; i < td_safetensors_count(s); i++) {
        const struct td_tensor *t = td_safetensors_at(s, i);
        size_t begin = data.n;
        if (w->drop != NULL && strcmp(t->name, w->drop) == 0) continue;
        if (w->unquantised && ends_with(t->name, "_scales")) continue;
        if (w->unquantised && ends_with(t->name, "_blocks")) {
            char name[256], scales[300];
            size_t n = strlen(t->name) - strlen("_blocks");
            snprintf(name, sizeof name, "%.*s", (int)n, t->name);
            snprintf(scales, sizeof scales, "%s_scales", name);
            put_unquantised(&data, t, td_safetensors_find(s, scales));
            uint64_t shape[3] = {t->shape[0], t->shape[2] * 32, t->shape[1]};
            put_tensor(&header, &data, name, "BF16", shape, 3, begin);
            continue;
        }
        uint64_t shape[TD_TENSOR_MAX_DIMS];
        memcpy(shape, t->shape, sizeof shape);
        const char *type = td_tensor_type_name(t->type);
        if (w->widen != NULL && strstr(t->name, w->widen) != NULL) {
            for (uint64_t k = 0; k < t->n_bytes; k += 2)
                td_buf_u32(&data, (uint32_t)(t->data[k] | t->data[k + 1] << 8) << 16);
            type = "F32";
        } else if (w->reshape != NULL && strcmp(t->name, w->reshape) == 0) {
            td_buf_put(&data, t->data, (size_t)(t->n_bytes / shape[0] * (shape[0] - 1)));
            shape[0]--;
        } else {
            td_buf_put(&data, t->data, (size_t)t->n_bytes);
        }
        if (w->poke != NULL && strcmp(t->name, w->poke) == 0) data.data[begin] = w->poke_byte;
        put_tensor(&header, &data, t->name, type, shape, t->n_dims, begin);
    }
    td_buf_str(&header, "}");
    for (uint32_t i = 0; i < w->header_pad; i++) td_buf_str(&header, " ");
    td_buf_u64(&file, header.n);
    td_buf_put(&file, header.data, header.n);
    td_buf_put(&file, data.data, data.n);
    assert_false(header.failed || data.failed || file.failed);
    write_file("model.safetensors", file.data, file.n);
    write_config(w);
    td_buf_free(&header);
    td_buf_free(&data);
    td_buf_free(&file);
    td_safetensors_close(s);
}

/* ---- legal forms
 * ------------------------------------------------------------------------------------------------------------ */

static float *logits_of(const char *from, char fingerprint[33])
{
    static const uint32_t ids[5] = {2024, 400, 17, 1033, 1999};
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.dir = from, .kv_type = TD_BF16, .max_tokens = 64, .max_batch_tokens = 16});
    float *logits = calloc(t.c->vocab, sizeof *logits);
    assert_non_null(logits);
    struct tiny_seq s;
    tiny_seq_open(&t, &s, 16);
    struct td_segment seg = tiny_next(&t, &s, ids, 5, logits);
    tiny_run(&t, &seg, 1);
    if (fingerprint != NULL) snprintf(fingerprint, 33, "%s", td_model_fingerprint(t.model));
    tiny_seq_close(&s);
    tiny_close(&t);
    return logits;
}

static void the_same_weights_in_another_form_give_the_same_bits(void **state)
{
    (void)state;
    static const struct rewrite forms[] = {
        {.header_pad = 7}, /* one file instead of two */
        {.header_pad = 0},     {.header_pad = 1}, {.header_pad = 2},
        {.header_pad = 3}, /* data at odd addresses */
        {.widen = "norm"},     {.widen = "bias"}, {.widen = "sinks", .header_pad = 1},
        {.unquantised = true},
    };
    float *want = logits_of(TINY_DIR, NULL);
    for (uint32_t i = TINY_IS_SLOW ? TD_COUNT(forms) - 2 : 0; i < TD_COUNT(forms); i++) {
        rewrite(&forms[i]);
        float *have = logits_of(dir, NULL);
        if (memcmp(want, have, 2048 * sizeof *want) != 0) fail_msg("form %u gives other logits", i);
        free(have);
    }
    free(want);
}

static void the_fingerprint_follows_the_weights_not_the_files(void **state)
{
    (void)state;
    char a[33], b[33], c[33], d[33];
    free(logits_of(TINY_DIR, a));
    free(logits_of(TINY_DIR, b));
    assert_string_equal(a, b);
    assert_int_equal(strlen(a), 32);
    rewrite(&(struct rewrite){.header_pad = 5});
    free(logits_of(dir, b));
    rewrite(&(struct rewrite){.poke = "model.layers.3.self_attn.sinks", .poke_byte = 0x11});
    free(logits_of(dir, c));
    rewrite(&(struct rewrite){.widen = "sinks"});
    free(logits_of(dir, d));
    /* The rewritten directory has no tokenizer, so all ids name tokens there: part of the fingerprint too. */
    assert_string_not_equal(a, b);
    assert_string_not_equal(b, c);
    assert_string_not_equal(b, d);
}

/* ---- damage
 * ----------------------------------------------------------------------------------------------------------------- */

static void expect_failure(const char *words, const char *more)
{
    struct td_model *m = NULL;
    struct td_err err = {0};
    enum td_status st = td_model_load(dir, &(struct td_model_options){.tp = 1}, &m, &err);
    if (st != TD_E_BAD_FILE || strstr(err.text, words) == NULL || strstr(err.text, more) == NULL)
        fail_msg("%s: \"%s\" does not say \"%s\" and \"%s\"", td_status_name(st), err.text, words, more);
    assert_null(m);
}

static void damage_is_named(void **state)
{
    (void)state;
    rewrite(&(struct rewrite){.drop = "model.layers.4.mlp.router.weight"});
    expect_failure("model.layers.4.mlp.router.weight", "missing");
    rewrite(&(struct rewrite){.drop = "lm_head.weight"});
    expect_failure("lm_head.weight", "missing");
    rewrite(&(struct rewrite){.reshape = "model.layers.2.self_attn.k_proj.weight"});
    expect_failure("model.layers.2.self_attn.k_proj.weight",
                   "shape: [511, 288] where config.json calls for [512, 288]");
    rewrite(&(struct rewrite){.reshape = "model.layers.0.mlp.experts.down_proj_blocks"});
    expect_failure("down_proj_blocks", "shape: [7, 288, 10, 16]");
    rewrite(&(struct rewrite){.widen = "q_proj.weight"});
    expect_failure("q_proj.weight", "dtype: F32 where BF16 is expected");
    rewrite(&(struct rewrite){.poke = "model.layers.5.mlp.experts.gate_up_proj_scales", .poke_byte = 255});
    expect_failure("model.layers.5.mlp.experts.gate_up_proj_scales", "255");
    rewrite(&(struct rewrite){.unquantised = true, .keeps_quantization = true});
    expect_failure("quantization_config", "stored unquantised");
    rewrite(&(struct rewrite){.drops_quantization = true});
    expect_failure("quantization_config", "missing");
}

static void options_that_cannot_be_met_are_refused(void **state)
{
    (void)state;
    struct td_model *m = NULL;
    struct td_err err;
    assert_int_equal(td_model_load(TINY_DIR, &(struct td_model_options){.tp = 3}, &m, &err), TD_E_BAD_CONFIG);
    assert_int_equal(td_model_load("/nowhere", &(struct td_model_options){.tp = 1}, &m, &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "/nowhere/config.json"));
    assert_null(m);
}

/* ---- dummy weights
 * ------------------------------------------------------------------------------------------------------------ */

static void count_experts(void *user, int32_t layer, const float *x, uint32_t n_rows, const uint32_t *ids)
{
    (void)x;
    uint32_t *hits = user;
    for (uint32_t i = 0; layer >= 0 && ids != NULL && i < n_rows * 4; i++) hits[ids[i]]++;
}

static void dummy_weights_repeat_by_seed_and_share_the_work(void **state)
{
    (void)state;
    char prints[3][33];
    for (uint32_t i = 0; i < 3; i++) {
        struct td_model *m = NULL;
        struct td_err err;
        struct td_model_options o = {.tp = 1, .use_dummy_weights = true, .dummy_seed = i / 2};
        assert_int_equal(td_model_load(TINY_DIR, &o, &m, &err), TD_OK);
        snprintf(prints[i], sizeof prints[i], "%s", td_model_fingerprint(m));
        if (i == 0) {
            struct tiny t;
            tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .max_tokens = 512});
            struct td_forward f = {0};
            assert_int_equal(td_forward_create(m, &t.engine, &f, &err), TD_OK);
            uint32_t ids[256], hits[8] = {0}, all = 0;
            for (uint32_t k = 0; k < 256; k++) ids[k] = k * 7;
            float logits[2048];
            struct tiny_seq s;
            tiny_seq_open(&t, &s, 256);
            struct td_segment seg = tiny_next(&t, &s, ids, 256, logits);
            struct td_batch b = {.segments = &seg, .n_segments = 1};
            f.probe = count_experts;
            f.probe_user = hits;
            assert_int_equal(td_forward_run(&f, &b, NULL, NULL), TD_OK);
            for (uint32_t v = 0; v < 2048; v++) assert_true(isfinite(logits[v]));
            for (uint32_t e = 0; e < 8; e++) all += hits[e];
            assert_int_equal(all, (256 * 5 + 1) * 4);
            for (uint32_t e = 0; e < 8; e++) assert_in_range(hits[e], all / 12, all / 6); /* even: all / 8 */
            tiny_seq_close(&s);
            td_forward_free(&f);
            tiny_close(&t);
        }
        td_model_destroy(m);
    }
    assert_string_equal(prints[0], prints[1]);
    assert_string_not_equal(prints[0], prints[2]);
}

static void weights_take_what_was_said_before(void **state)
{
    (void)state;
    for (uint32_t tp = 1; tp <= 4; tp *= 2)
        for (uint32_t ep = 1; ep <= tp; ep += tp == 1 ? 1 : tp - 1) {
            struct td_model *m = NULL;
            struct td_err err = {0};
            uint64_t sum = 0;
            struct td_model_options o = {.tp = tp, .ep = ep};
            if (td_model_load(TINY_DIR, &o, &m, &err) != TD_OK) fail_msg("%s", err.text);
            for (uint32_t r = 0; r < tp; r++) {
                struct td_shard s;
                td_shard_of(td_model_config_of(m), tp, ep, r, &s);
                sum += td_weights_bytes(td_model_config_of(m), &s, td_model_device_of(m));
            }
            assert_int_equal(sum, td_model_weight_bytes(m));
            td_model_destroy(m);
        }
}

/* Threads make parts of a tensor in any order. */
static void made_up_bytes_do_not_depend_on_where_a_part_begins(void **state)
{
    (void)state;
    static uint8_t whole[3 * 5 * 32 * 16], part[sizeof whole];
    const struct td_tensor tensors[] = {
        {.name = "a.gate_up_proj_blocks", .type = TD_T_U8, .n_dims = 4, .shape = {3, 5, 32, 16}, .n_bytes = 7680},
        {.name = "a.gate_up_proj_scales", .type = TD_T_U8, .n_dims = 3, .shape = {3, 5, 32}, .n_bytes = 480},
        {.name = "embed_tokens.weight", .type = TD_T_BF16, .n_dims = 2, .shape = {30, 64}, .n_bytes = 3840}};
    for (size_t i = 0; i < TD_COUNT(tensors); i++) {
        const struct td_tensor *t = &tensors[i];
        td_dummy_bytes(7, t, 0, t->n_bytes, whole);
        for (uint64_t at = 0, n = 2; at < t->n_bytes; at += n, n = n * 3 % 70 + 4) {
            if (n > t->n_bytes - at) n = t->n_bytes - at;
            td_dummy_bytes(7, t, at, n, part + at);
        }
        assert_memory_equal(whole, part, t->n_bytes);
    }
}

static enum td_status little_memory(struct td_device *d, uint64_t *free_out, uint64_t *total_out)
{
    (void)d;
    *free_out = 30000000;
    *total_out = 100000000;
    return TD_OK;
}

static void weights_that_do_not_fit_are_refused_with_figures(void **state)
{
    (void)state;
    struct td_backend small = td_backend_cpu;
    small.memory = little_memory;
    struct td_device d = {.backend = &small, .experts = TD_EXPERTS_FP8};
    struct td_model *m = NULL;
    struct td_err err = {0};
    struct td_model_options o = {.tp = 1, .device = &d};
    assert_int_equal(td_model_load(TINY_DIR, &o, &m, &err), TD_E_NO_MEMORY);
    assert_null(m);
    static const char *const said[] = {"weights of 0.04 GB", "0.10 GB, 0.03 GB are free", "--moe-weights", "fp8", "--gpu"};
    for (size_t i = 0; i < TD_COUNT(said); i++)
        if (strstr(err.text, said[i]) == NULL) fail_msg("\"%s\" does not say \"%s\"", err.text, said[i]);
}

static void loading_survives_any_failed_allocation(void **state)
{
    (void)state;
    json_t *j = json_pack("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:{s:s}}", "model_type", "gpt_oss",
                          "num_hidden_layers", 2, "hidden_size", 32, "intermediate_size", 32, "num_attention_heads", 2,
                          "num_key_value_heads", 1, "head_dim", 16, "vocab_size", 32, "num_local_experts", 4,
                          "num_experts_per_tok", 2, "rope_theta", 10000, "rope_scaling", "rope_type", "default");
    json_object_set_new(j, "eos_token_id", json_integer(1));
    char *text = json_dumps(j, 0);
    write_file("config.json", text, strlen(text));
    free(text);
    json_decref(j);
    struct td_model_options o = {.tp = 1, .use_dummy_weights = true};
    for (uint32_t i = 0;; i++) {
        assert_true(i < 1000);
        struct td_model *m = NULL;
        struct td_err err = {0};
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        enum td_status st = td_model_load(dir, &o, &m, &err);
        td_fault_disarm_all();
        assert_true((st == TD_OK) == (m != NULL));
        td_model_destroy(m);
        if (st == TD_OK) {
            assert_true(i > 20);
            break;
        }
        assert_int_equal(st, TD_E_NO_MEMORY);
        assert_true(err.text[0] != 0);
    }
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tandem-model-XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    static const char *const names[] = {"model.safetensors", "config.json"};
    for (uint32_t i = 0; i < TD_COUNT(names); i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_weights_in_another_form_give_the_same_bits),
        cmocka_unit_test(the_fingerprint_follows_the_weights_not_the_files),
        cmocka_unit_test(damage_is_named),
        cmocka_unit_test(options_that_cannot_be_met_are_refused),
        cmocka_unit_test(dummy_weights_repeat_by_seed_and_share_the_work),
        cmocka_unit_test(weights_take_what_was_said_before),
        cmocka_unit_test(made_up_bytes_do_not_depend_on_where_a_part_begins),
        cmocka_unit_test(weights_that_do_not_fit_are_refused_with_figures),
        cmocka_unit_test(loading_survives_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
