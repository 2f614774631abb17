#include "decode/sched.h"

#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/engine/kv_split.h"
#include "common/engine/sample.h"
#include "common/metrics/metrics.h"
#include "decode/pace.h"

struct td_decode_sched {
    struct td_decode_sched_options o;
    struct td_kv_pages *kv;
    struct td_decode_sched_owner owner;
    struct td_list queue, batch; /* both oldest first */
    uint32_t n_queued, n_running;
    struct td_decode_pace pace;
    bool has_stalled;
    struct step {
        struct td_batch batch;
        struct td_segment *segments; /* max_batch of them; user: the sequence */
        struct td_page_copy *copies; /* a pair for each of them */
    } steps[TD_DECODE_MAX_DEPTH];    /* n_in_flight of them are, from first on */
    uint32_t first, n_in_flight;
};

/* i-th in flight, or the one that would be next. */
static struct step *step_at(const struct td_decode_sched *s, uint32_t i)
{
    return (struct step *)&s->steps[(s->first + i) % TD_DECODE_MAX_DEPTH];
}

enum td_status td_decode_sched_create(const struct td_decode_sched_options *o, struct td_kv_pages *kv,
                                      const struct td_decode_sched_owner *owner, struct td_decode_sched **out)
{
    struct td_decode_sched *s = td_calloc(1, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    TD_CHECK(o->depth >= 1 && o->depth <= TD_DECODE_MAX_DEPTH);
    for (uint32_t i = 0; i < TD_DECODE_MAX_DEPTH; i++) {
        struct step *step = &s->steps[i];
        step->segments = td_calloc(o->max_batch, sizeof *step->segments);
        step->copies = td_calloc(o->max_batch, TD_KV_N_GROUPS * sizeof *step->copies);
        if (step->segments == NULL || step->copies == NULL) {
            td_decode_sched_destroy(s);
            return TD_E_NO_MEMORY;
        }
    }
    s->o = *o;
    s->kv = kv;
    s->owner = *owner;
    td_list_init(&s->queue);
    td_list_init(&s->batch);
    *out = s;
    return TD_OK;
}

void td_decode_sched_destroy(struct td_decode_sched *s)
{
    if (s == NULL) return;
    for (uint32_t i = 0; i < TD_DECODE_MAX_DEPTH; i++) {
        free(s->steps[i].segments);
        free(s->steps[i].copies);
    }
    free(s);
}

uint32_t td_decode_sched_n_in_flight(const struct td_decode_sched *s) { return s->n_in_flight; }
uint32_t td_decode_sched_n_step_prompt(const struct td_decode_sched *s)
{
    const struct td_batch *b = &step_at(s, 0)->batch;
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_segments; i++)
        if (b->segments[i].n_tokens > 1) n += b->segments[i].n_tokens;
    return n;
}
bool td_decode_sched_has_stalled(const struct td_decode_sched *s) { return s->has_stalled; }
uint32_t td_decode_sched_n_queued(const struct td_decode_sched *s) { return s->n_queued; }
uint32_t td_decode_sched_n_running(const struct td_decode_sched *s) { return s->n_running; }

/* --- room -------------------------------------------------------------------------------------------------- */

void td_decode_sched_need(const struct td_decode_sched *s, uint32_t n_tokens, bool is_local,
                          uint32_t need[TD_KV_N_GROUPS])
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        const struct td_kv_group_layout *l = &s->o.kv[g];
        uint32_t first, end;
        td_kv_blocks(l, (enum td_kv_group)g, s->o.window_tokens, n_tokens, &first, &end);
        need[g] = end - first + (n_tokens % l->page_tokens == 0 ? 1 : 0); /* the next token begins a page */
        if (g != TD_KV_SLIDING || !is_local) continue;
        /* A chunk holds the window before it and itself. */
        uint32_t all = n_tokens / l->page_tokens + 1;
        uint32_t span = td_kv_span_pages(s->o.window_tokens - 1 + s->o.chunk_tokens, l->page_tokens);
        need[g] = all < span ? all : span;
    }
}

