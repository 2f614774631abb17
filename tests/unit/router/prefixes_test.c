/* router/prefixes.c: what a worker's cache holds, as the router remembers it. */
#include "tests/unit/router/router_world.h"

#include "common/base/fault.h"
#include "common/base/token_chain.h"
#include "router/prefixes.h"

static void names_come_and_go_in_the_order_told(void **state)
{
    (void)state;
    struct td_prefixes s = {0};
    assert_false(td_prefixes_has(&s, 10));
    td_prefixes_apply(&s, true, (uint64_t[]){10, 20, 30, 20 | 1, 20, 10 | 1, 40 | 1}, 7);
    assert_int_equal(s.n, 2);
    assert_false(td_prefixes_has(&s, 10));
    assert_true(td_prefixes_has(&s, 20) && td_prefixes_has(&s, 30));
    td_prefixes_apply(&s, false, (uint64_t[]){50, 50, 0, 1}, 4);
    assert_int_equal(s.n, 3);
    td_prefixes_apply(&s, true, (uint64_t[]){60}, 1); /* from the start again */
    assert_int_equal(s.n, 1);
    assert_true(td_prefixes_has(&s, 60));
    td_prefixes_apply(&s, true, NULL, 0);
    assert_false(td_prefixes_has(&s, 60));
    td_prefixes_deinit(&s);
}

/* Against a plain table of flags, with names that fall onto each other. */
static void it_is_a_set(void **state)
{
    (void)state;
    enum { N = 3000 };
    static bool is_in[N];
    struct td_prefixes s = {0};
    uint64_t seed = 7;
    uint32_t n = 0;
    for (int i = 0; i < 200000; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t k = (uint32_t)(seed >> 33) % N;
        uint64_t name = (uint64_t)(k % 7 == 0 ? k : k * 8192 + 2) * 2 + 2; /* many have one home */
        bool goes = (seed >> 20 & 1) != 0;
        uint64_t change = name | goes;
        td_prefixes_apply(&s, false, &change, 1);
        n = n + (!goes && !is_in[k]) - (goes && is_in[k]);
        is_in[k] = !goes;
        assert_int_equal(s.n, n);
        assert_int_equal(td_prefixes_has(&s, name), !goes);
    }
    for (uint32_t k = 0; k < N; k++)
        assert_int_equal(td_prefixes_has(&s, (uint64_t)(k % 7 == 0 ? k : k * 8192 + 2) * 2 + 2), is_in[k]);
    td_prefixes_deinit(&s);
}

static void a_match_ends_at_the_first_block_that_is_not_known(void **state)
{
    (void)state;
    struct td_prefixes s = {0};
    td_prefixes_apply(&s, true, (uint64_t[]){10, 20, 40}, 3);
    assert_int_equal(td_prefixes_match(&s, (uint64_t[]){10, 20, 30, 40}, 4), 2);
    assert_int_equal(td_prefixes_match(&s, (uint64_t[]){30, 10}, 2), 0);
    assert_int_equal(td_prefixes_match(&s, (uint64_t[]){10}, 1), 1);
    assert_int_equal(td_prefixes_match(&s, NULL, 0), 0);
    td_prefixes_deinit(&s);
}

static void a_name_depends_on_everything_before_it(void **state)
{
    (void)state;
    uint32_t a[4] = {1, 2, 3, 4}, b[4] = {1, 2, 3, 5};
    uint64_t none[2] = {0, 0}, na[2], nb[2], aa[2], ba[2];
    td_token_chain(none, a, 4, na);
    td_token_chain(none, b, 4, nb);
    assert_true(na[0] != nb[0] && na[1] != nb[1]);
    td_token_chain(na, a, 4, aa);
    td_token_chain(nb, a, 4, ba);
    assert_true(aa[0] != ba[0] && aa[0] != na[0]);
    td_token_chain(na, a, 4, na); /* in place */
    assert_memory_equal(na, aa, sizeof aa);
}

static void a_prompt_and_its_answer_are_named_block_by_block(void **state)
{
    (void)state;
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) tokens[i] = i * 7;
    struct td_block_names whole = {0}, grown = {0};
    td_block_names_extend(&whole, tokens, 40, 8);
    assert_int_equal(whole.n, 4); /* the last token has to be computed by somebody */
    for (uint32_t n = 0; n <= 40; n += 5) td_block_names_extend(&grown, tokens, n, 8);
    assert_int_equal(grown.n, 4);
    assert_memory_equal(whole.names, grown.names, 4 * sizeof(uint64_t));
    td_block_names_extend(&grown, tokens, 40, 0); /* nobody is there to say how long a block is */
    assert_int_equal(grown.n, 4);
    td_block_names_deinit(&whole);
    td_block_names_deinit(&grown);
}

static void without_memory_it_forgets(void **state)
{
    (void)state;
    struct td_prefixes s = {0};
    td_fault_arm(TD_FAULT_ALLOC, 0, 1000);
    td_prefixes_apply(&s, false, (uint64_t[]){10, 20}, 2);
    td_fault_disarm_all();
    assert_false(td_prefixes_has(&s, 10));
    td_prefixes_apply(&s, false, (uint64_t[]){10}, 1);
    assert_true(td_prefixes_has(&s, 10));
    td_prefixes_deinit(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_come_and_go_in_the_order_told),
        cmocka_unit_test(it_is_a_set),
        cmocka_unit_test(a_match_ends_at_the_first_block_that_is_not_known),
        cmocka_unit_test(a_name_depends_on_everything_before_it),
        cmocka_unit_test(a_prompt_and_its_answer_are_named_block_by_block),
        cmocka_unit_test(without_memory_it_forgets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
