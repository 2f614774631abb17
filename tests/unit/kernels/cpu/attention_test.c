/* Attention against plain double loops: window edges, sinks, shared heads, page sizes, both KV types. */
#include "tests/unit/kernels/cpu/fixture.h"

#define MAX_SEQS 4u

struct scene {
    uint32_t n_heads, n_kv_heads, dim, page_tokens, window;
    enum td_dtype type;
    uint32_t n_seqs;
    uint32_t start[MAX_SEQS], n_rows[MAX_SEQS];
    float sink;
};

struct setup {
    struct td_kv_view kv;
    uint32_t pages[256];
    struct td_seq_rows seqs[MAX_SEQS];
    float *q, *sinks;
    uint32_t n_rows;
};

static double kv_value(const struct setup *u, uint32_t seq, uint32_t head, bool is_v, uint32_t pos, uint32_t d)
{
    const struct td_kv_group_layout *l = &u->kv.layout;
    uint32_t page = u->pages[u->seqs[seq].pages + pos / l->page_tokens - u->seqs[seq].first_block];
    const char *p = (const char *)u->kv.pool + td_kv_offset(l, u->kv.layer, page, head, is_v, pos % l->page_tokens);
    return l->dtype == TD_F32 ? (double)((const float *)(const void *)p)[d]
                              : (double)td_bf16_to_f32(((const uint16_t *)(const void *)p)[d]);
}

/* Pages hold random values at visible positions and NaN everywhere else. */
static void prepare(const struct scene *c, struct setup *u)
{
    *u = (struct setup){.kv = {.layer = 1}};
    uint32_t n_pages = 0;
    for (uint32_t s = 0; s < c->n_seqs; s++) {
        uint32_t end = c->start[s] + c->n_rows[s];
        uint32_t seen = c->window != 0 && c->start[s] + 1 > c->window ? c->start[s] + 1 - c->window : 0;
        u->seqs[s] = (struct td_seq_rows){.row = u->n_rows,
                                          .n_rows = c->n_rows[s],
                                          .start = c->start[s],
                                          .pages = n_pages,
                                          .first_block = seen / c->page_tokens};
        for (uint32_t b = seen / c->page_tokens; b * c->page_tokens < end; b++) {
            assert_true(n_pages < TD_COUNT(u->pages));
            u->pages[n_pages++] = 0;
        }
        u->n_rows += c->n_rows[s];
    }
    for (uint32_t i = 0; i < n_pages; i++) u->pages[i] = n_pages - 1 - i; /* out of order */
    u->kv.layout = (struct td_kv_group_layout){.n_layers = 2,
                                               .n_pages = n_pages,
                                               .n_heads = c->n_kv_heads,
                                               .head_dim = c->dim,
                                               .page_tokens = c->page_tokens,
                                               .dtype = c->type};
    u->kv.pool = malloc(td_kv_pool_bytes(&u->kv.layout));
    assert_non_null(u->kv.pool);
    memset(u->kv.pool, 0xff, td_kv_pool_bytes(&u->kv.layout));
    for (uint32_t s = 0; s < c->n_seqs; s++) {
        uint32_t end = c->start[s] + c->n_rows[s];
        uint32_t seen = c->window != 0 && c->start[s] + 1 > c->window ? c->start[s] + 1 - c->window : 0;
        for (uint32_t pos = seen; pos < end; pos++)
            for (uint32_t h = 0; h < c->n_kv_heads; h++)
                for (int is_v = 0; is_v < 2; is_v++) {
                    uint32_t page = u->pages[u->seqs[s].pages + pos / c->page_tokens - u->seqs[s].first_block];
                    char *p =
                        (char *)u->kv.pool + td_kv_offset(&u->kv.layout, 1, page, h, is_v != 0, pos % c->page_tokens);
                    for (uint32_t d = 0; d < c->dim; d++) {
                        float v = random_float(2);
                        if (c->type == TD_F32)
                            ((float *)(void *)p)[d] = v;
                        else
                            ((uint16_t *)(void *)p)[d] = td_f32_to_bf16(v);
                    }
                }
    }
    u->q = random_floats((size_t)u->n_rows * c->n_heads * c->dim, 2);
    u->sinks = random_floats(c->n_heads, 1);
    for (uint32_t h = 0; h < c->n_heads; h++) u->sinks[h] += c->sink;
}

