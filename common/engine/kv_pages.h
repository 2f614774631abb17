/* Free and used KV pages of both groups. Loop thread only; holds numbers, not memory. A page is free, owned by one
 * holder, or shared read-only and counted. Every page in use remembers its first holder, so that a leak names its
 * culprit. A transfer holds its pages like anybody else (unref when it ends).
 *
 * A free page may still be kept: nobody holds it, but a prefix cache (kv_prefix.h) knows what is in it. Whoever needs a
 * page may have it: kept ones are taken when no others are left. So "free" always counts kept pages too. */
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
void td_kv_pages_unref(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page); /* at zero: free (kept or not) */
uint32_t td_kv_pages_refs(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page);
uint32_t td_kv_pages_n_free(const struct td_kv_pages *kv, enum td_kv_group g);
uint32_t td_kv_pages_n_kept(const struct td_kv_pages *kv, enum td_kv_group g);             /* of the free ones */
bool td_kv_pages_is_kept(const struct td_kv_pages *kv, enum td_kv_group g, uint32_t page); /* held or not */
uint32_t td_kv_pages_n_total(const struct td_kv_pages *kv, enum td_kv_group g);
void td_kv_pages_describe(const struct td_kv_pages *kv,
                          struct td_buf *json_out); /* counts, holders with their page counts */

/* Told of every page that becomes free (and is not kept), and of every free page that is taken. For tests. */
struct td_kv_watch {
    void *self;
    void (*freed)(void *self, enum td_kv_group g, uint32_t page);
    void (*taken)(void *self, enum td_kv_group g, uint32_t page);
};
void td_kv_pages_set_watch(struct td_kv_pages *kv, const struct td_kv_watch *w); /* NULL: nobody */

/* --- the prefix cache's ------------------------------------------------------------------------------------ */
struct td_kv_keeper {
    void *self;
    void (*idle)(void *self, enum td_kv_group g, uint32_t page); /* a kept page lost its last holder */
    void (*busy)(void *self, enum td_kv_group g, uint32_t page); /* and has one again */
    void (*evict)(void *self, enum td_kv_group g); /* a page is needed: must forget at least one that nobody holds */
};
void td_kv_pages_set_keeper(struct td_kv_pages *kv, const struct td_kv_keeper *k);  /* NULL: nothing is kept any more */
void td_kv_pages_keep(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page);   /* somebody holds it */
void td_kv_pages_forget(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page); /* kept, held or not; no callback */
/* One holder more for a page that is kept or held. */
void td_kv_pages_hold(struct td_kv_pages *kv, enum td_kv_group g, uint32_t page, const char *holder);
#endif