enum td_status td_decode_sched_room(const struct td_decode_sched *s, uint32_t n_tokens, bool is_local,
                                    const struct td_kv_hit *hit, uint32_t n_others, uint32_t n_margin)
{
    uint32_t need[TD_KV_N_GROUPS];
    td_decode_sched_need(s, n_tokens, is_local, need);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        if (need[g] > td_kv_pages_n_total(s->kv, (enum td_kv_group)g)) return TD_E_TOO_LARGE;
    uint32_t shared[TD_KV_N_GROUPS] = {
        [TD_KV_SLIDING] = hit->n_blocks - hit->first_sliding, [TD_KV_FULL] = hit->n_blocks};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) need[g] -= shared[g] < need[g] ? shared[g] : need[g];
    /* Alone it would wait for nobody. */
    if (n_others > 0) need[TD_KV_FULL] += td_kv_span_pages(n_margin, s->o.kv[TD_KV_FULL].page_tokens);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        if ((uint64_t)need[g] + n_others > td_kv_pages_n_free(s->kv, (enum td_kv_group)g)) return TD_E_NO_PAGES;
    return TD_OK;
}

/* --- sequences --------------------------------------------------------------------------------------------- */

enum td_status td_decode_seq_init(struct td_decode_seq *q, const struct td_decode_sched *s,
                                  struct td_token_request *req, uint64_t born_ns, uint64_t order)
{
    *q = (struct td_decode_seq){.req = req, .born_ns = born_ns, .order = order};
    td_list_init(&q->link);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        q->pages[g] = td_calloc(req->n_tokens_max / s->o.kv[g].page_tokens + 1, sizeof *q->pages[g]);
        if (q->pages[g] == NULL) {
            td_decode_seq_deinit(q);
            return TD_E_NO_MEMORY;
        }
        for (uint32_t b = 0; b <= req->n_tokens_max / s->o.kv[g].page_tokens; b++) q->pages[g][b] = TD_NO_PAGE;
    }
    return TD_OK;
}

void td_decode_seq_deinit(struct td_decode_seq *q)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        TD_CHECK(q->first[g] == q->end[g]);
        free(q->pages[g]);
        q->pages[g] = NULL;
    }
}

void td_decode_seq_take_pages(struct td_decode_seq *q, enum td_kv_group g, uint32_t first_block, uint32_t n_pages,
                              const uint32_t *pages)
{
    if (q->first[g] == q->end[g]) q->first[g] = q->end[g] = first_block;
    TD_CHECK(q->end[g] == first_block);
    q->end[g] = first_block + n_pages;
    for (uint32_t i = 0; i < n_pages; i++) q->pages[g][first_block + i] = pages[i];
}

static void free_blocks(struct td_decode_sched *s, struct td_decode_seq *q, enum td_kv_group g, uint32_t end)
{
    for (; q->first[g] < end && q->first[g] < q->end[g]; q->first[g]++) {
        td_kv_pages_unref(s->kv, g, q->pages[g][q->first[g]]);
        q->pages[g][q->first[g]] = TD_NO_PAGE;
    }
}

void td_decode_seq_drop(struct td_decode_seq *q, const struct td_decode_sched *s)
{
    if (s->o.prefix != NULL) td_kv_prefix_copied(s->o.prefix, &q->hit);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        while (q->end[g] > q->first[g]) { /* the last first: a block is known as long as those before it are */
            q->end[g]--;
            td_kv_pages_unref(s->kv, (enum td_kv_group)g, q->pages[g][q->end[g]]);
            q->pages[g][q->end[g]] = TD_NO_PAGE;
        }
    q->n_cached = 0;
}

void td_decode_seq_find(struct td_decode_seq *q, const struct td_decode_sched *s, bool is_local)
{
    if (s->o.prefix == NULL) return;
    (is_local ? td_kv_prefix_find_compute : td_kv_prefix_find_receive)(s->o.prefix, q->req->tokens, q->req->n_tokens,
                                                                       q->req->id, q->pages, &q->hit);
    q->end[TD_KV_FULL] = q->end[TD_KV_SLIDING] = q->hit.n_blocks;
    q->first[TD_KV_SLIDING] = q->hit.first_sliding;
    if (is_local) q->n_cached = q->hit.n_tokens;
}

