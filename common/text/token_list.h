/* A growing list of token ids: what encoding and rendering append to. */
#ifndef TD_TEXT_TOKEN_LIST_H
#define TD_TEXT_TOKEN_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_NO_TOKEN UINT32_MAX

/* Zero-initialised is empty and valid. On allocation failure `failed` is set, further appends do nothing, and ids stays
 * what it was: check once at the end. */
struct td_token_list {
    uint32_t *ids;
    size_t n, cap;
    bool failed;
};
void td_token_list_free(struct td_token_list *l);
void td_token_list_clear(struct td_token_list *l); /* keeps the memory, clears failed */
bool td_token_list_reserve(struct td_token_list *l, size_t extra);
void td_token_list_append(struct td_token_list *l, const uint32_t *ids, size_t n);

static inline void td_token_list_push(struct td_token_list *l, uint32_t id)
{
    if (l->n < l->cap || td_token_list_reserve(l, 1)) l->ids[l->n++] = id;
}

#endif
