#include "common/engine/sample.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/rng.h"

#define MAX_VOCAB 512u

static float *scratch;

static struct td_sampling plain(float temperature)
{
    return (struct td_sampling){.temperature = temperature, .top_p = 1, .repetition_penalty = 1, .seed = 7};
}

static uint32_t draw(const float *logits, uint32_t n, const struct td_sampling *s, uint64_t index)
{
    struct td_segment seg = {.sampling = s, .draw_index = index};
    td_sample(logits, n, &seg, scratch);
    return seg.token;
}

/* Logits with many exact ties. */
static void make_logits(float *x, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i < n; i++) x[i] = (float)(floor(td_rng_uniform(seed, i, 1) * 24) / 4 - 3);
}

/* --- the definition, slow and plain: probabilities of every id --------------------------------------------- */

struct ranked {
    double x;
    uint32_t id;
};
static int by_rank(const void *a, const void *b)
{
    const struct ranked *p = a, *q = b;
    if (p->x != q->x) return p->x > q->x ? -1 : 1;
    return p->id < q->id ? -1 : 1;
}

static void define(const float *x, uint32_t n, const struct td_sampling *s, double *p)
{
    struct ranked r[MAX_VOCAB];
    for (uint32_t i = 0; i < n; i++) r[i] = (struct ranked){x[i], i};
    qsort(r, n, sizeof r[0], by_rank);
    double w[MAX_VOCAB], total = 0, kept = 0;
    uint32_t k = s->top_k > 0 && s->top_k < n ? s->top_k : n;
    for (uint32_t i = 0; i < n; i++) {
        w[i] = i < k ? exp((r[i].x - r[0].x) / s->temperature) : 0;
        total += w[i];
    }
    double sum = 0;
    bool is_full = false;
    for (uint32_t i = 0; i < n; i++) {
        if (is_full) w[i] = 0;
        sum += w[i];
        if (s->top_p < 1 && sum >= s->top_p * total) is_full = true;
        if (w[i] < s->min_p) w[i] = 0;
        kept += w[i];
    }
    for (uint32_t i = 0; i < n; i++) p[r[i].id] = w[i] / kept;
}

static void expect_distribution(const float *x, uint32_t n, const struct td_sampling *s)
{
    enum { DRAWS = 100000 };
    double p[MAX_VOCAB], chi2 = 0;
    uint32_t counts[MAX_VOCAB] = {0}, n_cells = 0;
    define(x, n, s, p);
    for (uint64_t i = 0; i < DRAWS; i++) counts[draw(x, n, s, i)]++;
    double rare_p = 0, rare_n = 0; /* cells too small for the statistic, together */
    for (uint32_t i = 0; i < n; i++) {
        if (p[i] == 0) assert_int_equal(counts[i], 0);
        if (p[i] * DRAWS < 10) {
            rare_p += p[i];
            rare_n += counts[i];
            continue;
        }
        chi2 += pow(counts[i] - p[i] * DRAWS, 2) / (p[i] * DRAWS);
        n_cells++;
    }
    if (rare_p * DRAWS >= 10) {
        chi2 += pow(rare_n - rare_p * DRAWS, 2) / (rare_p * DRAWS);
        n_cells++;
    }
    double df = n_cells - 1.0; /* 5 sigma above the mean; the seeds are fixed, so this never flickers */
    if (chi2 > df + 5 * sqrt(2 * df)) fail_msg("chi2 %g with %g degrees of freedom", chi2, df);
}

static void draws_follow_the_distribution_of_each_filter_and_their_combinations(void **state)
{
    (void)state;
    static const struct {
        float t, top_p, min_p;
        uint32_t top_k, n;
    } cases[] = {
        {1, 1, 0, 0, 50},           {0.7f, 1, 0, 0, 300},      {1.5f, 1, 0, 10, 64},    {1, 0.9f, 0, 0, 100},
        {1, 0.5f, 0, 0, 33},        {1, 1, 0.2f, 0, 40},       {0.8f, 0.8f, 0, 12, 64}, {1, 0.95f, 0.05f, 30, 128},
        {2, 0.999f, 0.01f, 40, 65}, {0.3f, 0.3f, 0.9f, 3, 17},
    };
    for (unsigned c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        float x[MAX_VOCAB];
        make_logits(x, cases[c].n, 100 + c);
        struct td_sampling s = plain(cases[c].t);
        s.top_p = cases[c].top_p;
        s.min_p = cases[c].min_p;
        s.top_k = cases[c].top_k;
        s.seed = 1000 + c;
        expect_distribution(x, cases[c].n, &s);
    }
}

