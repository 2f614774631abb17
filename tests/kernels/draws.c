#include "tests/kernels/draws.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/sample.h"

#define COUNT(a)    (sizeof(a) / sizeof((a)[0]))
#define MAX_BANNED  8u
#define MAX_BIAS    16u
#define MAX_HISTORY 600u

/* Sums are rounded differently, so a draw may also be a neighbour that is this near the mark, and a cut of top-p or
 * min-p may fall this much earlier or later; of the total. */
#define NEAR 3e-5

struct batch {
    uint32_t vocab, n_ids, n_rows;
    float *x; /* [n_rows, vocab] */
    struct td_segment *segs;
    struct td_sampling *settings;
    uint32_t (*banned)[MAX_BANNED], (*bias_ids)[MAX_BIAS], (*history)[MAX_HISTORY], *masks;
    float (*bias)[MAX_BIAS];
    struct td_sample_asked asked;
    uint32_t *marks;
    float *scratch;
};

static uint32_t any(struct pair *p, uint32_t n)
{
    pair_random(p);
    return (uint32_t)((p->seed >> 33) % n);
}

/* Rows of every kind of logits: flat, peaked, with ties, NaN, infinities, all alike. */
static void make_row(struct pair *p, float *row, const struct batch *b, uint32_t r)
{
    static const float spreads[] = {0.5f, 4, 1, 2.5f};
    for (uint32_t i = 0; i < b->vocab; i++) row[i] = pair_random(p) * spreads[r % COUNT(spreads)];
    switch (r % 9) {
    case 1: row[b->n_ids / 3] = row[b->n_ids / 2] = 40; break; /* equal and far ahead */
    case 2:
        for (uint32_t i = 0; i < b->n_ids; i++) row[i] = i % 100 == 99 ? 1.0f : i % 2 ? -INFINITY : NAN;
        break;
    case 3: row[b->n_ids - 1] = INFINITY; break;
    case 4:
        for (uint32_t i = 0; i < b->n_ids; i++) row[i] = 2;
        break;
    case 5: row[b->n_ids] = 100; break; /* names no token */
    case 6:
        for (uint32_t i = 0; i < b->n_ids; i++) row[i] = floorf(row[i] * 4) / 4; /* many ties, -0 and 0 among them */
        break;
    default: break;
    }
}

static void make_setting(struct pair *p, struct batch *b, uint32_t r, int is_plain)
{
    static const float temperatures[] = {0, 1, 0.7f, 0.01f, 3}, masses[] = {0.9f, 0.5f, 0.999f, 1, 1e-6f},
                       least[] = {0, 0, 0.05f, 0.5f};
    static const uint32_t ks[] = {0, 40, 1, 700, 20000};
    struct td_sampling *s = &b->settings[r];
    *s = (struct td_sampling){
        .temperature = temperatures[r % COUNT(temperatures)], .top_p = 1, .seed = 77 + r, .repetition_penalty = 1};
    b->segs[r] = (struct td_segment){.want_token = true, .want_logprobs = true, .sampling = s, .draw_index = r * 3};
    if (is_plain) return;
    struct td_segment *g = &b->segs[r];
    uint32_t with = any(p, 64);
    if (s->temperature == 0 && with % 2) s->temperature = 0.8f;
    s->top_p = masses[any(p, COUNT(masses))];
    s->min_p = least[any(p, COUNT(least))];
    s->top_k = ks[any(p, COUNT(ks))];
    g->n_top_logprobs = with & 1 ? 1 + any(p, TD_MAX_LOGPROBS) : 0;
    if (with & 2) { /* half the ids */
        uint32_t words = (b->vocab + 31) / 32, *mask = b->masks + (size_t)r * words;
        for (uint32_t i = 0; i < words; i++) mask[i] = any(p, 1u << 30) * 4 + any(p, 4);
        g->mask = mask;
    }
    if (with & 4) {
        for (uint32_t i = 0; i < MAX_BANNED; i++) b->banned[r][i] = any(p, b->vocab);
        b->banned[r][0] = b->n_ids / 3;
        g->banned_ids = b->banned[r];
        g->n_banned = MAX_BANNED;
    }
    if (with & 8) {
        for (uint32_t i = 0; i < MAX_BIAS; i++) {
            b->bias_ids[r][i] = b->n_ids / MAX_BIAS * i + any(p, b->n_ids / MAX_BIAS);
            b->bias[r][i] = pair_random(p) * 5;
        }
        s->n_logit_bias = MAX_BIAS;
        s->bias_ids = b->bias_ids[r];
        s->bias_values = b->bias[r];
    }
    if (with & 16) {
        for (uint32_t i = 0; i < MAX_HISTORY; i++) b->history[r][i] = any(p, b->n_ids) / 7 * 7;
        g->history = b->history[r];
        g->n_history = MAX_HISTORY;
        g->n_prompt = MAX_HISTORY / 3;
        s->repetition_penalty = with & 32 ? 1.3f : 1;
        s->presence_penalty = 0.4f;
        s->frequency_penalty = 0.2f;
    }
}

