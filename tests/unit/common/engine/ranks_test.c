/* A model divided among ranks against the same model whole: bit for bit, whatever is divided how. */
#include "common/engine/ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "common/engine/sample.h"
#include "tests/support/tiny_model.h"

#define N_TEXT 200u
#define N_NEXT 4u

static const struct {
    uint32_t tp, ep;
} divisions[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {2, 2}, {4, 4}, {8, 8}};

static void make_text(uint32_t *ids, uint32_t n, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++) ids[i] = (seed = seed * 1664525u + 1013904223u) % 2016u;
}

static void assert_same_bits(const float *a, const float *b, size_t n, const char *what, uint32_t tp, uint32_t ep)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("tp %u, ep %u, %s: value %zu: %a and %a", tp, ep, what, i, (double)a[i], (double)b[i]);
}

/* Logits of a prompt whole, the same in chunks, then decode steps, then sequences together: rows of V, in out. */
enum { ROW_WHOLE, ROW_CHUNKED, ROW_DECODE, ROW_BATCH = ROW_DECODE + N_NEXT, N_ROWS = ROW_BATCH + 3 };

static float *compute(uint32_t tp, uint32_t ep, enum td_dtype kv_type, uint32_t *vocab_out)
{
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){
                      .kv_type = kv_type, .max_tokens = 2048, .max_batch_tokens = 512, .tp = tp, .ep = ep});
    uint32_t ids[N_TEXT], v = *vocab_out = t.c->vocab;
    float *out = calloc((size_t)N_ROWS * v, sizeof *out);
    assert_non_null(out);
    make_text(ids, N_TEXT, 1);
    struct tiny_seq whole, chunked, others[3];
    tiny_seq_open(&t, &whole, N_TEXT + N_NEXT);
    struct td_segment seg = tiny_next(&t, &whole, ids, N_TEXT, out + (size_t)ROW_WHOLE * v);
    tiny_run(&t, &seg, 1);
    tiny_seq_open(&t, &chunked, N_TEXT);
    for (uint32_t at = 0, n; at < N_TEXT; at += n) {
        n = N_TEXT - at < 77 ? N_TEXT - at : 77;
        seg = tiny_next(&t, &chunked, ids + at, n, at + n == N_TEXT ? out + (size_t)ROW_CHUNKED * v : NULL);
        tiny_run(&t, &seg, 1);
    }
    for (uint32_t i = 0; i < N_NEXT; i++) {
        seg = tiny_next(&t, &whole, &ids[i], 1, out + (size_t)(ROW_DECODE + i) * v);
        tiny_run(&t, &seg, 1);
    }
    static const uint32_t lengths[3] = {1, 50, 150};
    struct td_segment segs[3];
    for (uint32_t i = 0; i < 3; i++) {
        tiny_seq_open(&t, &others[i], N_TEXT);
        segs[i] = tiny_next(&t, &others[i], ids + 10 * i, lengths[i], out + (size_t)(ROW_BATCH + i) * v);
    }
    tiny_run(&t, segs, 3);
    tiny_seq_close(&whole);
    tiny_seq_close(&chunked);
    for (uint32_t i = 0; i < 3; i++) tiny_seq_close(&others[i]);
    tiny_close(&t);
    return out;
}

static void any_division_gives_the_same_bits(void **state)
{
    (void)state;
    for (int type = TINY_IS_SLOW; type < 2; type++) {
        float *want = NULL;
        for (uint32_t i = 0; i < TD_COUNT(divisions); i++) {
            uint32_t vocab, tp = divisions[i].tp, ep = divisions[i].ep;
            float *have = compute(tp, ep, type ? TD_BF16 : TD_F32, &vocab);
            if (want == NULL) {
                want = have;
                assert_same_bits(want + (size_t)ROW_WHOLE * vocab, want + (size_t)ROW_CHUNKED * vocab, vocab, "chunked",
                                 1, 1);
                continue;
            }
            static const char *const names[] = {"whole",    "chunked", "decode 0", "decode 1", "decode 2",
                                                "decode 3", "batch 0", "batch 1",  "batch 2"};
            for (uint32_t r = 0; r < N_ROWS; r++)
                assert_same_bits(want + (size_t)r * vocab, have + (size_t)r * vocab, vocab, names[r], tp, ep);
            free(have);
        }
        free(want);
    }
}

