#include "common/base/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

#define LINES_PER_SECOND 20u /* per site */
#define PIPE_WAIT_MS     2

static char daemon_name[32] = "tandem";
static _Atomic int lowest_level = TD_LOG_INFO;
static _Atomic uint64_t n_lost;
static void (*tap_fn)(enum td_log_level, const char *, void *);
static void *tap_user;
static const char *const level_names[] = {"debug", "info", "warn", "error", "off"};

void td_log_open(const char *name, enum td_log_level lowest)
{
    snprintf(daemon_name, sizeof daemon_name, "%s", name);
    atomic_store(&lowest_level, (int)lowest);
}

int td_log_level_parse(const char *name)
{
    for (int i = 0; i <= TD_LOG_OFF; i++)
        if (strcasecmp(name, level_names[i]) == 0) return i;
    return -1;
}

enum td_log_level td_log_lowest(void)
{
    return (enum td_log_level)atomic_load_explicit(&lowest_level, memory_order_relaxed);
}
uint64_t td_log_n_lost(void) { return atomic_load(&n_lost); }

void td_log_set_tap(void (*tap)(enum td_log_level, const char *, void *), void *user)
{
    tap_user = user;
    tap_fn = tap;
}

static bool is_over_limit(struct td_log_site *site, uint32_t *dropped_out)
{
    uint64_t now_s = td_clock_ns() / TD_NS_PER_S + 1, seen = atomic_load(&site->window_s);
    *dropped_out = 0;
    if (seen != now_s && atomic_compare_exchange_strong(&site->window_s, &seen, now_s)) {
        atomic_store(&site->n_in_window, 0);
        *dropped_out = atomic_exchange(&site->n_dropped, 0);
    }
    if (atomic_fetch_add(&site->n_in_window, 1) < LINES_PER_SECOND) return false;
    atomic_fetch_add(&site->n_dropped, 1);
    return true;
}

/* Values come from peers and files: no control byte may forge a second line. */
static void escape_controls(char *s)
{
    for (; *s != 0; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7F) *s = '?';
}

void td_log_write(struct td_log_site *site, enum td_log_level level, const char *event, const char *fmt, ...)
{
    uint32_t dropped;
    if (is_over_limit(site, &dropped)) return;
    char line[2048], fields[1600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fields, sizeof fields, fmt, ap);
    va_end(ap);
    escape_controls(fields);
    uint64_t wall = td_clock_wall_ns();
    time_t s = (time_t)(wall / TD_NS_PER_S);
    struct tm tm;
    gmtime_r(&s, &tm);
    char more[48] = "";
    if (dropped > 0) snprintf(more, sizeof more, " repeats_dropped=%u", dropped);
    int n = snprintf(line, sizeof line, "%04d-%02d-%02dT%02d:%02d:%02d.%03uZ %-5s %s %s %s%s\n", tm.tm_year + 1900,
                     tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec,
                     (unsigned)(wall / TD_NS_PER_MS % 1000), level_names[level], daemon_name, event, fields, more);
    if (n < 0) return;
    if ((size_t)n >= sizeof line) {
        n = (int)sizeof line - 1;
        line[n - 1] = '\n';
    }
    if (tap_fn != NULL) tap_fn(level, line, tap_user);
    /* A pipe whose reader stalls would hold up the event loop. It polls writable only with room for a whole line. */
    struct pollfd fd = {.fd = STDERR_FILENO, .events = POLLOUT};
    ssize_t w =
        poll(&fd, 1, PIPE_WAIT_MS) == 1 ? write(STDERR_FILENO, line, (size_t)n) : -1; /* one write: lines do not mix */
    if (w != n) atomic_fetch_add(&n_lost, 1);
}
