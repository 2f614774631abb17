/* A decode worker alone in the world: virtual clock, one engine that remembers what it was given, routers that write
 * down what they are told, prefill workers that answer when the test says so.
 *
 * The engine keeps a KV memory of token ids: a page holds, per position, the token that was computed there. A segment
 * is checked against its history through its page table, so a wrong, shared or freed page shows at once. The next token
 * is a pure function of the history. */
#ifndef TD_TESTS_DECODE_WORLD_H
#define TD_TESTS_DECODE_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/base/log.h"
#include "common/engine/request.h"
#include "common/engine/sample.h"
#include "common/handoff/wire.h"
#include "decode/worker.h"

/* No program here uses every helper. */
#pragma GCC diagnostic ignored "-Wunused-function"

enum { PAGE = 4, WINDOW = 8, VOCAB = 64, CONTEXT = 60, MAX_PAGES = 512, MAX_IDS = 1024, ROUTERS = 3, MAX_STOPS = 64 };
#define DECODE_ID  0xD0ull
#define PREFILL_ID 0xF0ull
#define STOP_ID    63u

struct told { /* about one stream_id */
    bool has_start, is_reserved;
    uint64_t generation;
    uint32_t cached, n_cached_here; /* told with the reservation; with the end */
    uint32_t first_block[TD_KV_N_GROUPS], n_pages[TD_KV_N_GROUPS], pages[TD_KV_N_GROUPS][32];
    uint32_t tokens[CONTEXT + 1], n_tokens;
    unsigned n_finished;
    Tandem__V1__FinishReason reason;
    char status[32], message[512];
    bool is_lost;
    uint64_t handoff_bytes;
    unsigned n_logprobs;
    /* what was asked */
    uint32_t prompt[CONTEXT], n_prompt;
};

struct router {
    struct td_decode_stream *stream;
    bool is_busy;
    bool is_deaf; /* takes everything, writes nothing down */
    bool is_closed;
    enum td_status closed; /* with this */
    unsigned n_messages;
    struct told told[MAX_IDS];
};

struct world {
    struct td_env env;
    uint64_t now_ns;
    struct td_list timers;
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    struct td_kv_pages *pages;
    uint32_t memory[TD_KV_N_GROUPS][MAX_PAGES][PAGE]; /* token + 1; 0: nothing */
    struct td_decode_worker *worker;
    struct td_batch *batches[2]; /* in flight, the first first */
    uint32_t n_batches, depth;
    uint32_t drawn[512], n_drawn; /* by segment of the step before */
    uint32_t max_batch, chunk;
    uint32_t n_steps, n_segments_last;
    uint32_t n_prompt_last, n_decoding_last; /* tokens of prompts, but for a last one alone; the other segments */
    uint64_t token_ns;                       /* that such a token takes beside the step's millisecond */
    struct router routers[ROUTERS];
    struct {
        uint64_t prefill, generation;
    } stops[MAX_STOPS];
    unsigned n_stops;
    bool is_stopped[4096]; /* generations that their sender has confirmed: it writes them no more */
    enum td_status peer_status;
    enum td_status submit_status;
    unsigned n_drained, n_broken;
    uint32_t free_at_start[TD_KV_N_GROUPS];
};

/* --- clock ------------------------------------------------------------------------------------------------- */
static uint64_t w_now(struct td_env *env) { return TD_CONTAINER_OF(env, struct world, env)->now_ns; }
static void w_timer_stop(struct td_env *env, struct td_timer *t)
{
    (void)env;
    if (!t->is_armed) return;
    t->is_armed = false;
    td_list_remove(&t->link);
}
static void w_timer_start(struct td_env *env, struct td_timer *t, uint64_t delay_ns)
{
    struct world *w = TD_CONTAINER_OF(env, struct world, env);
    w_timer_stop(env, t);
    t->due_ns = w->now_ns + delay_ns;
    t->is_armed = true;
    td_list_push_back(&w->timers, &t->link);
}
static uint64_t w_random(struct td_env *env)
{
    (void)env;
    return 4;
}
static void advance_ms(struct world *w, uint64_t ms)
{
    uint64_t until = w->now_ns + ms * TD_NS_PER_MS;
    for (;;) {
        struct td_timer *next = NULL;
        TD_LIST_FOREACH (it, &w->timers) {
            struct td_timer *t = TD_LIST_ENTRY(it, struct td_timer, link);
            if (t->due_ns <= until && (next == NULL || t->due_ns < next->due_ns)) next = t;
        }
        if (next == NULL) break;
        if (next->due_ns > w->now_ns) w->now_ns = next->due_ns;
        w_timer_stop(&w->env, next);
        next->fire(next);
    }
    w->now_ns = until;
}

