/* A tree of blocks in arrays: a node a block, found by its hash. Every node has a page of full layers, so there are
 * never more nodes than such pages. Idle pages, those that only the cache knows, hang in a list per group, oldest
 * first. */
#include "common/engine/kv_prefix.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/fault.h"
#include "common/base/list.h"
#include "common/base/mem.h"
#include "common/base/token_chain.h"
#include "common/engine/batch.h"
#include "common/metrics/metrics.h"

#define NONE             UINT32_MAX
#define N_CHANGES        4096u /* kept for a router that hears of them every heartbeat */
#define MAX_COPY_CHOICES 16u   /* children that a boundary block is compared with */

struct node {
    uint64_t hash[2];
    uint32_t parent, first_child, prev_sibling, next_sibling; /* NONE: a root's parent, none */
    uint32_t next_in_bucket;                                  /* also of the free list */
    uint64_t use;                                             /* rises; 0: free */
    uint32_t page[TD_KV_N_GROUPS];                            /* sliding: TD_NO_PAGE if not kept */
    bool is_rolling; /* its sliding page is kept for a sequence that is being decoded, and goes as that moves on */
    struct td_list idle[TD_KV_N_GROUPS];
};

struct td_kv_prefix {
    struct td_kv_pages *kv;
    uint32_t page_tokens, window_tokens;
    uint32_t window_blocks; /* that the window before a boundary meets */
    struct node *nodes;
    uint32_t *tokens; /* [node][page_tokens] */
    uint32_t n_nodes, n_used, first_free;
    uint64_t n_uses;
    uint32_t *buckets; /* first node */
    uint32_t n_buckets;
    uint32_t first_root;               /* children of nothing */
    uint32_t *node_of[TD_KV_N_GROUPS]; /* by page */
    struct td_list idle[TD_KV_N_GROUPS];
    uint64_t n_evicted[TD_KV_N_GROUPS];
    uint64_t n_changes, changes[N_CHANGES];
};

/* --- nodes ------------------------------------------------------------------------------------------------- */

static uint32_t *tokens_of(const struct td_kv_prefix *p, uint32_t n) { return p->tokens + (size_t)n * p->page_tokens; }

static void chain_hash(const struct td_kv_prefix *p, const uint64_t before[2], const uint32_t *tokens, uint64_t out[2])
{
    td_token_chain(before, tokens, p->page_tokens, out);
    if (td_fault_hit(TD_FAULT_PREFIX_COLLISION)) out[0] = out[1] = 1;
}

/* For td_kv_prefix_tell: the newest changes; the lowest bit says that the block went. */
static void note_change(struct td_kv_prefix *p, const uint64_t hash[2], bool went)
{
    p->changes[p->n_changes++ % N_CHANGES] = td_token_chain_short(hash) | went;
}

static uint32_t *bucket_of(const struct td_kv_prefix *p, const uint64_t hash[2])
{
    return &p->buckets[hash[0] & (p->n_buckets - 1)];
}

static bool is_same(const struct td_kv_prefix *p, uint32_t n, const uint64_t hash[2], uint32_t parent,
                    const uint32_t *tokens)
{
    const struct node *nd = &p->nodes[n];
    return nd->hash[0] == hash[0] && nd->hash[1] == hash[1] && nd->parent == parent &&
           memcmp(tokens_of(p, n), tokens, p->page_tokens * sizeof *tokens) == 0;
}

static uint32_t look_up(const struct td_kv_prefix *p, const uint64_t hash[2], uint32_t parent, const uint32_t *tokens)
{
    uint32_t n = *bucket_of(p, hash);
    while (n != NONE && !is_same(p, n, hash, parent, tokens)) n = p->nodes[n].next_in_bucket;
    return n;
}

static uint32_t *children_of(struct td_kv_prefix *p, uint32_t parent)
{
    return parent == NONE ? &p->first_root : &p->nodes[parent].first_child;
}

static void attach(struct td_kv_prefix *p, uint32_t n, enum td_kv_group g, uint32_t page)
{
    p->nodes[n].page[g] = page;
    p->node_of[g][page] = n;
    td_kv_pages_keep(p->kv, g, page);
}

static void detach(struct td_kv_prefix *p, uint32_t n, enum td_kv_group g)
{
    struct node *nd = &p->nodes[n];
    uint32_t page = nd->page[g];
    if (page == TD_NO_PAGE) return;
    nd->page[g] = TD_NO_PAGE;
    p->node_of[g][page] = NONE;
    td_list_remove(&nd->idle[g]);
    td_kv_pages_forget(p->kv, g, page);
}

