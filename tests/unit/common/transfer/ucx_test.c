/* The UCX transfer between two real processes: what arrives, and whether the receiver had to help. */
#include <dlfcn.h>
#include <sys/resource.h>

#include "common/base/fault.h"
#include "tests/unit/common/transfer/xfer_pair.h"

struct state {
    struct pair p;
    struct child c;
    const char *tls;
};

static int set_up(void **state, const char *tls)
{
    struct state *s = calloc(1, sizeof *s);
    struct td_err err = {{0}};
    s->tls = tls;
    enum td_status st = pair_open(&s->p, tls, &err);
    if (st != TD_OK) print_error("%s: %s\n", td_status_name(st), err.text);
    assert_int_equal(st, TD_OK);
    child_start(&s->c, tls);
    child_connect(&s->c, &s->p);
    *state = s;
    return 0;
}
static int over_shm(void **state) { return set_up(state, "shm"); }
static int over_puts(void **state) { return set_up(state, "shm puts"); }
static int over_any(void **state) { return set_up(state, ""); } /* as UCX chooses */
static int over_tcp(void **state) { return set_up(state, "tcp"); }
static int tear_down(void **state)
{
    struct state *s = *state;
    if (s->c.pid != 0) child_quit(&s->c);
    pair_close(&s->p);
    free(s);
    return 0;
}

static bool has_received(void *arg)
{
    struct state *s = arg;
    return child_report(&s->c).n_received != 0;
}

static void puts_flush_and_message_arrive(void **state)
{
    struct state *s = *state;
    pair_fill(s->p.mem[POOL_PLAIN], 1 << 20, 1);
    struct td_xfer_seg seg = {s->p.mem[POOL_PLAIN], 4096, 1 << 20};
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, &seg, 1, 20000), TD_OK);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    assert_int_equal(child_sum(&s->c, POOL_SHARED, 4096, 1 << 20), pair_sum(s->p.mem[POOL_PLAIN], 1 << 20));
    assert_int_equal(pair_send(&s->p, s->c.peer, 42, 0, 100), TD_OK);
    assert_true(pair_run(&s->p, has_received, s, 20000));
    struct report r = child_report(&s->c);
    assert_int_equal(r.n_received, 1);
    assert_int_equal(r.n_bad, 0);
    assert_int_equal(r.last_id, 42);
    assert_true(r.last_from == s->p.incarnation);
    bool is_shm = strcmp(s->tls, "tcp") != 0, is_mapped = is_shm && strstr(s->tls, "puts") == NULL;
    assert_string_equal(s->p.ops->peer_transport(s->c.peer), is_mapped ? "sysv mapped" : is_shm ? "sysv" : "tcp");
    assert_false(s->p.ops->peer_is_one_sided(s->c.peer)); /* not into its plain pool */
    child_connect_to_first_pool(&s->c, &s->p);
    assert_int_equal(s->p.ops->peer_is_one_sided(s->c.peer), is_shm);
}

static void a_thousand_segments_land_where_they_belong(void **state)
{
    struct state *s = *state;
    enum { N = 1000, STEP = 4096 };
    static struct td_xfer_seg segs[N];
    uint8_t *want = calloc(1, (size_t)N * STEP);
    pair_fill(s->p.mem[POOL_SHARED], (size_t)N * STEP, 7);
    for (unsigned i = 0; i < N; i++) {
        unsigned to = (i * 389u) % N, n = i % 7 == 0 ? 0 : 1 + i * 97u % STEP; /* scattered, odd sizes, some empty */
        segs[i] = (struct td_xfer_seg){s->p.mem[POOL_SHARED] + (size_t)i * STEP, (uint64_t)to * STEP, n};
        memcpy(want + (size_t)to * STEP, segs[i].src, n);
    }
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, segs, N, 20000), TD_OK);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    assert_true(child_sum(&s->c, POOL_SHARED, 0, (uint64_t)N * STEP) == pair_sum(want, (size_t)N * STEP));
    struct td_xfer_stats st;
    s->p.ops->stats(s->p.x, &st);
    assert_int_equal(st.n_put_segs, N);
    free(want);
}

