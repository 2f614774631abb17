/* Two ways to the same result. Short pieces, that is nearly all, scan an array for the best pair and close the gap: no
 * memory, few instructions. Long pieces, which a hostile text can make as long as itself, are a linked list whose pairs
 * lie in buckets, one a priority: the lowest bucket is worked off from left to right. Hostile texts repeat themselves,
 * so its places follow each other in memory, where a heap would jump about. */
#include "common/text/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

#define SHORT_BYTES 64u
#define NONE        UINT32_MAX
#define LOOSE       (UINT32_MAX - 1) /* in no bucket */

void td_bpe_scratch_free(struct td_bpe_scratch *s)
{
    free(s->memory);
    free(s->buckets);
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
    uint32_t up, down;   /* neighbours in the bucket of that priority; up may be LOOSE */
};

/* Which buckets hold something, as bits; then the words of those bits that are not 0, and so on: four levels span the
 * 24 bits of a priority. Empty between two pieces. */
#define N_LEVELS 4u
struct td_bpe_buckets {
    uint64_t *bits[N_LEVELS];
    uint32_t head[]; /* [priorities] place + 1; 0: empty */
};

static struct td_bpe_buckets *make_buckets(uint32_t n_priorities)
{
    size_t n[N_LEVELS], bytes = (sizeof(struct td_bpe_buckets) + n_priorities * sizeof(uint32_t) + 7) / 8 * 8,
                        at = bytes;
    for (uint32_t l = 0, over = n_priorities; l < N_LEVELS; l++) {
        n[l] = over = over / 64 + 1;
        bytes += n[l] * sizeof(uint64_t);
    }
    struct td_bpe_buckets *b = td_calloc(1, bytes);
    for (uint32_t l = 0; b != NULL && l < N_LEVELS; at += n[l++] * sizeof(uint64_t))
        b->bits[l] = (uint64_t *)(void *)((char *)b + at);
    return b;
}

static uint32_t lowest_bucket(const struct td_bpe_buckets *b)
{
    uint32_t at = 0;
    for (uint32_t l = N_LEVELS; l-- > 0;) {
        if (b->bits[l][at] == 0) return TD_NEVER; /* at the top only */
        at = at * 64 + (uint32_t)__builtin_ctzll(b->bits[l][at]);
    }
    return at;
}

static void put(struct td_bpe_buckets *b, struct symbol *s, uint32_t i)
{
    uint32_t p = s[i].priority, down = b->head[p] - 1;
    b->head[p] = i + 1;
    s[i].up = NONE;
    s[i].down = down; /* NONE when it was empty: 0 - 1 */
    if (down != NONE) {
        s[down].up = i;
        return;
    }
    for (uint32_t l = 0; l < N_LEVELS; l++, p /= 64) b->bits[l][p / 64] |= UINT64_C(1) << p % 64;
}

static void mark_empty(struct td_bpe_buckets *b, uint32_t p)
{
    b->head[p] = 0;
    for (uint32_t l = 0; l < N_LEVELS; l++, p /= 64)
        if ((b->bits[l][p / 64] &= ~(UINT64_C(1) << p % 64)) != 0) break;
}

static void take_out(struct td_bpe_buckets *b, struct symbol *s, uint32_t i)
{
    uint32_t up = s[i].up, down = s[i].down;
    if (up == LOOSE) return;
    s[i].up = LOOSE;
    if (down != NONE) s[down].up = up;
    if (up != NONE)
        s[up].down = down;
    else if (down != NONE)
        b->head[s[i].priority] = down + 1;
    else
        mark_empty(b, s[i].priority);
}

