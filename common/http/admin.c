#include "common/http/admin.h"

#include <inttypes.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/metrics/metrics.h"

static void respond_with(struct td_http_req *r, const char *type, struct td_buf *b)
{
    if (b->failed)
        td_http_error(r, 503, NULL, NULL, "out of memory");
    else
        td_http_respond(r, 200, type, b->data, b->n);
    td_buf_free(b);
}

static void healthz(struct td_http_req *r, void *user)
{
    (void)user;
    td_http_respond(r, 200, "text/plain", "ok\n", 3);
}

static void readyz(struct td_http_req *r, void *user)
{
    const struct td_admin *a = user;
    if (a->is_ready(a->user))
        td_http_respond(r, 200, "text/plain", "ready\n", 6);
    else
        td_http_respond(r, 503, "text/plain", "not ready\n", 10);
}

static void metrics(struct td_http_req *r, void *user)
{
    const struct td_admin *a = user;
    struct td_buf b = {0};
    if (a->refresh_metrics != NULL) a->refresh_metrics(a->user);
    td_metrics_render(a->config->daemon, a->config->name, &b);
    respond_with(r, "text/plain; version=0.0.4; charset=utf-8", &b);
}

static void statez(struct td_http_req *r, void *user)
{
    const struct td_admin *a = user;
    struct td_buf b = {0};
    td_buf_str(&b, "{\"name\":");
    td_json_quote_str(&b, a->config->name);
    td_buf_printf(&b,
                  ",\"role\":\"%s\",\"version\":\"%s\",\"pid\":%d,\"uptime_ms\":%" PRIu64 ",\"is_ready\":%s,\"state\":",
                  td_daemon_role(a->config->daemon), TD_VERSION, (int)getpid(),
                  (uint64_t)((td_clock_ns() - a->started_ns) / TD_NS_PER_MS), a->is_ready(a->user) ? "true" : "false");
    size_t before = b.n;
    if (a->write_statez != NULL) a->write_statez(a->user, &b);
    if (b.n == before) td_buf_str(&b, "null");
    td_buf_str(&b, ",\"config\":");
    td_config_json(a->config, &b);
    td_buf_str(&b, "}\n");
    respond_with(r, "application/json", &b);
}

enum td_status td_admin_add_routes(struct td_http *h, struct td_admin *a)
{
    const struct td_http_route rows[] = {
        {"GET", "/healthz", healthz, a},
        {"GET", "/readyz", readyz, a},
        {"GET", "/metrics", metrics, a},
        {"GET", "/statez", statez, a},
    };
    a->started_ns = td_clock_ns();
    return td_http_add_routes(h, rows, TD_COUNT(rows));
}