void td_decode_seq_forget(struct td_decode_seq *q, const struct td_decode_sched *s)
{
    td_decode_seq_drop(q, s);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) q->first[g] = q->end[g] = 0;
    q->hit = (struct td_kv_hit){.chain.prompt_blocks = q->req->n_tokens / s->o.kv[TD_KV_FULL].page_tokens};
}

static void enter(const struct td_decode_sched *s, struct td_decode_seq *q)
{
    const uint32_t *const pages[] = {q->pages[TD_KV_SLIDING], q->pages[TD_KV_FULL]};
    if (s->o.prefix != NULL) td_kv_prefix_enter(s->o.prefix, &q->hit.chain, q->req->tokens, q->n_cached, pages);
}

void td_decode_seq_filled(struct td_decode_seq *q, const struct td_decode_sched *s)
{
    q->n_cached = q->req->n_tokens;
    enter(s, q);
}

static void release(struct td_decode_sched *s, struct td_decode_seq *q)
{
    td_decode_seq_drop(q, s);
    s->owner.released(s->owner.self, q);
}

bool td_decode_seq_is_older(const struct td_decode_seq *a, const struct td_decode_seq *b)
{
    return a->born_ns != b->born_ns ? a->born_ns < b->born_ns : a->order < b->order;
}

static void insert(struct td_list *list, struct td_decode_seq *q)
{
    struct td_list *at = list->prev;
    while (at != list && td_decode_seq_is_older(q, TD_LIST_ENTRY(at, struct td_decode_seq, link))) at = at->prev;
    td_list_push_front(at, &q->link); /* right after the last older one */
}

void td_decode_sched_add(struct td_decode_sched *s, struct td_decode_seq *q)
{
    TD_CHECK(!q->is_queued && !q->is_in_batch && q->n_cached < q->req->n_tokens);
    insert(&s->queue, q);
    q->is_queued = true;
    s->n_queued++;
}

void td_decode_sched_remove(struct td_decode_sched *s, struct td_decode_seq *q)
{
    TD_CHECK(q->is_queued || q->is_in_batch);
    td_list_remove(&q->link);
    if (q->is_queued)
        s->n_queued--;
    else
        s->n_running--;
    q->is_queued = q->is_in_batch = false;
    if (q->n_in_flight == 0) release(s, q);
}

/* --- planning ---------------------------------------------------------------------------------------------- */

static void fill_batch(struct td_decode_sched *s)
{
    while (s->n_running < s->o.max_batch && s->n_queued > 0) {
        struct td_decode_seq *q = TD_LIST_ENTRY(s->queue.next, struct td_decode_seq, link);
        td_list_remove(&q->link);
        q->is_queued = false;
        s->n_queued--;
        insert(&s->batch, q);
        q->is_in_batch = true;
        s->n_running++;
        s->owner.joined(s->owner.self, q);
    }
}

/* The youngest sequence that is younger than q. */
static struct td_decode_seq *find_younger(struct td_decode_sched *s, const struct td_decode_seq *q)
{
    struct td_decode_seq *youngest = NULL;
    struct td_list *lists[] = {&s->queue, &s->batch};
    for (unsigned i = 0; i < TD_COUNT(lists); i++) {
        if (td_list_is_empty(lists[i])) continue;
        struct td_decode_seq *last = TD_LIST_ENTRY(lists[i]->prev, struct td_decode_seq, link);
        if (td_decode_seq_is_older(q, last) && (youngest == NULL || td_decode_seq_is_older(youngest, last)))
            youngest = last;
    }
    return youngest;
}

enum growth { GROWN, WAITS, GIVES_UP };

static enum growth grow_group(struct td_decode_sched *s, struct td_decode_seq *q, enum td_kv_group g, uint32_t end)
{
    bool was_relieved = false;
    if (end <= q->end[g]) return GROWN;
    uint32_t n = end - q->end[g];
    while (td_kv_pages_alloc(s->kv, g, n, q->req->id, q->pages[g] + q->end[g]) != TD_OK) {
        if (s->n_in_flight > 0) return WAITS;
        struct td_decode_seq *victim = find_younger(s, q);
        if (victim != NULL) {
            s->owner.no_pages(s->owner.self, victim, true);
        } else if (was_relieved) {
            return WAITS;
        } else if (s->owner.relieve(s->owner.self, q)) {
            was_relieved = true; /* perhaps the pages are back already */
        } else {
            return GIVES_UP;
        }
    }
    q->end[g] = end;
    return GROWN;
}