/* More tail rows than logits exist at a time (32), each sampled. */
static void tokens_and_log_probabilities_are_the_same(void **state)
{
    (void)state;
    enum { N = 40 };
    struct td_segment want[N], segs[N];
    const struct td_sampling sampling = {
        .temperature = 0.8f, .top_p = 0.9f, .top_k = 50, .seed = 9, .repetition_penalty = 1};
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 2);
    for (uint32_t i = 0; i < TD_COUNT(divisions); i++) {
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16,
                                             .max_tokens = 8192,
                                             .max_batch_tokens = 512,
                                             .tp = divisions[i].tp,
                                             .ep = divisions[i].ep});
        struct tiny_seq s[N];
        for (uint32_t k = 0; k < N; k++) {
            tiny_seq_open(&t, &s[k], 64);
            segs[k] = tiny_next(&t, &s[k], ids + k, 1 + k % 7, NULL);
            segs[k].want_token = segs[k].want_logprobs = true;
            segs[k].n_top_logprobs = 5;
            segs[k].sampling = &sampling;
            segs[k].draw_index = k;
        }
        tiny_run(&t, segs, N);
        for (uint32_t k = 0; k < N; k++) {
            tiny_seq_close(&s[k]);
            if (i == 0) want[k] = segs[k];
            assert_int_equal(segs[k].token, want[k].token);
            assert_memory_equal(&segs[k].chosen, &want[k].chosen, sizeof want[k].chosen);
            assert_memory_equal(segs[k].top, want[k].top, 5 * sizeof want[k].top[0]);
        }
        tiny_close(&t);
    }
}

/* ---- what a rank holds
 * -------------------------------------------------------------------------------------------------------- */

static void a_rank_holds_its_share_of_the_weights(void **state)
{
    (void)state;
    uint64_t sharded1 = 0, replicated1 = 0;
    for (uint32_t i = 0; i < TD_COUNT(divisions); i++) {
        struct td_err err = {0};
        struct td_model *m;
        uint32_t tp = divisions[i].tp;
        struct td_model_options o = {.tp = tp, .ep = divisions[i].ep};
        if (td_model_load(TINY_DIR, &o, &m, &err) != TD_OK) fail_msg("%s", err.text);
        assert_int_equal(td_model_n_ranks(m), tp);
        uint64_t sum = 0;
        for (uint32_t r = 0; r < tp; r++) {
            uint64_t sharded, replicated;
            td_model_rank_bytes(m, r, &sharded, &replicated);
            if (i == 0) {
                sharded1 = sharded;
                replicated1 = replicated;
                assert_true(sharded > 3 * replicated);
            }
            assert_int_equal(replicated, replicated1);
            if (sharded > sharded1 / tp)
                fail_msg("tp %u, ep %u: rank %u holds %llu bytes, its share is %llu", tp, divisions[i].ep, r,
                         (unsigned long long)sharded, (unsigned long long)(sharded1 / tp));
            sum += sharded + replicated;
        }
        assert_int_equal(td_model_weight_bytes(m), sum);
        td_model_destroy(m);
    }
}

static void divisions_that_do_not_work_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        uint32_t tp, ep;
        const char *flag;
    } bad[] = {{3, 1, "--tp"}, {16, 1, "--tp"}, {4, 2, "--ep"}, {1, 2, "--ep"}, {2, 4, "--ep"}};
    struct td_err err = {0};
    struct td_model *m;
    for (uint32_t i = 0; i < TD_COUNT(bad); i++) {
        struct td_model_options o = {.tp = bad[i].tp, .ep = bad[i].ep};
        assert_int_equal(td_model_load(TINY_DIR, &o, &m, &err), TD_E_BAD_CONFIG);
        if (strncmp(err.text, bad[i].flag, 4) != 0) fail_msg("%s", err.text);
    }
    struct td_model_config c = {.n_kv_heads = 4, .n_experts = 6};
    assert_int_equal(td_model_check_ranks(&c, 8, 1, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "4 KV heads"));
    assert_int_equal(td_model_check_ranks(&c, 4, 4, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "6 experts"));
    assert_int_equal(td_model_check_ranks(&c, 2, 2, &err), TD_OK);
}

