#include "common/config/config.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/json.h"
#include "common/base/log.h"
#include "common/config/flags_int.h"

#define ENV_PREFIX "TANDEM_"

extern char **environ;

const char *td_daemon_role(enum td_daemon d)
{
    return d == TD_ROUTER ? "router" : d == TD_PREFILL ? "prefill" : d == TD_DECODE ? "decode" : "daemon";
}

/* --- finding flags by name -----------------------------------------------------------------------------------------
 */
/* The first n bytes of written, with dashes as underscores, are the flag's name. */
static const struct td_flag *find_flag(const char *written, size_t n)
{
    for (unsigned i = 0; i < td_n_flags; i++) {
        const char *name = td_flags[i].name;
        size_t k = 0;
        while (k < n && name[k] != 0 && name[k] == (written[k] == '-' ? '_' : written[k])) k++;
        if (k == n && name[k] == 0 && memchr(written, '_', n) == NULL) return &td_flags[i];
    }
    return NULL;
}

static void env_name(const struct td_flag *f, char out[80])
{
    int n = snprintf(out, 80, ENV_PREFIX "%s", f->name);
    for (int i = 0; i < n; i++) out[i] = (char)toupper((unsigned char)out[i]);
}

/* Edits (insert, delete, replace) between two short words, case and dashes aside. */
static unsigned edit_distance(const char *a, size_t n, const char *b)
{
    unsigned row[64], m = (unsigned)strlen(b);
    if (n > 63 || m > 62) return 99;
    for (unsigned j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 0; i < n; i++) {
        char ca = (char)tolower((unsigned char)(a[i] == '-' ? '_' : a[i]));
        unsigned diagonal = row[0];
        row[0] = (unsigned)i + 1;
        for (unsigned j = 0; j < m; j++) {
            unsigned best = diagonal + (ca != b[j]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j + 1] + 1 < best) best = row[j + 1] + 1;
            diagonal = row[j + 1];
            row[j + 1] = best;
        }
    }
    return row[m];
}

/* The flag of this daemon that was probably meant, or NULL. */
static const struct td_flag *closest_flag(enum td_daemon d, const char *written, size_t n)
{
    const struct td_flag *best = NULL;
    unsigned best_distance = 2 + (unsigned)n / 4;
    for (unsigned i = 0; i < td_n_flags; i++) {
        if ((td_flags[i].daemons & d) == 0) continue;
        unsigned distance = edit_distance(written, n, td_flags[i].name);
        if (distance >= best_distance) continue;
        best = &td_flags[i];
        best_distance = distance;
    }
    return best;
}

/* "tandem-prefill and tandem-decode" */
static void who_has(enum td_daemon daemons, char *out, size_t size)
{
    size_t n = 0;
    out[0] = 0;
    for (unsigned d = TD_ROUTER; d < TD_ALL && n < size; d <<= 1)
        if (daemons & d)
            n += (size_t)snprintf(out + n, size - n, "%standem-%s", n == 0 ? "" : " and ",
                                  td_daemon_role((enum td_daemon)d));
}

static enum td_status unknown_flag(enum td_daemon d, const char *written, size_t n, struct td_err *err)
{
    const struct td_flag *f = closest_flag(d, written, n);
    char dashes[64];
    if (f == NULL)
        return td_err_set(err, TD_E_BAD_CONFIG, "unknown flag --%.*s; --help lists the flags", (int)n, written);
    td_flag_dashes(f->name, dashes);
    return td_err_set(err, TD_E_BAD_CONFIG, "unknown flag --%.*s; did you mean --%s?", (int)n, written, dashes);
}

/* --- command line --------------------------------------------------------------------------------------------------
 */
static enum td_status read_argument(struct td_config *c, int argc, char **argv, int *i, struct td_err *err)
{
    const char *arg = argv[*i];
    if (strncmp(arg, "--", 2) != 0 || arg[2] == 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "unexpected argument \"%s\"; flags are --name value or --name=value",
                          arg);
    const char *written = arg + 2, *value = strchr(written, '=');
    size_t n = value == NULL ? strlen(written) : (size_t)(value - written);
    if (value != NULL) value++;