static void open_batch(struct pair *p, struct batch *b, int is_plain)
{
    size_t n = b->n_rows, words = (b->vocab + 31) / 32;
    b->x = malloc(n * b->vocab * sizeof *b->x);
    b->segs = calloc(n, sizeof *b->segs);
    b->settings = calloc(n, sizeof *b->settings);
    b->banned = calloc(n, sizeof *b->banned);
    b->bias_ids = calloc(n, sizeof *b->bias_ids);
    b->bias = calloc(n, sizeof *b->bias);
    b->history = calloc(n, sizeof *b->history);
    b->masks = calloc(n * words, sizeof *b->masks);
    b->marks = malloc(b->n_ids * sizeof *b->marks);
    b->scratch = malloc(td_sample_scratch_floats(b->n_ids) * sizeof *b->scratch);
    b->asked = (struct td_sample_asked){.rows = calloc(n, sizeof *b->asked.rows),
                                        .filtered = calloc(n, sizeof *b->asked.filtered),
                                        .edits = calloc(n * 1000, sizeof *b->asked.edits),
                                        .masks = calloc(n * words, sizeof *b->asked.masks),
                                        .max_edits = b->n_rows * 1000,
                                        .max_masks = b->n_rows,
                                        .mask_words = (uint32_t)words,
                                        .n_ids = b->n_ids};
    for (uint32_t r = 0; r < b->n_rows; r++) {
        make_row(p, b->x + (size_t)r * b->vocab, b, r);
        make_setting(p, b, r, is_plain || r % 8 == 7);
        td_sample_ask(&b->asked, &b->segs[r], b->marks);
    }
}

static void close_batch(struct batch *b)
{
    free(b->x), free(b->segs), free(b->settings), free(b->banned), free(b->bias_ids), free(b->bias), free(b->history);
    free(b->masks), free(b->marks), free(b->scratch), free(b->asked.rows), free(b->asked.filtered);
    free(b->asked.edits), free(b->asked.masks);
}

/* ---- is a different draw still one of those that rounding allows? ---- */

