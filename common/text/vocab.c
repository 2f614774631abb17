/* Which priority merges have. A tokenizer.json lists merges, and in general only the list is right: priority is the
 * position, and a pair that is not listed never merges. gpt-oss's file says at length what its ids say: it lists every
 * split of every token into two tokens, ordered by the token's id. Then ids are the better priority, for they reproduce
 * ties exactly as tiktoken breaks them (the leftmost of all pairs that give the same token, not the leftmost of one
 * listed split). td_vocab_merges_end checks the two properties, completeness and order, and chooses. */
#include "common/text/vocab.h"

#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/mem.h"

#define MAX_IDS    ((1u << TD_PAIR_ID_BITS) - 1)
#define MAX_MERGES ((1u << TD_PAIR_PRIORITY_BITS) - 1)

enum td_status td_vocab_init(struct td_vocab *v, uint32_t n_ids)
{
    *v = (struct td_vocab){0};
    if (n_ids >= MAX_IDS) return TD_E_TOO_LARGE;
    v->n_ids = n_ids;
    v->tokens = td_calloc(n_ids, sizeof *v->tokens);
    return v->tokens == NULL ? TD_E_NO_MEMORY : TD_OK;
}

void td_vocab_deinit(struct td_vocab *v)
{
    td_buf_free(&v->blob);
    free(v->tokens);
    free(v->by_bytes);
    free(v->pairs);
    free(v->merge_ids);
    free(v->byte_pairs);
    free(v->specials);
    *v = (struct td_vocab){0};
}

enum td_status td_vocab_add(struct td_vocab *v, uint32_t id, const void *bytes, size_t n, bool is_special,
                            struct td_err *err)
{
    if (n == 0) return td_err_set(err, TD_E_BAD_FILE, "token %u is empty", id);
    if (n > UINT16_MAX) return td_err_set(err, TD_E_BAD_FILE, "token %u has %zu bytes", id, n);
    if (id >= v->n_ids) return td_err_set(err, TD_E_BAD_FILE, "id %u is out of range (%u ids)", id, v->n_ids);
    struct td_token *t = &v->tokens[id];
    if (t->n_bytes != 0) return td_err_set(err, TD_E_BAD_FILE, "id %u is given to two tokens", id);
    if (v->blob.n + n > UINT32_MAX) return td_err_set(err, TD_E_BAD_FILE, "tokens hold more than 4 GiB");
    *t = (struct td_token){.offset = (uint32_t)v->blob.n, .n_bytes = (uint32_t)n, .is_special = is_special};
    td_buf_put(&v->blob, bytes, n);
    if (v->blob.failed) return TD_E_NO_MEMORY;
    if (is_special) v->n_specials++;
    if (!is_special && n > v->max_token_bytes) v->max_token_bytes = (uint32_t)n;
    return TD_OK;
}

/* Power of two of which n fill at most half. */
static uint32_t slots_for(size_t n)
{
    uint32_t slots = 16;
    while (slots / 2 < n && slots < UINT32_MAX / 2) slots *= 2;
    return slots;
}

static int longer_first(const void *a, const void *b)
{
    const struct td_special *x = a, *y = b;
    if (x->n_bytes != y->n_bytes) return x->n_bytes > y->n_bytes ? -1 : 1;
    return memcmp(x->name, y->name, x->n_bytes);
}

static enum td_status index_specials(struct td_vocab *v, struct td_err *err)
{
    v->specials = td_calloc(v->n_specials, sizeof *v->specials);
    if (v->specials == NULL) return TD_E_NO_MEMORY;
    uint32_t n = 0;
    for (uint32_t id = 0; id < v->n_ids; id++) {
        if (!v->tokens[id].is_special) continue;
        const uint8_t *name = td_vocab_bytes(v, id);
        v->specials[n++] = (struct td_special){.id = id, .n_bytes = v->tokens[id].n_bytes, .name = name};
        v->special_first[name[0]] = true;
    }
    TD_CHECK(n == v->n_specials);
    qsort(v->specials, n, sizeof *v->specials, longer_first);
    for (uint32_t i = 1; i < n; i++) {
        const struct td_special *a = &v->specials[i - 1], *b = &v->specials[i];
        if (a->n_bytes == b->n_bytes && memcmp(a->name, b->name, a->n_bytes) == 0)
            return td_err_set(err, TD_E_BAD_FILE, "special tokens %u and %u have the same text", a->id, b->id);
    }
    return TD_OK;
}