static void a_draw_is_the_inverse_of_the_running_sum_in_order_of_ids(void **state)
{
    (void)state;
    float x[37];
    make_logits(x, 37, 5);
    struct td_sampling s = plain(0.9f);
    double p[MAX_VOCAB];
    define(x, 37, &s, p);
    for (uint64_t i = 0; i < 2000; i++) {
        double u = td_rng_uniform(s.seed, i, 0), sum = 0;
        uint32_t id = 0;
        for (; id < 36; id++) {
            sum += p[id];
            if (sum > u) break;
        }
        if (fabs(sum - u) > 1e-9) assert_int_equal(draw(x, 37, &s, i), id);
    }
}

static void filters_that_remove_nothing_change_no_draw(void **state)
{
    (void)state;
    float x[90];
    make_logits(x, 90, 6);
    struct td_sampling s = plain(1), wide = s;
    wide.top_k = 90;
    wide.top_p = 0.9999999f;
    wide.min_p = 1e-30f;
    for (uint64_t i = 0; i < 2000; i++) assert_int_equal(draw(x, 90, &s, i), draw(x, 90, &wide, i));
}

static void the_same_seed_and_index_give_the_same_token_and_others_do_not(void **state)
{
    (void)state;
    float x[200];
    make_logits(x, 200, 8);
    struct td_sampling a = plain(1), b = plain(1);
    b.seed = 8;
    unsigned n_same = 0;
    for (uint64_t i = 0; i < 500; i++) {
        assert_int_equal(draw(x, 200, &a, i), draw(x, 200, &a, i));
        n_same += draw(x, 200, &a, i) == draw(x, 200, &b, i);
    }
    assert_true(n_same < 60);
}

static void greedy_takes_the_highest_logit_and_the_lowest_id_on_a_tie(void **state)
{
    (void)state;
    const float x[] = {1, 3, 2, 3, -1};
    struct td_sampling s = plain(0);
    assert_int_equal(draw(x, 5, &s, 0), 1);
    s.top_k = 1;
    s.temperature = 1; /* top-k breaks ties the same way */
    for (uint64_t i = 0; i < 100; i++) assert_int_equal(draw(x, 5, &s, i), 1);
    s.top_k = 2;
    bool seen[5] = {false};
    for (uint64_t i = 0; i < 200; i++) seen[draw(x, 5, &s, i)] = true;
    assert_true(seen[1] && seen[3] && !seen[0] && !seen[2] && !seen[4]);
}

static void top_p_keeps_at_least_one_and_stops_at_the_mass(void **state)
{
    (void)state;
    const float x[] = {logf(1), logf(4), logf(3), logf(2)}; /* shares 0.1 0.4 0.3 0.2 */
    struct td_sampling s = plain(1);
    const struct {
        float p;
        unsigned kept; /* bits of ids */
    } cases[] = {
        {1e-6f, 1u << 1}, {0.39f, 1u << 1}, {0.41f, 1u << 1 | 1u << 2}, {0.69f, 1u << 1 | 1u << 2}, {0.71f, 14u},
        {0.89f, 14u},     {0.91f, 15u}};
    for (unsigned c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        unsigned seen = 0;
        s.top_p = cases[c].p;
        for (uint64_t i = 0; i < 400; i++) seen |= 1u << draw(x, 4, &s, i);
        assert_int_equal(seen, cases[c].kept);
    }
    /* top-p counts its share of what top-k left: 0.4 / 0.7 = 0.57 of two. */
    unsigned seen = 0;
    s.top_k = 2;
    s.top_p = 0.5f;
    for (uint64_t i = 0; i < 400; i++) seen |= 1u << draw(x, 4, &s, i);
    assert_int_equal(seen, 1u << 1);
}

