#include "common/base/log.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"

static char last[4096];
static unsigned n_lines;
static enum td_log_level last_level;
static int real_stderr;

static void tap(enum td_log_level level, const char *line, void *user)
{
    assert_ptr_equal(user, last);
    snprintf(last, sizeof last, "%s", line);
    last_level = level;
    n_lines++;
}

/* Lines of the test go to a pipe rather than to whoever runs it. */
static int pipe_out;
static int open_log(void **state)
{
    (void)state;
    int fd[2];
    if (pipe(fd) != 0) return -1;
    real_stderr = dup(STDERR_FILENO);
    dup2(fd[1], STDERR_FILENO);
    close(fd[1]);
    pipe_out = fd[0];
    fcntl(pipe_out, F_SETFL, O_NONBLOCK);
    td_log_open("tester", TD_LOG_INFO);
    td_log_set_tap(tap, last);
    last[0] = 0;
    n_lines = 0;
    return 0;
}

static int close_log(void **state)
{
    (void)state;
    td_log_set_tap(NULL, NULL);
    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    close(pipe_out);
    return 0;
}

static void a_line_has_time_level_daemon_event_and_fields(void **state)
{
    (void)state;
    TD_WARN("worker_lost", "role=%s age_ms=%d", "decode", 12);
    char written[4096];
    ssize_t n = read(pipe_out, written, sizeof written - 1);
    assert_true(n > 0);
    written[n] = 0;
    assert_string_equal(written, last);
    assert_int_equal(last_level, TD_LOG_WARN);
    assert_string_equal(last + 24, " warn  tester worker_lost role=decode age_ms=12\n");
    int y, mo, d, h, mi, s, ms;
    assert_int_equal(sscanf(last, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ", &y, &mo, &d, &h, &mi, &s, &ms), 7);
}

static void levels_below_the_lowest_are_silent(void **state)
{
    (void)state;
    TD_DEBUG("hidden", "x=%d", 1);
    assert_int_equal(n_lines, 0);
    td_log_open("tester", TD_LOG_OFF);
    TD_ERROR("hidden", "x=%d", 1);
    assert_int_equal(n_lines, 0);
    assert_int_equal(td_log_level_parse("WARN"), TD_LOG_WARN);
    assert_int_equal(td_log_level_parse("loud"), -1);
    assert_int_equal(td_log_level_parse(""), -1);
}

static void a_value_cannot_forge_a_line(void **state)
{
    (void)state;
    TD_INFO("odd", "name=%s", "a\nb\x1b[31m\x7f");
    assert_non_null(strstr(last, "name=a?b?[31m?\n"));
    assert_ptr_equal(strchr(last, '\n'), last + strlen(last) - 1);
}

static void long_lines_are_cut_and_still_end(void **state)
{
    (void)state;
    char big[5000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    TD_INFO("big", "v=%s", big);
    size_t n = strlen(last);
    assert_in_range(n, 1000, 2047);
    assert_int_equal(last[n - 1], '\n');
}

static void log_one(int i) { TD_INFO("repeated", "i=%d", i); }

static void repeats_of_a_site_are_limited_and_counted(void **state)
{
    (void)state;
    /* Within one second of the clock, or the limit starts anew in between. */
    uint64_t s;
    do {
        n_lines = 0;
        s = td_clock_ns() / TD_NS_PER_S;
        for (int i = 0; i < 100; i++) log_one(i);
        while (read(pipe_out, last, sizeof last) > 0) {
        }
        if (td_clock_ns() / TD_NS_PER_S == s && n_lines <= 20) break;
        while (td_clock_ns() / TD_NS_PER_S == s) {
        } /* begin early in the next one */
    } while (true);
    assert_int_equal(n_lines, 20);
    TD_INFO("another_site", "x=%d", 1);
    assert_int_equal(n_lines, 21);
    while (td_clock_ns() / TD_NS_PER_S == s) usleep(1000);
    log_one(100);
    assert_non_null(strstr(last, "i=100 repeats_dropped="));
}

static void a_stalled_reader_loses_lines_but_does_not_block(void **state)
{
    (void)state;
    uint64_t lost = td_log_n_lost();
    char fill[4096] = {0};
    fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
    while (write(STDERR_FILENO, fill, sizeof fill) > 0) {
    }
    fcntl(STDERR_FILENO, F_SETFL, 0); /* from here a write would block for ever */
    TD_INFO("unheard", "x=%d", 1);
    assert_int_equal(td_log_n_lost(), lost + 1);
    while (read(pipe_out, fill, sizeof fill) > 0) {
    }
    TD_INFO("heard", "x=%d", 1);
    assert_int_equal(td_log_n_lost(), lost + 1);
    assert_true(read(pipe_out, fill, sizeof fill) > 0);
}

static void a_closed_pipe_loses_lines(void **state)
{
    (void)state;
    signal(SIGPIPE, SIG_IGN);
    uint64_t lost = td_log_n_lost();
    close(pipe_out);
    TD_INFO("unheard", "x=%d", 1);
    assert_int_equal(td_log_n_lost(), lost + 1);
    pipe_out = dup(real_stderr); /* for close_log */
}

#define T(name) cmocka_unit_test_setup_teardown(name, open_log, close_log)
int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_line_has_time_level_daemon_event_and_fields),
        T(levels_below_the_lowest_are_silent),
        T(a_value_cannot_forge_a_line),
        T(long_lines_are_cut_and_still_end),
        T(repeats_of_a_site_are_limited_and_counted),
        T(a_stalled_reader_loses_lines_but_does_not_block),
        T(a_closed_pipe_loses_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
