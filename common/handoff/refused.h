/* Generations of one receiver that must not begin (again): everything below a floor, and single ones above it. Bounded:
 * when it is full, or memory is short, the floor rises, which refuses more than was asked, never less. Pure. */
#ifndef TD_HANDOFF_REFUSED_H
#define TD_HANDOFF_REFUSED_H

#include <stdbool.h>
#include <stdint.h>

#define TD_REFUSED_MAX 4096u

struct td_refused {        /* all zero is empty and valid */
    uint64_t floor;        /* generations below it are refused */
    uint64_t *generations; /* rising, all >= floor */
    uint32_t n, cap;
};
void td_refused_deinit(struct td_refused *r);
void td_refused_add(struct td_refused *r, uint64_t generation);
void td_refused_raise_floor(struct td_refused *r, uint64_t floor); /* lower than before: nothing happens */
bool td_refused_has(const struct td_refused *r, uint64_t generation);

#endif
