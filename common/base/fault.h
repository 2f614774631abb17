/* Fault points: one list (fault.def), armed with a countdown and a repeat count. Costs one load when nothing is armed. */
#ifndef TD_BASE_FAULT_H
#define TD_BASE_FAULT_H
#include <stdbool.h>
#include <stdint.h>
enum td_fault {
#define X(name, meaning) TD_FAULT_##name,
#include "common/base/fault.def"
#undef X
    TD_N_FAULTS
};
void td_fault_arm(enum td_fault f, uint32_t countdown, uint32_t repeat); /* passes `countdown` times, then hits `repeat` times */
void td_fault_disarm_all(void);
bool td_fault_parse(const char *spec); /* "ALLOC:3:1,..."; false: not understood */
bool td_fault_hit(enum td_fault f);    /* any thread */
#endif
