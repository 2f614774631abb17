/* The inner loops of each instruction set: right against double, and bit for bit alike. */
#include "kernels/cpu/micro.h"

#include "tests/unit/kernels/cpu/fixture.h"

static const char *const paths[] = {"scalar", "avx2", "avx512"};

/* Runs body for each set this processor has. */
#define FOR_EACH_PATH(m)                                                                                               \
    for (uint32_t path_ = 0; path_ < TD_COUNT(paths); path_++)                                                         \
        for (const struct td_micro *m = td_micro_find(paths[path_]); m; m = NULL)

static void exp_is_right_to_about_one_ulp(void **state)
{
    (void)state;
    FOR_EACH_PATH(m)
    {
        double worst = 0;
        for (uint32_t i = 0; i < 200000; i++) {
            float x = -87.0f + (float)i * (175.0f / 200000.0f), y;
            m->exp(&y, &x, 1);
            double want = exp((double)x), ulp = ldexp(1.0, ilogb(want) - 23);
            double off = fabs((double)y - want) / ulp;
            if (off > worst) worst = off;
        }
        print_message("%s: exp is off by %.2f ulp at worst\n", m->name, worst);
        assert_true(worst < 1.1);
    }
}

static void exp_keeps_the_special_values(void **state)
{
    (void)state;
    FOR_EACH_PATH(m)
    {
        float x[] = {0.0f, -0.0f, -INFINITY, INFINITY, NAN, -1000.0f, 1000.0f, -100.0f}, y[8];
        m->exp(y, x, 8);
        assert_true(y[0] == 1 && y[1] == 1 && y[2] == 0 && !signbit(y[2]) && y[3] == INFINITY);
        assert_true(isnan(y[4]) && y[5] == 0 && y[6] == INFINITY);
        check_near((double)y[7], exp(-100.0), 3e-45, "subnormal", 0);
    }
}

static void exp_gives_the_same_bits_everywhere(void **state)
{
    (void)state;
    enum { STEP = 4096 };
    float x[STEP], want[STEP], have[STEP];
    for (uint64_t bits = 0; bits < 0x100000000ull; bits += (uint64_t)STEP * 977) {
        for (uint32_t i = 0; i < STEP; i++) {
            uint32_t b = (uint32_t)(bits + (uint64_t)i * 977);
            memcpy(&x[i], &b, sizeof b);
            if (isnan(x[i])) x[i] = 0;
        }
        td_micro_scalar.exp(want, x, STEP);
        FOR_EACH_PATH(m)
        {
            m->exp(have, x, STEP);
            check_same_bits(want, have, STEP, m->name);
        }
    }
}

struct shape {
    uint32_t m, n, k, n_pieces;
};
/* Around every kernel edge: rows 1..13, panels with and without a rest. */
static const struct shape shapes[] = {
    {1, 16, 1, 0},  {1, 64, 33, 0}, {1, 80, 17, 8}, {2, 48, 31, 0},   {2, 100, 64, 3},  {3, 33, 40, 8},
    {3, 15, 7, 0},  {4, 17, 90, 5}, {5, 31, 65, 0}, {6, 97, 129, 8},  {7, 64, 100, 0},  {8, 16, 57, 7},
    {9, 48, 10, 2}, {10, 1, 3, 0},  {11, 80, 8, 8}, {12, 130, 96, 6}, {13, 70, 320, 8}, {48, 64, 288, 0},
};

