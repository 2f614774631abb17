#include "common/metrics/metrics.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/metrics/metrics_int.h"

#define MAX_BUCKETS 48u
#define MAX_INFOS   32u

enum kind { KIND_counter, KIND_gauge, KIND_histogram };

static const struct {
    enum kind kind;
    const char *name, *unit;
    unsigned daemons;
    const char *help;
} rows[TD_N_METRICS] = {
#define X(kind, name, unit, daemons, help) {KIND_##kind, #name, #unit, daemons, help},
#include "common/metrics/metrics.def"
#undef X
};

/* --- buckets -------------------------------------------------------------------------------------------------------
 */
/* Upper bounds. Times: six steps a decade, so that a quantile read from them is within 25 %. Sizes: powers of four. */
static const double seconds_bounds[] = {0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003,
                                        0.005,  0.007, /* literals print as such */
                                        0.01,   0.015,   0.02,   0.03,   0.05,   0.07,   0.1,   0.15,   0.2,   0.3,
                                        0.5,    0.7,     1,      1.5,    2,      3,      5,     7,      10,    15,
                                        20,     30,      50,     70,     100,    150,    200,   300,    600};
static const double bytes_bounds[] = {0x1p8,  0x1p10, 0x1p12, 0x1p14, 0x1p16, 0x1p18, 0x1p20, 0x1p22,
                                      0x1p24, 0x1p26, 0x1p28, 0x1p30, 0x1p32, 0x1p34, 0x1p36};
static const double counts_bounds[] = {0x1p0,  0x1p2,  0x1p4,  0x1p6,  0x1p8, 0x1p10,
                                       0x1p12, 0x1p14, 0x1p16, 0x1p18, 0x1p20};
_Static_assert(TD_COUNT(seconds_bounds) < MAX_BUCKETS, "one more than the bounds: +Inf");

static const double *bounds_of(enum td_metric m, unsigned *n_out)
{
    if (strcmp(rows[m].unit, "seconds") == 0) {
        *n_out = TD_COUNT(seconds_bounds);
        return seconds_bounds;
    }
    if (strcmp(rows[m].unit, "bytes") == 0) {
        *n_out = TD_COUNT(bytes_bounds);
        return bytes_bounds;
    }
    *n_out = TD_COUNT(counts_bounds);
    return counts_bounds;
}

/* --- values --------------------------------------------------------------------------------------------------------
 */
static _Atomic uint64_t values[TD_N_METRICS]; /* a counter; the bits of a gauge, or of a histogram's sum, as a double */
static _Atomic uint64_t buckets[TD_N_METRICS][MAX_BUCKETS];

static struct {
    char name[64], label[64], value[256];
} infos[MAX_INFOS];
static unsigned n_infos;
static pthread_mutex_t infos_lock = PTHREAD_MUTEX_INITIALIZER;

