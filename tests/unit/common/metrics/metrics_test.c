#include "common/metrics/metrics.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct td_buf page;

static int reset(void **state)
{
    (void)state;
    td_metrics_reset();
    td_buf_clear(&page);
    return 0;
}

static const char *render(unsigned daemons)
{
    td_buf_clear(&page);
    td_metrics_render(daemons, "d\\0\"\n", &page);
    return td_buf_cstr(&page);
}

/* The value of the sample whose name and labels are as given; fails if it is not there. */
static double sample(const char *text, const char *series)
{
    char want[200];
    snprintf(want, sizeof want, "\n%s ", series);
    const char *p = strstr(text, want);
    if (p == NULL) {
        fail_msg("no sample %s", series);
        return 0;
    }
    return strtod(p + strlen(want), NULL);
}

static void counters_and_gauges_show_their_values(void **state)
{
    (void)state;
    td_metric_add(TD_M_requests, 3);
    td_metric_add(TD_M_requests, 2);
    td_metric_set(TD_M_workers_prefill, 0.1);
    td_metric_add(TD_M_requests_running, 4);
    td_metric_add(TD_M_requests_running, (uint64_t)-1);
    assert_int_equal(td_metric_count(TD_M_requests), 5);
    assert_true(td_metric_value(TD_M_requests) == 5);
    assert_true(td_metric_value(TD_M_requests_running) == 3);
    const char *t = render(1);
    assert_true(sample(t, "tandem_requests_total") == 5);
    assert_non_null(
        strstr(t, "# HELP tandem_requests_total client requests accepted\n# TYPE tandem_requests_total counter\n"));
    assert_non_null(strstr(t, "\ntandem_workers_prefill 0.1\n"));
    assert_true(sample(t, "tandem_requests_running") == 3);
    assert_true(sample(t, "process_open_fds") > 0);
    assert_true(sample(t, "process_resident_memory_bytes") > 100000);
}

static void only_rows_of_the_daemon_are_shown(void **state)
{
    (void)state;
    assert_non_null(strstr(render(1), "tandem_workers_prefill"));
    assert_null(strstr(render(1), "tandem_kv_pages_quarantined"));
    assert_null(strstr(render(4), "tandem_workers_prefill"));
    assert_non_null(strstr(render(4), "tandem_kv_pages_quarantined"));
}

static void a_histogram_counts_up_to_each_bound(void **state)
{
    (void)state;
    static const double v[] = {0, -3, 0.00005, 0.0001, 0.00011, 0.9, 1, 1.01, 650, NAN};
    for (size_t i = 0; i < sizeof v / sizeof v[0]; i++) td_metric_observe(TD_M_ttft_seconds, v[i]);
    const char *t = render(1);
    assert_true(sample(t, "tandem_ttft_seconds_bucket{le=\"0.0001\"}") == 4);
    assert_true(sample(t, "tandem_ttft_seconds_bucket{le=\"0.00015\"}") == 5);
    assert_true(sample(t, "tandem_ttft_seconds_bucket{le=\"1\"}") == 7);
    assert_true(sample(t, "tandem_ttft_seconds_bucket{le=\"600\"}") == 8);
    assert_true(sample(t, "tandem_ttft_seconds_bucket{le=\"+Inf\"}") == 9);
    assert_true(sample(t, "tandem_ttft_seconds_count") == 9);
    assert_true(fabs(sample(t, "tandem_ttft_seconds_sum") - 652.91026) < 1e-9);
    assert_int_equal(td_metric_count(TD_M_ttft_seconds), 9);
    td_metric_observe(TD_M_handoff_tail_bytes, 5000);
    t = render(2);
    assert_true(sample(t, "tandem_handoff_tail_bytes_bucket{le=\"4096\"}") == 0);
    assert_true(sample(t, "tandem_handoff_tail_bytes_bucket{le=\"16384\"}") == 1);
}

