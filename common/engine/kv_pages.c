/* A bitmap of free pages per group, searched for the lowest run that is long enough: long runs let a transfer coalesce
 * its puts, and taking the lowest keeps the long runs at the top whole. Counts and holders lie in one array, a cache
 * line a page. Nothing is allocated after create. */
#include "common/engine/kv_pages.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"

#define WORD_BITS 64u

struct page {
    uint32_t refs;
    bool is_kept;
    char holder[59];
};

struct group {
    uint32_t n_pages, n_free; /* n_free: neither held nor kept */
    uint32_t n_kept;          /* by nobody but the cache */
    uint32_t first_word;      /* no page below this word is free */
    uint64_t *free_bits;
    struct page *pages;
};

struct td_kv_pages {
    struct group groups[TD_KV_N_GROUPS];
    struct td_kv_keeper keeper;
    struct td_kv_watch watch;
};

static struct group *group_of(const struct td_kv_pages *kv, enum td_kv_group g)
{
    TD_CHECK(g < TD_KV_N_GROUPS);
    return (struct group *)&kv->groups[g];
}

static struct page *page_of(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct group *gr = group_of(kv, g);
    TD_CHECK(page < gr->n_pages);
    return &gr->pages[page];
}

static uint32_t n_words(const struct group *gr) { return (gr->n_pages + WORD_BITS - 1) / WORD_BITS; }

enum td_status td_kv_pages_create(const uint32_t n_pages[TD_KV_N_GROUPS], struct td_kv_pages **out)
{
    struct td_kv_pages *kv = td_calloc(1, sizeof *kv);
    if (kv == NULL) return TD_E_NO_MEMORY;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        struct group *gr = &kv->groups[g];
        gr->n_pages = gr->n_free = n_pages[g];
        gr->free_bits = td_calloc(n_words(gr), sizeof *gr->free_bits);
        gr->pages = td_calloc(gr->n_pages, sizeof *gr->pages);
        if (gr->free_bits == NULL || gr->pages == NULL) {
            td_kv_pages_destroy(kv);
            return TD_E_NO_MEMORY;
        }
        for (uint32_t p = 0; p < gr->n_pages; p++) gr->free_bits[p / WORD_BITS] |= 1ull << (p % WORD_BITS);
    }
    *out = kv;
    return TD_OK;
}

void td_kv_pages_destroy(struct td_kv_pages *kv)
{
    if (kv == NULL) return;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        free(kv->groups[g].free_bits);
        free(kv->groups[g].pages);
    }
    free(kv);
}

/* The next run of free pages at or after `from`: [*start, *end). */
static bool next_run(const struct group *gr, uint32_t from, uint32_t *start, uint32_t *end)
{
    uint32_t w = from / WORD_BITS, n = n_words(gr);
    if (w >= n) return false;
    uint64_t bits = gr->free_bits[w] & (UINT64_MAX << (from % WORD_BITS));
    while (bits == 0) {
        if (++w == n) return false;
        bits = gr->free_bits[w];
    }
    uint32_t at = w * WORD_BITS + (uint32_t)__builtin_ctzll(bits);
    *start = at;
    while (at < gr->n_pages) {
        uint64_t taken = ~gr->free_bits[at / WORD_BITS] >> (at % WORD_BITS);
        if (taken != 0) {
            at += (uint32_t)__builtin_ctzll(taken);
            break;
        }
        at = (at / WORD_BITS + 1) * WORD_BITS;
    }
    *end = at < gr->n_pages ? at : gr->n_pages;
    return true;
}

static void set_holder(struct page *p, const char *holder)
{
    size_t n = 0;
    for (; holder[n] != '\0' && n + 1 < sizeof p->holder; n++) {
        char c = holder[n];
        p->holder[n] = c >= ' ' && c <= '~' && c != '"' && c != '\\' ? c : '?'; /* goes into JSON as it is */
    }
    p->holder[n] = '\0';
}

static void take(struct td_kv_pages *kv, enum td_kv_group g, uint32_t start, uint32_t n, const char *holder,
                 uint32_t *pages_out)
{
    struct group *gr = &kv->groups[g];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t p = start + i;
        TD_CHECK(gr->pages[p].refs == 0);
        gr->free_bits[p / WORD_BITS] &= ~(1ull << (p % WORD_BITS));
        gr->pages[p].refs = 1;
        set_holder(&gr->pages[p], holder);
        pages_out[i] = p;
        if (kv->watch.taken != NULL) kv->watch.taken(kv->watch.self, g, p);
    }
    gr->n_free -= n;
    while (gr->first_word < n_words(gr) && gr->free_bits[gr->first_word] == 0) gr->first_word++;
}

enum td_status td_kv_pages_alloc(struct td_kv_pages *kv, enum td_kv_group g, uint32_t n, const char *holder,
                                 uint32_t *pages_out)
{
    struct group *gr = group_of(kv, g);
    if (n > gr->n_free + gr->n_kept) return TD_E_NO_PAGES;
    if (n == 0) return TD_OK;
    while (n > gr->n_free) {
        uint32_t before = gr->n_kept;
        kv->keeper.evict(kv->keeper.self, g);
        TD_CHECK(gr->n_kept < before);
    }
    uint32_t begin = gr->first_word * WORD_BITS, start, end;
    for (uint32_t from = begin; next_run(gr, from, &start, &end); from = end) {
        if (end - start < n) continue;
        take(kv, g, start, n, holder, pages_out);
        return TD_OK;
    }
    uint32_t n_taken = 0; /* no run is long enough: the lowest ones, in rising order */
    for (uint32_t from = begin; n_taken < n; from = end) {
        bool is_found = next_run(gr, from, &start, &end);
        TD_CHECK(is_found);
        uint32_t m = end - start < n - n_taken ? end - start : n - n_taken;
        take(kv, g, start, m, holder, pages_out + n_taken);
        n_taken += m;
    }
    return TD_OK;
}