static void products_are_right_and_alike_on_every_path(void **state)
{
    (void)state;
    for (uint32_t s = 0; s < TD_COUNT(shapes); s++) {
        struct shape h = shapes[s];
        uint32_t cols = (h.n + 15) / 16 * 16;
        float *a = random_floats((size_t)h.m * h.k, 1), *wf = calloc((size_t)cols * h.k, sizeof *wf), *want = NULL;
        uint16_t *w = calloc((size_t)cols * h.k, sizeof *w);
        assert_true(wf != NULL && w != NULL);
        for (uint32_t j = 0; j < h.n; j++)
            for (uint32_t k = 0; k < h.k; k++) {
                size_t at = (size_t)(j / 16) * 16 * h.k + (size_t)k * 16 + j % 16;
                uint16_t v = td_f32_to_bf16(random_float(1));
                w[at - j % 16 + td_panel_slot(j % 16)] = v;
                wf[at] = td_bf16_to_f32(v);
            }
        struct td_pieces pieces;
        if (h.n_pieces > 0) td_pieces_init(&pieces, h.k, h.n_pieces, 0, h.n_pieces);
        FOR_EACH_PATH(m)
        {
            for (int f32 = 0; f32 < 2; f32++) {
                float *c = guarded((size_t)h.m * h.n), *rows_c[48];
                const float *rows_a[48];
                for (uint32_t i = 0; i < h.m; i++) {
                    rows_a[i] = a + (size_t)i * h.k;
                    rows_c[i] = c + (size_t)i * h.n;
                }
                struct td_gemm g = {.a = rows_a,
                                    .c = rows_c,
                                    .w = f32 ? (const void *)wf : w,
                                    .m = h.m,
                                    .n_cols = h.n,
                                    .k = h.k,
                                    .pieces = h.n_pieces > 0 ? &pieces : NULL};
                (f32 ? m->gemm_f32 : m->gemm_bf16)(&g);
                check_guards(c, (size_t)h.m * h.n, m->name);
                for (uint32_t i = 0; i < h.m; i++)
                    for (uint32_t j = 0; j < h.n; j++) {
                        double sum = 0, size = 0;
                        for (uint32_t k = 0; k < h.k; k++) {
                            double p = (double)rows_a[i][k] *
                                       (double)wf[(size_t)(j / 16) * 16 * h.k + (size_t)k * 16 + j % 16];
                            sum += p;
                            size += fabs(p);
                        }
                        check_near((double)rows_c[i][j], sum, 1e-6 * size + 1e-12, m->name, (size_t)i * h.n + j);
                    }
                /* One row alone: the same bits. */
                for (uint32_t i = 0; i < h.m; i += 5) {
                    float *one = guarded(h.n);
                    g.a = &rows_a[i];
                    g.c = &one;
                    g.m = 1;
                    (f32 ? m->gemm_f32 : m->gemm_bf16)(&g);
                    check_same_bits(rows_c[i], one, h.n, "alone");
                    guarded_free(one);
                }
                if (want == NULL) {
                    want = c;
                } else {
                    check_same_bits(want, c, (size_t)h.m * h.n, m->name);
                    guarded_free(c);
                }
            }
        }
        guarded_free(want);
        free(a);
        free(w);
        free(wf);
    }
}

static void accumulating_goes_on_with_the_chain(void **state)
{
    (void)state;
    enum { M = 7, N = 40, K = 30 };
    uint16_t *w = random_bf16(48 * K, 1);
    float *a = random_floats(M * K, 1);
    FOR_EACH_PATH(m)
    {
        float *whole = guarded(M * N), *parts = guarded(M * N), *rows[M], *part_rows[M];
        const float *rows_a[M];
        for (uint32_t i = 0; i < M; i++) {
            rows[i] = whole + i * N;
            part_rows[i] = parts + i * N;
            rows_a[i] = a + i * K;
        }
        struct td_gemm g = {.a = rows_a, .c = rows, .w = w, .m = M, .n_cols = N, .k = K};
        m->gemm_bf16(&g);
        /* Panels of the first 10 and the other 20 rows of k, by hand. */
        uint16_t head[3 * 10 * 16], tail[3 * 20 * 16];
        for (uint32_t p = 0; p < 3; p++) {
            memcpy(head + p * 160, w + p * K * 16, 160 * sizeof *w);
            memcpy(tail + p * 320, w + p * K * 16 + 160, 320 * sizeof *w);
        }
        g = (struct td_gemm){.a = rows_a, .c = part_rows, .w = head, .m = M, .n_cols = N, .k = 10};
        m->gemm_bf16(&g);
        for (uint32_t i = 0; i < M; i++) rows_a[i] += 10;
        g = (struct td_gemm){.a = rows_a, .c = part_rows, .w = tail, .m = M, .n_cols = N, .k = 20, .accumulate = true};
        m->gemm_bf16(&g);
        check_guards(parts, M * N, m->name);
        check_same_bits(whole, parts, M * N, m->name);
        guarded_free(whole);
        guarded_free(parts);
    }
    free(w);
    free(a);
}

