/* Experts in FP8 and MXFP4: the definition that the GPU's packing is compared with. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/expert_format.h"

static uint32_t random_state = 1;
static uint32_t random_u32(void) { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }

/* ---- E4M3 and FP4 ---- */

/* Every E4M3 value, from its definition. */
static double value_of(uint32_t c)
{
    double v = (c >> 3 & 15) == 0 ? ldexp(c & 7, -9) : ldexp(8 + (c & 7), (int)(c >> 3 & 15) - 10);
    return c & 0x80 ? -v : v;
}

static void every_finite_code_decodes_to_its_value_and_encodes_back(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 256; c++) {
        if ((c & 0x7f) == 0x7f) continue;
        assert_true((double)td_e4m3_decode((uint8_t)c) == value_of(c));
        assert_int_equal(td_e4m3_encode(td_e4m3_decode((uint8_t)c)), c);
    }
    assert_true(isnan(td_e4m3_decode(0x7f)) && isnan(td_e4m3_decode(0xff)));
}

static void encoding_rounds_to_nearest_ties_to_even_and_saturates(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 0x7e; c++) { /* between neighbours */
        double a = value_of(c), b = value_of(c + 1), mid = (a + b) / 2;
        uint32_t even = c % 2 == 0 ? c : c + 1;
        assert_int_equal(td_e4m3_encode((float)mid), even);
        assert_int_equal(td_e4m3_encode((float)-mid), even | 0x80);
        assert_int_equal(td_e4m3_encode(nextafterf((float)mid, 0)), c);
        assert_int_equal(td_e4m3_encode(nextafterf((float)mid, 1e9f)), c + 1);
    }
    assert_int_equal(td_e4m3_encode(463.9f), 0x7e);
    assert_int_equal(td_e4m3_encode(464), 0x7e);
    assert_int_equal(td_e4m3_encode(1e30f), 0x7e);
    assert_int_equal(td_e4m3_encode(-INFINITY), 0xfe);
    assert_int_equal(td_e4m3_encode(NAN) & 0x7f, 0x7f);
    assert_int_equal(td_e4m3_encode(1e-30f), 0);
    assert_int_equal(td_e4m3_encode(-0.0f), 0x80);
}

static void tables_hold_the_eight_magnitudes_at_every_exponent(void **state)
{
    (void)state;
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (uint32_t i = 0; i < TD_X_TABLES; i++) {
        uint64_t t = td_expert_table_bytes(i);
        for (uint32_t m = 0; m < 8; m++)
            assert_int_equal(t >> 8 * m & 0xff, td_e4m3_encode(ldexpf(magnitudes[m], 6 - (int)i)));
        /* The rule of thumb for the larger exponents: eight added to each code that is not zero. */
        if (i <= 11)
            for (uint32_t m = 1; m < 8; m++)
                assert_int_equal(t >> 8 * m & 0xff, (td_expert_table_bytes(6) >> 8 * m & 0xff) + 8 * (6 - (int)i));
    }
    assert_int_equal(td_expert_table_bytes(TD_X_TABLES - 1), 0);
    assert_int_not_equal(td_expert_table_bytes(TD_X_TABLES - 2), 0);
}

/* ---- matrices ---- */

struct stored {
    struct td_pack_weight_args a;
    uint8_t *blocks, *scales;
    uint32_t n_rows, n_cols;
};

/* Groups' exponents in [low, high]. */
static struct stored stored(uint32_t n_rows, uint32_t n_cols, int low, int high)
{
    struct stored m = {.n_rows = n_rows, .n_cols = n_cols};
    size_t groups = (size_t)n_rows * n_cols / 32;
    m.blocks = malloc(groups * 16);
    m.scales = malloc(groups);
    for (size_t i = 0; i < groups * 16; i++) m.blocks[i] = (uint8_t)random_u32();
    for (size_t i = 0; i < groups; i++)
        m.scales[i] = (uint8_t)(low + (int)(random_u32() % (uint32_t)(high - low + 1)) + 127);
    m.a = (struct td_pack_weight_args){.source = TD_SRC_MXFP4,
                                       .order = TD_ROWS_DOWN,
                                       .data = m.blocks,
                                       .scales = m.scales,
                                       .ld = n_cols,
                                       .n_out = n_rows,
                                       .n_in = n_cols};
    return m;
}