static void check_scene(struct kit *k, const struct scene *c)
{
    struct setup u;
    prepare(c, &u);
    size_t width = (size_t)c->n_heads * c->dim;
    float *out = guarded(u.n_rows * width);
    struct td_attention_args a = {.q = u.q,
                                  .kv = u.kv,
                                  .seqs = u.seqs,
                                  .pages = u.pages,
                                  .n_seqs = c->n_seqs,
                                  .sinks = u.sinks,
                                  .out = out,
                                  .n_heads = c->n_heads,
                                  .n_kv_heads = c->n_kv_heads,
                                  .head_dim = c->dim,
                                  .window = c->window,
                                  .scale = 1.0f / sqrtf((float)c->dim)};
    assert_int_equal(k->ops->attention(k->stream, &a), TD_OK);
    check_guards(out, u.n_rows * width, "attention");
    double *z = calloc(4096, sizeof *z);
    assert_non_null(z);
    for (uint32_t s = 0; s < c->n_seqs; s++)
        for (uint32_t i = 0; i < c->n_rows[s]; i++)
            for (uint32_t h = 0; h < c->n_heads; h++) {
                uint32_t p = c->start[s] + i, kv_head = h / (c->n_heads / c->n_kv_heads), row = u.seqs[s].row + i;
                uint32_t first = c->window != 0 && p + 1 > c->window ? p + 1 - c->window : 0;
                double top = (double)u.sinks[h], sum;
                for (uint32_t key = first; key <= p; key++) {
                    z[key - first] = 0;
                    for (uint32_t d = 0; d < c->dim; d++)
                        z[key - first] +=
                            (double)u.q[row * width + h * c->dim + d] * kv_value(&u, s, kv_head, false, key, d);
                    z[key - first] *= 1 / sqrt(c->dim);
                    if (z[key - first] > top) top = z[key - first];
                }
                sum = exp((double)u.sinks[h] - top);
                for (uint32_t key = first; key <= p; key++) sum += z[key - first] = exp(z[key - first] - top);
                for (uint32_t d = 0; d < c->dim; d++) {
                    double want = 0;
                    for (uint32_t key = first; key <= p; key++)
                        want += z[key - first] * kv_value(&u, s, kv_head, true, key, d);
                    size_t at = row * width + h * c->dim + d;
                    check_near((double)out[at], want / sum, 4e-6, "attention", at);
                }
            }
    free(z);
    free(u.q);
    free(u.sinks);
    free(u.kv.pool);
    guarded_free(out);
}

static void windows_count_the_query_itself(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    /* Single queries around the edge of a window of 128, and around block and page edges. */
    static const uint32_t positions[] = {0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 500};
    for (uint32_t i = 0; i < TD_COUNT(positions); i++)
        for (uint32_t window = 0; window <= 128; window += 128)
            check_scene(&k, &(struct scene){.n_heads = 4,
                                            .n_kv_heads = 2,
                                            .dim = 64,
                                            .page_tokens = 64,
                                            .window = window,
                                            .type = TD_BF16,
                                            .n_seqs = 1,
                                            .start = {positions[i]},
                                            .n_rows = {1}});
    kit_close(&k);
}

static void chunks_pages_and_types_of_all_sizes_are_right(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const uint32_t pages[] = {16, 24, 64, 100, 256}, windows[] = {0, 1, 16, 100, 128};
    for (uint32_t p = 0; p < TD_COUNT(pages); p++)
        for (uint32_t w = 0; w < TD_COUNT(windows); w++)
            check_scene(&k, &(struct scene){.n_heads = 6,
                                            .n_kv_heads = 2,
                                            .dim = 32,
                                            .page_tokens = pages[p],
                                            .window = windows[w],
                                            .type = p % 2 ? TD_F32 : TD_BF16,
                                            .n_seqs = 4,
                                            .start = {0, 130, 77, 299},
                                            .n_rows = {70, 1, 133, 2}});
    kit_close(&k);
}

static void heads_of_every_shape_are_right(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const uint32_t heads[][3] = {{1, 1, 16}, {64, 8, 64}, {5, 5, 48}, {64, 1, 128}, {2, 1, 256}};
    for (uint32_t i = 0; i < TD_COUNT(heads); i++)
        check_scene(&k, &(struct scene){.n_heads = heads[i][0],
                                        .n_kv_heads = heads[i][1],
                                        .dim = heads[i][2],
                                        .page_tokens = 32,
                                        .window = 40,
                                        .type = TD_BF16,
                                        .n_seqs = 2,
                                        .start = {3, 90},
                                        .n_rows = {20, 1}});
    kit_close(&k);
}

static void sinks_of_all_sizes_take_their_share(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    static const float sinks[] = {-INFINITY, -100, -5, 0, 5, 30, 100};
    for (uint32_t i = 0; i < TD_COUNT(sinks); i++)
        check_scene(&k, &(struct scene){.n_heads = 2,
                                        .n_kv_heads = 1,
                                        .dim = 64,
                                        .page_tokens = 64,
                                        .window = 0,
                                        .type = TD_F32,
                                        .n_seqs = 1,
                                        .start = {60},
                                        .n_rows = {80},
                                        .sink = sinks[i]});
    kit_close(&k);
}

static void nan_stays_in_its_sequence_and_is_not_hidden(void **state)
{
    (void)state;
    struct kit k;
    kit_open(&k, NULL);
    struct scene c = {.n_heads = 2,
                      .n_kv_heads = 1,
                      .dim = 64,
                      .page_tokens = 64,
                      .type = TD_F32,
                      .n_seqs = 2,
                      .start = {0, 0},
                      .n_rows = {3, 3}};
    struct setup u;
    prepare(&c, &u);
    u.q[0] = NAN; /* row 0, head 0 */
    float *out = guarded(6 * 128);
    struct td_attention_args a = {.q = u.q,
                                  .kv = u.kv,
                                  .seqs = u.seqs,
                                  .pages = u.pages,
                                  .n_seqs = 2,
                                  .sinks = u.sinks,
                                  .out = out,
                                  .n_heads = 2,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .scale = 0.125f};
    assert_int_equal(k.ops->attention(k.stream, &a), TD_OK);
    for (uint32_t i = 0; i < 6 * 128; i++) assert_int_equal(isnan(out[i]) != 0, i < 64);
    free(u.q);
    free(u.sinks);
    free(u.kv.pool);
    guarded_free(out);
    kit_close(&k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_count_the_query_itself),
        cmocka_unit_test(chunks_pages_and_types_of_all_sizes_are_right),
        cmocka_unit_test(heads_of_every_shape_are_right),
        cmocka_unit_test(sinks_of_all_sizes_take_their_share),
        cmocka_unit_test(nan_stays_in_its_sequence_and_is_not_hidden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
