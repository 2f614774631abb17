#include "common/text/token_list.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

void td_token_list_free(struct td_token_list *l)
{
    free(l->ids);
    *l = (struct td_token_list){0};
}

void td_token_list_clear(struct td_token_list *l)
{
    l->n = 0;
    l->failed = false;
}

bool td_token_list_reserve(struct td_token_list *l, size_t extra)
{
    if (l->failed) return false;
    if (extra <= l->cap - l->n) return true;
    size_t need = l->n + extra;
    size_t cap = l->cap < 64 ? 64 : l->cap;
    while (cap < need && cap <= SIZE_MAX / 2) cap *= 2;
    if (need < extra || cap < need) {
        l->failed = true;
        return false;
    }
    uint32_t *ids = td_realloc(l->ids, cap, sizeof *ids);
    if (ids == NULL) {
        l->failed = true;
        return false;
    }
    l->ids = ids;
    l->cap = cap;
    return true;
}

void td_token_list_append(struct td_token_list *l, const uint32_t *ids, size_t n)
{
    if (n == 0 || !td_token_list_reserve(l, n)) return;
    memcpy(l->ids + l->n, ids, n * sizeof *ids);
    l->n += n;
}
