/* Is the process behind an address still there? On one machine the kernel tells at once and for certain through a
 * pidfd, also for a process that nobody has reaped yet; UCX by itself looks every keepalive interval and takes a zombie
 * for alive. */
#ifndef TD_TRANSFER_LIVENESS_INT_H
#define TD_TRANSFER_LIVENESS_INT_H

#include <stdint.h>

#include "common/base/status.h"

/* One life of a process. start_time (clock ticks since boot) tells it from a later one with the same pid. */
struct td_process_id {
    uint8_t boot_id[16];    /* of the kernel; all zero: not known */
    uint64_t pid_namespace; /* 0: not known */
    uint64_t start_time;
    uint32_t pid;
};

void td_process_self(struct td_process_id *out);
/* A pidfd that becomes readable when that process ends, in *fd_out. UNSUPPORTED: it is not one that we can see (other
 * machine or PID namespace, old kernel). PEER_LOST: it is gone. */
enum td_status td_process_watch(const struct td_process_id *p, int *fd_out);

#endif