static void a_put_of_nothing_is_done(void **state)
{
    struct state *s = *state;
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, NULL, 0, 5000), TD_OK);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
}

/* The proof: while every thread of the receiver stands still, the bytes arrive and the flush says so. */
static void puts_into_a_created_pool_need_nothing_of_the_receiver(void **state)
{
    struct state *s = *state;
    pair_fill(s->p.mem[POOL_SHARED], 2 << 20, 3);
    struct td_xfer_seg seg[2] = {{s->p.mem[POOL_SHARED], 12345, 1 << 20},
                                 {s->p.mem[POOL_SHARED] + (1 << 20), (2 << 20) + 1, 1 << 20}};
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK); /* introductions over: those take two */
    child_stop(&s->c);
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, seg, 2, 20000), TD_OK);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_continue(&s->c);
    assert_true(child_sum(&s->c, POOL_SHARED, seg[0].dst_offset, 1 << 20) == pair_sum(seg[0].src, 1 << 20));
    assert_true(child_sum(&s->c, POOL_SHARED, seg[1].dst_offset, 1 << 20) == pair_sum(seg[1].src, 1 << 20));
}

static void puts_into_plain_memory_wait_for_the_receiver(void **state)
{
    struct state *s = *state;
    pair_fill(s->p.mem[POOL_SHARED], 1 << 20, 4);
    struct td_xfer_seg seg = {s->p.mem[POOL_SHARED], 0, 1 << 20};
    struct call put, flush;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_stop(&s->c);
    call_init(&put, &s->p);
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_PLAIN, &seg, 1, &put.req), TD_OK);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    assert_int_equal(call_wait(&s->p, &flush, 500), TD_E_DEADLINE);
    child_continue(&s->c);
    assert_int_equal(call_wait(&s->p, &put, 20000), TD_OK);
    assert_int_equal(call_wait(&s->p, &flush, 20000), TD_OK);
    assert_false(s->p.ops->peer_is_one_sided(s->c.peer));
    assert_true(child_sum(&s->c, POOL_PLAIN, 0, 1 << 20) == pair_sum(seg.src, 1 << 20));
}

struct expectation {
    struct state *s;
    uint64_t n;
};
static bool has_received_all(void *arg)
{
    struct expectation *e = arg;
    return child_report(&e->s->c).n_received >= e->n;
}
static void messages_of_any_size_arrive_in_order(void **state)
{
    struct state *s = *state;
    static const size_t sizes[] = {8, 9, 100, 1, 4000, 8192, 70000, 8, TD_XFER_MESSAGE_MAX, 12, 300000, 0, 64};
    enum { ROUNDS = 20 };
    uint64_t n = 0, n_bytes = 0;
    for (unsigned r = 0; r < ROUNDS; r++)
        for (size_t i = 0; i < TD_COUNT(sizes); i++) {
            if (sizes[i] == TD_XFER_MESSAGE_MAX && r % 8 != 0) continue;
            assert_int_equal(pair_send(&s->p, s->c.peer, 9, n++, sizes[i]), TD_OK);
            n_bytes += sizes[i];
        }
    struct expectation e = {s, n};
    assert_true(pair_run(&s->p, has_received_all, &e, 30000));
    struct report r = child_report(&s->c);
    assert_int_equal(r.n_received, n);
    assert_int_equal(r.n_bad, 0);
    assert_int_equal(r.n_message_bytes, n_bytes);
    assert_int_equal(s->p.ops->send(s->c.peer, 1, s->p.mem[POOL_PLAIN], TD_XFER_MESSAGE_MAX + 1), TD_E_TOO_LARGE);
}

static bool is_received_here(void *arg) { return ((struct state *)arg)->p.n_received == 50; }
static void a_receiver_can_answer(void **state)
{
    struct state *s = *state;
    child_open(&s->c, &s->p);
    child_ask(&s->c, (struct ask){.what = 'm', .id = 3, .a = 50, .b = 2000}, NULL, NULL);
    assert_true(pair_run(&s->p, is_received_here, s, 20000));
    assert_int_equal(s->p.n_bad, 0);
    assert_int_equal(s->p.last_id, 3);
    assert_true(s->p.last_from == s->c.incarnation);
}

