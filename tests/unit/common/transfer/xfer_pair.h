/* Two real processes for tests and the benchmark of the transfer. The program starts itself again as a *child* that
 * opens a transfer of its own and does what it is asked over a socket; the test keeps its own transfer, the *fixture*,
 * on its own loop.
 *
 *   parent: pair_open -> child_start -> child_connect (our way to it) [-> child_ask("open") (its way to us)] -> ...
 * A program that uses this calls child_main first thing in main. */
#ifndef TESTS_UNIT_TRANSFER_XFER_PAIR_H
#define TESTS_UNIT_TRANSFER_XFER_PAIR_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PAIR_WITHOUT_CMOCKA
#include <cmocka.h>
#else /* the benchmark */
#define assert_true(x)         TD_CHECK(x)
#define assert_int_equal(a, b) TD_CHECK((a) == (b))
#define print_error(...)       fprintf(stderr, __VA_ARGS__)
#endif

#include "common/base/bytes.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "common/transfer/xfer.h"

/* No program here uses every helper. */
#pragma GCC diagnostic ignored "-Wunused-function"

#define PAIR_POOL_BYTES (8u << 20)
#define CHILD_FD        3
enum { POOL_SHARED, POOL_PLAIN, N_PAIR_POOLS };

extern char **environ;

/* Reads a pool, which is written as a device writes memory: what orders the two goes another way, here a socket. */
__attribute__((no_sanitize("thread"))) static uint64_t pair_sum(const void *p, size_t n)
{
    const uint8_t *b = p;
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 0x9e3779b97f4a7c15ull + (h >> 29);
    return h;
}
static inline void pair_fill(void *p, size_t n, uint64_t seed)
{
    uint8_t *b = p;
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        b[i] = (uint8_t)(seed >> 56);
    }
}

static struct td_device *pair_device; /* of ends opened from now on; children have none */

/* --- one end, in either process ------------------------------------------------------------------------------------
 */
struct pair {
    struct td_loop *loop;
    const struct td_xfer_ops *ops;
    struct td_xfer *x;
    struct td_xfer_pool *pool[N_PAIR_POOLS];
    uint8_t *mem[N_PAIR_POOLS];
    uint64_t incarnation;
    /* messages: each holds its number and then bytes made from it */
    uint64_t n_received, n_bad, last_from, n_message_bytes;
    uint8_t last_id;
    unsigned n_lost;
    uint64_t lost_incarnation;
    unsigned n_open_requests, n_open_at_loss; /* kept by tests */
};

static void pair_on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    (void)x;
    struct pair *p = user;
    uint64_t number = UINT64_MAX;
    if (n >= 8) memcpy(&number, data, 8);
    if (n >= 8 && number != p->n_received) p->n_bad++; /* lost, repeated or out of order */
    for (size_t i = 8; i < n; i++)
        if (((const uint8_t *)data)[i] != (uint8_t)(number + i)) {
            p->n_bad++;
            break;
        }
    p->n_received++;
    p->n_message_bytes += n;
    p->last_from = from;
    p->last_id = id;
}

static void pair_on_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user)
{
    (void)x, (void)peer;
    struct pair *p = user;
    p->n_lost++;
    p->lost_incarnation = incarnation;
    p->n_open_at_loss = p->n_open_requests;
}