    const struct td_flag *f = find_flag(written, n);
    bool is_negated = false;
    if (f == NULL && n > 3 && memcmp(written, "no-", 3) == 0) {
        f = find_flag(written + 3, n - 3);
        is_negated = f != NULL && f->type == FLAG_bool;
        if (!is_negated) f = NULL;
    }
    if (f == NULL) return unknown_flag(c->daemon, written, n, err);
    if ((f->daemons & c->daemon) == 0) {
        char who[80];
        who_has(f->daemons, who, sizeof who);
        return td_err_set(err, TD_E_BAD_CONFIG, "--%.*s is a flag of %s; tandem-%s has no use for it", (int)n, written,
                          who, td_daemon_role(c->daemon));
    }
    if (is_negated && value != NULL) return td_err_set(err, TD_E_BAD_CONFIG, "--%.*s takes no value", (int)n, written);
    if (f->type == FLAG_bool && value == NULL) value = is_negated ? "false" : "true";
    if (value == NULL) {
        if (*i + 1 >= argc) return td_err_set(err, TD_E_BAD_CONFIG, "--%.*s needs a value", (int)n, written);
        value = argv[++*i];
    }
    char source[72];
    snprintf(source, sizeof source, "--%.*s", (int)(n < 64 ? n : 64), written);
    return td_flag_read(f, c, source, value, err);
}

/* --- environment ---------------------------------------------------------------------------------------------------
 */
static const char *env_value(char **env, const char *name)
{
    size_t n = strlen(name);
    for (; env != NULL && *env != NULL; env++)
        if (strncmp(*env, name, n) == 0 && (*env)[n] == '=') return *env + n + 1;
    return NULL;
}

