/* Time. Monotonic for everything that is measured or awaited; wall time only for log lines and API fields. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H
#include <stdint.h>
#define TD_NS_PER_MS 1000000ull
#define TD_NS_PER_S 1000000000ull
#define TD_NEVER_NS UINT64_MAX                  /* a deadline that never comes */
uint64_t td_clock_ns(void);                     /* CLOCK_MONOTONIC */
uint64_t td_clock_wall_ns(void);                /* CLOCK_REALTIME, since 1970 */
#endif
