/* What a process does before anything else, so that its surroundings cannot trip it. From main, before other threads.
 */
#ifndef TD_BASE_PROCESS_H
#define TD_BASE_PROCESS_H
#include "common/base/status.h"

/* Opens /dev/null where descriptor 0, 1 or 2 is closed: else a socket gets the number, and the log goes to a peer. Runs
 * by itself before the libraries of a program that contains it, except under sanitizers; a main calls it for those. */
void td_process_hold_std_fds(void);

/* For daemons, once the log is open. Ignores SIGHUP (a closed terminal is no reason to drop requests) and
 * SIGPIPE; raises the limit of open files as far as it may, and warns if that is few; in builds with TD_FAULTS arms the
 * fault points of $TANDEM_FAULT. BAD_CONFIG: that is not understood. */
enum td_status td_process_prepare(struct td_err *err);

#endif
