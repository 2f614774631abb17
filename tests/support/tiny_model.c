#include "tests/support/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"

static void must(enum td_status st, const struct td_err *err)
{
    if (st != TD_OK) fail_msg("%s: %s", td_status_name(st), err->text);
}

void tiny_open(struct tiny *t, const struct tiny_options *o)
{
    struct td_err err = {0};
    *t = (struct tiny){0};
    struct td_device_options device = {.cpu_path = o->cpu_path};
    must(td_device_open(&device, &t->device, &err), &err);
    struct td_model_options model = {.tp = o->tp, .ep = o->ep, .device = t->device};
    must(td_model_load(o->dir != NULL ? o->dir : TINY_DIR, &model, &t->model, &err), &err);
    t->c = td_model_config_of(t->model);
    uint32_t n_ranks = td_model_n_ranks(t->model);
    uint32_t max_tokens = o->max_tokens ? o->max_tokens : 8192, page_tokens = o->page_tokens ? o->page_tokens : 64;
    t->engine = (struct td_engine_options){.max_batch_tokens = o->max_batch_tokens ? o->max_batch_tokens : 4096,
                                           .max_batch_segments = 64,
                                           .max_context_tokens = max_tokens,
                                           .n_threads = o->n_threads ? o->n_threads : 2};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        /* A prime number of pages, so that a stride through them meets each once. */
        uint32_t n = max_tokens / page_tokens + 64;
        for (uint32_t d = 2; d * d <= n; d++)
            if (n % d == 0) {
                n++;
                d = 1;
            }
        t->engine.kv[g] = (struct td_kv_group_layout){.n_layers = t->c->n_group_layers[g],
                                                      .n_pages = n,
                                                      .n_heads = t->c->n_kv_heads / n_ranks,
                                                      .head_dim = t->c->head_dim,
                                                      .page_tokens = page_tokens,
                                                      .dtype = o->kv_type == TD_E4M3 && g == TD_KV_SLIDING ? TD_BF16 : o->kv_type};
        size_t bytes = td_kv_pool_bytes(&t->engine.kv[g]);
        for (uint32_t r = 0; r < n_ranks; r++) {
            void *pool = malloc(bytes == 0 ? 1 : bytes);
            assert_non_null(pool);
            memset(pool, 0xff, bytes); /* NaN: reading what was not written shows */
            t->pools[r][g] = td_engine_kv_base(&t->engine, r)[g] = pool;
        }
    }
    if (n_ranks == 1)
        must(td_forward_create(t->model, &t->engine, &t->forward, &err), &err);
    else
        must(td_ranks_create(t->model, &t->engine, &t->ranks, &err), &err);
}

void tiny_close(struct tiny *t)
{
    td_ranks_destroy(t->ranks);
    td_forward_free(&t->forward);
    td_model_destroy(t->model);
    td_device_close(t->device);
    for (uint32_t r = 0; r < TD_MAX_RANKS; r++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) free(t->pools[r][g]);
}

void tiny_seq_open(struct tiny *t, struct tiny_seq *s, uint32_t max_tokens)
{
    *s = (struct tiny_seq){0};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        const struct td_kv_group_layout *l = &t->engine.kv[g];
        s->n_blocks[g] = (max_tokens + l->page_tokens - 1) / l->page_tokens;
        s->pages[g] = calloc(s->n_blocks[g], sizeof *s->pages[g]);
        assert_non_null(s->pages[g]);
        for (uint32_t i = 0; i < s->n_blocks[g]; i++) {
            assert_true(t->n_taken[g] < l->n_pages);
            s->pages[g][i] = (uint32_t)((uint64_t)(++t->n_taken[g]) * 7 % l->n_pages);
        }
    }
}

void tiny_seq_close(struct tiny_seq *s)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) free(s->pages[g]);
}

struct td_segment tiny_next(struct tiny *t, struct tiny_seq *s, const uint32_t *tokens, uint32_t n, float *logits)
{
    struct td_segment seg = {.tokens = tokens, .n_tokens = n, .start = s->n, .logits_out = logits};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        /* Only what the segment can see, so that reading anything before it is caught. */
        uint32_t window = g == TD_KV_SLIDING ? t->c->window : UINT32_MAX;
        uint32_t seen = s->n + 1 > window ? s->n + 1 - window : 0, first = seen / t->engine.kv[g].page_tokens;
        seg.table[g] = (struct td_page_table){
            .pages = s->pages[g] + first, .first_block = first, .n_blocks = s->n_blocks[g] - first};
    }
    s->n += n;
    return seg;
}

void tiny_run(struct tiny *t, struct td_segment *segments, uint32_t n)
{
    struct td_batch b = {.segments = segments, .n_segments = n};
    struct td_forward *f = t->ranks != NULL ? td_ranks_leader(t->ranks) : &t->forward;
    assert_int_equal(td_forward_check(f, &b), TD_OK);
    assert_int_equal(t->ranks != NULL ? td_ranks_run(t->ranks, &b, NULL, NULL) : td_forward_run(f, &b, NULL, NULL),
                     TD_OK);
}

uint32_t tiny_argmax(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}
