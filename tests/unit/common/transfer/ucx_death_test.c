/* Peers that die, stop, and come back, as real processes: what is lost, how soon that is known, and that nothing else
 * is. */
#include <dirent.h>

#include "common/base/tsan.h"
#include "tests/unit/common/transfer/xfer_pair.h"

#define N_LIVES_SHM 20
#define N_LIVES_TCP 10
#define N_CALLS     8

/* A loss is known in milliseconds, which are printed. This only tells it from a timeout of UCX's: under a sanitizer or
 * on a busy machine a second is not much. */
#ifdef TD_HAS_TSAN
#define SOON_MS 20000u
#else
#define SOON_MS 3000u
#endif

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
static int over_any(void **state) { return set_up(state, ""); } /* as UCX chooses */
static int over_puts(void **state) { return set_up(state, "shm puts"); }
static int over_tcp(void **state) { return set_up(state, "tcp"); }
static int tear_down(void **state)
{
    struct state *s = *state;
    if (s->c.pid != 0) child_quit(&s->c);
    pair_close(&s->p);
    free(s);
    return 0;
}

static bool is_lost(void *arg) { return ((struct pair *)arg)->n_lost != 0; }

/* --- the receiver dies ---------------------------------------------------------------------------------------------
 */

/* Puts without a pause, N_CALLS at a time, until the peer is lost. */
struct stream {
    struct pair *p;
    struct td_xfer_peer *peer;
    struct slot {
        struct td_xfer_req req;
        struct stream *s;
        bool is_out;
    } slot[N_CALLS];
    uint64_t n_ok, n_lost, n_other, n_double;
    bool is_refused;
};
static void slot_post(struct slot *c)
{
    struct stream *s = c->s;
    static struct td_xfer_seg seg[3];
    for (unsigned i = 0; i < 3; i++)
        seg[i] = (struct td_xfer_seg){s->p->mem[POOL_SHARED] + i * 100000u, i * 1000000u, 100000};
    bool is_flush = s->n_ok % 5 == 4;
    c->is_out = true;
    s->p->n_open_requests++;
    enum td_status st =
        is_flush ? s->p->ops->flush(s->peer, &c->req) : s->p->ops->put(s->peer, POOL_SHARED, seg, 3, &c->req);
    if (st == TD_OK) return;
    assert_int_equal(st, TD_E_PEER_LOST);
    c->is_out = false;
    s->p->n_open_requests--;
    s->is_refused = true;
}
static void slot_done(struct td_xfer_req *req, enum td_status st)
{
    struct slot *c = TD_CONTAINER_OF(req, struct slot, req);
    struct stream *s = c->s;
    if (!c->is_out) s->n_double++;
    c->is_out = false;
    s->p->n_open_requests--;
    if (st == TD_OK)
        s->n_ok++;
    else if (st == TD_E_PEER_LOST)
        s->n_lost++;
    else
        s->n_other++;
    if (st == TD_OK) slot_post(c);
}
static void stream_start(struct stream *s, struct pair *p, struct td_xfer_peer *peer)
{
    *s = (struct stream){.p = p, .peer = peer};
    for (unsigned i = 0; i < N_CALLS; i++) {
        s->slot[i] = (struct slot){.req.done = slot_done, .s = s};
        slot_post(&s->slot[i]);
    }
}

static void receivers_die_in_mid_put(struct state *s, unsigned n_lives)
{
    uint64_t worst_ns = 0;
    for (unsigned life = 0; life < n_lives; life++) {
        static struct stream stream;
        stream_start(&stream, &s->p, s->c.peer);
        pair_run(&s->p, NULL, NULL, 2 + life * 7 % 23);
        assert_int_equal(s->p.n_lost, 0);
        uint64_t killed_ns = td_clock_ns();
        kill(s->c.pid, SIGKILL); /* not reaped yet: a zombie is as dead as any */
        assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
        uint64_t took_ns = td_clock_ns() - killed_ns;
        if (took_ns > worst_ns) worst_ns = took_ns;
        assert_int_equal(s->p.n_open_at_loss, 0); /* requests first, then the loss */
        assert_true(s->p.lost_incarnation == s->c.incarnation);
        assert_int_equal(stream.n_double, 0);
        assert_int_equal(stream.n_other, 0);
        for (unsigned i = 0; i < N_CALLS; i++) assert_false(stream.slot[i].is_out);
        pair_run(&s->p, NULL, NULL, 20);
        assert_int_equal(s->p.n_lost, 1); /* once */
        /* From now on it says so at once. */
        struct call c;
        call_init(&c, &s->p);
        assert_int_equal(s->p.ops->flush(s->c.peer, &c.req), TD_E_PEER_LOST);
        assert_int_equal(s->p.ops->send(s->c.peer, 1, "x", 1), TD_E_PEER_LOST);
        s->p.n_open_requests--;
        s->p.ops->peer_close(s->c.peer);
        /* Its successor works; its own description does not any more. */
        struct td_buf old = {0};
        td_buf_put(&old, s->c.description.data, s->c.description.n);
        child_reap(&s->c);
        struct td_xfer_peer *ghost = NULL;
        uint64_t whom;
        struct td_err err;
        assert_int_equal(pair_connect(&s->p, old.data, old.n, N_PAIR_POOLS, &ghost, &whom, &err), TD_E_PEER_LOST);
        td_buf_free(&old);
        s->p.n_lost = 0;
        child_start(&s->c, s->tls);
        child_connect(&s->c, &s->p);
        pair_fill(s->p.mem[POOL_SHARED], 65536, life);
        struct td_xfer_seg seg = {s->p.mem[POOL_SHARED], 777, 65536};
        assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, &seg, 1, 20000), TD_OK);
        assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
        assert_true(child_sum(&s->c, POOL_SHARED, 777, 65536) == pair_sum(seg.src, 65536));
    }
    print_message("%u receivers died over %s; loss known after at most %.1f ms\n", n_lives,
                  s->tls[0] != 0 ? s->tls : "what UCX chose", (double)worst_ns / 1e6);
    assert_true(worst_ns < SOON_MS * TD_NS_PER_MS);
}

