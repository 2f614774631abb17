/* config.json: what is read, and what is refused with which words. */
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "common/model/model.h"

#define TINY "tests/tiny/tiny-model"

static json_t *tiny_config(void)
{
    json_error_t e;
    json_t *j = json_load_file(TINY "/config.json", 0, &e);
    if (j == NULL) fail_msg("%s", e.text);
    return j;
}

static enum td_status parse(json_t *j, struct td_model_config *c, struct td_err *err)
{
    char *text = json_dumps(j, 0);
    assert_non_null(text);
    err->text[0] = 0;
    enum td_status st = td_model_config_parse(text, strlen(text), c, err);
    free(text);
    json_decref(j);
    return st;
}

/* The tiny configuration with one field replaced (or removed: NULL). */
static json_t *with(const char *path, json_t *value)
{
    json_t *j = tiny_config(), *at = j;
    const char *dot = strchr(path, '.');
    char outer[64] = "";
    if (dot != NULL) {
        memcpy(outer, path, (size_t)(dot - path));
        at = json_object_get(j, outer);
        path = dot + 1;
    }
    if (value == NULL)
        json_object_del(at, path);
    else
        json_object_set_new(at, path, value);
    return j;
}

static void the_tiny_checkpoint_is_read(void **state)
{
    (void)state;
    struct td_model_config c;
    struct td_err err = {0};
    if (td_model_config_load(TINY, &c, &err) != TD_OK) fail_msg("%s", err.text);
    assert_string_equal(c.name, "tiny-model");
    assert_int_equal(c.n_layers, 6);
    assert_int_equal(c.hidden, 288);
    assert_int_equal(c.intermediate, 320);
    assert_int_equal(c.n_experts, 8);
    assert_int_equal(c.top_k, 4);
    assert_int_equal(c.n_heads, 16);
    assert_int_equal(c.n_kv_heads, 8);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.vocab, 2048);
    assert_int_equal(c.n_token_ids, 2037);
    assert_int_equal(c.max_context, 131072);
    assert_int_equal(c.window, 128);
    assert_int_equal(c.n_group_layers[TD_KV_SLIDING], 3);
    assert_int_equal(c.n_group_layers[TD_KV_FULL], 3);
    assert_true(c.is_sliding[0] && !c.is_sliding[1] && c.is_sliding[4] && c.layer_in_group[4] == 2);
    assert_true(c.is_mxfp4 && !c.rope_truncate);
    assert_int_equal(c.n_eos, 3); /* generation_config.json's */
    assert_int_equal(c.eos_ids[0], 2020);
    assert_int_equal(c.eos_ids[1], 2017);
    assert_int_equal(c.eos_ids[2], 2030);
    assert_true(c.rope_theta == 150000 && c.rope_factor == 32 && c.rope_original_context == 4096);
}

static void frequencies_meet_the_published_table(void **state)
{
    (void)state;
    static const double want[32] = {1,
                                    0.68904430589,
                                    0.47478205548,
                                    0.32714587186,
                                    0.22541800020,
                                    0.15532298948,
                                    0.10702442148,
                                    0.073744568210,
                                    0.050813274815,
                                    0.031705696185,
                                    0.019335001127,
                                    0.011592049256,
                                    0.0067949594897,
                                    0.0038603593172,
                                    0.0020937923790,
                                    0.0010526021014,
                                    4.5648391922e-4,
                                    1.2931870125e-4,
                                    3.8308812374e-5,
                                    2.6396469031e-5,
                                    1.8188336682e-5,
                                    1.2532569824e-5,
                                    8.6354958754e-6,
                                    5.9502392615e-6,
                                    4.0999784818e-6,
                                    2.8250668272e-6,
                                    1.9465962110e-6,
                                    1.3412910351e-6,
                                    9.2420895024e-7,
                                    6.3682091462e-7,
                                    4.3879782509e-7,
                                    3.0235114281e-7};
    struct td_model_config c;
    struct td_err err;
    float freqs[32], factor;
    assert_int_equal(parse(tiny_config(), &c, &err), TD_OK);
    td_model_rope(&c, freqs, &factor);
    assert_true(fabsf(factor - 1.3465735902799727f) < 1e-7f);
    for (uint32_t j = 0; j < 32; j++)
        if (fabs((double)freqs[j] - want[j]) > 1e-7 * want[j])
            fail_msg("f_%u: %.11g, want %.11g", j, (double)freqs[j], want[j]);

    assert_int_equal(parse(with("rope_scaling.truncate", json_true()), &c, &err), TD_OK);
    td_model_rope(&c, freqs, &factor);
    assert_true(fabs((double)freqs[17] - want[17]) > 0.5 * want[17]); /* whole bounds: another model */
    assert_int_equal(parse(with("rope_scaling.attention_factor", json_real(1.25)), &c, &err), TD_OK);
    td_model_rope(&c, freqs, &factor);
    assert_true(factor == 1.25f);
    assert_int_equal(parse(with("rope_scaling.rope_type", json_string("default")), &c, &err), TD_OK);
    td_model_rope(&c, freqs, &factor);
    assert_true(factor == 1 && fabs((double)freqs[31] - 32 * want[31]) < 1e-6 * want[31]);
}

