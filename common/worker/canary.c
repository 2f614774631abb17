#include "common/worker/canary.h"

#include <string.h>

#include "common/base/log.h"
#include "common/metrics/metrics.h"

#define PATTERN 0xc5

static uint8_t *part_of(const struct td_worker *w, uint32_t rank, enum td_kv_group g, uint32_t layer, uint32_t page)
{
    return (uint8_t *)w->xfer_ops->pool_base(w->pools[rank][g]) +
           td_kv_offset(&w->kv_layout[g], layer, page, 0, false, 0);
}

static void on_freed(void *self, enum td_kv_group g, uint32_t page)
{
    const struct td_worker *w = self;
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        for (uint32_t l = 0; l < w->kv_layout[g].n_layers; l++)
            memset(part_of(w, r, g, l, page), PATTERN, td_kv_page_bytes(&w->kv_layout[g]));
}

static bool is_whole(const uint8_t *p, size_t n) { return n == 0 || (p[0] == PATTERN && memcmp(p, p + 1, n - 1) == 0); }

static void on_taken(void *self, enum td_kv_group g, uint32_t page)
{
    const struct td_worker *w = self;
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        for (uint32_t l = 0; l < w->kv_layout[g].n_layers; l++) {
            if (is_whole(part_of(w, r, g, l, page), td_kv_page_bytes(&w->kv_layout[g]))) continue;
            td_metric_add(TD_M_kv_pages_written_free, 1);
            TD_ERROR("page_written_while_free", "group=%s page=%u layer=%u rank=%u",
                     g == TD_KV_SLIDING ? "sliding" : "full", page, l, r);
            return;
        }
}

enum td_status td_worker_watch_pages(struct td_worker *w, struct td_err *err)
{
    if (w->cfg.page_canary == 0) return TD_OK;
    if (strcmp(w->cfg.device, "cpu") != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--page-canary: works with --device cpu only");
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t p = 0; p < w->kv_layout[g].n_pages; p++) on_freed(w, (enum td_kv_group)g, p);
    struct td_kv_watch watch = {.self = w, .freed = on_freed, .taken = on_taken};
    td_kv_pages_set_watch(w->kv, &watch);
    return TD_OK;
}
