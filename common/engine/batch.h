/* One forward pass's work: segments, each a stretch of new tokens of one sequence, so that decode tokens and prefill
 * chunks mix freely. Built on the loop thread by a scheduler, executed by the engine, given back with the results
 * filled in. */
#ifndef TD_ENGINE_BATCH_H
#define TD_ENGINE_BATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/kv_layout.h"

#define TD_NO_PAGE      UINT32_MAX
#define TD_MAX_LOGPROBS 20u

/* Settings of one request, checked by td_sampling_check before they get here. */
struct td_sampling {
    float temperature; /* 0: greedy */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    uint32_t top_k;    /* 0: off */
    uint64_t seed;
    float repetition_penalty; /* 1: off */
    float presence_penalty, frequency_penalty;
    uint32_t n_logit_bias;
    const uint32_t *bias_ids; /* the request's */
    const float *bias_values;
};

struct td_logprob {
    uint32_t id;
    float logprob; /* log-softmax of the raw logits */
};

/* Pages of one sequence in one group. pages[i] holds block first_block + i; entries of blocks that have left the window
 * are TD_NO_PAGE and are not read. */
struct td_page_table {
    const uint32_t *pages;
    uint32_t first_block, n_blocks;
};

/* A page whose tokens are known in part is copied, so that the rest can be written without touching the original. */
struct td_page_copy {
    enum td_kv_group group;
    uint32_t from, to;
};

struct td_segment {
    /* in */
    const uint32_t
        *tokens; /* n_tokens ids, the sequence's positions start .. start + n_tokens - 1; not read if is_fed */
    bool is_fed; /* the only token is what segment fed_by of the batch submitted before this one draws */
    uint32_t fed_by;
    uint32_t n_tokens; /* >= 1 */
    uint32_t start;    /* tokens before this segment: in the cache already, or computed by an earlier segment of the
                          batch's past */
    struct td_page_table table[TD_KV_N_GROUPS]; /* cover all visible positions, this segment's included */
    bool want_token;                            /* sample after the last position */
    bool want_logprobs;
    uint32_t n_top_logprobs; /* 0..TD_MAX_LOGPROBS */
    const struct td_sampling *sampling;
    uint64_t draw_index;     /* index of the drawn token among the request's generated tokens */
    const uint32_t *history; /* all tokens of the sequence that are known (for penalties), prompt first */
    uint32_t n_history, n_prompt;
    const uint32_t *banned_ids; /* tokens that cannot be drawn now (stop ids before min_tokens) */
    uint32_t n_banned;
    const uint32_t *mask; /* bit set = allowed, vocab bits; NULL: all. The hook for grammars */
    float *logits_out;    /* if not NULL: the raw logits of the last position, vocab floats (tests, debugging) */
    void *user;           /* the scheduler's */
    /* out */
    uint32_t token;
    struct td_logprob chosen;
    struct td_logprob top[TD_MAX_LOGPROBS]; /* highest first; n_top_logprobs of them */
};

struct td_batch {
    struct td_segment *segments;
    uint32_t n_segments;
    const struct td_page_copy *copies; /* made before anything is computed, whole pages of every layer */
    uint32_t n_copies;
    bool want_layers; /* on_layer is called after each layer's KV is stored */
    /* The only field that may be set after submit: nobody wants the results any more, and the pass ends between two
     * layers with CANCELED. A long prompt's pages and compute come back within a layer's time. */
    atomic_bool is_abandoned;
    void *user;
    uint64_t impl[32]; /* the engine's */
};

#endif
