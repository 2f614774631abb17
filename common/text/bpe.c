/* Two ways to the same result. Short pieces, that is nearly all, scan an array for the best pair and close the gap: no
 * memory, few instructions. Long pieces, which a hostile text can make as long as itself, use a linked list and a heap.
 */
#include "common/text/bpe.h"

#include <stdlib.h>

#include "common/base/mem.h"

#define SHORT_BYTES 64u
#define NONE        UINT32_MAX

void td_bpe_scratch_free(struct td_bpe_scratch *s)
{
    free(s->memory);
    *s = (struct td_bpe_scratch){0};
}

static enum td_status merge_short(const struct td_vocab *v, const uint8_t *piece, size_t n, struct td_token_list *out)
{
    uint32_t ids[SHORT_BYTES], priority[SHORT_BYTES]; /* [i] of the pair (i, i + 1) */
    for (size_t i = 0; i < n; i++) ids[i] = v->byte_ids[piece[i]];
    for (size_t i = 0; i + 1 < n; i++) priority[i] = v->byte_pairs[(uint32_t)piece[i] << 8 | piece[i + 1]];
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (priority[i] < priority[best]) best = i;
        }
        if (priority[best] == TD_NEVER) break;
        ids[best] = td_vocab_merged(v, priority[best]);
        n--;
        for (size_t i = best + 1; i < n; i++) ids[i] = ids[i + 1];
        for (size_t i = best; i + 1 < n; i++) priority[i] = priority[i + 1];
        if (best + 1 < n) priority[best] = td_vocab_priority(v, ids[best], ids[best + 1]);
        if (best > 0) priority[best - 1] = td_vocab_priority(v, ids[best - 1], ids[best]);
    }
    td_token_list_append(out, ids, n);
    return out->failed ? TD_E_NO_MEMORY : TD_OK;
}

/* A symbol of the linked list; its place in the array is where it starts in the piece. */
struct symbol {
    uint32_t id;
    uint32_t prev, next; /* NONE: no neighbour */
    uint32_t priority;   /* of the pair with next; TD_NEVER also when this symbol is gone */
};

/* Min-heap of priority << 32 | place: the lowest priority first, then the leftmost. Entries whose pair has changed
 * since are recognised by its priority and skipped. */
struct heap {
    uint64_t *keys;
    size_t n;
};

static void sift_down(struct heap *h, size_t i)
{
    uint64_t key = h->keys[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= h->n) break;
        if (child + 1 < h->n && h->keys[child + 1] < h->keys[child]) child++;
        if (h->keys[child] >= key) break;
        h->keys[i] = h->keys[child];
        i = child;
    }
    h->keys[i] = key;
}

static void heap_push(struct heap *h, uint64_t key)
{
    size_t i = h->n++;
    while (i > 0 && h->keys[(i - 1) / 2] > key) {
        h->keys[i] = h->keys[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->keys[i] = key;
}

static uint64_t heap_pop(struct heap *h)
{
    uint64_t top = h->keys[0];
    h->keys[0] = h->keys[--h->n];
    if (h->n > 0) sift_down(h, 0);
    return top;
}

/* Looks up the pair of symbol i with its successor; true if it may merge. */
static bool pair_up(const struct td_vocab *v, struct symbol *s, uint32_t i)
{
    s[i].priority = s[i].next == NONE ? TD_NEVER : td_vocab_priority(v, s[i].id, s[s[i].next].id);
    return s[i].priority != TD_NEVER;
}

static uint64_t key_of(const struct symbol *s, uint32_t i) { return (uint64_t)s[i].priority << 32 | i; }

static enum td_status merge_long(const struct td_vocab *v, const uint8_t *piece, uint32_t n,
                                 struct td_bpe_scratch *scratch, struct td_token_list *out)
{
    /* One entry a pair at the start, and each of at most n - 1 merges adds two. */
    size_t n_keys = (size_t)n * 3;
    size_t need = n_keys * sizeof(uint64_t) + n * sizeof(struct symbol);
    if (need > scratch->n_bytes) {
        td_bpe_scratch_free(scratch);
        scratch->memory = td_calloc(1, need);
        if (scratch->memory == NULL) return TD_E_NO_MEMORY;
        scratch->n_bytes = need;
    }
    struct heap h = {.keys = scratch->memory};
    struct symbol *s = (struct symbol *)(void *)(h.keys + n_keys);
    for (uint32_t i = 0; i < n; i++) {
        s[i].id = v->byte_ids[piece[i]];
        s[i].prev = i == 0 ? NONE : i - 1;
        s[i].next = i + 1 == n ? NONE : i + 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (pair_up(v, s, i)) h.keys[h.n++] = key_of(s, i);
    }
    for (size_t i = h.n / 2; i-- > 0;) sift_down(&h, i);
    while (h.n > 0) {
        uint64_t key = heap_pop(&h);
        uint32_t i = (uint32_t)key;
        if (s[i].priority != (uint32_t)(key >> 32)) continue;
        uint32_t gone = s[i].next;
        s[i].id = td_vocab_merged(v, s[i].priority);
        s[i].next = s[gone].next;
        if (s[i].next != NONE) s[s[i].next].prev = i;
        s[gone].priority = TD_NEVER;
        if (pair_up(v, s, i)) heap_push(&h, key_of(s, i));
        uint32_t before = s[i].prev;
        if (before != NONE && pair_up(v, s, before)) heap_push(&h, key_of(s, before));
    }
    for (uint32_t i = 0; i != NONE; i = s[i].next) td_token_list_push(out, s[i].id);
    return out->failed ? TD_E_NO_MEMORY : TD_OK;
}

enum td_status td_bpe_merge(const struct td_vocab *v, const uint8_t *piece, size_t n, struct td_bpe_scratch *scratch,
                            struct td_token_list *out)
{
    return n <= SHORT_BYTES ? merge_short(v, piece, n, out) : merge_long(v, piece, (uint32_t)n, scratch, out);
}