/* tls: UCX's transports; " puts" behind them: no mapping. */
static enum td_status pair_open(struct pair *p, const char *tls_and_how, struct td_err *err)
{
    char tls[64];
    snprintf(tls, sizeof tls, "%s", tls_and_how);
    char *how = strchr(tls, ' ');
    if (how != NULL) *how++ = 0;
    memset(p, 0, sizeof *p);
    p->ops = &td_xfer_ucx;
    p->incarnation = td_rng_system();
    enum td_status st = td_loop_create(&p->loop);
    if (st != TD_OK) return st;
    struct td_xfer_options o = {.transport = "ucx",
                                .incarnation = p->incarnation,
                                .tls = tls,
                                .keepalive_ms = 100,
                                .device = pair_device,
                                .is_mapping_off = how != NULL};
    struct td_xfer_handlers h = {pair_on_message, pair_on_lost};
    st = p->ops->open(p->loop, &o, &h, p, &p->x, err);
    if (st != TD_OK) return st;
    st = p->ops->pool_create(p->x, PAIR_POOL_BYTES, &p->pool[POOL_SHARED], err);
    if (st != TD_OK) return st;
    p->mem[POOL_SHARED] = p->ops->pool_base(p->pool[POOL_SHARED]);
    p->mem[POOL_PLAIN] = aligned_alloc(4096, PAIR_POOL_BYTES);
    memset(p->mem[POOL_PLAIN], 0, PAIR_POOL_BYTES);
    return p->ops->pool_register(p->x, p->mem[POOL_PLAIN], PAIR_POOL_BYTES, &p->pool[POOL_PLAIN], err);
}

static void pair_close(struct pair *p)
{
    p->ops->destroy(p->x);
    td_loop_destroy(p->loop);
    free(p->mem[POOL_PLAIN]);
}

static void pair_describe(struct pair *p, struct td_buf *out)
{
    size_t n;
    const void *a = p->ops->address(p->x, &n);
    td_buf_u64(out, p->incarnation);
    td_buf_blob(out, a, (uint32_t)n);
    for (int i = 0; i < N_PAIR_POOLS; i++) {
        const void *k = p->ops->pool_key(p->pool[i], &n);
        td_buf_u64(out, (uint64_t)(uintptr_t)p->mem[i]);
        td_buf_blob(out, k, (uint32_t)n);
    }
}

static enum td_status pair_connect(struct pair *p, const uint8_t *text, size_t n, unsigned n_pools,
                                   struct td_xfer_peer **out, uint64_t *whom, struct td_err *err)
{
    struct td_reader r = {.p = text, .n = n};
    *whom = td_read_u64(&r);
    uint32_t n_address, n_key;
    const uint8_t *address = td_read_blob(&r, &n_address);
    struct td_xfer_remote remote[N_PAIR_POOLS];
    for (int i = 0; i < N_PAIR_POOLS; i++) {
        remote[i].base = td_read_u64(&r);
        remote[i].key = td_read_blob(&r, &n_key);
        remote[i].n_key = n_key;
    }
    if (r.failed) return td_err_set(err, TD_E_INVALID, "description too short");
    return p->ops->peer_open(p->x, *whom, address, n_address, remote, n_pools, out, err);
}

static enum td_status pair_send(struct pair *p, struct td_xfer_peer *peer, uint8_t id, uint64_t number, size_t n)
{
    uint8_t *m = calloc(1, n == 0 ? 1 : n);
    if (n >= 8) memcpy(m, &number, 8);
    for (size_t i = 8; i < n; i++) m[i] = (uint8_t)(number + i);
    enum td_status st = p->ops->send(peer, id, m, n);
    free(m);
    return st;
}

/* --- running our loop until something is true ----------------------------------------------------------------------
 */
struct pair_wait {
    struct td_timer timer;
    struct pair *p;
    bool (*is_true)(void *arg);
    void *arg;
    uint64_t until_ns;
    bool was_true;
};
static void pair_look(struct td_timer *t)
{
    struct pair_wait *w = TD_CONTAINER_OF(t, struct pair_wait, timer);
    struct td_env *env = td_loop_env(w->p->loop);
    w->was_true = w->is_true != NULL && w->is_true(w->arg);
    if (w->was_true || td_clock_ns() >= w->until_ns)
        td_loop_stop(w->p->loop);
    else
        env->timer_start(env, t, TD_NS_PER_MS);
}
static bool pair_run(struct pair *p, bool (*is_true)(void *arg), void *arg, uint64_t timeout_ms)
{
    struct pair_wait w = {.timer.fire = pair_look,
                          .p = p,
                          .is_true = is_true,
                          .arg = arg,
                          .until_ns = td_clock_ns() + timeout_ms * TD_NS_PER_MS};
    struct td_env *env = td_loop_env(p->loop);
    env->timer_start(env, &w.timer, 0);
    td_loop_run(p->loop);
    return w.was_true;
}