static void facts_are_labels_and_escaped(void **state)
{
    (void)state;
    td_metric_info("xfer transport", "transport", "tcp");
    td_metric_info("kernels", "isa", "a\"b\\c\nd");
    td_metric_info("xfer transport", "transport", "shm"); /* replaces */
    td_metric_info("xfer transport", "device", "lo");
    const char *t = render(7);
    assert_non_null(strstr(t, "# TYPE tandem_xfer_transport gauge\ntandem_xfer_transport{transport=\"shm\"} 1\n"
                              "tandem_xfer_transport{device=\"lo\"} 1\n"));
    assert_null(strstr(t, "\"tcp\""));
    assert_non_null(strstr(t, "tandem_kernels{isa=\"a\\\"b\\\\c\\nd\"} 1\n"));
    assert_non_null(strstr(t, "tandem_daemon_info{name=\"d\\\\0\\\"\\n\"} 1\n"));
    for (int i = 0; i < 100; i++) {
        char name[32];
        snprintf(name, sizeof name, "fact_x%c%c", 'a' + i / 10, 'a' + i % 10);
        td_metric_info(name, "l", "v"); /* beyond the bound: dropped, not harmful */
    }
    render(7);
}

/* Reads the whole page the way a scraper does: every sample belongs to the TYPE line before it, histogram buckets rise
 * in bound and count, nothing appears twice. */
static void the_page_is_valid_for_a_scraper(void **state)
{
    (void)state;
    td_metric_observe(TD_M_itl_seconds, 0.02);
    td_metric_observe(TD_M_itl_seconds, 3);
    td_metric_info("fact", "l", "v");
    char *text = strdup(render(7)), *save = NULL, name[128] = "", type[32] = "", help[128] = "";
    double last_le = -1, last_count = -1;
    int n_samples = 0;
    assert_int_equal(text[strlen(text) - 1], '\n');
    for (char *line = strtok_r(text, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, "# HELP ", 7) == 0) {
            assert_int_equal(sscanf(line, "# HELP %127s ", help), 1);
            continue;
        }
        if (line[0] == '#') {
            assert_int_equal(sscanf(line, "# TYPE %127s %31s", name, type), 2);
            assert_string_equal(name, help);
            last_le = last_count = -1;
            continue;
        }
        n_samples++;
        size_t n = strlen(name), name_end = strcspn(line, "{ ");
        assert_memory_equal(line, name, n);
        char *value = strrchr(line, ' '), *end;
        double v = strtod(value + 1, &end);
        assert_int_equal(*end, 0);
        if (strcmp(type, "counter") == 0) assert_memory_equal(line + name_end - 6, "_total", 6);
        if (strcmp(type, "histogram") != 0)
            assert_int_equal(name_end, n);
        else if (strncmp(line + n, "_bucket{le=\"", 12) == 0) {
            double le = strtod(line + n + 12, NULL);
            assert_true(le > last_le && v >= last_count);
            last_le = le;
            last_count = v;
        } else if (strncmp(line + n, "_count ", 7) == 0) {
            assert_true(isinf(last_le) && v == last_count);
        } else {
            assert_memory_equal(line + n, "_sum ", 5);
        }
    }
    free(text);
    assert_true(n_samples > 100);
}

static void *bump(void *arg)
{
    for (int i = 0; i < 20000; i++) {
        td_metric_add(TD_M_steps, 1);
        td_metric_add(TD_M_sequences_running, i % 2 == 0 ? 1 : (uint64_t)-1);
        td_metric_observe(TD_M_step_seconds, 0.5);
    }
    return arg;
}

static void updates_from_many_threads_are_not_lost(void **state)
{
    (void)state;
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, bump, NULL);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    assert_int_equal(td_metric_count(TD_M_steps), 80000);
    assert_true(td_metric_value(TD_M_sequences_running) == 0);
    assert_int_equal(td_metric_count(TD_M_step_seconds), 80000);
    assert_true(td_metric_value(TD_M_step_seconds) == 40000);
}

static int free_page(void **state)
{
    (void)state;
    td_buf_free(&page);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(counters_and_gauges_show_their_values, reset),
        cmocka_unit_test_setup(only_rows_of_the_daemon_are_shown, reset),
        cmocka_unit_test_setup(a_histogram_counts_up_to_each_bound, reset),
        cmocka_unit_test_setup(facts_are_labels_and_escaped, reset),
        cmocka_unit_test_setup(the_page_is_valid_for_a_scraper, reset),
        cmocka_unit_test_setup(updates_from_many_threads_are_not_lost, reset),
    };
    return cmocka_run_group_tests(tests, NULL, free_page);
}
