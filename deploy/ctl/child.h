/* One process that we started and answer for. Its output goes to a log file; it dies with us (PR_SET_PDEATHSIG), and it
 * is in a process group of its own, so that Ctrl-C reaches it through us alone. */
#ifndef TD_CTL_CHILD_H
#define TD_CTL_CHILD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/base/bytes.h"
#include "common/base/status.h"

struct td_child {
    char name[64];
    char log_path[1024];
    const char *const *argv; /* borrowed; argv[0] is the program's path; closed by NULL */
    pid_t pid;               /* 0: not running */
    bool has_ended;          /* it ran, and wait_status says how that ended */
    int wait_status;
    uint64_t started_ns; /* td_clock_ns */
    unsigned n_starts;
};

/* The first start empties the log, later ones append. IO: err says why, also when the program cannot be executed. */
enum td_status td_child_start(struct td_child *c, struct td_err *err);
/* True if it has ended since (once). Does not wait. */
bool td_child_reap(struct td_child *c);
void td_child_signal(const struct td_child *c, int signum); /* nothing if it does not run */
/* "exit status 1", "killed by SIGKILL" */
const char *td_child_describe_end(const struct td_child *c, char *buf, size_t n);
/* Appends the last lines of its log, each with two spaces in front. */
void td_child_last_words(const struct td_child *c, unsigned n_lines, struct td_buf *out);

#endif
