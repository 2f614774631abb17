/* Memory that is given back all at once: for objects that are built of many pieces and live as long as one another. */
#ifndef TD_BASE_ARENA_H
#define TD_BASE_ARENA_H

#include <stddef.h>

struct td_arena_block;
/* Zero-initialised is empty and valid. One thread at a time. */
struct td_arena {
    struct td_arena_block *blocks;
};
/* An array of n, zeroed and aligned for anything; never NULL for want of elements. NULL: no memory. */
void *td_arena_alloc(struct td_arena *a, size_t n, size_t size);
void td_arena_free(struct td_arena *a); /* all of it; a is empty then */

#endif
