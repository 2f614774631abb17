/* The in-process twin on a virtual clock: same contract, and trouble that repeats by seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/transfer/memory.h"

#define N_BYTES 4096u
#define MS      TD_NS_PER_MS

/* --- a clock that jumps from timer to timer ------------------------------------------------------------------------
 */
struct world {
    struct td_env env;
    struct td_list timers;
    uint64_t now_ns, n_random;
};
static uint64_t world_now(struct td_env *env) { return TD_CONTAINER_OF(env, struct world, env)->now_ns; }
static void world_stop(struct td_env *env, struct td_timer *t)
{
    (void)env;
    if (!t->is_armed) return;
    t->is_armed = false;
    td_list_remove(&t->link);
}
static void world_start(struct td_env *env, struct td_timer *t, uint64_t delay_ns)
{
    struct world *w = TD_CONTAINER_OF(env, struct world, env);
    world_stop(env, t);
    t->due_ns = w->now_ns + delay_ns;
    t->is_armed = true;
    struct td_list *at = &w->timers;
    while (at->prev != &w->timers && TD_LIST_ENTRY(at->prev, struct td_timer, link)->due_ns > t->due_ns) at = at->prev;
    td_list_push_back(at, &t->link); /* before `at` */
}
static uint64_t world_random(struct td_env *env)
{
    uint32_t r[4];
    td_rng_philox(1, TD_CONTAINER_OF(env, struct world, env)->n_random++, 0, r);
    return r[0];
}
static bool world_step(struct world *w)
{
    if (td_list_is_empty(&w->timers)) return false;
    struct td_timer *t = TD_LIST_ENTRY(w->timers.next, struct td_timer, link);
    world_stop(&w->env, t);
    if (t->due_ns > w->now_ns) w->now_ns = t->due_ns;
    t->fire(t);
    return true;
}
static void world_run(struct world *w)
{
    while (world_step(w)) continue;
}
static void world_run_until(struct world *w, uint64_t ns)
{
    while (!td_list_is_empty(&w->timers) && TD_LIST_ENTRY(w->timers.next, struct td_timer, link)->due_ns <= ns)
        world_step(w);
    w->now_ns = ns;
}

/* --- two ends ------------------------------------------------------------------------------------------------------
 */
struct end {
    struct td_xfer *x;
    struct td_xfer_pool *pool;
    uint8_t *mem;
    struct td_xfer_peer *peer; /* to the other */
    unsigned n_messages, n_lost, n_open, n_open_at_loss;
    uint8_t ids[256];
    uint64_t from;
    uint64_t trace; /* of everything that reached this end, and when */
    struct world *w;
    void (*on_done)(struct end *e);
};
struct state {
    struct world w;
    struct end a, b;
};
static const struct td_xfer_ops *const ops = &td_xfer_memory;

static void note(struct end *e, uint64_t what)
{
    e->trace = (e->trace ^ what ^ e->w->now_ns) * 0x9e3779b97f4a7c15ull + 1;
}

static void on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    struct end *e = user;
    assert_ptr_equal(x, e->x);
    assert_true(n == 1 && *(const uint8_t *)data == id);
    if (e->n_messages < sizeof e->ids) e->ids[e->n_messages] = id;
    e->n_messages++;
    e->from = from;
    note(e, id);
}
static void on_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user)
{
    struct end *e = user;
    assert_ptr_equal(x, e->x);
    assert_ptr_equal(peer, e->peer);
    e->n_lost++;
    e->n_open_at_loss = e->n_open;
    note(e, incarnation);
}

