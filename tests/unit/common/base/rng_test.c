#include "common/base/rng.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/base/clock.h"

/* The paper's round function, written down straight from its definition, with all four counter words. */
static void reference(const uint32_t ctr[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t x[4] = {ctr[0], ctr[1], ctr[2], ctr[3]}, k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)x[0] * 0xD2511F53u, b = (uint64_t)x[2] * 0xCD9E8D57u;
        uint32_t y[4] = {(uint32_t)(b >> 32) ^ x[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ x[3] ^ k[1],
                         (uint32_t)a};
        for (int i = 0; i < 4; i++) x[i] = y[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++) out[i] = x[i];
}

static void philox_gives_the_published_numbers(void **state)
{
    (void)state;
    /* Known answers of the authors' Random123 library (kat_vectors); the reference must pass those that td_rng cannot
     * ask for, as its fourth counter word is always 0. */
    static const struct {
        uint32_t ctr[4], key[2], want[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    uint32_t got[4];
    for (int i = 0; i < 3; i++) {
        reference(kat[i].ctr, kat[i].key, got);
        assert_memory_equal(got, kat[i].want, sizeof got);
    }
    td_rng_philox(0, 0, 0, got);
    assert_memory_equal(got, kat[0].want, sizeof got);
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t seed = i * 0x9E3779B97F4A7C15ull, counter = ~i * 0xC2B2AE3D27D4EB4Full;
        uint32_t want[4], lane = (uint32_t)(i * 77);
        uint32_t ctr[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), lane, 0};
        uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
        reference(ctr, key, want);
        td_rng_philox(seed, counter, lane, got);
        assert_memory_equal(got, want, sizeof got);
    }
}

static void uniform_numbers_fill_the_interval_evenly(void **state)
{
    (void)state;
    enum { N = 100000 };
    unsigned bin[10] = {0};
    double sum = 0;
    for (uint64_t i = 0; i < N; i++) {
        double v = td_rng_uniform(42, i, 3);
        assert_true(v >= 0 && v < 1);
        bin[(int)(v * 10)]++;
        sum += v;
    }
    assert_true(sum / N > 0.495 && sum / N < 0.505); /* 5 sigma is 0.0046 */
    for (int i = 0; i < 10; i++) assert_in_range(bin[i], N / 10 - 500, N / 10 + 500);
    assert_true(td_rng_uniform(42, 7, 3) == td_rng_uniform(42, 7, 3));
    assert_true(td_rng_uniform(42, 7, 3) != td_rng_uniform(42, 7, 4));
    assert_true(td_rng_uniform(42, 7, 3) != td_rng_uniform(43, 7, 3));
}

static void system_numbers_differ_and_clocks_go_forward(void **state)
{
    (void)state;
    assert_true(td_rng_system() != td_rng_system());
    uint64_t a = td_clock_ns(), b = td_clock_ns();
    assert_true(b >= a);
    assert_true(td_clock_wall_ns() > 1700000000ull * TD_NS_PER_S);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_numbers),
        cmocka_unit_test(uniform_numbers_fill_the_interval_evenly),
        cmocka_unit_test(system_numbers_differ_and_clocks_go_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