static void free_stored(struct stored *m)
{
    free(m->blocks);
    free(m->scales);
}

static double element(const struct stored *m, uint32_t row, uint32_t col)
{
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    size_t group = (size_t)row * m->n_cols / 32 + col / 32;
    uint8_t byte = m->blocks[group * 16 + col % 32 / 2], code = col % 2 ? byte >> 4 : byte & 15;
    return ldexp(code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7], m->scales[group] - 127);
}

static uint8_t *packed(enum td_expert_form form, const struct td_pack_weight_args *a, struct td_expert_layout *l,
                       uint64_t *n_inexact)
{
    *l = td_expert_layout(form, a->n_out, a->n_in);
    uint8_t *out = malloc(l->bytes);
    assert_non_null(out);
    assert_int_equal(td_expert_pack(form, a, out, n_inexact), TD_OK);
    return out;
}

/* The window of m that a names, in both forms, against m itself; codes equal in both; padding zero. */
static void check_packed(const struct stored *m, const struct td_pack_weight_args *a)
{
    struct td_expert_layout l[2];
    uint64_t n_inexact;
    uint8_t *p[2];
    for (int f = 0; f < 2; f++) {
        p[f] = packed(f ? TD_EXPERTS_MXFP4 : TD_EXPERTS_FP8, a, &l[f], &n_inexact);
        assert_int_equal(n_inexact, 0);
    }
    for (uint32_t r = 0; r < l[0].n_rows; r++)
        for (uint32_t c = 0; c < l[0].k_tiles * TD_XT; c++) {
            uint32_t row = td_expert_row(a->order, r);
            double want = row < a->n_out && c < a->n_in ? element(m, a->row_begin + row, a->col_begin + c) : 0;
            float scales[2];
            uint8_t codes[2];
            for (int f = 0; f < 2; f++) {
                codes[f] = td_expert_code_at(&l[f], p[f], r, c, &scales[f]);
                if ((double)td_expert_at(&l[f], p[f], r, c) != want)
                    fail_msg("form %d, row %u, column %u: %g, want %g", f, r, c,
                             (double)td_expert_at(&l[f], p[f], r, c), want);
            }
            assert_int_equal(codes[0], codes[1]);
            assert_true(scales[0] == scales[1]);
        }
    free(p[0]);
    free(p[1]);
}

static void both_forms_hold_every_element_exactly(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{16, 32},   {8, 96},    {128, 128}, {160, 288},
                                         {320, 320}, {288, 160}, {136, 1440}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct stored m = stored(shapes[i][0], shapes[i][1], -11, 3);
        check_packed(&m, &m.a);
        m.a.order = TD_ROWS_GATE_UP;
        check_packed(&m, &m.a);
        free_stored(&m);
    }
}

static void a_window_of_rows_and_columns_is_what_a_rank_holds(void **state)
{
    (void)state;
    struct stored m = stored(2 * 96, 320, -4, 4);
    struct td_pack_weight_args a = m.a;
    a.order = TD_ROWS_GATE_UP;
    a.row_begin = 48, a.n_out = 80; /* units 24 .. 63 */
    check_packed(&m, &a);
    a = m.a;
    a.col_begin = 96, a.n_in = 160; /* whole groups */
    check_packed(&m, &a);
    free_stored(&m);
}