/* --- the engine -------------------------------------------------------------------------------------------- */

/* What follows a history: never a stop id, unless the token 62 came, whose successor is one. */
static uint32_t next_token(const uint32_t *history, uint32_t n)
{
    if (history[n - 1] == 62) return STOP_ID;
    uint32_t h = n;
    for (uint32_t i = 0; i < n; i++) h = h * 31 + history[i] + 7;
    return h % 60;
}

static uint32_t *cell(struct world *w, int g, const struct td_page_table *t, uint32_t pos)
{
    uint32_t block = pos / PAGE;
    assert_true(block >= t->first_block && block < t->first_block + t->n_blocks);
    uint32_t page = t->pages[block - t->first_block];
    assert_true(page < w->kv[g].n_pages);
    assert_true(td_kv_pages_refs(w->pages, (enum td_kv_group)g, page) >= 1);
    return &w->memory[g][page][pos % PAGE];
}

/* The tokens up to the segment's last. What it is fed only the engine knows: its request may have ended. */
static void history_of(const struct world *w, const struct td_segment *s, uint32_t *out)
{
    memcpy(out, s->tokens - s->start, (s->start + s->n_tokens) * sizeof *out);
    if (!s->is_fed) return;
    assert_int_equal(s->n_tokens, 1);
    assert_true(s->fed_by < w->n_drawn);
    out[s->start] = w->drawn[s->fed_by];
}

static void compute(struct world *w, struct td_segment *s)
{
    uint32_t tokens[CONTEXT];
    history_of(w, s, tokens);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t first = g == TD_KV_SLIDING && s->start >= WINDOW - 1 ? s->start - (WINDOW - 1) : 0;
        for (uint32_t p = first; p < s->start; p++) assert_int_equal(*cell(w, g, &s->table[g], p), tokens[p] + 1);
        for (uint32_t i = 0; i < s->n_tokens; i++) {
            uint32_t *c = cell(w, g, &s->table[g], s->start + i);
            uint32_t page = s->table[g].pages[(s->start + i) / PAGE - s->table[g].first_block];
            assert_int_equal(td_kv_pages_refs(w->pages, (enum td_kv_group)g, page),
                             1); /* nobody shares what is written */
            *c = tokens[s->start + i] + 1;
        }
    }
    if (!s->want_token) return;
    assert_int_equal(s->n_history + s->is_fed, s->start + s->n_tokens);
    assert_ptr_equal(s->history, s->tokens - s->start);
    assert_int_equal(s->draw_index, s->start + s->n_tokens - s->n_prompt);
    assert_true(!s->is_fed || !td_sampling_has_penalties(s->sampling));
    s->token = next_token(tokens, s->start + s->n_tokens);
    for (uint32_t i = 0; i < s->n_banned; i++)
        if (s->token == s->banned_ids[i]) s->token = 1;
    if (s->want_logprobs) {
        s->chosen = (struct td_logprob){s->token, -0.5f};
        for (uint32_t i = 0; i < s->n_top_logprobs; i++) s->top[i] = (struct td_logprob){i, -1.0f - (float)i};
    }
}

