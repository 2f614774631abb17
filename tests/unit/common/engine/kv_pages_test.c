#include "common/engine/kv_pages.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/fault.h"
#include "common/base/rng.h"

#define S TD_KV_SLIDING
#define F TD_KV_FULL

static struct td_kv_pages *make(uint32_t n_sliding, uint32_t n_full)
{
    struct td_kv_pages *kv = NULL;
    uint32_t n[TD_KV_N_GROUPS] = {[S] = n_sliding, [F] = n_full};
    assert_int_equal(td_kv_pages_create(n, &kv), TD_OK);
    return kv;
}

static void pages_come_in_one_run_where_there_is_one(void **state)
{
    (void)state;
    struct td_kv_pages *kv = make(200, 10);
    uint32_t p[200];
    assert_int_equal(td_kv_pages_alloc(kv, S, 200, "all", p), TD_OK);
    for (uint32_t i = 0; i < 200; i++) assert_int_equal(p[i], i);
    /* Free: 10..12, 60..70 (over a word's edge), 100..102, 199 */
    for (uint32_t i = 10; i <= 12; i++) td_kv_pages_unref(kv, S, i);
    for (uint32_t i = 60; i <= 70; i++) td_kv_pages_unref(kv, S, i);
    for (uint32_t i = 100; i <= 102; i++) td_kv_pages_unref(kv, S, i);
    td_kv_pages_unref(kv, S, 199);
    assert_int_equal(td_kv_pages_n_free(kv, S), 18);

    uint32_t q[20];
    assert_int_equal(td_kv_pages_alloc(kv, S, 7, "b", q), TD_OK); /* the lowest run that is long enough */
    for (uint32_t i = 0; i < 7; i++) assert_int_equal(q[i], 60 + i);
    assert_int_equal(td_kv_pages_alloc(kv, S, 2, "c", q), TD_OK);
    assert_int_equal(q[0], 10);
    assert_int_equal(q[1], 11);
    assert_int_equal(td_kv_pages_alloc(kv, S, 8, "d", q), TD_OK); /* no run of 8 is left: rising pieces */
    const uint32_t want[] = {12, 67, 68, 69, 70, 100, 101, 102};
    assert_memory_equal(q, want, sizeof want);
    assert_int_equal(td_kv_pages_alloc(kv, S, 1, "e", q), TD_OK);
    assert_int_equal(q[0], 199);
    assert_int_equal(td_kv_pages_n_free(kv, F), 10); /* groups do not mix */
    td_kv_pages_destroy(kv);
}

static void note_taken(void *self, enum td_kv_group g, uint32_t page)
{
    assert_int_equal(((uint8_t *)self)[page + 100 * g]++, 0);
}
static void note_freed(void *self, enum td_kv_group g, uint32_t page)
{
    assert_int_equal(((uint8_t *)self)[page + 100 * g]--, 1);
}

static void a_watch_hears_of_every_page_that_comes_and_goes(void **state)
{
    (void)state;
    struct td_kv_pages *kv = make(20, 20);
    uint8_t is_taken[200] = {0};
    struct td_kv_watch watch = {.self = is_taken, .freed = note_freed, .taken = note_taken};
    td_kv_pages_set_watch(kv, &watch);
    uint32_t p[20];
    assert_int_equal(td_kv_pages_alloc(kv, S, 7, "a", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, F, 20, "b", p), TD_OK);
    td_kv_pages_ref(kv, F, 3);
    for (uint32_t i = 0; i < 20; i++) td_kv_pages_unref(kv, F, i);
    for (uint32_t i = 0; i < 20; i++) assert_int_equal(is_taken[100 + i], i == 3);
    for (uint32_t i = 0; i < 20; i++) assert_int_equal(is_taken[i], i < 7);
    td_kv_pages_set_watch(kv, NULL);
    td_kv_pages_unref(kv, F, 3);
    assert_int_equal(is_taken[103], 1);
    td_kv_pages_destroy(kv);
}