/* Its next position. */
static uint32_t start_of(const struct td_decode_seq *q) { return q->n_cached + q->n_ahead; }
/* Tokens that have positions to come: those that are known, and those that a step in flight draws. */
static uint32_t n_pending(const struct td_decode_seq *q) { return q->req->n_tokens + q->n_draws - start_of(q); }

/* Pages for the next n tokens of q, after those of sliding layers that no token from here on sees went back: from the
 * first that a step in flight computes. */
static enum growth grow(struct td_decode_sched *s, struct td_decode_seq *q, uint32_t n)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        const struct td_kv_group_layout *l = &s->o.kv[g];
        uint32_t first, unused;
        td_kv_blocks(l, (enum td_kv_group)g, s->o.window_tokens, q->n_cached, &first, &unused);
        free_blocks(s, q, (enum td_kv_group)g, first);
        enum growth gr = grow_group(s, q, (enum td_kv_group)g, (start_of(q) + n - 1) / l->page_tokens + 1);
        if (gr != GROWN) return gr;
    }
    uint32_t n_sliding = q->end[TD_KV_SLIDING] - q->first[TD_KV_SLIDING];
    if (n_sliding > td_metric_value(TD_M_sequence_sliding_pages_max))
        td_metric_set(TD_M_sequence_sliding_pages_max, n_sliding);
    return GROWN;
}

static void fill_segment(struct td_decode_seq *q, struct td_segment *seg)
{
    uint32_t start = start_of(q);
    *seg = (struct td_segment){
        .tokens = q->req->tokens + start,
        .n_tokens = q->n_step,
        .start = start,
        .is_fed = start == q->req->n_tokens,
        .fed_by = q->segment,
        .sampling = &q->req->sampling,
        .user = q,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        seg->table[g] = (struct td_page_table){
            .pages = q->pages[g] + q->first[g], .first_block = q->first[g], .n_blocks = q->end[g] - q->first[g]};
    if (q->n_step == n_pending(q)) td_token_request_want_token(q->req, q->n_draws, seg);
}

/* Prompt tokens that the next step may compute. */
static uint32_t local_budget(const struct td_decode_sched *s)
{
    uint32_t n_decoding = 0;
    TD_LIST_FOREACH (it, &s->batch) n_decoding += n_pending(TD_LIST_ENTRY(it, struct td_decode_seq, link)) == 1;
    if (n_decoding == 0) return s->o.chunk_tokens;
    return td_decode_pace_budget(&s->pace, n_decoding, s->o.chunk_tokens);
}

static void observe(struct td_decode_sched *s, const struct td_batch *b, uint64_t took_ns)
{
    uint32_t n_decoding = 0, n_prompt = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        if (b->segments[i].n_tokens == 1 && b->segments[i].want_token)
            n_decoding++;
        else
            n_prompt += b->segments[i].n_tokens;
    }
    td_decode_pace_note(&s->pace, n_decoding, n_prompt, s->o.chunk_tokens, took_ns);
}

/* The token that is being drawn is its last, whatever it is. */
static bool is_ending(const struct td_decode_seq *q)
{
    return q->n_draws > 0 && q->req->n_tokens + q->n_draws >= q->req->n_tokens_max;
}

/* May a step be planned before those in flight are done? Not if a draw in it needs a token that they draw. */
static bool can_go_ahead(const struct td_decode_sched *s)
{
    TD_LIST_FOREACH (it, &s->batch) {
        const struct td_decode_seq *q = TD_LIST_ENTRY(it, struct td_decode_seq, link);
        if (q->n_draws > 0 && !is_ending(q) && td_sampling_has_penalties(&q->req->sampling)) return false;
    }
    return true;
}

/* How much of each sequence is computed, and the pages for it. false: pages are wanted that may come back once nothing
 * is in flight. */
