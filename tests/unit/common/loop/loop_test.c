#include "common/loop/loop.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/loop/timers_int.h"

static struct td_loop *loop;

static int open_loop(void **state)
{
    (void)state;
    return td_loop_create(&loop) == TD_OK ? 0 : -1;
}

static int close_loop(void **state)
{
    (void)state;
    td_loop_destroy(loop);
    loop = NULL;
    return 0;
}

/* --- timers --------------------------------------------------------------------------------------------------------
 */
struct alarm {
    struct td_timer timer;
    int id, n_fired;
    uint64_t fired_ns;
    void (*then)(struct alarm *a);
};
static int fired_ids[64], n_fired_ids;

static void on_alarm(struct td_timer *t)
{
    struct alarm *a = TD_CONTAINER_OF(t, struct alarm, timer);
    assert_false(t->is_armed);
    a->n_fired++;
    a->fired_ns = td_clock_ns();
    if (n_fired_ids < 64) fired_ids[n_fired_ids++] = a->id;
    if (a->then != NULL) a->then(a);
}

static void set_alarm(struct alarm *a, uint64_t delay_ns)
{
    a->timer.fire = on_alarm;
    struct td_env *env = td_loop_env(loop);
    env->timer_start(env, &a->timer, delay_ns);
}

static void stop_loop(struct alarm *a)
{
    (void)a;
    td_loop_stop(loop);
}

static void stop_after_seven(struct alarm *a)
{
    (void)a;
    if (n_fired_ids == 7) td_loop_stop(loop);
}

static void timers_fire_in_order_of_due_time_and_never_early(void **state)
{
    (void)state;
    static const int delays_ms[] = {9, 3, 6, 1, 3, 12, 0};
    struct alarm a[7] = {0};
    n_fired_ids = 0;
    uint64_t started[7];
    for (int i = 0; i < 7; i++) {
        a[i].id = i;
        a[i].then = stop_after_seven;
        started[i] = td_clock_ns();
        set_alarm(&a[i], (uint64_t)delays_ms[i] * TD_NS_PER_MS);
    }
    assert_int_equal(td_loop_run(loop), TD_OK);
    for (int i = 0; i < 7; i++) {
        /* due_ns rather than the delays: this thread may lose its processor between two starts */
        if (i > 0) assert_true(a[fired_ids[i - 1]].timer.due_ns <= a[fired_ids[i]].timer.due_ns);
        assert_int_equal(a[i].n_fired, 1);
        assert_true(a[i].fired_ns - started[i] >= (uint64_t)delays_ms[i] * TD_NS_PER_MS);
    }
}

static struct alarm *victim;
static void stop_victim_and_restart_self(struct alarm *a)
{
    struct td_env *env = td_loop_env(loop);
    env->timer_stop(env, &victim->timer);
    env->timer_stop(env, &victim->timer); /* twice does no harm */
    if (a->n_fired < 3)
        set_alarm(a, 0);
    else
        td_loop_stop(loop);
}

static void a_timer_may_stop_another_and_restart_itself_while_firing(void **state)
{
    (void)state;
    struct alarm a = {.then = stop_victim_and_restart_self}, b = {0}, late = {0};
    victim = &b;
    set_alarm(&a, TD_NS_PER_MS);
    set_alarm(&b, TD_NS_PER_MS); /* due in the same round, after a */
    set_alarm(&late, TD_NEVER_NS);
    uint64_t end = td_clock_ns() + 5 * TD_NS_PER_MS;
    while (td_clock_ns() < end) {
    }
    assert_int_equal(td_loop_run(loop), TD_OK);
    assert_int_equal(a.n_fired, 3);
    assert_int_equal(b.n_fired, 0);
    assert_int_equal(late.n_fired, 0);
    assert_true(late.timer.is_armed);
}

static void restarting_an_armed_timer_moves_it(void **state)
{
    (void)state;
    struct alarm a = {0}, b = {.then = stop_loop};
    set_alarm(&a, TD_NS_PER_MS);
    set_alarm(&a, 3600 * TD_NS_PER_S);
    set_alarm(&b, 10 * TD_NS_PER_MS);
    td_loop_run(loop);
    assert_int_equal(a.n_fired, 0);
    assert_true(a.timer.is_armed);
}

