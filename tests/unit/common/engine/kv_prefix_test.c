/* The prefix cache over pages whose contents are simulated: a page remembers which token lies at each of its positions,
 * so a wrong, stale or overwritten page shows at once. */
#include "common/engine/kv_prefix.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"
#include "common/base/rng.h"
#include "common/engine/batch.h"
#include "common/metrics/metrics.h"
#include "router/prefixes.h"

enum { P = 4, WINDOW = 8, MAX_PAGES = 256, MAX_TOKENS = 200, MAX_BLOCKS = MAX_TOKENS / P + 1 };
#define S TD_KV_SLIDING
#define F TD_KV_FULL

struct cache {
    struct td_kv_pages *kv;
    struct td_kv_prefix *p;
    uint32_t n[TD_KV_N_GROUPS];
    uint32_t memory[TD_KV_N_GROUPS][MAX_PAGES][P]; /* token + 1 */
};

/* A sequence as a worker runs it. */
struct seq {
    uint32_t tokens[MAX_TOKENS], n_tokens, n_done;
    uint32_t pages[TD_KV_N_GROUPS][MAX_BLOCKS];
    uint32_t first[TD_KV_N_GROUPS], end[TD_KV_N_GROUPS];
    struct td_kv_hit hit;
    bool is_live;
};

static struct cache make(uint32_t n_sliding, uint32_t n_full)
{
    struct cache c = {.n = {n_sliding, n_full}};
    struct td_kv_group_layout l[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++) l[g] = (struct td_kv_group_layout){.n_layers = 1, .page_tokens = P};
    assert_int_equal(td_kv_pages_create(c.n, &c.kv), TD_OK);
    assert_int_equal(td_kv_prefix_create(l, WINDOW, c.kv, &c.p), TD_OK);
    return c;
}

static void expect_all_free(const struct cache *c)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) assert_int_equal(td_kv_pages_n_free(c->kv, (enum td_kv_group)g), c->n[g]);
}

static void unmake(struct cache *c)
{
    expect_all_free(c);
    td_kv_prefix_destroy(c->p);
    expect_all_free(c);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) assert_int_equal(td_kv_pages_n_kept(c->kv, (enum td_kv_group)g), 0);
    td_kv_pages_destroy(c->kv);
}

static uint32_t first_seen(uint32_t pos) { return pos >= WINDOW - 1 ? (pos - (WINDOW - 1)) / P : 0; }

static void seq_begin(struct seq *q, const uint32_t *tokens, uint32_t n)
{
    memset(q, 0, sizeof *q);
    memcpy(q->tokens, tokens, n * sizeof *tokens);
    q->n_tokens = n;
    q->is_live = true;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (int b = 0; b < MAX_BLOCKS; b++) q->pages[g][b] = TD_NO_PAGE;
}

static uint32_t seq_find(struct cache *c, struct seq *q)
{
    uint32_t *const pages[] = {q->pages[S], q->pages[F]};
    td_kv_prefix_find_compute(c->p, q->tokens, q->n_tokens, "seq", pages, &q->hit);
    q->n_done = q->hit.n_tokens;
    q->end[F] = q->end[S] = q->hit.n_blocks;
    q->first[S] = q->hit.first_sliding;
    return q->n_done;
}

static void seq_end(struct cache *c, struct seq *q)
{
    td_kv_prefix_copied(c->p, &q->hit);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t b = q->end[g]; b-- > q->first[g];) td_kv_pages_unref(c->kv, (enum td_kv_group)g, q->pages[g][b]);
    q->is_live = false;
}

