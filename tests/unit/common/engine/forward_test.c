/* The forward pass against the checkpoint's recorded outputs, and against itself: batched, chunked, on other
 * instruction sets. */
#include "common/engine/forward.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "tests/support/tiny_model.h"

#define MAX_GREEDY 64u

/* ---- goldens
 * ------------------------------------------------------------------------------------------------------------ */

static uint32_t *read_ids(const json_t *j, uint32_t *n_out)
{
    uint32_t n = (uint32_t)json_array_size(j), *ids = calloc(n + 1, sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(j, i));
    *n_out = n;
    return ids;
}

static void read_base64(const char *text, float *out, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint8_t *bytes = (uint8_t *)out;
    size_t at = 0;
    uint32_t bits = 0, n_bits = 0;
    for (; *text != 0 && *text != '='; text++) {
        const char *d = strchr(digits, *text);
        assert_non_null(d);
        bits = bits << 6 | (uint32_t)(d - digits);
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        assert_true(at < n * sizeof *out);
        bytes[at++] = (uint8_t)(bits >> n_bits);
    }
    assert_int_equal(at, n * sizeof *out);
}

static double distance(const float *x, const float *y, uint32_t n)
{
    double num = 0, den = 0;
    for (uint32_t i = 0; i < n; i++) {
        num += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        den += (double)y[i] * y[i];
    }
    return sqrt(num / den);
}

struct seen { /* the last row of what the probe was shown */
    uint32_t hidden, top_k;
    double norm[TD_MAX_LAYERS + 2];
    float first[TD_MAX_LAYERS + 2][8];
    uint32_t ids[TD_MAX_LAYERS][4];
};