static enum td_status w_submit(void *self, struct td_batch *b)
{
    struct world *w = self;
    assert_true(w->n_batches < w->depth);
    if (w->submit_status != TD_OK) return w->submit_status;
    uint32_t n_tokens = 0, n_prompt_tokens = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        n_tokens += b->segments[i].n_tokens;
        if (b->segments[i].n_tokens > 1) n_prompt_tokens += b->segments[i].n_tokens;
    }
    assert_true(b->n_segments >= 1 && b->n_segments <= w->max_batch); /* what the engine has memory for */
    assert_true(n_prompt_tokens <= w->chunk && n_tokens <= w->max_batch + w->chunk);
    w->batches[w->n_batches++] = b;
    return TD_OK;
}

/* Computes and finishes the first step in flight, if there is one. */
static bool step(struct world *w, enum td_status st)
{
    if (w->n_batches == 0) return false;
    struct td_batch *b = w->batches[0];
    w->batches[0] = w->batches[1];
    w->batches[1] = NULL;
    w->n_batches--;
    w->n_steps++;
    w->n_segments_last = b->n_segments;
    for (uint32_t i = 0; i < b->n_copies && st == TD_OK; i++) {
        const struct td_page_copy *c = &b->copies[i];
        assert_int_equal(td_kv_pages_refs(w->pages, c->group, c->to), 1); /* about to be written */
        assert_true(td_kv_pages_refs(w->pages, c->group, c->from) >= 1);
        memcpy(w->memory[c->group][c->to], w->memory[c->group][c->from], sizeof w->memory[0][0]);
    }
    if (st == TD_OK)
        for (uint32_t i = 0; i < b->n_segments; i++) compute(w, &b->segments[i]);
    w->n_drawn = b->n_segments;
    for (uint32_t i = 0; i < b->n_segments; i++) w->drawn[i] = b->segments[i].token;
    w->n_prompt_last = w->n_decoding_last = 0;
    for (uint32_t i = 0; i < b->n_segments; i++)
        if (b->segments[i].n_tokens > 1 || !b->segments[i].want_token)
            w->n_prompt_last += b->segments[i].n_tokens;
        else
            w->n_decoding_last++;
    w->now_ns += 1000000 + w->n_prompt_last * w->token_ns;
    td_decode_worker_on_step(w->worker, st);
    return true;
}
static void run(struct world *w)
{
    while (step(w, TD_OK)) {
    }
}

