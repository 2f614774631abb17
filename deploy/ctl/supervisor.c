#include "deploy/ctl/supervisor.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"

#define GOOD_LIFE_NS (10 * TD_NS_PER_S) /* a child that lived this long failed by chance: the pause starts over */

enum td_status td_supervisor_init(struct td_supervisor *s, struct td_err *err)
{
    *s = (struct td_supervisor){.first_pause_ms = 200, .max_pause_ms = 10000, .signal_fd = -1};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &set, NULL) == 0) s->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->signal_fd >= 0 ? TD_OK : td_err_set(err, TD_E_IO, "signalfd: %s", strerror(errno));
}

static void kill_all(struct td_supervisor *s)
{
    for (unsigned i = 0; i < s->n; i++) td_child_signal(&s->all[i].child, SIGKILL);
}

void td_supervisor_deinit(struct td_supervisor *s)
{
    s->restarts = false;
    kill_all(s);
    while (td_supervisor_n_running(s) > 0) td_supervisor_step(s, 1000);
    if (s->signal_fd >= 0) close(s->signal_fd);
}

struct td_supervised *td_supervisor_add(struct td_supervisor *s, const char *name, const char *log_path,
                                        const char *const *argv, unsigned stop_rank)
{
    if (s->n == TD_SUPERVISOR_MAX) return NULL;
    struct td_supervised *who = &s->all[s->n++];
    *who = (struct td_supervised){.stop_rank = stop_rank, .pause_ms = s->first_pause_ms};
    snprintf(who->child.name, sizeof who->child.name, "%s", name);
    snprintf(who->child.log_path, sizeof who->child.log_path, "%s", log_path);
    who->child.argv = argv;
    return who;
}

enum td_status td_supervisor_start(struct td_supervisor *s, struct td_supervised *who, struct td_err *err)
{
    (void)s;
    who->next_start_ns = 0;
    return td_child_start(&who->child, err);
}

static void plan_start(struct td_supervisor *s, struct td_supervised *who, uint64_t now)
{
    who->next_start_ns = now + who->pause_ms * TD_NS_PER_MS;
    who->pause_ms = who->pause_ms > s->max_pause_ms / 2 ? s->max_pause_ms : who->pause_ms * 2;
}

static void reap(struct td_supervisor *s)
{
    uint64_t now = td_clock_ns();
    for (unsigned i = 0; i < s->n; i++) {
        struct td_supervised *who = &s->all[i];
        if (!td_child_reap(&who->child)) continue;
        if (now - who->child.started_ns >= GOOD_LIFE_NS) who->pause_ms = s->first_pause_ms;
        if (s->restarts) plan_start(s, who, now);
        if (s->on_change != NULL) s->on_change(s, who, false);
    }
}

static void start_due(struct td_supervisor *s)
{
    uint64_t now = td_clock_ns();
    for (unsigned i = 0; i < s->n; i++) {
        struct td_supervised *who = &s->all[i];
        if (!s->restarts || who->next_start_ns == 0 || who->next_start_ns > now) continue;
        struct td_err err = {{0}};
        if (td_supervisor_start(s, who, &err) != TD_OK) {
            fprintf(stderr, "tandemctl: %s: %s\n", who->child.name, err.text);
            plan_start(s, who, now);
        } else if (s->on_change != NULL) {
            s->on_change(s, who, true);
        }
    }
}

static int until_next_start_ms(const struct td_supervisor *s, uint32_t wait_ms)
{
    uint64_t now = td_clock_ns(), wait = wait_ms;
    for (unsigned i = 0; s->restarts && i < s->n; i++) {
        uint64_t at = s->all[i].next_start_ns;
        if (at == 0) continue;
        uint64_t ms = at > now ? (at - now) / TD_NS_PER_MS + 1 : 0;
        if (ms < wait) wait = ms;
    }
    return (int)(wait > 3600000 ? 3600000 : wait);
}

void td_supervisor_step(struct td_supervisor *s, uint32_t wait_ms)
{
    struct pollfd p = {.fd = s->signal_fd, .events = POLLIN};
    poll(&p, 1, until_next_start_ms(s, wait_ms));
    struct signalfd_siginfo info;
    while (read(s->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo != SIGCHLD) s->n_interrupts++;
    }
    reap(s); /* always: several ends may share one SIGCHLD */
    start_due(s);
}

unsigned td_supervisor_n_running(const struct td_supervisor *s)
{
    unsigned n = 0;
    for (unsigned i = 0; i < s->n; i++) n += s->all[i].child.pid != 0;
    return n;
}

static unsigned n_running_of(const struct td_supervisor *s, unsigned rank)
{
    unsigned n = 0;
    for (unsigned i = 0; i < s->n; i++) n += s->all[i].stop_rank == rank && s->all[i].child.pid != 0;
    return n;
}

/* Asks one rank to end and waits for it. */
static void stop_rank(struct td_supervisor *s, unsigned rank, uint32_t grace_ms, unsigned n_interrupts)
{
    uint64_t end = td_clock_ns() + grace_ms * TD_NS_PER_MS;
    for (unsigned i = 0; i < s->n; i++) {
        if (s->all[i].stop_rank == rank) td_child_signal(&s->all[i].child, SIGTERM);
    }
    bool is_killed = false;
    while (n_running_of(s, rank) > 0) {
        uint64_t now = td_clock_ns();
        if (!is_killed && (now >= end || s->n_interrupts > n_interrupts)) {
            for (unsigned i = 0; i < s->n; i++) {
                const struct td_child *c = &s->all[i].child;
                if (c->pid == 0 || (s->all[i].stop_rank != rank && now >= end)) continue;
                fprintf(stderr, "tandemctl: killing %s%s\n", c->name, now >= end ? ", which did not end in time" : "");
                td_child_signal(c, SIGKILL);
            }
            is_killed = true;
        }
        td_supervisor_step(s, now < end ? (uint32_t)((end - now) / TD_NS_PER_MS) + 1 : 1000);
    }
}

bool td_supervisor_stop(struct td_supervisor *s, uint32_t grace_ms)
{
    unsigned max_rank = 0, n_interrupts = s->n_interrupts;
    s->restarts = false;
    td_supervisor_step(s, 0); /* who has ended already is not part of this */
    bool was_running[TD_SUPERVISOR_MAX];
    for (unsigned i = 0; i < s->n; i++) {
        was_running[i] = s->all[i].child.pid != 0;
        if (s->all[i].stop_rank > max_rank) max_rank = s->all[i].stop_rank;
    }
    for (unsigned rank = 0; rank <= max_rank; rank++) stop_rank(s, rank, grace_ms, n_interrupts);
    bool is_clean = true;
    for (unsigned i = 0; i < s->n; i++) {
        int status = s->all[i].child.wait_status;
        if (was_running[i] && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) is_clean = false;
    }
    return is_clean;
}
