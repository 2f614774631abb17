/* Puts by a device into memory of another process that is mapped here, with a device that is a thread: it does what its
 * stream holds, in order, when the test lets it. */
#include "kernels/device.h"
#include "tests/unit/common/transfer/xfer_pair.h"

/* --- a device that can be held -------------------------------------------------------------------------------------
 */
struct job {
    struct td_list link;
    struct td_piece piece; /* to NULL: a call */
    void (*fn)(void *arg);
    void *arg;
};
static struct {
    struct td_backend backend;
    struct td_device device;
    struct td_stream stream;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct td_list jobs;
    bool is_held, is_quitting, is_refusing, is_busy;
    unsigned n_scatters, n_copies;
    pthread_t thread;
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Written as a device writes, and read by a process that is told another way. */
__attribute__((no_sanitize("thread"))) static void move(const struct td_piece *p)
{
    volatile uint8_t *to = p->to;
    const uint8_t *from = p->from;
    for (uint64_t i = 0; i < p->n_bytes; i++) to[i] = from[i];
}

static void *fake_main(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&fake.lock);
    for (;;) {
        while (!fake.is_quitting && (fake.is_held || td_list_is_empty(&fake.jobs)))
            pthread_cond_wait(&fake.changed, &fake.lock);
        if (fake.is_quitting) break;
        struct job *j = TD_LIST_ENTRY(fake.jobs.next, struct job, link);
        td_list_remove(&j->link);
        fake.is_busy = true;
        pthread_mutex_unlock(&fake.lock);
        if (j->fn != NULL)
            j->fn(j->arg);
        else
            move(&j->piece);
        free(j);
        pthread_mutex_lock(&fake.lock);
        fake.is_busy = false;
        pthread_cond_broadcast(&fake.changed);
    }
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

static void enqueue(struct job j)
{
    struct job *k = malloc(sizeof *k);
    *k = j;
    pthread_mutex_lock(&fake.lock);
    td_list_push_back(&fake.jobs, &k->link);
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
}
static void hold(bool is_held)
{
    pthread_mutex_lock(&fake.lock);
    fake.is_held = is_held;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
}

static enum td_status fake_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n)
{
    (void)s;
    if (fake.is_refusing) return TD_E_DEVICE;
    fake.n_scatters++;
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal((((uintptr_t)pieces[i].from | (uintptr_t)pieces[i].to) | pieces[i].n_bytes) & 15, 0);
        enqueue((struct job){.piece = pieces[i]});
    }
    return TD_OK;
}
static enum td_status fake_copy(struct td_stream *s, void *to, const void *from, size_t n)
{
    (void)s;
    fake.n_copies++;
    enqueue((struct job){.piece = {from, to, n}});
    return TD_OK;
}
static enum td_status fake_call(struct td_stream *s, void (*fn)(void *arg), void *arg)
{
    (void)s;
    enqueue((struct job){.fn = fn, .arg = arg});
    return TD_OK;
}
static enum td_status fake_sync(struct td_stream *s)
{
    (void)s;
    pthread_mutex_lock(&fake.lock);
    while (fake.is_busy || !td_list_is_empty(&fake.jobs)) pthread_cond_wait(&fake.changed, &fake.lock);
    pthread_mutex_unlock(&fake.lock);
    return TD_OK;
}
static enum td_status fake_stream_create(struct td_device *d, struct td_stream **out)
{
    fake.stream.device = d;
    *out = &fake.stream;
    return TD_OK;
}
static void fake_stream_destroy(struct td_stream *s) { (void)fake_sync(s); }

struct state {
    struct pair p;
    struct child c;
};
static int set_up(void **state)
{
    struct td_err err = {{0}};
    struct state *s = calloc(1, sizeof *s);
    fake.backend = (struct td_backend){.name = "fake",
                                       .is_on_host = true,
                                       .side_stream_create = fake_stream_create,
                                       .stream_destroy = fake_stream_destroy,
                                       .stream_sync = fake_sync,
                                       .scatter = fake_scatter,
                                       .copy = fake_copy,
                                       .call = fake_call};
    fake.device.backend = &fake.backend;
    td_list_init(&fake.jobs);
    fake.is_held = fake.is_quitting = fake.is_refusing = fake.is_busy = false;
    fake.n_scatters = fake.n_copies = 0;
    assert_int_equal(pthread_create(&fake.thread, NULL, fake_main, NULL), 0);
    pair_device = &fake.device;
    assert_int_equal(pair_open(&s->p, "shm", &err), TD_OK);
    child_start(&s->c, "shm");
    child_connect_to(&s->c, &s->p, 1); /* its allocated pool */
    pair_fill(s->p.mem[POOL_SHARED], 2 << 20, 11);
    *state = s;
    return 0;
}
static void stop_fake(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.is_quitting = true;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    pthread_join(fake.thread, NULL);
}
static int tear_down(void **state)
{
    struct state *s = *state;
    hold(false);
    if (s->c.pid != 0) child_quit(&s->c);
    if (s->p.x != NULL) pair_close(&s->p);
    stop_fake();
    free(s);
    return 0;
}

