/* The small checkpoint on the CPU, with KV pools and page tables for as many sequences as a test wants: what a
 * scheduler would do, done by hand. Run from the repository's root. */
#ifndef TESTS_SUPPORT_TINY_MODEL_H
#define TESTS_SUPPORT_TINY_MODEL_H

#include "common/base/tsan.h"
#include "common/engine/ranks.h"

/* Arithmetic takes minutes under ThreadSanitizer, and fewer rounds of it race as much: tests of values do less there.
 */
#ifdef TD_HAS_TSAN
#define TINY_IS_SLOW true
#else
#define TINY_IS_SLOW false
#endif

#define TINY_DIR     "tests/tiny/tiny-model"
#define TINY_GOLDENS "tests/tiny/goldens.json"

struct tiny_options {
    const char *dir;      /* NULL: TINY_DIR */
    const char *cpu_path; /* NULL: the best */
    enum td_dtype kv_type;
    uint32_t page_tokens;      /* 0: 64 */
    uint32_t max_tokens;       /* of all sequences together; 0: 8192 */
    uint32_t max_batch_tokens; /* 0: 4096 */
    uint32_t n_threads;        /* 0: 2 */
    uint32_t tp, ep;           /* 0: 1 */
};

struct tiny {
    struct td_device *device;
    struct td_model *model;
    const struct td_model_config *c;
    struct td_engine_options engine;
    struct td_forward forward; /* with one rank */
    struct td_ranks *ranks;    /* with more */
    void *pools[TD_MAX_RANKS][TD_KV_N_GROUPS];
    uint32_t n_taken[TD_KV_N_GROUPS];
};

void tiny_open(struct tiny *t, const struct tiny_options *o); /* fails the test when it cannot */
void tiny_close(struct tiny *t);

/* A sequence whose pages lie scattered in the pools. */
struct tiny_seq {
    uint32_t *pages[TD_KV_N_GROUPS];
    uint32_t n_blocks[TD_KV_N_GROUPS];
    uint32_t n; /* tokens in the cache */
};
void tiny_seq_open(struct tiny *t, struct tiny_seq *s, uint32_t max_tokens);
void tiny_seq_close(struct tiny_seq *s);
/* The segment of its next n tokens; logits (may be NULL) receives those of the last. Advances s->n. */
struct td_segment tiny_next(struct tiny *t, struct tiny_seq *s, const uint32_t *tokens, uint32_t n, float *logits);
/* Runs segments as one batch. */
void tiny_run(struct tiny *t, struct td_segment *segments, uint32_t n);
uint32_t tiny_argmax(const float *x, uint32_t n);

#endif
