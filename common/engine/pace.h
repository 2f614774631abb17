/* How fast a worker does something, as measured lately: what the router weighs workers against each other by. A mean in
 * which each measurement counts nine tenths of the one after it, weighted by time, so that a few short ones do not
 * outweigh a long one. Pure; one thread. */
#ifndef TD_ENGINE_PACE_H
#define TD_ENGINE_PACE_H

#include <stdint.h>

#define TD_PACE_KEEP 0.9

struct td_pace { /* all zero: nothing was measured */
    double n, seconds;
};

static inline void td_pace_note(struct td_pace *p, uint32_t n, uint64_t ns)
{
    p->n = p->n * TD_PACE_KEEP + n;
    p->seconds = p->seconds * TD_PACE_KEEP + (double)ns / 1e9;
}

/* 0: nothing was measured; else at least 1. */
static inline uint32_t td_pace_per_s(const struct td_pace *p)
{
    if (p->seconds <= 0) return 0;
    double v = p->n / p->seconds;
    return v < 1 ? 1 : v > 4e9 ? 4000000000u : (uint32_t)v;
}
static inline uint32_t td_pace_us_each(const struct td_pace *p)
{
    if (p->n <= 0) return 0;
    double v = p->seconds / p->n * 1e6;
    return v < 1 ? 1 : v > 4e9 ? 4000000000u : (uint32_t)v;
}

#endif
