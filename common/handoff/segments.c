/* The geometry of one layer's puts. A page's head range is one run of bytes on both sides (kernels/kv_layout.h), so one
 * loop serves whole pages and any split of the heads; neighbours melt together where both sides allow it. */
#include "common/handoff/sender.h"

uint32_t td_tx_segments(const struct td_tx_geometry *geo, uint32_t layer, const uint32_t *src_pages,
                        const uint32_t *dst_pages, uint32_t n_pages, struct td_xfer_seg *segs, uint64_t *bytes_out)
{
    const struct td_kv_group_layout *src = geo->src, *dst = geo->dst;
    uint32_t src_end = geo->src_first_head + src->n_heads, dst_end = geo->dst_first_head + dst->n_heads;
    uint32_t first = geo->src_first_head > geo->dst_first_head ? geo->src_first_head : geo->dst_first_head;
    uint32_t end = src_end < dst_end ? src_end : dst_end;
    *bytes_out = 0;
    if (first >= end) return 0;
    uint64_t run = (uint64_t)(end - first) * td_kv_head_bytes(src);
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint8_t *from =
            geo->src_base + td_kv_offset(src, layer, src_pages[i], first - geo->src_first_head, false, 0);
        uint64_t to = td_kv_offset(dst, layer, dst_pages[i], first - geo->dst_first_head, false, 0);
        *bytes_out += run;
        struct td_xfer_seg *last = n > 0 ? &segs[n - 1] : NULL;
        if (last != NULL && (const uint8_t *)last->src + last->n_bytes == from &&
            last->dst_offset + last->n_bytes == to)
            last->n_bytes += run;
        else
            segs[n++] = (struct td_xfer_seg){.src = from, .dst_offset = to, .n_bytes = run};
    }
    return n;
}