struct call {
    struct td_xfer_req req;
    struct end *e;
    unsigned n_done;
    enum td_status st;
};
static void done(struct td_xfer_req *req, enum td_status st)
{
    struct call *c = TD_CONTAINER_OF(req, struct call, req);
    c->n_done++;
    c->st = st;
    c->e->n_open--;
    note(c->e, st);
    if (c->e->on_done != NULL) c->e->on_done(c->e);
}
static struct call *call(struct end *e)
{
    static struct call calls[512];
    static unsigned next;
    struct call *c = &calls[next++ % TD_COUNT(calls)];
    *c = (struct call){.req.done = done, .e = e, .st = TD_IN_PROGRESS};
    e->n_open++;
    return c;
}
static struct call *put(struct end *e, uint64_t from, uint64_t to, uint64_t n)
{
    struct call *c = call(e);
    struct td_xfer_seg s = {e->mem + from, to, n};
    assert_int_equal(ops->put(e->peer, 0, &s, 1, &c->req), TD_OK);
    assert_int_equal(c->n_done, 0);
    return c;
}
static struct call *flush(struct end *e)
{
    struct call *c = call(e);
    assert_int_equal(ops->flush(e->peer, &c->req), TD_OK);
    assert_int_equal(c->n_done, 0);
    return c;
}
static void message(struct end *e, uint8_t id) { assert_int_equal(ops->send(e->peer, id, &id, 1), TD_OK); }

static void end_open(struct state *s, struct end *e, uint64_t incarnation, uint64_t seed,
                     const struct td_xfer_memory_trouble *trouble)
{
    struct td_xfer_options o = {.incarnation = incarnation};
    struct td_xfer_handlers h = {on_message, on_lost};
    memset(e, 0, sizeof *e);
    e->w = &s->w;
    assert_int_equal(td_xfer_memory_open_env(&s->w.env, seed, trouble, &o, &h, e, &e->x, NULL), TD_OK);
    assert_int_equal(ops->pool_create(e->x, N_BYTES, &e->pool, NULL), TD_OK);
    e->mem = ops->pool_base(e->pool);
}
static enum td_status end_connect(struct end *e, const struct end *to, uint64_t incarnation)
{
    size_t n_address, n_key;
    const void *address = ops->address(to->x, &n_address), *key = ops->pool_key(to->pool, &n_key);
    struct td_xfer_remote r = {(uint64_t)(uintptr_t)to->mem, key, n_key};
    return ops->peer_open(e->x, incarnation, address, n_address, &r, 1, &e->peer, NULL);
}
static struct state *begin(uint64_t seed, const struct td_xfer_memory_trouble *trouble)
{
    struct state *s = calloc(1, sizeof *s);
    s->w.env = (struct td_env){world_now, world_start, world_stop, world_random};
    td_list_init(&s->w.timers);
    s->w.now_ns = 1000;
    end_open(s, &s->a, 11, seed, trouble);
    end_open(s, &s->b, 22, seed + 1, trouble);
    assert_int_equal(end_connect(&s->a, &s->b, 22), TD_OK);
    assert_int_equal(end_connect(&s->b, &s->a, 11), TD_OK);
    return s;
}
static void finish(struct state *s)
{
    ops->destroy(s->a.x);
    ops->destroy(s->b.x);
    world_run(&s->w);
    assert_true(td_list_is_empty(&s->w.timers));
    free(s);
}

static const struct td_xfer_memory_trouble slow = {
    .delay_min_ns = MS, .delay_max_ns = 20 * MS, .notice_min_ns = 50 * MS, .notice_max_ns = 100 * MS};

/* --- the contract --------------------------------------------------------------------------------------------------
 */

static void a_flushed_put_has_arrived(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        struct state *s = begin(seed, &slow);
        memset(s->a.mem, 7, N_BYTES);
        struct call *p[8];
        for (unsigned i = 0; i < 8; i++) p[i] = put(&s->a, 0, i * 512, 512);
        struct call *f = flush(&s->a);
        while (f->n_done == 0) assert_true(world_step(&s->w));
        for (unsigned i = 0; i < 8; i++) assert_int_equal(p[i]->st, TD_OK);
        assert_memory_equal(s->b.mem, s->a.mem, N_BYTES); /* at that very moment */
        finish(s);
    }
}

static void a_put_that_is_done_may_still_be_on_its_way(void **state)
{
    (void)state;
    bool was_late = false;
    for (uint64_t seed = 0; seed < 20 && !was_late; seed++) {
        struct state *s = begin(seed, &slow);
        s->a.mem[0] = 9;
        struct call *p = put(&s->a, 0, 0, 1);
        while (p->n_done == 0) world_step(&s->w);
        was_late = s->b.mem[0] != 9;
        world_run(&s->w);
        assert_int_equal(s->b.mem[0], 9);
        finish(s);
    }
    assert_true(was_late);
}