static void other_spellings_are_understood(void **state)
{
    (void)state;
    struct td_model_config c, want;
    struct td_err err;
    assert_int_equal(parse(tiny_config(), &want, &err), TD_OK);
    /* rope_parameters, theta inside, as newer files have it. */
    json_t *j = tiny_config(), *rope = json_deep_copy(json_object_get(j, "rope_scaling"));
    json_object_set(rope, "rope_theta", json_object_get(j, "rope_theta"));
    json_object_set_new(j, "rope_parameters", rope);
    json_object_del(j, "rope_scaling");
    json_object_del(j, "rope_theta");
    assert_int_equal(parse(j, &c, &err), TD_OK);
    assert_true(c.rope_theta == want.rope_theta && c.rope_factor == 32 && !c.rope_truncate);
    /* num_experts, one spelling of top-k, layer types by default, null as absent, no quantization. */
    j = tiny_config();
    json_object_set_new(j, "num_experts", json_integer(8));
    json_object_del(j, "num_local_experts");
    json_object_del(j, "experts_per_token");
    json_object_set_new(j, "layer_types", json_null());
    json_object_del(j, "quantization_config");
    json_object_del(j, "sliding_window");
    json_object_del(j, "max_position_embeddings");
    json_object_set_new(j, "something_new", json_array());
    assert_int_equal(parse(j, &c, &err), TD_OK);
    assert_true(c.n_experts == 8 && c.top_k == 4 && c.is_sliding[0] && !c.is_sliding[5] && !c.is_mxfp4 &&
                c.window == 128);
    assert_int_equal(c.max_context, 131072);
    assert_int_equal(parse(with("eos_token_id", json_pack("[i,i]", 3, 4)), &c, &err), TD_OK);
    assert_true(c.n_eos == 2 && c.eos_ids[1] == 4);
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    struct {
        json_t *config;
        const char *words;
    } cases[] = {
        {with("rope_scaling", NULL), "rope_scaling: missing"},
        {with("rope_scaling", json_integer(3)), "rope_scaling: must be an object"},
        {with("rope_scaling.factor", NULL), "rope_scaling.factor: missing"},
        {with("rope_scaling.factor", json_string("32")), "rope_scaling.factor: must be a number"},
        {with("rope_scaling.rope_type", json_string("linear")), "rope_scaling.rope_type"},
        {with("rope_scaling.rope_type", NULL), "rope_scaling.rope_type: missing"},
        {with("rope_scaling.original_max_position_embeddings", json_integer(8192)), "initial_context_length is 4096"},
        {with("rope_scaling.rope_theta", json_integer(10000)), "rope_theta"},
        {with("rope_parameters", json_pack("{s:s,s:i}", "rope_type", "yarn", "factor", 16)),
         "factor and rope_scaling.factor differ"},
        {with("rope_theta", NULL), "rope_theta: missing"},
        {with("num_hidden_layers", NULL), "num_hidden_layers: missing"},
        {with("num_hidden_layers", json_integer(0)), "num_hidden_layers: 0 is outside"},
        {with("num_hidden_layers", json_integer(1000000)), "num_hidden_layers: 1000000 is outside"},
        {with("num_hidden_layers", json_integer(4)), "layer_types: 6 entries"},
        {with("hidden_size", json_real(288.0)), "hidden_size: must be an integer"},
        {with("hidden_size", json_integer(-288)), "hidden_size: -288 is outside"},
        {with("hidden_size", json_integer(290)), "hidden_size: 290 is no multiple of 32"},
        {with("intermediate_size", json_integer(300)), "intermediate_size"},
        {with("num_attention_heads", json_integer(12)), "num_attention_heads: 12 is no multiple"},
        {with("head_dim", json_integer(24)), "head_dim: 24"},
        {with("head_dim", json_integer(0)), "head_dim: 0 is outside"},
        {with("num_experts", json_integer(16)), "num_local_experts is 8 but num_experts is 16"},
        {with("experts_per_token", json_integer(2)), "num_experts_per_tok is 4 but experts_per_token is 2"},
        {with("num_local_experts", json_integer(2)), "num_experts_per_tok: 4 of only 2"},
        {with("layer_types", json_pack("[s,s,s,s,s,s]", "full_attention", "x", "x", "x", "x", "x")),
         "layer_types: entry 1"},
        {with("sliding_window", json_integer(0)), "sliding_window: 0 is outside"},
        {with("vocab_size", json_integer(4294967296)), "vocab_size"},
        {with("tie_word_embeddings", json_true()), "tie_word_embeddings"},
        {with("attention_bias", json_false()), "attention_bias"},
        {with("attention_bias", json_integer(1)), "attention_bias: must be true or false"},
        {with("rms_norm_eps", json_real(-1)), "rms_norm_eps"},
        {with("swiglu_limit", json_real(0)), "swiglu_limit"},
        {with("model_type", json_string("llama")), "model_type: \"llama\""},
        {with("architectures", json_pack("[s]", "LlamaForCausalLM")), "architectures"},
        {with("quantization_config.quant_method", json_string("awq")), "quantization_config.quant_method: \"awq\""},
        {with("quantization_config.quant_method", NULL), "quantization_config.quant_method: missing"},
        {with("eos_token_id", json_integer(2048)), "eos_token_id: not an id below"},
        {with("eos_token_id", json_pack("[s]", "x")), "eos_token_id"},
        {with("eos_token_id", json_pack("[i,i,i,i,i,i,i,i,i]", 1, 2, 3, 4, 5, 6, 7, 8, 9)), "eos_token_id: more than"},
    };
    for (uint32_t i = 0; i < TD_COUNT(cases); i++) {
        struct td_model_config c;
        struct td_err err;
        enum td_status st = parse(cases[i].config, &c, &err);
        if (st != TD_E_BAD_FILE || strstr(err.text, cases[i].words) == NULL || strstr(err.text, "config.json") == NULL)
            fail_msg("case %u: %s: \"%s\" does not say \"%s\"", i, td_status_name(st), err.text, cases[i].words);
    }
}