static void a_closed_peer_cancels_what_is_outstanding(void **state)
{
    struct state *s = *state;
    struct td_xfer_seg seg = {s->p.mem[POOL_SHARED], 0, 4 << 20};
    struct call put[8], flush;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_stop(&s->c);
    for (unsigned i = 0; i < TD_COUNT(put); i++) {
        call_init(&put[i], &s->p);
        assert_int_equal(s->p.ops->put(s->c.peer, POOL_PLAIN, &seg, 1, &put[i].req), TD_OK);
    }
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    assert_int_equal(call_wait(&s->p, &flush, 200), TD_E_DEADLINE);
    s->p.ops->peer_close(s->c.peer);
    assert_int_equal(flush.n_done, 0); /* never from within */
    assert_int_equal(call_wait(&s->p, &flush, 5000), TD_E_CANCELED);
    for (unsigned i = 0; i < TD_COUNT(put); i++) {
        call_wait(&s->p, &put[i], 5000);
        assert_int_equal(put[i].n_done, 1);
    }
    assert_int_equal(put[TD_COUNT(put) - 1].st, TD_E_CANCELED);
    assert_int_equal(s->p.n_lost, 0);
    child_continue(&s->c);
    /* And the same process can be reached again. */
    child_connect(&s->c, &s->p);
    pair_fill(s->p.mem[POOL_SHARED], 4096, 9);
    seg.n_bytes = 4096;
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, &seg, 1, 20000), TD_OK);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    assert_true(child_sum(&s->c, POOL_SHARED, 0, 4096) == pair_sum(seg.src, 4096));
}

static void destroying_cancels_what_is_outstanding_before_it_returns(void **state)
{
    struct state *s = *state;
    struct td_xfer_seg seg = {s->p.mem[POOL_PLAIN], 0, 4 << 20};
    struct call put[4], flush;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_stop(&s->c);
    for (unsigned i = 0; i < TD_COUNT(put); i++) {
        call_init(&put[i], &s->p);
        assert_int_equal(s->p.ops->put(s->c.peer, POOL_PLAIN, &seg, 1, &put[i].req), TD_OK);
    }
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    s->p.ops->destroy(s->p.x);
    s->p.x = NULL;
    for (unsigned i = 0; i < TD_COUNT(put); i++) assert_int_equal(put[i].n_done, 1);
    assert_int_equal(flush.n_done, 1);
    assert_int_equal(flush.st, TD_E_CANCELED);
    assert_int_equal(s->p.n_lost, 0);
    pair_run(&s->p, NULL, NULL, 50); /* mail that was on its way finds nobody */
    child_continue(&s->c);
}

static void damaged_descriptions_are_refused(void **state)
{
    struct state *s = *state;
    struct td_xfer_peer *peer = NULL;
    struct td_err err;
    size_t n_address, n_key;
    const uint8_t *ours = s->p.ops->address(s->p.x, &n_address);
    const uint8_t *key = s->p.ops->pool_key(s->p.pool[POOL_SHARED], &n_key);
    uint64_t base = (uint64_t)(uintptr_t)s->p.mem[POOL_SHARED];
    uint8_t *bad = malloc(n_address + n_key);
    for (size_t i = 0; i < n_address; i++) {
        memcpy(bad, ours, n_address);
        bad[i] ^= 0x10;
        assert_int_not_equal(s->p.ops->peer_open(s->p.x, s->p.incarnation, bad, n_address, NULL, 0, &peer, &err),
                             TD_OK);
        assert_int_equal(s->p.ops->peer_open(s->p.x, s->p.incarnation, ours, i, NULL, 0, &peer, &err), TD_E_INVALID);
    }
    for (size_t i = 0; i < n_key; i++) {
        memcpy(bad, key, n_key);
        bad[i] ^= 0x10;
        struct td_xfer_remote r = {base, bad, n_key};
        assert_int_not_equal(s->p.ops->peer_open(s->p.x, s->p.incarnation, ours, n_address, &r, 1, &peer, &err), TD_OK);
        r = (struct td_xfer_remote){base, key, i};
        assert_int_equal(s->p.ops->peer_open(s->p.x, s->p.incarnation, ours, n_address, &r, 1, &peer, &err),
                         TD_E_INVALID);
    }
    assert_int_equal(s->p.ops->peer_open(s->p.x, 1, ours, n_address, NULL, 0, &peer, &err), TD_E_MISMATCH);
    struct td_xfer_remote moved = {base + 64, key, n_key};
    assert_int_equal(s->p.ops->peer_open(s->p.x, s->p.incarnation, ours, n_address, &moved, 1, &peer, &err),
                     TD_E_MISMATCH);
    assert_null(peer);
    free(bad);
}

