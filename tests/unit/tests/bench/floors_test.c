/* Floors against figures worked out by hand, and the shapes that benchmarks make. */
#include "tests/bench/floors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/bench/shape.h"

static struct td_model_config shape(const char *name)
{
    struct td_buf text = {0};
    struct td_err err = {{0}};
    struct td_model_config c;
    if (td_bench_shape_config(name, 0, &text, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_model_config_parse(td_buf_cstr(&text), text.n, &c, &err) != TD_OK) fail_msg("%s", err.text);
    td_buf_free(&text);
    return c;
}

static void near_ms(double seconds, double ms)
{
    if (fabs(seconds * 1e3 - ms) > 0.006 * ms + 0.005) fail_msg("%.4f ms, not %.4f", seconds * 1e3, ms);
}

static void a_decode_step_reads_weights_once_and_every_cache(void **state)
{
    (void)state;
    struct td_model_config c = shape("20b"), d = shape("120b");
    static const uint32_t batches[] = {1, 8, 32, 64, 128};
    static const struct {
        int large;
        enum td_expert_form form;
        uint32_t context;
        double ms[5];
    } rows[] = {
        {0, TD_EXPERTS_FP8, 1024, {1.13, 3.53, 5.15, 5.42, 5.84}},
        {0, TD_EXPERTS_MXFP4, 1024, {0.87, 2.16, 3.10, 3.34, 3.76}},
        {0, TD_EXPERTS_MXFP4, 8192, {0.91, 2.49, 4.41, 5.96, 8.99}},
        {0, TD_EXPERTS_MXFP4, 32768, {1.05, 3.61, 8.89, 14.9, 26.9}},
        {1, TD_EXPERTS_FP8, 1024, {1.55, 6.76, 18.0, 24.5, 28.1}},
        {1, TD_EXPERTS_MXFP4, 1024, {1.16, 3.96, 10.0, 13.6, 15.9}},
        {1, TD_EXPERTS_MXFP4, 8192, {1.22, 4.45, 12.0, 17.6, 23.7}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int k = 0; k < 5; k++) {
            struct td_bench_floors f;
            td_bench_decode_floors(rows[i].large ? &d : &c, rows[i].form, TD_BF16, batches[k], rows[i].context, &f);
            near_ms(f.total, rows[i].ms[k]);
            assert_true(fabs(f.qkv + f.attention + f.o_proj + f.moe + f.lm_head - f.total) < 1e-12);
        }
}

static void pages_in_fp8_halve_what_full_layers_read(void **state)
{
    (void)state;
    struct td_model_config c = shape("20b");
    struct td_bench_floors wide, narrow;
    td_bench_decode_floors(&c, TD_EXPERTS_FP8, TD_BF16, 64, 8192, &wide);
    td_bench_decode_floors(&c, TD_EXPERTS_FP8, TD_E4M3, 64, 8192, &narrow);
    double sliding = 12.0 * 128 * 2048 * 64 / TD_BENCH_READ_BYTES_S;
    assert_true(fabs((wide.attention - sliding) / 2 - (narrow.attention - sliding)) < 1e-9);
    assert_true(wide.moe == narrow.moe);
}

static void a_prefill_counts_what_it_multiplies(void **state)
{
    (void)state;
    struct td_model_config c = shape("20b"), d = shape("120b");
    static const uint32_t tokens[] = {512, 2048, 8192, 32768, 131072};
    static const double small[] = {2.8, 11.6, 52.9, 317, 2958}, large[] = {4.2, 17.4, 79.4, 476, 4437};
    for (int i = 0; i < 5; i++) {
        struct td_bench_floors f, g, exact;
        td_bench_prefill_floors(&c, TD_EXPERTS_MXFP4, tokens[i], &f);
        td_bench_prefill_floors(&d, TD_EXPERTS_FP8, tokens[i], &g);
        td_bench_prefill_floors(&c, TD_EXPERTS_BF16, tokens[i], &exact);
        if (fabs(f.total * 1e3 / small[i] - 1) > 0.02) fail_msg("20b, %u tokens: %.2f ms", tokens[i], f.total * 1e3);
        if (fabs(g.total * 1e3 / large[i] - 1) > 0.02) fail_msg("120b, %u tokens: %.2f ms", tokens[i], g.total * 1e3);
        assert_true(fabs(exact.moe / f.moe - TD_BENCH_FP8_FLOP_S / TD_BENCH_BF16_FLOP_S) < 1e-9);
        assert_true(exact.qkv == f.qkv);
    }
}

static void a_shape_is_a_model_directory(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    struct td_model_config c;
    char dir[] = "/tmp/td-shape-XXXXXX", made[64];
    assert_non_null(mkdtemp(dir));
    snprintf(made, sizeof made, "%s/120b", dir);
    if (td_bench_shape_write("120b", 0, made, NULL, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_model_config_load(made, &c, &err) != TD_OK) fail_msg("%s", err.text);
    assert_int_equal(c.n_layers, 36);
    assert_int_equal(c.n_experts, 128);
    assert_int_equal(c.n_group_layers[TD_KV_FULL], 18);
    assert_int_equal(c.n_token_ids, 201088);
    assert_true(c.is_mxfp4);
    td_bench_shape_remove(made);
    assert_int_equal(access(made, F_OK), -1);

    /* With a tokenizer: its stop tokens, and no ids beyond its own. */
    if (td_bench_shape_write("20b", 0, made, "tests/tiny/tiny-model", &err) != TD_OK) fail_msg("%s", err.text);
    if (td_model_config_load(made, &c, &err) != TD_OK) fail_msg("%s", err.text);
    assert_int_equal(c.vocab, 201088);
    assert_true(c.n_token_ids <= 2048 && c.n_token_ids > 2000);
    assert_true(c.n_eos > 0 && c.eos_ids[0] < c.n_token_ids);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static void what_is_not_there_is_named(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    struct td_buf text = {0};
    assert_int_equal(td_bench_shape_config("7b", 0, &text, &err), TD_E_INVALID);
    assert_non_null(strstr(err.text, "--config: \"7b\""));
    assert_int_equal(td_bench_shape_write("20b", 0, "/nonexistent/x", NULL, &err), TD_E_IO);
    assert_non_null(strstr(err.text, "/nonexistent/x"));
    char dir[] = "/tmp/td-shape-XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(td_bench_shape_write("20b", 0, dir, "/nonexistent", &err), TD_E_BAD_FILE);
    assert_non_null(strstr(err.text, "/nonexistent/tokenizer.json"));
    td_bench_shape_remove(dir);
    td_buf_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_decode_step_reads_weights_once_and_every_cache),
        cmocka_unit_test(pages_in_fp8_halve_what_full_layers_read),
        cmocka_unit_test(a_prefill_counts_what_it_multiplies),
        cmocka_unit_test(a_shape_is_a_model_directory),
        cmocka_unit_test(what_is_not_there_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