/* --- requests ------------------------------------------------------------------------------------------------------
 */
struct call {
    struct td_xfer_req req;
    struct pair *p;
    unsigned n_done;
    enum td_status st;
};
static void call_done(struct td_xfer_req *req, enum td_status st)
{
    struct call *c = TD_CONTAINER_OF(req, struct call, req);
    c->n_done++;
    c->st = st;
    if (c->p != NULL) c->p->n_open_requests--;
}
static void call_init(struct call *c, struct pair *p)
{
    memset(c, 0, sizeof *c);
    c->req.done = call_done;
    c->p = p;
    c->st = TD_IN_PROGRESS;
    p->n_open_requests++;
}
static bool call_is_done(void *arg) { return ((struct call *)arg)->n_done != 0; }
static enum td_status call_wait(struct pair *p, struct call *c, uint64_t timeout_ms)
{
    return pair_run(p, call_is_done, c, timeout_ms) ? c->st : TD_E_DEADLINE;
}
static enum td_status pair_put(struct pair *p, struct td_xfer_peer *peer, unsigned pool, const struct td_xfer_seg *segs,
                               unsigned n, uint64_t timeout_ms)
{
    struct call c;
    call_init(&c, p);
    enum td_status st = p->ops->put(peer, pool, segs, n, &c.req);
    return st != TD_OK ? st : call_wait(p, &c, timeout_ms);
}
static enum td_status pair_flush(struct pair *p, struct td_xfer_peer *peer, uint64_t timeout_ms)
{
    struct call c;
    call_init(&c, p);
    enum td_status st = p->ops->flush(peer, &c.req);
    return st != TD_OK ? st : call_wait(p, &c, timeout_ms);
}

/* --- the child's side ----------------------------------------------------------------------------------------------
 */
struct ask {
    uint8_t what; /* d describe, s sum, o open a way to us, m messages, w write without end, r report, q quit */
    uint8_t id;
    uint16_t pool;
    uint32_t n_text;
    uint64_t a, b;
};
struct answer {
    int32_t status;
    uint32_t n_text;
    uint64_t value;
};
struct report {
    uint64_t n_received, n_bad, last_from, n_message_bytes, n_lost, last_id;
};

struct child_state {
    struct pair p;
    struct td_xfer_peer *peer;
    struct td_mail mail;
    sem_t handled;
    struct ask ask;
    uint8_t *text;
    struct call endless[4];
    uint64_t n_written;
};