static void a_put_that_would_leave_the_pool_is_refused(void **state)
{
    struct state *s = *state;
    struct call c;
    call_init(&c, &s->p);
    struct td_xfer_seg seg = {s->p.mem[POOL_PLAIN], PAIR_POOL_BYTES - 10, 11};
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, &seg, 1, &c.req), TD_E_INVALID);
    seg = (struct td_xfer_seg){s->p.mem[POOL_PLAIN], UINT64_MAX - 4, 8};
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, &seg, 1, &c.req), TD_E_INVALID);
    seg = (struct td_xfer_seg){s->p.mem[POOL_PLAIN], 8, UINT64_MAX - 4};
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, &seg, 1, &c.req), TD_E_INVALID);
    seg = (struct td_xfer_seg){s->p.mem[POOL_PLAIN], 0, 8};
    assert_int_equal(s->p.ops->put(s->c.peer, N_PAIR_POOLS, &seg, 1, &c.req), TD_E_INVALID);
    pair_run(&s->p, NULL, NULL, 20);
    assert_int_equal(c.n_done, 0);
}

static void wrong_transports_are_a_message_not_a_crash(void **state)
{
    (void)state;
    struct td_loop *loop;
    struct td_xfer *x = NULL;
    struct td_err err = {{0}};
    struct td_xfer_options o = {.incarnation = 1, .tls = "carrier-pigeon"};
    assert_int_equal(td_loop_create(&loop), TD_OK);
    assert_int_not_equal(td_xfer_ucx.open(loop, &o, NULL, NULL, &x, &err), TD_OK);
    assert_null(x);
    assert_non_null(strstr(err.text, "carrier-pigeon"));
    td_loop_destroy(loop);
}

static void an_idle_transfer_sleeps(void **state)
{
    struct state *s = *state;
    struct rusage before, after;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    pair_run(&s->p, NULL, NULL, 100);
    getrusage(RUSAGE_SELF, &before);
    usleep(1000000); /* the loop does not even look */
    getrusage(RUSAGE_SELF, &after);
    int64_t us =
        (after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_stime.tv_sec) * 1000000ll +
        (after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec - before.ru_stime.tv_usec);
    assert_true(us < 100000); /* of 1,000,000; keepalives take some */
}

