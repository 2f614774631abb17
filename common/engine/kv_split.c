#include "common/engine/kv_split.h"

#include <inttypes.h>

uint32_t td_kv_span_pages(uint32_t n_positions, uint32_t page_tokens)
{
    if (n_positions == 0) return 0;
    /* The worst beginning is a page's last position. */
    return 1 + (uint32_t)(((uint64_t)n_positions - 1 + page_tokens - 1) / page_tokens);
}

enum td_status td_kv_split(uint64_t kv_bytes, uint32_t sliding_pages, struct td_kv_group_layout kv[TD_KV_N_GROUPS],
                           struct td_err *err)
{
    /* A model may lack one kind of layer: its pages take no memory, but its pool still needs numbers to hand out. */
    uint64_t sliding = (uint64_t)td_kv_page_bytes(&kv[TD_KV_SLIDING]) * kv[TD_KV_SLIDING].n_layers;
    uint64_t full = (uint64_t)td_kv_page_bytes(&kv[TD_KV_FULL]) * kv[TD_KV_FULL].n_layers;
    if (sliding + full == 0) return td_err_set(err, TD_E_BAD_CONFIG, "the model has no KV");
    uint64_t n_both = kv_bytes / (sliding + full);
    if (n_both == 0)
        return td_err_set(err, TD_E_BAD_CONFIG,
                          "--kv-bytes %" PRIu64 " holds no page of each kind: at least %" PRIu64 " needed", kv_bytes,
                          sliding + full);
    if (sliding_pages == 0) sliding_pages = 1;
    uint64_t n_sliding = n_both < sliding_pages ? n_both : sliding_pages;
    uint64_t n_full = full == 0 ? n_both : (kv_bytes - n_sliding * sliding) / full;
    if (n_full > INT32_MAX) n_full = INT32_MAX; /* page numbers are 32 bits wide; nobody has so much memory */
    if (n_sliding > INT32_MAX) n_sliding = INT32_MAX;
    kv[TD_KV_SLIDING].n_pages = (uint32_t)n_sliding;
    kv[TD_KV_FULL].n_pages = (uint32_t)n_full;
    return TD_OK;
}