static void text_that_is_no_json_object_is_refused(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "", "[]", "{", "{\"a\":1,\"a\":2}", "{}x", "null", "{\"model_type\": \"gpt_oss\""};
    for (uint32_t i = 0; i < TD_COUNT(texts); i++) {
        struct td_model_config c;
        struct td_err err;
        assert_int_equal(td_model_config_parse(texts[i], strlen(texts[i]), &c, &err), TD_E_BAD_FILE);
        assert_non_null(strstr(err.text, "config.json"));
    }
}

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void a_directory_is_read_with_or_without_its_other_files(void **state)
{
    (void)state;
    char dir[] = "/tmp/tandem-config-XXXXXX", path[256];
    assert_non_null(mkdtemp(dir));
    struct td_model_config c;
    struct td_err err;
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "config.json: no such file"));
    json_t *j = tiny_config();
    char *text = json_dumps(j, 0);
    write_file(dir, "config.json", text);
    free(text);
    json_decref(j);
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_OK);
    assert_true(c.n_eos == 1 && c.eos_ids[0] == 2020 && c.n_token_ids == 2048);

    write_file(dir, "tokenizer.json",
               "{\"model\":{\"vocab\":{\"a\":0,\"b\":7}},\"added_tokens\":[{\"id\":11,\"content\":\"c\\u0000\"}]}");
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_OK);
    assert_int_equal(c.n_token_ids, 12);
    write_file(dir, "tokenizer.json", "{\"model\":{\"vocab\":{\"a\":2048}}}");
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "tokenizer.json: id 2048, but vocab_size is only 2048"));
    write_file(dir, "tokenizer.json", "{}");
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_E_BAD_FILE);
    write_file(dir, "tokenizer.json", "{\"model\":{\"vocab\":{\"a\":1}}}");

    write_file(dir, "generation_config.json", "{\"eos_token_id\":[1,2,-1]}");
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "generation_config.json: eos_token_id"));
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not hang */
    assert_int_equal(td_model_config_load(dir, &c, &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "not a regular file"));
    unlink(path);
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_tiny_checkpoint_is_read),
        cmocka_unit_test(frequencies_meet_the_published_table),
        cmocka_unit_test(other_spellings_are_understood),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(text_that_is_no_json_object_is_refused),
        cmocka_unit_test(a_directory_is_read_with_or_without_its_other_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
