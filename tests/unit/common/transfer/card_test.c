/* Address and key cards: what was packed comes back, and nothing else is believed. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/transfer/card_int.h"

static const uint8_t worker[] = "a worker's address";

static void an_address_comes_back_whole(void **state)
{
    (void)state;
    struct td_buf b = {0};
    struct td_card_address in = {.incarnation = 77, .worker = worker, .n_worker = sizeof worker}, out;
    td_process_self(&in.process);
    td_card_pack_address(&in, &b);
    assert_false(b.failed);
    assert_int_equal(td_card_read_address(b.data, b.n, &out, NULL), TD_OK);
    assert_int_equal(out.incarnation, 77);
    assert_int_equal(out.process.pid, getpid());
    assert_int_equal(out.process.start_time, in.process.start_time);
    assert_int_equal(out.process.pid_namespace, in.process.pid_namespace);
    assert_memory_equal(out.process.boot_id, in.process.boot_id, 16);
    assert_int_equal(out.n_worker, sizeof worker);
    assert_memory_equal(out.worker, worker, sizeof worker);
    td_buf_free(&b);
}

static void a_key_comes_back_whole(void **state)
{
    (void)state;
    struct td_buf b = {0};
    struct td_card_key in = {
        .base = 0x1000, .n_bytes = 4096, .secret = 9, .kind = TD_POOL_SYSV, .rkey = worker, .n_rkey = 5};
    struct td_card_key out;
    td_card_pack_key(&in, &b);
    assert_int_equal(td_card_read_key(b.data, b.n, &out, NULL), TD_OK);
    assert_int_equal(out.base, 0x1000);
    assert_int_equal(out.n_bytes, 4096);
    assert_int_equal(out.secret, 9);
    assert_int_equal(out.kind, TD_POOL_SYSV);
    assert_int_equal(out.n_rkey, 5);
    td_buf_free(&b);
}

static void every_flipped_bit_and_every_cut_is_refused(void **state)
{
    (void)state;
    struct td_buf b = {0};
    struct td_card_address a = {.incarnation = 77, .worker = worker, .n_worker = sizeof worker}, got;
    struct td_card_key k = {.base = 1, .n_bytes = 2, .secret = 3, .kind = TD_POOL_HEAP, .rkey = worker, .n_rkey = 8},
                       key;
    for (int which = 0; which < 2; which++) {
        if (which == 0)
            td_card_pack_address(&a, &b);
        else
            td_card_pack_key(&k, &b);
        uint8_t *copy = malloc(b.n); /* exact, so that reading past it shows under a sanitizer */
        for (size_t bit = 0; bit < b.n * 8; bit++) {
            memcpy(copy, b.data, b.n);
            copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
            struct td_err err = {{0}};
            enum td_status st =
                which == 0 ? td_card_read_address(copy, b.n, &got, &err) : td_card_read_key(copy, b.n, &key, &err);
            assert_true(st == TD_E_INVALID || st == TD_E_MISMATCH);
            assert_true(err.text[0] != 0);
        }
        free(copy);
        for (size_t n = 0; n < b.n; n++) {
            copy = malloc(n == 0 ? 1 : n);
            memcpy(copy, b.data, n);
            assert_int_equal(which == 0 ? td_card_read_address(copy, n, &got, NULL)
                                        : td_card_read_key(copy, n, &key, NULL),
                             TD_E_INVALID);
            free(copy);
        }
        assert_int_not_equal(which == 0 ? td_card_read_key(b.data, b.n, &key, NULL)
                                        : td_card_read_address(b.data, b.n, &got, NULL),
                             TD_OK); /* the other kind */
    }
    assert_int_equal(td_card_read_address(NULL, 100, &got, NULL), TD_E_INVALID);
    td_buf_free(&b);
}

static void a_key_that_wraps_around_or_is_empty_is_refused(void **state)
{
    (void)state;
    struct td_buf b = {0};
    struct td_card_key out;
    struct td_card_key bad[] = {
        {.base = UINT64_MAX - 10, .n_bytes = 11, .kind = TD_POOL_SYSV, .rkey = worker, .n_rkey = 1},
        {.base = 0, .n_bytes = 0, .kind = TD_POOL_SYSV, .rkey = worker, .n_rkey = 1},
        {.base = 0, .n_bytes = 1, .kind = 0, .rkey = worker, .n_rkey = 1},
        {.base = 0, .n_bytes = 1, .kind = TD_POOL_N_KINDS, .rkey = worker, .n_rkey = 1},
        {.base = 0, .n_bytes = 1, .kind = TD_POOL_SYSV, .rkey = worker, .n_rkey = 0},
    };
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        td_card_pack_key(&bad[i], &b);
        assert_int_equal(td_card_read_key(b.data, b.n, &out, NULL), TD_E_INVALID);
    }
    td_buf_free(&b);
}

static void a_process_is_watched_until_it_ends(void **state)
{
    (void)state;
    struct td_process_id self, child;
    int fd = -1, to_child[2], from_child[2];
    td_process_self(&self);
    if (td_process_watch(&self, &fd) == TD_E_UNSUPPORTED) skip(); /* a kernel without pidfds */
    close(fd);
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(from_child), 0);
    pid_t pid = fork();
    if (pid == 0) { /* says who it is, lives until our end of the pipe closes */
        char c;
        close(to_child[1]);
        td_process_self(&child);
        if (write(from_child[1], &child, sizeof child) != sizeof child) _exit(1);
        _exit((int)read(to_child[0], &c, 1));
    }
    close(to_child[0]);
    assert_int_equal(read(from_child[0], &child, sizeof child), sizeof child);
    assert_int_equal(child.pid, pid);
    assert_int_equal(td_process_watch(&child, &fd), TD_OK);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 0), 0);

    int other;
    struct td_process_id wrong = child;
    wrong.start_time++; /* another life with the same pid */
    assert_int_equal(td_process_watch(&wrong, &other), TD_E_PEER_LOST);
    wrong = child;
    wrong.boot_id[3] ^= 1;
    assert_int_equal(td_process_watch(&wrong, &other), TD_E_UNSUPPORTED);
    wrong = child;
    wrong.pid_namespace++;
    assert_int_equal(td_process_watch(&wrong, &other), TD_E_UNSUPPORTED);

    close(to_child[1]);
    assert_int_equal(poll(&p, 1, 10000), 1);
    assert_int_equal(td_process_watch(&child, &other), TD_E_PEER_LOST); /* a zombie */
    waitpid(pid, NULL, 0);
    assert_int_equal(td_process_watch(&child, &other), TD_E_PEER_LOST);
    close(fd);
    close(from_child[0]);
    close(from_child[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_address_comes_back_whole),
        cmocka_unit_test(a_key_comes_back_whole),
        cmocka_unit_test(every_flipped_bit_and_every_cut_is_refused),
        cmocka_unit_test(a_key_that_wraps_around_or_is_empty_is_refused),
        cmocka_unit_test(a_process_is_watched_until_it_ends),
    };
    return cmocka_run_group_tests_name("common/transfer/card", tests, NULL, NULL);
}