static void bias_moves_a_logit_and_banned_or_masked_ids_are_never_drawn(void **state)
{
    (void)state;
    const float x[] = {0, 1, 2, 3, 4};
    struct td_sampling s = plain(0);
    const uint32_t bias_ids[] = {1, 4};
    const float bias[] = {2.5f, -100};
    s.n_logit_bias = 2;
    s.bias_ids = bias_ids;
    s.bias_values = bias;
    assert_int_equal(draw(x, 5, &s, 0), 1);

    const uint32_t banned[] = {1, 3, 400};
    struct td_segment seg = {.sampling = &s, .banned_ids = banned, .n_banned = 3};
    td_sample(x, 5, &seg, scratch);
    assert_int_equal(seg.token, 2);
    const uint32_t mask[] = {0x13}; /* 0, 1, 4 */
    seg.mask = mask;
    td_sample(x, 5, &seg, scratch);
    assert_int_equal(seg.token, 0);

    s.temperature = 1;
    for (seg.draw_index = 0; seg.draw_index < 200; seg.draw_index++) {
        td_sample(x, 5, &seg, scratch);
        assert_true(seg.token == 0 || seg.token == 4);
    }
}

static void penalties_count_the_tokens_they_should(void **state)
{
    (void)state;
    float x[8] = {4, -4, 4, 4, 4, 4, 4, 4};
    const uint32_t history[] = {0, 1, 0, 2,
                                3, 3, 3, 900}; /* three of the prompt, then generated; 900 is no token here */
    struct td_sampling s = plain(0);
    struct td_segment seg = {.sampling = &s, .history = history, .n_history = 8, .n_prompt = 3};

    /* What each id's logit became shows in the one that wins against a probe at id 7. */
    const struct {
        float rep, presence, frequency;
        float want[4];
    } cases[] = {
        {2, 0, 0, {2, -8, 2, 2}},          {1, 1.5f, 0, {4, -4, 2.5f, 2.5f}},
        {1, 0, 0.5f, {4, -4, 3.5f, 2.5f}}, {2, 0.25f, 0.5f, {2, -8, 1.25f, 0.25f}},
        {1, -1, 0, {4, -4, 5, 5}},
    };
    for (unsigned c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        s.repetition_penalty = cases[c].rep;
        s.presence_penalty = cases[c].presence;
        s.frequency_penalty = cases[c].frequency;
        for (uint32_t id = 0; id < 4; id++) {
            const uint32_t only[] = {(1u << id) | (1u << 7)};
            seg.mask = only;
            x[7] = cases[c].want[id] - 0.01f;
            td_sample(x, 8, &seg, scratch);
            assert_int_equal(seg.token, id);
            x[7] = cases[c].want[id] + 0.01f;
            td_sample(x, 8, &seg, scratch);
            assert_int_equal(seg.token, 7);
        }
    }
}

