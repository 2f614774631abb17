#include "common/base/arena.h"

#include <stdint.h>
#include <stdlib.h>

#include "common/base/mem.h"

struct td_arena_block {
    struct td_arena_block *next;
    max_align_t data[];
};

void *td_arena_alloc(struct td_arena *a, size_t n, size_t size)
{
    if (size > 0 && n > (SIZE_MAX - sizeof(struct td_arena_block)) / size) return NULL;
    struct td_arena_block *b = td_calloc(1, sizeof *b + n * size);
    if (b == NULL) return NULL;
    b->next = a->blocks;
    a->blocks = b;
    return b->data;
}

void td_arena_free(struct td_arena *a)
{
    while (a->blocks != NULL) {
        struct td_arena_block *b = a->blocks;
        a->blocks = b->next;
        free(b);
    }
}