/* --- routers ----------------------------------------------------------------------------------------------- */
static enum td_status w_send(void *self, void *call, const Tandem__V1__DecodeEvents *ev)
{
    struct router *r = call;
    (void)self;
    if (r->is_busy) return TD_E_BUSY;
    if (r->is_deaf) return TD_OK;
    assert_false(r->is_closed);
    r->n_messages++;
    for (size_t i = 0; i < ev->n_reserved; i++) {
        struct told *t = &r->told[ev->reserved[i]->stream_id];
        const Tandem__V1__KvTarget *k = ev->reserved[i]->target;
        assert_true(t->has_start && !t->is_reserved && t->n_finished == 0);
        assert_int_equal(k->incarnation, DECODE_ID);
        t->is_reserved = true;
        t->generation = k->generation;
        t->cached = k->cached_tokens;
        const Tandem__V1__PageList *lists[] = {k->sliding, k->full};
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            t->first_block[g] = lists[g]->first_block;
            t->n_pages[g] = (uint32_t)lists[g]->n_pages;
            memcpy(t->pages[g], lists[g]->pages, lists[g]->n_pages * sizeof(uint32_t));
        }
    }
    assert_int_equal(ev->n_stream_ids, ev->n_token_ids);
    if (ev->n_logprobs > 0) assert_int_equal(ev->n_logprobs, ev->n_token_ids);
    for (size_t i = 0; i < ev->n_token_ids; i++) {
        struct told *t = &r->told[ev->stream_ids[i]];
        assert_true(t->has_start && t->n_finished == 0);
        t->tokens[t->n_tokens++] = ev->token_ids[i];
        if (ev->n_logprobs > 0 && ev->logprobs[i]->chosen != NULL) {
            assert_int_equal(ev->logprobs[i]->chosen->id, ev->token_ids[i]);
            t->n_logprobs += 1 + (unsigned)ev->logprobs[i]->n_top;
        }
    }
    for (size_t i = 0; i < ev->n_finished; i++) {
        const Tandem__V1__DecodeFinished *f = ev->finished[i];
        struct told *t = &r->told[f->stream_id];
        assert_true(t->has_start);
        assert_int_equal(t->n_finished, 0);
        t->n_finished++;
        t->reason = f->reason;
        snprintf(t->status, sizeof t->status, "%s", f->status_name);
        snprintf(t->message, sizeof t->message, "%s", f->message);
        t->is_lost = f->is_lost;
        t->handoff_bytes = f->handoff_bytes;
        t->n_cached_here = f->cached_tokens;
    }
    return TD_OK;
}
static void w_close(void *self, void *call, enum td_status st, const char *text)
{
    (void)self;
    (void)text;
    ((struct router *)call)->is_closed = true;
    ((struct router *)call)->closed = st;
}
static void command(struct world *w, unsigned r, Tandem__V1__DecodeCommand__CommandCase which, void *body)
{
    Tandem__V1__DecodeCommand c = TANDEM__V1__DECODE_COMMAND__INIT;
    c.command_case = which;
    c.hello = body; /* one of a union of pointers */
    td_decode_worker_on_command(w->worker, w->routers[r].stream, &c);
}
static void hello(struct world *w, unsigned r)
{
    Tandem__V1__DecodeHello m = TANDEM__V1__DECODE_HELLO__INIT;
    m.router = 0xA0 + r;
    command(w, r, TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO, &m);
}
static void connect_router(struct world *w, unsigned r)
{
    struct router *ro = &w->routers[r];
    memset(ro, 0, sizeof *ro);
    ro->stream = td_decode_worker_on_stream(w->worker, ro);
    assert_non_null(ro->stream);
    hello(w, r);
}
static void lose_router(struct world *w, unsigned r)
{
    struct td_decode_stream *s = w->routers[r].stream;
    w->routers[r].stream = NULL;
    td_decode_worker_on_stream_closed(w->worker, s);
}

struct ask {
    uint32_t n_prompt, n_generated, max_tokens, min_tokens, last; /* last: value of the last token, if not 0 */
    uint32_t n_logprobs;
    float presence_penalty;
    uint64_t timeout_us, age_us, prefill; /* prefill 0: PREFILL_ID */
    bool is_local, no_stop;
    uint32_t salt;
    const uint32_t *tokens; /* NULL: made up */
};
static struct told *start(struct world *w, unsigned r, uint64_t id, struct ask a)
{
    struct told *t = &w->routers[r].told[id];
    t->has_start = true;
    t->n_prompt = a.n_prompt + a.n_generated;
    for (uint32_t i = 0; i < t->n_prompt; i++) t->prompt[i] = (i * 7 + (uint32_t)id * 3 + a.salt + 1) % 60;
    if (a.tokens != NULL) memcpy(t->prompt, a.tokens, t->n_prompt * sizeof t->prompt[0]);
    if (a.last != 0) t->prompt[t->n_prompt - 1] = a.last;
    char name[16];
    snprintf(name, sizeof name, "r%u-%u", r, (unsigned)id);
    uint32_t stop = STOP_ID;
    Tandem__V1__Sampling s = TANDEM__V1__SAMPLING__INIT;
    s.presence_penalty = a.presence_penalty;
    s.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    Tandem__V1__TokenRequest q = TANDEM__V1__TOKEN_REQUEST__INIT;
    q.request_id = name;
    q.token_ids = t->prompt;
    q.n_token_ids = t->n_prompt;
    q.n_prompt = a.n_prompt;
    q.sampling = &s;
    q.max_tokens = a.max_tokens;
    q.min_tokens = a.min_tokens;
    q.stop_ids = &stop;
    q.n_stop_ids = a.no_stop ? 0 : 1;
    q.n_logprobs = a.n_logprobs;
    q.timeout_us = a.timeout_us;
    q.age_us = a.age_us;
    Tandem__V1__DecodeStart m = TANDEM__V1__DECODE_START__INIT;
    m.stream_id = id;
    m.request = &q;
    m.prefill = a.is_local ? 0 : a.prefill != 0 ? a.prefill : PREFILL_ID;
    command(w, r, TANDEM__V1__DECODE_COMMAND__COMMAND_START, &m);
    return t;
}
static void cancel(struct world *w, unsigned r, uint64_t id)
{
    Tandem__V1__DecodeCancel m = TANDEM__V1__DECODE_CANCEL__INIT;
    m.stream_id = id;
    command(w, r, TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL, &m);
}
static void first_was_last(struct world *w, unsigned r, uint64_t id)
{
    Tandem__V1__DecodeFirst m = TANDEM__V1__DECODE_FIRST__INIT;
    m.stream_id = id;
    command(w, r, TANDEM__V1__DECODE_COMMAND__COMMAND_FIRST, &m);
}