static bool choose(struct td_decode_sched *s)
{
    uint32_t budget = local_budget(s);
    for (struct td_list *it = s->batch.next, *next; it != &s->batch; it = next) {
        struct td_decode_seq *q = TD_LIST_ENTRY(it, struct td_decode_seq, link);
        uint32_t pending = is_ending(q) ? 0 : n_pending(q);
        q->n_step = pending <= 1 || pending < budget ? pending : budget;
        enum growth gr = q->n_step == 0 ? WAITS : grow(s, q, q->n_step); /* only removes sequences behind q */
        next = it->next;
        if (gr == GROWN) {
            if (pending > 1) budget -= q->n_step;
            continue;
        }
        if (q->n_step > 0 && s->n_in_flight > 0) return false;
        if (q->n_step > 0) s->has_stalled = true;
        q->n_step = 0;
        /* Behind others it waits its turn elsewhere; the oldest of all has nobody left to wait for. */
        if (gr == GIVES_UP) s->owner.no_pages(s->owner.self, q, it != s->batch.next);
    }
    return true;
}

struct td_batch *td_decode_sched_plan(struct td_decode_sched *s)
{
    TD_CHECK(s->n_in_flight < s->o.depth);
    s->has_stalled = false;
    if (s->n_in_flight > 0 && !can_go_ahead(s)) return NULL;
    fill_batch(s);
    if (!choose(s)) return NULL;
    struct step *step = step_at(s, s->n_in_flight);
    uint32_t n = 0, n_copies = 0;
    TD_LIST_FOREACH (it, &s->batch) {
        struct td_decode_seq *q = TD_LIST_ENTRY(it, struct td_decode_seq, link);
        if (q->n_step == 0) continue;
        struct td_segment *seg = &step->segments[n];
        fill_segment(q, seg);
        /* Before its first tokens; a second time it would undo what they wrote. */
        for (int g = 0; g < TD_KV_N_GROUPS && q->hit.has_copy && q->n_ahead == 0; g++)
            step->copies[n_copies++] =
                (struct td_page_copy){(enum td_kv_group)g, q->hit.copy_from[g], q->pages[g][q->hit.n_blocks]};
        q->segment = n++;
        q->n_in_flight++;
        q->n_ahead += seg->n_tokens;
        q->n_draws += seg->want_token;
    }
    if (n == 0) return NULL;
    step->batch = (struct td_batch){
        .segments = step->segments, .n_segments = n, .copies = step->copies, .n_copies = n_copies, .user = s};
    s->n_in_flight++;
    return &step->batch;
}

static void end_step(struct td_decode_sched *s, struct td_batch *b, enum td_status st)
{
    for (uint32_t i = 0; i < b->n_segments; i++) {
        struct td_segment *seg = &b->segments[i];
        struct td_decode_seq *q = seg->user;
        q->n_in_flight--;
        q->n_ahead -= seg->n_tokens;
        q->n_draws -= seg->want_token;
        if (!q->is_in_batch) { /* it left while it was computed */
            if (q->n_in_flight == 0) release(s, q);
            continue;
        }
        if (st != TD_OK) {
            s->owner.broke(s->owner.self, q, st);
            continue;
        }
        q->n_cached += seg->n_tokens;
        if (s->o.prefix != NULL) td_kv_prefix_copied(s->o.prefix, &q->hit);
        enter(s, q);
        if (seg->want_token) s->owner.drew(s->owner.self, q, seg);
    }
}

void td_decode_sched_done(struct td_decode_sched *s, enum td_status st, uint64_t took_ns)
{
    TD_CHECK(s->n_in_flight > 0);
    struct td_batch *b = &step_at(s, 0)->batch;
    if (st == TD_OK) observe(s, b, took_ns);
    s->first = (s->first + 1) % TD_DECODE_MAX_DEPTH;
    s->n_in_flight--;
    end_step(s, b, st);
}

void td_decode_sched_refused(struct td_decode_sched *s, enum td_status st)
{
    TD_CHECK(s->n_in_flight > 0 && st != TD_OK);
    s->n_in_flight--;
    end_step(s, &step_at(s, s->n_in_flight)->batch, st);
}
