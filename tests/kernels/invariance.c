#include "tests/kernels/invariance.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/engine.h"

static void same(struct pair *p, const void *a, const void *b, size_t bytes, const char *what, uint32_t n)
{
    p->n_checks++;
    if (memcmp(a, b, bytes) == 0) return;
    printf("  batch-invariant: %s: bits differ in company of %u\n", what, n);
    p->n_failed++;
}

static void *fetch(struct pair *p, const void *from, size_t bytes)
{
    void *h = malloc(bytes);
    if (h == NULL || td_stream_sync(p->gpu_stream) != TD_OK || td_device_download(p->gpu, h, from, bytes) != TD_OK) {
        printf("  batch-invariant: %s\n", td_device_last_error(p->gpu));
        exit(1);
    }
    return h;
}

/* ---- ops of the large models' shapes ---- */

static void check_products(struct pair *p)
{
    static const uint32_t shapes[][2] = {{5120, 2880}, {2880, 4096}, {128, 2880}, {20480, 2880}};
    static const uint32_t rows[] = {2, 8, 9, 33, 64, 65, 128, 129, 512, 2048};
    for (int k = 0; k < 4; k++) {
        uint32_t n_out = shapes[k][0], n_in = shapes[k][1];
        struct td_weight w, gw;
        pair_weight(p, n_out, n_in, TD_ROWS_PLAIN, 0, 0.05f, &w, &gw);
        struct both x = pair_values(p, ACT, (size_t)2048 * n_in, 1), y = pair_out(p, F32, (size_t)2048 * n_out);
        struct td_lm_head_args a = {
            .x = (float *)(void *)x.gpu, .w = gw, .logits = (float *)(void *)y.gpu, .n_rows = 1};
        pair_status(p, TD_OK, p->gpu_ops->lm_head(p->gpu_stream, &a), "lm_head");
        float *alone = fetch(p, y.gpu, n_out * sizeof *alone);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            a.n_rows = rows[i];
            pair_status(p, TD_OK, p->gpu_ops->lm_head(p->gpu_stream, &a), "lm_head");
            float *all = fetch(p, y.gpu, n_out * sizeof *all);
            same(p, alone, all, n_out * sizeof *all, "product", rows[i]);
            free(all);
        }
        free(alone);
        pair_free_all(p);
    }
}

static void check_experts(struct pair *p)
{
    enum { H = 2880, I = 2880, E = 8, K = 4, T = 300 };
    static const uint32_t rows[] = {2, 5, 64, 65, 128, T};
    struct td_weight router, up[E], down[E], cpu, all_up, all_down;
    pair_weight(p, E, H, TD_ROWS_PLAIN, 1, 0.05f, &cpu, &router);
    pair_weight(p, E * 2 * I, H, TD_ROWS_GATE_UP, 1, 0.05f, &cpu, &all_up);
    pair_weight(p, E * H, I, TD_ROWS_PLAIN, 0, 0.05f, &cpu, &all_down);
    for (uint32_t e = 0; e < E; e++) {
        up[e] = all_up, down[e] = all_down;
        up[e].n_out = 2 * I, down[e].n_out = H;
        up[e].data = (const uint16_t *)all_up.data + (size_t)e * 2 * I * H;
        up[e].bias = all_up.bias + (size_t)e * 2 * I;
        down[e].data = (const uint16_t *)all_down.data + (size_t)e * H * I;
    }
    struct td_scratch_shape shape = {.n_rows = T, .top_k = K, .n_experts = E, .intermediate = I, .hidden = H};
    struct both x = pair_values(p, ACT, (size_t)T * H, 1), ids = pair_out(p, U32, T * K),
                weights = pair_out(p, F32, T * K), y = pair_out(p, F32, (size_t)T * K * H),
                scratch = pair_out(p, RAW, td_device_scratch_bytes(p->gpu, &shape));
    struct td_moe_args a = {.x = (float *)(void *)x.gpu,
                            .router = router,
                            .gate_up = up,
                            .down = down,
                            .n_rows = 1,
                            .hidden = H,
                            .intermediate = I,
                            .n_experts = E,
                            .top_k = K,
                            .alpha = 1.702f,
                            .limit = 7,
                            .ids = (uint32_t *)(void *)ids.gpu,
                            .weights = (float *)(void *)weights.gpu,
                            .y = (float *)(void *)y.gpu,
                            .scratch = scratch.gpu};
    pair_status(p, TD_OK, p->gpu_ops->moe(p->gpu_stream, &a), "moe");
    float *alone = fetch(p, y.gpu, K * H * sizeof *alone);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        a.n_rows = rows[i];
        pair_status(p, TD_OK, p->gpu_ops->moe(p->gpu_stream, &a), "moe");
        float *all = fetch(p, y.gpu, K * H * sizeof *all);
        same(p, alone, all, K * H * sizeof *all, "experts", rows[i]);
        free(all);
    }
    free(alone);
    pair_free_all(p);
}