static void columns_that_cut_a_group_fit_fp8_only(void **state)
{
    (void)state;
    struct stored m = stored(32, 320, -4, 4);
    struct td_expert_layout l;
    uint64_t n_inexact;
    m.a.col_begin = 40, m.a.n_in = 40;
    uint8_t *p = packed(TD_EXPERTS_FP8, &m.a, &l, &n_inexact);
    for (uint32_t r = 0; r < 32; r++)
        for (uint32_t c = 0; c < 40; c++) assert_true((double)td_expert_at(&l, p, r, c) == element(&m, r, 40 + c));
    assert_int_equal(td_expert_pack(TD_EXPERTS_MXFP4, &m.a, p, &n_inexact), TD_E_UNSUPPORTED);
    free(p);
    free_stored(&m);
}

static void ranks_take_even_slices_or_whole_groups(void **state)
{
    (void)state;
    static const struct {
        enum td_expert_form form;
        uint32_t n_ranks, units[8];
    } rows[] = {{TD_EXPERTS_FP8, 2, {1440, 1440}},
                {TD_EXPERTS_FP8, 4, {720, 720, 720, 720}},
                {TD_EXPERTS_FP8, 8, {360, 360, 360, 360, 360, 360, 360, 360}},
                {TD_EXPERTS_MXFP4, 2, {1440, 1440}},
                {TD_EXPERTS_MXFP4, 4, {736, 736, 704, 704}},
                {TD_EXPERTS_MXFP4, 8, {384, 384, 352, 352, 352, 352, 352, 352}}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint32_t at = 0;
        for (uint32_t r = 0; r < rows[i].n_ranks; r++) {
            uint32_t first, n;
            td_expert_slice(rows[i].form, 2880, rows[i].n_ranks, r, &first, &n);
            assert_int_equal(first, at);
            assert_int_equal(n, rows[i].units[r]);
            at += n;
        }
        assert_int_equal(at, 2880);
    }
}

static void gate_and_up_of_a_unit_lie_eight_rows_apart(void **state)
{
    (void)state;
    for (uint32_t unit = 0; unit < 100; unit++) {
        uint32_t p = unit / 8 * 16 + unit % 8;
        assert_int_equal(td_expert_row(TD_ROWS_GATE_UP, p), 2 * unit);
        assert_int_equal(td_expert_row(TD_ROWS_GATE_UP, p + 8), 2 * unit + 1);
    }
}

static void a_spread_of_fourteen_is_exact_and_one_of_fifteen_is_counted(void **state)
{
    (void)state;
    for (int spread = 13; spread <= 24; spread++) {
        struct stored m = stored(16, 128, 0, 0);
        struct td_expert_layout l;
        uint64_t n_inexact = 0;
        memset(m.blocks, 0x21, (size_t)16 * 128 / 2); /* 0.5 and 1 */
        m.scales[5] = (uint8_t)(127 - spread);
        uint8_t *p = packed(TD_EXPERTS_FP8, &m.a, &l, &n_inexact);
        /* At 15 the sixteen halves are lost, beyond that the ones as well. */
        assert_int_equal(n_inexact, spread <= 14 ? 0 : spread == 15 ? 16 : 32);
        free(p);
        free_stored(&m);
    }
    /* Groups of zeros do not count, however large their exponent. */
    struct stored m = stored(16, 128, 0, 0);
    struct td_expert_layout l;
    uint64_t n_inexact = 0;
    m.scales[7] = 254;
    memset(m.blocks + 7 * 16, 0x80, 16);
    check_packed(&m, &m.a);
    uint8_t *p = packed(TD_EXPERTS_FP8, &m.a, &l, &n_inexact);
    assert_true(((float *)(void *)(p + l.scales_at))[0] == 0x1p-6f);
    memset(m.blocks, 0, (size_t)16 * 128 / 2);
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &m.a, p, &n_inexact), TD_OK);
    assert_true(((float *)(void *)(p + l.scales_at))[0] == 1);
    free(p);
    free_stored(&m);
}

