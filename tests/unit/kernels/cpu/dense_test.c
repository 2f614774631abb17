/* Packing, embedding, rotation, norms and the dense products against plain double loops. */
#include "tests/unit/kernels/cpu/fixture.h"

/* ---- packing
 * -------------------------------------------------------------------------------------------------------------- */

/* y = w x for a unit vector picks a column of w: what the packed matrix really holds. */
static void column(struct kit *k, const struct td_weight *w, uint32_t c, float *out)
{
    float *x = calloc(w->n_in, sizeof *x);
    assert_non_null(x);
    x[c] = 1;
    struct td_lm_head_args a = {.x = x, .w = *w, .logits = out, .n_rows = 1};
    assert_int_equal(k->ops->lm_head(k->stream, &a), TD_OK);
    free(x);
}

static void every_mxfp4_nibble_pair_and_scale_is_exact(void **state)
{
    (void)state;
    static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    static const uint8_t scale_bytes[] = {0, 1, 60, 126, 127, 128, 250, 252};
    struct kit k;
    kit_open(&k, NULL);
    enum { ROWS = 17, GROUPS = 16, COLS = GROUPS * 32 };
    uint8_t blocks[ROWS][GROUPS][16], scales[ROWS][GROUPS];
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t g = 0; g < GROUPS; g++) {
            scales[r][g] = scale_bytes[(r + g) % TD_COUNT(scale_bytes)];
            for (uint32_t j = 0; j < 16; j++)
                blocks[r][g][j] = (uint8_t)(g * 16 + j + r * 37); /* each byte 0..255 a row */
        }
    struct td_weight w;
    struct td_pack_weight_args a = {
        .source = TD_SRC_MXFP4, .data = blocks, .scales = scales[0], .ld = COLS, .n_out = ROWS, .n_in = COLS};
    assert_int_equal(pack_as(&k, a, &w), TD_OK);
    float out[ROWS];
    for (uint32_t c = 0; c < COLS; c++) {
        column(&k, &w, c, out);
        for (uint32_t r = 0; r < ROWS; r++) {
            uint8_t byte = blocks[r][c / 32][c % 32 / 2];
            float want = ldexpf(values[c % 2 ? byte >> 4 : byte & 15], scales[r][c / 32] - 127);
            if (out[r] != want) fail_msg("row %u column %u: %a, want %a", r, c, (double)out[r], (double)want);
        }
    }
    unpack(&k, &w);
    kit_close(&k);
}

static void mxfp4_that_is_not_finite_is_refused(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    uint8_t blocks[16] = {0}, scale = 255;
    struct td_weight w;
    struct td_pack_weight_args a = {
        .source = TD_SRC_MXFP4, .data = blocks, .scales = &scale, .ld = 32, .n_out = 1, .n_in = 32};
    assert_int_equal(pack_as(&k, a, &w), TD_E_INVALID); /* also with codes of zero */
    unpack(&k, &w);
    scale = 253;
    assert_int_equal(pack_as(&k, a, &w), TD_OK);
    unpack(&k, &w);
    blocks[15] = 0x70; /* 6 * 2^126 */
    assert_int_equal(pack_as(&k, a, &w), TD_E_INVALID);
    unpack(&k, &w);
    blocks[15] = 0x50; /* 3 * 2^126 */
    assert_int_equal(pack_as(&k, a, &w), TD_OK);
    unpack(&k, &w);
    kit_close(&k);
}

static void windows_of_all_sources_are_cut_where_asked(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    enum { ROWS = 40, COLS = 96 };
    uint16_t *rows = random_bf16(ROWS * COLS, 1), *cols = calloc(ROWS * COLS, sizeof *cols);
    assert_non_null(cols);
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t c = 0; c < COLS; c++) cols[c * ROWS + r] = rows[r * COLS + c];
    uint8_t *blocks = malloc(ROWS * COLS / 2), scales[ROWS * COLS / 32];
    assert_non_null(blocks);
    for (uint32_t i = 0; i < ROWS * COLS / 2; i++) blocks[i] = (uint8_t)(random_u32() >> 13);
    for (uint32_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(120 + random_u32() / 5 % 10);
    struct td_weight whole, part;
    struct td_pack_weight_args full[3] = {
        {.source = TD_SRC_BF16_ROWS, .data = rows, .ld = COLS, .n_out = ROWS, .n_in = COLS},
        {.source = TD_SRC_BF16_COLS, .data = cols, .ld = ROWS, .n_out = ROWS, .n_in = COLS},
        {.source = TD_SRC_MXFP4, .data = blocks, .scales = scales, .ld = COLS, .n_out = ROWS, .n_in = COLS},
    };
    for (uint32_t i = 0; i < 3; i++) {
        struct td_pack_weight_args cut = full[i];
        cut.row_begin = 6;
        cut.n_out = 21;
        cut.col_begin = 25;
        cut.n_in = 50;
        assert_int_equal(pack_as(&k, full[i], &whole), TD_OK);
        assert_int_equal(pack_as(&k, cut, &part), TD_OK);
        float a[ROWS], b[21];
        for (uint32_t c = 0; c < 50; c++) {
            column(&k, &whole, 25 + c, a);
            column(&k, &part, c, b);
            check_same_bits(a + 6, b, 21, "window");
            if (i < 2)
                for (uint32_t r = 0; r < 21; r++) assert_true(b[r] == td_bf16_to_f32(rows[(6 + r) * COLS + 25 + c]));
        }
        unpack(&k, &whole);
        unpack(&k, &part);
    }
    free(rows);
    free(cols);
    free(blocks);
    kit_close(&k);
}