/* The row at the end of a context: alone, after a chunk of every size, in the company of others. */
static void check_attention(struct pair *p, uint32_t n_heads, uint32_t window, uint32_t context)
{
    enum { NKV = 8, P = 64, MOST = 400 };
    static const uint32_t chunks[] = {2, 3, 24, 25, 64, 129, MOST};
    uint32_t n_blocks = (context + P - 1) / P, n_others = 127;
    struct td_kv_group_layout l = {.n_layers = 1,
                                   .n_pages = n_blocks + n_others,
                                   .n_heads = NKV,
                                   .head_dim = 64,
                                   .page_tokens = P,
                                   .dtype = TD_BF16};
    uint32_t *pages = malloc(l.n_pages * sizeof *pages);
    for (uint32_t i = 0; i < l.n_pages; i++) pages[i] = i;
    float *sinks = malloc(n_heads * sizeof *sinks);
    for (uint32_t i = 0; i < n_heads; i++) sinks[i] = pair_random(p);
    size_t row = (size_t)n_heads * 64;
    struct both kv = pair_values(p, ACT, td_kv_pool_bytes(&l) / 2, 1), pg = pair_u32(p, pages, l.n_pages),
                sk = pair_raw(p, sinks, n_heads * sizeof *sinks), q = pair_values(p, ACT, row * (MOST + n_others), 1),
                out = pair_out(p, ACT, row * (MOST + n_others)),
                seqs = pair_out(p, RAW, (1 + n_others) * sizeof(struct td_seq_rows));
    /* Row 0 of q is the one that is compared; the chunk's other rows come before it in its sequence. */
    uint16_t *query = fetch(p, q.gpu, row * 2), *alone = NULL;
    for (size_t i = 0; i < 2 + sizeof chunks / sizeof chunks[0]; i++) {
        struct td_seq_rows s[128] = {0};
        uint32_t n = i < 2 ? 1 : chunks[i - 2], n_seqs = i == 1 ? 1 + n_others : 1;
        if (n > context) continue;
        s[0] = (struct td_seq_rows){.row = 0, .n_rows = n, .start = context - n};
        for (uint32_t k = 1; k < n_seqs; k++)
            s[k] = (struct td_seq_rows){.row = n - 1 + k, .n_rows = 1, .start = k % P, .pages = n_blocks + k - 1};
        if (td_device_upload(p->gpu, seqs.gpu, s, n_seqs * sizeof s[0]) != TD_OK ||
            td_device_upload(p->gpu, q.gpu + (size_t)(n - 1) * row * 2, query, row * 2) != TD_OK)
            exit(1);
        struct td_attention_args a = {.q = (float *)(void *)q.gpu,
                                      .kv = {.layout = l, .pool = kv.gpu},
                                      .seqs = (void *)seqs.gpu,
                                      .pages = (uint32_t *)(void *)pg.gpu,
                                      .n_seqs = n_seqs,
                                      .n_rows = n + n_seqs - 1,
                                      .n_single = n == 1 ? n_seqs : n_seqs - 1,
                                      .sinks = (float *)(void *)sk.gpu,
                                      .out = (float *)(void *)out.gpu,
                                      .n_heads = n_heads,
                                      .n_kv_heads = NKV,
                                      .head_dim = 64,
                                      .window = window,
                                      .scale = 0.125f};
        pair_status(p, TD_OK, p->gpu_ops->attention(p->gpu_stream, &a), "attention");
        uint16_t *have = fetch(p, out.gpu + (size_t)(n - 1) * row * 2, row * 2);
        if (alone == NULL)
            alone = have;
        else {
            same(p, alone, have, row * 2, n == 1 ? "attention among sequences" : "attention in a chunk",
                 n == 1 ? n_seqs : n);
            free(have);
        }
    }
    free(alone), free(query), free(pages), free(sinks);
    pair_free_all(p);
}

/* ---- the whole model, small ---- */

enum { VOCAB_MAX = 8192, CONTEXT = 512, PAGE = 64, BLOCKS = CONTEXT / PAGE, SEQUENCES = 128, PROMPT = 300 };

struct world {
    struct td_model *model;
    struct td_engine *engine;
    void *pools[TD_KV_N_GROUPS];
    uint32_t pages[SEQUENCES][BLOCKS], tokens[SEQUENCES][CONTEXT];
    float logits[2][VOCAB_MAX];
};

static void run(struct pair *p, struct world *w, struct td_segment *segs, uint32_t n)
{
    struct td_batch b = {.segments = segs, .n_segments = n};
    enum td_status st = td_engine_run_now(w->engine, &b, NULL, NULL);
    if (st == TD_OK) return;
    printf("  batch-invariant: pass: %s %s\n", td_status_name(st), td_device_last_error(p->gpu));
    p->n_failed++;
}

