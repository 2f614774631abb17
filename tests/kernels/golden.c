#include "tests/kernels/golden.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/engine.h"

#define DIR         "tests/tiny/tiny-model"
#define GOLDENS     "tests/tiny/goldens.json"
#define MAX_TOKENS  4096u
#define PAGE_TOKENS 64u

struct tiny {
    struct td_model *model;
    const struct td_model_config *c;
    struct td_engine *engine;
    void *pools[TD_KV_N_GROUPS];
    uint32_t pages[TD_KV_N_GROUPS][MAX_TOKENS / PAGE_TOKENS];
    float *want, *have;
};

static int fail(struct pair *p, const char *what, const char *why)
{
    printf("  small checkpoint: %s: %s %s\n", what, why, td_device_last_error(p->gpu));
    p->n_failed++;
    return 0;
}

static int open_tiny(struct pair *p, struct tiny *t)
{
    struct td_err err = {0};
    struct td_model_options o = {.tp = 1, .device = p->gpu};
    if (td_model_load(DIR, &o, &t->model, &err) != TD_OK) return fail(p, "model", err.text);
    t->c = td_model_config_of(t->model);
    struct td_engine_options e = {
        .max_batch_tokens = MAX_TOKENS, .max_batch_segments = 4, .max_context_tokens = MAX_TOKENS};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        e.kv[g] = (struct td_kv_group_layout){.n_layers = t->c->n_group_layers[g],
                                              .n_pages = MAX_TOKENS / PAGE_TOKENS,
                                              .n_heads = t->c->n_kv_heads,
                                              .head_dim = t->c->head_dim,
                                              .page_tokens = PAGE_TOKENS,
                                              .dtype = TD_BF16};
        size_t bytes = td_kv_pool_bytes(&e.kv[g]);
        void *nan = malloc(bytes);
        if (nan == NULL || td_device_alloc(p->gpu, bytes, &t->pools[g]) != TD_OK) return fail(p, "pools", "no memory");
        memset(nan, 0xff, bytes);
        if (td_device_upload(p->gpu, t->pools[g], nan, bytes) != TD_OK) return fail(p, "pools", "upload");
        free(nan);
        e.kv_base[g] = t->pools[g];
        for (uint32_t i = 0; i < MAX_TOKENS / PAGE_TOKENS; i++)
            t->pages[g][i] = (i * 27 + 5) % (MAX_TOKENS / PAGE_TOKENS);
    }
    if (td_engine_create(t->model, &e, NULL, NULL, NULL, &t->engine, &err) != TD_OK) return fail(p, "engine", err.text);
    t->want = calloc(t->c->vocab, sizeof *t->want);
    t->have = calloc(t->c->vocab, sizeof *t->have);
    return t->want != NULL && t->have != NULL;
}

static int run(struct pair *p, struct tiny *t, const uint32_t *ids, uint32_t n, uint32_t start)
{
    struct td_segment s = {.tokens = ids, .n_tokens = n, .start = start, .logits_out = t->have};
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        s.table[g] = (struct td_page_table){.pages = t->pages[g], .n_blocks = MAX_TOKENS / PAGE_TOKENS};
    struct td_batch b = {.segments = &s, .n_segments = 1};
    enum td_status st = td_engine_run_now(t->engine, &b, NULL, NULL);
    return st == TD_OK ? 1 : fail(p, "pass", td_status_name(st));
}

static void read_base64(const char *text, void *out, size_t n_bytes)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint8_t *bytes = out;
    size_t at = 0;
    uint32_t bits = 0, n_bits = 0;
    for (; *text != 0 && *text != '='; text++) {
        const char *d = strchr(digits, *text);
        if (d == NULL) return;
        bits = bits << 6 | (uint32_t)(d - digits);
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        if (at < n_bytes) bytes[at++] = (uint8_t)(bits >> n_bits);
    }
}

static uint32_t highest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