static uint32_t add(struct td_kv_prefix *p, const uint64_t hash[2], uint32_t parent, const uint32_t *tokens,
                    uint32_t full_page)
{
    uint32_t n = p->first_free;
    TD_CHECK(n != NONE); /* as many as there are pages, and full_page has none */
    struct node *nd = &p->nodes[n];
    p->first_free = nd->next_in_bucket;
    uint32_t *bucket = bucket_of(p, hash), *siblings = children_of(p, parent);
    *nd = (struct node){.hash = {hash[0], hash[1]},
                        .parent = parent,
                        .first_child = NONE,
                        .prev_sibling = NONE,
                        .next_sibling = *siblings,
                        .next_in_bucket = *bucket,
                        .use = ++p->n_uses,
                        .page = {TD_NO_PAGE, TD_NO_PAGE}};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) td_list_init(&nd->idle[g]);
    if (*siblings != NONE) p->nodes[*siblings].prev_sibling = n;
    *siblings = *bucket = n;
    memcpy(tokens_of(p, n), tokens, p->page_tokens * sizeof *tokens);
    attach(p, n, TD_KV_FULL, full_page);
    note_change(p, hash, false);
    p->n_used++;
    return n;
}

static void remove_leaf(struct td_kv_prefix *p, uint32_t n)
{
    struct node *nd = &p->nodes[n];
    note_change(p, nd->hash, true);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) detach(p, n, (enum td_kv_group)g);
    if (nd->next_sibling != NONE) p->nodes[nd->next_sibling].prev_sibling = nd->prev_sibling;
    *(nd->prev_sibling != NONE ? &p->nodes[nd->prev_sibling].next_sibling : children_of(p, nd->parent)) =
        nd->next_sibling;
    uint32_t *at = bucket_of(p, nd->hash);
    while (*at != n) at = &p->nodes[*at].next_in_bucket;
    *at = nd->next_in_bucket;
    nd->use = 0;
    nd->next_in_bucket = p->first_free;
    p->first_free = n;
    p->n_used--;
}

/* With everything behind it. */
static void remove_tree(struct td_kv_prefix *p, uint32_t top)
{
    for (uint32_t n = top;;) {
        while (p->nodes[n].first_child != NONE) n = p->nodes[n].first_child;
        uint32_t parent = p->nodes[n].parent;
        remove_leaf(p, n);
        if (n == top) return;
        n = parent;
    }
}

/* --- the pages' keeper ------------------------------------------------------------------------------------- */

static void on_idle(void *self, enum td_kv_group g, uint32_t page)
{
    struct td_kv_prefix *p = self;
    td_list_push_back(&p->idle[g], &p->nodes[p->node_of[g][page]].idle[g]);
}

static void on_busy(void *self, enum td_kv_group g, uint32_t page)
{
    struct td_kv_prefix *p = self;
    td_list_remove(&p->nodes[p->node_of[g][page]].idle[g]);
}

static void on_evict(void *self, enum td_kv_group g)
{
    struct td_kv_prefix *p = self;
    TD_CHECK(!td_list_is_empty(&p->idle[g]));
    uint32_t before = td_kv_pages_n_kept(p->kv, g);
    if (g == TD_KV_FULL) {
        struct node *nd = TD_LIST_ENTRY(p->idle[g].next, struct node, idle[TD_KV_FULL]);
        remove_tree(p, (uint32_t)(nd - p->nodes));
    } else {
        struct node *nd = TD_LIST_ENTRY(p->idle[g].next, struct node, idle[TD_KV_SLIDING]);
        detach(p, (uint32_t)(nd - p->nodes), TD_KV_SLIDING);
    }
    uint32_t n = before - td_kv_pages_n_kept(p->kv, g);
    p->n_evicted[g] += n;
    td_metric_add(TD_M_prefix_evicted_pages, n);
}

/* --- life -------------------------------------------------------------------------------------------------- */