/* --- */

static const struct td_xfer_seg *two_pages(const struct state *s)
{
    static struct td_xfer_seg seg[2];
    seg[0] = (struct td_xfer_seg){s->p.mem[POOL_SHARED], 3 << 16, 1 << 16};
    seg[1] = (struct td_xfer_seg){s->p.mem[POOL_SHARED] + (5 << 16), 1 << 16, 1 << 16};
    return seg;
}

static void the_device_puts_and_says_when(void **state)
{
    struct state *s = *state;
    struct call put, flush;
    const struct td_xfer_seg *seg = two_pages(s);
    assert_string_equal(s->p.ops->peer_transport(s->c.peer), "sysv mapped");
    assert_true(s->p.ops->peer_is_one_sided(s->c.peer));
    hold(true);
    call_init(&put, &s->p);
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, seg, 2, &put.req), TD_OK);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    assert_int_equal(call_wait(&s->p, &flush, 200), TD_E_DEADLINE);
    assert_int_equal(put.n_done, 0);
    hold(false);
    assert_int_equal(call_wait(&s->p, &flush, 20000), TD_OK);
    assert_int_equal(put.n_done, 1); /* before the flush that covers it */
    assert_int_equal(put.st, TD_OK);
    assert_int_equal(fake.n_scatters, 1);
    for (int i = 0; i < 2; i++)
        assert_true(child_sum(&s->c, POOL_SHARED, seg[i].dst_offset, 1 << 16) == pair_sum(seg[i].src, 1 << 16));
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK); /* of nothing */
}

static void odd_bytes_are_copies_of_their_own(void **state)
{
    struct state *s = *state;
    struct td_xfer_seg seg[3] = {{s->p.mem[POOL_SHARED] + 1, 64, 1000},
                                 {s->p.mem[POOL_SHARED] + 4096, 4096, 4096},
                                 {s->p.mem[POOL_SHARED] + 9000, 9000, 0}};
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, seg, 3, 20000), TD_OK);
    assert_int_equal(fake.n_scatters, 1);
    assert_int_equal(fake.n_copies, 1);
    for (int i = 0; i < 2; i++)
        assert_true(child_sum(&s->c, POOL_SHARED, seg[i].dst_offset, seg[i].n_bytes) ==
                    pair_sum(seg[i].src, seg[i].n_bytes));
}

static void a_device_that_fails_ends_the_put(void **state)
{
    struct state *s = *state;
    fake.is_refusing = true;
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, two_pages(s), 2, 20000), TD_E_DEVICE);
    assert_int_equal(pair_flush(&s->p, s->c.peer, 20000), TD_OK);
}

static void many_puts_end_each_on_its_own(void **state)
{
    struct state *s = *state;
    enum { N = 40 };
    static struct call put[N];
    struct call flush;
    hold(true);
    for (unsigned i = 0; i < N; i++) {
        struct td_xfer_seg seg = {s->p.mem[POOL_SHARED] + i * 4096u, (N - i) * 4096u, 4096};
        call_init(&put[i], &s->p);
        assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, &seg, 1, &put[i].req), TD_OK);
    }
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    assert_int_equal(call_wait(&s->p, &put[0], 100), TD_E_DEADLINE);
    hold(false);
    assert_int_equal(call_wait(&s->p, &flush, 20000), TD_OK);
    for (unsigned i = 0; i < N; i++) {
        assert_int_equal(put[i].n_done, 1);
        assert_int_equal(put[i].st, TD_OK);
        assert_true(child_sum(&s->c, POOL_SHARED, (N - i) * 4096u, 4096) ==
                    pair_sum(s->p.mem[POOL_SHARED] + i * 4096u, 4096));
    }
}

