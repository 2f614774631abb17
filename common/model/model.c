#include "common/model/model.h"

#include <stdlib.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/model/fingerprint_int.h"
#include "common/model/safetensors.h"
#include "common/model/weights.h"

struct td_model {
    struct td_model_config config;
    struct td_weights weights;
    struct td_device *device, *own_device;
    char fingerprint[33];
};

enum td_status td_model_load(const char *dir, const struct td_model_options *o, struct td_model **out,
                             struct td_err *err)
{
    enum td_status st;
    struct td_safetensors *files = NULL;
    struct td_model *m = td_calloc(1, sizeof *m);
    if (m == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the model");
    if (o->tp > 1 || o->rank != 0)
        TD_TRY(td_err_set(err, TD_E_UNSUPPORTED, "tensor parallelism: %u ranks are not supported here", o->tp));
    TD_TRY(td_model_config_load(dir, &m->config, err));
    m->device = o->device;
    if (m->device == NULL) {
        struct td_device_options cpu = {0};
        TD_TRY(td_device_open(&cpu, &m->own_device, err));
        m->device = m->own_device;
    }
    if (!o->use_dummy_weights) TD_TRY(td_safetensors_open(dir, &files, err));
    TD_TRY(td_weights_load(&m->config, files, o->dummy_seed, m->device, &m->weights, err));
    td_model_fingerprint_make(&m->config, files, o->dummy_seed, m->fingerprint);
    TD_INFO("model_loaded", "name=%s layers=%u hidden=%u experts=%u weight_bytes=%llu fingerprint=%s device=%s",
            m->config.name, m->config.n_layers, m->config.hidden, m->config.n_experts,
            (unsigned long long)m->weights.n_bytes, m->fingerprint, td_device_describe(m->device));
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
    td_weights_free(&m->weights);
    td_device_close(m->own_device);
    free(m);
}

const struct td_model_config *td_model_config_of(const struct td_model *m) { return &m->config; }
const char *td_model_fingerprint(const struct td_model *m) { return m->fingerprint; }
uint64_t td_model_weight_bytes(const struct td_model *m) { return m->weights.n_bytes; }
const struct td_weights *td_model_weights_of(const struct td_model *m) { return &m->weights; }
struct td_device *td_model_device_of(const struct td_model *m) { return m->device; }