static void pieces_of_ranks_add_up_to_the_bits_of_one(void **state)
{
    (void)state;
    enum { K = 320, N = 32 };
    uint16_t *w = random_bf16(N * K, 1);
    float *a = random_floats(K, 1), want[N];
    const float *row = a;
    float *to = want;
    struct td_pieces all;
    td_pieces_init(&all, K, 8, 0, 8);
    struct td_gemm g = {.a = &row, .c = &to, .w = w, .m = 1, .n_cols = N, .k = K, .pieces = &all};
    td_micro_scalar.gemm_bf16(&g);
    for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
        float sums[8][N];
        for (uint32_t r = 0; r < ranks; r++) {
            uint32_t n = 8 / ranks, begin = r * n * (K / 8), k = n * (K / 8);
            struct td_pieces p;
            td_pieces_init(&p, K, 8, r * n, n);
            assert_int_equal(p.end[n - 1], k);
            uint16_t *part = calloc((size_t)N * k, sizeof *part);
            assert_non_null(part);
            for (uint32_t panel = 0; panel < N / 16; panel++)
                memcpy(part + (size_t)panel * k * 16, w + (size_t)panel * K * 16 + begin * 16,
                       (size_t)k * 16 * sizeof *part);
            row = a + begin;
            to = sums[r];
            g = (struct td_gemm){.a = &row, .c = &to, .w = part, .m = 1, .n_cols = N, .k = k, .pieces = &p};
            td_micro_find(NULL)->gemm_bf16(&g);
            free(part);
        }
        for (uint32_t width = ranks; width > 1; width /= 2)
            for (uint32_t r = 0; r < width / 2; r++)
                for (uint32_t j = 0; j < N; j++) sums[r][j] = sums[2 * r][j] + sums[2 * r + 1][j];
        check_same_bits(want, sums[0], N, "ranks");
    }
    free(w);
    free(a);
}

static void the_activation_clamps_first_and_lets_nan_through(void **state)
{
    (void)state;
    enum { UNITS = 21, LD = 64 };
    FOR_EACH_PATH(m)
    {
        float h[2 * LD] = {0}, bias[LD] = {0}, *u = guarded(2 * UNITS), *rows[2] = {u, u + UNITS};
        float gates[UNITS], ups[UNITS];
        static const float edge[] = {7, 7.5f, 6.9999995f, -7, -7.5f, -50, 100, 0, -0.0f, 1, -1, INFINITY, NAN, -1e30f};
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t j = 0; j < UNITS; j++) {
                gates[j] = i == 0 ? edge[j % TD_COUNT(edge)] : random_float(9);
                ups[j] = i == 0 ? edge[(j * 5 + 3) % TD_COUNT(edge)] : random_float(9);
                uint32_t at = j / 16 * 32 + j % 16;
                h[i * LD + at] = gates[j] - 0.25f;
                bias[at] = 0.25f;
                h[i * LD + at + 16] = ups[j] - 0.5f;
                bias[at + 16] = 0.5f;
            }
        m->swiglu(rows, h, LD, bias, 2, UNITS, 1.702f, 7.0f);
        check_guards(u, 2 * UNITS, m->name);
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t j = 0; j < UNITS; j++) {
                uint32_t at = j / 16 * 32 + j % 16;
                double gate = (double)(h[i * LD + at] + 0.25f), up = (double)(h[i * LD + at + 16] + 0.5f);
                if (gate > 7) gate = 7;
                if (up > 7) up = 7;
                if (up < -7) up = -7;
                double want = gate * (1 / (1 + exp(-(double)1.702f * gate))) * (up + 1);
                if (isnan(want))
                    assert_true(isnan(rows[i][j]));
                else
                    check_near((double)rows[i][j], want, 1e-6 * fabs(want) + 1e-30, m->name, j);
            }
        guarded_free(u);
    }
}

static void packing_keys_transposes_and_values_does_not(void **state)
{
    (void)state;
    enum { DIM = 32 };
    FOR_EACH_PATH(m)
    {
        for (uint32_t n = 0; n <= TD_KEYS; n += n < 20 ? 1 : 11)
            for (int type = 0; type < 2; type++) {
                uint16_t *half = random_bf16(TD_KEYS * DIM, 1);
                float *full = calloc(TD_KEYS * DIM, sizeof *full);
                assert_non_null(full);
                const void *rows[TD_KEYS];
                for (uint32_t i = 0; i < TD_KEYS * DIM; i++) full[i] = td_bf16_to_f32(half[i]);
                for (uint32_t i = 0; i < n; i++) rows[i] = type ? (const void *)(half + i * DIM) : full + i * DIM;
                size_t n_k = (size_t)(n + 15) / 16 * 16 * DIM, n_v = (size_t)n * DIM;
                float *k = guarded(n_k), *v = guarded(n_v);
                m->pack_keys(k, rows, n, DIM, type ? TD_BF16 : TD_F32);
                m->pack_values(v, rows, n, DIM, type ? TD_BF16 : TD_F32);
                check_guards(k, n_k, "keys");
                check_guards(v, n_v, "values");
                for (uint32_t i = 0; i < (n + 15) / 16 * 16; i++)
                    for (uint32_t d = 0; d < DIM; d++) {
                        float want = i < n ? full[i * DIM + d] : 0;
                        assert_true(k[i / 16 * 16 * DIM + d * 16 + i % 16] == want);
                        if (i < n) assert_true(v[d / 16 * 16 * n + i * 16 + d % 16] == want);
                    }
                guarded_free(k);
                guarded_free(v);
                free(half);
                free(full);
            }
    }
}