static double as_double(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static uint64_t as_bits(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static void add_double(_Atomic uint64_t *p, double d)
{
    uint64_t old = atomic_load_explicit(p, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(p, &old, as_bits(as_double(old) + d), memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}

void td_metric_add(enum td_metric m, uint64_t n)
{
    if (rows[m].kind == KIND_counter)
        atomic_fetch_add_explicit(&values[m], n, memory_order_relaxed);
    else if (rows[m].kind == KIND_gauge)
        add_double(&values[m], (double)(int64_t)n);
    else
        TD_CHECK(!"td_metric_add of a histogram");
}

void td_metric_set(enum td_metric m, double v)
{
    TD_CHECK(rows[m].kind == KIND_gauge);
    atomic_store_explicit(&values[m], as_bits(v), memory_order_relaxed);
}

void td_metric_observe(enum td_metric m, double v)
{
    TD_CHECK(rows[m].kind == KIND_histogram);
    if (isnan(v)) return;
    if (v < 0) v = 0; /* a clock that was read in the wrong order */
    unsigned n, lo = 0;
    const double *bounds = bounds_of(m, &n);
    while (lo < n) { /* first bound that is not below v; n: +Inf */
        unsigned mid = lo + (n - lo) / 2;
        if (bounds[mid] < v)
            lo = mid + 1;
        else
            n = mid;
    }
    atomic_fetch_add_explicit(&buckets[m][lo], 1, memory_order_relaxed);
    add_double(&values[m], v);
}

uint64_t td_metric_count(enum td_metric m)
{
    if (rows[m].kind != KIND_histogram) return atomic_load_explicit(&values[m], memory_order_relaxed);
    uint64_t sum = 0;
    for (unsigned i = 0; i < MAX_BUCKETS; i++) sum += atomic_load_explicit(&buckets[m][i], memory_order_relaxed);
    return sum;
}

double td_metric_value(enum td_metric m)
{
    uint64_t v = atomic_load_explicit(&values[m], memory_order_relaxed);
    return rows[m].kind == KIND_counter ? (double)v : as_double(v);
}

void td_metrics_reset(void)
{
    for (unsigned m = 0; m < TD_N_METRICS; m++) {
        atomic_store(&values[m], 0); /* also the bits of 0.0 */
        for (unsigned i = 0; i < MAX_BUCKETS; i++) atomic_store(&buckets[m][i], 0);
    }
    pthread_mutex_lock(&infos_lock);
    n_infos = 0;
    pthread_mutex_unlock(&infos_lock);
}

/* Metric and label names allow few characters; anything else becomes '_'. */
static void copy_name(char *out, size_t size, const char *name)
{
    snprintf(out, size, "%s", name);
    for (char *p = out; *p != 0; p++) {
        bool is_fine = (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9' && p > out);
        if (!is_fine) *p = '_';
    }
}

void td_metric_info(const char *name, const char *label, const char *value)
{
    char n[sizeof infos[0].name], l[sizeof infos[0].label];
    copy_name(n, sizeof n, name);
    copy_name(l, sizeof l, label);
    pthread_mutex_lock(&infos_lock);
    unsigned i = 0;
    while (i < n_infos && (strcmp(infos[i].name, n) != 0 || strcmp(infos[i].label, l) != 0)) i++;
    if (i < MAX_INFOS) {
        memcpy(infos[i].name, n, sizeof n);
        memcpy(infos[i].label, l, sizeof l);
        snprintf(infos[i].value, sizeof infos[i].value, "%s", value);
        if (i == n_infos) n_infos++;
    }
    pthread_mutex_unlock(&infos_lock);
}

/* --- text ----------------------------------------------------------------------------------------------------------
 */
static void put_escaped(struct td_buf *out, const char *s, bool in_label)
{
    for (; *s != 0; s++) {
        if (*s == '\n')
            td_buf_str(out, "\\n");
        else if (*s == '\\')
            td_buf_str(out, "\\\\");
        else if (*s == '"' && in_label)
            td_buf_str(out, "\\\"");
        else
            td_buf_u8(out, (uint8_t)*s);
    }
}

void td_metrics_put_number(struct td_buf *out, double v)
{
    char text[40];
    if (isnan(v))
        snprintf(text, sizeof text, "NaN");
    else if (isinf(v))
        snprintf(text, sizeof text, v > 0 ? "+Inf" : "-Inf");
    else {
        snprintf(text, sizeof text, "%.15g", v); /* 0.1 rather than 0.10000000000000001, where that is exact */
        double back;
        if (sscanf(text, "%lf", &back) != 1 || back != v) snprintf(text, sizeof text, "%.17g", v);
    }
    td_buf_str(out, text);
}

static void put_head(struct td_buf *out, const char *name, const char *suffix, const char *type, const char *help)
{
    td_buf_printf(out, "# HELP tandem_%s%s ", name, suffix);
    put_escaped(out, help, false);
    td_buf_printf(out, "\n# TYPE tandem_%s%s %s\n", name, suffix, type);
}

static void put_info(struct td_buf *out, const char *name, const char *label, const char *value)
{
    td_buf_printf(out, "tandem_%s{%s=\"", name, label);
    put_escaped(out, value, true);
    td_buf_str(out, "\"} 1\n");
}

static void put_histogram(struct td_buf *out, enum td_metric m)
{
    unsigned n;
    const double *bounds = bounds_of(m, &n);
    const char *name = rows[m].name;
    uint64_t total = 0;
    for (unsigned i = 0; i <= n; i++) {
        total += atomic_load_explicit(&buckets[m][i], memory_order_relaxed);
        td_buf_printf(out, "tandem_%s_bucket{le=\"", name);
        td_metrics_put_number(out, i < n ? bounds[i] : (double)INFINITY);
        td_buf_printf(out, "\"} %llu\n", (unsigned long long)total);
    }
    td_buf_printf(out, "tandem_%s_sum ", name);
    td_metrics_put_number(out, td_metric_value(m));
    td_buf_printf(out, "\ntandem_%s_count %llu\n", name, (unsigned long long)total);
}

static void put_infos(struct td_buf *out)
{
    pthread_mutex_lock(&infos_lock);
    for (unsigned i = 0; i < n_infos; i++) {
        bool is_first = true;
        for (unsigned k = 0; k < i; k++) is_first &= strcmp(infos[k].name, infos[i].name) != 0;
        if (!is_first) continue; /* lines of one name must stand together */
        put_head(out, infos[i].name, "", "gauge", "a fact, told by the label");
        for (unsigned k = i; k < n_infos; k++)
            if (strcmp(infos[k].name, infos[i].name) == 0) put_info(out, infos[k].name, infos[k].label, infos[k].value);
    }
    pthread_mutex_unlock(&infos_lock);
}

void td_metrics_render(unsigned daemons, const char *daemon_name, struct td_buf *out)
{
    atomic_store(&values[TD_M_log_lines_lost], td_log_n_lost()); /* the log cannot count here: it is a layer below */
    put_head(out, "daemon_info", "", "gauge", "the daemon's name");
    put_info(out, "daemon_info", "name", daemon_name);
    put_infos(out);
    for (unsigned m = 0; m < TD_N_METRICS; m++) {
        if ((rows[m].daemons & daemons) == 0) continue;
        switch (rows[m].kind) {
        case KIND_counter:
            put_head(out, rows[m].name, "_total", "counter", rows[m].help);
            td_buf_printf(out, "tandem_%s_total %llu\n", rows[m].name,
                          (unsigned long long)td_metric_count((enum td_metric)m));
            break;
        case KIND_gauge:
            put_head(out, rows[m].name, "", "gauge", rows[m].help);
            td_buf_printf(out, "tandem_%s ", rows[m].name);
            td_metrics_put_number(out, td_metric_value((enum td_metric)m));
            td_buf_str(out, "\n");
            break;
        case KIND_histogram:
            put_head(out, rows[m].name, "", "histogram", rows[m].help);
            put_histogram(out, (enum td_metric)m);
            break;
        }
    }
    td_metrics_put_process(out);
}
