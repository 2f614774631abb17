#include "common/config/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct td_config c;
static struct td_err err;

/* Arguments up to NULL, after the program's name. */
static enum td_status parse_env(enum td_daemon d, char **env, const char *first, ...)
{
    char *argv[32] = {(char *)"tandem"};
    int argc = 1;
    va_list ap;
    va_start(ap, first);
    for (const char *a = first; a != NULL; a = va_arg(ap, const char *)) argv[argc++] = (char *)(uintptr_t)a;
    va_end(ap);
    err.text[0] = 0;
    return td_config_parse(&c, d, argc, argv, env, &err);
}
#define PARSE(d, ...) parse_env(d, NULL, __VA_ARGS__, NULL)

#define REFUSED(d, want, ...)                                                                                          \
    do {                                                                                                               \
        assert_int_equal(PARSE(d, "--model", "m", __VA_ARGS__), TD_E_BAD_CONFIG);                                      \
        if (strstr(err.text, want) == NULL) fail_msg("\"%s\" is not in: %s", want, err.text);                          \
    } while (0)

static void defaults_come_from_the_table(void **state)
{
    (void)state;
    assert_int_equal(PARSE(TD_DECODE, "--model", "/models/gpt-oss-20b/"), TD_OK);
    assert_int_equal(c.daemon, TD_DECODE);
    assert_int_equal(c.kv_page_tokens, 64);
    assert_int_equal(c.kv_bytes, 256ull << 20);
    assert_int_equal(c.drain_timeout, 30000);
    assert_string_equal(c.rpc_address, "127.0.0.1:0");
    assert_string_equal(c.router, "");
    assert_string_equal(c.model_name, "gpt-oss-20b");
    assert_memory_equal(c.name, "decode-", 7);
}

static void values_are_read_in_both_forms_and_the_last_counts(void **state)
{
    (void)state;
    assert_int_equal(
        PARSE(TD_DECODE, "--model=a=b", "--max-batch", "7", "--max-batch=9", "--name", "--odd", "--model-name="),
        TD_OK);
    assert_string_equal(c.model, "a=b");
    assert_int_equal(c.max_batch, 9);
    assert_string_equal(c.name, "--odd"); /* a value is a value, whatever it looks like */
    assert_string_equal(c.model_name, "a=b");
}

static void sizes_and_times_take_units(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t want;
    } sizes[] = {
        {"1048576", 1048576}, {"1024K", 1048576}, {"64M", 64ull << 20}, {"2g", 2ull << 30}, {"1T", 1ull << 40}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_int_equal(PARSE(TD_DECODE, "--model", "m", "--kv-bytes", sizes[i].text), TD_OK);
        assert_true(c.kv_bytes == sizes[i].want);
    }
    assert_int_equal(PARSE(TD_DECODE, "--model", "m", "--drain-timeout", "3s", "--step-timeout", "1m"), TD_OK);
    assert_int_equal(c.drain_timeout, 3000);
    assert_int_equal(c.step_timeout, 60000);
}