static void look(void *user, int32_t layer, const float *x, uint32_t n_rows, const uint32_t *ids)
{
    struct seen *s = user;
    const float *row = x + (size_t)(n_rows - 1) * s->hidden;
    double sum = 0;
    for (uint32_t i = 0; i < s->hidden; i++) sum += (double)row[i] * row[i];
    s->norm[layer + 1] = sqrt(sum);
    memcpy(s->first[layer + 1], row, sizeof s->first[0]);
    for (uint32_t k = 0; ids != NULL && k < s->top_k; k++) s->ids[layer][k] = ids[(n_rows - 1) * s->top_k + k];
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

struct bounds {
    double logits, margin, gap; /* relative L2; greedy steps and top-20 neighbours at least this far apart must agree */
};

static void check_hidden(const json_t *p, struct seen *s, uint32_t n_layers, double bound)
{
    const json_t *norms = json_object_get(p, "hidden_norm"), *firsts = json_object_get(p, "hidden_first8");
    for (uint32_t i = 0; i < n_layers + 2; i++) {
        double want = json_number_value(json_array_get(norms, i));
        if (!(fabs(s->norm[i] - want) <= bound * want))
            fail_msg("hidden state %u: norm %.6g, want %.6g", i, s->norm[i], want);
        for (uint32_t k = 0; k < 8; k++) {
            double v = json_number_value(json_array_get(json_array_get(firsts, i), k));
            if (!(fabs(s->first[i][k] - v) <= bound * want))
                fail_msg("hidden state %u, value %u: %.6g, want %.6g", i, k, (double)s->first[i][k], v);
        }
    }
    for (uint32_t i = 0; i < n_layers; i++) {
        const json_t *want = json_array_get(json_object_get(p, "router_last"), i);
        qsort(s->ids[i], 4, sizeof s->ids[i][0], by_value);
        for (uint32_t k = 0; k < 4; k++)
            assert_int_equal(s->ids[i][k], (uint32_t)json_integer_value(json_array_get(want, k)));
    }
}

static double check_prompt(struct tiny *t, const json_t *p, const struct bounds *bound)
{
    const char *name = json_string_value(json_object_get(p, "name"));
    uint32_t n, n_greedy, vocab = t->c->vocab;
    uint32_t *ids = read_ids(json_object_get(p, "ids"), &n),
             *greedy = read_ids(json_object_get(p, "greedy"), &n_greedy);
    float *want = calloc(vocab, sizeof *want), *have = calloc(vocab, sizeof *have);
    assert_true(want != NULL && have != NULL && n_greedy <= MAX_GREEDY);
    read_base64(json_string_value(json_object_get(p, "logits_f32_base64")), want, vocab);

    struct seen seen = {.hidden = t->c->hidden, .top_k = t->c->top_k};
    t->forward.probe = look;
    t->forward.probe_user = &seen;
    struct tiny_seq s;
    t->n_taken[0] = t->n_taken[1] = 0;
    tiny_seq_open(t, &s, n + MAX_GREEDY);
    struct td_segment seg = tiny_next(t, &s, ids, n, have);
    tiny_run(t, &seg, 1);
    t->forward.probe = NULL;
    double off = distance(have, want, vocab);
    if (!(off <= bound->logits))
        fail_msg("%s: logits are off by %.3g of their norm, allowed %.3g", name, off, bound->logits);
    if (bound->logits < 1e-4) check_hidden(p, &seen, t->c->n_layers, 2e-5);

    const json_t *top = json_object_get(p, "top20");
    for (uint32_t i = 0; i + 1 < json_array_size(top); i++) {
        const json_t *a = json_array_get(top, i), *b = json_array_get(top, i + 1);
        double gap = json_number_value(json_array_get(a, 1)) - json_number_value(json_array_get(b, 1));
        uint32_t x = (uint32_t)json_integer_value(json_array_get(a, 0)),
                 y = (uint32_t)json_integer_value(json_array_get(b, 0));
        if (gap > bound->gap && !(have[x] > have[y]))
            fail_msg("%s: top-20 places %u and %u are exchanged", name, i, i + 1);
    }
    for (uint32_t i = 0; i < n_greedy; i++) {
        double margin = json_number_value(json_array_get(json_object_get(p, "greedy_margin"), i));
        uint32_t token = tiny_argmax(have, t->c->n_token_ids);
        if (token != greedy[i] && margin > bound->margin)
            fail_msg("%s: greedy step %u gives %u, want %u (margin %.4g)", name, i, token, greedy[i], margin);
        if (token != greedy[i] || i + 1 == n_greedy) break;
        seg = tiny_next(t, &s, &greedy[i], 1, have);
        tiny_run(t, &seg, 1);
    }
    tiny_seq_close(&s);
    free(ids);
    free(greedy);
    free(want);
    free(have);
    return off;
}

static void check_goldens(enum td_dtype kv_type, const struct bounds *bound)
{
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.kv_type = kv_type, .max_tokens = 4096});
    json_error_t e;
    json_t *root = json_load_file(TINY_GOLDENS, JSON_ALLOW_NUL, &e), *p;
    if (root == NULL) fail_msg("%s: %s", TINY_GOLDENS, e.text);
    size_t i, n = 0;
    double worst = 0;
    json_array_foreach (json_object_get(root, "prompts"), i, p) {
        if (TINY_IS_SLOW && i % 5 != 0) continue;
        double off = check_prompt(&t, p, bound);
        if (off > worst) worst = off;
        n++;
    }
    assert_true(n >= (TINY_IS_SLOW ? 4 : 20));
    print_message("worst distance %.3g, %.0f %% of the allowance\n", worst, 100 * worst / bound->logits);
    json_decref(root);
    tiny_close(&t);
}

static void recorded_outputs_are_met_with_f32_pages(void **state)
{
    (void)state;
    check_goldens(TD_F32, &(struct bounds){.logits = 1e-5, .margin = 1e-3, .gap = 1e-3});
}

static void recorded_outputs_are_met_with_bf16_pages(void **state)
{
    (void)state;
    check_goldens(TD_BF16, &(struct bounds){.logits = 4e-3, .margin = 0.05, .gap = 0.05});
}

/* FP8 rounds keys and values to three bits: the logits are off by a hundredth. */
static void recorded_outputs_are_met_more_loosely_with_fp8_pages(void **state)
{
    (void)state;
    check_goldens(TD_E4M3, &(struct bounds){.logits = 0.04, .margin = 1, .gap = 1});
}

