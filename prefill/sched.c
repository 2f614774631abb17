#include "prefill/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/engine/kv_split.h"

uint32_t td_prefill_sched_sliding_compute(uint32_t window, uint32_t chunk, uint32_t page_tokens)
{
    return td_kv_span_pages(window - 1 + chunk, page_tokens);
}

uint32_t td_prefill_sched_sliding_send(uint32_t window, uint32_t page_tokens)
{
    return td_kv_span_pages(window - 1, page_tokens);
}

/* First block that a position at `pos` or later can see in a sliding layer. */
static uint32_t first_visible(const struct td_prefill_sched *s, uint32_t pos)
{
    uint32_t before = s->window_tokens - 1;
    return pos > before ? (pos - before) / s->kv[TD_KV_SLIDING].page_tokens : 0;
}

static uint32_t blocks(const struct td_prefill_sched *s, enum td_kv_group g, uint32_t n_tokens)
{
    return (uint32_t)(((uint64_t)n_tokens + s->kv[g].page_tokens - 1) / s->kv[g].page_tokens);
}

enum td_status td_prefill_seq_init(struct td_prefill_seq *q, const struct td_prefill_sched *s, uint32_t n_tokens,
                                   const char *holder)
{
    memset(q, 0, sizeof *q);
    q->n_tokens = n_tokens;
    q->n_blocks = blocks(s, TD_KV_FULL, n_tokens);
    snprintf(q->holder, sizeof q->holder, "%s", holder);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        q->pages[g] = td_calloc(q->n_blocks, sizeof *q->pages[g]);
        if (q->pages[g] == NULL) {
            td_prefill_seq_deinit(q, s);
            return TD_E_NO_MEMORY;
        }
        for (uint32_t b = 0; b < q->n_blocks; b++) q->pages[g][b] = TD_NO_PAGE;
    }
    return TD_OK;
}

static void drop(const struct td_prefill_sched *s, struct td_prefill_seq *q, enum td_kv_group g, uint32_t block)
{
    td_kv_pages_unref(s->pages, g, q->pages[g][block]);
    q->pages[g][block] = TD_NO_PAGE;
}

/* Sliding pages before `block` go back. */
static void drop_sliding_before(const struct td_prefill_sched *s, struct td_prefill_seq *q, uint32_t block)
{
    while (q->n_sliding > 0 && q->sliding_first < block) {
        drop(s, q, TD_KV_SLIDING, q->sliding_first);
        q->sliding_first++;
        q->n_sliding--;
    }
}

void td_prefill_seq_deinit(struct td_prefill_seq *q, const struct td_prefill_sched *s)
{
    if (s->prefix != NULL) td_kv_prefix_copied(s->prefix, &q->hit);
    drop_sliding_before(s, q, UINT32_MAX);
    /* The last first: a block is only known as long as those before it are. */
    for (uint32_t b = q->n_blocks; q->has_full && b-- > 0;) drop(s, q, TD_KV_FULL, b);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) free(q->pages[g]);
    memset(q, 0, sizeof *q);
}

static enum td_status reserve(const struct td_prefill_sched *s, struct td_prefill_seq *q)
{
    uint32_t first = q->hit.n_blocks;
    enum td_status st =
        td_kv_pages_alloc(s->pages, TD_KV_FULL, q->n_blocks - first, q->holder, q->pages[TD_KV_FULL] + first);
    q->has_full = st == TD_OK;
    return st;
}

uint32_t td_prefill_sched_known(const struct td_prefill_sched *s, struct td_prefill_seq *q, const uint32_t *tokens)
{
    struct td_kv_hit hit = {0};
    if (s->prefix == NULL) return 0;
    td_kv_prefix_find_compute(s->prefix, tokens, q->n_tokens, q->holder, q->pages, &hit);
    uint32_t n = hit.n_tokens;
    td_kv_prefix_drop(s->prefix, &hit, q->pages);
    return n;
}

enum td_status td_prefill_sched_reserve(const struct td_prefill_sched *s, struct td_prefill_seq *q,
                                        const uint32_t *tokens)
{
    if (s->prefix != NULL) td_kv_prefix_find_compute(s->prefix, tokens, q->n_tokens, q->holder, q->pages, &q->hit);
    enum td_status st = reserve(s, q);
    if (st != TD_OK && q->hit.n_tokens > 0) { /* what is known, and the page to copy, may be in the way of the rest */
        td_kv_prefix_drop(s->prefix, &q->hit, q->pages);
        q->hit.chain.prompt_blocks = q->n_tokens / s->kv[TD_KV_FULL].page_tokens;
        st = reserve(s, q);
    }
    if (st != TD_OK) return st;
    if (s->prefix != NULL) td_kv_prefix_count(&q->hit);
    q->n_done = q->n_cached = q->hit.n_tokens;
    q->sliding_first = q->hit.first_sliding;
    q->n_sliding = q->hit.n_blocks - q->hit.first_sliding;
    return TD_OK;
}

