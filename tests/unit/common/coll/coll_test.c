/* Ranks as threads: what they agree on, and that nobody is left waiting. */
#include "common/coll/coll.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/rng.h"

#define N_MAX 5000u

struct rank {
    struct td_coll *c;
    uint32_t number, n, n_rounds;
    float *x;
    enum td_status st;
    uint32_t *counter; /* shared, not atomic: the barrier orders it */
};

static void run_ranks(struct rank *r, uint32_t n, void *(*main_of_rank)(void *))
{
    pthread_t t[TD_MAX_RANKS];
    for (uint32_t i = 0; i < n; i++) assert_int_equal(pthread_create(&t[i], NULL, main_of_rank, &r[i]), 0);
    for (uint32_t i = 0; i < n; i++) pthread_join(t[i], NULL);
}

static struct td_coll *make(uint32_t n, bool spin)
{
    struct td_err err = {0};
    struct td_coll *c = NULL;
    assert_int_equal(td_coll_create(td_coll_find("local"), n, spin, &c, &err), TD_OK);
    return c;
}

/* Values of very different sizes, so that the order of additions shows. */
static float value(uint32_t rank, uint32_t i)
{
    uint32_t out[4];
    td_rng_philox(7, rank, i, out);
    float f = (float)((double)(int32_t)out[0] / 2147483648.0);
    return out[1] % 4 == 0 ? f * 1e6f : out[1] % 4 == 1 ? f * 1e-6f : f;
}

static float tree(const float *x, uint32_t n) { return n == 1 ? x[0] : tree(x, n / 2) + tree(x + n / 2, n - n / 2); }

static void *reduce_main(void *arg)
{
    struct rank *r = arg;
    for (uint32_t k = 0; k < r->n_rounds && r->st == TD_OK; k++) {
        for (uint32_t i = 0; i < r->n; i++) r->x[i] = value(r->number, i + k);
        r->st = td_coll_all_reduce(r->c, r->number, NULL, r->x, r->n);
    }
    return NULL;
}

static void all_ranks_get_the_trees_sum_bit_for_bit(void **state)
{
    (void)state;
    static const uint32_t counts[] = {1, 7, 511, 512, 513, N_MAX};
    for (uint32_t n = 1; n <= TD_MAX_RANKS; n++)
        for (uint32_t k = 0; k < 6; k++) {
            struct td_coll *c = make(n, n == 2);
            struct rank r[TD_MAX_RANKS];
            for (uint32_t i = 0; i < n; i++) {
                r[i] = (struct rank){.c = c, .number = i, .n = counts[k], .n_rounds = 3};
                r[i].x = calloc(counts[k], sizeof *r[i].x);
                assert_non_null(r[i].x);
            }
            run_ranks(r, n, reduce_main);
            for (uint32_t e = 0; e < counts[k]; e++) {
                float parts[TD_MAX_RANKS];
                for (uint32_t i = 0; i < n; i++) parts[i] = value(i, e + 2);
                float want = tree(parts, n);
                for (uint32_t i = 0; i < n; i++) assert_memory_equal(&r[i].x[e], &want, sizeof want);
            }
            for (uint32_t i = 0; i < n; i++) {
                assert_int_equal(r[i].st, TD_OK);
                free(r[i].x);
            }
            td_coll_destroy(c);
        }
}

/* A rank whose pieces are a subtree and the collective's rest of the tree make the sum of all pieces, whatever the
 * number of ranks. */
static void pieces_and_ranks_make_one_tree(void **state)
{
    (void)state;
    float x[8];
    for (uint32_t i = 0; i < 8; i++) x[i] = value(i, 3);
    float want = tree(x, 8);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        struct td_coll *c = make(n, false);
        struct td_pieces p;
        float sums[TD_MAX_RANKS];
        for (uint32_t r = 0; r < n; r++) {
            float stack[8];
            uint32_t top = 0;
            td_pieces_init(&p, 320, 8, r * 8 / n, 8 / n);
            assert_int_equal(p.end[p.n - 1], 320 / n);
            for (uint32_t i = 0; i < p.n; i++) {
                stack[top++] = x[r * 8 / n + i];
                for (uint32_t m = 0; m < p.merges[i]; m++, top--) stack[top - 2] += stack[top - 1];
            }
            assert_int_equal(top, 1);
            sums[r] = stack[0];
        }
        float have = tree(sums, n);
        assert_memory_equal(&have, &want, sizeof want);
        td_coll_destroy(c);
    }
}

