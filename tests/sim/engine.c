#include "tests/sim/engine.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "tests/sim/model.h"

#define SIM_MAX_DRAWN 64u /* segments of a batch */

struct td_engine {
    struct sim_engine_options o;
    struct td_engine_handlers h;
    void *user;
    struct td_batch *queue[TD_ENGINE_DEPTH];
    uint32_t n_queued;
    uint32_t layer; /* that is computed now */
    struct td_timer timer;
    uint64_t started_ns;
    bool is_hung, fails;
    uint32_t drawn[SIM_MAX_DRAWN]; /* by segment of the batch that ended last */
    uint32_t n_drawn;
};

static const char *const group_names[] = {"sliding", "full"};

struct td_engine *sim_engine_create(const struct sim_engine_options *o, const struct td_engine_handlers *h, void *user)
{
    struct td_engine *e = calloc(1, sizeof *e);
    TD_CHECK(e != NULL);
    e->o = *o;
    e->h = *h;
    e->user = user;
    return e;
}

void td_engine_destroy(struct td_engine *e)
{
    if (e == NULL) return;
    e->o.host->env.timer_stop(&e->o.host->env, &e->timer);
    free(e);
}

void sim_engine_fail(struct td_engine *e) { e->fails = true; }
void sim_engine_hang(struct td_engine *e) { e->is_hung = true; }
bool sim_engine_is_hung(const struct td_engine *e) { return e->is_hung && e->n_queued > 0; }

uint64_t td_engine_step_age_ns(const struct td_engine *e)
{
    if (e->n_queued == 0) return 0;
    return e->o.host->env.now_ns(&e->o.host->env) - e->started_ns;
}

/* --- the pass ---------------------------------------------------------------------------------------------- */

static uint32_t page_at(const struct td_engine *e, const struct td_segment *s, enum td_kv_group g, uint32_t position)
{
    const struct td_page_table *t = &s->table[g];
    uint32_t block = position / SIM_PAGE_TOKENS;
    if (block < t->first_block || block - t->first_block >= t->n_blocks)
        sim_fail(e->o.host->world, "a batch shows no %s page for position %u (start %u, blocks %u to %u)",
                 group_names[g], position, s->start, t->first_block, t->first_block + t->n_blocks);
    uint32_t page = t->pages[block - t->first_block];
    if (page >= e->o.kv[g].n_pages) sim_fail(e->o.host->world, "a batch names %s page %u", group_names[g], page);
    if (td_kv_pages_refs(e->o.pages, g, page) == 0)
        sim_fail(e->o.host->world, "the engine uses %s page %u, which is free (position %u)", group_names[g], page,
                 position);
    return page;
}

/* Schedulers keep a sequence's tokens in one array, so those before the segment stand before its own. What it is fed
 * is the engine's to know: its request may have ended. */
static void states_of(const struct td_engine *e, const struct td_segment *s, uint64_t *out)
{
    const uint32_t *tokens = s->tokens - s->start;
    uint64_t state = 0;
    for (uint32_t p = 0; p < s->start + s->n_tokens; p++) {
        bool is_fed = s->is_fed && p == s->start;
        if (is_fed && (s->n_tokens != 1 || s->fed_by >= e->n_drawn))
            sim_fail(e->o.host->world, "a batch is fed by segment %u of %u", s->fed_by, e->n_drawn);
        out[p] = state = sim_state(state, is_fed ? e->drawn[s->fed_by] : tokens[p]);
    }
}

static void read_context(const struct td_engine *e, const struct td_segment *s, enum td_kv_group g, uint32_t layer,
                         const uint64_t *states)
{
    uint32_t from = 0;
    if (g == TD_KV_SLIDING && s->start + 1 > SIM_WINDOW) from = s->start + 1 - SIM_WINDOW;
    for (uint32_t p = from; p < s->start; p++) {
        uint32_t page = page_at(e, s, g, p);
        for (uint32_t r = 0; r < e->o.n_ranks; r++)
            if (!sim_kv_is(e->o.base[r][g], &e->o.kv[g], r, layer, page, p % SIM_PAGE_TOKENS, states[p]))
                sim_fail(e->o.host->world,
                         "the engine reads wrong KV: position %u of %u, %s layer %u, page %u, rank %u%s", p, s->start,
                         group_names[g], layer, page, r,
                         sim_kv_is_canary(e->o.base[r][g], &e->o.kv[g], page) ? " (never written)" : "");
    }
}

static void check_writable(const struct td_engine *e, enum td_kv_group g, uint32_t page)
{
    if (td_kv_pages_refs(e->o.pages, g, page) != 1 || td_kv_pages_is_kept(e->o.pages, g, page))
        sim_fail(e->o.host->world, "the engine writes %s page %u, which has %u holders%s", group_names[g], page,
                 td_kv_pages_refs(e->o.pages, g, page),
                 td_kv_pages_is_kept(e->o.pages, g, page) ? " and is in the prefix cache" : "");
}

