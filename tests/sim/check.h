/* The rules that hold after every event, and those that hold at the end of a run:
 *   - every reference to a KV page is one that a request, a reservation or the quarantine accounts for
 *   - a free page is written by nobody; a put lands only in pages of a reservation that waits for it, from the sender
 * it named, and brings the KV of its prompt; or in quarantined pages
 *   - on a decode stream each request is reserved once, ends once, and nothing of it follows its end
 *   - a run brings one first token and one Done
 *   - in the end nothing is held anywhere, and every client had one end, a reason for it, and no token wrong
 * What clients see is judged in client.c, what engines read in engine.c. */
#ifndef TESTS_SIM_CHECK_H
#define TESTS_SIM_CHECK_H

#include "tests/sim/client.h"
#include "tests/sim/cluster.h"

void sim_check_init(struct sim_cluster *c, struct sim_clients *clients);
void sim_check_event(struct sim_cluster *c);
bool sim_is_at_rest(const struct sim_cluster *c); /* nothing is held anywhere */
void sim_check_end(struct sim_cluster *c, const struct sim_clients *clients);

#endif