/* ---- rows
 * ----------------------------------------------------------------------------------------------------------------- */

static void embedding_widens_the_row_of_the_token(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    uint16_t *table = random_bf16(10 * 33, 1);
    uint32_t tokens[4] = {9, 0, 3, 9};
    float *x = guarded(4 * 33);
    struct td_embed_args a = {.tokens = tokens, .table = table, .x = x, .n_rows = 4, .dim = 33};
    assert_int_equal(k.ops->embed(k.stream, &a), TD_OK);
    check_guards(x, 4 * 33, "x");
    for (uint32_t t = 0; t < 4; t++)
        for (uint32_t i = 0; i < 33; i++) assert_true(x[t * 33 + i] == td_bf16_to_f32(table[tokens[t] * 33 + i]));
    free(table);
    guarded_free(x);
    kit_close(&k);
}

static void norms_and_residuals_are_right(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const uint32_t dims[] = {1, 7, 8, 33, 288};
    for (uint32_t i = 0; i < TD_COUNT(dims); i++) {
        uint32_t dim = dims[i], n = 100;
        float *x = random_floats(n * dim, 3), *y = random_floats(n * dim, 3), *bias = random_floats(dim, 1);
        float *w = random_floats(dim, 2), *t = guarded(n * dim), *t2 = guarded(n * dim), *sum = guarded(n * dim);
        memcpy(sum, x, n * dim * sizeof *x);
        struct td_add_norm_args a = {
            .x = sum, .y = y, .bias = bias, .w = w, .t = t, .n_rows = n, .dim = dim, .eps = 1e-5f};
        assert_int_equal(k.ops->add_norm(k.stream, &a), TD_OK);
        check_guards(t, n * dim, "t");
        check_guards(sum, n * dim, "x");
        for (uint32_t r = 0; r < n; r++) {
            double squares = 0;
            for (uint32_t d = 0; d < dim; d++) {
                size_t at = r * dim + d;
                check_near((double)sum[at], (double)x[at] + (double)y[at] + (double)bias[d], 1e-6, "residual", at);
                squares += (double)sum[at] * (double)sum[at];
            }
            double inv = 1 / sqrt(squares / dim + (double)1e-5f);
            for (uint32_t d = 0; d < dim; d++) {
                double want = (double)sum[r * dim + d] * inv * (double)w[d];
                check_near((double)t[r * dim + d], want, 3e-7 * fabs(want) + 1e-12, "norm", r * dim + d);
            }
        }
        struct td_rmsnorm_args b = {.x = sum, .w = w, .y = t2, .n_rows = n, .dim = dim, .eps = 1e-5f};
        assert_int_equal(k.ops->rmsnorm(k.stream, &b), TD_OK);
        check_same_bits(t, t2, n * dim, "norm alone");
        free(x);
        free(y);
        free(bias);
        free(w);
        guarded_free(t);
        guarded_free(t2);
        guarded_free(sum);
    }
    kit_close(&k);
}

static void rotation_angles_meet_the_check_values(void **state)
{
    (void)state;
    /* f_j and check values of the published YaRN parameters. */
    static const struct {
        uint32_t p, j;
        double freq, cos, sin;
    } values[] = {{1, 0, 1.0, 0.727556816, 1.133102605},
                  {127, 12, 0.0067949594897, 0.875530715, 1.023086703},
                  {4096, 8, 0.050813274815, 0.951542349, 0.952799870},
                  {131071, 31, 3.0235114281e-7, 1.345516335, 0.053350026}};
    struct kit k;
    kit_open(&k, NULL);
    for (uint32_t i = 0; i < TD_COUNT(values); i++) {
        float freqs[1] = {(float)values[i].freq}, c[1], s[1];
        struct td_rope_args a = {.positions = &values[i].p,
                                 .freqs = freqs,
                                 .factor = (float)1.3465735902799727,
                                 .cos = c,
                                 .sin = s,
                                 .n_rows = 1,
                                 .half = 1};
        assert_int_equal(k.ops->rope(k.stream, &a), TD_OK);
        check_near((double)c[0], values[i].cos, 1e-5, "cos", i);
        check_near((double)s[0], values[i].sin, 1e-5, "sin", i);
    }
    kit_close(&k);
}

