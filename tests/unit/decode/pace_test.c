#include "decode/pace.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/rng.h"

#define MOST     512u
#define DECODING 64u

/* A machine: what a step takes. noise: of it, up or down; every 20th step is hit and takes ten times as long. */
struct machine {
    double decode_ns, fixed_ns, token_ns, noise;
    bool has_hits;
};

static uint64_t takes(const struct machine *m, uint32_t n_prompt, uint64_t i)
{
    double t = m->decode_ns + (n_prompt > 0 ? m->fixed_ns + n_prompt * m->token_ns : 0);
    t *= 1 + m->noise * (2 * td_rng_uniform(7, i, 1) - 1);
    return (uint64_t)(m->has_hits && i % 20 == 19 ? 10 * t : t);
}

/* Learns for n mixed steps; the largest budget of the last half of them in *most, the smallest in *least. */
static void learn(const struct machine *m, uint32_t n, uint32_t *least, uint32_t *most)
{
    struct td_decode_pace p = {0};
    for (uint64_t i = 0; i < 20; i++) td_decode_pace_note(&p, DECODING, 0, MOST, takes(m, 0, i));
    *least = MOST, *most = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t b = td_decode_pace_budget(&p, DECODING, MOST);
        assert_in_range(b, 1, MOST);
        if (i >= n / 2 && b > *most) *most = b;
        if (i >= n / 2 && b < *least) *least = b;
        td_decode_pace_note(&p, DECODING, b, MOST, takes(m, b, 2 * i));
        td_decode_pace_note(&p, DECODING, 0, MOST, takes(m, 0, 2 * i + 1));
    }
}

static void tokens_that_cost_each_take_their_share_of_a_step(void **state)
{
    (void)state;
    uint32_t least, most;
    learn(&(struct machine){.decode_ns = 4e6, .token_ns = 50e3}, 200, &least, &most); /* 0.7 * 4 ms / 50 us = 56 */
    assert_in_range(most, 50, 62);
    assert_in_range(least, 24, 62);
    learn(&(struct machine){.decode_ns = 4e6, .token_ns = 50e3, .noise = 0.1}, 400, &least, &most);
    assert_in_range(most, 45, 75);
    learn(&(struct machine){.decode_ns = 4e6, .token_ns = 50e3, .noise = 0.05, .has_hits = true}, 400, &least, &most);
    assert_in_range(most, 20, 75);
}

static void tokens_that_cost_little_take_all(void **state)
{
    (void)state;
    uint32_t least, most;
    learn(&(struct machine){.decode_ns = 4e6}, 100, &least, &most);
    assert_int_equal(most, MOST);
    learn(&(struct machine){.decode_ns = 4e6, .token_ns = 2e3, .noise = 0.02}, 100, &least, &most);
    assert_int_equal(most, MOST);
}

/* As on a GPU: a step with prompt tokens is slower by more than it may be, whatever their number. */
static void a_cost_that_is_there_anyway_does_not_make_tokens_dear(void **state)
{
    (void)state;
    uint32_t least, most;
    struct machine m = {.decode_ns = 7e6, .fixed_ns = 5e6, .token_ns = 3e3};
    for (int noise = 0; noise < 3; noise++) {
        m.noise = noise * 0.01;
        learn(&m, 200, &least, &most);
        assert_int_equal(most, MOST);
        assert_true(least >= MOST / 4);
    }
    /* Then tokens may add as much again: 5 ms / 50 us. */
    learn(&(struct machine){.decode_ns = 7e6, .fixed_ns = 5e6, .token_ns = 50e3}, 400, &least, &most);
    assert_in_range(most, 80, 115);
}

static void a_part_that_is_there_anyway_is_taken_off_the_share(void **state)
{
    (void)state;
    uint32_t least, most;
    /* (0.7 * 4 - 1) ms / 50 us = 36 */
    learn(&(struct machine){.decode_ns = 4e6, .fixed_ns = 1e6, .token_ns = 50e3}, 400, &least, &most);
    assert_in_range(most, 30, 40);
}

static void too_slow_a_machine_still_goes_on(void **state)
{
    (void)state;
    uint32_t least, most;
    learn(&(struct machine){.decode_ns = 1e6, .token_ns = 1e6}, 100, &least, &most);
    assert_int_equal(most, DECODING / 4);
    struct td_decode_pace p = {0};
    assert_int_equal(td_decode_pace_budget(&p, 1, MOST), 1);
    assert_int_equal(td_decode_pace_budget(&p, 1000, MOST), 250);
    assert_int_equal(td_decode_pace_budget(&p, 1000, 8), 8);
    td_decode_pace_note(&p, 4, 9, MOST, 1000); /* before any plain step: not understood */
    td_decode_pace_note(&p, 0, 9, MOST, 1000);
    td_decode_pace_note(&p, 4, 0, MOST, 0);
    assert_true(p.decode_ns == 0 && p.n_tokens == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_that_cost_each_take_their_share_of_a_step),
        cmocka_unit_test(tokens_that_cost_little_take_all),
        cmocka_unit_test(a_cost_that_is_there_anyway_does_not_make_tokens_dear),
        cmocka_unit_test(a_part_that_is_there_anyway_is_taken_off_the_share),
        cmocka_unit_test(too_slow_a_machine_still_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
