/* Counters, gauges and histograms as one table (metrics.def), exported in Prometheus text form. Updates are one relaxed
 * atomic operation from any thread. */
#ifndef TD_METRICS_METRICS_H
#define TD_METRICS_METRICS_H

#include <stdint.h>

#include "common/base/bytes.h"

enum td_metric {
#define X(kind, name, unit, daemons, help) TD_M_##name,
#include "common/metrics/metrics.def"
#undef X
    TD_N_METRICS
};
void td_metric_add(enum td_metric m, uint64_t n);   /* counters; gauges too, where (uint64_t)-1 takes one off */
void td_metric_set(enum td_metric m, double v);     /* gauges */
void td_metric_observe(enum td_metric m, double v); /* histograms; seconds, tokens, ... */
uint64_t td_metric_count(enum td_metric m);         /* a counter's value, a histogram's count */
double td_metric_value(enum td_metric m);           /* a gauge's value, a histogram's sum */
/* A fact as a metric with a label: tandem_<name>{<label>="<value>"} 1, e.g. which transport is in use. A later call
 * with the same name and label replaces the value. Any thread; at most 32 facts, more are dropped. */
void td_metric_info(const char *name, const char *label, const char *value);
/* Prometheus text format 0.0.4. daemons: which rows of metrics.def to show (TD_ROUTER, ...); daemon_name becomes
 * tandem_daemon_info{name="..."}. Also process_* of the whole process. Histogram buckets are chosen by the row's unit.
 */
void td_metrics_render(unsigned daemons, const char *daemon_name, struct td_buf *out);
void td_metrics_reset(void); /* tests: everything back to zero */
#endif
