#include "tests/kernels/ahead.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/forward.h"

#define DIR         "tests/tiny/tiny-model"
#define N_SEQS      6u
#define N_STEPS     40u
#define PAGE_TOKENS 64u
#define MAX_TOKENS  192u
#define PAGES       (MAX_TOKENS / PAGE_TOKENS)

struct seq {
    uint32_t tokens[MAX_TOKENS], n, n_prompt; /* n: known */
    struct td_sampling sampling;
    uint32_t leaves_at, joins_at; /* steps */
};

struct ahead {
    struct pair *p;
    struct td_model *model;
    const struct td_model_config *c;
    struct td_forward forward;
    void *pools[TD_KV_N_GROUPS];
    uint32_t *all_ids; /* 0, 1, 2, ... */
    struct seq seqs[N_SEQS];
    struct td_segment segments[2][N_SEQS];
    uint32_t who[2][N_SEQS], n_segments[2]; /* whose they are */
    struct td_batch batches[2];
};

static bool fail(struct ahead *a, const char *what, const char *why)
{
    printf("  steps ahead: %s: %s %s\n", what, why, td_device_last_error(a->p->gpu));
    a->p->n_failed++;
    return false;
}

static bool open_ahead(struct ahead *a, enum td_graphs graphs)
{
    struct td_err err = {0};
    struct td_model_options o = {.tp = 1, .device = a->p->gpu};
    if (td_model_load(DIR, &o, &a->model, &err) != TD_OK) return fail(a, "model", err.text);
    a->c = td_model_config_of(a->model);
    struct td_engine_options e = {.max_batch_tokens = MAX_TOKENS,
                                  .max_batch_segments = N_SEQS,
                                  .max_context_tokens = MAX_TOKENS,
                                  .graphs = graphs};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        e.kv[g] = (struct td_kv_group_layout){.n_layers = a->c->n_group_layers[g],
                                              .n_pages = N_SEQS * PAGES,
                                              .n_heads = a->c->n_kv_heads,
                                              .head_dim = a->c->head_dim,
                                              .page_tokens = PAGE_TOKENS,
                                              .dtype = TD_BF16};
        if (td_device_alloc(a->p->gpu, td_kv_pool_bytes(&e.kv[g]), &a->pools[g]) != TD_OK)
            return fail(a, "pools", "no memory");
        e.kv_base[g] = a->pools[g];
    }
    if (td_forward_create(a->model, &e, &a->forward, &err) != TD_OK) return fail(a, "engine", err.text);
    a->all_ids = malloc(a->c->vocab * sizeof *a->all_ids);
    if (a->all_ids == NULL) return fail(a, "ids", "no memory");
    for (uint32_t i = 0; i < a->c->vocab; i++) a->all_ids[i] = i;
    return true;
}

static void close_ahead(struct ahead *a)
{
    td_forward_free(&a->forward);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) td_device_free(a->p->gpu, a->pools[g]);
    td_model_destroy(a->model);
    free(a->all_ids);
}

static void reset(struct ahead *a)
{
    for (uint32_t i = 0; i < N_SEQS; i++) {
        struct seq *q = &a->seqs[i];
        *q = (struct seq){.n = 5 + 9 * i, .leaves_at = N_STEPS, .joins_at = i == 4 ? 7 : 0};
        q->n_prompt = q->n;
        for (uint32_t k = 0; k < q->n; k++) q->tokens[k] = (k * 37 + i * 101 + 11) % a->c->n_token_ids;
        q->sampling =
            (struct td_sampling){.temperature = i == 0 ? 0 : 1, .top_p = 1, .repetition_penalty = 1, .seed = i};
    }
    a->seqs[1].leaves_at = 13;
    a->seqs[2].sampling.top_p = 0.9f;
    a->seqs[3].sampling.top_k = 5;
    a->seqs[3].sampling.temperature = 0.7f;
}

static struct td_segment segment(struct ahead *a, uint32_t i, uint32_t start, uint32_t n)
{
    static const uint32_t pages[TD_KV_N_GROUPS][N_SEQS * PAGES] = {
        {5, 3, 1, 17, 15, 13, 11, 9, 7, 0, 2, 4, 6, 8, 10, 12, 14, 16},
        {0, 6, 12, 1, 7, 13, 2, 8, 14, 3, 9, 15, 4, 10, 16, 5, 11, 17}};
    struct seq *q = &a->seqs[i];
    struct td_segment s = {.tokens = q->tokens + start,
                           .n_tokens = n,
                           .start = start,
                           .want_token = true,
                           .sampling = &q->sampling,
                           .history = q->tokens,
                           .n_history = q->n,
                           .n_prompt = q->n_prompt,
                           .draw_index = start + n - q->n_prompt};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        s.table[g] = (struct td_page_table){.pages = pages[g] + i * PAGES, .n_blocks = PAGES};
    return s;
}