static struct td_segment segment(struct world *w, uint32_t s, uint32_t start, uint32_t n, float *logits)
{
    struct td_segment g = {.tokens = w->tokens[s] + start, .n_tokens = n, .start = start, .logits_out = logits};
    for (int k = 0; k < TD_KV_N_GROUPS; k++)
        g.table[k] = (struct td_page_table){.pages = w->pages[s], .n_blocks = BLOCKS};
    return g;
}

static void check_model(struct pair *p)
{
    static struct world w;
    struct td_err err = {0};
    struct td_model_options o = {.tp = 1, .device = p->gpu};
    if (td_model_load("tests/tiny/tiny-model", &o, &w.model, &err) != TD_OK) {
        printf("  batch-invariant: %s\n", err.text);
        p->n_failed++;
        return;
    }
    const struct td_model_config *c = td_model_config_of(w.model);
    struct td_engine_options e = {
        .max_batch_tokens = 1024, .max_batch_segments = SEQUENCES, .max_context_tokens = CONTEXT};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        e.kv[g] = (struct td_kv_group_layout){.n_layers = c->n_group_layers[g],
                                              .n_pages = SEQUENCES * BLOCKS,
                                              .n_heads = c->n_kv_heads,
                                              .head_dim = c->head_dim,
                                              .page_tokens = PAGE,
                                              .dtype = TD_BF16};
        if (td_device_alloc(p->gpu, td_kv_pool_bytes(&e.kv[g]), &w.pools[g]) != TD_OK) exit(1);
        e.kv_base[g] = w.pools[g];
    }
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        for (uint32_t i = 0; i < BLOCKS; i++) w.pages[s][i] = s * BLOCKS + i;
        for (uint32_t i = 0; i < CONTEXT; i++) w.tokens[s][i] = (s * 131 + i * 17 + i / 7) % c->n_token_ids;
    }
    if (c->vocab > VOCAB_MAX || td_engine_create(w.model, &e, NULL, NULL, NULL, &w.engine, &err) != TD_OK) {
        printf("  batch-invariant: %s\n", err.text);
        exit(1);
    }
    size_t bytes = c->vocab * sizeof(float);
    struct td_segment all[SEQUENCES];
    /* A prompt at once, then a token alone. */
    all[0] = segment(&w, 0, 0, PROMPT, NULL);
    run(p, &w, all, 1);
    all[0] = segment(&w, 0, PROMPT, 1, w.logits[0]);
    run(p, &w, all, 1);
    /* The same token among 127 others. */
    for (uint32_t s = 1; s < SEQUENCES; s++) {
        all[0] = segment(&w, s, 0, 1 + s * 2, NULL);
        run(p, &w, all, 1);
    }
    all[0] = segment(&w, 0, PROMPT, 1, w.logits[1]);
    for (uint32_t s = 1; s < SEQUENCES; s++) all[s] = segment(&w, s, 1 + s * 2, 1, NULL);
    run(p, &w, all, SEQUENCES);
    same(p, w.logits[0], w.logits[1], bytes, "logits", SEQUENCES);
    /* Everything again in chunks of several sizes. */
    static const uint32_t chunks[] = {1, 7, 8, 9, 64, 100, 129};
    for (size_t k = 0; k < sizeof chunks / sizeof chunks[0]; k++) {
        for (uint32_t at = 0; at <= PROMPT; at += chunks[k]) {
            uint32_t n = PROMPT + 1 - at < chunks[k] ? PROMPT + 1 - at : chunks[k];
            all[0] = segment(&w, 0, at, n, w.logits[1]);
            run(p, &w, all, 1);
        }
        same(p, w.logits[0], w.logits[1], bytes, "logits of a prompt in chunks", chunks[k]);
    }
    td_engine_destroy(w.engine);
    td_model_destroy(w.model);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) td_device_free(p->gpu, w.pools[g]);
}

void check_invariance(struct pair *p)
{
    for (int form = TD_EXPERTS_BF16; form <= TD_EXPERTS_MXFP4; form++) {
        struct pair q;
        if (!pair_open_as(
                &q, &(struct td_device_options){.backend = "cuda", .experts = form, .is_batch_invariant = true})) {
            p->n_failed++;
            return;
        }
        if (form == TD_EXPERTS_BF16) { /* those that the form changes are experts_test's */
            check_products(&q);
            check_experts(&q);
            for (uint32_t window = 0; window <= 128; window += 128) {
                check_attention(&q, 64, window, 2000);
                check_attention(&q, 64, window, 130);
                check_attention(&q, 16, window, 1025);
            }
        }
        check_model(&q);
        p->n_checks += q.n_checks;
        p->n_failed += q.n_failed;
        pair_close(&q);
    }
}