static void gather_picks_rows(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    float *x = random_floats(9 * 5, 1), *y = guarded(3 * 5);
    uint32_t rows[3] = {8, 0, 8};
    struct td_gather_args a = {.x = x, .rows = rows, .y = y, .n_rows = 3, .dim = 5};
    assert_int_equal(k.ops->gather(k.stream, &a), TD_OK);
    check_guards(y, 15, "y");
    for (uint32_t i = 0; i < 15; i++) assert_true(y[i] == x[rows[i / 5] * 5 + i % 5]);
    free(x);
    guarded_free(y);
    kit_close(&k);
}

/* ---- products
 * ------------------------------------------------------------------------------------------------------------- */

static void logits_of_odd_vocabularies_are_right(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const uint32_t shapes[][3] = {{1, 1, 8}, {1, 1000, 64}, {3, 131, 96}, {49, 77, 33}, {130, 64, 32}};
    for (uint32_t i = 0; i < TD_COUNT(shapes); i++) {
        uint32_t n = shapes[i][0], vocab = shapes[i][1], dim = shapes[i][2];
        uint16_t *w = random_bf16((size_t)vocab * dim, 1);
        float *x = random_floats((size_t)n * dim, 1), *y = guarded((size_t)n * vocab);
        struct td_lm_head_args a = {.x = x, .w = pack_rows(&k, w, vocab, dim, NULL), .logits = y, .n_rows = n};
        assert_int_equal(k.ops->lm_head(k.stream, &a), TD_OK);
        check_guards(y, (size_t)n * vocab, "logits");
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t v = 0; v < vocab; v++) {
                double size = 0, want = dot(x + (size_t)r * dim, w + (size_t)v * dim, dim, &size);
                check_near((double)y[(size_t)r * vocab + v], want, 1e-6 * size, "logits", (size_t)r * vocab + v);
            }
        unpack(&k, &a.w);
        free(w);
        free(x);
        guarded_free(y);
    }
    kit_close(&k);
}

static void o_proj_of_ranks_adds_up_to_the_bits_of_one(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    enum { HEADS = 8, DIM = 32, IN = HEADS * DIM, OUT = 72, ROWS = 5 };
    uint16_t *w = random_bf16(OUT * IN, 1);
    float *x = random_floats(ROWS * IN, 1), *one = guarded(ROWS * OUT);
    struct td_o_proj_args a = {.x = x, .w = pack_rows(&k, w, OUT, IN, NULL), .y = one, .n_rows = ROWS};
    td_pieces_init(&a.pieces, IN, HEADS, 0, HEADS);
    assert_int_equal(k.ops->o_proj(k.stream, &a), TD_OK);
    check_guards(one, ROWS * OUT, "y");
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t d = 0; d < OUT; d++) {
            double size = 0, want = dot(x + r * IN, w + d * IN, IN, &size);
            check_near((double)one[r * OUT + d], want, 1e-6 * size, "y", r * OUT + d);
        }
    unpack(&k, &a.w);
    for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
        static float sums[8][ROWS * OUT], part[ROWS * IN];
        uint32_t heads = HEADS / ranks, in = heads * DIM;
        for (uint32_t r = 0; r < ranks; r++) {
            for (uint32_t i = 0; i < ROWS; i++) memcpy(part + i * in, x + i * IN + r * in, in * sizeof *part);
            struct td_pack_weight_args p = {
                .source = TD_SRC_BF16_ROWS, .data = w, .ld = IN, .col_begin = r * in, .n_out = OUT, .n_in = in};
            struct td_o_proj_args b = {.x = part, .y = sums[r], .n_rows = ROWS};
            assert_int_equal(pack_as(&k, p, &b.w), TD_OK);
            td_pieces_init(&b.pieces, IN, HEADS, r * heads, heads);
            assert_int_equal(k.ops->o_proj(k.stream, &b), TD_OK);
            unpack(&k, &b.w);
        }
        for (uint32_t width = ranks; width > 1; width /= 2)
            for (uint32_t r = 0; r < width / 2; r++)
                for (uint32_t i = 0; i < ROWS * OUT; i++) sums[r][i] = sums[2 * r][i] + sums[2 * r + 1][i];
        check_same_bits(one, sums[0], ROWS * OUT, "ranks");
    }
    free(w);
    free(x);
    guarded_free(one);
    kit_close(&k);
}

