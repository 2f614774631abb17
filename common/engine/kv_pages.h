/* Free and used KV pages of both groups. Loop thread only; holds numbers, not memory. A page is free, owned by one
 * holder, or shared read-only and counted. Every page in use remembers its first holder, so that a leak names its
 * culprit. A transfer holds its pages like anybody else (unref when it ends). */
#ifndef TD_ENGINE_KV_PAGES_H
#define TD_ENGINE_KV_PAGES_H

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "kernels/kv_layout.h"

struct td_kv_pages;
enum td_status td_kv_pages_create(const uint32_t n_pages[TD_KV_N_GROUPS], struct td_kv_pages **out);
void td_kv_pages_destroy(struct td_kv_pages *kv);
/* n pages at count 1, in runs of rising numbers where possible; all or nothing: NO_PAGES. holder is for people (request
 * id). */
enum td_status td_kv_pages_alloc(struct td_kv_pages *kv, enum td_kv_group g, uint32_t n, const char *holder,
                                 uint32_t *pages_out);
void td_kv_pages_ref(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page);
void td_kv_pages_unref(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page); /* at zero: free */
uint32_t td_kv_pages_refs(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page);
uint32_t td_kv_pages_n_free(const struct td_kv_pages *kv, enum td_kv_group g);
uint32_t td_kv_pages_n_total(const struct td_kv_pages *kv, enum td_kv_group g);
void td_kv_pages_describe(const struct td_kv_pages *kv,
                          struct td_buf *json_out); /* counts, holders with their page counts */
#endif