enum td_status td_vocab_index(struct td_vocab *v, struct td_err *err)
{
    enum td_status st = index_specials(v, err);
    if (st != TD_OK) return st;
    uint32_t slots = slots_for(v->n_ids);
    v->by_bytes = td_calloc(slots, sizeof *v->by_bytes);
    if (v->by_bytes == NULL) return TD_E_NO_MEMORY;
    memset(v->by_bytes, 0xff, slots * sizeof *v->by_bytes);
    v->bytes_mask = slots - 1;
    for (uint32_t id = 0; id < v->n_ids; id++) {
        const struct td_token *t = &v->tokens[id];
        if (t->n_bytes == 0 || t->is_special) continue;
        const uint8_t *bytes = td_vocab_bytes(v, id);
        uint32_t other = td_vocab_find(v, bytes, t->n_bytes);
        if (other != TD_NO_TOKEN)
            return td_err_set(err, TD_E_BAD_FILE, "tokens %u and %u have the same text", other, id);
        struct td_bytes_key key = td_bytes_key(bytes, t->n_bytes);
        uint32_t i = td_bytes_key_hash(key) & v->bytes_mask;
        while (v->by_bytes[i].id != TD_NO_TOKEN) i = (i + 1) & v->bytes_mask;
        v->by_bytes[i] = (struct td_bytes_slot){.key = key, .id = id};
    }
    for (unsigned b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        v->byte_ids[b] = td_vocab_find(v, &byte, 1);
        if (v->byte_ids[b] == TD_NO_TOKEN)
            return td_err_set(err, TD_E_BAD_FILE, "no token for byte 0x%02X: not every text could be encoded", b);
    }
    return TD_OK;
}

enum td_status td_vocab_merges_begin(struct td_vocab *v, size_t n_merges)
{
    if (n_merges >= MAX_MERGES) return TD_E_TOO_LARGE;
    uint32_t slots = slots_for(n_merges + 1);
    v->pairs = td_calloc(slots, sizeof *v->pairs);
    v->merge_ids = td_calloc(n_merges, sizeof *v->merge_ids);
    v->byte_pairs = td_calloc(1u << 16, sizeof *v->byte_pairs);
    if (v->pairs == NULL || v->merge_ids == NULL || v->byte_pairs == NULL) return TD_E_NO_MEMORY;
    memset(v->pairs, 0xff, slots * sizeof *v->pairs);
    v->pair_shift = 64u - (uint32_t)__builtin_ctz(slots);
    v->max_pairs = (uint32_t)n_merges;
    return TD_OK;
}

/* False: the pair is there already. */
static bool insert_pair(struct td_vocab *v, uint32_t left, uint32_t right, uint32_t priority)
{
    TD_CHECK(v->n_pairs < v->max_pairs);
    uint64_t key = td_pair_key(left, right);
    uint32_t mask = UINT32_MAX >> (v->pair_shift - 32), i = td_pair_hash(v, key);
    for (; v->pairs[i] != UINT64_MAX; i = (i + 1) & mask) {
        if (v->pairs[i] >> TD_PAIR_PRIORITY_BITS == key) return false;
    }
    v->pairs[i] = key << TD_PAIR_PRIORITY_BITS | priority;
    v->n_pairs++;
    return true;
}

static void fill_byte_pairs(struct td_vocab *v)
{
    for (uint32_t i = 0; i < 1u << 16; i++)
        v->byte_pairs[i] = td_vocab_priority(v, v->byte_ids[i >> 8], v->byte_ids[i & 0xff]);
}