/* The batch of a step; is_ahead: the one before it is not known yet. hopeless: nothing can be drawn in that step. */
static struct td_batch *plan(struct ahead *a, uint32_t step, bool is_ahead, uint32_t hopeless)
{
    uint32_t turn = step % 2, other = 1 - turn, n = 0;
    for (uint32_t i = 0; i < N_SEQS; i++) {
        struct seq *q = &a->seqs[i];
        if (step < q->joins_at || step >= q->leaves_at) continue;
        struct td_segment *s = &a->segments[turn][n];
        if (step == q->joins_at) {
            *s = segment(a, i, 0, q->n_prompt);
        } else {
            *s = segment(a, i, q->n_prompt + step - q->joins_at - 1, 1);
            s->is_fed = is_ahead;
            for (uint32_t k = 0; k < a->n_segments[other]; k++)
                if (a->who[other][k] == i) s->fed_by = k;
            if (is_ahead) s->tokens = NULL;
        }
        if (i == 1 && step % 5 == 2) { /* bans, as before min_tokens */
            s->banned_ids = a->all_ids;
            s->n_banned = step == hopeless ? a->c->vocab : 30;
        }
        a->who[turn][n++] = i;
    }
    a->n_segments[turn] = n;
    a->batches[turn] = (struct td_batch){.segments = a->segments[turn], .n_segments = n};
    return &a->batches[turn];
}

static void take(struct ahead *a, uint32_t step)
{
    uint32_t turn = step % 2;
    for (uint32_t k = 0; k < a->n_segments[turn]; k++) {
        struct seq *q = &a->seqs[a->who[turn][k]];
        q->tokens[q->n++] = a->segments[turn][k].token;
    }
}

static bool run_steps(struct ahead *a, bool is_ahead, uint32_t hopeless)
{
    struct td_forward *f = &a->forward;
    reset(a);
    for (uint32_t step = 0; step < N_STEPS; step++) {
        struct td_batch *b = plan(a, step, is_ahead && step > 0, hopeless);
        if (td_forward_check(f, b) != TD_OK) return fail(a, "batch", "refused");
        if (!is_ahead) {
            if (td_forward_run(f, b, NULL, NULL) != TD_OK) return fail(a, "step", "failed");
            take(a, step);
            continue;
        }
        if (!td_forward_may_begin(f, b)) return fail(a, "step", "cannot be begun");
        if (td_forward_begin(f, b) != TD_OK) return fail(a, "step", "failed to begin");
        if (step == 0) continue;
        if (td_forward_end(f) != TD_OK) return fail(a, "step", "failed to end");
        take(a, step - 1);
    }
    if (!is_ahead) return true;
    if (td_forward_end(f) != TD_OK) return fail(a, "step", "failed to end");
    take(a, N_STEPS - 1);
    return true;
}

void check_ahead(struct pair *p)
{
    static const enum td_graphs graphs[] = {TD_GRAPHS_OFF, TD_GRAPHS_LAZY, TD_GRAPHS_START};
    static const uint32_t hopeless[] = {UINT32_MAX, 7, 12};
    for (unsigned k = 0; k < 3; k++) {
        struct ahead *a = calloc(1, sizeof *a);
        if (a == NULL) return;
        a->p = p;
        bool is_open = open_ahead(a, graphs[k]);
        for (unsigned h = 0; h < 3 && is_open; h++) {
            struct seq want[N_SEQS];
            if (!run_steps(a, false, hopeless[h])) break;
            memcpy(want, a->seqs, sizeof want);
            if (!run_steps(a, true, hopeless[h])) break;
            for (uint32_t i = 0; i < N_SEQS; i++) {
                p->n_checks++;
                if (memcmp(want[i].tokens, a->seqs[i].tokens, sizeof want[i].tokens) == 0) continue;
                uint32_t at = 0;
                while (want[i].tokens[at] == a->seqs[i].tokens[at]) at++;
                printf("  steps ahead, graphs %d, hopeless %u: sequence %u has %u at %u (prompt %u), not %u\n",
                       (int)graphs[k], hopeless[h], i, a->seqs[i].tokens[at], at, want[i].n_prompt, want[i].tokens[at]);
                p->n_failed++;
            }
        }
        close_ahead(a);
        free(a);
    }
}