static void a_receiver_that_dies_in_mid_put_is_lost_once_and_replaced(void **state)
{
    struct state *s = *state;
    receivers_die_in_mid_put(s, strcmp(s->tls, "tcp") == 0 ? N_LIVES_TCP : N_LIVES_SHM);
}

static void an_idle_peer_that_dies_is_noticed(void **state)
{
    struct state *s = *state;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    pair_run(&s->p, NULL, NULL, 50);
    uint64_t killed_ns = td_clock_ns();
    kill(s->c.pid, SIGKILL);
    assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
    assert_true(td_clock_ns() - killed_ns < SOON_MS * TD_NS_PER_MS);
    child_reap(&s->c);
}

/* --- the sender dies -----------------------------------------------------------------------------------------------
 */

static void senders_die(struct state *s, unsigned n_lives, bool have_way_back)
{
    for (unsigned life = 0; life < n_lives; life++) {
        if (!have_way_back) s->p.ops->peer_close(s->c.peer);
        child_open(&s->c, &s->p);
        child_ask(&s->c, (struct ask){.what = 'w', .pool = POOL_SHARED}, NULL, NULL);
        pair_run(&s->p, NULL, NULL, 20 + life * 7 % 23);
        uint64_t killed_ns = td_clock_ns();
        kill(s->c.pid, SIGKILL);
        if (have_way_back) {
            assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
            assert_true(td_clock_ns() - killed_ns < SOON_MS * TD_NS_PER_MS);
            assert_true(s->p.lost_incarnation == s->c.incarnation);
            s->p.ops->peer_close(s->c.peer);
        } else {
            pair_run(&s->p, NULL, NULL, 300); /* more than a keepalive interval */
        }
        child_reap(&s->c);
        s->p.n_lost = 0;
        child_start(&s->c, s->tls);
        child_connect(&s->c, &s->p);
        assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    }
}
static void a_sender_that_dies_in_mid_put_is_lost(void **state) { senders_die(*state, 6, true); }
static void a_sender_that_we_know_no_way_to_may_die(void **state) { senders_die(*state, 6, false); }

static bool has_messages(void *arg) { return ((struct pair *)arg)->n_received > 20; }
static bool is_deaf(struct pair *p)
{
    struct td_xfer_stats st;
    p->ops->stats(p->x, &st);
    return st.is_deaf;
}
static bool has_messages_or_is_deaf(void *arg) { return has_messages(arg) || is_deaf(arg); }

/* Killed in mid-burst, a sender may leave the shared queue broken (ucx_probe.c). Then that is said, and a new process
 * helps. */
static void a_sender_that_dies_among_messages_is_lost(void **state)
{
    struct state *s = *state;
    unsigned n_deaf = 0;
    for (unsigned life = 0; life < 8; life++) {
        child_open(&s->c, &s->p);
        child_ask(&s->c, (struct ask){.what = 'm', .id = 1, .a = 2000, .b = 100}, NULL, NULL);
        assert_true(pair_run(&s->p, has_messages_or_is_deaf, &s->p, 10000));
        kill(s->c.pid, SIGKILL);
        assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
        assert_int_equal(s->p.n_bad, 0); /* a prefix of them, in order */
        s->p.ops->peer_close(s->c.peer);
        child_reap(&s->c);
        if (is_deaf(&s->p)) {
            struct td_err err;
            n_deaf++;
            assert_string_equal(s->tls, "shm");
            pair_close(&s->p);
            assert_int_equal(pair_open(&s->p, s->tls, &err), TD_OK);
        }
        s->p.n_lost = s->p.n_received = 0;
        child_start(&s->c, s->tls);
        child_connect(&s->c, &s->p);
    }
    print_message("8 senders died among messages over %s; %u times that left us deaf\n", s->tls, n_deaf);
}

