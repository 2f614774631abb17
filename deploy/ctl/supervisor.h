/* Keeps a set of processes running: starts them, notices their ends at once, starts them again after a pause that
 * doubles with each failure, stops them in order. One thread, no loop library: it waits for signals and time in poll().
 */
#ifndef TD_CTL_SUPERVISOR_H
#define TD_CTL_SUPERVISOR_H

#include "deploy/ctl/child.h"

#define TD_SUPERVISOR_MAX 64u

struct td_supervised {
    struct td_child child;
    unsigned stop_rank;     /* on stop, lower ranks end before higher ones are asked to */
    uint64_t next_start_ns; /* while not running and restarts are on; 0: none planned */
    uint32_t pause_ms;      /* before the next start */
};

struct td_supervisor {
    struct td_supervised all[TD_SUPERVISOR_MAX];
    unsigned n;
    bool restarts; /* ended children are started again */
    uint32_t first_pause_ms, max_pause_ms;
    unsigned n_interrupts; /* SIGINT, SIGTERM, SIGHUP so far */
    int signal_fd;
    /* A child ended, or was started again; from within step. May be NULL. */
    void (*on_change)(struct td_supervisor *s, struct td_supervised *who, bool is_start);
    void *user;
};

/* Blocks SIGCHLD, SIGINT, SIGTERM and SIGHUP for this process and takes them over. */
enum td_status td_supervisor_init(struct td_supervisor *s, struct td_err *err);
/* Kills what still runs. */
void td_supervisor_deinit(struct td_supervisor *s);
/* NULL when there is no room. */
struct td_supervised *td_supervisor_add(struct td_supervisor *s, const char *name, const char *log_path,
                                        const char *const *argv, unsigned stop_rank);
enum td_status td_supervisor_start(struct td_supervisor *s, struct td_supervised *who, struct td_err *err);
/* Waits at most wait_ms for a signal or a planned start, and handles what came. */
void td_supervisor_step(struct td_supervisor *s, uint32_t wait_ms);
/* SIGTERM rank by rank, waiting for each; who outlasts grace_ms (per rank) is killed. One more interrupt kills all.
 * True if every child ended by itself with status 0. */
bool td_supervisor_stop(struct td_supervisor *s, uint32_t grace_ms);
unsigned td_supervisor_n_running(const struct td_supervisor *s);

#endif