/* --- prefill workers --------------------------------------------------------------------------------------- */
static enum td_status w_send_peer(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    struct world *w = self;
    struct td_wire m;
    assert_int_equal(td_wire_decode(id, data, n, &m, NULL), TD_OK);
    assert_int_equal(id, TD_WIRE_STOP);
    assert_true(w->n_stops < MAX_STOPS);
    w->stops[w->n_stops].prefill = prefill;
    w->stops[w->n_stops++].generation = m.generation;
    return TD_OK;
}
static void say(struct world *w, uint64_t prefill, uint8_t id, struct td_wire m)
{
    struct td_buf b = {0};
    m.to = DECODE_ID;
    td_wire_encode(id, &m, &b);
    td_decode_worker_on_peer_message(w->worker, prefill, id, b.data, b.n);
    td_buf_free(&b);
}
static void answer_stops(struct world *w)
{
    unsigned n = w->n_stops;
    for (unsigned i = 0; i < n; i++) {
        w->is_stopped[w->stops[i].generation] = true;
        say(w, w->stops[i].prefill, TD_WIRE_STOPPED, (struct td_wire){.generation = w->stops[i].generation});
    }
    memmove(w->stops, w->stops + n, (w->n_stops - n) * sizeof w->stops[0]);
    w->n_stops -= n;
}
/* Puts the prompt's KV where it was reserved, and completes. */
static void complete_from(struct world *w, uint64_t prefill, struct told *t)
{
    if (w->is_stopped[t->generation]) return;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t p = t->first_block[g] * PAGE; p < t->n_prompt; p++) {
            assert_true(p / PAGE - t->first_block[g] < t->n_pages[g]);
            w->memory[g][t->pages[g][p / PAGE - t->first_block[g]]][p % PAGE] = t->prompt[p] + 1;
        }
    say(w, prefill, TD_WIRE_COMPLETE,
        (struct td_wire){.generation = t->generation,
                         .first_token = next_token(t->prompt, t->n_prompt),
                         .n_ranks = 1,
                         .kv_bytes = {td_handoff_bytes(w->kv, WINDOW, t->n_prompt, t->cached)}});
}
static void complete(struct world *w, struct told *t) { complete_from(w, PREFILL_ID, t); }

/* --- the rest ---------------------------------------------------------------------------------------------- */
static void w_introduce(void *self, const Tandem__V1__PeerDescriptor *p)
{
    (void)self;
    (void)p;
}
static enum td_status w_check_peer(void *self, uint64_t prefill, struct td_err *err)
{
    struct world *w = self;
    (void)prefill;
    return w->peer_status == TD_OK ? TD_OK : td_err_set(err, w->peer_status, "prefill: as the test says");
}
static const char *w_transport(void *self, uint64_t prefill)
{
    (void)self;
    (void)prefill;
    return "memory";
}
static void w_drained(void *self) { ((struct world *)self)->n_drained++; }
static void w_broken(void *self, enum td_status st, const char *why)
{
    (void)st;
    (void)why;
    ((struct world *)self)->n_broken++;
}