static void too_many_pages_are_refused_and_nothing_is_taken(void **state)
{
    (void)state;
    struct td_kv_pages *kv = make(5, 0);
    uint32_t p[8] = {77, 77};
    assert_int_equal(td_kv_pages_alloc(kv, S, 6, "x", p), TD_E_NO_PAGES);
    assert_int_equal(td_kv_pages_alloc(kv, S, UINT32_MAX, "x", p), TD_E_NO_PAGES);
    assert_int_equal(td_kv_pages_alloc(kv, F, 1, "x", p), TD_E_NO_PAGES);
    assert_int_equal(p[0], 77);
    assert_int_equal(td_kv_pages_n_free(kv, S), 5);
    assert_int_equal(td_kv_pages_alloc(kv, S, 0, "x", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, F, 0, "x", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, S, 5, "x", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, S, 0, "x", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, S, 1, "x", p), TD_E_NO_PAGES);
    td_kv_pages_destroy(kv);
}

static void a_shared_page_is_free_when_its_last_holder_lets_go(void **state)
{
    (void)state;
    struct td_kv_pages *kv = make(3, 3);
    uint32_t p;
    assert_int_equal(td_kv_pages_alloc(kv, F, 1, "a", &p), TD_OK);
    td_kv_pages_ref(kv, F, p);
    td_kv_pages_ref(kv, F, p);
    assert_int_equal(td_kv_pages_refs(kv, F, p), 3);
    td_kv_pages_unref(kv, F, p);
    td_kv_pages_unref(kv, F, p);
    assert_int_equal(td_kv_pages_n_free(kv, F), 2);
    td_kv_pages_unref(kv, F, p);
    assert_int_equal(td_kv_pages_n_free(kv, F), 3);
    assert_int_equal(td_kv_pages_refs(kv, F, p), 0);
    td_kv_pages_destroy(kv);
}

/* Runs f(kv) in a child: true if it died by our own check. */
static bool dies(void (*f)(struct td_kv_pages *kv))
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(STDERR_FILENO);
        f(make(4, 4));
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}
static void unref_free(struct td_kv_pages *kv) { td_kv_pages_unref(kv, S, 2); }
static void unref_twice(struct td_kv_pages *kv)
{
    uint32_t p;
    if (td_kv_pages_alloc(kv, F, 1, "x", &p) != TD_OK) return;
    td_kv_pages_unref(kv, F, p);
    td_kv_pages_unref(kv, F, p);
}
static void ref_free(struct td_kv_pages *kv) { td_kv_pages_ref(kv, S, 0); }
static void unref_outside(struct td_kv_pages *kv) { td_kv_pages_unref(kv, S, 4); }
static void nothing_wrong(struct td_kv_pages *kv) { td_kv_pages_destroy(kv); }

static void misuse_is_caught(void **state)
{
    (void)state;
    assert_true(dies(unref_free));
    assert_true(dies(unref_twice));
    assert_true(dies(ref_free));
    assert_true(dies(unref_outside));
    assert_false(dies(nothing_wrong));
}

static void the_description_names_who_holds_how_many(void **state)
{
    (void)state;
    struct td_kv_pages *kv = make(6, 9);
    uint32_t p[9];
    assert_int_equal(td_kv_pages_alloc(kv, S, 2, "req-b", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, F, 4, "req-a", p), TD_OK);
    assert_int_equal(td_kv_pages_alloc(kv, F, 1, "req-b", p), TD_OK);
    td_kv_pages_ref(kv, F, p[0]);
    assert_int_equal(td_kv_pages_alloc(kv, F, 1, "say \"\\\n\xff", p), TD_OK);
    struct td_buf b = {0};
    td_kv_pages_describe(kv, &b);
    assert_string_equal(td_buf_cstr(&b), "{\"sliding\":{\"total\":6,\"free\":4,\"cached\":0,\"shared\":0},"
                                         "\"full\":{\"total\":9,\"free\":3,\"cached\":0,\"shared\":1},\"holders\":["
                                         "{\"holder\":\"req-a\",\"sliding\":0,\"full\":4},"
                                         "{\"holder\":\"req-b\",\"sliding\":2,\"full\":1},"
                                         "{\"holder\":\"say ????\",\"sliding\":0,\"full\":1}]}");
    td_buf_free(&b);
    td_kv_pages_destroy(kv);
}