void td_kv_pages_ref(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct page *p = page_of(kv, g, page);
    TD_CHECK(p->refs > 0 && p->refs < UINT32_MAX);
    p->refs++;
}

static void set_free(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct group *gr = &kv->groups[g];
    uint32_t w = page / WORD_BITS;
    gr->free_bits[w] |= 1ull << (page % WORD_BITS);
    gr->n_free++;
    if (w < gr->first_word) gr->first_word = w;
    if (kv->watch.freed != NULL) kv->watch.freed(kv->watch.self, g, page);
}

void td_kv_pages_unref(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct group *gr = group_of(kv, g);
    struct page *p = page_of(kv, g, page);
    TD_CHECK(p->refs > 0);
    if (--p->refs > 0) return;
    p->holder[0] = '\0';
    if (p->is_kept) {
        gr->n_kept++;
        kv->keeper.idle(kv->keeper.self, g, page);
    } else {
        set_free(kv, g, page);
    }
}

uint32_t td_kv_pages_refs(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    return page_of(kv, g, page)->refs;
}

uint32_t td_kv_pages_n_free(const struct td_kv_pages *kv, enum td_kv_group g)
{
    const struct group *gr = group_of(kv, g);
    return gr->n_free + gr->n_kept;
}

uint32_t td_kv_pages_n_kept(const struct td_kv_pages *kv, enum td_kv_group g) { return group_of(kv, g)->n_kept; }
bool td_kv_pages_is_kept(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    return page_of(kv, g, page)->is_kept;
}
uint32_t td_kv_pages_n_total(const struct td_kv_pages *kv, enum td_kv_group g) { return group_of(kv, g)->n_pages; }

void td_kv_pages_set_watch(struct td_kv_pages *kv, const struct td_kv_watch *w)
{
    kv->watch = w != NULL ? *w : (struct td_kv_watch){0};
}

/* --- the prefix cache's ------------------------------------------------------------------------------------ */

void td_kv_pages_set_keeper(struct td_kv_pages *kv, const struct td_kv_keeper *k)
{
    kv->keeper = k != NULL ? *k : (struct td_kv_keeper){0};
}

void td_kv_pages_keep(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct page *p = page_of(kv, g, page);
    TD_CHECK(p->refs > 0 && !p->is_kept && kv->keeper.evict != NULL);
    p->is_kept = true;
}

void td_kv_pages_forget(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    struct group *gr = group_of(kv, g);
    struct page *p = page_of(kv, g, page);
    TD_CHECK(p->is_kept);
    p->is_kept = false;
    if (p->refs > 0) return;
    gr->n_kept--;
    set_free(kv, g, page);
}

void td_kv_pages_hold(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page, const char *holder)
{
    struct page *p = page_of(kv, g, page);
    TD_CHECK((p->refs > 0 || p->is_kept) && p->refs < UINT32_MAX);
    if (p->refs++ > 0) return;
    group_of(kv, g)->n_kept--;
    set_holder(p, holder);
    kv->keeper.busy(kv->keeper.self, g, page);
}

/* --- for people -------------------------------------------------------------------------------------------- */

struct held {
    const char *holder;
    enum td_kv_group group;
};

static int compare_held(const void *a, const void *b)
{
    return strcmp(((const struct held *)a)->holder, ((const struct held *)b)->holder);
}

void td_kv_pages_describe(const struct td_kv_pages *kv, struct td_buf *json_out)
{
    static const char *const names[TD_KV_N_GROUPS] = {[TD_KV_SLIDING] = "sliding", [TD_KV_FULL] = "full"};
    uint32_t n_used = 0;
    td_buf_str(json_out, "{");
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        const struct group *gr = &kv->groups[g];
        uint32_t n_shared = 0;
        for (uint32_t p = 0; p < gr->n_pages; p++) n_shared += gr->pages[p].refs > 1;
        n_used += gr->n_pages - gr->n_free - gr->n_kept;
        td_buf_printf(json_out, "\"%s\":{\"total\":%u,\"free\":%u,\"cached\":%u,\"shared\":%u},", names[g], gr->n_pages,
                      gr->n_free + gr->n_kept, gr->n_kept, n_shared);
    }
    td_buf_str(json_out, "\"holders\":[");
    struct held *held = td_calloc(n_used, sizeof *held);
    if (held == NULL) n_used = 0;
    uint32_t n = 0;
    for (int g = 0; g < TD_KV_N_GROUPS && held != NULL; g++)
        for (uint32_t p = 0; p < kv->groups[g].n_pages; p++)
            if (kv->groups[g].pages[p].refs > 0) held[n++] = (struct held){kv->groups[g].pages[p].holder, g};
    if (n > 0) qsort(held, n, sizeof *held, compare_held);
    for (uint32_t i = 0, end; i < n; i = end) {
        uint32_t n_pages[TD_KV_N_GROUPS] = {0};
        for (end = i; end < n && strcmp(held[end].holder, held[i].holder) == 0; end++) n_pages[held[end].group]++;
        td_buf_printf(json_out, "%s{\"holder\":\"%s\",\"sliding\":%u,\"full\":%u}", i == 0 ? "" : ",", held[i].holder,
                      n_pages[TD_KV_SLIDING], n_pages[TD_KV_FULL]);
    }
    free(held);
    td_buf_str(json_out, "]}");
}