static void bytes_changed_before_done_show(void **state)
{
    (void)state;
    struct state *s = begin(3, &slow);
    s->a.mem[0] = 1;
    struct call *p = put(&s->a, 0, 0, 1);
    s->a.mem[0] = 2; /* a mistake of the caller's: must be seen */
    while (p->n_done == 0) world_step(&s->w);
    s->a.mem[0] = 3; /* allowed: it is done */
    world_run(&s->w);
    assert_int_equal(s->b.mem[0], 2);
    finish(s);
}

static void messages_keep_their_order_and_say_who_sent_them(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        struct state *s = begin(seed, &slow);
        for (unsigned i = 0; i < 40; i++) {
            message(&s->a, (uint8_t)i);
            if (i % 8 == 0) world_step(&s->w);
        }
        world_run(&s->w);
        assert_int_equal(s->b.n_messages, 40);
        for (unsigned i = 0; i < 40; i++) assert_int_equal(s->b.ids[i], i);
        assert_int_equal(s->b.from, 11);
        finish(s);
    }
}

static void messages_overtake_puts_and_puts_messages(void **state)
{
    (void)state;
    unsigned n_first = 0, n_later = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct state *s = begin(seed, &slow);
        s->a.mem[0] = 5;
        put(&s->a, 0, 0, 1);
        message(&s->a, 1);
        while (s->b.n_messages == 0) world_step(&s->w);
        *(s->b.mem[0] == 5 ? &n_later : &n_first) += 1;
        world_run(&s->w);
        finish(s);
    }
    assert_true(n_first > 1 && n_later > 1);
}

static void the_same_seed_gives_the_same_run(void **state)
{
    (void)state;
    struct td_xfer_memory_trouble t = slow;
    t.lose_message_ppm = 200000;
    t.hang_put_ppm = 500000;
    uint64_t trace[3];
    for (unsigned run = 0; run < 3; run++) {
        struct state *s = begin(run == 2 ? 78 : 77, &t);
        for (unsigned i = 0; i < 60; i++) {
            put(&s->a, i, i, 8);
            message(&s->a, (uint8_t)i);
            put(&s->b, i, i, 8);
            message(&s->b, (uint8_t)i);
            if (i % 7 == 0) flush(&s->a);
            world_step(&s->w);
        }
        td_xfer_memory_kill(s->b.x);
        world_run(&s->w);
        trace[run] = s->a.trace ^ (s->b.trace << 1);
        assert_int_equal(s->a.n_lost, 1);
        finish(s);
    }
    assert_true(trace[0] == trace[1]);
    assert_true(trace[0] != trace[2]);
}

static void some_messages_get_lost_when_asked(void **state)
{
    (void)state;
    struct td_xfer_memory_trouble t = {.lose_message_ppm = 300000};
    struct state *s = begin(5, &t);
    for (unsigned i = 0; i < 200; i++) message(&s->a, (uint8_t)i);
    world_run(&s->w);
    assert_in_range(s->b.n_messages, 100, 180);
    for (unsigned i = 1; i < s->b.n_messages; i++) assert_true(s->b.ids[i] > s->b.ids[i - 1]);
    td_xfer_memory_set_trouble(s->a.x, NULL);
    unsigned n = s->b.n_messages;
    for (unsigned i = 0; i < 50; i++) message(&s->a, (uint8_t)i);
    world_run(&s->w);
    assert_int_equal(s->b.n_messages, n + 50);
    finish(s);
}

static void some_messages_arrive_twice_when_asked(void **state)
{
    (void)state;
    struct td_xfer_memory_trouble t = {.delay_max_ns = 1000, .double_message_ppm = 300000};
    struct state *s = begin(6, &t);
    for (unsigned i = 0; i < 100; i++) message(&s->a, (uint8_t)i);
    world_run(&s->w);
    assert_in_range(s->b.n_messages, 110, 160);
    unsigned n_seen[100] = {0};
    for (unsigned i = 0; i < s->b.n_messages; i++) n_seen[s->b.ids[i]]++;
    for (unsigned i = 0; i < 100; i++) assert_in_range(n_seen[i], 1, 2);
    finish(s);
}

