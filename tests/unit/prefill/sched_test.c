#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "common/base/fault.h"
#include "prefill/sched.h"

#define P 16u

static struct td_prefill_sched sched(uint32_t n_sliding, uint32_t n_full, uint32_t window)
{
    struct td_prefill_sched s = {.window_tokens = window};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        s.kv[g] =
            (struct td_kv_group_layout){.n_layers = 2, .n_heads = 1, .head_dim = 2, .page_tokens = P, .dtype = TD_BF16};
    uint32_t n_pages[TD_KV_N_GROUPS] = {n_sliding, n_full};
    assert_int_equal(td_kv_pages_create(n_pages, &s.pages), TD_OK);
    return s;
}

/* Whatever the sizes: chunks cover the prompt, every visible block has a page, the peak is what the split counts on. */
static void chunks_hold_what_they_see_and_no_more(void **state)
{
    (void)state;
    static const uint32_t tokens[1000];
    for (uint32_t window = 1; window <= 100; window += 11)
        for (uint32_t chunk = 16; chunk <= 80; chunk += 7) {
            uint32_t n_sliding = td_prefill_sched_sliding_compute(window, chunk, P);
            struct td_prefill_sched s = sched(n_sliding, 63, window);
            for (uint32_t n = 1; n <= 300; n += 13) {
                struct td_prefill_seq q;
                assert_int_equal(td_prefill_seq_init(&q, &s, n, "r"), TD_OK);
                assert_int_equal(td_prefill_sched_reserve(&s, &q, tokens), TD_OK);
                uint32_t at = 0;
                while (at < n) {
                    struct td_segment seg = {0};
                    assert_int_equal(td_prefill_sched_chunk(&s, &q, chunk, tokens, &seg),
                                     TD_OK); /* never short of pages */
                    assert_int_equal(seg.start, at);
                    assert_ptr_equal(seg.tokens, tokens + at);
                    assert_true(seg.n_tokens >= 1 && seg.n_tokens <= chunk);
                    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
                        const struct td_page_table *t = &seg.table[g];
                        uint32_t seen = g == TD_KV_SLIDING && at > window - 1 ? at - (window - 1) : 0;
                        assert_true(t->first_block <= seen / P);
                        assert_int_equal(t->first_block + t->n_blocks, (at + seg.n_tokens + P - 1) / P);
                        for (uint32_t i = 0; i < t->n_blocks; i++) assert_int_not_equal(t->pages[i], TD_NO_PAGE);
                    }
                    at += seg.n_tokens;
                    assert_int_equal(td_prefill_seq_is_last_chunk(&q), at == n);
                    assert_int_equal(td_prefill_seq_ready_end(&q, &s, TD_KV_FULL), at == n ? (n + P - 1) / P : at / P);
                    assert_int_equal(td_prefill_seq_ready_end(&q, &s, TD_KV_SLIDING), at == n ? (n + P - 1) / P : 0);
                    td_prefill_sched_chunk_done(&s, &q, tokens);
                }
                /* What the decode worker wants is still here, and little else. */
                uint32_t first, end;
                td_kv_blocks(&s.kv[TD_KV_SLIDING], TD_KV_SLIDING, window, n, &first, &end);
                for (uint32_t b = first; b < end && window > 1; b++)
                    assert_int_not_equal(q.pages[TD_KV_SLIDING][b], TD_NO_PAGE);
                assert_true(n_sliding - td_kv_pages_n_free(s.pages, TD_KV_SLIDING) <=
                            td_prefill_sched_sliding_send(window, P) + (window == 1));
                td_prefill_seq_deinit(&q, &s);
                assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_SLIDING), n_sliding);
                assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_FULL), 63);
            }
            td_kv_pages_destroy(s.pages);
        }
}

static void a_chunk_without_pages_can_be_tried_again(void **state)
{
    (void)state;
    const uint32_t chunk = 32;
    static const uint32_t tokens[100];
    struct td_prefill_sched s = sched(3, 10, 17);
    uint32_t others[3];
    struct td_prefill_seq q;
    struct td_segment seg;
    assert_int_equal(td_prefill_seq_init(&q, &s, 100, "r"), TD_OK);
    assert_int_equal(td_prefill_sched_reserve(&s, &q, tokens), TD_OK);
    assert_int_equal(td_kv_pages_alloc(s.pages, TD_KV_SLIDING, 2, "other", others), TD_OK);
    assert_int_equal(td_prefill_sched_chunk(&s, &q, chunk, tokens, &seg), TD_E_NO_PAGES);
    td_kv_pages_unref(s.pages, TD_KV_SLIDING, others[0]);
    assert_int_equal(td_prefill_sched_chunk(&s, &q, chunk, tokens, &seg), TD_OK);
    td_prefill_sched_chunk_undone(&q); /* the engine was busy */
    assert_int_equal(td_prefill_sched_chunk(&s, &q, chunk, tokens, &seg), TD_OK);
    assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_SLIDING), 0);
    td_prefill_seq_deinit(&q, &s);
    assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_SLIDING), 2);
    td_kv_pages_unref(s.pages, TD_KV_SLIDING, others[1]);
    td_kv_pages_destroy(s.pages);
}