/* ---- passes
 * -------------------------------------------------------------------------------------------------------------- */

struct layers {
    uint32_t n;
    struct td_batch *abandon; /* in the second layer */
    struct tiny *t;
    const struct td_segment *seg;
};

/* K and V of the segment's last position are there on every rank when the layer is told. */
static void on_layer(uint32_t layer, void *user)
{
    struct layers *l = user;
    assert_int_equal(layer, l->n++);
    if (l->abandon != NULL && layer == 1) atomic_store(&l->abandon->is_abandoned, true);
    struct tiny *t = l->t;
    enum td_kv_group g = t->c->is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    uint32_t pos = l->seg->n_tokens - 1, page_tokens = t->engine.kv[g].page_tokens;
    uint32_t page = l->seg->table[g].pages[pos / page_tokens];
    for (uint32_t r = 0; r < td_model_n_ranks(t->model); r++)
        for (uint32_t h = 0; h < t->engine.kv[g].n_heads; h++) {
            size_t at = td_kv_offset(&t->engine.kv[g], t->c->layer_in_group[layer], page, h, true, pos % page_tokens);
            uint16_t v;
            memcpy(&v, (const char *)t->pools[r][g] + at, sizeof v);
            assert_int_not_equal(v, 0xffff); /* what the pool was filled with */
        }
}

static void layers_are_told_once_when_every_rank_has_stored(void **state)
{
    (void)state;
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 3);
    for (uint32_t i = 1; i < TD_COUNT(divisions); i++) {
        struct tiny t;
        tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16,
                                             .max_tokens = 2048,
                                             .max_batch_tokens = 512,
                                             .tp = divisions[i].tp,
                                             .ep = divisions[i].ep});
        struct tiny_seq s;
        tiny_seq_open(&t, &s, N_TEXT);
        struct td_segment seg = tiny_next(&t, &s, ids, 100, NULL);
        struct td_batch b = {.segments = &seg, .n_segments = 1};
        struct layers l = {.t = &t, .seg = &seg};
        assert_int_equal(td_ranks_run(t.ranks, &b, on_layer, &l), TD_OK);
        assert_int_equal(l.n, t.c->n_layers);
        tiny_seq_close(&s);
        tiny_close(&t);
    }
}

static void all_ranks_leave_an_abandoned_pass_at_the_same_layer(void **state)
{
    (void)state;
    uint32_t ids[N_TEXT];
    make_text(ids, N_TEXT, 4);
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .max_tokens = 2048, .max_batch_tokens = 512, .tp = 4});
    for (uint32_t i = 0; i < 20; i++) {
        struct tiny_seq s;
        t.n_taken[0] = t.n_taken[1] = 0;
        tiny_seq_open(&t, &s, N_TEXT);
        struct td_segment seg = tiny_next(&t, &s, ids, 5, NULL);
        struct td_batch b = {.segments = &seg, .n_segments = 1};
        struct layers l = {.t = &t, .seg = &seg, .abandon = &b};
        assert_int_equal(td_ranks_run(t.ranks, &b, on_layer, &l), TD_E_CANCELED);
        assert_in_range(l.n, 2, 3);
        atomic_store(&b.is_abandoned, true); /* before it began */
        l = (struct layers){.t = &t, .seg = &seg};
        assert_int_equal(td_ranks_run(t.ranks, &b, on_layer, &l), TD_E_CANCELED);
        assert_int_equal(l.n, 0);
        tiny_seq_close(&s);
    }
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_division_gives_the_same_bits),
        cmocka_unit_test(tokens_and_log_probabilities_are_the_same),
        cmocka_unit_test(a_rank_holds_its_share_of_the_weights),
        cmocka_unit_test(divisions_that_do_not_work_are_refused_by_name),
        cmocka_unit_test(layers_are_told_once_when_every_rank_has_stored),
        cmocka_unit_test(all_ranks_leave_an_abandoned_pass_at_the_same_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
