#include "router/prefixes.h"

#include <stdlib.h>

#include "common/base/mem.h"
#include "common/base/token_chain.h"

#define MIN_ROOM 64u

/* Names are hashes already; the lowest bit is not theirs. */
static uint32_t home_of(const struct td_prefixes *s, uint64_t name) { return (uint32_t)(name >> 1) & (s->room - 1); }

/* Where name is, or the free place where it would be. */
static uint32_t find(const struct td_prefixes *s, uint64_t name)
{
    uint32_t i = home_of(s, name);
    while (s->names[i] != 0 && s->names[i] != name) i = (i + 1) & (s->room - 1);
    return i;
}

static bool grow(struct td_prefixes *s)
{
    uint32_t room = s->room == 0 ? MIN_ROOM : s->room * 2;
    struct td_prefixes bigger = {.names = td_calloc(room, sizeof *s->names), .n = s->n, .room = room};
    if (bigger.names == NULL) return false;
    for (uint32_t i = 0; i < s->room; i++)
        if (s->names[i] != 0) bigger.names[find(&bigger, s->names[i])] = s->names[i];
    free(s->names);
    *s = bigger;
    return true;
}

static void add(struct td_prefixes *s, uint64_t name)
{
    if (s->n >= TD_PREFIXES_MAX) return;
    if (s->n >= s->room / 2 && !grow(s)) return; /* at most half full: short ways */
    uint32_t i = find(s, name);
    if (s->names[i] == name) return;
    s->names[i] = name;
    s->n++;
}

/* Closes the gap: nobody behind it may be looked for in vain. */
static void take_out(struct td_prefixes *s, uint64_t name)
{
    if (s->n == 0) return;
    uint32_t gap = find(s, name), mask = s->room - 1;
    if (s->names[gap] != name) return;
    s->n--;
    for (uint32_t i = (gap + 1) & mask; s->names[i] != 0; i = (i + 1) & mask) {
        uint32_t home = home_of(s, s->names[i]);
        if (((i - home) & mask) < ((i - gap) & mask)) continue; /* its home lies behind the gap */
        s->names[gap] = s->names[i];
        gap = i;
    }
    s->names[gap] = 0;
}

void td_prefixes_deinit(struct td_prefixes *s)
{
    free(s->names);
    *s = (struct td_prefixes){0};
}

void td_prefixes_apply(struct td_prefixes *s, bool is_all, const uint64_t *changes, size_t n)
{
    if (is_all) td_prefixes_deinit(s);
    for (size_t i = 0; i < n; i++) {
        uint64_t name = changes[i] & ~UINT64_C(1);
        if (name == 0) continue; /* stands for a free place */
        if ((changes[i] & 1) != 0)
            take_out(s, name);
        else
            add(s, name);
    }
}

bool td_prefixes_has(const struct td_prefixes *s, uint64_t name)
{
    return s->n > 0 && name != 0 && s->names[find(s, name)] == name;
}

uint32_t td_prefixes_match(const struct td_prefixes *s, const uint64_t *names, uint32_t n)
{
    uint32_t k = 0;
    while (k < n && td_prefixes_has(s, names[k])) k++;
    return k;
}

void td_block_names_extend(struct td_block_names *b, const uint32_t *tokens, uint32_t n_tokens, uint32_t page_tokens)
{
    uint32_t n = n_tokens > 0 && page_tokens > 0 ? (n_tokens - 1) / page_tokens : 0;
    if (n > b->room) {
        uint32_t room = n + n / 4;
        uint64_t *p = td_realloc(b->names, room, sizeof *p);
        if (p == NULL) return;
        b->names = p;
        b->room = room;
    }
    for (; b->n < n; b->n++) {
        td_token_chain(b->chain, tokens + (size_t)b->n * page_tokens, page_tokens, b->chain);
        b->names[b->n] = td_token_chain_short(b->chain);
    }
}

void td_block_names_deinit(struct td_block_names *b)
{
    free(b->names);
    *b = (struct td_block_names){0};
}
