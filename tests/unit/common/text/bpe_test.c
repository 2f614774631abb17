#include "tests/unit/common/text/text_cases.h"

#include "common/text/bpe.h"
#include "common/text/tokenizer_int.h"

static struct td_tokenizer *tiny;

/* The definition: look at all neighbours, merge the lowest priority, the leftmost on ties; again, until none is left.
 */
static void merge_by_definition(const struct td_vocab *v, const uint8_t *piece, size_t n, struct td_token_list *out)
{
    for (size_t i = 0; i < n; i++) td_token_list_push(out, v->byte_ids[piece[i]]);
    for (;;) {
        size_t best = out->n;
        uint32_t best_priority = TD_NEVER;
        for (size_t i = 0; i + 1 < out->n; i++) {
            uint32_t p = td_vocab_priority(v, out->ids[i], out->ids[i + 1]);
            if (p >= best_priority) continue;
            best_priority = p;
            best = i;
        }
        if (best == out->n) return;
        out->ids[best] = td_vocab_merged(v, best_priority);
        memmove(out->ids + best + 1, out->ids + best + 2, (out->n - best - 2) * sizeof *out->ids);
        out->n--;
    }
}

static void check(const struct td_vocab *v, unsigned rounds, uint64_t seed)
{
    struct td_bpe_scratch scratch = {0};
    static const char *const alphabets[] = {"0", "01", "ab", "abcdefghijklmnopqrstuvwxyz", "the and ing er ", "\n "};
    for (unsigned round = 0; round < rounds; round++) {
        uint8_t piece[300];
        size_t n = 1 + draw(&seed, round % 2 == 0 ? 300 : 80); /* both sides of the border between the two algorithms */
        const char *letters = alphabets[draw(&seed, TD_COUNT(alphabets))];
        for (size_t i = 0; i < n; i++) piece[i] = (uint8_t)letters[draw(&seed, (uint32_t)strlen(letters))];
        struct td_token_list fast = {0}, slow = {0};
        assert_int_equal(td_bpe_merge(v, piece, n, &scratch, &fast), TD_OK);
        merge_by_definition(v, piece, n, &slow);
        assert_int_equal(fast.n, slow.n);
        assert_memory_equal(fast.ids, slow.ids, fast.n * sizeof *fast.ids);
        td_token_list_free(&fast);
        td_token_list_free(&slow);
    }
    td_bpe_scratch_free(&scratch);
}

static void short_and_long_pieces_merge_as_defined(void **state)
{
    (void)state;
    check(&tiny->vocab, 1500, 11);
    if (released_tokenizer() != NULL) check(&released_tokenizer()->vocab, 500, 12);
}

static void a_complete_list_in_order_means_ids_and_any_other_means_positions(void **state)
{
    (void)state;
    /* Tokens a, aa, aaa: with both splits of aaa listed the id decides and "aa|a|aa" merges at the left; with
     * positions, a listed first wins although it is further right. */
    for (unsigned is_complete = 0; is_complete < 2; is_complete++) {
        struct td_vocab v;
        assert_int_equal(td_vocab_init(&v, 258), TD_OK);
        for (unsigned b = 0; b < 256; b++)
            assert_int_equal(td_vocab_add(&v, b, &(uint8_t){(uint8_t)b}, 1, false, NULL), TD_OK);
        assert_int_equal(td_vocab_add(&v, 256, "aa", 2, false, NULL), TD_OK);
        assert_int_equal(td_vocab_add(&v, 257, "aaa", 3, false, NULL), TD_OK);
        assert_int_equal(td_vocab_index(&v, NULL), TD_OK);
        assert_int_equal(td_vocab_merges_begin(&v, 3), TD_OK);
        const uint8_t *a = (const uint8_t *)"aa";
        assert_int_equal(td_vocab_merge_add(&v, a, 1, a, 1, NULL), TD_OK);
        assert_int_equal(td_vocab_merge_add(&v, a, 1, a, 2, NULL), TD_OK);
        if (is_complete) assert_int_equal(td_vocab_merge_add(&v, a, 2, a, 1, NULL), TD_OK);
        td_vocab_merges_end(&v);
        uint32_t left = td_vocab_priority(&v, 256, 97), right = td_vocab_priority(&v, 97, 256);
        assert_int_equal(right, is_complete ? 257 : 1);
        assert_int_equal(left, is_complete ? 257 : TD_NEVER);
        assert_int_equal(td_vocab_merged(&v, right), 257);
        assert_int_equal(v.byte_pairs['a' << 8 | 'a'], is_complete ? 256 : 0);
        assert_int_equal(v.byte_pairs['a' << 8 | 'b'], TD_NEVER);
        td_vocab_deinit(&v);
    }
}

