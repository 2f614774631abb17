/* The routed MLP against plain double loops, and its ranks against each other. */
#include "tests/unit/kernels/cpu/fixture.h"

struct model {
    uint32_t hidden, inter, n_experts, top_k;
    uint16_t *router, *gate_up, *down; /* rows as stored */
    float *router_bias, *gate_up_bias, *down_bias;
};

static void make_model(struct model *m, uint32_t hidden, uint32_t inter, uint32_t n_experts, uint32_t top_k)
{
    *m = (struct model){.hidden = hidden, .inter = inter, .n_experts = n_experts, .top_k = top_k};
    m->router = random_bf16((size_t)n_experts * hidden, 0.5f);
    m->gate_up = random_bf16((size_t)n_experts * 2 * inter * hidden, 0.5f);
    m->down = random_bf16((size_t)n_experts * hidden * inter, 0.3f);
    m->router_bias = random_floats(n_experts, 0.5f);
    m->gate_up_bias = random_floats((size_t)n_experts * 2 * inter, 6); /* some units meet the clamps */
    m->down_bias = random_floats((size_t)n_experts * hidden, 1);
}

static void free_model(struct model *m)
{
    free(m->router);
    free(m->gate_up);
    free(m->down);
    free(m->router_bias);
    free(m->gate_up_bias);
    free(m->down_bias);
}

struct result {
    uint32_t *ids;
    float *weights, *y;
};

static void free_result(struct result *r)
{
    free(r->ids);
    guarded_free(r->weights);
    guarded_free(r->y);
}

/* Width slices [first, first + n) of 8 and experts [expert_begin, expert_end): one rank's share. */
static struct result run(struct kit *k, const struct model *m, const float *x, uint32_t n_rows, uint32_t first,
                         uint32_t n, uint32_t expert_begin, uint32_t expert_end)
{
    uint32_t unit = first * m->inter / 8, width = (first + n) * m->inter / 8 - unit, slots = n_rows * m->top_k;
    struct td_weight *gate_up = calloc(m->n_experts, sizeof *gate_up), *down = calloc(m->n_experts, sizeof *down);
    assert_true(gate_up != NULL && down != NULL);
    for (uint32_t e = expert_begin; e < expert_end; e++) {
        struct td_pack_weight_args a = {.source = TD_SRC_BF16_ROWS,
                                        .order = TD_ROWS_GATE_UP,
                                        .data = m->gate_up + (size_t)e * 2 * m->inter * m->hidden,
                                        .ld = m->hidden,
                                        .row_begin = 2 * unit,
                                        .n_out = 2 * width,
                                        .n_in = m->hidden,
                                        .bias = m->gate_up_bias + (size_t)e * 2 * m->inter + 2 * unit};
        assert_int_equal(pack_as(k, a, &gate_up[e]), TD_OK);
        a = (struct td_pack_weight_args){.source = TD_SRC_BF16_ROWS,
                                         .data = m->down + (size_t)e * m->hidden * m->inter,
                                         .ld = m->inter,
                                         .col_begin = unit,
                                         .n_out = m->hidden,
                                         .n_in = width};
        assert_int_equal(pack_as(k, a, &down[e]), TD_OK);
    }
    struct result r = {
        .ids = calloc(slots, sizeof *r.ids), .weights = guarded(slots), .y = guarded((size_t)slots * m->hidden)};
    struct td_scratch_shape shape = {
        .n_rows = n_rows, .top_k = m->top_k, .n_experts = m->n_experts, .intermediate = width, .hidden = m->hidden};
    struct td_moe_args a = {.x = x,
                            .router = pack_rows(k, m->router, m->n_experts, m->hidden, m->router_bias),
                            .gate_up = gate_up,
                            .down = down,
                            .n_rows = n_rows,
                            .hidden = m->hidden,
                            .intermediate = width,
                            .n_experts = m->n_experts,
                            .top_k = m->top_k,
                            .alpha = 1.702f,
                            .limit = 7,
                            .ids = r.ids,
                            .weights = r.weights,
                            .y = r.y};
    td_pieces_init(&a.pieces, m->inter, 8, first, n);
    assert_int_equal(td_device_alloc(k->device, td_device_scratch_bytes(k->device, &shape), &a.scratch), TD_OK);
    assert_int_equal(k->ops->moe(k->stream, &a), TD_OK);
    check_guards(r.y, (size_t)slots * m->hidden, "y");
    check_guards(r.weights, slots, "weights");
    td_device_free(k->device, a.scratch);
    unpack(k, &a.router);
    for (uint32_t e = 0; e < m->n_experts; e++) {
        unpack(k, &gate_up[e]);
        unpack(k, &down[e]);
    }
    free(gate_up);
    free(down);
    return r;
}