/* ---- row invariance
 * ------------------------------------------------------------------------------------------------------- */

#define N_TEXT 300u

static void make_text(uint32_t *ids, uint32_t n, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++) ids[i] = (seed = seed * 1664525u + 1013904223u) % 2016u;
}

static float *run_in_chunks(struct tiny *t, const uint32_t *ids, uint32_t n, uint32_t chunk)
{
    float *logits = calloc(t->c->vocab, sizeof *logits);
    assert_non_null(logits);
    struct tiny_seq s;
    tiny_seq_open(t, &s, n);
    for (uint32_t at = 0; at < n; at += chunk) {
        uint32_t m = n - at < chunk ? n - at : chunk;
        struct td_segment seg = tiny_next(t, &s, ids + at, m, at + m == n ? logits : NULL);
        tiny_run(t, &seg, 1);
    }
    tiny_seq_close(&s);
    return logits;
}

static void assert_same_bits(const float *a, const float *b, uint32_t n, const char *what)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: value %u: %a and %a", what, i, (double)a[i], (double)b[i]);
}

static void chunks_of_any_size_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1, 7, 64, 100};
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 1);
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_E4M3};
    for (uint32_t type = 0; type < (TINY_IS_SLOW ? 1 : TD_COUNT(types)); type++) {
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = types[type]});
        float *whole = run_in_chunks(&t, ids, N_TEXT, N_TEXT);
        for (uint32_t i = TINY_IS_SLOW ? 2 : 0; i < TD_COUNT(sizes); i++) {
            float *parts = run_in_chunks(&t, ids, N_TEXT, sizes[i]);
            assert_same_bits(whole, parts, t.c->vocab, "chunked");
            free(parts);
        }
        free(whole);
        tiny_close(&t);
    }
}

static void pages_of_any_size_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {16, 48, 256};
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 2);
    float *want = NULL;
    for (uint32_t i = 0; i < TD_COUNT(sizes); i++) {
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .page_tokens = sizes[i]});
        float *have = run_in_chunks(&t, ids, N_TEXT, 77);
        if (want == NULL) {
            want = have;
        } else {
            assert_same_bits(want, have, t.c->vocab, "page size");
            free(have);
        }
        tiny_close(&t);
    }
    free(want);
}

/* Five sequences advance together, by different strides, prompts beside single tokens. */
static void company_in_the_batch_changes_no_bit(void **state)
{
    (void)state;
    enum { N = 5 };
    static const uint32_t strides[N] = {1, 3, 50, 129, 300}, lengths[N] = {40, 130, 257, 300, 300};
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16});
    uint32_t ids[N][N_TEXT];
    float *alone[N], *together[N];
    struct tiny_seq s[N];
    for (uint32_t i = 0; i < N; i++) {
        make_text(ids[i], N_TEXT, 10 + i);
        alone[i] = run_in_chunks(&t, ids[i], lengths[i], lengths[i]);
        together[i] = calloc(t.c->vocab, sizeof *together[i]);
        assert_non_null(together[i]);
        tiny_seq_open(&t, &s[i], lengths[i]);
    }
    for (;;) {
        struct td_segment segs[N];
        uint32_t n = 0;
        for (uint32_t i = 0; i < N; i++) {
            uint32_t left = lengths[i] - s[i].n, m = left < strides[i] ? left : strides[i];
            if (m != 0) segs[n++] = tiny_next(&t, &s[i], ids[i] + s[i].n, m, together[i]);
        }
        if (n == 0) break;
        tiny_run(&t, segs, n);
    }
    for (uint32_t i = 0; i < N; i++) {
        assert_same_bits(alone[i], together[i], t.c->vocab, "in company");
        free(alone[i]);
        free(together[i]);
        tiny_seq_close(&s[i]);
    }
    tiny_close(&t);
}