/* Computes up to n more tokens as a worker does: pages, copy, check of all that is seen, write, enter, let go. */
static bool seq_compute(struct cache *c, struct seq *q, uint32_t n)
{
    if (n > q->n_tokens - q->n_done) n = q->n_tokens - q->n_done;
    uint32_t end = (q->n_done + n - 1) / P + 1;
    for (; q->first[S] < q->end[S] && q->first[S] < first_seen(q->n_done); q->first[S]++) {
        td_kv_pages_unref(c->kv, S, q->pages[S][q->first[S]]);
        q->pages[S][q->first[S]] = TD_NO_PAGE;
    }
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        if (end <= q->end[g]) continue;
        if (td_kv_pages_alloc(c->kv, (enum td_kv_group)g, end - q->end[g], "seq", q->pages[g] + q->end[g]) != TD_OK)
            return false;
        q->end[g] = end;
    }
    if (q->hit.has_copy)
        for (int g = 0; g < TD_KV_N_GROUPS; g++)
            memcpy(c->memory[g][q->pages[g][q->hit.n_blocks]], c->memory[g][q->hit.copy_from[g]], sizeof(uint32_t[P]));
    for (uint32_t i = q->n_done; i < q->n_done + n; i++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            assert_int_equal(td_kv_pages_refs(c->kv, (enum td_kv_group)g, q->pages[g][i / P]),
                             1); /* nobody shares it */
            for (uint32_t j = g == S ? (i >= WINDOW - 1 ? i - (WINDOW - 1) : 0) : 0; j < i; j++)
                assert_int_equal(c->memory[g][q->pages[g][j / P]][j % P], q->tokens[j] + 1);
            c->memory[g][q->pages[g][i / P]][i % P] = q->tokens[i] + 1;
        }
    q->n_done += n;
    td_kv_prefix_copied(c->p, &q->hit);
    const uint32_t *const pages[] = {q->pages[S], q->pages[F]};
    td_kv_prefix_enter(c->p, &q->hit.chain, q->tokens, q->n_done, pages);
    return true;
}

/* From nothing to its end; how many tokens were known. */
static uint32_t seq_run(struct cache *c, const uint32_t *tokens, uint32_t n, uint32_t chunk)
{
    struct seq q;
    seq_begin(&q, tokens, n);
    uint32_t known = seq_find(c, &q);
    while (q.n_done < n) assert_true(seq_compute(c, &q, chunk));
    seq_end(c, &q);
    return known;
}

static void count_up(uint32_t *tokens, uint32_t n, uint32_t from)
{
    for (uint32_t i = 0; i < n; i++) tokens[i] = from + i;
}

static void a_second_turn_computes_only_what_is_new(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t t[MAX_TOKENS];
    count_up(t, 150, 1);
    for (uint32_t chunk = 1; chunk <= 60; chunk = chunk * 2 + 1) {
        for (int i = 0; i < 150; i++) t[i] += 1000;
        assert_int_equal(seq_run(&c, t, 53, chunk), 0);
        assert_int_equal(seq_run(&c, t, 90, chunk), 52); /* whole blocks of the first turn */
        assert_int_equal(seq_run(&c, t, 150, chunk), 88);
    }
    unmake(&c);
}

static void the_same_prompt_again_computes_one_token(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t t[MAX_TOKENS];
    for (uint32_t n = 1; n < 40; n++) {
        count_up(t, n, 100 * n);
        assert_int_equal(seq_run(&c, t, n, 100), 0);
        /* n - 1 where the last block is whole, by a copy of it; else what its whole blocks hold */
        assert_int_equal(seq_run(&c, t, n, 100), n % P == 0 ? n - 1 : n / P * P);
    }
    unmake(&c);
}

static void a_page_that_is_known_in_part_is_copied_and_stays_as_it_was(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t a[MAX_TOKENS], b[MAX_TOKENS];
    count_up(a, 24, 1);
    memcpy(b, a, sizeof a);
    count_up(b + 23, 20, 500); /* differs in the last position of the sixth block */
    assert_int_equal(seq_run(&c, a, 24, 7), 0);
    assert_int_equal(seq_run(&c, b, 43, 7), 23);
    assert_int_equal(seq_run(&c, a, 24, 7), 23);
    assert_int_equal(seq_run(&c, b, 43, 7), 40);
    /* With less of the block in common, the window before it is not there any more; then it is. */
    count_up(b + 21, 20, 900);
    assert_int_equal(seq_run(&c, b, 41, 7), 0);
    count_up(b + 21, 20, 1900);
    assert_int_equal(seq_run(&c, b, 41, 7), 21);
    unmake(&c);
}