static void check_row(const struct model *m, const float *x, const uint32_t *ids, const float *weights, const float *y)
{
    double z[128], top = -INFINITY, sum = 0, size = 0;
    for (uint32_t e = 0; e < m->n_experts; e++)
        z[e] = dot(x, m->router + (size_t)e * m->hidden, m->hidden, &size) + (double)m->router_bias[e];
    for (uint32_t k = 0; k < m->top_k; k++) {
        uint32_t n_better = 0;
        for (uint32_t e = 0; e < m->n_experts; e++) n_better += z[e] > z[ids[k]];
        assert_int_equal(n_better, k); /* random logits do not tie */
        if (z[ids[k]] > top) top = z[ids[k]];
    }
    for (uint32_t k = 0; k < m->top_k; k++) sum += exp(z[ids[k]] - top);
    double *u = calloc(m->inter, sizeof *u);
    assert_non_null(u);
    for (uint32_t k = 0; k < m->top_k; k++) {
        check_near((double)weights[k], exp(z[ids[k]] - top) / sum, 3e-6, "router weight", k);
        const uint16_t *gu = m->gate_up + (size_t)ids[k] * 2 * m->inter * m->hidden;
        const float *bias = m->gate_up_bias + (size_t)ids[k] * 2 * m->inter;
        for (uint32_t i = 0; i < m->inter; i++) {
            double gate = dot(x, gu + (size_t)2 * i * m->hidden, m->hidden, &size) + (double)bias[2 * i];
            double up = dot(x, gu + (size_t)(2 * i + 1) * m->hidden, m->hidden, &size) + (double)bias[2 * i + 1];
            gate = gate < 7 ? gate : 7;
            up = up > 7 ? 7 : up < -7 ? -7 : up;
            u[i] = gate / (1 + exp(-1.702 * gate)) * (up + 1);
        }
        for (uint32_t d = 0; d < m->hidden; d++) {
            double want = 0, scale = 0;
            for (uint32_t i = 0; i < m->inter; i++) {
                double p = u[i] * (double)td_bf16_to_f32(m->down[((size_t)ids[k] * m->hidden + d) * m->inter + i]);
                want += p;
                scale += fabs(p);
            }
            check_near((double)y[(size_t)k * m->hidden + d], want, 1e-5 * scale + 1e-6, "expert output", d);
        }
    }
    free(u);
}

static void rows_of_any_number_are_right(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const uint32_t counts[] = {1, 2, 5, 63, 200, 521}; /* the last takes two turns */
    for (uint32_t i = 0; i < TD_COUNT(counts); i++) {
        struct model m;
        make_model(&m, i % 2 ? 72 : 96, i % 2 ? 56 : 44, i % 2 ? 8 : 19, 4); /* widths with and without a rest */
        float *x = random_floats((size_t)counts[i] * m.hidden, 1);
        struct result r = run(&k, &m, x, counts[i], 0, 8, 0, m.n_experts);
        for (uint32_t t = 0; t < counts[i]; t++)
            check_row(&m, x + (size_t)t * m.hidden, r.ids + t * 4, r.weights + t * 4, r.y + (size_t)t * 4 * m.hidden);
        free_result(&r);
        free(x);
        free_model(&m);
    }
    kit_close(&k);
}

static void all_rows_may_choose_the_same_experts(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    struct model m;
    make_model(&m, 32, 32, 8, 4);
    for (uint32_t e = 0; e < 8; e++) m.router_bias[e] = e < 4 ? 100.0f - (float)e : 0; /* 0, 1, 2, 3 always */
    float *x = random_floats(130 * 32, 0.01f);
    struct result r = run(&k, &m, x, 130, 0, 8, 0, 8);
    for (uint32_t t = 0; t < 130; t++) {
        for (uint32_t j = 0; j < 4; j++) assert_int_equal(r.ids[t * 4 + j], j);
        check_row(&m, x + t * 32, r.ids + t * 4, r.weights + t * 4, r.y + (size_t)t * 4 * 32);
    }
    free_result(&r);
    free(x);
    free_model(&m);
    kit_close(&k);
}

static void ranks_by_width_and_by_expert_give_the_bits_of_one(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    enum { ROWS = 9 };
    struct model m;
    make_model(&m, 64, 100, 8, 4); /* 100 in eighths: 12 or 13 units */
    float *x = random_floats(ROWS * 64, 1);
    size_t n = (size_t)ROWS * 4 * 64;
    struct result one = run(&k, &m, x, ROWS, 0, 8, 0, 8);
    for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
        struct result parts[8];
        for (uint32_t r = 0; r < ranks; r++) parts[r] = run(&k, &m, x, ROWS, r * 8 / ranks, 8 / ranks, 0, 8);
        for (uint32_t width = ranks; width > 1; width /= 2)
            for (uint32_t r = 0; r < width / 2; r++)
                for (size_t i = 0; i < n; i++) parts[r].y[i] = parts[2 * r].y[i] + parts[2 * r + 1].y[i];
        check_same_bits(one.y, parts[0].y, n, "ranks by width");
        for (uint32_t r = 0; r < ranks; r++) free_result(&parts[r]);

        struct result sum = run(&k, &m, x, ROWS, 0, 8, 0, 8 / ranks);
        for (uint32_t r = 1; r < ranks; r++) {
            struct result part = run(&k, &m, x, ROWS, 0, 8, r * 8 / ranks, (r + 1) * 8 / ranks);
            for (size_t i = 0; i < n; i++) sum.y[i] += part.y[i];
            assert_memory_equal(part.ids, one.ids, ROWS * 4 * sizeof *one.ids);
            free_result(&part);
        }
        check_same_bits(one.y, sum.y, n, "ranks by expert");
        free_result(&sum);
    }
    free_result(&one);
    free(x);
    free_model(&m);
    kit_close(&k);
}