static void instruction_sets_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const paths[] = {"scalar", "avx2", "avx512"};
    uint32_t ids[N_TEXT], n_tried = 0;
    make_text(ids, N_TEXT, 3);
    float *want = NULL;
    for (uint32_t i = 0; i < TD_COUNT(paths); i++) {
        struct td_device *device = NULL;
        struct td_err err;
        if (td_device_open(&(struct td_device_options){.cpu_path = paths[i]}, &device, &err) != TD_OK) {
            assert_int_not_equal(i, 0);
            print_message("not on this processor: %s\n", err.text);
            continue;
        }
        td_device_close(device);
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .cpu_path = paths[i]});
        float *have = run_in_chunks(&t, ids, 40, 13);
        n_tried++;
        if (want == NULL) {
            want = have;
        } else {
            assert_same_bits(want, have, t.c->vocab, paths[i]);
            free(have);
        }
        tiny_close(&t);
    }
    free(want);
    if (n_tried < 2) skip();
}

static void one_thread_gives_the_bits_of_many(void **state)
{
    (void)state;
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 4);
    float *logits[2];
    uint32_t vocab = 0;
    for (uint32_t i = 0; i < 2; i++) {
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .n_threads = i == 0 ? 1 : 5});
        logits[i] = run_in_chunks(&t, ids, N_TEXT, 128);
        vocab = t.c->vocab;
        tiny_close(&t);
    }
    assert_same_bits(logits[0], logits[1], vocab, "threads");
    free(logits[0]);
    free(logits[1]);
}

/* ---- batches that must not run
 * ---------------------------------------------------------------------------------------------- */

static void impossible_batches_are_refused(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .max_batch_tokens = 128, .max_tokens = 512});
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 5);
    struct tiny_seq s;
    tiny_seq_open(&t, &s, 256);
    struct td_segment good = tiny_next(&t, &s, ids, 100, NULL), bad;
    struct td_batch b = {.segments = &bad, .n_segments = 1};
#define REFUSED(change)                                                                                                \
    do {                                                                                                               \
        bad = good;                                                                                                    \
        change;                                                                                                        \
        assert_int_equal(td_forward_check(&t.forward, &b), TD_E_INVALID);                                              \
    } while (0)
    bad = good;
    assert_int_equal(td_forward_check(&t.forward, &b), TD_OK);
    REFUSED(bad.n_tokens = 0);
    REFUSED(bad.tokens = NULL);
    REFUSED(bad.n_tokens = 129);
    REFUSED(bad.start = 500);
    REFUSED(bad.start = UINT32_MAX);
    REFUSED(bad.start = 200);       /* the table ends at 256 */
    REFUSED(bad.want_token = true); /* and no sampling settings */
    REFUSED(bad.table[TD_KV_FULL].first_block = 1);
    REFUSED(bad.table[TD_KV_SLIDING].n_blocks = 1);
    REFUSED(bad.table[TD_KV_SLIDING].pages = NULL);
    uint32_t gone[2] = {0, TD_NO_PAGE}, beyond[2] = {0, t.engine.kv[TD_KV_FULL].n_pages};
    REFUSED(bad.table[TD_KV_SLIDING].pages = gone; bad.table[TD_KV_SLIDING].n_blocks = 2);
    REFUSED(bad.table[TD_KV_FULL].pages = beyond; bad.table[TD_KV_FULL].n_blocks = 2);
    ids[99] = t.c->vocab;
    REFUSED((void)0);
    b.n_segments = 0;
    assert_int_equal(td_forward_check(&t.forward, &b), TD_E_INVALID);
#undef REFUSED
    tiny_seq_close(&s);
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_outputs_are_met_with_f32_pages),
        cmocka_unit_test(recorded_outputs_are_met_with_bf16_pages),
        cmocka_unit_test(recorded_outputs_are_met_more_loosely_with_fp8_pages),
        cmocka_unit_test(chunks_of_any_size_give_the_same_bits),
        cmocka_unit_test(pages_of_any_size_give_the_same_bits),
        cmocka_unit_test(company_in_the_batch_changes_no_bit),
        cmocka_unit_test(instruction_sets_give_the_same_bits),
        cmocka_unit_test(one_thread_gives_the_bits_of_many),
        cmocka_unit_test(impossible_batches_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