static void *reduce_once_main(void *arg)
{
    struct rank *r = arg;
    r->st = td_coll_all_reduce(r->c, r->number, NULL, r->x, r->n);
    return NULL;
}

/* -0.0 is what a rank says that has nothing to add: also where the others' sum is -0.0. */
static void minus_zero_adds_nothing(void **state)
{
    (void)state;
    struct td_coll *c = make(4, false);
    float x[4][3] = {{-0.0f, -0.0f, -0.0f}, {0.0f, -0.0f, 5.0f}, {-0.0f, -0.0f, -0.0f}, {-0.0f, -0.0f, -0.0f}};
    const float want[3] = {0.0f, -0.0f, 5.0f};
    struct rank r[4];
    for (uint32_t i = 0; i < 4; i++) r[i] = (struct rank){.c = c, .number = i, .n = 3, .x = x[i]};
    run_ranks(r, 4, reduce_once_main);
    for (uint32_t i = 0; i < 4; i++) assert_memory_equal(x[i], want, sizeof want);
    td_coll_destroy(c);
}

static void *count_main(void *arg)
{
    struct rank *r = arg;
    for (uint32_t k = 0; k < r->n_rounds; k++) {
        if (k % r->c->n_ranks == r->number) ++*r->counter;
        r->st = td_coll_barrier(r->c);
        if (r->st != TD_OK || *r->counter != k + 1) {
            r->n = k + 1; /* what failed, or what was wrong */
            return NULL;
        }
        r->st = td_coll_barrier(r->c);
    }
    return NULL;
}

static void a_barrier_orders_what_ranks_write(void **state)
{
    (void)state;
    for (uint32_t spin = 0; spin < 2; spin++) {
        uint32_t counter = 0;
        struct td_coll *c = make(4, spin != 0);
        struct rank r[4];
        for (uint32_t i = 0; i < 4; i++)
            r[i] = (struct rank){.c = c, .number = i, .n_rounds = 500, .counter = &counter};
        run_ranks(r, 4, count_main);
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(r[i].st, TD_OK);
            assert_int_equal(r[i].n, 0);
        }
        td_coll_destroy(c);
    }
}

static void *fail_main(void *arg)
{
    struct rank *r = arg;
    if (r->number == 2) {
        td_coll_fail(r->c, TD_E_DEVICE);
        td_coll_fail(r->c, TD_E_INTERNAL); /* the first one counts */
        r->st = td_coll_status(r->c);
    } else {
        r->st = td_coll_all_reduce(r->c, r->number, NULL, r->x, r->n);
    }
    return NULL;
}

static void nobody_waits_for_a_rank_that_failed(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < 50; k++) {
        struct td_coll *c = make(4, k % 2 != 0);
        float x[4][8] = {{0}};
        struct rank r[4];
        for (uint32_t i = 0; i < 4; i++) r[i] = (struct rank){.c = c, .number = i, .n = 8, .x = x[i]};
        run_ranks(r, 4, fail_main);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(r[i].st, TD_E_DEVICE);
        assert_int_equal(td_coll_barrier(c), TD_E_DEVICE); /* for good */
        td_coll_destroy(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_get_the_trees_sum_bit_for_bit),
        cmocka_unit_test(pieces_and_ranks_make_one_tree),
        cmocka_unit_test(minus_zero_adds_nothing),
        cmocka_unit_test(a_barrier_orders_what_ranks_write),
        cmocka_unit_test(nobody_waits_for_a_rank_that_failed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