/* The heap against a sorted array, over many random starts, stops and fires. */
static struct {
    struct td_timer timer;
    uint64_t due, seq;
    bool armed;
} model[200];
static uint64_t last_due, last_seq, n_heap_fired;

static void on_model(struct td_timer *t)
{
    size_t i = (size_t)((char *)t - (char *)model) / sizeof model[0];
    assert_true(model[i].armed);
    assert_true(model[i].due > last_due || (model[i].due == last_due && model[i].seq > last_seq));
    for (size_t k = 0; k < 200; k++) {
        bool before = model[k].due < model[i].due || (model[k].due == model[i].due && model[k].seq < model[i].seq);
        if (k != i && model[k].armed) assert_false(before);
    }
    last_due = model[i].due;
    last_seq = model[i].seq;
    model[i].armed = false;
    n_heap_fired++;
}

static void the_timer_heap_agrees_with_a_plain_list(void **state)
{
    (void)state;
    struct td_timers ts = {0};
    memset(model, 0, sizeof model);
    unsigned seed = 7;
    uint64_t now = 0, seq = 0, n_armed = 0;
    for (int step = 0; step < 200000; step++) {
        size_t i = (size_t)rand_r(&seed) % 200;
        switch (rand_r(&seed) % 8) {
        case 0:
            td_timers_stop(&ts, &model[i].timer);
            model[i].armed = false;
            break;
        case 1:
            now += (uint64_t)rand_r(&seed) % 50;
            last_due = 0;
            last_seq = 0;
            td_timers_fire(&ts, now);
            for (size_t k = 0; k < 200; k++) assert_false(model[k].armed && model[k].due <= now);
            break;
        default:
            model[i].timer.fire = on_model;
            model[i].due = now + 1 + (uint64_t)rand_r(&seed) % 300;
            model[i].seq = ++seq;
            model[i].armed = true;
            td_timers_start(&ts, &model[i].timer, model[i].due);
        }
        for (size_t k = 0; step % 1000 == 0 && k < 200; k++) assert_int_equal(model[k].armed, model[k].timer.is_armed);
    }
    for (size_t k = 0; k < 200; k++) n_armed += model[k].armed;
    uint64_t before = n_heap_fired;
    last_due = 0;
    td_timers_fire(&ts, UINT64_MAX);
    assert_int_equal(n_heap_fired - before, n_armed);
    assert_null(ts.root);
    assert_true(n_heap_fired > 10000);
}

/* --- mail ----------------------------------------------------------------------------------------------------------
 */
#define N_THREADS    4
#define N_PER_THREAD 25000
struct letter {
    struct td_mail mail;
    int thread, seq;
};
static struct letter *letters[N_THREADS];
static int next_seq[N_THREADS], n_delivered;

static void on_letter(struct td_mail *m)
{
    struct letter *x = TD_CONTAINER_OF(m, struct letter, mail);
    assert_int_equal(x->seq, next_seq[x->thread]++);
    if (++n_delivered == N_THREADS * N_PER_THREAD) td_loop_stop(loop);
}

static void *post_letters(void *arg)
{
    struct letter *mine = arg;
    for (int i = 0; i < N_PER_THREAD; i++) td_loop_post(loop, &mine[i].mail);
    return NULL;
}

static void mail_of_four_threads_arrives_once_and_in_the_order_of_each(void **state)
{
    (void)state;
    pthread_t th[N_THREADS];
    memset(next_seq, 0, sizeof next_seq);
    n_delivered = 0;
    for (int t = 0; t < N_THREADS; t++) {
        letters[t] = calloc(N_PER_THREAD, sizeof *letters[t]);
        for (int i = 0; i < N_PER_THREAD; i++)
            letters[t][i] = (struct letter){.mail.deliver = on_letter, .thread = t, .seq = i};
    }
    for (int t = 0; t < N_THREADS; t++) assert_int_equal(pthread_create(&th[t], NULL, post_letters, letters[t]), 0);
    assert_int_equal(td_loop_run(loop), TD_OK);
    for (int t = 0; t < N_THREADS; t++) pthread_join(th[t], NULL);
    assert_int_equal(n_delivered, N_THREADS * N_PER_THREAD);
    for (int t = 0; t < N_THREADS; t++) free(letters[t]);
}

