#include "common/config/address_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64], path[128];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/address-file-XXXXXX");
    if (mkdtemp(dir) == NULL) return -1;
    snprintf(path, sizeof path, "%s/a.json", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir); /* fails the test if a temporary file was left */
}

static void addresses_are_written_as_json_and_replaced(void **state)
{
    (void)state;
    char text[256];
    for (int pid = 41; pid < 43; pid++) {
        assert_int_equal(td_address_file_write(path, "decode", "d\"0", pid, "127.0.0.1:1", NULL, NULL), TD_OK);
        FILE *f = fopen(path, "r");
        size_t n = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        text[n] = 0;
        char want[256];
        snprintf(want, sizeof want,
                 "{\"role\":\"decode\",\"name\":\"d\\\"0\",\"pid\":%d,\"rpc\":\"127.0.0.1:1\",\"http\":\"\"}\n", pid);
        assert_string_equal(text, want);
    }
}

static void a_failure_names_the_file(void **state)
{
    (void)state;
    struct td_err err;
    assert_int_equal(td_address_file_write("/no/such/dir/a.json", "router", "r", 1, "", "", &err), TD_E_IO);
    assert_non_null(strstr(err.text, "/no/such/dir/a.json: No such file"));
    assert_int_equal(td_address_file_write(dir, "router", "r", 1, "", "", &err), TD_E_IO); /* rename onto a directory */
    char left[160];
    snprintf(left, sizeof left, "%s.%d.tmp", dir, (int)getpid());
    assert_int_equal(access(left, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_are_written_as_json_and_replaced),
        cmocka_unit_test(a_failure_names_the_file),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