static bool pair_read(int fd, void *p, size_t n)
{
    for (size_t got = 0; got < n;) {
        ssize_t k = read(fd, (uint8_t *)p + got, n - got);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        got += (size_t)k;
    }
    return true;
}
static bool pair_write(int fd, const void *p, size_t n)
{
    for (size_t put = 0; put < n;) {
        ssize_t k = send(fd, (const uint8_t *)p + put, n - put, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        put += (size_t)k;
    }
    return true;
}

static void endless_put(struct child_state *s, struct call *c)
{
    struct td_xfer_seg seg[4];
    for (unsigned i = 0; i < 4; i++)
        seg[i] = (struct td_xfer_seg){s->p.mem[POOL_SHARED] + i * 65536, i * 65536u * 2, 65536};
    (void)s->p.ops->put(s->peer, s->ask.pool, seg, 4, &c->req);
}
static struct child_state *the_child;
static void endless_done(struct td_xfer_req *req, enum td_status st)
{
    the_child->n_written++;
    if (st == TD_OK) endless_put(the_child, TD_CONTAINER_OF(req, struct call, req));
}

static void child_handle(struct td_mail *mail)
{
    struct child_state *s = TD_CONTAINER_OF(mail, struct child_state, mail);
    struct answer a = {0};
    struct td_buf text = {0};
    struct td_err err = {{0}};
    uint64_t whom;
    switch (s->ask.what) {
    case 'd': pair_describe(&s->p, &text); break;
    case 's': a.value = pair_sum(s->p.mem[s->ask.pool] + s->ask.a, s->ask.b); break;
    case 'o':
        a.status = (int)pair_connect(&s->p, s->text, s->ask.n_text, N_PAIR_POOLS, &s->peer, &whom, &err);
        td_buf_str(&text, err.text);
        break;
    case 'm':
        for (uint64_t i = 0; i < s->ask.a && a.status == 0; i++)
            a.status = (int)pair_send(&s->p, s->peer, s->ask.id, i, s->ask.b);
        break;
    case 'w':
        for (unsigned i = 0; i < 4; i++) {
            memset(&s->endless[i], 0, sizeof s->endless[i]);
            s->endless[i].req.done = endless_done;
            endless_put(s, &s->endless[i]);
        }
        break;
    case 'r': {
        struct report r = {s->p.n_received,      s->p.n_bad,  s->p.last_from,
                           s->p.n_message_bytes, s->p.n_lost, s->p.last_id};
        td_buf_put(&text, &r, sizeof r);
        break;
    }
    case 'q': td_loop_stop(s->p.loop); break;
    default: a.status = (int)TD_E_INVALID;
    }
    a.n_text = (uint32_t)text.n;
    pair_write(CHILD_FD, &a, sizeof a);
    if (text.n != 0) pair_write(CHILD_FD, text.data, text.n);
    td_buf_free(&text);
    sem_post(&s->handled);
}

static void *child_listen(void *arg)
{
    struct child_state *s = arg;
    for (;;) {
        if (!pair_read(CHILD_FD, &s->ask, sizeof s->ask)) _exit(0); /* the test has ended */
        s->text = malloc(s->ask.n_text + 1u);
        if (!pair_read(CHILD_FD, s->text, s->ask.n_text)) _exit(0);
        bool is_last = s->ask.what == 'q';
        td_loop_post(s->p.loop, &s->mail);
        sem_wait(&s->handled);
        free(s->text);
        if (is_last) return NULL;
    }
}

/* Call first in main; returns in the parent only. */
static void child_main(int argc, char **argv)
{
#ifdef __SANITIZE_THREAD__
    /* UCX patches libc's madvise with code that takes a lock; at the end of a thread TSan is no longer there to see it.
     * UCX reads this before main, hence once more from the start. */
    if (getenv("UCX_MEM_MMAP_HOOK_MODE") == NULL) {
        setenv("UCX_MEM_MMAP_HOOK_MODE", "none", 1);
        execv("/proc/self/exe", argv);
    }
#endif
    if (argc < 3 || strcmp(argv[1], "--child") != 0) return;
    td_log_open("child", TD_LOG_WARN);
    static struct child_state s;
    the_child = &s;
    struct td_err err = {{0}};
    struct answer hello = {.status = (int)pair_open(&s.p, argv[2], &err)};
    if (hello.status != 0) fprintf(stderr, "child: %s\n", err.text);
    pair_write(CHILD_FD, &hello, sizeof hello);
    if (hello.status != 0) exit(1);
    s.mail.deliver = child_handle;
    sem_init(&s.handled, 0, 0);
    pthread_t listener;
    pthread_create(&listener, NULL, child_listen, &s);
    td_loop_run(s.p.loop);
    pthread_join(listener, NULL);
    pair_close(&s.p);
    exit(0);
}

/* --- the parent's side ---------------------------------------------------------------------------------------------
 */
struct child {
    pid_t pid;
    int fd;
    struct td_xfer_peer *peer;
    uint64_t incarnation;
    struct td_buf description;
};

static void child_start(struct child *c, const char *tls)
{
    int fds[2];
    memset(c, 0, sizeof *c);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int theirs = fds[1];
    if (theirs == CHILD_FD) theirs = dup(fds[1]); /* dup2 to itself would leave it close-on-exec */
    posix_spawn_file_actions_adddup2(&actions, theirs, CHILD_FD);
    char *argv[] = {"xfer_child", "--child", (char *)(uintptr_t)tls, NULL};
    assert_int_equal(posix_spawn(&c->pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    if (theirs != fds[1]) close(theirs);
    c->fd = fds[0];
    struct answer hello;
    assert_true(pair_read(c->fd, &hello, sizeof hello));
    assert_int_equal(hello.status, 0);
}

static struct answer child_ask(struct child *c, struct ask ask, const void *text, struct td_buf *text_out)
{
    struct answer a;
    assert_true(pair_write(c->fd, &ask, sizeof ask));
    if (ask.n_text != 0) assert_true(pair_write(c->fd, text, ask.n_text));
    assert_true(pair_read(c->fd, &a, sizeof a));
    uint8_t *p = malloc(a.n_text + 1u);
    assert_true(pair_read(c->fd, p, a.n_text));
    if (text_out != NULL) td_buf_put(text_out, p, a.n_text);
    free(p);
    return a;
}

/* Our way to it. */
static void child_connect_to(struct child *c, struct pair *p, unsigned n_pools)
{
    struct td_err err = {{0}};
    td_buf_clear(&c->description);
    child_ask(c, (struct ask){.what = 'd'}, NULL, &c->description);
    enum td_status st =
        pair_connect(p, c->description.data, c->description.n, n_pools, &c->peer, &c->incarnation, &err);
    if (st != TD_OK) print_error("%s: %s\n", td_status_name(st), err.text);
    assert_int_equal(st, TD_OK);
}
static void child_connect(struct child *c, struct pair *p) { child_connect_to(c, p, N_PAIR_POOLS); }
static void child_connect_to_first_pool(struct child *c, struct pair *p)
{
    p->ops->peer_close(c->peer);
    child_connect_to(c, p, 1);
}
/* Its way to us. */
static void child_open(struct child *c, struct pair *p)
{
    struct td_buf d = {0};
    pair_describe(p, &d);
    struct answer a = child_ask(c, (struct ask){.what = 'o', .n_text = (uint32_t)d.n}, d.data, NULL);
    assert_int_equal(a.status, TD_OK);
    td_buf_free(&d);
}
static uint64_t child_sum(struct child *c, unsigned pool, uint64_t from, uint64_t n)
{
    return child_ask(c, (struct ask){.what = 's', .pool = (uint16_t)pool, .a = from, .b = n}, NULL, NULL).value;
}
static struct report child_report(struct child *c)
{
    struct td_buf b = {0};
    struct report r = {0};
    child_ask(c, (struct ask){.what = 'r'}, NULL, &b);
    assert_int_equal(b.n, sizeof r);
    memcpy(&r, b.data, sizeof r);
    td_buf_free(&b);
    return r;
}
static void child_reap(struct child *c)
{
    int how;
    while (waitpid(c->pid, &how, 0) < 0 && errno == EINTR) continue;
    close(c->fd);
    td_buf_free(&c->description);
    c->pid = 0;
}
static void child_kill(struct child *c)
{
    kill(c->pid, SIGKILL);
    child_reap(c);
}
/* It closes its transfer and exits; with the exit status that sanitizers may have to say something about. */
static void child_quit(struct child *c)
{
    int how = -1;
    kill(c->pid, SIGCONT); /* a failed test may have left it stopped */
    child_ask(c, (struct ask){.what = 'q'}, NULL, NULL);
    while (waitpid(c->pid, &how, 0) < 0 && errno == EINTR) continue;
    close(c->fd);
    td_buf_free(&c->description);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    c->pid = 0;
}
/* Returns once the kernel has really stopped it. */
static void child_stop(struct child *c)
{
    int how;
    kill(c->pid, SIGSTOP);
    assert_int_equal(waitpid(c->pid, &how, WUNTRACED), c->pid);
    assert_true(WIFSTOPPED(how));
}
static void child_continue(struct child *c) { kill(c->pid, SIGCONT); }

#endif
