/* Finding a backend: what is not here is refused with a sentence that says why. */
#include "kernels/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void refuse(const char *backend, const char *dir, const char *why)
{
    struct td_device *d = NULL;
    struct td_err err = {0};
    if (dir != NULL)
        setenv("TANDEM_PLUGIN_DIR", dir, 1);
    else
        unsetenv("TANDEM_PLUGIN_DIR");
    assert_int_equal(td_device_open(&(struct td_device_options){.backend = backend}, &d, &err), TD_E_UNSUPPORTED);
    assert_null(d);
    if (strstr(err.text, why) == NULL) fail_msg("\"%s\" does not say \"%s\"", err.text, why);
    unsetenv("TANDEM_PLUGIN_DIR");
}

static void a_name_that_is_no_backend_is_refused(void **state)
{
    (void)state;
    refuse("no_such", NULL, "not a backend's name");
    refuse("../evil", NULL, "not a backend's name");
    refuse("", "/nonexistent", "no /nonexistent/libtandem-.so");
}

static void a_plug_in_that_is_missing_is_named(void **state)
{
    (void)state;
    refuse("cuda", "/nonexistent", "/nonexistent/libtandem-cuda.so");
    refuse("absent", NULL, "libtandem-absent.so");
}

static void a_file_that_is_no_library_is_refused(void **state)
{
    (void)state;
    char dir[] = "/tmp/td-plugin-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/libtandem-cuda.so", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("no library", f);
    fclose(f);
    refuse("cuda", dir, "cannot be loaded");
    unlink(path);
    rmdir(dir);
}

static void the_cpu_refuses_experts_in_other_forms(void **state)
{
    (void)state;
    for (enum td_expert_form form = TD_EXPERTS_FP8; form <= TD_EXPERTS_MXFP4; form++) {
        struct td_device *d = NULL;
        struct td_err err = {0};
        assert_int_equal(td_device_open(&(struct td_device_options){.experts = form}, &d, &err), TD_E_UNSUPPORTED);
        assert_null(d);
        assert_non_null(strstr(err.text, "bf16"));
    }
}

static void the_cpu_is_always_there_and_has_no_graphs(void **state)
{
    (void)state;
    struct td_device *d;
    struct td_stream *s;
    struct td_graph *g = NULL;
    void *p;
    assert_int_equal(td_device_open(&(struct td_device_options){0}, &d, NULL), TD_OK);
    assert_string_equal(td_device_describe(d), "cpu");
    assert_string_equal(td_device_last_error(d), "");
    assert_int_equal(td_device_act_bytes(d), 4);
    assert_int_equal(td_stream_create(d, 1, &s), TD_OK);
    assert_int_equal(td_device_alloc_host(d, 100, &p), TD_OK);
    for (int i = 0; i < 100; i++) assert_int_equal(((char *)p)[i], 0);
    char from[100];
    memset(from, 7, sizeof from);
    assert_int_equal(td_stream_copy_in(s, p, from, sizeof from), TD_OK);
    memset(from, 0, sizeof from);
    assert_int_equal(td_stream_copy_out(s, from, p, sizeof from), TD_OK);
    assert_int_equal(from[99], 7);
    assert_int_equal(td_graph_begin(s), TD_E_UNSUPPORTED);
    assert_int_equal(td_graph_end(s, &g), TD_E_UNSUPPORTED);
    td_graph_destroy(d, g);
    td_device_free_host(d, p);
    td_stream_destroy(s);
    td_device_close(d);
}

static void note(void *arg) { ++*(int *)arg; }

/* The CPU has done what a stream got, so whoever follows need not wait, and is told at once. */
static void pieces_move_beside_and_somebody_is_told(void **state)
{
    (void)state;
    struct td_device *d;
    struct td_stream *s, *side;
    int told = 0;
    _Alignas(16) char from[64], to[64] = {0};
    for (int i = 0; i < 64; i++) from[i] = (char)i;
    const struct td_piece pieces[] = {{from, to + 48, 16}, {from + 16, to, 32}, {from, to, 0}};
    assert_int_equal(td_device_open(&(struct td_device_options){0}, &d, NULL), TD_OK);
    assert_int_equal(td_device_enter(d), TD_OK);
    assert_int_equal(td_stream_create(d, 1, &s), TD_OK);
    assert_int_equal(td_side_stream_create(d, &side), TD_OK);
    assert_int_equal(td_stream_follow(side, s), TD_OK);
    assert_int_equal(td_stream_scatter(side, pieces, 3), TD_OK);
    assert_int_equal(td_stream_call(side, note, &told), TD_OK);
    assert_int_equal(td_stream_sync(side), TD_OK);
    assert_int_equal(told, 1);
    assert_memory_equal(to, from + 16, 32);
    for (int i = 32; i < 48; i++) assert_int_equal(to[i], 0);
    assert_memory_equal(to + 48, from, 16);
    td_stream_destroy(side);
    td_stream_destroy(s);
    td_device_close(d);
}

static void marks_tell_the_time_between_them(void **state)
{
    (void)state;
    struct td_device *d = NULL;
    struct td_stream *s = NULL;
    struct td_err err = {0};
    double us = -1;
    uint64_t n_free, total;
    assert_int_equal(td_device_open(&(struct td_device_options){0}, &d, &err), TD_OK);
    assert_int_equal(td_stream_create(d, 1, &s), TD_OK);
    assert_int_equal(td_stream_mark_us(s, 0, 1, &us), TD_E_INVALID); /* neither was passed */
    assert_int_equal(td_stream_mark(s, 0), TD_OK);
    assert_int_equal(td_stream_mark_us(s, 0, 1, &us), TD_E_INVALID);
    usleep(2000);
    assert_int_equal(td_stream_mark(s, 1), TD_OK);
    assert_int_equal(td_stream_sync(s), TD_OK);
    assert_int_equal(td_stream_mark_us(s, 0, 1, &us), TD_OK);
    assert_true(us >= 2000);
    assert_int_equal(td_stream_mark(s, TD_STREAM_MARKS), TD_E_INVALID);
    assert_int_equal(td_stream_mark_us(s, 0, TD_STREAM_MARKS, &us), TD_E_INVALID);
    assert_int_equal(td_device_memory(d, &n_free, &total), TD_E_UNSUPPORTED);
    td_stream_destroy(s);
    td_device_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_that_is_no_backend_is_refused),
        cmocka_unit_test(a_plug_in_that_is_missing_is_named),
        cmocka_unit_test(a_file_that_is_no_library_is_refused),
        cmocka_unit_test(the_cpu_refuses_experts_in_other_forms),
        cmocka_unit_test(pieces_move_beside_and_somebody_is_told),
        cmocka_unit_test(marks_tell_the_time_between_them),
        cmocka_unit_test(the_cpu_is_always_there_and_has_no_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