static enum td_status read_environment(struct td_config *c, char **env, struct td_err *err)
{
    for (unsigned i = 0; i < td_n_flags; i++) {
        const struct td_flag *f = &td_flags[i];
        if ((f->daemons & c->daemon) == 0) continue;
        char name[80];
        env_name(f, name);
        const char *value = env_value(env, name);
        if (value == NULL) continue;
        enum td_status st = td_flag_read(f, c, name, value, err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

/* A misspelt TANDEM_KV_BYTE would silently do nothing. Only a warning: tests and tools have variables of their own, and
 * Kubernetes adds TANDEM_..._SERVICE_HOST and ..._PORT... for services that are named so. */
static void warn_of_unknown_variables(enum td_daemon d, char **env)
{
    for (; env != NULL && *env != NULL; env++) {
        const char *rest = *env + strlen(ENV_PREFIX);
        if (strncmp(*env, ENV_PREFIX, strlen(ENV_PREFIX)) != 0) continue;
        size_t n = strcspn(rest, "=");
        if (n >= 64 || (n == 5 && memcmp(rest, "FAULT", 5) == 0)) continue;
        char lower[64], with_dashes[64];
        for (size_t i = 0; i < n; i++) lower[i] = (char)tolower((unsigned char)rest[i]);
        lower[n] = 0;
        if (strstr(lower, "_service_") != NULL || strstr(lower, "_port") != NULL) continue;
        td_flag_dashes(lower, with_dashes);
        if (find_flag(with_dashes, n) != NULL) continue;
        const struct td_flag *f = closest_flag(d, lower, n);
        char meant[80] = "";
        if (f != NULL) env_name(f, meant);
        TD_WARN("config_unknown_variable", "name=" ENV_PREFIX "%.*s meaning=\"no such setting\"%s%s", (int)n, rest,
                f == NULL ? "" : " closest=", meant);
    }
}

/* --- contradictions, and defaults that depend on other settings ----------------------------------------------------
 */
static bool is_one_of(const char *value, const char *words) /* words: "cpu cuda" */
{
    size_t n = strlen(value);
    for (const char *p = words; *p != 0;) {
        size_t len = strcspn(p, " ");
        if (len == n && memcmp(p, value, n) == 0) return true;
        p += len + (p[len] == ' ');
    }
    return false;
}

static enum td_status check_words(const struct td_config *c, struct td_err *err)
{
    const struct {
        const char *flag, *value, *words;
        enum td_daemon daemons;
    } rows[] = {
        {"log-level", c->log_level, "debug info warn error", TD_ALL},
        {"device", c->device, "cpu cuda", TD_WORKERS},
        {"load-format", c->load_format, "safetensors dummy", TD_WORKERS},
        {"dense-weights", c->dense_weights, "bf16 fp8", TD_WORKERS},
        {"moe-weights", c->moe_weights, "bf16 fp8 mxfp4", TD_WORKERS},
        {"moe-activations", c->moe_activations, "bf16 fp8", TD_WORKERS},
        {"kv-dtype", c->kv_dtype, "bf16 f32 e4m3", TD_WORKERS},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if ((rows[i].daemons & c->daemon) != 0 && !is_one_of(rows[i].value, rows[i].words))
            return td_err_set(err, TD_E_BAD_CONFIG, "--%s: \"%s\" is not one of: %s", rows[i].flag, rows[i].value,
                              rows[i].words);
    return TD_OK;
}

static enum td_status check_date(const char *s, struct td_err *err)
{
    unsigned y, m, d;
    int n = 0;
    if (s[0] == 0) return TD_OK;
    bool is_date = strlen(s) == 10 && sscanf(s, "%4u-%2u-%2u%n", &y, &m, &d, &n) == 3 && n == 10;
    if (is_date && m >= 1 && m <= 12 && d >= 1 && d <= 31) return TD_OK;
    return td_err_set(err, TD_E_BAD_CONFIG, "--current-date: \"%s\" is not a date, YYYY-MM-DD", s);
}

static enum td_status check_together(const struct td_config *c, struct td_err *err)
{
    for (unsigned i = 0; i < td_n_flags; i++) {
        const struct td_flag *f = &td_flags[i];
        bool must = f->type == FLAG_str && f->max == 1 && (f->daemons & c->daemon) != 0;
        if (!must || ((const char *)c + f->offset)[0] != 0) continue;
        char dashes[64], env[80];
        td_flag_dashes(f->name, dashes);
        env_name(f, env);
        return td_err_set(err, TD_E_BAD_CONFIG, "--%s (or %s) must be set: %s", dashes, env, f->help);
    }
    enum td_status st = check_words(c, err);
    if (st == TD_OK && c->daemon == TD_ROUTER) st = check_date(c->current_date, err);
    if (st == TD_OK && c->daemon == TD_ROUTER && c->worker_timeout < 2 * c->heartbeat)
        st = td_err_set(
            err, TD_E_BAD_CONFIG,
            "--worker-timeout (%u ms) must be at least twice --heartbeat (%u ms), or healthy workers are taken out",
            c->worker_timeout, c->heartbeat);
    return st;
}

static void fill_dependent(struct td_config *c)
{
    if (c->name[0] == 0) snprintf(c->name, sizeof c->name, "%s-%d", td_daemon_role(c->daemon), (int)getpid());
    if (c->model_name[0] != 0) return;
    size_t end = strlen(c->model);
    while (end > 0 && c->model[end - 1] == '/') end--;
    size_t start = end;
    while (start > 0 && c->model[start - 1] != '/') start--;
    snprintf(c->model_name, sizeof c->model_name, "%.*s", (int)(end - start), c->model + start);
}

enum td_status td_config_parse(struct td_config *c, enum td_daemon d, int argc, char **argv, char **env,
                               struct td_err *err)
{
    *c = (struct td_config){.daemon = d};
    for (unsigned i = 0; i < td_n_flags; i++) td_flag_set_default(&td_flags[i], c);
    enum td_status st = read_environment(c, env, err);
    for (int i = 1; i < argc && st == TD_OK; i++) st = read_argument(c, argc, argv, &i, err);
    if (st == TD_OK) st = check_together(c, err);
    if (st == TD_OK) fill_dependent(c);
    return st;
}

/* --- printing ------------------------------------------------------------------------------------------------------
 */
static void help_line(const struct td_flag *f, struct td_buf *out)
{
    static const char *const type_names[] = {" N", " N", " MS", "", " TEXT", " BYTES"};
    char dashes[64], env[80];
    td_flag_dashes(f->name, dashes);
    env_name(f, env);
    td_buf_printf(out, "  --%s%s%s\n        %s\n        ", f->type == FLAG_bool ? "[no-]" : "", dashes,
                  type_names[f->type], f->help);
    if (f->type == FLAG_str && f->max == 1)
        td_buf_str(out, "must be set; ");
    else if (f->type == FLAG_str && f->def_str[0] != 0)
        td_buf_printf(out, "default: %s; ", f->def_str);
    else if (f->type != FLAG_str) { /* an empty text needs its help to say what it means */
        td_buf_str(out, "default: ");
        td_flag_print_number(f->type, f->def, out);
        td_buf_str(out, "; ");
    }
    if (f->type != FLAG_str && f->type != FLAG_bool) {
        td_buf_str(out, "from ");
        td_flag_print_number(f->type, f->min, out);
        td_buf_str(out, " to ");
        td_flag_print_number(f->type, f->max, out);
        td_buf_str(out, "; ");
    }
    td_buf_printf(out, "%s\n", env);
}

void td_config_help(enum td_daemon d, struct td_buf *out)
{
    td_buf_printf(
        out,
        "Usage: tandem-%s [flags]\n"
        "Tandem %s. Flags are --name value or --name=value; each has a twin in the environment, over which the\n"
        "command line wins. BYTES takes K, M, G, T (powers of 1024); MS takes ms, s, m, h.\n\n",
        td_daemon_role(d), TD_VERSION);
    for (unsigned i = 0; i < td_n_flags; i++)
        if (td_flags[i].daemons & d) help_line(&td_flags[i], out);
    td_buf_str(out, "  --help\n        print this\n  --version\n        print the version\n");
}

void td_config_json(const struct td_config *c, struct td_buf *out)
{
    const char *separator = "{";
    for (unsigned i = 0; i < td_n_flags; i++) {
        const struct td_flag *f = &td_flags[i];
        if ((f->daemons & c->daemon) == 0) continue;
        td_buf_printf(out, "%s\"%s\":", separator, f->name);
        separator = ",";
        if (f->type == FLAG_str)
            td_json_quote_str(out, (const char *)c + f->offset);
        else if (f->type == FLAG_bool)
            td_buf_str(out, td_flag_number(f, c) != 0 ? "true" : "false");
        else
            td_buf_printf(out, "%llu", (unsigned long long)td_flag_number(f, c));
    }
    td_buf_str(out, "}");
}

enum td_config_result td_config_load(struct td_config *c, enum td_daemon d, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--version") == 0) {
            printf("tandem-%s %s\n", td_daemon_role(d), TD_VERSION);
            return TD_CONFIG_EXIT_OK;
        }
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            struct td_buf b = {0};
            td_config_help(d, &b);
            fputs(td_buf_cstr(&b), stdout);
            td_buf_free(&b);
            return TD_CONFIG_EXIT_OK;
        }
    }
    struct td_err err = {""};
    if (td_config_parse(c, d, argc, argv, environ, &err) != TD_OK) {
        fprintf(stderr, "tandem-%s: %s\n", td_daemon_role(d), err.text);
        return TD_CONFIG_EXIT_BAD;
    }
    warn_of_unknown_variables(d, environ);
    return TD_CONFIG_RUN;
}