static void odd_logits_never_crash(void **state)
{
    (void)state;
    const float nan = NAN, inf = INFINITY;
    const float some[] = {nan, 1, nan, 2, -inf};
    const float none[] = {nan, -inf, nan, -inf, nan};
    const float hot[] = {0, inf, 3.4e38f, inf, -3.4e38f};
    const uint32_t mask[] = {0x1c}, banned[] = {2}, all[] = {2, 3, 4};
    for (int t = 0; t < 2; t++) {
        struct td_sampling s = plain(t == 0 ? 0.0f : 1.0f);
        s.top_k = 4;
        s.top_p = 0.9f;
        s.repetition_penalty = 1.3f;
        const uint32_t history[] = {0, 1, 2, 3, 4};
        struct td_segment seg = {.sampling = &s,
                                 .want_logprobs = true,
                                 .n_top_logprobs = 5,
                                 .history = history,
                                 .n_history = 5,
                                 .n_prompt = 2};
        td_sample(some, 5, &seg, scratch);
        assert_true(seg.token == 1 || seg.token == 3);
        assert_int_equal(seg.top[0].id, 3);
        assert_true(seg.top[2].logprob == TD_LOGPROB_FLOOR);
        td_sample(hot, 5, &seg, scratch);
        assert_true(seg.token == 1 || seg.token == 3);
        assert_true(isfinite(seg.chosen.logprob));
        td_sample(none, 5, &seg, scratch);
        assert_int_equal(seg.token, 0);
        assert_true(seg.chosen.logprob == TD_LOGPROB_FLOOR);
        seg.mask = mask;
        td_sample(none, 5, &seg, scratch);
        assert_int_equal(seg.token, 2);
        seg.banned_ids = banned;
        seg.n_banned = 1;
        td_sample(none, 5, &seg, scratch);
        assert_int_equal(seg.token, 3);
        seg.banned_ids = all; /* nothing is left: the mask counts more */
        seg.n_banned = 3;
        td_sample(some, 5, &seg, scratch);
        assert_int_equal(seg.token, 2);
    }
    struct td_sampling s = plain(1e-30f); /* as good as greedy */
    const float x[] = {1, 5, 5, 2};
    for (uint64_t i = 0; i < 50; i++) {
        uint32_t id = draw(x, 4, &s, i);
        assert_true(id == 1 || id == 2);
    }
    assert_int_equal(draw(x, 1, &s, 0), 0);
}

static void logprobs_are_of_the_raw_logits_highest_first_lower_ids_first_on_ties(void **state)
{
    (void)state;
    for (uint64_t c = 0; c < 50; c++) {
        float x[300];
        uint32_t n = 1 + (uint32_t)(td_rng_uniform(c, 0, 2) * 299);
        make_logits(x, n, 40 + c);
        struct ranked r[MAX_VOCAB];
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            r[i] = (struct ranked){x[i], i};
            sum += exp((double)x[i]);
        }
        qsort(r, n, sizeof r[0], by_rank);
        struct td_sampling s = plain(0.5f);
        s.top_k = 3;
        const uint32_t history[] = {r[0].id};
        s.repetition_penalty = 3;
        const uint32_t banned[] = {r[0].id};
        struct td_segment seg = {.sampling = &s,
                                 .want_logprobs = true,
                                 .n_top_logprobs = (uint32_t)c % 21,
                                 .history = history,
                                 .n_history = 1,
                                 .n_prompt = 1,
                                 .draw_index = c};
        if (n > 1) {
            seg.banned_ids = banned;
            seg.n_banned = 1;
        }
        td_sample(x, n, &seg, scratch);
        assert_int_equal(seg.n_top_logprobs, n < c % 21 ? n : c % 21);
        for (uint32_t i = 0; i < seg.n_top_logprobs; i++) {
            assert_int_equal(seg.top[i].id, r[i].id);
            assert_true(fabs(seg.top[i].logprob - (r[i].x - log(sum))) < 1e-6);
        }
        assert_int_equal(seg.chosen.id, seg.token);
        assert_true(fabs(seg.chosen.logprob - (x[seg.token] - log(sum))) < 1e-6);
    }
}

static void logits_stay_as_they_are_and_scratch_stays_in_bounds(void **state)
{
    (void)state;
    float x[130], before[130];
    make_logits(x, 130, 77);
    memcpy(before, x, sizeof x);
    size_t n = td_sample_scratch_floats(130);
    float *tight = malloc((n + 4) * sizeof *tight);
    memset(tight, 0x5a, (n + 4) * sizeof *tight);
    struct td_sampling s = plain(1);
    s.top_p = 0.9f;
    s.frequency_penalty = 1;
    const uint32_t history[] = {129, 0, 129};
    struct td_segment seg = {
        .sampling = &s, .history = history, .n_history = 3, .want_logprobs = true, .n_top_logprobs = 20};
    td_sample(x, 130, &seg, tight);
    assert_memory_equal(x, before, sizeof x);
    for (size_t i = 0; i < 4 * sizeof *tight; i++) assert_int_equal(((uint8_t *)(tight + n))[i], 0x5a);
    free(tight);
}