/* Computes all of a prompt; how many of its tokens were in the cache. Chunks begin behind them. */
static uint32_t compute(const struct td_prefill_sched *s, uint32_t chunk, const uint32_t *tokens, uint32_t n,
                        uint32_t *n_chunks_out)
{
    struct td_prefill_seq q;
    struct td_page_copy copies[TD_KV_N_GROUPS];
    assert_int_equal(td_prefill_seq_init(&q, s, n, "r"), TD_OK);
    assert_int_equal(td_prefill_sched_reserve(s, &q, tokens), TD_OK);
    uint32_t n_cached = q.n_cached;
    *n_chunks_out = 0;
    while (q.n_done < n) {
        struct td_segment seg = {0};
        uint32_t at = q.n_done;
        assert_int_equal(td_prefill_sched_chunk(s, &q, chunk, tokens, &seg), TD_OK);
        assert_int_equal(seg.start, at);
        /* Only the first chunk copies, and only into a page that it then writes. */
        uint32_t n_copies = td_prefill_seq_copies(&q, copies);
        assert_int_equal(n_copies, at == n_cached && n_cached % P != 0 ? 2 : 0);
        for (uint32_t i = 0; i < n_copies; i++) {
            assert_int_equal(copies[i].to, q.pages[copies[i].group][at / P]);
            assert_int_equal(td_kv_pages_refs(s->pages, copies[i].group, copies[i].to), 1);
            assert_int_not_equal(copies[i].from, copies[i].to);
        }
        td_prefill_sched_chunk_done(s, &q, tokens);
        ++*n_chunks_out;
    }
    td_prefill_seq_deinit(&q, s);
    return n_cached;
}

static void what_is_known_of_a_prompt_is_not_computed_again(void **state)
{
    (void)state;
    uint32_t tokens[19 * P], n_chunks;
    for (uint32_t i = 0; i < 19 * P; i++) tokens[i] = i;
    /* With no sliding page more than a chunk needs, so that the page to copy is in the way. */
    for (uint32_t chunk = 16; chunk <= 64; chunk += 16) {
        uint32_t n_sliding = td_prefill_sched_sliding_compute(32, chunk, P);
        struct td_prefill_sched s = sched(n_sliding, 19, 32);
        assert_int_equal(td_kv_prefix_create(s.kv, s.window_tokens, s.pages, &s.prefix), TD_OK);
        assert_int_equal(compute(&s, chunk, tokens, 100, &n_chunks), 0);
        assert_int_equal(compute(&s, chunk, tokens, 100, &n_chunks), 96);
        assert_int_equal(n_chunks, 1);
        assert_int_equal(compute(&s, chunk, tokens, 96, &n_chunks), 95);
        assert_int_equal(compute(&s, chunk, tokens, 200, &n_chunks), 96);
        assert_int_equal(n_chunks, (104 + chunk - 1) / chunk);
        /* Needs every page: nothing known is in its way. */
        for (uint32_t i = 0; i < 19 * P; i++) tokens[i] += 1000;
        assert_int_equal(compute(&s, chunk, tokens, 19 * P, &n_chunks), 0);
        assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_SLIDING), n_sliding);
        assert_int_equal(td_kv_pages_n_free(s.pages, TD_KV_FULL), 19);
        td_kv_prefix_destroy(s.prefix);
        td_kv_pages_destroy(s.pages);
    }
}

static void the_pace_is_that_of_fast_passes_and_gives_way_slowly(void **state)
{
    (void)state;
    struct td_prefill_pace p = {0};
    assert_int_equal(td_prefill_pace_ns(&p, 1000000), 0); /* nothing is known: everything is possible */
    td_prefill_pace_observe(&p, 10, 10000000);            /* too few to tell */
    assert_int_equal(td_prefill_pace_ns(&p, 100), 0);
    td_prefill_pace_observe(&p, 100, 200000);
    td_prefill_pace_observe(&p, 100, 100000);
    assert_int_equal(td_prefill_pace_ns(&p, 100), 100000);
    td_prefill_pace_observe(&p, 100, 260000); /* one slow pass is a hiccup */
    assert_int_equal(td_prefill_pace_ns(&p, 100), 110000);
    for (int i = 0; i < 200; i++) td_prefill_pace_observe(&p, 100, 260000);
    assert_in_range(td_prefill_pace_ns(&p, 100), 259000, 260000);
}

static void init_survives_any_failed_allocation(void **state)
{
    (void)state;
    struct td_prefill_sched s = sched(3, 10, 17);
    for (uint32_t i = 0; i < 2; i++) {
        struct td_prefill_seq q;
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        assert_int_equal(td_prefill_seq_init(&q, &s, 40, "r"), TD_E_NO_MEMORY);
        td_fault_disarm_all();
        td_prefill_seq_deinit(&q, &s); /* harmless */
    }
    td_kv_pages_destroy(s.pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_hold_what_they_see_and_no_more),
        cmocka_unit_test(a_chunk_without_pages_can_be_tried_again),
        cmocka_unit_test(what_is_known_of_a_prompt_is_not_computed_again),
        cmocka_unit_test(the_pace_is_that_of_fast_passes_and_gives_way_slowly),
        cmocka_unit_test(init_survives_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
