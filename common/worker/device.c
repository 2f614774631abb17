/* The worker's device and its KV pools. On the CPU the pools are memory that the transfer allocated and peers write. On
 * a GPU they are device memory: registered with the transfer where that reaches it (UCX with cuda_ipc), else copied
 * through pools of the same shape in host memory, page by page at the same place:
 *
 *   prefill   layer computed -> its pages are copied out -> put into the peer's host pool
 *   decode    hand-off complete -> its pages are copied in -> the sequence may run
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/worker/worker.h"
#include "kernels/device.h"

#define DRIVER_BLOCK    ((size_t)2 << 20)
#define WORKSPACE_GUESS (2ull << 30) /* of the engine, beside the pools, for advice */

enum td_status td_worker_check_device(const struct td_config *c, struct td_err *err)
{
    if (strcmp(c->moe_activations, "bf16") == 0 && strcmp(c->moe_weights, "bf16") == 0)
        return td_err_set(err, TD_E_BAD_CONFIG,
                          "--moe-activations: \"bf16\" is for --moe-weights fp8 or mxfp4; those in bf16 have no other");
    if (strcmp(c->device, "cpu") == 0 && strcmp(c->dense_weights, "bf16") != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--dense-weights: \"%s\" needs --device cuda; on the CPU they are bf16",
                          c->dense_weights);
    if (strcmp(c->device, "cpu") == 0)
        return strcmp(c->moe_weights, "bf16") == 0
                   ? TD_OK
                   : td_err_set(err, TD_E_BAD_CONFIG,
                                "--moe-weights: \"%s\" needs --device cuda; on the CPU they are bf16", c->moe_weights);
    if (c->batch_invariant && strcmp(c->dense_weights, "bf16") != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--batch-invariant: works with --dense-weights bf16 only");
    if (c->tp != 1)
        return td_err_set(err, TD_E_BAD_CONFIG, "--tp: %u ranks need a GPU each; with --device %s only 1 works", c->tp,
                          c->device);
    if (strcmp(c->kv_dtype, "f32") == 0)
        return td_err_set(err, TD_E_BAD_CONFIG,
                          "--kv-dtype: \"%s\" needs --device cpu; with --device %s it is bf16 or e4m3", c->kv_dtype,
                          c->device);
    return TD_OK;
}

enum td_status td_worker_open_device(struct td_worker *w, struct td_err *err)
{
    if (strcmp(w->cfg.device, "cpu") == 0) return TD_OK; /* the model opens its own */
    struct td_device_options o = {
        .backend = w->cfg.device, .index = w->cfg.gpu, .is_batch_invariant = w->cfg.batch_invariant};
    o.has_bf16_activations = strcmp(w->cfg.moe_activations, "bf16") == 0;
    o.is_dense_fp8 = strcmp(w->cfg.dense_weights, "fp8") == 0;
    if (strcmp(w->cfg.moe_weights, "fp8") == 0) o.experts = TD_EXPERTS_FP8;
    if (strcmp(w->cfg.moe_weights, "mxfp4") == 0) o.experts = TD_EXPERTS_MXFP4;
    enum td_status st = td_device_open(&o, &w->device, err);
    return st == TD_OK ? st : td_err_prefix(err, TD_E_BAD_CONFIG, "--device");
}

static void log_kernel(void *user, const char *text)
{
    (void)user;
    TD_INFO("kernel", "%s", text);
}

void td_worker_explain_kernels(const struct td_worker *w)
{
    const struct td_model_config *c = td_model_config_of(w->model);
    struct td_explain_shape s = {.n_heads = c->n_heads / w->cfg.tp,
                                 .n_kv_heads = c->n_kv_heads / w->cfg.tp,
                                 .head_dim = c->head_dim,
                                 .hidden = c->hidden,
                                 .intermediate = c->intermediate,
                                 .n_experts = c->n_experts,
                                 .top_k = c->top_k,
                                 .vocab = c->vocab};
    if (w->device != NULL)
        td_device_explain(w->device, &s, log_kernel, NULL);
    else
        log_kernel(NULL, "op=all kernel=the CPU's only one");
}

static enum td_status create_staging(struct td_worker *w, struct td_err *err)
{
    enum td_status st = td_stream_create(w->device, 0, &w->staging);
    for (int g = 0; st == TD_OK && g < TD_KV_N_GROUPS; g++) {
        size_t n = td_kv_pool_bytes(&w->kv_layout[g]);
        st = w->xfer_ops->pool_create(w->xfer, n, &w->pools[0][g], err);
        if (st == TD_OK)
            w->is_pinned[g] = td_device_pin_host(w->device, w->xfer_ops->pool_base(w->pools[0][g]), n) == TD_OK;
    }
    if (st == TD_OK)
        TD_WARN("kv_staged",
                "device=%s pinned=%s: the transfer cannot reach the GPU's memory (UCX without cuda_ipc), so KV goes "
                "through a copy in host memory: slower hand-offs, and --kv-bytes a second time",
                w->cfg.device, w->is_pinned[TD_KV_FULL] ? "yes" : "no");
    return st;
}

/* Before anything is allocated, so that what is refused is refused with figures. */
static enum td_status check_room(struct td_worker *w, struct td_err *err)
{
    uint64_t needed = 0, n_free, total;
    if (td_device_memory(w->device, &n_free, &total) != TD_OK) return TD_OK; /* it will show */
    for (int g = 0; g < TD_KV_N_GROUPS; g++) needed += td_kv_pool_bytes(&w->kv_layout[g]) + DRIVER_BLOCK;
    if (needed <= n_free) return TD_OK;
    uint64_t fits = n_free > WORKSPACE_GUESS ? (n_free - WORKSPACE_GUESS) >> 30 : 0;
    char advice[64] = "the weights alone fill it: --moe-weights mxfp4 takes least";
    if (fits > 0) snprintf(advice, sizeof advice, "--kv-bytes=%" PRIu64 "g would fit", fits);
    return td_err_set(err, TD_E_NO_MEMORY,
                      "--kv-bytes: KV pools of %.2f GB do not fit: of the GPU's %.1f GB, %.2f GB are free beside the "
                      "weights' %.1f GB; %s",
                      (double)needed / 1e9, (double)total / 1e9, (double)n_free / 1e9,
                      (double)td_model_weight_bytes(w->model) / 1e9, advice);
}

enum td_status td_worker_create_pools(struct td_worker *w, struct td_err *err)
{
    enum td_status st = TD_OK;
    for (uint32_t r = 0; w->device == NULL && r < w->cfg.tp; r++)
        for (int g = 0; st == TD_OK && g < TD_KV_N_GROUPS; g++)
            st = w->xfer_ops->pool_create(w->xfer, td_kv_pool_bytes(&w->kv_layout[g]), &w->pools[r][g], err);
    if (w->device == NULL || st != TD_OK) return st;
    st = check_room(w, err);
    for (int g = 0; st == TD_OK && g < TD_KV_N_GROUPS; g++) {
        size_t n = td_kv_pool_bytes(&w->kv_layout[g]);
        /* Alone in its blocks of the driver's: a peer that maps one pool must not have mapped the other with it. */
        st = td_device_alloc(w->device, (n + DRIVER_BLOCK - 1) / DRIVER_BLOCK * DRIVER_BLOCK, &w->kv_base[g]);
        if (st != TD_OK)
            return td_err_set(err, st, "--kv-bytes: the GPU has no %zu bytes left for a KV pool: %s", n,
                              td_device_last_error(w->device));
    }
    for (int g = 0; st == TD_OK && g < TD_KV_N_GROUPS; g++)
        st = w->xfer_ops->pool_register_device(w->xfer, w->kv_base[g], td_kv_pool_bytes(&w->kv_layout[g]),
                                               &w->pools[0][g], err);
    if (st == TD_OK) {
        TD_INFO("kv_registered", "device=%s: peers write the GPU's memory", w->cfg.device);
        return TD_OK;
    }
    TD_INFO("kv_not_registered", "status=%s why=\"%s\"", td_status_name(st), err->text);
    *err = (struct td_err){0};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        w->xfer_ops->pool_destroy(w->pools[0][g]);
        w->pools[0][g] = NULL;
    }
    return create_staging(w, err);
}