static void a_hit_needs_the_window_of_sliding_layers(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t t[MAX_TOKENS], u[MAX_TOKENS];
    count_up(t, 150, 1);
    assert_int_equal(seq_run(&c, t, 150, 10), 0);
    /* Parted at 82: full layers know 80, but only the 64th has its window: TD_KV_PREFIX_STRIDE blocks of 4. */
    memcpy(u, t, sizeof t);
    count_up(u + 82, 60, 1000);
    assert_int_equal(seq_run(&c, u, 140, 10), 64);
    /* That was a branch: from now on its window is kept. */
    count_up(u + 82, 60, 2000);
    assert_int_equal(seq_run(&c, u, 140, 10), 80);
    /* What a receiver needs of sliding layers is what lies before the hit and is seen by the last token. */
    struct td_kv_hit hit;
    struct seq q;
    seq_begin(&q, t, 100);
    count_up(q.tokens + 70, 30, 3000);
    uint32_t *const pages[] = {q.pages[S], q.pages[F]};
    td_kv_prefix_find_receive(c.p, q.tokens, 100, "r", pages, &hit);
    assert_int_equal(hit.n_tokens, 68); /* the window of 100 begins behind it */
    assert_int_equal(hit.first_sliding, 17);
    td_kv_prefix_drop(c.p, &hit, pages);
    td_kv_prefix_find_receive(c.p, q.tokens, 73, "r", pages, &hit);
    assert_int_equal(hit.n_tokens, 64); /* 66..: block 16 would be wanted, and is not kept */
    td_kv_prefix_drop(c.p, &hit, pages);
    unmake(&c);
}

static void pages_in_use_stay_and_idle_ones_give_way_oldest_and_deepest_first(void **state)
{
    (void)state;
    struct cache c = make(30, 30);
    uint32_t a[MAX_TOKENS], b[MAX_TOKENS], held[30];
    count_up(a, 40, 1);
    count_up(b, 41, 5000);
    assert_int_equal(seq_run(&c, a, 40, 10), 0);
    struct seq q;
    seq_begin(&q, b, 41);
    seq_find(&c, &q);
    while (q.n_done < 41) assert_true(seq_compute(&c, &q, 10));
    assert_int_equal(td_kv_pages_n_free(c.kv, F), 30 - 11);
    assert_int_equal(td_kv_pages_n_kept(c.kv, F), 10);
    /* 9 pages nobody remembers: 3 of a's have to go, from its end. */
    assert_int_equal(td_kv_pages_alloc(c.kv, F, 12, "other", held), TD_OK);
    for (int i = 0; i < 12; i++) td_kv_pages_unref(c.kv, F, held[i]);
    assert_int_equal(td_kv_pages_n_kept(c.kv, F), 7);
    struct seq again;
    seq_begin(&again, a, 40);
    assert_int_equal(seq_find(&c, &again), 0); /* 28 tokens, but no window there or before */
    assert_int_equal(again.hit.chain.branch_blocks, 7);
    seq_end(&c, &again);
    /* All that is idle goes before an allocation fails; what is held stays known. */
    assert_int_equal(td_kv_pages_alloc(c.kv, F, 20, "other", held), TD_E_NO_PAGES);
    assert_int_equal(td_kv_pages_alloc(c.kv, F, 19, "other", held), TD_OK);
    assert_int_equal(td_kv_pages_n_kept(c.kv, F), 0);
    for (int i = 0; i < 19; i++) td_kv_pages_unref(c.kv, F, held[i]);
    seq_end(&c, &q);
    assert_int_equal(seq_run(&c, b, 41, 10), 40);
    unmake(&c);
}

/* Two that compute the same at once, each in pages of its own: one of them is entered, and both go on. */
static void a_block_computed_twice_is_entered_once(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t t[MAX_TOKENS];
    count_up(t, 80, 1);
    struct seq a, b;
    seq_begin(&a, t, 40);
    seq_begin(&b, t, 80);
    seq_find(&c, &a);
    seq_find(&c, &b);
    while (a.n_done < 40) {
        assert_true(seq_compute(&c, &a, 5));
        assert_true(seq_compute(&c, &b, 9));
    }
    seq_end(&c, &a);
    /* a's blocks go, b's were behind them; b enters its own from the start. */
    uint32_t held[100];
    uint32_t n = td_kv_pages_n_free(c.kv, F);
    assert_int_equal(td_kv_pages_alloc(c.kv, F, n, "other", held), TD_OK);
    for (uint32_t i = 0; i < n; i++) td_kv_pages_unref(c.kv, F, held[i]);
    while (b.n_done < 80) assert_true(seq_compute(&c, &b, 9));
    seq_end(&c, &b);
    assert_int_equal(td_kv_prefix_n_blocks(c.p), 20);
    assert_int_equal(seq_run(&c, t, 80, 10), 79);
    unmake(&c);
}

