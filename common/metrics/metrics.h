/* Counters, gauges and histograms as one table (metrics.def), exported in Prometheus text form. Updates are one relaxed atomic
 * operation from any thread. */
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
void td_metric_add(enum td_metric m, uint64_t n);        /* counters (and gauges) */
void td_metric_set(enum td_metric m, double v);          /* gauges */
void td_metric_observe(enum td_metric m, double v);      /* histograms; seconds, tokens, ... */
uint64_t td_metric_count(enum td_metric m);              /* a counter's value, a histogram's count */
double td_metric_value(enum td_metric m);                /* a gauge's value, a histogram's sum */
/* A fact as a metric with a label: tandem_<name>{<label>="<value>"} 1, e.g. which transport is in use. */
void td_metric_info(const char *name, const char *label, const char *value);
void td_metrics_render(unsigned daemons, const char *daemon_name, struct td_buf *out);
#endif