enum td_status td_kv_prefix_create(const struct td_kv_group_layout layout[TD_KV_N_GROUPS], uint32_t window_tokens,
                                   struct td_kv_pages *kv, struct td_kv_prefix **out)
{
    struct td_kv_prefix *p = td_calloc(1, sizeof *p);
    if (p == NULL) return TD_E_NO_MEMORY;
    TD_CHECK(layout[TD_KV_SLIDING].page_tokens == layout[TD_KV_FULL].page_tokens);
    p->page_tokens = layout[TD_KV_FULL].page_tokens;
    p->window_tokens = window_tokens;
    p->window_blocks = (window_tokens - 1 + p->page_tokens - 1) / p->page_tokens;
    p->n_nodes = td_kv_pages_n_total(kv, TD_KV_FULL);
    for (p->n_buckets = 16; p->n_buckets < p->n_nodes && p->n_buckets < 1u << 30;) p->n_buckets *= 2;
    p->nodes = td_calloc(p->n_nodes, sizeof *p->nodes);
    p->tokens = td_calloc(p->n_nodes, p->page_tokens * sizeof *p->tokens);
    p->buckets = td_calloc(p->n_buckets, sizeof *p->buckets);
    bool is_whole = p->nodes != NULL && p->tokens != NULL && p->buckets != NULL;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t n = td_kv_pages_n_total(kv, (enum td_kv_group)g);
        p->node_of[g] = td_calloc(n, sizeof *p->node_of[g]);
        is_whole = is_whole && p->node_of[g] != NULL;
        for (uint32_t i = 0; p->node_of[g] != NULL && i < n; i++) p->node_of[g][i] = NONE;
        td_list_init(&p->idle[g]);
    }
    if (!is_whole) {
        td_kv_prefix_destroy(p);
        return TD_E_NO_MEMORY;
    }
    for (uint32_t i = 0; i < p->n_buckets; i++) p->buckets[i] = NONE;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        p->nodes[i].next_in_bucket = i + 1 < p->n_nodes ? i + 1 : NONE;
        p->nodes[i].page[TD_KV_FULL] = TD_NO_PAGE; /* not used */
    }
    p->first_free = p->n_nodes > 0 ? 0 : NONE;
    p->first_root = NONE;
    p->kv = kv;
    struct td_kv_keeper keeper = {.self = p, .idle = on_idle, .busy = on_busy, .evict = on_evict};
    td_kv_pages_set_keeper(kv, &keeper);
    *out = p;
    return TD_OK;
}

void td_kv_prefix_destroy(struct td_kv_prefix *p)
{
    if (p == NULL) return;
    if (p->kv != NULL) {
        while (p->first_root != NONE) remove_tree(p, p->first_root);
        td_kv_pages_set_keeper(p->kv, NULL);
    }
    for (int g = 0; g < TD_KV_N_GROUPS; g++) free(p->node_of[g]);
    free(p->nodes);
    free(p->tokens);
    free(p->buckets);
    free(p);
}

/* --- finding ----------------------------------------------------------------------------------------------- */

/* First block that a token at pos sees in a sliding layer. */
static uint32_t first_seen(const struct td_kv_prefix *p, uint32_t pos)
{
    uint32_t before = p->window_tokens - 1;
    return pos > before ? (pos - before) / p->page_tokens : 0;
}

/* Are the sliding pages of blocks [first, ...] up to the one of node n there? block: n's. */
static bool has_window(const struct td_kv_prefix *p, uint32_t n, uint32_t block, uint32_t first)
{
    for (; n != NONE && block + 1 > first; n = p->nodes[n].parent, block--)
        if (p->nodes[n].page[TD_KV_SLIDING] == TD_NO_PAGE) return false;
    return true;
}

/* The child of `parent` whose block begins with most of the n tokens, and a window for what follows: how many. */
static uint32_t find_partial(struct td_kv_prefix *p, uint32_t parent, uint32_t block, const uint32_t *tokens,
                             uint32_t n, uint32_t *node_out)
{
    uint32_t best = 0, n_tried = 0;
    if (n > p->page_tokens) n = p->page_tokens;
    for (uint32_t c = *children_of(p, parent); c != NONE && n_tried < MAX_COPY_CHOICES;
         c = p->nodes[c].next_sibling, n_tried++) {
        uint32_t k = 0;
        while (k < n && tokens_of(p, c)[k] == tokens[k]) k++;
        if (k <= best || !has_window(p, c, block, first_seen(p, block * p->page_tokens + k))) continue;
        best = k;
        *node_out = c;
    }
    return best;
}

/* Pages of the nodes from n (whose block is `block`) up. */
static void hold(struct td_kv_prefix *p, uint32_t n, uint32_t block, uint32_t first_sliding, const char *holder,
                 uint32_t *const pages_out[TD_KV_N_GROUPS])
{
    for (; n != NONE; n = p->nodes[n].parent, block--) {
        pages_out[TD_KV_FULL][block] = p->nodes[n].page[TD_KV_FULL];
        td_kv_pages_hold(p->kv, TD_KV_FULL, p->nodes[n].page[TD_KV_FULL], holder);
        if (block < first_sliding) continue;
        pages_out[TD_KV_SLIDING][block] = p->nodes[n].page[TD_KV_SLIDING];
        td_kv_pages_hold(p->kv, TD_KV_SLIDING, p->nodes[n].page[TD_KV_SLIDING], holder);
    }
}