/* The same, but when b goes on, somebody else's block sits where the last one that b knew was. */
static void a_chain_does_not_go_on_behind_the_block_of_somebody_else(void **state)
{
    (void)state;
    struct cache c = make(100, 100);
    uint32_t t[MAX_TOKENS], u[MAX_TOKENS], held[100];
    count_up(t, 80, 1);
    count_up(u, 80, 5000);
    struct seq a, b, x;
    seq_begin(&a, t, 40);
    seq_begin(&b, t, 80);
    seq_find(&c, &a);
    seq_find(&c, &b);
    while (a.n_done < 40) assert_true(seq_compute(&c, &a, 40));
    while (b.n_done < 40) assert_true(seq_compute(&c, &b, 40));
    seq_end(&c, &a);
    uint32_t n = td_kv_pages_n_free(c.kv, F);
    assert_int_equal(td_kv_pages_alloc(c.kv, F, n, "other", held), TD_OK);
    for (uint32_t i = 0; i < n; i++) td_kv_pages_unref(c.kv, F, held[i]);
    assert_int_equal(td_kv_prefix_n_blocks(c.p), 0);
    seq_begin(&x, u, 80);
    seq_find(&c, &x);
    while (x.n_done < 80) assert_true(seq_compute(&c, &x, 80));
    while (b.n_done < 80) assert_true(seq_compute(&c, &b, 40));
    assert_int_equal(td_kv_prefix_n_blocks(c.p), 40);
    seq_end(&c, &x);
    seq_end(&c, &b);
    assert_int_equal(seq_run(&c, t, 80, 10), 79);
    assert_int_equal(seq_run(&c, u, 80, 10), 79);
    unmake(&c);
}

struct dice {
    uint64_t seed, n;
};
static uint32_t below(struct dice *d, uint32_t n) { return (uint32_t)(td_rng_uniform(d->seed, d->n++, 0) * n); }

/* Many sequences of a few families, in pools that are too small, some given up on their way: contents are checked at
 * every step, and in the end every page is free. */
static void run_many(uint64_t n_seeds)
{
    enum { N = 6 };
    struct seq *q = calloc(N, sizeof *q);
    uint64_t hits = 0, evictions = td_metric_count(TD_M_prefix_evicted_pages);
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        struct dice rng = {.seed = seed};
        struct cache c = make(20 + below(&rng, 60), 60 + below(&rng, 100));
        memset(q, 0, N * sizeof *q);
        for (int i = 0; i < 1500; i++) {
            struct seq *s = &q[below(&rng, N)];
            if (!s->is_live) {
                uint32_t t[MAX_TOKENS], n = 1 + below(&rng, 150), family = below(&rng, 4);
                for (uint32_t k = 0; k < n; k++) t[k] = family * 1000 + k;
                for (uint32_t k = n - below(&rng, n); k < n; k++) t[k] += 100000 * (1 + below(&rng, 3));
                seq_begin(s, t, n);
                hits += seq_find(&c, s);
            } else if (s->n_done == s->n_tokens && s->n_tokens < MAX_TOKENS && below(&rng, 3) > 0) {
                s->tokens[s->n_tokens] = s->tokens[s->n_tokens - 1] * 7 % 1000; /* decodes on */
                s->n_tokens++;
                if (!seq_compute(&c, s, 1)) seq_end(&c, s);
            } else if (s->n_done == s->n_tokens || below(&rng, 30) == 0 || !seq_compute(&c, s, 1 + below(&rng, 40))) {
                seq_end(&c, s);
            }
        }
        for (int i = 0; i < N; i++)
            if (q[i].is_live) seq_end(&c, &q[i]);
        unmake(&c);
    }
    assert_true(hits > 1000 &&
                td_metric_count(TD_M_prefix_evicted_pages) > evictions + 1000); /* it was worth the test */
    free(q);
}