static void every_pair_of_codes_at_extreme_scales_is_exact_or_refused(void **state)
{
    (void)state;
    static const uint8_t scales[] = {0, 1, 2, 64, 127, 200, 250, 252};
    for (size_t i = 0; i < sizeof scales; i++) {
        struct stored m = stored(16, 256, 0, 0);
        for (uint32_t b = 0; b < 16 * 128; b++) m.blocks[b] = (uint8_t)b;
        memset(m.scales, scales[i], 16 * 8);
        check_packed(&m, &m.a);
        free_stored(&m);
    }
    struct stored m = stored(16, 32, 0, 0);
    struct td_expert_layout l = td_expert_layout(TD_EXPERTS_FP8, 16, 32);
    uint8_t *p = malloc(l.bytes);
    uint64_t n;
    m.scales[3] = 255;
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &m.a, p, &n), TD_E_INVALID);
    m.scales[3] = 254;
    memset(m.blocks, 0x33, 16 * 16);
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &m.a, p, &n), TD_OK);
    m.blocks[3 * 16 + 7] = 0x34; /* 2 * 2^127 */
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &m.a, p, &n), TD_E_INVALID);
    free(p);
    free_stored(&m);
}

static void bf16_experts_take_the_smallest_power_of_two_that_fits(void **state)
{
    (void)state;
    uint16_t w[2 * 16 * 32];
    struct td_pack_weight_args a = {
        .source = TD_SRC_BF16_ROWS, .order = TD_ROWS_DOWN, .data = w, .ld = 32, .n_out = 16, .n_in = 32};
    struct td_expert_layout l = td_expert_layout(TD_EXPERTS_FP8, 16, 32);
    uint8_t *p = malloc(l.bytes);
    uint64_t n;
    static const struct {
        float amax, scale;
    } cases[] = {{448, 1}, {450, 2}, {447, 1}, {224, 0.5f}, {1, 0x1p-8f}, {1.75f, 0x1p-8f}, {1.7578125f, 0x1p-7f},
                 {0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memset(w, 0, sizeof w);
        w[77] = (uint16_t)(td_f32_bits(-cases[i].amax) >> 16);
        assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &a, p, &n), TD_OK);
        assert_true(((float *)(void *)(p + l.scales_at))[0] == cases[i].scale);
    }
    /* Stored the other way round, in a window: the same bytes. */
    uint8_t *q = malloc(l.bytes);
    uint16_t cols[40 * 20] = {0};
    for (uint32_t i = 0; i < 16 * 32; i++) w[i] = (uint16_t)(0x3c00 + random_u32() % 0x300);
    for (uint32_t r = 0; r < 16; r++)
        for (uint32_t c = 0; c < 32; c++) cols[(c + 5) * 20 + r + 3] = w[r * 32 + c];
    struct td_pack_weight_args b = a;
    b.source = TD_SRC_BF16_COLS, b.data = cols, b.ld = 20, b.row_begin = 3, b.col_begin = 5;
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &a, p, &n), TD_OK);
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &b, q, &n), TD_OK);
    assert_memory_equal(p, q, l.bytes);
    w[9] = 0x7f80;
    assert_int_equal(td_expert_pack(TD_EXPERTS_FP8, &a, p, &n), TD_E_INVALID);
    assert_int_equal(td_expert_pack(TD_EXPERTS_MXFP4, &a, p, &n), TD_E_UNSUPPORTED);
    free(p);
    free(q);
}

/* ---- what the kernel reads ---- */

