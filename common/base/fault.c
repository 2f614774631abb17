#include "common/base/fault.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static struct {
    _Atomic int64_t countdown;
    _Atomic int64_t repeat;
} faults[TD_N_FAULTS];
static _Atomic bool any_armed;

static const char *const names[TD_N_FAULTS] = {
#define X(name, meaning) #name,
#include "common/base/fault.def"
#undef X
};

void td_fault_arm(enum td_fault f, uint32_t countdown, uint32_t repeat)
{
    atomic_store(&faults[f].countdown, countdown);
    atomic_store(&faults[f].repeat, repeat);
    atomic_store(&any_armed, true);
}

void td_fault_disarm_all(void)
{
    atomic_store(&any_armed, false);
    for (int i = 0; i < TD_N_FAULTS; i++) {
        atomic_store(&faults[i].countdown, 0);
        atomic_store(&faults[i].repeat, 0);
    }
}

bool td_fault_hit(enum td_fault f)
{
    if (!atomic_load_explicit(&any_armed, memory_order_relaxed)) return false;
    if (atomic_load(&faults[f].repeat) <= 0) return false;
    if (atomic_fetch_sub(&faults[f].countdown, 1) > 0) return false;
    return atomic_fetch_sub(&faults[f].repeat, 1) > 0;
}

bool td_fault_parse(const char *spec)
{
    while (*spec != 0) {
        size_t n = strcspn(spec, ":,");
        int found = -1;
        for (int i = 0; i < TD_N_FAULTS; i++)
            if (strlen(names[i]) == n && memcmp(names[i], spec, n) == 0) found = i;
        if (found < 0) return false;
        unsigned long v[2] = {0, 1};
        spec += n;
        for (int k = 0; k < 2 && *spec == ':'; k++) {
            char *end;
            v[k] = strtoul(spec + 1, &end, 10);
            if (end == spec + 1 || v[k] > UINT32_MAX) return false;
            spec = end;
        }
        td_fault_arm((enum td_fault)found, (uint32_t)v[0], (uint32_t)v[1]);
        if (*spec == ',') spec++;
        else if (*spec != 0) return false;
    }
    return true;
}
