/* The router of a simulated cluster. Apart from cluster.h, since router/fleet.h and common/worker/worker.h each call
 * something of theirs a td_worker. */
#ifndef TESTS_SIM_ROUTER_H
#define TESTS_SIM_ROUTER_H

#include "common/config/config.h"
#include "tests/sim/world.h"

struct td_router;
struct td_router *sim_router_start(struct td_loop *host, const struct td_config *cfg);
void sim_router_drain(struct td_router *ro); /* SIGTERM; its loop is told to stop when the last call has ended */
void sim_router_end(struct td_router *ro);
uint64_t sim_router_incarnation(const struct td_router *ro);
uint32_t sim_router_n_requests(const struct td_router *ro);
void sim_router_check(const struct td_router *ro, bool is_end); /* what holds always, and what holds in the end */

#endif