static int by_place(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Empties a bucket into places, from left to right. Usually it was filled in that order, which the list gives
 * backwards: only what is out of order is sorted. */
static uint32_t empty_bucket(struct td_bpe_buckets *b, struct symbol *s, uint32_t p, uint32_t *places,
                             uint64_t *n_steps)
{
    uint32_t n = 0;
    bool is_falling = true;
    for (uint32_t i = b->head[p] - 1; i != NONE; i = s[i].down) {
        is_falling = is_falling && (n == 0 || places[n - 1] > i);
        s[i].up = LOOSE;
        places[n++] = i;
    }
    mark_empty(b, p);
    for (uint32_t i = 0; i < n / 2; i++) {
        uint32_t other = places[n - 1 - i];
        places[n - 1 - i] = places[i];
        places[i] = other;
    }
    *n_steps += n;
    if (is_falling) return n;
    qsort(places, n, sizeof *places, by_place);
    *n_steps += n * (uint64_t)(32 - __builtin_clz(n));
    return n;
}

/* Looks up the pair of symbol i with its successor and puts it where it belongs; returns its priority. */
static uint32_t pair_up(const struct td_vocab *v, struct td_bpe_buckets *b, struct symbol *s, uint32_t i)
{
    take_out(b, s, i);
    s[i].priority = s[i].next == NONE ? TD_NEVER : td_vocab_priority(v, s[i].id, s[s[i].next].id);
    if (s[i].priority != TD_NEVER) put(b, s, i);
    return s[i].priority;
}

/* Merges symbol i with its successor; returns the lowest priority that came to be. */
static uint32_t merge_pair(const struct td_vocab *v, struct td_bpe_buckets *b, struct symbol *s, uint32_t i)
{
    uint32_t gone = s[i].next, before = s[i].prev;
    take_out(b, s, gone);
    s[gone].priority = TD_NEVER;
    s[i].id = td_vocab_merged(v, s[i].priority);
    s[i].next = s[gone].next;
    if (s[i].next != NONE) s[s[i].next].prev = i;
    uint32_t p = pair_up(v, b, s, i), q = before == NONE ? TD_NEVER : pair_up(v, b, s, before);
    return p < q ? p : q;
}

static enum td_status prepare(const struct td_vocab *v, uint32_t n, struct td_bpe_scratch *scratch)
{
    size_t need = n * (sizeof(struct symbol) + sizeof(uint32_t));
    if (scratch->buckets == NULL) scratch->buckets = make_buckets(v->merge_ids != NULL ? v->max_pairs : v->n_ids);
    if (need > scratch->n_bytes) {
        free(scratch->memory);
        scratch->memory = td_calloc(1, need);
        scratch->n_bytes = scratch->memory == NULL ? 0 : need;
    }
    return scratch->memory == NULL || scratch->buckets == NULL ? TD_E_NO_MEMORY : TD_OK;
}

static enum td_status merge_long(const struct td_vocab *v, const uint8_t *piece, uint32_t n,
                                 struct td_bpe_scratch *scratch, struct td_token_list *out)
{
    enum td_status st = prepare(v, n, scratch);
    if (st != TD_OK) return st;
    struct td_bpe_buckets *b = scratch->buckets;
    struct symbol *s = scratch->memory;
    uint32_t *places = (uint32_t *)(void *)(s + n);
    for (uint32_t i = 0; i < n; i++) {
        s[i] = (struct symbol){.id = v->byte_ids[piece[i]], .prev = i - 1, .next = i + 1, .up = LOOSE, .down = NONE};
        s[i].priority = i + 1 == n ? TD_NEVER : v->byte_pairs[(uint32_t)piece[i] << 8 | piece[i + 1]];
        if (s[i].priority != TD_NEVER) put(b, s, i);
    }
    s[n - 1].next = NONE; /* the first's prev is NONE already: 0 - 1 */
    for (uint32_t p; (p = lowest_bucket(b)) != TD_NEVER;) {
        uint32_t n_places = empty_bucket(b, s, p, places, &scratch->n_steps), k = 0;
        /* A place whose pair has changed since it was taken is in another bucket, or gone. */
        while (k < n_places) {
            uint32_t i = places[k++];
            if (s[i].priority != p || s[i].up != LOOSE) continue;
            scratch->n_steps += 2; /* pairs */
            if (merge_pair(v, b, s, i) <= p) break;
        }
        /* Only a strange vocabulary has a merge that gives rise to an earlier one: that goes first. */
        for (; k < n_places; k++)
            if (s[places[k]].priority == p && s[places[k]].up == LOOSE) put(b, s, places[k]);
    }
    for (uint32_t i = 0; i != NONE; i = s[i].next) td_token_list_push(out, s[i].id);
    return out->failed ? TD_E_NO_MEMORY : TD_OK;
}

enum td_status td_bpe_merge(const struct td_vocab *v, const uint8_t *piece, size_t n, struct td_bpe_scratch *scratch,
                            struct td_token_list *out)
{
    return n <= SHORT_BYTES ? merge_short(v, piece, n, out) : merge_long(v, piece, (uint32_t)n, scratch, out);
}
