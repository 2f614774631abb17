#include "tests/sim/model.h"

#include <string.h>

#define CANARY UINT64_C(0xdeadfeedcafe0bad)

const struct td_model_config sim_model = {
    .name = SIM_MODEL_NAME,
    .n_layers = 4,
    .n_kv_heads = SIM_KV_HEADS,
    .n_heads = SIM_KV_HEADS,
    .head_dim = 4, /* in bf16: K and V of a head are a word each */
    .vocab = SIM_VOCAB,
    .max_context = SIM_MAX_CONTEXT,
    .window = SIM_WINDOW,
    .is_sliding = {true, false, true, false},
    .layer_in_group = {0, 0, 1, 1},
    .n_group_layers = {2, 2},
    .eos_ids = {0, 1},
    .n_eos = 2,
    .n_token_ids = SIM_VOCAB,
};

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ x >> 32;
}

void sim_kv_layout(uint32_t n_ranks, const uint32_t n_pages[TD_KV_N_GROUPS],
                   struct td_kv_group_layout out[TD_KV_N_GROUPS])
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        out[g] = (struct td_kv_group_layout){.n_layers = sim_model.n_group_layers[g],
                                             .n_pages = n_pages[g],
                                             .n_heads = SIM_KV_HEADS / n_ranks,
                                             .head_dim = sim_model.head_dim,
                                             .page_tokens = SIM_PAGE_TOKENS,
                                             .dtype = TD_BF16};
}

uint64_t sim_state(uint64_t before, uint32_t token) { return mix(before * 31 + token + 1); }

uint32_t sim_next_token(uint64_t state, uint64_t seed, uint64_t draw_index, const uint32_t *banned, uint32_t n_banned)
{
    for (uint64_t x = mix(state ^ mix(seed) ^ mix(draw_index + 7));; x = mix(x + 1)) {
        uint32_t token = x % 40 == 0 ? (uint32_t)(x >> 32) % 2 : 2 + (uint32_t)(x >> 32) % (SIM_VOCAB - 2);
        bool is_banned = false;
        for (uint32_t i = 0; i < n_banned; i++) is_banned |= banned[i] == token;
        if (!is_banned) return token;
    }
}

static uint64_t word(uint64_t state, uint32_t layer, uint32_t head, bool is_v)
{
    return mix(state + layer * 16 + head * 2 + is_v);
}

void sim_kv_write(uint8_t *pool, const struct td_kv_group_layout *l, uint32_t rank, uint32_t layer, uint32_t page,
                  uint32_t position, uint64_t state)
{
    for (uint32_t h = 0; h < l->n_heads; h++)
        for (int v = 0; v < 2; v++) {
            uint64_t x = word(state, layer, rank * l->n_heads + h, v);
            memcpy(pool + td_kv_offset(l, layer, page, h, v, position), &x, sizeof x);
        }
}

bool sim_kv_part_is(const uint8_t *part, const struct td_kv_group_layout *l, uint32_t layer, uint32_t head,
                    uint32_t position, uint64_t state)
{
    for (int v = 0; v < 2; v++) {
        uint64_t x = word(state, layer, head, v), y;
        memcpy(&y, part + td_kv_offset(l, 0, 0, 0, v, position), sizeof y);
        if (x != y) return false;
    }
    return true;
}

bool sim_kv_is(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t rank, uint32_t layer, uint32_t page,
               uint32_t position, uint64_t state)
{
    for (uint32_t h = 0; h < l->n_heads; h++)
        if (!sim_kv_part_is(pool + td_kv_offset(l, layer, page, h, false, 0), l, layer, rank * l->n_heads + h, position,
                            state))
            return false;
    return true;
}

void sim_kv_fill_canary(uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page)
{
    const uint64_t x = CANARY;
    for (uint32_t layer = 0; layer < l->n_layers; layer++) {
        uint8_t *at = pool + td_kv_offset(l, layer, page, 0, false, 0);
        for (size_t i = 0; i < td_kv_page_bytes(l); i += sizeof x) memcpy(at + i, &x, sizeof x);
    }
}

/* Whole pages travel, and a token writes the first word of its position: the first words of head and position tell. */
bool sim_kv_is_canary(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page)
{
    for (uint32_t layer = 0; layer < l->n_layers; layer++)
        for (uint32_t h = 0; h < l->n_heads; h++)
            for (uint32_t p = 0; p < l->page_tokens; p++) {
                uint64_t x;
                memcpy(&x, pool + td_kv_offset(l, layer, page, h, false, p), sizeof x);
                if (x != CANARY) return false;
            }
    return true;
}

uint64_t sim_kv_sum(const uint8_t *pool, const struct td_kv_group_layout *l, uint32_t page)
{
    uint64_t sum = 0, x;
    for (uint32_t layer = 0; layer < l->n_layers; layer++) {
        const uint8_t *at = pool + td_kv_offset(l, layer, page, 0, false, 0);
        for (size_t i = 0; i < td_kv_page_bytes(l); i += sizeof x) {
            memcpy(&x, at + i, sizeof x);
            sum = sum * 31 + x;
        }
    }
    return sum;
}