static void find(struct td_kv_prefix *p, const uint32_t *tokens, uint32_t n_tokens, bool is_computed,
                 const char *holder, uint32_t *const pages_out[TD_KV_N_GROUPS], struct td_kv_hit *out)
{
    *out = (struct td_kv_hit){0};
    if (n_tokens == 0) return;
    uint32_t max_blocks = (n_tokens - 1) / p->page_tokens, n_known = 0, last = NONE;
    uint64_t hash[2] = {0, 0}, next[2];
    for (; n_known < max_blocks; n_known++) {
        chain_hash(p, hash, tokens + (size_t)n_known * p->page_tokens, next);
        uint32_t n = look_up(p, next, last, tokens + (size_t)n_known * p->page_tokens);
        if (n == NONE) break;
        last = n;
        memcpy(hash, next, sizeof hash);
    }
    out->chain.prompt_blocks = n_tokens / p->page_tokens;
    out->chain.branch_blocks = n_known;

    /* The longest is in the block behind those that are known whole. */
    uint32_t n_blocks = n_known, first = 0, n_part = 0, node = NONE, at = n_known * p->page_tokens;
    if (is_computed) n_part = find_partial(p, last, n_known, tokens + at, n_tokens - 1 - at, &node);
    for (; n_part == 0; n_blocks--, last = p->nodes[last].parent) {
        first = first_seen(p, is_computed ? n_blocks * p->page_tokens : n_tokens);
        if (n_blocks == 0 || has_window(p, last, n_blocks - 1, first)) break;
    }
    out->n_blocks = n_blocks;
    out->n_tokens = n_blocks * p->page_tokens + n_part;
    if (n_part > 0) {
        first = first_seen(p, out->n_tokens);
        out->has_copy = true;
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            out->copy_from[g] = p->nodes[node].page[g];
            td_kv_pages_hold(p->kv, (enum td_kv_group)g, out->copy_from[g], holder);
        }
    }
    out->first_sliding = first < n_blocks ? first : n_blocks;
    if (n_blocks > 0) {
        memcpy(out->chain.hash, p->nodes[last].hash, sizeof out->chain.hash);
        out->chain.n_blocks = n_blocks;
        out->chain.node = last;
        out->chain.node_use = p->nodes[last].use;
        hold(p, last, n_blocks - 1, out->first_sliding, holder, pages_out);
    }
}

void td_kv_prefix_find_compute(struct td_kv_prefix *p, const uint32_t *tokens, uint32_t n_tokens, const char *holder,
                               uint32_t *const pages_out[TD_KV_N_GROUPS], struct td_kv_hit *out)
{
    find(p, tokens, n_tokens, true, holder, pages_out, out);
}

void td_kv_prefix_find_receive(struct td_kv_prefix *p, const uint32_t *tokens, uint32_t n_tokens, const char *holder,
                               uint32_t *const pages_out[TD_KV_N_GROUPS], struct td_kv_hit *out)
{
    find(p, tokens, n_tokens, false, holder, pages_out, out);
}

void td_kv_prefix_copied(struct td_kv_prefix *p, struct td_kv_hit *hit)
{
    if (!hit->has_copy) return;
    hit->has_copy = false;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) td_kv_pages_unref(p->kv, (enum td_kv_group)g, hit->copy_from[g]);
}

void td_kv_prefix_drop(struct td_kv_prefix *p, struct td_kv_hit *hit, uint32_t *const pages[TD_KV_N_GROUPS])
{
    td_kv_prefix_copied(p, hit);
    uint32_t first[TD_KV_N_GROUPS] = {[TD_KV_SLIDING] = hit->first_sliding};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t b = hit->n_blocks; b-- > first[g];) { /* the last first: see td_kv_prefix_enter */
            td_kv_pages_unref(p->kv, (enum td_kv_group)g, pages[g][b]);
            pages[g][b] = TD_NO_PAGE;
        }
    *hit = (struct td_kv_hit){0};
}

void td_kv_prefix_count(const struct td_kv_hit *hit)
{
    td_metric_add(TD_M_prefix_lookups, 1);
    td_metric_add(TD_M_prefix_hit_tokens, hit->n_tokens);
}

/* --- entering ---------------------------------------------------------------------------------------------- */

static bool is_worth_keeping(const struct td_kv_chain *c, uint32_t boundary)
{
    return boundary == c->prompt_blocks || boundary == c->branch_blocks || boundary % TD_KV_PREFIX_STRIDE == 0;
}