static void bf16_rounds_to_nearest_even_and_keeps_nan(void **state)
{
    (void)state;
    assert_int_equal(td_f32_to_bf16(1.0f + 0x1p-8f), td_f32_to_bf16(1.0f));
    assert_int_equal(td_f32_to_bf16(1.0f + 3 * 0x1p-8f), td_f32_to_bf16(1.0f + 0x1p-6f));
    assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(NAN))));
    uint32_t sly = 0x7f800001u; /* a NaN whose upper half is infinity's */
    float x;
    memcpy(&x, &sly, sizeof x);
    assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(x))));
    for (uint32_t i = 0; i < 0x10000; i++) {
        float f = td_bf16_to_f32((uint16_t)i);
        if (!isnan(f)) assert_int_equal(td_f32_to_bf16(f), i);
    }
}

static void storing_rounds_like_the_definition(void **state)
{
    (void)state;
    FOR_EACH_PATH(m)
    {
        float x[TD_LANES];
        uint16_t have[TD_LANES];
        for (uint64_t bits = 0; bits < 0x100000000ull; bits += 16 * 4093) {
            for (uint32_t i = 0; i < TD_LANES; i++) {
                uint32_t b = (uint32_t)(bits + i * 4093ull);
                memcpy(&x[i], &b, sizeof b);
            }
            m->store(have, x, TD_LANES, TD_BF16);
            for (uint32_t i = 0; i < TD_LANES; i++) assert_int_equal(have[i], td_f32_to_bf16(x[i]));
        }
        float same[TD_LANES];
        m->store(same, x, TD_LANES, TD_F32);
        assert_memory_equal(same, x, sizeof x);
    }
}

static void heads_of_all_sizes_rotate_in_halves(void **state)
{
    (void)state;
    FOR_EACH_PATH(m)
    {
        for (uint32_t dim = 16; dim <= 96; dim += 16) {
            float *v = random_floats(dim, 1), *bias = random_floats(dim, 1), *cos = random_floats(dim, 1);
            float *sin = random_floats(dim, 1), *plain = guarded(dim), *turned = guarded(dim);
            memcpy(plain, v, dim * sizeof *v);
            memcpy(turned, v, dim * sizeof *v);
            m->bias_rotate(plain, bias, NULL, NULL, dim);
            m->bias_rotate(turned, bias, cos, sin, dim);
            check_guards(plain, dim, m->name);
            check_guards(turned, dim, m->name);
            for (uint32_t j = 0; j < dim; j++) {
                uint32_t half = dim / 2, i = j % half;
                double lo = (double)(v[i] + bias[i]), hi = (double)(v[i + half] + bias[i + half]);
                double c = (double)cos[i], s = (double)sin[i];
                assert_true(plain[j] == v[j] + bias[j]);
                check_near((double)turned[j], j < half ? lo * c - hi * s : hi * c + lo * s, 1e-6, m->name, j);
            }
            free(v);
            free(bias);
            free(cos);
            free(sin);
            guarded_free(plain);
            guarded_free(turned);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_right_to_about_one_ulp),
        cmocka_unit_test(exp_keeps_the_special_values),
        cmocka_unit_test(exp_gives_the_same_bits_everywhere),
        cmocka_unit_test(products_are_right_and_alike_on_every_path),
        cmocka_unit_test(accumulating_goes_on_with_the_chain),
        cmocka_unit_test(pieces_of_ranks_add_up_to_the_bits_of_one),
        cmocka_unit_test(the_activation_clamps_first_and_lets_nan_through),
        cmocka_unit_test(packing_keys_transposes_and_values_does_not),
        cmocka_unit_test(storing_rounds_like_the_definition),
        cmocka_unit_test(heads_of_all_sizes_rotate_in_halves),
        cmocka_unit_test(bf16_rounds_to_nearest_even_and_keeps_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
