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
struct td_bytes_slot {
    uint32_t hash, id; /* upper half of the hash, so that most misses need no look at the bytes; TD_NO_TOKEN: empty */
};
struct td_pair_slot {
    uint64_t pair;         /* left id << 32 | right id; UINT64_MAX: empty */
    uint32_t priority, id; /* lower merges first; id of the concatenation */
};
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
    struct td_pair_slot *pairs;
    uint32_t pair_shift; /* 64 - log2 of the number of slots */
    uint32_t n_pairs, max_pairs;
    uint32_t byte_ids[256];
    uint32_t max_token_bytes;    /* of ordinary tokens */
    struct td_special *specials; /* by falling length, so that the longest of several is found first */
    uint32_t n_specials;
    bool special_first[256]; /* bytes that a special token's name starts with */
};

/* Room for ids below n_ids. */
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
enum td_status td_vocab_merges_begin(struct td_vocab *v, size_t n_merges);
enum td_status td_vocab_merge_add(struct td_vocab *v, const uint8_t *left, size_t n_left, const uint8_t *right,
                                  size_t n_right, struct td_err *err);
enum td_status td_vocab_merges_end(struct td_vocab *v);
/* No list: every split of a token into two tokens merges, with the token's id as the priority. */
enum td_status td_vocab_merges_from_ids(struct td_vocab *v);

static inline const uint8_t *td_vocab_bytes(const struct td_vocab *v, uint32_t id)
{
    return v->blob.data + v->tokens[id].offset;
}

static inline uint32_t td_vocab_find(const struct td_vocab *v, const uint8_t *bytes, size_t n)
{
    if (n > v->max_token_bytes) return TD_NO_TOKEN;
    uint64_t h = XXH3_64bits(bytes, n);
    uint32_t high = (uint32_t)(h >> 32);
    for (uint32_t i = (uint32_t)h & v->bytes_mask;; i = (i + 1) & v->bytes_mask) {
        const struct td_bytes_slot *s = &v->by_bytes[i];
        if (s->id == TD_NO_TOKEN) return TD_NO_TOKEN;
        if (s->hash != high) continue;
        const struct td_token *t = &v->tokens[s->id];
        if (t->n_bytes == n && memcmp(v->blob.data + t->offset, bytes, n) == 0) return s->id;
    }
}

/* What left and right merge to; priority UINT32_MAX: they never do. */
static inline struct td_pair_slot td_vocab_pair(const struct td_vocab *v, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t mask = UINT32_MAX >> (v->pair_shift - 32);
    for (uint32_t i = (uint32_t)(pair * 0x9E3779B97F4A7C15ull >> v->pair_shift);; i = (i + 1) & mask) {
        struct td_pair_slot s = v->pairs[i];
        if (s.pair == pair || s.pair == UINT64_MAX) return s;
    }
}

#endif
