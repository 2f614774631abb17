/* How --kv-bytes is divided between the two page pools of a rank. Pure. */
#ifndef TD_ENGINE_KV_SPLIT_H
#define TD_ENGINE_KV_SPLIT_H

#include "common/base/status.h"
#include "kernels/kv_layout.h"

/* Pages that a stretch of n_positions consecutive positions meets at most, wherever it begins. 0 for 0. */
uint32_t td_kv_span_pages(uint32_t n_positions, uint32_t page_tokens);

/* Sets kv[].n_pages; the other fields of kv are in. sliding_pages: what all sequences together can hold in sliding
 * layers at once; more would never be used. A sequence holds at least as many full pages as sliding ones, so sliding
 * never gets more pages than full. The rest of kv_bytes goes to full layers. BAD_CONFIG: not even one page each; err
 * names --kv-bytes and how many bytes are needed. */
enum td_status td_kv_split(uint64_t kv_bytes, uint32_t sliding_pages, struct td_kv_group_layout kv[TD_KV_N_GROUPS],
                           struct td_err *err);

#endif
