#include "tests/sim/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/base/rng.h"

#define BEGIN_NS (1000 * TD_NS_PER_S) /* clocks of processes do not begin at 0 */

struct sim_world *sim_world_now;

/* --- draws ----------------------------------------------------------------------------------------------- */

uint64_t sim_draw(struct sim_draws *d, uint64_t min, uint64_t max)
{
    uint32_t r[4];
    td_rng_philox(d->seed, d->n++, d->stream, r);
    uint64_t v = (uint64_t)r[0] << 32 | r[1];
    return max <= min ? min : min + v % (max - min + 1);
}

bool sim_chance(struct sim_draws *d, uint32_t percent) { return sim_draw(d, 1, 100) <= percent; }

/* --- timers: a heap by due time, then by the order of their starts ----------------------------------------- */

static bool is_before(const struct sim_heap_entry *a, const struct sim_heap_entry *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

static void put(struct sim_world *w, uint32_t i, struct sim_heap_entry e)
{
    w->heap[i] = e;
    e.timer->impl[0] = (void *)(uintptr_t)i;
}

static void sift_up(struct sim_world *w, uint32_t i)
{
    struct sim_heap_entry e = w->heap[i];
    for (; i > 0 && is_before(&e, &w->heap[(i - 1) / 2]); i = (i - 1) / 2) put(w, i, w->heap[(i - 1) / 2]);
    put(w, i, e);
}

static void sift_down(struct sim_world *w, uint32_t i)
{
    struct sim_heap_entry e = w->heap[i];
    for (uint32_t c; (c = 2 * i + 1) < w->n_heap; i = c) {
        if (c + 1 < w->n_heap && is_before(&w->heap[c + 1], &w->heap[c])) c++;
        if (!is_before(&w->heap[c], &e)) break;
        put(w, i, w->heap[c]);
    }
    put(w, i, e);
}

static void push(struct sim_world *w, struct td_timer *t, uint64_t due_ns)
{
    if (w->n_heap == w->cap_heap) {
        w->cap_heap = w->cap_heap == 0 ? 256 : w->cap_heap * 2;
        w->heap = realloc(w->heap, w->cap_heap * sizeof *w->heap);
        TD_CHECK(w->heap != NULL);
    }
    w->heap[w->n_heap++] = (struct sim_heap_entry){due_ns, w->n_timers++, t};
    sift_up(w, w->n_heap - 1);
}

static void pull(struct sim_world *w, uint32_t i)
{
    struct sim_heap_entry last = w->heap[--w->n_heap];
    if (i == w->n_heap) return;
    put(w, i, last);
    sift_down(w, i);
    sift_up(w, i);
}

static struct td_loop *host_of(const struct td_timer *t) { return t->impl[1]; }

static void timer_stop(struct td_env *env, struct td_timer *t)
{
    (void)env;
    if (!t->is_armed) return;
    t->is_armed = false;
    struct td_loop *h = host_of(t);
    if (t->impl[0] == h) /* held */
        td_list_remove(&t->link);
    else
        pull(h->world, (uint32_t)(uintptr_t)t->impl[0]);
}

static void timer_start(struct td_env *env, struct td_timer *t, uint64_t delay_ns)
{
    struct td_loop *h = (struct td_loop *)(void *)env;
    timer_stop(env, t);
    TD_CHECK(t->fire != NULL);
    if (h->is_dead) return;
    t->is_armed = true;
    t->impl[1] = h;
    uint64_t now = h->world->now_ns;
    t->due_ns = delay_ns < UINT64_MAX - now ? now + delay_ns : UINT64_MAX;
    push(h->world, t, t->due_ns);
}

static uint64_t now_ns(struct td_env *env)
{
    const struct td_loop *h = (struct td_loop *)(void *)env;
    return h->world->now_ns + h->skew_ns;
}

static uint64_t random_of(struct td_env *env)
{
    struct td_loop *h = (struct td_loop *)(void *)env;
    uint32_t r[4];
    td_rng_philox(h->world->seed, h->n_random++, 1000 + h->place, r);
    return (uint64_t)r[0] << 32 | r[1];
}

bool sim_world_step(struct sim_world *w, uint64_t until_ns)
{
    for (;;) {
        if (w->n_heap == 0 || w->heap[0].due_ns > until_ns) {
            if (w->now_ns < until_ns) w->now_ns = until_ns;
            return false;
        }
        struct td_timer *t = w->heap[0].timer;
        if (w->heap[0].due_ns > w->now_ns) w->now_ns = w->heap[0].due_ns; /* a jump leaves some in the past */
        pull(w, 0);
        struct td_loop *h = host_of(t);
        if (h->is_paused) {
            t->impl[0] = h;
            td_list_push_back(&h->held, &t->link);
            continue;
        }
        t->is_armed = false;
        w->running = h;
        w->n_events++;
        t->fire(t);
        w->ran = w->running;
        w->running = &w->network;
        return true;
    }
}

/* --- hosts ----------------------------------------------------------------------------------------------- */

void sim_host_init(struct td_loop *h, struct sim_world *w, uint32_t place, uint32_t life)
{
    *h = (struct td_loop){
        .env = {.now_ns = now_ns, .timer_start = timer_start, .timer_stop = timer_stop, .random = random_of},
        .world = w,
        .place = place,
        .n_random = (uint64_t)life << 32,
    };
    snprintf(h->name, sizeof h->name, "%s.%u", w->place_names[place], life);
    td_list_init(&h->held);
    td_list_push_back(&w->hosts, &h->link);
}

void sim_host_pause(struct td_loop *h, bool is_paused)
{
    h->is_paused = is_paused;
    while (!is_paused && !td_list_is_empty(&h->held)) {
        struct td_timer *t = TD_LIST_ENTRY(h->held.next, struct td_timer, link);
        td_list_remove(&t->link);
        push(h->world, t, h->world->now_ns);
    }
}

void sim_host_jump(struct td_loop *h, uint64_t ns)
{
    struct sim_world *w = h->world;
    h->skew_ns += ns;
    for (uint32_t i = 0; i < w->n_heap; i++)
        if (host_of(w->heap[i].timer) == h && w->heap[i].due_ns != UINT64_MAX)
            w->heap[i].due_ns = w->heap[i].due_ns > ns ? w->heap[i].due_ns - ns : 0;
    for (uint32_t i = w->n_heap; i-- > 0;) sift_down(w, i);
}

void sim_host_kill(struct td_loop *h)
{
    struct sim_world *w = h->world;
    h->is_dead = true;
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_heap; i++) {
        if (host_of(w->heap[i].timer) == h)
            w->heap[i].timer->is_armed = false;
        else
            w->heap[n++] = w->heap[i];
    }
    w->n_heap = n;
    for (uint32_t i = 0; i < n; i++) put(w, i, w->heap[i]);
    for (uint32_t i = n; i-- > 0;) sift_down(w, i);
    TD_LIST_FOREACH_SAFE (it, &h->held) td_list_remove(it);
}