static void bad_values_are_refused_with_flag_and_bounds(void **state)
{
    (void)state;
    REFUSED(TD_DECODE, "--kv-page-tokens: 15 is out of bounds, 16 to 256", "--kv-page-tokens", "15");
    REFUSED(TD_DECODE, "--kv-page-tokens: 257 is out of bounds", "--kv-page-tokens=257");
    REFUSED(TD_DECODE, "--kv-bytes: 1K is out of bounds, 1M to 1T", "--kv-bytes", "1K");
    REFUSED(TD_DECODE, "out of bounds", "--kv-bytes", "99999999999999999999999");
    REFUSED(TD_DECODE, "out of bounds", "--kv-bytes", "99999999999999T");
    REFUSED(TD_DECODE, "to 600000 ms", "--drain-timeout", "600001");
    static const char *const not_numbers[] = {"", "x", "-1", "+1", " 1", "1 ", "1.5", "0x10", "1K", "64s"};
    for (size_t i = 0; i < sizeof not_numbers / sizeof not_numbers[0]; i++)
        REFUSED(TD_DECODE, "--max-batch: \"", "--max-batch", not_numbers[i]);
    REFUSED(TD_DECODE, "is not bytes (or a number with K, M, G or T)", "--kv-bytes", "64MB");
    REFUSED(TD_DECODE, "is not milliseconds", "--drain-timeout", "3d");
    char long_text[400];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    REFUSED(TD_DECODE, "--name: 399 bytes are too long, at most 255", "--name", long_text);
    REFUSED(TD_DECODE, "--log-level: \"loud\" is not one of: debug info warn error", "--log-level", "loud");
    REFUSED(TD_DECODE, "--device: \"gpu\" is not one of: cpu cuda", "--device=gpu");
    REFUSED(TD_ROUTER, "--current-date: \"today\" is not a date", "--current-date", "today");
    REFUSED(TD_ROUTER, "YYYY-MM-DD", "--current-date", "2025-13-01");
    REFUSED(TD_ROUTER, "--worker-timeout (1000 ms) must be at least twice --heartbeat (600 ms)", "--worker-timeout",
            "1s", "--heartbeat", "600");
}

static void unknown_flags_get_a_suggestion(void **state)
{
    (void)state;
    REFUSED(TD_DECODE, "unknown flag --kv-byte; did you mean --kv-bytes?", "--kv-byte", "1M");
    REFUSED(TD_DECODE, "did you mean --kv-bytes?", "--kv_bytes", "1M");
    REFUSED(TD_DECODE, "did you mean --max-batch?", "--max-bacth=3");
    REFUSED(TD_ROUTER, "unknown flag --entirely-different; --help lists the flags", "--entirely-different", "1M");
    REFUSED(TD_DECODE, "unexpected argument \"stray\"", "stray");
    REFUSED(TD_DECODE, "unexpected argument \"-m\"", "-m");
    REFUSED(TD_DECODE, "unexpected argument \"--\"", "--");
    REFUSED(TD_DECODE, "--kv-bytes needs a value", "--kv-bytes");
    char longest[600] = "--";
    memset(longest + 2, 'k', 500);
    REFUSED(TD_DECODE, "unknown flag --kkk", longest);
}

static void a_flag_of_another_daemon_is_refused_by_name(void **state)
{
    (void)state;
    REFUSED(TD_PREFILL, "--max-batch is a flag of tandem-decode; tandem-prefill has no use for it", "--max-batch", "3");
    REFUSED(TD_ROUTER, "--kv-bytes is a flag of tandem-prefill and tandem-decode; tandem-router", "--kv-bytes=2M");
}

static void the_model_must_be_set(void **state)
{
    (void)state;
    assert_int_equal(PARSE(TD_ROUTER, "--name", "r"), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "--model (or TANDEM_MODEL) must be set"));
}

static void the_environment_sets_what_the_command_line_does_not(void **state)
{
    (void)state;
    char *env[] = {(char *)"PATH=/bin",
                   (char *)"TANDEM_MODEL=from-env",
                   (char *)"TANDEM_MAX_BATCH=5",
                   (char *)"TANDEM_KV_BYTES=32M",
                   (char *)"TANDEM_MAX_QUEUE=not-for-decode",
                   (char *)"TANDEM_NAME",
                   NULL};
    assert_int_equal(parse_env(TD_DECODE, env, "--max-batch", "6", NULL), TD_OK);
    assert_string_equal(c.model, "from-env");
    assert_int_equal(c.max_batch, 6);
    assert_int_equal(c.kv_bytes, 32ull << 20);
    env[2] = (char *)"TANDEM_MAX_BATCH=many";
    assert_int_equal(parse_env(TD_DECODE, env, NULL), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "TANDEM_MAX_BATCH: \"many\" is not a whole number"));
}