static void copy_pages(const struct td_engine *e, const struct td_batch *b)
{
    for (uint32_t i = 0; i < b->n_copies; i++) {
        const struct td_page_copy *c = &b->copies[i];
        const struct td_kv_group_layout *l = &e->o.kv[c->group];
        check_writable(e, c->group, c->to);
        if (td_kv_pages_refs(e->o.pages, c->group, c->from) == 0)
            sim_fail(e->o.host->world, "the engine copies %s page %u, which nobody holds", group_names[c->group],
                     c->from);
        for (uint32_t r = 0; r < e->o.n_ranks; r++)
            for (uint32_t layer = 0; layer < l->n_layers; layer++)
                memcpy(e->o.base[r][c->group] + td_kv_offset(l, layer, c->to, 0, false, 0),
                       e->o.base[r][c->group] + td_kv_offset(l, layer, c->from, 0, false, 0), td_kv_page_bytes(l));
    }
}

static void write_layer(const struct td_engine *e, const struct td_segment *s, enum td_kv_group g, uint32_t layer,
                        const uint64_t *states)
{
    for (uint32_t p = s->start; p < s->start + s->n_tokens; p++) {
        uint32_t page = page_at(e, s, g, p);
        check_writable(e, g, page);
        for (uint32_t r = 0; r < e->o.n_ranks; r++)
            sim_kv_write(e->o.base[r][g], &e->o.kv[g], r, layer, page, p % SIM_PAGE_TOKENS, states[p]);
    }
}

static void compute_layer(const struct td_engine *e, const struct td_batch *b, uint32_t layer)
{
    uint64_t states[SIM_MAX_CONTEXT];
    enum td_kv_group g = sim_model.is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        const struct td_segment *s = &b->segments[i];
        states_of(e, s, states);
        read_context(e, s, g, sim_model.layer_in_group[layer], states);
        write_layer(e, s, g, sim_model.layer_in_group[layer], states);
    }
}

static void draw(struct td_engine *e, struct td_batch *b)
{
    uint64_t states[SIM_MAX_CONTEXT];
    for (uint32_t i = 0; i < b->n_segments; i++) {
        struct td_segment *s = &b->segments[i];
        if (!s->want_token) continue;
        states_of(e, s, states);
        s->token = sim_next_token(states[s->start + s->n_tokens - 1], s->sampling->seed, s->draw_index, s->banned_ids,
                                  s->n_banned);
        s->chosen = (struct td_logprob){s->token, -1};
        for (uint32_t k = 0; k < s->n_top_logprobs; k++) s->top[k] = (struct td_logprob){k, -2};
    }
    TD_CHECK(b->n_segments <= SIM_MAX_DRAWN);
    e->n_drawn = b->n_segments;
    for (uint32_t i = 0; i < b->n_segments; i++) e->drawn[i] = b->segments[i].token;
}

/* --- batches ----------------------------------------------------------------------------------------------- */

static void on_timer(struct td_timer *t);

static void next_layer(struct td_engine *e)
{
    const struct td_batch *b = e->queue[0];
    uint64_t n = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) n += b->segments[i].n_tokens;
    e->timer.fire = on_timer;
    if (e->is_hung) return;
    /* Layers that nobody wants to hear of need no event of their own. */
    uint32_t n_layers = b->want_layers ? 1 : sim_model.n_layers;
    e->o.host->env.timer_start(&e->o.host->env, &e->timer, n_layers * (e->o.layer_ns + n * e->o.token_ns));
}

static void start(struct td_engine *e)
{
    e->layer = 0;
    e->started_ns = e->o.host->env.now_ns(&e->o.host->env);
    next_layer(e);
}

static void end(struct td_engine *e, enum td_status st)
{
    struct td_batch *b = e->queue[0];
    if (e->fails) st = TD_E_DEVICE;
    e->fails = false;
    if (st == TD_OK) draw(e, b);
    e->queue[0] = e->queue[1];
    if (--e->n_queued > 0) start(e);
    e->h.on_done(e, b, st, e->user);
}

static void on_timer(struct td_timer *t)
{
    struct td_engine *e = TD_CONTAINER_OF(t, struct td_engine, timer);
    struct td_batch *b = e->queue[0];
    if (b->want_layers && atomic_load(&b->is_abandoned)) {
        end(e, TD_E_CANCELED);
        return;
    }
    if (e->layer == 0) copy_pages(e, b);
    if (!b->want_layers) {
        for (uint32_t layer = 0; layer < sim_model.n_layers; layer++) compute_layer(e, b, layer);
        end(e, TD_OK);
        return;
    }
    compute_layer(e, b, e->layer);
    uint32_t layer = e->layer++;
    e->h.on_layer(e, b, layer, e->user);
    if (e->layer == sim_model.n_layers)
        end(e, TD_OK);
    else
        next_layer(e);
}

enum td_status td_engine_submit(struct td_engine *e, struct td_batch *b)
{
    if (e->n_queued == TD_ENGINE_DEPTH) return TD_E_BUSY;
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) n += b->segments[i].n_tokens;
    if (b->n_segments == 0 || b->n_segments > e->o.max_batch_segments || n > e->o.max_batch_tokens)
        sim_fail(e->o.host->world, "a batch of %u segments and %u tokens is over the limits of %u and %u",
                 b->n_segments, n, e->o.max_batch_segments, e->o.max_batch_tokens);
    e->queue[e->n_queued++] = b;
    if (e->n_queued == 1) start(e);
    return TD_OK;
}