void *td_worker_kv_base(const struct td_worker *w, uint32_t rank, int group)
{
    return w->device != NULL ? w->kv_base[group] : w->xfer_ops->pool_base(w->pools[rank][group]);
}

/* --- copies ------------------------------------------------------------------------------------------------ */

/* Runs of neighbouring pages are one copy. */
static enum td_status copy_pages(struct td_worker *w, int g, uint32_t layer, const uint32_t *pages, uint32_t n,
                                 bool is_out)
{
    const struct td_kv_group_layout *l = &w->kv_layout[g];
    size_t page_bytes = td_kv_page_bytes(l);
    uint8_t *host = w->xfer_ops->pool_base(w->pools[0][g]), *dev = w->kv_base[g];
    enum td_status st = TD_OK;
    for (uint32_t i = 0, run; i < n && st == TD_OK; i += run) {
        for (run = 1; i + run < n && pages[i + run] == pages[i] + run; run++) continue;
        size_t at = td_kv_offset(l, layer, pages[i], 0, false, 0);
        st = is_out ? td_stream_copy_out(w->staging, host + at, dev + at, run * page_bytes)
                    : td_stream_copy_in(w->staging, dev + at, host + at, run * page_bytes);
    }
    return st;
}

enum td_status td_worker_stage_out(void *user, const struct td_batch *b, uint32_t layer)
{
    struct td_worker *w = user;
    const struct td_model_config *c = td_model_config_of(w->model);
    int g = c->is_sliding[layer] ? TD_KV_SLIDING : TD_KV_FULL;
    uint32_t page_tokens = w->kv_layout[g].page_tokens;
    enum td_status st = TD_OK;
    for (uint32_t i = 0; i < b->n_segments && st == TD_OK; i++) {
        const struct td_segment *s = &b->segments[i];
        const struct td_page_table *t = &s->table[g];
        uint32_t first = s->start / page_tokens, end = (s->start + s->n_tokens - 1) / page_tokens + 1;
        TD_CHECK(first >= t->first_block);
        st = copy_pages(w, g, c->layer_in_group[layer], t->pages + (first - t->first_block), end - first, true);
    }
    if (st == TD_OK) st = td_stream_sync(w->staging);
    if (st != TD_OK) TD_ERROR("kv_copy_failed", "error=\"%s\"", td_device_last_error(w->device));
    return st;
}

void td_worker_stage_in(struct td_worker *w, const uint32_t *const pages[TD_KV_N_GROUPS],
                        const uint32_t n_pages[TD_KV_N_GROUPS])
{
    if (w->staging == NULL) return;
    enum td_status st = TD_OK;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t layer = 0; layer < w->kv_layout[g].n_layers && st == TD_OK; layer++)
            st = copy_pages(w, g, layer, pages[g], n_pages[g], false);
    if (st == TD_OK) st = td_stream_sync(w->staging);
    if (st == TD_OK) return;
    TD_ERROR("kv_copy_failed", "error=\"%s\"", td_device_last_error(w->device));
    td_worker_broken(w, st, "the worker's device failed");
}

/* --- the end ----------------------------------------------------------------------------------------------- */

void td_worker_unpin_pools(struct td_worker *w)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        if (w->is_pinned[g]) td_device_unpin_host(w->device, w->xfer_ops->pool_base(w->pools[0][g]));
}

void td_worker_close_device(struct td_worker *w)
{
    td_stream_destroy(w->staging);
    for (int g = 0; w->device != NULL && g < TD_KV_N_GROUPS; g++) td_device_free(w->device, w->kv_base[g]);
    td_device_close(w->device);
}