static double log_sum(const float *x, uint32_t n)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++) max = fmax(max, x[i]);
    for (uint32_t i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

/* Logits in `have` against the prompt's recorded ones. */
static double compare(struct pair *p, struct tiny *t, const char *name, double *kl_out)
{
    double num = 0, den = 0, kl = 0;
    uint32_t n = t->c->vocab;
    double lw = log_sum(t->want, n), lh = log_sum(t->have, n);
    for (uint32_t i = 0; i < n; i++) {
        num += ((double)t->have[i] - t->want[i]) * ((double)t->have[i] - t->want[i]);
        den += (double)t->want[i] * t->want[i];
        double w = t->want[i] - lw, h = t->have[i] - lh;
        kl += exp(w) * (w - h);
    }
    double off = sqrt(num / den);
    p->n_checks++;
    const double most_kl = 5e-4 * (p->kl_slack > 0 ? p->kl_slack : 1);
    if (!(off <= 4e-2) || !(kl <= most_kl)) {
        printf("  small checkpoint, %s: logits off by %.3g (4e-2), KL %.3g (%.3g)\n", name, off, kl, most_kl);
        p->n_failed++;
    }
    if (off / 4e-2 > p->worst) p->worst = off / 4e-2;
    *kl_out = kl;
    return off;
}

static void check_prompt(struct pair *p, struct tiny *t, const json_t *j, double *kl_sum, double *worst)
{
    const char *name = json_string_value(json_object_get(j, "name"));
    const json_t *ids = json_object_get(j, "ids"), *greedy = json_object_get(j, "greedy"),
                 *margins = json_object_get(j, "greedy_margin");
    uint32_t n = (uint32_t)json_array_size(ids), n_greedy = (uint32_t)json_array_size(greedy), prompt[MAX_TOKENS];
    if (n == 0 || n + n_greedy > MAX_TOKENS) return;
    for (uint32_t i = 0; i < n; i++) prompt[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
    read_base64(json_string_value(json_object_get(j, "logits_f32_base64")), t->want, t->c->vocab * sizeof *t->want);
    double kl;
    for (uint32_t chunk = 37; chunk < n; chunk += 400) { /* in pieces first, then at once */
        for (uint32_t at = 0; at < n; at += chunk)
            if (!run(p, t, prompt + at, n - at < chunk ? n - at : chunk, at)) return;
        compare(p, t, name, &kl);
    }
    if (!run(p, t, prompt, n, 0)) return;
    double off = compare(p, t, name, &kl);
    *kl_sum += kl;
    if (off > *worst) *worst = off;
    for (uint32_t i = 0; i < n_greedy; i++) {
        uint32_t want = (uint32_t)json_integer_value(json_array_get(greedy, i)),
                 have = highest(t->have, t->c->n_token_ids);
        double margin = json_number_value(json_array_get(margins, i));
        p->n_checks++;
        if (have != want && margin > 0.2) {
            printf("  small checkpoint, %s: greedy step %u gives %u, not %u (margin %.3g)\n", name, i, have, want,
                   margin);
            p->n_failed++;
        }
        if (have != want || i + 1 == n_greedy || !run(p, t, &want, 1, n + i)) break;
    }
}

void check_goldens(struct pair *p)
{
    struct tiny t = {0};
    json_error_t e;
    json_t *root = json_load_file(GOLDENS, JSON_ALLOW_NUL, &e), *j;
    double kl = 0, worst = 0;
    size_t i, n = 0;
    if (root == NULL) {
        fail(p, GOLDENS, e.text);
        return;
    }
    if (open_tiny(p, &t)) {
        json_array_foreach (json_object_get(root, "prompts"), i, j) {
            check_prompt(p, &t, j, &kl, &worst);
            n++;
        }
        printf("  small checkpoint: %zu prompts, logits off by at most %.3g, mean KL %.3g\n", n, worst, kl / (double)n);
        p->n_checks++;
        if (n < 20 || !(kl / (double)n <= 3e-5 * (p->kl_slack > 0 ? p->kl_slack : 1))) fail(p, "mean KL", "too high");
    }
    td_engine_destroy(t.engine);
    td_model_destroy(t.model);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) td_device_free(p->gpu, t.pools[g]);
    free(t.want);
    free(t.have);
    json_decref(root);
}