/* The source stays in use until the device is through, whatever became of the peer. */
static void a_closed_peer_waits_for_the_device(void **state)
{
    struct state *s = *state;
    struct call put;
    hold(true);
    call_init(&put, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, two_pages(s), 2, &put.req), TD_OK);
    s->p.ops->peer_close(s->c.peer);
    assert_int_equal(call_wait(&s->p, &put, 500), TD_E_DEADLINE);
    hold(false);
    assert_int_not_equal(call_wait(&s->p, &put, 20000), TD_E_DEADLINE);
    assert_int_equal(put.n_done, 1);
}

static bool is_lost(void *arg) { return ((struct pair *)arg)->n_lost != 0; }

/* Killed under a put: the put ends with the device, then the loss is told, once; its successor has a mapping of its own
 * and gets nothing that was meant for the dead. */
static void a_dead_peer_is_lost_when_the_device_is_through(void **state)
{
    struct state *s = *state;
    struct call put, flush;
    hold(true);
    call_init(&put, &s->p);
    call_init(&flush, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, two_pages(s), 2, &put.req), TD_OK);
    assert_int_equal(s->p.ops->flush(s->c.peer, &flush.req), TD_OK);
    child_kill(&s->c);
    assert_int_equal(call_wait(&s->p, &put, 1000), TD_E_DEADLINE);
    assert_int_equal(s->p.n_lost, 0);
    hold(false);
    assert_true(pair_run(&s->p, is_lost, &s->p, 20000));
    assert_int_equal(put.n_done, 1);
    assert_int_equal(flush.n_done, 1);
    struct td_xfer_seg seg = {s->p.mem[POOL_SHARED], 0, 4096};
    struct call late;
    call_init(&late, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, &seg, 1, &late.req), TD_E_PEER_LOST);
    s->p.ops->peer_close(s->c.peer);

    child_start(&s->c, "shm");
    child_connect_to(&s->c, &s->p, 1);
    uint8_t *zeros = calloc(1, 1 << 16);
    assert_true(child_sum(&s->c, POOL_SHARED, 3 << 16, 1 << 16) == pair_sum(zeros, 1 << 16));
    free(zeros);
    const struct td_xfer_seg *again = two_pages(s);
    assert_int_equal(pair_put(&s->p, s->c.peer, POOL_SHARED, again, 2, 20000), TD_OK);
    assert_true(child_sum(&s->c, POOL_SHARED, 3 << 16, 1 << 16) == pair_sum(again[0].src, 1 << 16));
}

static void *let_go_later(void *arg)
{
    (void)arg;
    usleep(300000);
    hold(false);
    return NULL;
}

static void destroying_waits_for_the_device(void **state)
{
    struct state *s = *state;
    struct call put;
    pthread_t later;
    hold(true);
    call_init(&put, &s->p);
    assert_int_equal(s->p.ops->put(s->c.peer, POOL_SHARED, two_pages(s), 2, &put.req), TD_OK);
    pthread_create(&later, NULL, let_go_later, NULL);
    s->p.ops->destroy(s->p.x);
    assert_int_equal(put.n_done, 1);
    assert_true(td_list_is_empty(&fake.jobs));
    pthread_join(later, NULL);
    td_loop_destroy(s->p.loop);
    free(s->p.mem[POOL_PLAIN]);
    s->p.x = NULL;
}

int main(int argc, char **argv)
{
    child_main(argc, argv);
    td_log_open("test", getenv("TD_TEST_LOG") != NULL ? TD_LOG_DEBUG : TD_LOG_WARN);
#define WITH(test)                                                                                                     \
    {                                                                                                                  \
#test, test, set_up, tear_down, NULL                                                                           \
    }
    const struct CMUnitTest tests[] = {
        WITH(the_device_puts_and_says_when),
        WITH(odd_bytes_are_copies_of_their_own),
        WITH(a_device_that_fails_ends_the_put),
        WITH(a_closed_peer_waits_for_the_device),
        WITH(a_dead_peer_is_lost_when_the_device_is_through),
        WITH(destroying_waits_for_the_device),
        WITH(many_puts_end_each_on_its_own),
    };
    return cmocka_run_group_tests_name("ucx_mapped", tests, NULL, NULL);
}