static struct td_mail again;
static int n_again;
static void post_again(struct td_mail *m)
{
    n_again++;
    td_loop_post(loop, m);
}

static void mail_that_posts_itself_forever_does_not_starve_timers(void **state)
{
    (void)state;
    struct alarm a = {.then = stop_loop};
    again.deliver = post_again;
    n_again = 0;
    td_loop_post(loop, &again);
    set_alarm(&a, 5 * TD_NS_PER_MS);
    td_loop_run(loop);
    assert_int_equal(a.n_fired, 1);
    assert_true(n_again > 1);
}

static void count_letter(struct td_mail *m)
{
    (void)m;
    n_delivered++;
}

static void a_flood_of_mail_is_handled_in_bounded_rounds(void **state)
{
    (void)state;
    enum { N = 5000 };
    struct td_mail *m = calloc(N, sizeof *m);
    n_delivered = 0;
    for (int i = 0; i < N; i++) {
        m[i].deliver = count_letter;
        td_loop_post(loop, &m[i]);
    }
    td_loop_run_once(loop, true);
    assert_in_range(n_delivered, 1, N / 2);
    while (n_delivered < N) td_loop_run_once(loop, true);
    free(m);
}

static void stop_by_mail(struct td_mail *m)
{
    free(m);
    td_loop_stop(loop);
}

static void *post_stop(void *arg)
{
    (void)arg;
    struct td_mail *m = calloc(1, sizeof *m);
    m->deliver = stop_by_mail;
    td_loop_post(loop, m);
    return NULL;
}

static void mail_wakes_a_blocked_loop_and_may_free_itself(void **state)
{
    (void)state;
    pthread_t th;
    pthread_create(&th, NULL, post_stop, NULL);
    td_loop_run(loop);
    pthread_join(th, NULL);
}

/* --- signals, work, idle hooks, life -------------------------------------------------------------------------------
 */
static unsigned signal_log[4], n_signal_log;
static void on_signal(int signum, unsigned nth, void *user)
{
    assert_ptr_equal(user, signal_log);
    assert_true(signum == SIGTERM || signum == SIGINT);
    if (n_signal_log < 4) signal_log[n_signal_log++] = nth;
    if (nth == 1)
        raise(SIGINT);
    else
        td_loop_stop(loop);
}

static void signals_arrive_on_the_loop_with_their_count(void **state)
{
    (void)state;
    n_signal_log = 0;
    assert_int_equal(td_loop_on_signal(loop, on_signal, signal_log), TD_OK);
    raise(SIGPIPE); /* ignored since td_loop_create */
    raise(SIGTERM);
    td_loop_run(loop);
    assert_int_equal(n_signal_log, 2);
    assert_int_equal(signal_log[0], 1);
    assert_int_equal(signal_log[1], 2);
}

struct sum {
    struct td_work work;
    uint64_t n, result;
    pthread_t worker;
    bool is_done;
};
static int n_works_open;

static void do_sum(struct td_work *w)
{
    struct sum *s = TD_CONTAINER_OF(w, struct sum, work);
    for (uint64_t i = 1; i <= s->n; i++) s->result += i;
    s->worker = pthread_self();
}

static void sum_done(struct td_work *w)
{
    struct sum *s = TD_CONTAINER_OF(w, struct sum, work);
    s->is_done = true;
    if (--n_works_open == 0) td_loop_stop(loop);
}

static void work_runs_elsewhere_and_is_done_on_the_loop_thread(void **state)
{
    (void)state;
    struct sum s[20];
    memset(s, 0, sizeof s);
    n_works_open = 20;
    for (unsigned i = 0; i < 20; i++) {
        s[i].n = i;
        s[i].work = (struct td_work){.work = do_sum, .done = sum_done};
        td_loop_work(loop, &s[i].work);
    }
    td_loop_run(loop);
    for (unsigned i = 0; i < 20; i++) {
        assert_int_equal(s[i].result, i * (i + 1) / 2);
        assert_false(pthread_equal(s[i].worker, pthread_self()));
    }
}