/* A router that applies what it is told, a few changes at a time, ends up with what is there. */
static void a_router_that_is_told_knows_what_is_there(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        struct cache c = make(40, 60);
        struct td_prefixes known = {0};
        struct td_kv_teller teller = {0};
        struct dice d = {.seed = seed};
        uint64_t changes[16];
        for (int round = 0; round < 300; round++) {
            uint32_t tokens[MAX_TOKENS], n = 1 + below(&d, 60);
            for (uint32_t i = 0; i < n; i++) tokens[i] = i < 20 ? below(&d, 2) * (i % 4 == 0) : below(&d, 3);
            seq_run(&c, tokens, n, 16);
            if (below(&d, 3) == 0) continue; /* a heartbeat is left out */
            bool is_all = true;
            for (uint32_t k = 1; k > 0 || is_all;) {
                k = td_kv_prefix_tell(c.p, &teller, changes, seed == 3 ? 3 : 16, &is_all);
                td_prefixes_apply(&known, is_all, changes, k);
            }
            assert_int_equal(known.n, td_kv_prefix_n_blocks(c.p));
            struct td_block_names names = {0};
            td_block_names_extend(&names, tokens, n, P);
            for (uint32_t b = 0; b < names.n; b++) assert_true(td_prefixes_has(&known, names.names[b]));
            td_block_names_deinit(&names);
        }
        td_prefixes_deinit(&known);
        unmake(&c);
    }
}

/* More changes than are kept: all of it is told anew. */
static void who_missed_too_much_is_told_everything(void **state)
{
    (void)state;
    struct cache c = make(40, 60);
    struct td_prefixes known = {0};
    struct td_kv_teller teller = {0};
    uint64_t changes[64];
    bool is_all;
    uint32_t n = td_kv_prefix_tell(c.p, &teller, changes, 64, &is_all);
    assert_true(is_all && n == 0);
    for (uint32_t round = 0; round < 2000; round++) {
        uint32_t tokens[16];
        for (uint32_t i = 0; i < 16; i++) tokens[i] = round;
        seq_run(&c, tokens, 16, 16);
    }
    n = td_kv_prefix_tell(c.p, &teller, changes, 64, &is_all);
    assert_true(is_all);
    td_prefixes_apply(&known, is_all, changes, n);
    assert_int_equal(known.n, td_kv_prefix_n_blocks(c.p));
    td_prefixes_deinit(&known);
    unmake(&c);
}

static void whatever_happens_contents_are_right_and_no_page_leaks(void **state)
{
    (void)state;
    run_many(40);
}

/* The name finds a block, its tokens and those before it make sure. */
static void blocks_of_one_name_are_told_apart_by_their_tokens(void **state)
{
    (void)state;
    td_fault_arm(TD_FAULT_PREFIX_COLLISION, 0, UINT32_MAX);
    run_many(10);
    td_fault_disarm_all();
}

static void create_survives_any_failed_allocation(void **state)
{
    (void)state;
    struct cache c = make(10, 10);
    td_kv_prefix_destroy(c.p);
    struct td_kv_group_layout l[TD_KV_N_GROUPS] = {{.n_layers = 1, .page_tokens = P},
                                                   {.n_layers = 1, .page_tokens = P}};
    for (uint32_t i = 0; i < 6; i++) {
        struct td_kv_prefix *p = NULL;
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        assert_int_equal(td_kv_prefix_create(l, WINDOW, c.kv, &p), TD_E_NO_MEMORY);
        assert_null(p);
    }
    td_fault_disarm_all();
    td_kv_pages_destroy(c.kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_turn_computes_only_what_is_new),
        cmocka_unit_test(the_same_prompt_again_computes_one_token),
        cmocka_unit_test(a_page_that_is_known_in_part_is_copied_and_stays_as_it_was),
        cmocka_unit_test(a_hit_needs_the_window_of_sliding_layers),
        cmocka_unit_test(pages_in_use_stay_and_idle_ones_give_way_oldest_and_deepest_first),
        cmocka_unit_test(a_block_computed_twice_is_entered_once),
        cmocka_unit_test(a_chain_does_not_go_on_behind_the_block_of_somebody_else),
        cmocka_unit_test(whatever_happens_contents_are_right_and_no_page_leaks),
        cmocka_unit_test(a_router_that_is_told_knows_what_is_there),
        cmocka_unit_test(who_missed_too_much_is_told_everything),
        cmocka_unit_test(blocks_of_one_name_are_told_apart_by_their_tokens),
        cmocka_unit_test(create_survives_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
