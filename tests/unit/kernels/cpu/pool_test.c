#include "kernels/cpu/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <cmocka.h>

#define N 1000u

struct tally {
    _Atomic uint32_t hits[N];
    _Atomic uint32_t bad_thread;
    uint32_t n_threads;
};

static void count(void *ctx, uint32_t index, uint32_t thread)
{
    struct tally *t = ctx;
    atomic_fetch_add(&t->hits[index], 1);
    if (thread >= t->n_threads) atomic_fetch_add(&t->bad_thread, 1);
}

static void every_index_is_done_once_by_any_number_of_threads(void **state)
{
    (void)state;
    static struct tally t;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct td_pool *p = NULL;
        assert_int_equal(td_pool_create(threads, &p), TD_OK);
        assert_int_equal(td_pool_n_threads(p), threads);
        for (uint32_t n = 0; n <= N; n = n * 3 + 1) {
            memset(&t, 0, sizeof t);
            t.n_threads = threads;
            td_pool_run(p, count, &t, n);
            for (uint32_t i = 0; i < N; i++) assert_int_equal(t.hits[i], i < n);
            assert_int_equal(t.bad_thread, 0);
        }
        td_pool_destroy(p);
    }
}

static void loops_follow_each_other_without_mixing(void **state)
{
    (void)state;
    static struct tally t;
    struct td_pool *p = NULL;
    assert_int_equal(td_pool_create(4, &p), TD_OK);
    memset(&t, 0, sizeof t);
    t.n_threads = 4;
    for (uint32_t i = 0; i < 20000; i++) td_pool_run(p, count, &t, 1 + i % 7);
    uint32_t sum = 0, want = 0;
    for (uint32_t i = 0; i < 20000; i++) want += 1 + i % 7;
    for (uint32_t i = 0; i < N; i++) sum += t.hits[i];
    assert_int_equal(sum, want);
    td_pool_destroy(p);
}

static void an_idle_pool_uses_no_processor(void **state)
{
    (void)state;
    static struct tally t;
    struct td_pool *p = NULL;
    assert_int_equal(td_pool_create(4, &p), TD_OK);
    memset(&t, 0, sizeof t);
    t.n_threads = 4;
    td_pool_run(p, count, &t, 10);
    struct timespec pause = {.tv_nsec = 100000000};
    nanosleep(&pause, NULL); /* time to fall asleep */
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    nanosleep(&pause, NULL);
    getrusage(RUSAGE_SELF, &after);
    long used =
        (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000L + after.ru_utime.tv_usec - before.ru_utime.tv_usec;
    assert_true(used < 20000);
    td_pool_run(p, count, &t, N); /* and it wakes */
    assert_int_equal(t.hits[N - 1], 1);
    td_pool_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_is_done_once_by_any_number_of_threads),
        cmocka_unit_test(loops_follow_each_other_without_mixing),
        cmocka_unit_test(an_idle_pool_uses_no_processor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
