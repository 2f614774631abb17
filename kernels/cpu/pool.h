/* Threads that share one loop: indices [0, n) are taken one by one by whoever is free, the caller's thread included.
 * Helpers look for new work for some microseconds, then sleep in the kernel, so an idle pool costs nothing. */
#ifndef TD_KERNELS_CPU_POOL_H
#define TD_KERNELS_CPU_POOL_H

#include <stdint.h>

#include "common/base/status.h"

struct td_pool;

/* body(ctx, index, thread); thread < td_pool_n_threads names the scratch memory it may use. */
typedef void td_pool_body(void *ctx, uint32_t index, uint32_t thread);

enum td_status td_pool_create(uint32_t n_threads, struct td_pool **out); /* 0: as many as the process may use */
void td_pool_destroy(struct td_pool *p);                                 /* NULL is fine; no loop may be running */
uint32_t td_pool_n_threads(const struct td_pool *p);
/* Returns when every index is done. One caller at a time. */
void td_pool_run(struct td_pool *p, td_pool_body *body, void *ctx, uint32_t n);

#endif
