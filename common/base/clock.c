#include "common/base/clock.h"

#include <time.h>

static uint64_t read_clock(clockid_t id)
{
    struct timespec ts;
    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * TD_NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t td_clock_ns(void) { return read_clock(CLOCK_MONOTONIC); }
uint64_t td_clock_wall_ns(void) { return read_clock(CLOCK_REALTIME); }