enum td_status td_vocab_merge_add(struct td_vocab *v, const uint8_t *left, size_t n_left, const uint8_t *right,
                                  size_t n_right, struct td_err *err)
{
    uint32_t l = td_vocab_find(v, left, n_left), r = td_vocab_find(v, right, n_right);
    if (l == TD_NO_TOKEN || r == TD_NO_TOKEN)
        return td_err_set(err, TD_E_BAD_FILE, "its %s part is not in the vocabulary",
                          l == TD_NO_TOKEN ? "left" : "right");
    uint8_t both[2 * UINT16_MAX];
    memcpy(both, left, n_left);
    memcpy(both + n_left, right, n_right);
    uint32_t id = td_vocab_find(v, both, n_left + n_right);
    if (id == TD_NO_TOKEN) return td_err_set(err, TD_E_BAD_FILE, "its result is not in the vocabulary");
    if (!insert_pair(v, l, r, v->n_pairs)) return td_err_set(err, TD_E_BAD_FILE, "the pair is listed twice");
    v->merge_ids[v->n_pairs - 1] = id;
    return TD_OK;
}

/* Calls fn for every split of an ordinary token into two ordinary tokens. */
static void each_split(struct td_vocab *v, void (*fn)(struct td_vocab *v, uint32_t l, uint32_t r, uint32_t id, void *),
                       void *user)
{
    for (uint32_t id = 0; id < v->n_ids; id++) {
        const struct td_token *t = &v->tokens[id];
        if (t->is_special) continue;
        const uint8_t *bytes = td_vocab_bytes(v, id);
        for (uint32_t k = 1; k < t->n_bytes; k++) {
            uint32_t l = td_vocab_find(v, bytes, k);
            if (l == TD_NO_TOKEN) continue;
            uint32_t r = td_vocab_find(v, bytes + k, t->n_bytes - k);
            if (r != TD_NO_TOKEN) fn(v, l, r, id, user);
        }
    }
}

static void count_split(struct td_vocab *v, uint32_t l, uint32_t r, uint32_t id, void *user)
{
    (void)v, (void)l, (void)r, (void)id;
    ++*(size_t *)user;
}

static void insert_split(struct td_vocab *v, uint32_t l, uint32_t r, uint32_t id, void *user)
{
    (void)user;
    bool is_new = insert_pair(v, l, r, id);
    TD_CHECK(is_new); /* a pair of tokens has one concatenation, and a token has one split at a place */
}

/* The list says the same as the ids. */
static bool is_list_by_ids(struct td_vocab *v)
{
    size_t n_splits = 0;
    for (uint32_t i = 1; i < v->n_pairs; i++) {
        if (v->merge_ids[i - 1] > v->merge_ids[i]) return false;
    }
    each_split(v, count_split, &n_splits);
    return n_splits == v->n_pairs; /* all listed pairs are splits, each once: equal counts mean that none is missing */
}

static void use_ids(struct td_vocab *v)
{
    const uint64_t mask = ((uint64_t)1 << TD_PAIR_PRIORITY_BITS) - 1;
    uint32_t n_slots = (UINT32_MAX >> (v->pair_shift - 32)) + 1;
    for (uint32_t i = 0; i < n_slots && v->merge_ids != NULL; i++) {
        if (v->pairs[i] != UINT64_MAX) v->pairs[i] = (v->pairs[i] & ~mask) | v->merge_ids[v->pairs[i] & mask];
    }
    free(v->merge_ids);
    v->merge_ids = NULL;
}

void td_vocab_merges_end(struct td_vocab *v)
{
    if (is_list_by_ids(v)) use_ids(v);
    fill_byte_pairs(v);
}

enum td_status td_vocab_merges_from_ids(struct td_vocab *v)
{
    size_t n_splits = 0;
    each_split(v, count_split, &n_splits);
    enum td_status st = td_vocab_merges_begin(v, n_splits);
    if (st != TD_OK) return st;
    each_split(v, insert_split, NULL);
    free(v->merge_ids);
    v->merge_ids = NULL;
    fill_byte_pairs(v);
    return TD_OK;
}
