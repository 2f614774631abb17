/* The pages that every daemon has: /healthz (it runs), /readyz (it wants work), /metrics (Prometheus), /statez (what it
 * is doing, JSON). */
#ifndef TD_HTTP_ADMIN_H
#define TD_HTTP_ADMIN_H

#include <stdbool.h>

#include "common/base/bytes.h"
#include "common/config/config.h"
#include "common/http/http.h"

struct td_admin {
    const struct td_config *config;
    bool (*is_ready)(void *user);
    /* Appends one JSON value (an object): requests, peers, pages, with names, ages and deadlines. NULL: no state. */
    void (*write_statez)(void *user, struct td_buf *out);
    void (*refresh_metrics)(void *user); /* sets gauges just before a scrape; may be NULL */
    void *user;
    uint64_t started_ns; /* filled by td_admin_add_routes */
};
/* a and what it points to outlive h. Before td_http_listen. */
enum td_status td_admin_add_routes(struct td_http *h, struct td_admin *a);

#endif
