/* A config.json of any bytes; what passes must give usable frequencies. */
#include "common/base/check.h"
#include "common/model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td_err err;
    struct td_model_config c;
    if (td_model_config_parse((const char *)data, size, &c, &err) != TD_OK) return 0;
    float freqs[128], factor;
    TD_CHECK(c.head_dim / 2 <= TD_COUNT(freqs) && c.n_heads % c.n_kv_heads == 0 && c.top_k <= c.n_experts);
    td_model_rope(&c, freqs, &factor);
    for (uint32_t i = 0; i < c.head_dim / 2; i++) TD_CHECK(freqs[i] >= 0 && freqs[i] <= 1e6f);
    return 0;
}