static void destroying_waits_for_work_in_flight(void **state)
{
    (void)state;
    struct sum s = {.n = 20000000, .work = {.work = do_sum, .done = sum_done}};
    n_works_open = 1;
    td_loop_work(loop, &s.work);
    td_loop_destroy(loop);
    loop = NULL;
    assert_true(s.is_done);
    assert_true(s.result == 20000000ull * 20000001ull / 2);
}

static void destroying_touches_neither_armed_timers_nor_undelivered_mail(void **state)
{
    (void)state;
    struct alarm *a = calloc(1, sizeof *a);
    struct td_mail *m = calloc(1, sizeof *m);
    set_alarm(a, 0);
    m->deliver = stop_by_mail;
    td_loop_post(loop, m);
    free(a); /* the sanitizer would tell */
    free(m);
    td_loop_destroy(loop);
    loop = NULL;
}

struct hook {
    struct td_loop_idle idle;
    struct hook *removes;
    int n;
    bool stops;
};
static void on_idle(struct td_loop_idle *i)
{
    struct hook *h = TD_CONTAINER_OF(i, struct hook, idle);
    h->n++;
    if (h->removes != NULL) td_loop_remove_idle(loop, &h->removes->idle);
    if (h->stops) td_loop_stop(loop);
}

static void idle_hooks_run_before_blocking_and_may_remove_themselves_and_others(void **state)
{
    (void)state;
    struct hook a = {0}, b = {0}, c = {0}, d = {0};
    struct hook *all[] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; i++) {
        all[i]->idle.before_block = on_idle;
        td_loop_add_idle(loop, &all[i]->idle);
    }
    a.removes = &b; /* the next one */
    c.removes = &c;
    td_loop_run_once(loop, false);
    td_loop_run_once(loop, false);
    assert_int_equal(a.n, 2);
    assert_int_equal(b.n, 0);
    assert_int_equal(c.n, 1);
    assert_int_equal(d.n, 2);
    a.removes = NULL;
    d.stops = true;
    td_loop_run(loop); /* would block for ever if a stop from a hook went unseen */
    assert_int_equal(d.n, 3);
    td_loop_remove_idle(loop, &a.idle);
    td_loop_remove_idle(loop, &d.idle);
}

static void a_stop_before_run_makes_run_return_at_once(void **state)
{
    (void)state;
    td_loop_stop(loop);
    assert_int_equal(td_loop_run(loop), TD_OK);
}

static void random_numbers_differ(void **state)
{
    (void)state;
    struct td_env *env = td_loop_env(loop);
    uint64_t a = env->random(env), b = env->random(env);
    assert_true(a != b);
    td_loop_destroy(NULL);
}

#define T(name) cmocka_unit_test_setup_teardown(name, open_loop, close_loop)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(timers_fire_in_order_of_due_time_and_never_early),
        T(a_timer_may_stop_another_and_restart_itself_while_firing),
        T(restarting_an_armed_timer_moves_it),
        T(the_timer_heap_agrees_with_a_plain_list),
        T(mail_of_four_threads_arrives_once_and_in_the_order_of_each),
        T(mail_that_posts_itself_forever_does_not_starve_timers),
        T(a_flood_of_mail_is_handled_in_bounded_rounds),
        T(mail_wakes_a_blocked_loop_and_may_free_itself),
        T(signals_arrive_on_the_loop_with_their_count),
        T(work_runs_elsewhere_and_is_done_on_the_loop_thread),
        T(destroying_waits_for_work_in_flight),
        T(destroying_touches_neither_armed_timers_nor_undelivered_mail),
        T(idle_hooks_run_before_blocking_and_may_remove_themselves_and_others),
        T(a_stop_before_run_makes_run_return_at_once),
        T(random_numbers_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