static void a_merge_that_gives_rise_to_an_earlier_one_waits_for_it(void **state)
{
    (void)state;
    /* Earlier than a b is ab a: so "ababab" becomes aba b ab, not ab ab ab. */
    struct td_vocab v;
    assert_int_equal(td_vocab_init(&v, 258), TD_OK);
    for (unsigned b = 0; b < 256; b++)
        assert_int_equal(td_vocab_add(&v, b, &(uint8_t){(uint8_t)b}, 1, false, NULL), TD_OK);
    assert_int_equal(td_vocab_add(&v, 256, "ab", 2, false, NULL), TD_OK);
    assert_int_equal(td_vocab_add(&v, 257, "aba", 3, false, NULL), TD_OK);
    assert_int_equal(td_vocab_index(&v, NULL), TD_OK);
    assert_int_equal(td_vocab_merges_begin(&v, 2), TD_OK);
    const uint8_t *ab = (const uint8_t *)"ab", *a = ab, *b = ab + 1;
    assert_int_equal(td_vocab_merge_add(&v, ab, 2, a, 1, NULL), TD_OK);
    assert_int_equal(td_vocab_merge_add(&v, a, 1, b, 1, NULL), TD_OK);
    td_vocab_merges_end(&v);
    struct td_bpe_scratch scratch = {0};
    for (size_t n = 1; n < 200; n++) {
        uint8_t piece[200];
        for (size_t i = 0; i < n; i++) piece[i] = (uint8_t) "ababbaab"[i % (n % 2 == 0 ? 8 : 2)];
        struct td_token_list fast = {0}, slow = {0};
        assert_int_equal(td_bpe_merge(&v, piece, n, &scratch, &fast), TD_OK);
        merge_by_definition(&v, piece, n, &slow);
        assert_int_equal(fast.n, slow.n);
        assert_memory_equal(fast.ids, slow.ids, fast.n * sizeof *fast.ids);
        td_token_list_free(&fast);
        td_token_list_free(&slow);
    }
    td_bpe_scratch_free(&scratch);
    td_vocab_deinit(&v);
}

/* Not timed: steps are counted, so that a busy machine changes nothing. */
static void a_text_that_repeats_itself_costs_steps_in_proportion_to_its_length(void **state)
{
    (void)state;
    static const char *const units[] = {
        "a",
        "A",
        " ",
        "\n",
        "7",
        "!?",
        "the ",
        "\xf0\x9f\x98\x80",
        "\xf0\x9f\x91\xa9\xe2\x80\x8d",
        "\xe7\x9a\x84",
        "\xe4\xb8\x80\xe4\xb8\x81\xe4\xb8\x83\xe4\xb8\x87\xe4\xb8\x88\xe4\xb8\x89\xe4\xb8\x8a"};
    enum { LONG = 1 << 20 };
    const struct td_tokenizer *all[] = {tiny, released_tokenizer()};
    uint8_t *piece = malloc(LONG);
    assert_non_null(piece);
    for (size_t t = 0; t < TD_COUNT(all) && all[t] != NULL; t++)
        for (size_t u = 0; u < TD_COUNT(units); u++) {
            size_t n_unit = strlen(units[u]);
            for (size_t i = 0; i < LONG; i++) piece[i] = (uint8_t)units[u][i % n_unit];
            struct td_bpe_scratch scratch = {0};
            struct td_token_list ids = {0};
            assert_int_equal(td_bpe_merge(&all[t]->vocab, piece, LONG, &scratch, &ids), TD_OK);
            print_message("\"%s\": %.2f steps a byte\n", units[u], (double)scratch.n_steps / LONG);
            assert_true(scratch.n_steps <= 8 * (uint64_t)LONG);
            td_token_list_free(&ids);
            td_bpe_scratch_free(&scratch);
        }
    free(piece);
}

static int load(void **state)
{
    (void)state;
    tiny = load_tokenizer(TINY_MODEL);
    return 0;
}

static int unload(void **state)
{
    (void)state;
    td_tokenizer_destroy(tiny);
    td_tokenizer_destroy(released_tokenizer());
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_and_long_pieces_merge_as_defined),
        cmocka_unit_test(a_complete_list_in_order_means_ids_and_any_other_means_positions),
        cmocka_unit_test(a_merge_that_gives_rise_to_an_earlier_one_waits_for_it),
        cmocka_unit_test(a_text_that_repeats_itself_costs_steps_in_proportion_to_its_length),
    };
    return cmocka_run_group_tests_name("bpe", tests, load, unload);
}
