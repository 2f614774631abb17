#include "common/handoff/refused.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

void td_refused_deinit(struct td_refused *r)
{
    free(r->generations);
    *r = (struct td_refused){0};
}

/* Index of the first generation that is not below g. */
static uint32_t lower_bound(const struct td_refused *r, uint64_t g)
{
    uint32_t lo = 0, hi = r->n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (r->generations[mid] < g)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

void td_refused_raise_floor(struct td_refused *r, uint64_t floor)
{
    if (floor <= r->floor) return;
    r->floor = floor;
    uint32_t n_below = lower_bound(r, floor);
    if (n_below == 0) return;
    r->n -= n_below;
    memmove(r->generations, r->generations + n_below, r->n * sizeof r->generations[0]);
}

bool td_refused_has(const struct td_refused *r, uint64_t g)
{
    if (g < r->floor) return true;
    uint32_t i = lower_bound(r, g);
    return i < r->n && r->generations[i] == g;
}

void td_refused_add(struct td_refused *r, uint64_t g)
{
    if (td_refused_has(r, g)) return;
    if (r->n == TD_REFUSED_MAX) { /* give up the older half at once, so that this stays rare */
        td_refused_raise_floor(r, r->generations[TD_REFUSED_MAX / 2]);
        if (td_refused_has(r, g)) return;
    }
    if (r->n == r->cap) {
        uint32_t cap = r->cap == 0 ? 16 : r->cap * 2;
        uint64_t *p = td_realloc(r->generations, cap, sizeof *p);
        if (p == NULL) {
            td_refused_raise_floor(r, g == UINT64_MAX ? g : g + 1);
            return;
        }
        r->generations = p;
        r->cap = cap;
    }
    uint32_t i = lower_bound(r, g);
    memmove(r->generations + i + 1, r->generations + i, (r->n - i) * sizeof r->generations[0]);
    r->generations[i] = g;
    r->n++;
}