static void note_landing(struct td_xfer *x, uint64_t from, void *at, size_t n, const void *data, void *user)
{
    struct state *s = user;
    assert_ptr_equal(x, s->b.x);
    assert_int_not_equal(from, 0);
    assert_ptr_equal(at, s->b.mem + 3);
    assert_int_equal(n, 8);
    assert_memory_equal(data, s->a.mem + 5, n); /* what comes, before it is there */
    assert_memory_not_equal(at, data, n);
    s->b.trace++;
}

static void a_watcher_sees_what_a_put_is_about_to_write(void **state)
{
    (void)state;
    struct state *s = begin(7, NULL);
    td_xfer_memory_watch(s->b.x, note_landing, s);
    memset(s->a.mem + 5, 0x5a, 8);
    uint64_t before = s->b.trace;
    put(&s->a, 5, 3, 8);
    world_run(&s->w);
    assert_true(s->b.trace > before);
    assert_int_equal(s->b.mem[3], 0x5a);
    finish(s);
}

/* --- deaths --------------------------------------------------------------------------------------------------------
 */

static void the_death_of_a_peer_ends_requests_then_is_told_once(void **state)
{
    (void)state;
    unsigned n_hung = 0, n_void = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
        struct td_xfer_memory_trouble t = slow;
        t.hang_put_ppm = 500000;
        struct state *s = begin(seed, &t);
        struct call *c[12];
        for (unsigned i = 0; i < 12; i++) {
            c[i] = i % 4 == 3 ? flush(&s->a) : put(&s->a, 0, 0, 64);
            if (i == 6) {
                world_run_until(&s->w, s->w.now_ns + 5 * MS);
                td_xfer_memory_kill(s->b.x);
            }
        }
        uint64_t died_ns = s->w.now_ns;
        world_run(&s->w);
        assert_int_equal(s->a.n_lost, 1);
        assert_int_equal(s->a.n_open_at_loss, 0);
        assert_in_range(s->w.now_ns - died_ns, 1, 101 * MS);
        for (unsigned i = 0; i < 12; i++) {
            assert_int_equal(c[i]->n_done, 1);
            assert_true(c[i]->st == TD_OK || c[i]->st == TD_E_PEER_LOST);
            if (i > 6) *(c[i]->st == TD_OK ? &n_void : &n_hung) += 1;
        }
        struct call *late = call(&s->a);
        assert_int_equal(ops->flush(s->a.peer, &late->req), TD_E_PEER_LOST);
        assert_int_equal(ops->send(s->a.peer, 1, "x", 1), TD_E_PEER_LOST);
        assert_int_equal(s->b.n_open, 0);
        finish(s);
    }
    assert_true(n_hung > 50 && n_void > 20);
}

static void the_killed_call_nothing_back(void **state)
{
    (void)state;
    struct state *s = begin(9, &slow);
    struct call *p = put(&s->b, 0, 0, 16), *f = flush(&s->b);
    message(&s->a, 1);
    td_xfer_memory_kill(s->b.x);
    world_run(&s->w);
    assert_int_equal(p->n_done + f->n_done, 0);
    assert_int_equal(s->b.n_messages, 0);
    finish(s);
    assert_int_equal(p->n_done + f->n_done, 0);
}

/* What the receiver's quarantine is for. */
static void bytes_of_the_dead_may_land_late(void **state)
{
    (void)state;
    unsigned n_late = 0, n_never = 0, n_part = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
        struct state *s = begin(seed, &slow);
        memset(s->a.mem, 1, N_BYTES);
        struct td_xfer_seg segs[4];
        for (unsigned i = 0; i < 4; i++) segs[i] = (struct td_xfer_seg){s->a.mem, i * 8u, 8};
        struct call *c = call(&s->a);
        assert_int_equal(ops->put(s->a.peer, 0, segs, 4, &c->req), TD_OK);
        td_xfer_memory_kill(s->a.x);
        ops->destroy(s->a.x); /* with its memory: what is on the wire is on the wire */
        s->a.x = NULL;
        world_run(&s->w);
        unsigned n = 0;
        for (unsigned i = 0; i < 4; i++) n += s->b.mem[i * 8];
        *(n == 0 ? &n_never : n == 4 ? &n_late : &n_part) += 1;
        assert_int_equal(s->b.n_lost, 1);
        finish(s);
    }
    assert_true(n_late > 0 && n_never > 0 && n_part > 10);
}

