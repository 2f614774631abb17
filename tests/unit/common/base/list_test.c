#include "common/base/list.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

struct item {
    int id;
    struct td_list link;
};

static void expect(struct td_list *head, const char *want)
{
    char got[16] = "";
    size_t n = 0;
    TD_LIST_FOREACH (it, head) got[n++] = (char)('0' + TD_LIST_ENTRY(it, struct item, link)->id);
    assert_string_equal(got, want);
}

static void elements_come_in_order_and_leave_once(void **state)
{
    (void)state;
    struct td_list head;
    struct item a = {.id = 1}, b = {.id = 2}, c = {.id = 3};
    td_list_init(&head);
    assert_true(td_list_is_empty(&head));
    td_list_push_back(&head, &a.link);
    td_list_push_back(&head, &b.link);
    td_list_push_front(&head, &c.link);
    expect(&head, "312");
    td_list_remove(&a.link);
    td_list_remove(&a.link); /* twice does no harm */
    expect(&head, "32");
    td_list_push_back(&head, &a.link);
    expect(&head, "321");
}

static void elements_may_leave_while_the_list_is_walked(void **state)
{
    (void)state;
    struct td_list head;
    struct item x[5];
    td_list_init(&head);
    for (int i = 0; i < 5; i++) {
        x[i].id = i;
        td_list_push_back(&head, &x[i].link);
    }
    TD_LIST_FOREACH_SAFE (it, &head)
        if (TD_LIST_ENTRY(it, struct item, link)->id % 2 == 0) td_list_remove(it);
    expect(&head, "13");
    TD_LIST_FOREACH_SAFE (it, &head) td_list_remove(it);
    assert_true(td_list_is_empty(&head));
}

static void a_failed_check_says_where_and_aborts(void **state)
{
    (void)state;
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(fd[1], STDERR_FILENO);
        struct item a = {.id = 1};
        TD_CHECK(a.id == 1);
        TD_CHECK(a.id == 2);
        _exit(0);
    }
    close(fd[1]);
    int how;
    waitpid(child, &how, 0);
    char text[512] = "";
    ssize_t n = read(fd[0], text, sizeof text - 1);
    close(fd[0]);
    assert_true(n > 0);
    assert_non_null(strstr(text, "list_test.c:"));
    assert_non_null(strstr(text, "check failed: a.id == 2"));
    assert_true(WIFSIGNALED(how) || WEXITSTATUS(how) != 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(elements_come_in_order_and_leave_once),
        cmocka_unit_test(elements_may_leave_while_the_list_is_walked),
        cmocka_unit_test(a_failed_check_says_where_and_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