struct shape {
    uint32_t n_sliding, n_full, max_batch, chunk, margin, depth; /* depth 0: 1 */
    bool has_no_cache;
};
static struct world *make_world(struct shape s)
{
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->now_ns = TD_NS_PER_S;
    td_list_init(&w->timers);
    w->env =
        (struct td_env){.now_ns = w_now, .timer_start = w_timer_start, .timer_stop = w_timer_stop, .random = w_random};
    struct td_decode_worker_options o = {.incarnation = DECODE_ID,
                                         .window_tokens = WINDOW,
                                         .n_ranks = 1,
                                         .n_vocab = VOCAB,
                                         .max_context_tokens = CONTEXT,
                                         .max_batch = s.max_batch != 0 ? s.max_batch : 8,
                                         .chunk_tokens = s.chunk != 0 ? s.chunk : 5,
                                         .has_prefix_cache = !s.has_no_cache,
                                         .return_margin_tokens = s.margin,
                                         .step_depth = s.depth != 0 ? s.depth : 1,
                                         .quarantine_ms = 250};
    w->max_batch = o.max_batch;
    w->depth = o.step_depth;
    w->chunk = o.chunk_tokens;
    uint32_t n[TD_KV_N_GROUPS] = {s.n_sliding != 0 ? s.n_sliding : 100, s.n_full != 0 ? s.n_full : 200};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        w->kv[g] = (struct td_kv_group_layout){
            .n_layers = 2, .n_pages = n[g], .n_heads = 2, .head_dim = 8, .page_tokens = PAGE, .dtype = TD_BF16};
        o.kv[g] = w->kv[g];
        w->free_at_start[g] = n[g];
    }
    struct td_decode_ports ports = {.env = &w->env,
                                    .self = w,
                                    .submit = w_submit,
                                    .send = w_send,
                                    .close = w_close,
                                    .introduce = w_introduce,
                                    .check_peer = w_check_peer,
                                    .send_peer = w_send_peer,
                                    .transport = w_transport,
                                    .drained = w_drained,
                                    .broken = w_broken};
    assert_int_equal(td_kv_pages_create(n, &w->pages), TD_OK);
    assert_int_equal(td_decode_worker_create(&o, w->pages, &ports, &w->worker), TD_OK);
    connect_router(w, 0);
    return w;
}
static void expect_pages_back(struct world *w)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        assert_int_equal(td_kv_pages_n_free(w->pages, (enum td_kv_group)g), w->free_at_start[g]);
}
static void free_world(struct world *w)
{
    td_decode_worker_destroy(w->worker);
    assert_true(td_list_is_empty(&w->timers));
    expect_pages_back(w);
    td_kv_pages_destroy(w->pages);
    free(w);
}

/* The tokens that t's prompt leads to after its first generated one, up to n; stops after a stop id. */
static uint32_t expected(const struct told *t, bool with_first, uint32_t n, uint32_t *out)
{
    uint32_t history[CONTEXT + 80], len = t->n_prompt, k = 0;
    memcpy(history, t->prompt, len * sizeof history[0]);
    if (!with_first) {
        history[len] = next_token(history, len);
        len++;
    }
    while (k < n) {
        history[len] = next_token(history, len);
        out[k++] = history[len++];
        if (history[len - 1] == STOP_ID) break;
    }
    return k;
}
static void expect_tokens(const struct told *t, bool with_first, uint32_t n)
{
    uint32_t want[CONTEXT + 80];
    assert_int_equal(t->n_tokens, n);
    assert_int_equal(expected(t, with_first, n, want), n);
    for (uint32_t i = 0; i < n; i++) assert_int_equal(t->tokens[i], want[i]);
}
static void expect_finished(const struct told *t, Tandem__V1__FinishReason reason, const char *status, bool is_lost)
{
    assert_int_equal(t->n_finished, 1);
    assert_string_equal(t->status, status);
    assert_int_equal(t->reason, reason);
    assert_int_equal(t->is_lost, is_lost);
}
#define NONE   TANDEM__V1__FINISH_REASON__FINISH_NONE
#define STOP   TANDEM__V1__FINISH_REASON__FINISH_STOP
#define LENGTH TANDEM__V1__FINISH_REASON__FINISH_LENGTH

#endif
