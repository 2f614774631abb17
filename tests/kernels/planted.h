/* The plug-in with planted mistakes (kernels/cuda/traps.def), backend "cudatraps": switches one on at a time. A check
 * that passes without it and fails with it sees the mistake. */
#ifndef TESTS_KERNELS_PLANTED_H
#define TESTS_KERNELS_PLANTED_H

#include <stdbool.h>
#include <stdint.h>

#define PLANTED_BACKEND "cudatraps"

struct planted_trap {
    const char *name, *check, *mistake; /* check: what must see it */
};
extern const struct planted_trap planted_traps[];
extern const uint32_t planted_n;

/* Traps from 1 on, as planted_traps[trap - 1]; 0: none. Ends the program where the plug-in is missing or a call fails.
 * A device of it is open. */
void planted_switch(uint32_t trap);

/* Runs each trap's check, once without any trap and once with it. check returns false for another program's and raises
 * *n_failed when it sees something. Returns how many were missed, and prints those; *n_seen: the others. */
uint32_t planted_run(bool (*check)(void *user, const char *name), void *user, const uint32_t *n_failed,
                     uint32_t *n_seen);

#endif