/* Open, connect, put, flush and send with the 1st, 2nd, ... allocation failing: a status, no crash, nothing lost. */
static void any_allocation_may_fail(void **state)
{
    struct state *s = *state;
    enum td_status last = TD_IN_PROGRESS;
    for (unsigned n = 0; n < 30; n++) {
        struct td_loop *loop;
        struct td_xfer *x = NULL;
        struct td_xfer_pool *pool = NULL;
        struct td_xfer_peer *peer = NULL;
        struct td_err err = {{0}};
        struct td_xfer_options o = {.incarnation = 5, .tls = s->tls};
        assert_int_equal(td_loop_create(&loop), TD_OK);
        struct pair p = {.loop = loop, .ops = &td_xfer_ucx};
        td_fault_arm(TD_FAULT_ALLOC, n, 1);
        enum td_status st = td_xfer_ucx.open(loop, &o, NULL, NULL, &x, &err);
        if (st == TD_OK) st = td_xfer_ucx.pool_create(x, 4096, &pool, &err);
        if (st == TD_OK) {
            uint64_t whom;
            p.x = x;
            st = pair_connect(&p, s->c.description.data, s->c.description.n, N_PAIR_POOLS, &peer, &whom, &err);
        }
        struct call put[2], flush;
        unsigned n_posted = 0;
        for (unsigned i = 0; st == TD_OK && i < 2; i++) {
            struct td_xfer_seg seg = {td_xfer_ucx.pool_base(pool), 64, 100};
            call_init(&put[i], &p);
            st = td_xfer_ucx.put(peer, i == 0 ? POOL_SHARED : POOL_PLAIN, &seg, 1, &put[i].req);
            if (st == TD_OK) n_posted++;
        }
        if (st == TD_OK) {
            call_init(&flush, &p);
            st = td_xfer_ucx.flush(peer, &flush.req);
            if (st == TD_OK) {
                enum td_status end = call_wait(&p, &flush, 20000);
                assert_true(end == TD_OK || end == TD_E_NO_MEMORY);
                for (unsigned i = 0; i < n_posted; i++) call_wait(&p, &put[i], 20000);
                st = td_xfer_ucx.send(peer, 1, "x", 1);
            }
        }
        assert_true(st == TD_OK || st == TD_E_NO_MEMORY);
        td_xfer_ucx.destroy(x);
        for (unsigned i = 0; i < n_posted; i++) assert_int_equal(put[i].n_done, 1);
        td_loop_destroy(loop);
        last = st;
        td_fault_disarm_all();
    }
    assert_int_equal(last, TD_OK); /* more than there are allocations */
}

static void ucx_catches_no_crash_signals(void **state)
{
    (void)state;
    static const int crash[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    for (size_t i = 0; i < TD_COUNT(crash); i++) {
        struct sigaction sa;
        Dl_info info;
        void *handler;
        assert_int_equal(sigaction(crash[i], NULL, &sa), 0);
        memcpy(&handler, &sa.sa_handler, sizeof handler);
        if (dladdr(handler, &info) != 0 && info.dli_fname != NULL) assert_null(strstr(info.dli_fname, "libucs"));
    }
}

#define BOTH(test)                                                                                                     \
    {#test " (shm)", test, over_shm, tear_down, NULL}, {#test " (shm, UCX's puts)", test, over_puts, tear_down, NULL}, \
    {                                                                                                                  \
#test " (tcp)", test, over_tcp, tear_down, NULL                                                                \
    }
#define ANY(test)                                                                                                      \
    {                                                                                                                  \
#test " (any)", test, over_any, tear_down, NULL                                                                \
    }
#define SHM(test)                                                                                                      \
    {                                                                                                                  \
#test, test, over_shm, tear_down, NULL                                                                         \
    }

int main(int argc, char **argv)
{
    child_main(argc, argv);
    td_log_open("test", getenv("TD_TEST_LOG") != NULL ? TD_LOG_DEBUG : TD_LOG_WARN);
    const struct CMUnitTest tests[] = {
        BOTH(puts_flush_and_message_arrive),
        ANY(puts_flush_and_message_arrive),
        BOTH(a_thousand_segments_land_where_they_belong),
        BOTH(a_put_of_nothing_is_done),
        SHM(puts_into_a_created_pool_need_nothing_of_the_receiver),
        BOTH(puts_into_plain_memory_wait_for_the_receiver),
        BOTH(messages_of_any_size_arrive_in_order),
        BOTH(a_receiver_can_answer),
        ANY(a_closed_peer_cancels_what_is_outstanding),
        BOTH(a_closed_peer_cancels_what_is_outstanding),
        BOTH(destroying_cancels_what_is_outstanding_before_it_returns),
        SHM(damaged_descriptions_are_refused),
        SHM(a_put_that_would_leave_the_pool_is_refused),
        cmocka_unit_test(wrong_transports_are_a_message_not_a_crash),
        SHM(ucx_catches_no_crash_signals),
        BOTH(an_idle_transfer_sleeps),
        SHM(any_allocation_may_fail),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("common/transfer/ucx", tests, NULL, NULL);
}
