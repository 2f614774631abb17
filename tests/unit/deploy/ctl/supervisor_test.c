#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "deploy/ctl/supervisor.h"

/* Patience is for a busy machine; no test needs it all. */
#define PATIENCE_NS (60 * TD_NS_PER_S)

static char dir[64], log_path[128];

#define SHELL(script) ((const char *const[]){"/bin/sh", "-c", script, NULL})

static void init(struct td_supervisor *s)
{
    struct td_err err = {{0}};
    if (td_supervisor_init(s, &err) != TD_OK) fail_msg("%s", err.text);
    s->first_pause_ms = 10;
    s->max_pause_ms = 80;
}

static struct td_supervised *add(struct td_supervisor *s, const char *name, const char *const *argv, unsigned rank)
{
    struct td_supervised *who = td_supervisor_add(s, name, log_path, argv, rank);
    assert_non_null(who);
    return who;
}

static void start(struct td_supervisor *s, struct td_supervised *who)
{
    struct td_err err = {{0}};
    if (td_supervisor_start(s, who, &err) != TD_OK) fail_msg("%s", err.text);
}

/* Steps until the condition holds. */
#define STEP_UNTIL(s, condition)                                                                                       \
    for (uint64_t end_ = td_clock_ns() + PATIENCE_NS; !(condition);) {                                                 \
        if (td_clock_ns() > end_) fail_msg("waited in vain for: %s", #condition);                                      \
        td_supervisor_step((s), 1000);                                                                                 \
    }

static char *read_log(void)
{
    static char text[65536];
    FILE *f = fopen(log_path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

static void wait_for_log(struct td_supervisor *s, const char *word)
{
    for (uint64_t end = td_clock_ns() + PATIENCE_NS; strstr(read_log(), word) == NULL;) {
        if (td_clock_ns() > end) fail_msg("waited in vain for \"%s\" in the log", word);
        td_supervisor_step(s, 10);
    }
}

static void the_end_of_a_child_is_noticed_and_described(void **state)
{
    (void)state;
    struct td_supervisor s;
    char how[64];
    init(&s);
    struct td_supervised *a = add(&s, "a", SHELL("echo hello; exit 3"), 0), *b = add(&s, "b", SHELL("kill -9 $$"), 0);
    start(&s, a);
    assert_true(a->child.pid > 0);
    STEP_UNTIL(&s, a->child.has_ended);
    assert_string_equal(td_child_describe_end(&a->child, how, sizeof how), "exit status 3");
    assert_string_equal(read_log(), "hello\n");
    start(&s, b);
    STEP_UNTIL(&s, b->child.has_ended);
    assert_string_equal(td_child_describe_end(&b->child, how, sizeof how), "killed by SIGKILL");
    assert_int_equal(td_supervisor_n_running(&s), 0);
    td_supervisor_deinit(&s);
}

static void a_program_that_cannot_be_executed_is_an_error_at_once(void **state)
{
    (void)state;
    struct td_supervisor s;
    struct td_err err = {{0}};
    init(&s);
    struct td_supervised *who = add(&s, "a", (const char *const[]){"/no/such/program", NULL}, 0);
    assert_int_equal(td_supervisor_start(&s, who, &err), TD_E_IO);
    assert_non_null(strstr(err.text, "/no/such/program"));
    assert_int_equal(who->child.pid, 0);
    td_supervisor_deinit(&s);
}

struct seen {
    unsigned n_ends, n_starts;
};

static void count(struct td_supervisor *s, struct td_supervised *who, bool is_start)
{
    struct seen *seen = s->user;
    (void)who;
    if (is_start)
        seen->n_starts++;
    else
        seen->n_ends++;
}

static void a_child_that_ends_is_started_again_after_a_growing_pause(void **state)
{
    (void)state;
    struct td_supervisor s;
    struct seen seen = {0};
    init(&s);
    s.restarts = true;
    s.on_change = count;
    s.user = &seen;
    struct td_supervised *who = add(&s, "a", SHELL("echo once"), 0);
    start(&s, who);
    uint64_t begin = td_clock_ns();
    STEP_UNTIL(&s, seen.n_ends >= 5);
    assert_true(seen.n_starts >= 4);
    assert_true(td_clock_ns() - begin >= (10 + 20 + 40 + 80) * TD_NS_PER_MS);
    assert_int_equal(who->pause_ms, 80);
    td_supervisor_deinit(&s);
    /* Later starts append to the log. */
    assert_int_equal(strncmp(read_log(), "once\nonce\nonce\n", 15), 0);
}

static void stopping_goes_rank_by_rank_and_is_clean_if_all_end_well(void **state)
{
    (void)state;
    struct td_supervisor s;
    init(&s);
    struct td_supervised *first = add(
        &s, "first", SHELL("trap 'sleep 0.2; echo first; exit 0' TERM; echo ready1; while :; do sleep 0.02; done"), 0);
    struct td_supervised *second =
        add(&s, "second", SHELL("trap 'echo second; exit 0' TERM; echo ready2; while :; do sleep 0.02; done"), 1);
    start(&s, first);
    wait_for_log(&s, "ready1");
    second->child.n_starts = 1; /* append: both write into one log here */
    start(&s, second);
    wait_for_log(&s, "ready2");
    assert_true(td_supervisor_stop(&s, 60000));
    char *log = read_log(), *f = strstr(log, "first"), *g = strstr(log, "second");
    assert_true(f != NULL && g != NULL && f < g);
    td_supervisor_deinit(&s);
}

static void who_does_not_end_in_time_is_killed(void **state)
{
    (void)state;
    struct td_supervisor s;
    init(&s);
    struct td_supervised *who = add(&s, "deaf", SHELL("trap '' TERM; echo ready; while :; do sleep 0.02; done"), 0);
    start(&s, who);
    wait_for_log(&s, "ready");
    assert_false(td_supervisor_stop(&s, 50));
    assert_true(WIFSIGNALED(who->child.wait_status) && WTERMSIG(who->child.wait_status) == SIGKILL);
    td_supervisor_deinit(&s);
}

static void a_second_interrupt_kills_at_once(void **state)
{
    (void)state;
    struct td_supervisor s;
    init(&s);
    struct td_supervised *who =
        add(&s, "deaf", SHELL("trap '' TERM; echo ready; kill -INT $PPID; while :; do sleep 0.02; done"), 0);
    start(&s, who);
    STEP_UNTIL(&s, s.n_interrupts == 1);
    struct td_supervised *asker =
        add(&s, "asker", SHELL("sleep 0.05; kill -INT $PPID; while :; do sleep 0.02; done"), 1);
    start(&s, asker);
    uint64_t begin = td_clock_ns();
    assert_false(td_supervisor_stop(&s, 3600000));
    assert_true(td_clock_ns() - begin < PATIENCE_NS);
    assert_int_equal(s.n_interrupts, 2);
    td_supervisor_deinit(&s);
}

static void children_die_with_a_supervisor_that_is_killed(void **state)
{
    (void)state;
    int fds[2];
    pid_t grandchild = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* the orphan becomes ours, so that its end can be seen */
    assert_int_equal(pipe(fds), 0);
    pid_t supervisor = fork();
    if (supervisor == 0) {
        struct td_supervisor s;
        struct td_err err;
        if (td_supervisor_init(&s, &err) != TD_OK) _exit(1);
        struct td_supervised *who = td_supervisor_add(&s, "a", log_path, SHELL("while :; do sleep 0.02; done"), 0);
        if (who == NULL || td_supervisor_start(&s, who, &err) != TD_OK) _exit(1);
        if (write(fds[1], &who->child.pid, sizeof who->child.pid) < 0) _exit(1);
        for (;;) td_supervisor_step(&s, 1000);
    }
    assert_int_equal(read(fds[0], &grandchild, sizeof grandchild), sizeof grandchild);
    kill(supervisor, SIGKILL);
    int status;
    assert_int_equal(waitpid(supervisor, &status, 0), supervisor);
    pid_t got;
    while ((got = waitpid(grandchild, &status, 0)) < 0 && errno == EINTR) {
    }
    assert_int_equal(got, grandchild);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(fds[0]);
    close(fds[1]);
}

static void the_last_lines_of_a_log_are_found(void **state)
{
    (void)state;
    struct td_child c = {0};
    snprintf(c.log_path, sizeof c.log_path, "%s", log_path);
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"a\nb\nc\n", "  b\n  c\n"}, {"a\nb\nc", "  b\n  c\n"}, {"c\n", "  c\n"}, {"", ""},
        {"\n\n", "  \n  \n"},        {"one", "  one\n"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        FILE *f = fopen(log_path, "w");
        assert_non_null(f);
        fputs(cases[i].text, f);
        fclose(f);
        struct td_buf out = {0};
        td_child_last_words(&c, 2, &out);
        assert_string_equal(td_buf_cstr(&out), cases[i].expected);
        td_buf_free(&out);
    }
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/tandem-supervisor-test-XXXXXX");
    if (mkdtemp(dir) == NULL) return -1;
    snprintf(log_path, sizeof log_path, "%s/log", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(log_path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_end_of_a_child_is_noticed_and_described),
        cmocka_unit_test(a_program_that_cannot_be_executed_is_an_error_at_once),
        cmocka_unit_test(a_child_that_ends_is_started_again_after_a_growing_pause),
        cmocka_unit_test(stopping_goes_rank_by_rank_and_is_clean_if_all_end_well),
        cmocka_unit_test(who_does_not_end_in_time_is_killed),
        cmocka_unit_test(a_second_interrupt_kills_at_once),
        cmocka_unit_test(children_die_with_a_supervisor_that_is_killed),
        cmocka_unit_test(the_last_lines_of_a_log_are_found),
    };
    return cmocka_run_group_tests_name("supervisor", tests, make_dir, remove_dir);
}
