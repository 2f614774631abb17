#include "common/model/model.h"

#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/model/fingerprint_int.h"
#include "common/model/safetensors.h"
#include "common/model/weights.h"

struct td_model {
    struct td_model_config config;
    uint32_t n_ranks;
    struct td_weights weights[TD_MAX_RANKS];
    struct td_device *device, *own_device;
    char fingerprint[33];
};

enum td_status td_model_check_ranks(const struct td_model_config *c, uint32_t tp, uint32_t ep, struct td_err *err)
{
    if (tp == 0 || tp > TD_MAX_RANKS || (tp & (tp - 1)) != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--tp: %u is not 1, 2, 4 or 8", tp);
    if (ep != 1 && ep != tp) return td_err_set(err, TD_E_BAD_CONFIG, "--ep: %u is neither 1 nor --tp's %u", ep, tp);
    if (c->n_kv_heads % tp != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--tp: %u ranks do not divide the model's %u KV heads", tp,
                          c->n_kv_heads);
    if (c->n_experts % ep != 0)
        return td_err_set(err, TD_E_BAD_CONFIG, "--ep: %u ranks do not divide the model's %u experts", ep,
                          c->n_experts);
    return TD_OK;
}

/* Before anything is allocated: what does not fit is refused with the figures. */
static enum td_status check_room(const struct td_model *m, uint32_t tp, uint32_t ep, struct td_err *err)
{
    static const char *const forms[] = {"bf16", "fp8", "mxfp4"};
    uint64_t needed = 0, n_free, total;
    if (td_device_memory(m->device, &n_free, &total) != TD_OK) return TD_OK; /* it will show */
    for (uint32_t r = 0; r < tp; r++) {
        struct td_shard s;
        td_shard_of(&m->config, tp, ep, r, &s);
        needed += td_weights_bytes(&m->config, &s, m->device);
    }
    if (needed <= n_free) return TD_OK;
    return td_err_set(err, TD_E_NO_MEMORY,
                      "weights of %.2f GB do not fit: of the GPU's %.2f GB, %.2f GB are free. --moe-weights holds "
                      "experts as %s; mxfp4 takes least, --gpu chooses another GPU",
                      (double)needed / 1e9, (double)total / 1e9, (double)n_free / 1e9,
                      forms[td_device_expert_form(m->device)]);
}

enum td_status td_model_load(const char *dir, const struct td_model_options *o, struct td_model **out,
                             struct td_err *err)
{
    enum td_status st;
    struct td_safetensors *files = NULL;
    struct td_model *m = td_calloc(1, sizeof *m);
    if (m == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the model");
    uint32_t tp = o->tp == 0 ? 1 : o->tp, ep = o->ep == 0 ? 1 : o->ep;
    TD_TRY(td_model_config_load(dir, &m->config, err));
    TD_TRY(td_model_check_ranks(&m->config, tp, ep, err));
    m->device = o->device;
    if (m->device == NULL) {
        struct td_device_options cpu = {0};
        TD_TRY(td_device_open(&cpu, &m->own_device, err));
        m->device = m->own_device;
    }
    TD_TRY(check_room(m, tp, ep, err));
    if (!o->use_dummy_weights) TD_TRY(td_safetensors_open(dir, &files, err));
    for (; m->n_ranks < tp; m->n_ranks++) {
        struct td_shard shard;
        td_shard_of(&m->config, tp, ep, m->n_ranks, &shard);
        TD_TRY(td_weights_load(&m->config, &shard, files, o->dummy_seed, m->device, &m->weights[m->n_ranks], err));
    }
    td_model_fingerprint_make(&m->config, files, o->dummy_seed, m->fingerprint);
    TD_INFO("model_loaded",
            "name=%s layers=%u hidden=%u experts=%u tp=%u ep=%u weight_bytes=%llu fingerprint=%s device=%s",
            m->config.name, m->config.n_layers, m->config.hidden, m->config.n_experts, tp, ep,
            (unsigned long long)td_model_weight_bytes(m), m->fingerprint, td_device_describe(m->device));
    *out = m;
    m = NULL;
out:
    td_safetensors_close(files);
    td_model_destroy(m);
    return st;
}

void td_model_destroy(struct td_model *m)
{
    if (m == NULL) return;
    for (uint32_t r = 0; r < m->n_ranks; r++) td_weights_free(&m->weights[r]);
    td_device_close(m->own_device);
    free(m);
}

const struct td_model_config *td_model_config_of(const struct td_model *m) { return &m->config; }
const char *td_model_fingerprint(const struct td_model *m) { return m->fingerprint; }
uint32_t td_model_n_ranks(const struct td_model *m) { return m->n_ranks; }

uint64_t td_model_weight_bytes(const struct td_model *m)
{
    uint64_t sum = 0;
    for (uint32_t r = 0; r < m->n_ranks; r++) sum += m->weights[r].n_bytes;
    return sum;
}

void td_model_rank_bytes(const struct td_model *m, uint32_t rank, uint64_t *sharded_out, uint64_t *replicated_out)
{
    const struct td_weights *w = td_model_rank_weights(m, rank);
    *sharded_out = w->n_sharded_bytes;
    *replicated_out = w->n_bytes - w->n_sharded_bytes;
}

const struct td_weights *td_model_weights_of(const struct td_model *m) { return &m->weights[0]; }
const struct td_weights *td_model_rank_weights(const struct td_model *m, uint32_t rank)
{
    TD_CHECK(rank < m->n_ranks);
    return &m->weights[rank];
}
struct td_device *td_model_device_of(const struct td_model *m) { return m->device; }