static void help_shows_each_flag_of_the_daemon_with_default_bounds_and_twin(void **state)
{
    (void)state;
    struct td_buf b = {0};
    td_config_help(TD_DECODE, &b);
    const char *h = td_buf_cstr(&b);
    assert_non_null(strstr(h, "Usage: tandem-decode"));
    assert_non_null(strstr(h, "  --kv-bytes BYTES\n        memory for KV pages of both kinds, of all ranks together\n"
                              "        default: 256M; from 1M to 1T; TANDEM_KV_BYTES\n"));
    assert_non_null(strstr(h, "  --drain-timeout MS\n"));
    assert_non_null(strstr(h, "must be set; TANDEM_MODEL\n"));
    assert_non_null(strstr(h, "default: bf16; TANDEM_KV_DTYPE\n"));
    assert_null(strstr(h, "--max-queue"));
    td_buf_free(&b);
}

static void the_settings_print_as_json(void **state)
{
    (void)state;
    struct td_buf b = {0};
    assert_int_equal(PARSE(TD_PREFILL, "--model", "a\"b", "--kv-bytes", "2M"), TD_OK);
    td_config_json(&c, &b);
    const char *j = td_buf_cstr(&b);
    assert_int_equal(j[0], '{');
    assert_int_equal(j[b.n - 1], '}');
    assert_non_null(strstr(j, "\"model\":\"a\\\"b\","));
    assert_non_null(strstr(j, "\"kv_bytes\":2097152,"));
    assert_null(strstr(j, "max_queue"));
    td_buf_free(&b);
}

static void help_and_version_end_the_daemon_kindly_and_errors_do_not(void **state)
{
    (void)state;
    char *help[] = {(char *)"x", (char *)"--bad", (char *)"--help"}, *version[] = {(char *)"x", (char *)"--version"};
    char *bad[] = {(char *)"x", (char *)"--bad"}, *good[] = {(char *)"x", (char *)"--model", (char *)"m"};
    FILE *old_out = stdout, *old_err = stderr;
    char *out = NULL, *errors = NULL;
    size_t n_out = 0, n_errors = 0;
    stdout = open_memstream(&out, &n_out);
    stderr = open_memstream(&errors, &n_errors);
    enum td_config_result r[4] = {
        td_config_load(&c, TD_ROUTER, 3, help),
        td_config_load(&c, TD_ROUTER, 2, version),
        td_config_load(&c, TD_ROUTER, 2, bad),
        td_config_load(&c, TD_ROUTER, 3, good),
    };
    fclose(stdout);
    fclose(stderr);
    stdout = old_out;
    stderr = old_err;
    assert_int_equal(r[0], TD_CONFIG_EXIT_OK);
    assert_int_equal(r[1], TD_CONFIG_EXIT_OK);
    assert_int_equal(r[2], TD_CONFIG_EXIT_BAD);
    assert_int_equal(r[3], TD_CONFIG_RUN);
    assert_non_null(strstr(out, "Usage: tandem-router"));
    assert_non_null(strstr(out, "tandem-router " TD_VERSION "\n"));
    assert_string_equal(errors, "tandem-router: unknown flag --bad; --help lists the flags\n");
    free(out);
    free(errors);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_come_from_the_table),
        cmocka_unit_test(values_are_read_in_both_forms_and_the_last_counts),
        cmocka_unit_test(sizes_and_times_take_units),
        cmocka_unit_test(bad_values_are_refused_with_flag_and_bounds),
        cmocka_unit_test(unknown_flags_get_a_suggestion),
        cmocka_unit_test(a_flag_of_another_daemon_is_refused_by_name),
        cmocka_unit_test(the_model_must_be_set),
        cmocka_unit_test(the_environment_sets_what_the_command_line_does_not),
        cmocka_unit_test(help_shows_each_flag_of_the_daemon_with_default_bounds_and_twin),
        cmocka_unit_test(the_settings_print_as_json),
        cmocka_unit_test(help_and_version_end_the_daemon_kindly_and_errors_do_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