/* --- neither dies --------------------------------------------------------------------------------------------------
 */

static void a_stopped_process_is_not_lost(void **state)
{
    struct state *s = *state;
    struct td_xfer_seg seg = {s->p.mem[POOL_SHARED], 0, 1 << 20};
    struct call put;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_stop(&s->c);
    call_init(&put, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_PLAIN, &seg, 1, &put.req), TD_OK);
    pair_run(&s->p, NULL, NULL, 1200); /* many keepalive intervals */
    assert_int_equal(s->p.n_lost, 0);
    assert_int_equal(put.n_done, 0);
    child_continue(&s->c);
    assert_int_equal(call_wait(&s->p, &put, 20000), TD_OK);
    assert_int_equal(s->p.n_lost, 0);
}

static void a_peer_that_exits_in_order_is_lost_too(void **state)
{
    struct state *s = *state;
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
    child_quit(&s->c);
    assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
}

/* What a process sent before it left in order is not lost with it. */
static void last_words_arrive(void **state)
{
    struct state *s = *state;
    for (unsigned round = 0; round < 5; round++) {
        child_open(&s->c, &s->p);
        child_ask(&s->c, (struct ask){.what = 'm', .id = 1, .a = 30, .b = 1000}, NULL, NULL);
        child_quit(&s->c);
        assert_true(pair_run(&s->p, is_lost, &s->p, 10000));
        assert_int_equal(s->p.n_received, 30);
        assert_int_equal(s->p.n_bad, 0);
        s->p.ops->peer_close(s->c.peer);
        s->p.n_lost = s->p.n_received = 0;
        child_start(&s->c, s->tls);
        child_connect(&s->c, &s->p);
    }
}

/* --- what stays behind ---------------------------------------------------------------------------------------------
 */

static pid_t killed[3];

/* System V segments that one of them made. */
static unsigned count_segments(void)
{
    unsigned n = 0;
    char line[512];
    FILE *f = fopen("/proc/sysvipc/shm", "re");
    if (f == NULL) return 0;
    while (fgets(line, sizeof line, f) != NULL) { /* key shmid perms size cpid ... */
        long key, id, perms, size, creator;
        if (sscanf(line, "%ld %ld %lo %ld %ld", &key, &id, (unsigned long *)&perms, &size, &creator) != 5) continue;
        for (size_t i = 0; i < TD_COUNT(killed); i++)
            if (creator == killed[i]) n++;
    }
    fclose(f);
    return n;
}
static unsigned count_files(void)
{
    unsigned n = 0;
    DIR *d = opendir("/dev/shm");
    struct dirent *e;
    while (d != NULL && (e = readdir(d)) != NULL)
        if (strstr(e->d_name, "ucx_shm_posix") != NULL) n++;
    if (d != NULL) closedir(d);
    return n;
}
static bool has_no_orphans(void *arg)
{
    (void)arg;
    return count_segments() == 0;
}
static void the_killed_leave_no_shared_memory_behind(void **state)
{
    (void)state;
    struct pair p;
    struct td_err err;
    unsigned n_files = count_files();
    for (unsigned i = 0; i < 3; i++) {
        struct child c;
        child_start(&c, i == 2 ? "posix" : "shm");
        assert_int_equal(pair_open(&p, i == 2 ? "posix" : "shm", &err), TD_OK);
        child_connect(&c, &p);
        assert_int_equal(pair_flush(&p, c.peer, 20000), TD_OK);
        killed[i] = c.pid;
        child_kill(&c);
        pair_run(&p, is_lost, &p, 10000);
        pair_close(&p);
    }
    struct td_loop *loop;
    assert_int_equal(td_loop_create(&loop), TD_OK);
    p.loop = loop;
    assert_true(pair_run(&p, has_no_orphans, NULL, 10000));
    td_loop_destroy(loop);
    assert_true(count_files() <= n_files);
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

int main(int argc, char **argv)
{
    child_main(argc, argv);
    td_log_open("test", getenv("TD_TEST_LOG") != NULL ? TD_LOG_DEBUG : TD_LOG_WARN);
    const struct CMUnitTest tests[] = {
        BOTH(a_receiver_that_dies_in_mid_put_is_lost_once_and_replaced),
        ANY(a_receiver_that_dies_in_mid_put_is_lost_once_and_replaced),
        BOTH(an_idle_peer_that_dies_is_noticed),
        BOTH(a_sender_that_dies_in_mid_put_is_lost),
        BOTH(a_sender_that_we_know_no_way_to_may_die),
        BOTH(a_sender_that_dies_among_messages_is_lost),
        BOTH(a_stopped_process_is_not_lost),
        BOTH(a_peer_that_exits_in_order_is_lost_too),
        BOTH(last_words_arrive),
        cmocka_unit_test(the_killed_leave_no_shared_memory_behind),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("common/transfer/ucx_death", tests, NULL, NULL);
}