uint32_t td_prefill_seq_copies(const struct td_prefill_seq *q, struct td_page_copy out[TD_KV_N_GROUPS])
{
    if (!q->hit.has_copy) return 0;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        out[g] = (struct td_page_copy){(enum td_kv_group)g, q->hit.copy_from[g], q->pages[g][q->hit.n_blocks]};
    return TD_KV_N_GROUPS;
}

enum td_status td_prefill_sched_chunk(const struct td_prefill_sched *s, struct td_prefill_seq *q, uint32_t n_max,
                                      const uint32_t *tokens, struct td_segment *seg)
{
    uint32_t left = q->n_tokens - q->n_done, n = left < n_max ? left : n_max;
    uint32_t first = first_visible(s, q->n_done), end = blocks(s, TD_KV_SLIDING, q->n_done + n);
    if (q->n_sliding == 0) q->sliding_first = first;
    uint32_t have = q->sliding_first + q->n_sliding, n_free = td_kv_pages_n_free(s->pages, TD_KV_SLIDING);
    /* The page that is copied from comes on top of what the pool is laid out for, until this chunk is done. */
    if (q->hit.has_copy && n_free > 0 && end > have + n_free) {
        end = have + n_free;
        n = end * s->kv[TD_KV_SLIDING].page_tokens - q->n_done;
    }
    if (end > have) {
        enum td_status st =
            td_kv_pages_alloc(s->pages, TD_KV_SLIDING, end - have, q->holder, q->pages[TD_KV_SLIDING] + have);
        if (st != TD_OK) {
            for (uint32_t b = have; b < end; b++) q->pages[TD_KV_SLIDING][b] = TD_NO_PAGE;
            return st;
        }
        q->n_sliding += end - have;
    }
    q->n_chunk = n;
    seg->tokens = tokens + q->n_done;
    seg->n_tokens = n;
    seg->start = q->n_done;
    seg->table[TD_KV_SLIDING] = (struct td_page_table){q->pages[TD_KV_SLIDING] + first, first, end - first};
    seg->table[TD_KV_FULL] = (struct td_page_table){q->pages[TD_KV_FULL], 0, blocks(s, TD_KV_FULL, q->n_done + n)};
    return TD_OK;
}

uint32_t td_prefill_seq_ready_end(const struct td_prefill_seq *q, const struct td_prefill_sched *s, enum td_kv_group g)
{
    if (td_prefill_seq_is_last_chunk(q)) return q->n_blocks;
    return g == TD_KV_FULL ? (q->n_done + q->n_chunk) / s->kv[g].page_tokens : 0;
}

void td_prefill_sched_chunk_done(const struct td_prefill_sched *s, struct td_prefill_seq *q, const uint32_t *tokens)
{
    q->n_done += q->n_chunk;
    q->n_chunk = 0;
    if (s->prefix != NULL) {
        const uint32_t *const pages[] = {q->pages[TD_KV_SLIDING], q->pages[TD_KV_FULL]};
        td_kv_prefix_copied(s->prefix, &q->hit);
        td_kv_prefix_enter(s->prefix, &q->hit.chain, tokens, q->n_done, pages);
    }
    drop_sliding_before(s, q, first_visible(s, q->n_done));
}

void td_prefill_sched_chunk_undone(struct td_prefill_seq *q) { q->n_chunk = 0; }

/* A few tokens say little: what a pass costs whatever its size would count as theirs. */
#define PACE_MIN_TOKENS 32u

void td_prefill_pace_observe(struct td_prefill_pace *p, uint32_t n_tokens, uint64_t took_ns)
{
    if (n_tokens < PACE_MIN_TOKENS || took_ns == 0) return;
    double x = (double)took_ns / n_tokens;
    if (p->ns_per_token == 0 || x < p->ns_per_token)
        p->ns_per_token = x;
    else
        p->ns_per_token += (x - p->ns_per_token) / 16;
}

uint64_t td_prefill_pace_ns(const struct td_prefill_pace *p, uint64_t n_tokens)
{
    return (uint64_t)(p->ns_per_token * (double)n_tokens);
}