/* --- links ----------------------------------------------------------------------------------------------- */

struct sim_link *sim_link_of(struct sim_world *w, uint32_t a, uint32_t b)
{
    return a < b ? &w->links[a][b] : &w->links[b][a];
}

/* Mostly a fraction of a millisecond, now and then much more. */
uint64_t sim_latency(struct sim_world *w, uint32_t from, uint32_t to)
{
    struct sim_draws d = {.seed = w->seed, .n = w->n_latency++ * 2, .stream = 1};
    const struct sim_link *l = sim_link_of(w, from, to);
    uint64_t ns = sim_draw(&d, SIM_US(20), SIM_US(400));
    uint64_t odd = sim_draw(&d, 0, 999);
    if (odd < 60) ns *= 10;
    if (odd < 20) ns *= 20;
    ns *= l->slowness;
    return w->now_ns < l->blocked_till ? l->blocked_till - w->now_ns + ns : ns;
}

uint32_t sim_add_place(struct sim_world *w, const char *name)
{
    TD_CHECK(w->n_places < SIM_MAX_PLACES);
    w->place_names[w->n_places] = name;
    return w->n_places++;
}

void sim_world_init(struct sim_world *w, uint64_t seed, bool is_traced)
{
    *w = (struct sim_world){.seed = seed, .now_ns = BEGIN_NS, .is_traced = is_traced};
    td_list_init(&w->hosts);
    td_list_init(&w->servers);
    for (unsigned a = 0; a < SIM_MAX_PLACES; a++)
        for (unsigned b = 0; b < SIM_MAX_PLACES; b++) w->links[a][b].slowness = 1;
    sim_add_place(w, "net");
    sim_host_init(&w->network, w, 0, 0);
    w->running = &w->network;
    sim_world_now = w;
}

/* --- the twin of common/loop ------------------------------------------------------------------------------- */

struct td_env *td_loop_env(struct td_loop *l) { return &l->env; }
void td_loop_stop(struct td_loop *l) { l->has_stopped = true; }

/* Long texts alone are encoded on pool threads, and no client of ours sends any. */
void td_loop_work(struct td_loop *l, struct td_work *work)
{
    (void)l;
    (void)work;
    TD_CHECK(!"background work is not simulated");
}

/* --- words ----------------------------------------------------------------------------------------------- */

static void say(const struct sim_world *w, FILE *to, const char *fmt, va_list ap)
{
    uint64_t us = (w->now_ns - BEGIN_NS) / 1000;
    fprintf(to, "%3llu.%06llu %-6s ", (unsigned long long)(us / 1000000), (unsigned long long)(us % 1000000),
            w->running != NULL ? w->running->name : "");
    vfprintf(to, fmt, ap);
    fputc('\n', to);
}

void sim_trace(const struct sim_world *w, const char *fmt, ...)
{
    if (!w->is_traced) return;
    va_list ap;
    va_start(ap, fmt);
    say(w, stdout, fmt, ap);
    va_end(ap);
}

void sim_fail(const struct sim_world *w, const char *fmt, ...)
{
    fflush(stdout);
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "seed %llu, event %llu: ", (unsigned long long)w->seed, (unsigned long long)w->n_events);
    say(w, stderr, fmt, ap);
    va_end(ap);
    fflush(stderr);
    _Exit(1);
}

/* The daemons' own log lines, in the trace's time and without limits (bound by --wrap). */
void __wrap_td_log_write(struct td_log_site *site, enum td_log_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void __wrap_td_log_write(struct td_log_site *site, enum td_log_level level, const char *event, const char *fmt, ...)
{
    static const char letters[] = "diwe";
    char fields[1024];
    (void)site;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fields, sizeof fields, fmt, ap);
    va_end(ap);
    if (sim_world_now != NULL) sim_trace(sim_world_now, "%c %s %s", letters[level], event, fields);
}