static void qkv_rotates_and_stores_where_the_page_table_says(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    for (uint32_t n = 1; n <= 61; n += 12)
        for (int type = 0; type < 2; type++) {
            enum { HIDDEN = 40, NQ = 6, NKV = 2, D = 32, P = 16, PAGES = 9, ALL = NQ + 2 * NKV };
            uint16_t *w = random_bf16(ALL * D * HIDDEN, 1);
            float *bias = random_floats(ALL * D, 1), *x = random_floats(n * HIDDEN, 1), *q = guarded(n * NQ * D);
            float *cos = random_floats(n * D / 2, 1), *sin = random_floats(n * D / 2, 1);
            uint32_t positions[64], row_page[64];
            for (uint32_t i = 0; i < n; i++) {
                positions[i] = 37 + i;
                row_page[i] = 8 - (37 + i) / P;
            }
            struct td_kv_group_layout l = {.n_layers = 3,
                                           .n_pages = PAGES,
                                           .n_heads = NKV,
                                           .head_dim = D,
                                           .page_tokens = P,
                                           .dtype = type ? TD_BF16 : TD_F32};
            size_t bytes = td_kv_pool_bytes(&l);
            uint8_t *pool = malloc(bytes), *before = malloc(bytes);
            assert_true(pool != NULL && before != NULL);
            memset(pool, 0xee, bytes);
            struct td_qkv_args a = {.x = x,
                                    .w = pack_rows(&k, w, ALL * D, HIDDEN, bias),
                                    .cos = cos,
                                    .sin = sin,
                                    .positions = positions,
                                    .row_page = row_page,
                                    .kv = {.layout = l, .pool = pool, .layer = 1},
                                    .q = q,
                                    .n_rows = n,
                                    .n_heads = NQ,
                                    .n_kv_heads = NKV,
                                    .head_dim = D,
                                    .parts = TD_QKV_Q};
            memcpy(before, pool, bytes);
            assert_int_equal(k.ops->qkv(k.stream, &a), TD_OK);
            assert_memory_equal(pool, before, bytes); /* q alone */
            check_guards(q, n * NQ * D, "q");
            a.parts = TD_QKV_KV;
            a.q = NULL;
            assert_int_equal(k.ops->qkv(k.stream, &a), TD_OK); /* K and V alone */
            size_t n_written = 0;
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t h = 0; h < ALL; h++)
                    for (uint32_t d = 0; d < D; d++) {
                        double v[2], size = 0;
                        for (uint32_t half = 0; half < 2; half++) {
                            uint32_t c = h * D + d % (D / 2) + half * (D / 2);
                            v[half] = dot(x + i * HIDDEN, w + c * HIDDEN, HIDDEN, &size) + (double)bias[c];
                        }
                        double cs = (double)cos[i * D / 2 + d % (D / 2)], sn = (double)sin[i * D / 2 + d % (D / 2)];
                        bool is_v = h >= NQ + NKV;
                        double want = is_v ? v[d / (D / 2)] : d < D / 2 ? v[0] * cs - v[1] * sn : v[1] * cs + v[0] * sn;
                        if (h < NQ) {
                            check_near((double)q[(i * NQ + h) * D + d], want, 1e-5, "q", (i * NQ + h) * D + d);
                            continue;
                        }
                        uint8_t *at = pool + td_kv_offset(&l, 1, row_page[i], (h - NQ) % NKV, is_v, positions[i] % P);
                        double have = type ? (double)td_bf16_to_f32(((uint16_t *)(void *)at)[d])
                                           : (double)((float *)(void *)at)[d];
                        check_near(have, want, type ? fabs(want) * 0x1p-8 + 1e-5 : 1e-5, "kv", i * ALL * D + h * D + d);
                        memset(at + d * td_dtype_bytes(l.dtype), 0xee, td_dtype_bytes(l.dtype));
                        n_written++;
                    }
            assert_int_equal(n_written, (size_t)n * 2 * NKV * D);
            assert_memory_equal(pool, before, bytes); /* nothing else was touched */
            unpack(&k, &a.w);
            free(w);
            free(bias);
            free(x);
            free(cos);
            free(sin);
            free(pool);
            free(before);
            guarded_free(q);
        }
    kit_close(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mxfp4_nibble_pair_and_scale_is_exact),
        cmocka_unit_test(mxfp4_that_is_not_finite_is_refused),
        cmocka_unit_test(windows_of_all_sources_are_cut_where_asked),
        cmocka_unit_test(embedding_widens_the_row_of_the_token),
        cmocka_unit_test(norms_and_residuals_are_right),
        cmocka_unit_test(rotation_angles_meet_the_check_values),
        cmocka_unit_test(gather_picks_rows),
        cmocka_unit_test(logits_of_odd_vocabularies_are_right),
        cmocka_unit_test(o_proj_of_ranks_adds_up_to_the_bits_of_one),
        cmocka_unit_test(qkv_rotates_and_stores_where_the_page_table_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