static void settings_out_of_range_are_refused_by_name(void **state)
{
    (void)state;
    struct td_err err;
    struct td_sampling good = plain(1);
    assert_int_equal(td_sampling_check(&good, 100, &err), TD_OK);
    const float bad_values[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f};
#define BAD(field, value)                                                                                              \
    do {                                                                                                               \
        struct td_sampling s = plain(1);                                                                               \
        s.field = (value);                                                                                             \
        assert_int_equal(td_sampling_check(&s, 100, &err), TD_E_INVALID);                                              \
        assert_int_equal(strncmp(err.text, #field ":", strlen(#field) + 1), 0);                                        \
    } while (0)
    for (unsigned i = 0; i < 5; i++) {
        BAD(temperature, bad_values[i]);
        BAD(top_p, bad_values[i]);
        BAD(min_p, bad_values[i]);
        BAD(repetition_penalty, bad_values[i]);
        BAD(presence_penalty, bad_values[i]);
        BAD(frequency_penalty, bad_values[i]);
    }
    BAD(temperature, -0.1f);
    BAD(top_p, 0);
    BAD(top_p, 1.01f);
    BAD(min_p, -0.01f);
    BAD(repetition_penalty, 0);
    BAD(top_k, UINT32_MAX);
#undef BAD
    struct td_sampling s = plain(1);
    const struct {
        uint32_t ids[2];
        float values[2];
    } bias[] = {{{1, 1}, {0, 0}}, {{2, 1}, {0, 0}}, {{1, 100}, {0, 0}}, {{1, 2}, {0, NAN}}, {{1, 2}, {-1e9f, 0}}};
    s.n_logit_bias = 2;
    for (unsigned i = 0; i < 5; i++) {
        s.bias_ids = bias[i].ids;
        s.bias_values = bias[i].values;
        assert_int_equal(td_sampling_check(&s, 100, &err), TD_E_INVALID);
        assert_int_equal(strncmp(err.text, "logit_bias:", 11), 0);
    }
    const uint32_t ids[] = {0, 99};
    const float values[] = {-100, 100};
    s.bias_ids = ids;
    s.bias_values = values;
    assert_int_equal(td_sampling_check(&s, 100, &err), TD_OK);
}

static int make_scratch(void **state)
{
    (void)state;
    scratch = malloc(td_sample_scratch_floats(MAX_VOCAB) * sizeof *scratch);
    return scratch == NULL;
}
static int free_scratch(void **state)
{
    (void)state;
    free(scratch);
    return 0;
}

static void only_plain_draws_are_left_to_a_device(void **state)
{
    (void)state;
    static const uint32_t ids[1] = {3}, mask[1] = {1};
    static const float values[1] = {1};
    struct td_sampling s = plain(0.8f), greedy = plain(0);
    struct td_segment seg = {.sampling = &s, .want_token = true, .want_logprobs = true};
    assert_true(td_sample_is_plain(&seg));
    seg.n_top_logprobs = 1;
    assert_false(td_sample_is_plain(&seg));
    seg.want_logprobs = false; /* then nobody reads them */
    assert_true(td_sample_is_plain(&seg));
    seg.mask = mask;
    assert_false(td_sample_is_plain(&seg));
    seg.mask = NULL;
    seg.banned_ids = ids;
    seg.n_banned = 1;
    assert_false(td_sample_is_plain(&seg));
    seg.n_banned = 0;

    struct td_sampling changed[7];
    for (int i = 0; i < 7; i++) changed[i] = s;
    changed[0].top_k = 5;
    changed[1].top_p = 0.9f;
    changed[2].min_p = 0.1f;
    changed[3].repetition_penalty = 1.1f;
    changed[4].presence_penalty = 0.1f;
    changed[5].frequency_penalty = 0.1f;
    changed[6].n_logit_bias = 1;
    changed[6].bias_ids = ids;
    changed[6].bias_values = values;
    for (int i = 0; i < 7; i++) {
        seg.sampling = &changed[i];
        assert_false(td_sample_is_plain(&seg));
    }
    greedy.top_k = 5; /* the highest logit passes every filter */
    greedy.top_p = 0.5f;
    seg.sampling = &greedy;
    assert_true(td_sample_is_plain(&seg));
}

/* Room for what a device is asked, on the host. */
struct asked {
    struct td_sample_row rows[4];
    uint32_t filtered[4], masks[2 * MAX_VOCAB / 32], marks[MAX_VOCAB];
    struct td_sample_edit edits[600];
    struct td_sample_asked a;
};

static void make_asked(struct asked *q, uint32_t n, uint32_t max_edits)
{
    memset(q, 0x5a, sizeof *q);
    q->a = (struct td_sample_asked){.rows = q->rows,
                                    .filtered = q->filtered,
                                    .edits = q->edits,
                                    .masks = q->masks,
                                    .max_edits = max_edits,
                                    .max_masks = 2,
                                    .mask_words = MAX_VOCAB / 32,
                                    .n_ids = n};
}

static void what_a_device_found_lands_in_the_segment(void **state)
{
    (void)state;
    struct td_sampling s = plain(0.5f);
    struct td_segment seg = {.sampling = &s, .want_token = true, .want_logprobs = true, .draw_index = 4};
    struct asked q;
    make_asked(&q, 40, 10);
    assert_true(td_sample_ask(&q.a, &seg, q.marks));
    assert_true(q.rows[0].temperature == 0.5f && q.rows[0].is_filtered == 0 && q.rows[0].n_edits == 0);
    assert_true(q.rows[0].u == td_rng_uniform(7, 4, 0));
    assert_int_equal(q.a.n_rows, 1);
    assert_int_equal(q.a.n_filtered, 0);
    struct td_sample_top top[TD_SAMPLE_TOPS] = {{.logit = 1, .id = 9}, {.logit = -INFINITY, .id = 3}};
    td_sample_take(&seg, 40, &(struct td_sampled){.token = 12, .logit = -1, .log_sum = 2}, top);
    assert_int_equal(seg.token, 12);
    assert_int_equal(seg.chosen.id, 12);
    assert_true(seg.chosen.logprob == -3.0f);
    seg.n_top_logprobs = 2;
    td_sample_take(&seg, 40, &(struct td_sampled){.token = 5, .logit = -INFINITY, .log_sum = 2}, top);
    assert_true(seg.chosen.logprob == TD_LOGPROB_FLOOR);
    assert_int_equal(seg.top[0].id, 9);
    assert_true(seg.top[0].logprob == -1.0f && seg.top[1].logprob == TD_LOGPROB_FLOOR);
    td_sample_ask_nothing(&q.a);
    assert_true(q.rows[1].is_filtered == 0 && q.a.n_rows == 2);
}

/* x after a row's mask and edits, as args.h tells a backend to do it. */
static void apply(const struct asked *q, const struct td_sample_row *r, float *x)
{
    for (uint32_t id = 0; r->mask != TD_SAMPLE_NO_MASK && id < q->a.n_ids; id++)
        if (!(q->masks[r->mask * q->a.mask_words + id / 32] >> (id % 32) & 1)) x[id] = -INFINITY;
    for (uint32_t i = r->first_edit; i < r->first_edit + r->n_edits; i++) {
        const struct td_sample_edit *e = &q->edits[i];
        double v = e->how & TD_EDIT_BANNED ? -INFINITY : (double)(float)((double)x[e->id] + e->bias);
        uint32_t count = e->how & TD_EDIT_COUNT;
        if (e->how & TD_EDIT_PENALISED) {
            v = v > 0 ? v / r->repetition : v * r->repetition;
            v -= (double)r->frequency * count + (count > 0 ? (double)r->presence : 0);
        }
        x[e->id] = (float)v;
    }
}

static void edits_and_masks_say_what_bias_bans_and_penalties_do(void **state)
{
    (void)state;
    enum { N = 300 };
    struct asked q;
    uint32_t mask[N / 32 + 1], banned[5], history[80], bias_ids[6];
    float x[N], y[N], values[6];
    for (uint32_t round = 0; round < 200; round++) {
        make_logits(x, N, 50 + round);
        for (uint32_t i = 0; i < N / 32 + 1; i++) mask[i] = (uint32_t)(td_rng_uniform(round, i, 2) * 4294967295.0);
        for (uint32_t i = 0; i < 5; i++) banned[i] = (uint32_t)(td_rng_uniform(round, i, 3) * 320); /* some too high */
        for (uint32_t i = 0; i < 80; i++) history[i] = (uint32_t)(td_rng_uniform(round, i, 4) * 320) & ~3u;
        for (uint32_t i = 0; i < 6; i++) bias_ids[i] = i * 50 + round % 50;
        for (uint32_t i = 0; i < 6; i++) values[i] = (float)i - 2;
        struct td_sampling s = plain(0.9f);
        s.top_k = 40;
        s.repetition_penalty = 1.25f;
        s.presence_penalty = 0.5f;
        s.frequency_penalty = round % 3 == 0 ? -0.25f : 0.25f;
        s.n_logit_bias = 6;
        s.bias_ids = bias_ids;
        s.bias_values = values;
        struct td_segment seg = {.sampling = &s,
                                 .draw_index = round,
                                 .mask = round % 2 ? mask : NULL,
                                 .banned_ids = banned,
                                 .n_banned = 5,
                                 .history = history,
                                 .n_history = 80,
                                 .n_prompt = 30};
        make_asked(&q, N, 600);
        assert_true(td_sample_ask(&q.a, &seg, q.marks));
        assert_int_equal(q.a.n_filtered, 1);
        memcpy(y, x, sizeof y);
        apply(&q, &q.rows[0], y);
        struct td_sampling bare = plain(0.9f);
        bare.top_k = 40;
        td_sample(x, N, &seg, scratch);
        assert_int_equal(draw(y, N, &bare, round), seg.token);
    }
}

static void a_draw_with_more_edits_than_there_is_room_for_stays_with_the_host(void **state)
{
    (void)state;
    static const uint32_t banned[3] = {1, 2, 3};
    struct td_sampling s = plain(1);
    struct td_segment seg = {.sampling = &s, .want_token = true, .banned_ids = banned, .n_banned = 3}, other = seg;
    struct asked q;
    make_asked(&q, 300, 4);
    assert_true(td_sample_ask(&q.a, &seg, q.marks));
    assert_false(td_sample_ask(&q.a, &seg, q.marks));
    other.n_banned = 1;
    assert_true(td_sample_ask(&q.a, &other, q.marks)); /* the one that failed left no trace */
    assert_int_equal(q.a.n_rows, 3);
    assert_int_equal(q.a.n_filtered, 2);
    assert_int_equal(q.filtered[1], 2);
    assert_int_equal(q.rows[1].is_filtered, 0);
    assert_int_equal(q.rows[2].first_edit, 3);
    assert_int_equal(q.rows[2].n_edits, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_follow_the_distribution_of_each_filter_and_their_combinations),
        cmocka_unit_test(a_draw_is_the_inverse_of_the_running_sum_in_order_of_ids),
        cmocka_unit_test(filters_that_remove_nothing_change_no_draw),
        cmocka_unit_test(the_same_seed_and_index_give_the_same_token_and_others_do_not),
        cmocka_unit_test(greedy_takes_the_highest_logit_and_the_lowest_id_on_a_tie),
        cmocka_unit_test(top_p_keeps_at_least_one_and_stops_at_the_mass),
        cmocka_unit_test(bias_moves_a_logit_and_banned_or_masked_ids_are_never_drawn),
        cmocka_unit_test(penalties_count_the_tokens_they_should),
        cmocka_unit_test(odd_logits_never_crash),
        cmocka_unit_test(logprobs_are_of_the_raw_logits_highest_first_lower_ids_first_on_ties),
        cmocka_unit_test(logits_stay_as_they_are_and_scratch_stays_in_bounds),
        cmocka_unit_test(settings_out_of_range_are_refused_by_name),
        cmocka_unit_test(only_plain_draws_are_left_to_a_device),
        cmocka_unit_test(what_a_device_found_lands_in_the_segment),
        cmocka_unit_test(edits_and_masks_say_what_bias_bans_and_penalties_do),
        cmocka_unit_test(a_draw_with_more_edits_than_there_is_room_for_stays_with_the_host),
    };
    return cmocka_run_group_tests(tests, make_scratch, free_scratch);
}
