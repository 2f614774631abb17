/* Where each element of a KV page lies: the only address arithmetic on pages. Shared by engine, hand-off and kernels.
 *
 * Layers alternate, so there are two groups with a pool of pages each: sliding layers and full layers. A pool of a rank is
 *   [layer in group][page][kv head of this rank][K|V][position in page][head_dim]
 * so any head range of a page is one contiguous run, whatever the tensor parallelism of the two peers, and the same page
 * number is used in every layer of its group. K is stored after rotation. */
#ifndef TD_KERNELS_KV_LAYOUT_H
#define TD_KERNELS_KV_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_KV_LAYOUT_VERSION 1u
#define TD_MAX_RANKS         8u /* of a tensor-parallel group */

enum td_kv_group { TD_KV_SLIDING, TD_KV_FULL, TD_KV_N_GROUPS };
enum td_dtype { TD_F32, TD_BF16, TD_E4M3, TD_U8 };

static inline uint32_t td_dtype_bytes(enum td_dtype t) { return t == TD_F32 ? 4u : t == TD_BF16 ? 2u : 1u; }

struct td_kv_group_layout {
    uint32_t n_layers;     /* of this group */
    uint32_t n_pages;      /* in this rank's pool */
    uint32_t n_heads;      /* KV heads of this rank */
    uint32_t head_dim;
    uint32_t page_tokens;
    enum td_dtype dtype;
};

/* Bytes of one head of one page: K and V. */
static inline size_t td_kv_head_bytes(const struct td_kv_group_layout *g)
{
    return (size_t)2 * g->page_tokens * g->head_dim * td_dtype_bytes(g->dtype);
}
static inline size_t td_kv_page_bytes(const struct td_kv_group_layout *g) { return g->n_heads * td_kv_head_bytes(g); }
static inline size_t td_kv_layer_bytes(const struct td_kv_group_layout *g) { return g->n_pages * td_kv_page_bytes(g); }
static inline size_t td_kv_pool_bytes(const struct td_kv_group_layout *g) { return g->n_layers * td_kv_layer_bytes(g); }

/* Offset of (layer in group, page, head, K or V, position in page) from the pool's base. */
static inline size_t td_kv_offset(const struct td_kv_group_layout *g, uint32_t layer, uint32_t page, uint32_t head,
                                  bool is_v, uint32_t pos)
{
    return layer * td_kv_layer_bytes(g) + page * td_kv_page_bytes(g) + head * td_kv_head_bytes(g) +
           ((size_t)(is_v ? g->page_tokens : 0) + pos) * g->head_dim * td_dtype_bytes(g->dtype);
}

/* Blocks (position / page_tokens) that a sequence of n_tokens needs in a group: [*first, *end). Sliding layers need the pages
 * that meet positions [n_tokens - (window - 1), n_tokens - 1]: what the next token can still see. */
static inline void td_kv_blocks(const struct td_kv_group_layout *g, enum td_kv_group which, uint32_t window,
                                uint32_t n_tokens, uint32_t *first, uint32_t *end)
{
    *end = (n_tokens + g->page_tokens - 1) / g->page_tokens;
    *first = 0;
    if (which == TD_KV_SLIDING && n_tokens > window - 1) *first = (n_tokens - (window - 1)) / g->page_tokens;
}

#endif