static void a_new_life_is_another_peer_and_old_keys_are_dead(void **state)
{
    (void)state;
    struct state *s = begin(4, NULL);
    size_t n_address, n_key;
    uint8_t address[64], key[64];
    const void *p = ops->address(s->b.x, &n_address);
    memcpy(address, p, n_address);
    p = ops->pool_key(s->b.pool, &n_key);
    memcpy(key, p, n_key);
    uint64_t base = (uint64_t)(uintptr_t)s->b.mem;
    td_xfer_memory_kill(s->b.x);
    ops->destroy(s->b.x);
    world_run(&s->w);
    assert_int_equal(s->a.n_lost, 1);
    ops->peer_close(s->a.peer);
    end_open(s, &s->b, 23, 99, NULL);
    struct td_xfer_remote r = {base, key, n_key};
    struct td_xfer_peer *ghost;
    assert_int_equal(ops->peer_open(s->a.x, 22, address, n_address, &r, 1, &ghost, NULL), TD_E_PEER_LOST);
    assert_int_equal(ops->peer_open(s->a.x, 23, address, n_address, &r, 1, &ghost, NULL), TD_E_MISMATCH);
    assert_int_equal(end_connect(&s->a, &s->b, 23), TD_OK);
    s->a.mem[0] = 77;
    put(&s->a, 0, 0, 1);
    world_run(&s->w);
    assert_int_equal(s->b.mem[0], 77);
    finish(s);
}

static void a_paused_process_is_not_lost_and_its_memory_can_be_written(void **state)
{
    (void)state;
    struct state *s = begin(6, &slow);
    td_xfer_memory_pause(s->b.x, true);
    s->a.mem[0] = 8;
    put(&s->a, 0, 0, 1);
    struct call *f = flush(&s->a), *theirs = put(&s->b, 8, 8, 1);
    for (unsigned i = 0; i < 10; i++) message(&s->a, (uint8_t)i);
    world_run(&s->w);
    assert_int_equal(f->st, TD_OK);
    assert_int_equal(s->b.mem[0], 8);
    assert_int_equal(s->b.n_messages, 0);
    assert_int_equal(theirs->n_done, 0);
    assert_int_equal(s->a.n_lost, 0);
    td_xfer_memory_pause(s->b.x, false);
    message(&s->a, 10);
    world_run(&s->w);
    assert_int_equal(s->b.n_messages, 11);
    for (unsigned i = 0; i < 11; i++) assert_int_equal(s->b.ids[i], i);
    assert_int_equal(theirs->st, TD_OK);
    finish(s);
}

/* --- closing -------------------------------------------------------------------------------------------------------
 */

static void a_closed_peer_cancels_later_and_is_not_lost(void **state)
{
    (void)state;
    struct state *s = begin(2, &slow);
    struct call *p = put(&s->a, 0, 0, 8), *f = flush(&s->a);
    ops->peer_close(s->a.peer);
    assert_int_equal(p->n_done + f->n_done, 0);
    td_xfer_memory_kill(s->b.x);
    world_run(&s->w);
    assert_int_equal(p->st, TD_E_CANCELED);
    assert_int_equal(f->st, TD_E_CANCELED);
    assert_int_equal(p->n_done + f->n_done, 2);
    assert_int_equal(s->a.n_lost, 0);
    finish(s);
}

static void destroying_cancels_before_it_returns(void **state)
{
    (void)state;
    struct state *s = begin(2, &slow);
    struct call *p = put(&s->a, 0, 0, 8), *f = flush(&s->a);
    ops->destroy(s->a.x);
    s->a.x = NULL;
    assert_int_equal(p->st, TD_E_CANCELED);
    assert_int_equal(f->st, TD_E_CANCELED);
    world_run(&s->w);
    assert_int_equal(p->n_done + f->n_done, 2);
    assert_int_equal(s->b.n_lost, 1); /* for its peer that process is gone */
    finish(s);
}

