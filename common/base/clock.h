/* Time. Monotonic for everything that is measured or awaited; wall time only for log lines and API fields. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H
#include <stdint.h>
#define TD_NS_PER_MS UINT64_C(1000000)
#define TD_NS_PER_S UINT64_C(1000000000)
#define TD_NEVER_NS UINT64_MAX                  /* a deadline that never comes */
uint64_t td_clock_ns(void);                     /* CLOCK_MONOTONIC */
uint64_t td_clock_wall_ns(void);                /* CLOCK_REALTIME, since 1970 */
#endif