static const float *ranked_by;
static int by_rank(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (ranked_by[x] != ranked_by[y]) return ranked_by[x] > ranked_by[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Logits as masks, bans, bias and penalties leave them: the definition, asked one id at a time, would take as long as
 * the vocabulary; these are its own formulas. */
static void adjusted(const struct batch *b, uint32_t r, float *x)
{
    const struct td_segment *g = &b->segs[r];
    const struct td_sampling *s = g->sampling;
    for (uint32_t i = 0; i < b->n_ids; i++) {
        float v = b->x[(size_t)r * b->vocab + i];
        x[i] = isnan(v) ? -INFINITY : v > 3.40282347e38f ? 3.40282347e38f : v;
        if (g->mask != NULL && !(g->mask[i / 32] >> (i % 32) & 1)) x[i] = -INFINITY;
    }
    for (uint32_t i = 0; i < g->n_banned; i++)
        if (g->banned_ids[i] < b->n_ids) x[g->banned_ids[i]] = -INFINITY;
    for (uint32_t i = 0; i < s->n_logit_bias; i++) x[s->bias_ids[i]] += s->bias_values[i];
    memset(b->marks, 0, b->n_ids * sizeof *b->marks);
    for (uint32_t i = g->n_prompt; i < g->n_history; i++) b->marks[g->history[i]]++;
    for (uint32_t i = 0; i < g->n_history; i++) {
        uint32_t id = g->history[i];
        if (b->marks[id] == UINT32_MAX) continue;
        double v = x[id] > 0 ? (double)x[id] / s->repetition_penalty : (double)x[id] * s->repetition_penalty;
        v -= (double)s->frequency_penalty * b->marks[id] + (b->marks[id] > 0 ? (double)s->presence_penalty : 0);
        x[id] = (float)v;
        b->marks[id] = UINT32_MAX;
    }
}

static int is_allowed(struct batch *b, uint32_t r, uint32_t token)
{
    const struct td_sampling *s = b->segs[r].sampling;
    float *x = b->scratch;
    uint32_t *order = (uint32_t *)(void *)(x + b->n_ids), n = 0;
    if (token >= b->n_ids || s->temperature == 0) return 0;
    adjusted(b, r, x);
    if (!(x[token] > -INFINITY)) return 0;
    for (uint32_t i = 0; i < b->n_ids; i++)
        if (x[i] > -INFINITY) order[n++] = i;
    ranked_by = x;
    qsort(order, n, sizeof *order, by_rank);
    double max = x[order[0]], total = 0, sum = 0;
#define WEIGHT(id) exp(((double)x[id] - max) / (double)s->temperature)
    if (s->top_k > 0 && s->top_k < n) n = s->top_k;
    for (uint32_t i = 0; i < n; i++) total += WEIGHT(order[i]);
    uint32_t most = n; /* ids that top-p may keep */
    for (uint32_t i = 0; i < n && s->top_p < 1; i++) {
        sum += WEIGHT(order[i]);
        if (sum >= (s->top_p + NEAR) * total) {
            most = i + 1;
            break;
        }
    }
    uint32_t place = UINT32_MAX;
    for (uint32_t i = 0; i < most; i++)
        if (order[i] == token) place = i;
    if (place == UINT32_MAX || WEIGHT(token) < s->min_p * (1 - NEAR)) return 0;
    /* Between the mark with the fewest and with the most ids, give or take. */
    double before = 0, all = 0;
    for (uint32_t i = 0; i < most; i++) {
        double w = WEIGHT(order[i]);
        if (w < s->min_p) continue;
        all += w;
        if (order[i] < token) before += w;
    }
    double mark = b->asked.rows[r].u * all, near = 3 * NEAR * all;
    return mark > before - near && mark < before + WEIGHT(token) + near;
}

/* ---- the check ---- */

static void check_row(struct pair *p, struct batch *b, uint32_t r, const struct td_sampled *found,
                      const struct td_sample_top *top)
{
    const float *row = b->x + (size_t)r * b->vocab;
    struct td_segment want = b->segs[r], *have = &b->segs[r];
    td_sample(row, b->n_ids, &want, b->scratch);
    p->n_checks++;
    if (found->token == UINT32_MAX) { /* left to the host: right only if nothing can be drawn, or too little listed */
        uint32_t n = 0;
        adjusted(b, r, b->scratch);
        for (uint32_t i = 0; i < b->n_ids; i++) n += b->scratch[i] > -INFINITY;
        uint32_t n_raw = 0;
        for (uint32_t i = 0; i < b->n_ids; i++) n_raw += row[i] > -INFINITY;
        if (n != 0 && n_raw >= have->n_top_logprobs) {
            printf("  draws: row %u of %u: no token, but %u can be drawn\n", r, b->n_rows, want.token);
            p->n_failed++;
        }
        return;
    }
    td_sample_take(have, b->n_ids, found, top);
    if (have->token != want.token && !is_allowed(b, r, have->token)) {
        printf("  draws: row %u of %u: token %u, not %u (T %g, top-k %u, top-p %g, min-p %g)\n", r, b->n_rows,
               have->token, want.token, (double)want.sampling->temperature, want.sampling->top_k,
               (double)want.sampling->top_p, (double)want.sampling->min_p);
        p->n_failed++;
        return;
    }
    if (have->token == want.token) {
        double off = fabs((double)have->chosen.logprob - want.chosen.logprob);
        if (!(off <= 1e-4 * (1 + fabs((double)want.chosen.logprob)))) {
            printf("  draws: row %u: log-probability %g, not %g\n", r, (double)have->chosen.logprob,
                   (double)want.chosen.logprob);
            p->n_failed++;
        }
    }
    for (uint32_t i = 0; i < want.n_top_logprobs; i++) {
        double off = fabs((double)have->top[i].logprob - want.top[i].logprob);
        if (have->top[i].id == want.top[i].id && off <= 1e-4 * (1 + fabs((double)want.top[i].logprob))) continue;
        printf("  draws: row %u: likeliest %u of %u is %u (%g), not %u (%g)\n", r, i, want.n_top_logprobs,
               have->top[i].id, (double)have->top[i].logprob, want.top[i].id, (double)want.top[i].logprob);
        p->n_failed++;
        break;
    }
}

static void check(struct pair *p, uint32_t vocab, uint32_t n_ids, uint32_t n_rows, int is_plain)
{
    struct batch b = {.vocab = vocab, .n_ids = n_ids, .n_rows = n_rows};
    open_batch(p, &b, is_plain);
    struct td_sample_asked *q = &b.asked;
    struct both logits = pair_raw(p, b.x, (size_t)n_rows * vocab * sizeof *b.x),
                rows = pair_raw(p, q->rows, n_rows * sizeof *q->rows),
                filtered = pair_raw(p, q->filtered, n_rows * sizeof *q->filtered),
                edits = pair_raw(p, q->edits, (q->n_edits + 1) * sizeof *q->edits),
                masks = pair_raw(p, q->masks, ((size_t)q->n_masks + 1) * 4),
                out = pair_out(p, RAW, n_rows * sizeof(struct td_sampled)),
                top = pair_out(p, RAW, n_rows * TD_SAMPLE_TOPS * sizeof(struct td_sample_top)),
                parts = pair_out(p, RAW, (size_t)n_rows * TD_SAMPLE_SCRATCH);
    if (q->n_masks > 0) masks = pair_raw(p, q->masks, (size_t)q->n_masks * q->mask_words * 4);
    struct td_sample_args a = {.logits = (float *)(void *)logits.gpu,
                               .rows = (void *)rows.gpu,
                               .filtered = (void *)filtered.gpu,
                               .edits = (void *)edits.gpu,
                               .masks = (void *)masks.gpu,
                               .out = (void *)out.gpu,
                               .top = (void *)top.gpu,
                               .parts = parts.gpu,
                               .n_rows = n_rows,
                               .n_filtered = q->n_filtered,
                               .vocab = vocab,
                               .n_ids = n_ids};
    pair_status(p, TD_OK, td_stream_sample(p->gpu_stream, &a), "sample");
    struct td_sampled *found = malloc(n_rows * sizeof *found);
    struct td_sample_top *tops = malloc(n_rows * TD_SAMPLE_TOPS * sizeof *tops);
    if (td_stream_sync(p->gpu_stream) != TD_OK ||
        td_device_download(p->gpu, found, out.gpu, n_rows * sizeof *found) != TD_OK ||
        td_device_download(p->gpu, tops, top.gpu, n_rows * TD_SAMPLE_TOPS * sizeof *tops) != TD_OK) {
        printf("  draws: %s\n", td_device_last_error(p->gpu));
        exit(1);
    }
    for (uint32_t r = 0; r < n_rows; r++) check_row(p, &b, r, &found[r], tops + (size_t)r * TD_SAMPLE_TOPS);
    free(found);
    free(tops);
    close_batch(&b);
    pair_free_all(p);
}

void check_draws(struct pair *p)
{
    check(p, 2048, 2016, 70, 1);
    check(p, 201088, 200019, 35, 1);
    check(p, 300, 255, 35, 1);
    check(p, 2048, 2016, 300, 0);
    check(p, 300, 255, 150, 0);
    check(p, 201088, 200019, 128, 0);
    check(p, 201088, 200019, 1, 0);
    check(p, 100001, 100000, 9, 0); /* rows that begin anywhere */
}

void check_few_draws(struct pair *p)
{
    check(p, 2048, 2016, 10, 1);
    check(p, 2048, 2016, 20, 0);
    check(p, 100001, 100000, 3, 0);
}