/* Keeps the sliding pages of the window that ends behind node n, block `block`. */
static void keep_window(struct td_kv_prefix *p, uint32_t n, uint32_t block, bool is_rolling, const uint32_t *sliding)
{
    for (uint32_t i = 0; i < p->window_blocks && n != NONE; i++, n = p->nodes[n].parent, block--) {
        struct node *nd = &p->nodes[n];
        if (nd->page[TD_KV_SLIDING] == TD_NO_PAGE) {
            uint32_t page = sliding[block];
            if (page == TD_NO_PAGE || p->node_of[TD_KV_SLIDING][page] != NONE) continue;
            attach(p, n, TD_KV_SLIDING, page);
            nd->is_rolling = true;
        }
        if (!is_rolling) nd->is_rolling = false;
    }
}

/* The window has moved on by a block: what it left behind goes, unless it is kept for other reasons. */
static void roll(struct td_kv_prefix *p, uint32_t n)
{
    for (uint32_t i = 0; i < p->window_blocks && n != NONE; i++) n = p->nodes[n].parent;
    if (n != NONE && p->nodes[n].is_rolling) {
        detach(p, n, TD_KV_SLIDING);
        p->nodes[n].is_rolling = false;
    }
}

void td_kv_prefix_enter(struct td_kv_prefix *p, struct td_kv_chain *c, const uint32_t *tokens, uint32_t n_tokens,
                        const uint32_t *const pages[TD_KV_N_GROUPS])
{
    uint32_t end = n_tokens / p->page_tokens, n = NONE;
    if (c->n_blocks >= end) return;
    if (c->n_blocks > 0) {
        n = c->node;
        if (p->nodes[n].use != c->node_use) { /* it went behind a block of somebody else: from the start again */
            n = NONE;
            c->n_blocks = 0;
            c->hash[0] = c->hash[1] = 0;
        }
    }
    for (; c->n_blocks < end; c->n_blocks++) {
        uint32_t b = c->n_blocks;
        uint64_t hash[2];
        const uint32_t *block = tokens + (size_t)b * p->page_tokens;
        chain_hash(p, c->hash, block, hash);
        uint32_t known = look_up(p, hash, n, block);
        if (known == NONE) {
            /* A page stands for one block only; that it stands for another one cannot be, but then the chain ends. */
            uint32_t page = pages[TD_KV_FULL][b];
            if (p->node_of[TD_KV_FULL][page] != NONE) return;
            known = add(p, hash, n, block, page);
        }
        n = known;
        memcpy(c->hash, hash, sizeof hash);
        c->node = n;
        c->node_use = p->nodes[n].use;
        if (is_worth_keeping(c, b + 1))
            keep_window(p, n, b, false, pages[TD_KV_SLIDING]);
        else if (b + 1 > c->prompt_blocks)
            keep_window(p, n, b, true, pages[TD_KV_SLIDING]);
        if (b + 1 > c->prompt_blocks) roll(p, n);
    }
}

/* --- for routers ------------------------------------------------------------------------------------------- */

uint32_t td_kv_prefix_tell(const struct td_kv_prefix *p, struct td_kv_teller *t, uint64_t *out, uint32_t max,
                           bool *is_all_out)
{
    uint32_t n = 0;
    *is_all_out = false;
    if (!t->has_begun || p->n_changes - t->n_told > N_CHANGES) {
        *t = (struct td_kv_teller){.has_begun = true, .n_told = p->n_changes};
        *is_all_out = true;
    }
    /* What changes meanwhile is told again afterwards, in order. */
    for (; t->node < p->n_nodes && n < max; t->node++)
        if (p->nodes[t->node].page[TD_KV_FULL] != TD_NO_PAGE) out[n++] = td_token_chain_short(p->nodes[t->node].hash);
    for (; t->node == p->n_nodes && t->n_told < p->n_changes && n < max; t->n_told++)
        out[n++] = p->changes[t->n_told % N_CHANGES];
    return n;
}

/* --- for people -------------------------------------------------------------------------------------------- */

uint32_t td_kv_prefix_n_blocks(const struct td_kv_prefix *p) { return p->n_used; }

void td_kv_prefix_describe(const struct td_kv_prefix *p, struct td_buf *out)
{
    td_buf_printf(out,
                  "{\"blocks\":%u,\"idle_sliding_pages\":%u,\"idle_full_pages\":%u,\"evicted_sliding_pages\":%llu,"
                  "\"evicted_full_pages\":%llu}",
                  p->n_used, td_kv_pages_n_kept(p->kv, TD_KV_SLIDING), td_kv_pages_n_kept(p->kv, TD_KV_FULL),
                  (unsigned long long)p->n_evicted[TD_KV_SLIDING], (unsigned long long)p->n_evicted[TD_KV_FULL]);
}