static void equal_logits_go_to_the_lower_id(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    struct model m;
    make_model(&m, 32, 16, 8, 4);
    memset(m.router, 0, 8 * 32 * sizeof *m.router);
    static const float bias[8] = {1, 2, 1, 2, 3, 1, 2, 1};
    memcpy(m.router_bias, bias, sizeof bias);
    float *x = random_floats(32, 1);
    struct result r = run(&k, &m, x, 1, 0, 8, 0, 8);
    static const uint32_t want[4] = {4, 1, 3, 6};
    for (uint32_t j = 0; j < 4; j++) assert_int_equal(r.ids[j], want[j]);
    assert_true(r.weights[1] == r.weights[2] && r.weights[2] == r.weights[3] && r.weights[0] > r.weights[1]);
    free_result(&r);
    free(x);
    free_model(&m);
    kit_close(&k);
}

static void nan_stays_nan_and_in_its_row(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    struct model m;
    make_model(&m, 32, 16, 8, 4);
    float *x = random_floats(3 * 32, 1);
    x[32 + 7] = NAN;
    struct result r = run(&k, &m, x, 3, 0, 8, 0, 8);
    for (uint32_t t = 0; t < 3; t++) {
        for (uint32_t j = 0; j < 4; j++) {
            assert_true(r.ids[t * 4 + j] < 8);
            assert_int_equal(isnan(r.weights[t * 4 + j]) != 0, t == 1);
        }
        for (uint32_t i = 0; i < 4 * 32; i++) assert_int_equal(isnan(r.y[t * 4 * 32 + i]) != 0, t == 1);
    }
    free_result(&r);
    free(x);
    free_model(&m);
    kit_close(&k);
}

static void the_weighted_sum_takes_the_bias_along(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    enum { ROWS = 50, DIM = 40, K = 3, E = 5 };
    float *x = random_floats(ROWS * DIM, 1), *y = random_floats(ROWS * K * DIM, 1), *bias = random_floats(E * DIM, 1);
    float *weights = random_floats(ROWS * K, 1), *w = random_floats(DIM, 1), *t = guarded(ROWS * DIM),
          *have = guarded(ROWS * DIM);
    uint32_t ids[ROWS * K];
    for (uint32_t i = 0; i < ROWS * K; i++) ids[i] = random_u32() / 7 % E;
    memcpy(have, x, ROWS * DIM * sizeof *x);
    struct td_moe_add_norm_args a = {.x = have,
                                     .y = y,
                                     .ids = ids,
                                     .weights = weights,
                                     .down_bias = bias,
                                     .w = w,
                                     .t = t,
                                     .n_rows = ROWS,
                                     .dim = DIM,
                                     .top_k = K,
                                     .eps = 1e-5f};
    assert_int_equal(k.ops->moe_add_norm(k.stream, &a), TD_OK);
    check_guards(t, ROWS * DIM, "t");
    check_guards(have, ROWS * DIM, "x");
    for (uint32_t r = 0; r < ROWS; r++) {
        double squares = 0, row[DIM];
        for (uint32_t d = 0; d < DIM; d++) {
            row[d] = (double)x[r * DIM + d];
            for (uint32_t j = 0; j < K; j++)
                row[d] += (double)weights[r * K + j] *
                          ((double)y[(r * K + j) * DIM + d] + (double)bias[ids[r * K + j] * DIM + d]);
            squares += row[d] * row[d];
            check_near((double)have[r * DIM + d], row[d], 2e-6, "residual", r * DIM + d);
        }
        double inv = 1 / sqrt(squares / DIM + (double)1e-5f);
        for (uint32_t d = 0; d < DIM; d++)
            check_near((double)t[r * DIM + d], row[d] * inv * (double)w[d], 4e-6, "norm", r * DIM + d);
    }
    free(x);
    free(y);
    free(bias);
    free(weights);
    free(w);
    guarded_free(t);
    guarded_free(have);
    kit_close(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_any_number_are_right),
        cmocka_unit_test(all_rows_may_choose_the_same_experts),
        cmocka_unit_test(ranks_by_width_and_by_expert_give_the_bits_of_one),
        cmocka_unit_test(equal_logits_go_to_the_lower_id),
        cmocka_unit_test(nan_stays_nan_and_in_its_row),
        cmocka_unit_test(the_weighted_sum_takes_the_bias_along),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
