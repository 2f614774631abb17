/* The first things a process does, tried in children whose descriptors, limits and signals are odd. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"
#include "common/base/process.h"

/* Runs body in a child and returns its exit status; a signal counts as 100 + its number. */
static int in_child(int (*body)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) _exit(body());
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static int next_fd_is_above_the_standard_ones(void)
{
    td_process_hold_std_fds();
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) return 1;
    return open("/dev/null", O_RDONLY) > 2 ? 0 : 2;
}

static int all_closed(void)
{
    for (int fd = 0; fd < 3; fd++) close(fd);
    return next_fd_is_above_the_standard_ones();
}

static int only_stderr_closed(void)
{
    close(STDERR_FILENO);
    return next_fd_is_above_the_standard_ones();
}

static void closed_standard_descriptors_are_held(void **state)
{
    (void)state;
    assert_int_equal(in_child(all_closed), 0);
    assert_int_equal(in_child(only_stderr_closed), 0);
    assert_int_equal(in_child(next_fd_is_above_the_standard_ones), 0);
}

static int survives_signals(void)
{
    struct td_err err;
    if (td_process_prepare(&err) != TD_OK) return 1;
    raise(SIGHUP);
    raise(SIGPIPE);
    return 0;
}

static void hang_up_and_broken_pipe_are_ignored(void **state)
{
    (void)state;
    assert_int_equal(in_child(survives_signals), 0);
}

static char seen[4096];
static void tap(enum td_log_level level, const char *line, void *user)
{
    (void)user;
    if (level == TD_LOG_WARN) snprintf(seen, sizeof seen, "%s", line);
}

static int raises_to_the_hard_limit(void)
{
    struct rlimit files = {64, 512};
    struct td_err err;
    td_log_set_tap(tap, NULL);
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) return 1;
    if (td_process_prepare(&err) != TD_OK || getrlimit(RLIMIT_NOFILE, &files) != 0) return 2;
    return files.rlim_cur == 512 && seen[0] == 0 ? 0 : 3;
}

static int says_that_few_are_few(void)
{
    struct rlimit files = {64, 64};
    struct td_err err;
    td_log_set_tap(tap, NULL);
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) return 1;
    if (td_process_prepare(&err) != TD_OK) return 2;
    return strstr(seen, "few_open_files limit=64") != NULL ? 0 : 3;
}

static void open_files_are_raised_or_a_low_limit_is_said(void **state)
{
    (void)state;
    assert_int_equal(in_child(raises_to_the_hard_limit), 0);
    assert_int_equal(in_child(says_that_few_are_few), 0);
}

static int arms_faults(void)
{
    struct td_err err = {{0}};
    setenv("TANDEM_FAULT", "ALLOC:0:1", 1);
    if (td_process_prepare(&err) != TD_OK) return 1;
    bool is_armed = td_fault_hit(TD_FAULT_ALLOC);
    setenv("TANDEM_FAULT", "NOBODY:1", 1);
    enum td_status st = td_process_prepare(&err);
#ifdef TD_FAULTS
    return is_armed && st == TD_E_BAD_CONFIG && strstr(err.text, "TANDEM_FAULT: \"NOBODY:1\"") != NULL ? 0 : 2;
#else
    return !is_armed && st == TD_OK ? 0 : 3;
#endif
}

static void fault_points_come_from_the_environment_in_debug_builds(void **state)
{
    (void)state;
    assert_int_equal(in_child(arms_faults), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(closed_standard_descriptors_are_held),
        cmocka_unit_test(hang_up_and_broken_pipe_are_ignored),
        cmocka_unit_test(open_files_are_raised_or_a_low_limit_is_said),
        cmocka_unit_test(fault_points_come_from_the_environment_in_debug_builds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
