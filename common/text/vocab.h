/* The data of a tokenizer: byte strings and their ids, which pairs merge and how early, and the special tokens.
 * Filled once while loading (add tokens, index, add merges), immutable afterwards. All lookups are open-addressing
 * hashes without deletion, at most half full. */
#ifndef TD_TEXT_VOCAB_H
#define TD_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <xxhash.h>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/text/token_list.h"

struct td_token {
    uint32_t offset, n_bytes; /* into blob; n_bytes 0: no token has this id */
    bool is_special;
};
/* A byte string as the table compares it. Up to 11 bytes are the key themselves, so that a look-up of a common word
 * touches one cache line; longer ones are known by their hash, and a match is checked against the bytes. */
#define TD_KEY_INLINE_BYTES 11u
struct td_bytes_key {
    uint64_t low;  /* bytes 0 .. 7, or the hash */
    uint32_t high; /* bytes 8 .. 10 and the length in the upper 8 bits; 0xFF there: low is a hash */
};
struct td_bytes_slot {
    struct td_bytes_key key;
    uint32_t id; /* TD_NO_TOKEN: empty */
};
/* Pairs are packed into one word, for the same reason: left id, right id, priority. All ones: empty. */
#define TD_PAIR_ID_BITS       20u
#define TD_PAIR_PRIORITY_BITS 24u
#define TD_NEVER              UINT32_MAX /* the priority of a pair that does not merge */
struct td_special {
    uint32_t id, n_bytes;
    const uint8_t *name;
};

struct td_vocab {
    struct td_buf blob; /* bytes of all tokens, in the order they were added */
    struct td_token *tokens;
    uint32_t n_ids;
    struct td_bytes_slot *by_bytes; /* ordinary tokens only */
    uint32_t bytes_mask;
    uint64_t *pairs;
    uint32_t pair_shift; /* 64 - log2 of the number of slots */
    uint32_t n_pairs, max_pairs;
    uint32_t *merge_ids;  /* [priority] what the pair becomes; NULL: the priority is that id */
    uint32_t *byte_pairs; /* [first byte << 8 | second] priority */
    uint32_t byte_ids[256];
    uint32_t max_token_bytes;    /* of ordinary tokens */
    struct td_special *specials; /* by falling length, so that the longest of several is found first */
    uint32_t n_specials;
    bool special_first[256]; /* bytes that a special token's name starts with */
};

/* Room for ids below n_ids. TOO_LARGE: more than a million. */
enum td_status td_vocab_init(struct td_vocab *v, uint32_t n_ids);
void td_vocab_deinit(struct td_vocab *v);

/* Error texts name the token; callers put the file in front. BAD_FILE: id out of range or taken, empty, too long. */
enum td_status td_vocab_add(struct td_vocab *v, uint32_t id, const void *bytes, size_t n, bool is_special,
                            struct td_err *err);
/* After the last token: builds the lookups. BAD_FILE: two tokens alike, or a byte without a token. */
enum td_status td_vocab_index(struct td_vocab *v, struct td_err *err);
/* Id of an ordinary token, TD_NO_TOKEN if there is none. */
static inline uint32_t td_vocab_find(const struct td_vocab *v, const uint8_t *bytes, size_t n);

/* Merges as a list: position in the list is the priority, unless the list says the same as the ids do (see vocab.c). */
/* TOO_LARGE: more than 16 million. */
enum td_status td_vocab_merges_begin(struct td_vocab *v, size_t n_merges);
enum td_status td_vocab_merge_add(struct td_vocab *v, const uint8_t *left, size_t n_left, const uint8_t *right,
                                  size_t n_right, struct td_err *err);
void td_vocab_merges_end(struct td_vocab *v);
/* No list: every split of a token into two tokens merges, with the token's id as the priority. */
enum td_status td_vocab_merges_from_ids(struct td_vocab *v);

static inline const uint8_t *td_vocab_bytes(const struct td_vocab *v, uint32_t id)
{
    return v->blob.data + v->tokens[id].offset;
}

static inline uint64_t td_load(const uint8_t *p, size_t n) /* n 4 or 8 */
{
    uint64_t v = 0;
    memcpy(&v, p, n);
    return v;
}

/* Without reading past the end: two loads may overlap, their common bytes fall on each other. Little-endian. */
static inline struct td_bytes_key td_bytes_key(const uint8_t *p, size_t n)
{
    struct td_bytes_key k = {.high = (uint32_t)n << 24};
    if (n > TD_KEY_INLINE_BYTES) {
        k.low = XXH3_64bits(p, n);
        k.high = 0xFF000000u;
    } else if (n >= 8) {
        k.low = td_load(p, 8);
        if (n > 8) k.high |= (uint32_t)(td_load(p + n - 8, 8) >> (64 - 8 * (n - 8)));
    } else if (n >= 4) {
        k.low = td_load(p, 4) | td_load(p + n - 4, 4) << (8 * (n - 4));
    } else if (n > 0) {
        k.low = p[0] | (uint64_t)p[n / 2] << (8 * (n / 2)) | (uint64_t)p[n - 1] << (8 * (n - 1));
    }
    return k;
}

static inline uint32_t td_bytes_key_hash(struct td_bytes_key k)
{
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)(k.low ^ 0x9E3779B97F4A7C15ull) * (k.high ^ 0xD6E8FEB86659FD93ull);
    return (uint32_t)((uint64_t)(product >> 64) ^ (uint64_t)product);
}

static inline uint32_t td_vocab_find(const struct td_vocab *v, const uint8_t *bytes, size_t n)
{
    if (n > v->max_token_bytes) return TD_NO_TOKEN;
    struct td_bytes_key k = td_bytes_key(bytes, n);
    for (uint32_t i = td_bytes_key_hash(k) & v->bytes_mask;; i = (i + 1) & v->bytes_mask) {
        const struct td_bytes_slot *s = &v->by_bytes[i];
        if (s->id == TD_NO_TOKEN) return TD_NO_TOKEN;
        if (s->key.low != k.low || s->key.high != k.high) continue;
        if (n <= TD_KEY_INLINE_BYTES) return s->id;
        const struct td_token *t = &v->tokens[s->id];
        if (t->n_bytes == n && memcmp(v->blob.data + t->offset, bytes, n) == 0) return s->id;
    }
}

static inline uint64_t td_pair_key(uint32_t left, uint32_t right) { return (uint64_t)left << TD_PAIR_ID_BITS | right; }
static inline uint32_t td_pair_hash(const struct td_vocab *v, uint64_t key)
{
    return (uint32_t)(key * 0x9E3779B97F4A7C15ull >> v->pair_shift);
}

/* How early left and right merge: lower is earlier. */
static inline uint32_t td_vocab_priority(const struct td_vocab *v, uint32_t left, uint32_t right)
{
    uint64_t key = td_pair_key(left, right);
    uint32_t mask = UINT32_MAX >> (v->pair_shift - 32);
    for (uint32_t i = td_pair_hash(v, key);; i = (i + 1) & mask) {
        uint64_t s = v->pairs[i];
        if (s >> TD_PAIR_PRIORITY_BITS == key) return (uint32_t)s & ((1u << TD_PAIR_PRIORITY_BITS) - 1);
        if (s == UINT64_MAX) return TD_NEVER;
    }
}
/* What the pair of this priority becomes. */
static inline uint32_t td_vocab_merged(const struct td_vocab *v, uint32_t priority)
{
    return v->merge_ids != NULL ? v->merge_ids[priority] : priority;
}

#endif