static void destroy_from_done(struct end *e)
{
    e->on_done = NULL;
    ops->destroy(e->x);
    e->x = NULL;
}
static void a_done_may_destroy_everything(void **state)
{
    (void)state;
    for (unsigned how = 0; how < 3; how++) {
        struct state *s = begin(how, &slow);
        struct call *c[4] = {put(&s->a, 0, 0, 8), flush(&s->a), put(&s->a, 0, 0, 8), flush(&s->a)};
        s->a.on_done = destroy_from_done;
        if (how == 1) td_xfer_memory_kill(s->b.x);
        if (how == 2) ops->peer_close(s->a.peer);
        world_run(&s->w);
        for (unsigned i = 0; i < 4; i++) assert_int_equal(c[i]->n_done, 1);
        finish(s);
    }
}

static void a_pool_may_go_while_bytes_are_on_their_way(void **state)
{
    (void)state;
    struct state *s = begin(8, &slow);
    struct call *p = put(&s->a, 0, 0, 8), *f = flush(&s->a);
    ops->pool_destroy(s->b.pool);
    world_run(&s->w);
    assert_int_equal(p->n_done + f->n_done, 2);
    finish(s);
}

static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    struct state *s = begin(1, NULL);
    struct call *c = call(&s->a);
    struct td_xfer_seg bad[] = {
        {s->a.mem, N_BYTES - 4, 5}, {s->a.mem, UINT64_MAX, 2}, {s->a.mem, 2, UINT64_MAX}, {NULL, 0, 1}};
    for (unsigned i = 0; i < TD_COUNT(bad); i++)
        assert_int_equal(ops->put(s->a.peer, 0, &bad[i], 1, &c->req), TD_E_INVALID);
    struct td_xfer_seg good = {s->a.mem, 0, 1};
    assert_int_equal(ops->put(s->a.peer, 1, &good, 1, &c->req), TD_E_INVALID);
    void *big = calloc(1, TD_XFER_MESSAGE_MAX + 1);
    assert_int_equal(ops->send(s->a.peer, 1, big, TD_XFER_MESSAGE_MAX + 1), TD_E_TOO_LARGE);
    free(big);
    struct td_xfer_peer *peer;
    size_t n;
    const void *address = ops->address(s->b.x, &n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ops->peer_open(s->a.x, 22, address, i, NULL, 0, &peer, NULL), TD_E_INVALID);
    assert_int_equal(ops->peer_open(s->a.x, 21, address, n, NULL, 0, &peer, NULL), TD_E_MISMATCH);
    world_run(&s->w);
    assert_int_equal(c->n_done, 0);
    finish(s);
}

static void transports_are_found_by_name(void **state)
{
    (void)state;
    assert_ptr_equal(td_xfer_find("ucx"), &td_xfer_ucx);
    assert_ptr_equal(td_xfer_find("memory"), &td_xfer_memory);
    assert_null(td_xfer_find("smoke"));
    assert_null(td_xfer_find(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flushed_put_has_arrived),
        cmocka_unit_test(a_put_that_is_done_may_still_be_on_its_way),
        cmocka_unit_test(bytes_changed_before_done_show),
        cmocka_unit_test(messages_keep_their_order_and_say_who_sent_them),
        cmocka_unit_test(messages_overtake_puts_and_puts_messages),
        cmocka_unit_test(the_same_seed_gives_the_same_run),
        cmocka_unit_test(some_messages_get_lost_when_asked),
        cmocka_unit_test(some_messages_arrive_twice_when_asked),
        cmocka_unit_test(a_watcher_sees_what_a_put_is_about_to_write),
        cmocka_unit_test(the_death_of_a_peer_ends_requests_then_is_told_once),
        cmocka_unit_test(the_killed_call_nothing_back),
        cmocka_unit_test(bytes_of_the_dead_may_land_late),
        cmocka_unit_test(a_new_life_is_another_peer_and_old_keys_are_dead),
        cmocka_unit_test(a_paused_process_is_not_lost_and_its_memory_can_be_written),
        cmocka_unit_test(a_closed_peer_cancels_later_and_is_not_lost),
        cmocka_unit_test(destroying_cancels_before_it_returns),
        cmocka_unit_test(a_done_may_destroy_everything),
        cmocka_unit_test(a_pool_may_go_while_bytes_are_on_their_way),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(transports_are_found_by_name),
    };
    return cmocka_run_group_tests_name("common/transfer/memory", tests, NULL, NULL);
}