/* Against a plain array of counts: every page given was free, counts agree, the longest runs are used. */
static void random_use_agrees_with_a_simple_model(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint32_t n = 1 + (uint32_t)(td_rng_uniform(seed, 0, 9) * 300), refs[301] = {0}, n_free = n;
        struct td_kv_pages *kv = make(3, n);
        for (uint64_t i = 1; i < 3000; i++) {
            double what = td_rng_uniform(seed, i, 0);
            uint32_t k = (uint32_t)(td_rng_uniform(seed, i, 1) * n);
            if (what < 0.3) {
                uint32_t want = (uint32_t)(td_rng_uniform(seed, i, 2) * 12), out[12], longest = 0, run = 0;
                for (uint32_t p = 0; p < n; p++) {
                    run = refs[p] == 0 ? run + 1 : 0;
                    if (run > longest) longest = run;
                }
                enum td_status st = td_kv_pages_alloc(kv, F, want, "h", out);
                assert_int_equal(st, want <= n_free ? TD_OK : TD_E_NO_PAGES);
                for (uint32_t j = 0; st == TD_OK && j < want; j++) {
                    assert_true(out[j] < n && refs[out[j]] == 0);
                    if (j > 0) assert_true(out[j] > out[j - 1]);
                    if (j > 0 && longest >= want) assert_int_equal(out[j], out[j - 1] + 1);
                    refs[out[j]] = 1;
                    n_free--;
                }
            } else if (what < 0.45 && refs[k] > 0) {
                td_kv_pages_ref(kv, F, k);
                refs[k]++;
            } else if (refs[k] > 0) {
                td_kv_pages_unref(kv, F, k);
                if (--refs[k] == 0) n_free++;
            }
            assert_int_equal(td_kv_pages_n_free(kv, F), n_free);
            assert_int_equal(td_kv_pages_refs(kv, F, k), refs[k]);
        }
        for (uint32_t p = 0; p < n; p++)
            while (refs[p]-- > 0) td_kv_pages_unref(kv, F, p);
        assert_int_equal(td_kv_pages_n_free(kv, F), n);
        assert_int_equal(td_kv_pages_n_total(kv, F), n);
        assert_int_equal(td_kv_pages_n_free(kv, S), 3);
        td_kv_pages_destroy(kv);
    }
}

static void create_survives_any_failed_allocation(void **state)
{
    (void)state;
    uint32_t n[TD_KV_N_GROUPS] = {4, 4};
    for (uint32_t i = 0; i < 10; i++) {
        struct td_kv_pages *kv = NULL;
        td_fault_arm(TD_FAULT_ALLOC, i, 1);
        enum td_status st = td_kv_pages_create(n, &kv);
        td_fault_disarm_all();
        assert_true((st == TD_OK) == (kv != NULL));
        if (st != TD_OK) assert_int_equal(st, TD_E_NO_MEMORY);
        td_kv_pages_destroy(kv);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_come_in_one_run_where_there_is_one),
        cmocka_unit_test(a_watch_hears_of_every_page_that_comes_and_goes),
        cmocka_unit_test(too_many_pages_are_refused_and_nothing_is_taken),
        cmocka_unit_test(a_shared_page_is_free_when_its_last_holder_lets_go),
        cmocka_unit_test(misuse_is_caught),
        cmocka_unit_test(the_description_names_who_holds_how_many),
        cmocka_unit_test(random_use_agrees_with_a_simple_model),
        cmocka_unit_test(create_survives_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
