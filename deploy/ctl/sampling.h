/* Options about sampling and stopping, shared by generate and chat, and the messages made from them. */
#ifndef TD_CTL_SAMPLING_H
#define TD_CTL_SAMPLING_H

#include "deploy/ctl/options.h"
#include "proto/inference.pb-c.h"

struct td_sampling_options {
    float temperature, top_p, min_p;
    uint32_t top_k, max_tokens, min_tokens;
    uint64_t seed;
    bool has_temperature, has_top_p, has_seed, ignore_eos;
    struct td_token_list stop_ids; /* the caller frees it */
};
#define TD_SAMPLING_OPTIONS(o)                                                                                         \
    {"max-tokens", TD_OPTION_U32, &(o).max_tokens, "N", "new tokens at most; 0: the server's default", 0, 0, NULL},    \
        {"min-tokens", TD_OPTION_U32, &(o).min_tokens, "N", "no end before so many tokens", 0, 0, NULL},               \
        {"temperature", TD_OPTION_F32,       &(o).temperature, "X", "0: always the likeliest token", 0,                \
         100,           &(o).has_temperature},                                                                         \
        {"top-k", TD_OPTION_U32, &(o).top_k, "N", "choose among the N likeliest; 0: off", 0, 0, NULL},                 \
        {"top-p", TD_OPTION_F32, &(o).top_p, "X", "choose among the likeliest that sum to X", 0, 1, &(o).has_top_p},   \
        {"min-p", TD_OPTION_F32, &(o).min_p, "X", "not below X times the likeliest; 0: off", 0, 1, NULL},              \
        {"seed", TD_OPTION_U64, &(o).seed, "N", "same seed, same answer; default: drawn by the server", 0,             \
         0,      &(o).has_seed},                                                                                       \
        {"ignore-eos", TD_OPTION_FLAG, &(o).ignore_eos, NULL, "the model's stop tokens do not stop", 0, 0, NULL},      \
    {                                                                                                                  \
        "stop-ids", TD_OPTION_IDS, &(o).stop_ids, "A,B", "more stop tokens", 0, 0, NULL                                \
    }

#define TD_SAMPLING_DEFAULTS                                                                                           \
    {                                                                                                                  \
        .temperature = 1, .top_p = 1                                                                                   \
    }
/* The messages borrow from o. */
void td_sampling_fill(struct td_sampling_options *o, Tandem__V1__Sampling *sampling, Tandem__V1__Stop *stop);

#endif
