/* Logging: one line an event on stderr: time, level, daemon, a fixed event name, key=value fields.
 *   TD_INFO("worker_joined", "role=%s addr=%s", role, addr);
 * Anything about a request carries req=. Repeats are limited per site (20 a second), with a count of what was dropped.
 * The function that first recognises an error logs it; callers pass the status on. Any thread. Never blocks for long:
 * a line that cannot be written (full disk, closed pipe) is dropped and counted. */
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H
#include <stdint.h>
enum td_log_level { TD_LOG_DEBUG, TD_LOG_INFO, TD_LOG_WARN, TD_LOG_ERROR, TD_LOG_OFF };
struct td_log_site {
    _Atomic uint64_t window_s;
    _Atomic uint32_t n_in_window, n_dropped;
};
void td_log_open(const char *daemon_name, enum td_log_level lowest);
int td_log_level_parse(const char *name); /* -1: not a level */
enum td_log_level td_log_lowest(void);
uint64_t td_log_n_lost(void);
void td_log_write(struct td_log_site *site, enum td_log_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* For tests: every line also goes here (already formatted, with its newline). NULL turns it off. */
void td_log_set_tap(void (*tap)(enum td_log_level level, const char *line, void *user), void *user);
#define TD_LOG_AT(level, event, ...)                            \
    do {                                                        \
        static struct td_log_site td_site_;                     \
        if ((level) >= td_log_lowest()) td_log_write(&td_site_, (level), (event), __VA_ARGS__); \
    } while (0)
#define TD_DEBUG(event, ...) TD_LOG_AT(TD_LOG_DEBUG, event, __VA_ARGS__)
#define TD_INFO(event, ...) TD_LOG_AT(TD_LOG_INFO, event, __VA_ARGS__)
#define TD_WARN(event, ...) TD_LOG_AT(TD_LOG_WARN, event, __VA_ARGS__)
#define TD_ERROR(event, ...) TD_LOG_AT(TD_LOG_ERROR, event, __VA_ARGS__)
#endif