static uint32_t permute_bytes(uint64_t from, uint32_t which)
{
    uint32_t out = 0;
    for (uint32_t i = 0; i < 4; i++) out |= (uint32_t)(from >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

/* The tensor core's register operand for 64 rows and 32 of k: warp w, lane 4g + t holds rows 16w + g (registers 0, 2)
 * and
 * + 8 (1, 3), k 4t .. 4t + 3 (0, 1) and 16 further (2, 3). */
static void a_lanes_words_widen_to_its_part_of_the_tensor_cores_operand(void **state)
{
    (void)state;
    struct stored m = stored(128, 256, -10, 4);
    m.a.order = TD_ROWS_GATE_UP;
    struct td_expert_layout l, lf;
    uint64_t n;
    uint8_t *p = packed(TD_EXPERTS_MXFP4, &m.a, &l, &n), *f = packed(TD_EXPERTS_FP8, &m.a, &lf, &n);
    for (uint32_t k = 0; k < 2; k++)
        for (uint32_t warp = 0; warp < 8; warp++)
            for (uint32_t lane = 0; lane < 32; lane++)
                for (uint32_t s = 0; s < 4; s++)
                    for (uint32_t reg = 0; reg < 4; reg++) {
                        const uint8_t *rows = p + td_expert_tile_at(&l, 0, k) + warp * TD_XT_MXFP4;
                        uint32_t plane = reg % 2, word;
                        memcpy(&word, rows + (plane * 32 + lane) * 16 + s * 4, sizeof word);
                        uint64_t table = td_expert_table_bytes(rows[1024 + (lane / 4 + 8 * plane) * 4 + s]);
                        uint32_t magnitudes = word & 0x77777777u;
                        uint32_t have = reg < 2 ? permute_bytes(table, magnitudes) | (word & 0x80808080u)
                                                : permute_bytes(table, magnitudes >> 16) | (word << 4 & 0x80808080u);
                        for (uint32_t j = 0; j < 4; j++) {
                            uint32_t row = warp * 16 + lane / 4 + 8 * plane,
                                     col = 32 * s + 16 * (reg / 2) + lane % 4 * 4 + j;
                            uint8_t want = f[td_expert_tile_at(&lf, 0, k) + td_expert_fp8_at(row, col)];
                            assert_int_equal(have >> 8 * j & 0xff, want);
                        }
                    }
    free(p);
    free(f);
    free_stored(&m);
}

static void sizes_count_what_a_tile_really_holds(void **state)
{
    (void)state;
    struct td_expert_layout l = td_expert_layout(TD_EXPERTS_FP8, 2880, 2880);
    assert_int_equal(l.row_tiles, 23);
    assert_int_equal(l.k_tiles, 23);
    assert_int_equal(td_expert_tile_rows(&l, 22), 64);
    assert_int_equal(td_expert_tile_at(&l, 22, 22) + 64 * 128, 2880u * 2944);
    l = td_expert_layout(TD_EXPERTS_MXFP4, 5760, 2880);
    assert_int_equal(l.row_tiles, 45);
    assert_int_equal(td_expert_tile_at(&l, 44, 22) + l.tile_bytes, 360u * 1088 * 23);
    assert_true(l.scales_at % 256 == 0 && l.bytes % 1024 == 0 && l.bytes >= l.scales_at + 45 * 23 * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_finite_code_decodes_to_its_value_and_encodes_back),
        cmocka_unit_test(encoding_rounds_to_nearest_ties_to_even_and_saturates),
        cmocka_unit_test(tables_hold_the_eight_magnitudes_at_every_exponent),
        cmocka_unit_test(both_forms_hold_every_element_exactly),
        cmocka_unit_test(a_window_of_rows_and_columns_is_what_a_rank_holds),
        cmocka_unit_test(columns_that_cut_a_group_fit_fp8_only),
        cmocka_unit_test(ranks_take_even_slices_or_whole_groups),
        cmocka_unit_test(gate_and_up_of_a_unit_lie_eight_rows_apart),
        cmocka_unit_test(a_spread_of_fourteen_is_exact_and_one_of_fifteen_is_counted),
        cmocka_unit_test(every_pair_of_codes_at_extreme_scales_is_exact_or_refused),
        cmocka_unit_test(bf16_experts_take_the_smallest_power_of_two_that_fits),
        cmocka_unit_test(a_lanes_words_widen_to_its_part_of_the_tensor_cores_operand),
        cmocka_unit_test(sizes_count_what_a_tile_really_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
