/* A plain product cut into tasks of some rows by some panels; what o_proj and lm_head are. */
#include "kernels/cpu/cpu_int.h"

struct job {
    struct td_cpu_stream *s;
    const float *x;
    const struct td_weight *w;
    const struct td_pieces *pieces;
    float *y;
    uint32_t n_rows, n_row_blocks, cols; /* cols of one task */
};

static void task(void *ctx, uint32_t index, uint32_t thread)
{
    const struct job *j = ctx;
    struct td_cpu_scratch *scratch = &j->s->scratch[thread];
    uint32_t row = index % j->n_row_blocks * TD_ROW_BLOCK, col = index / j->n_row_blocks * j->cols;
    uint32_t m = td_min_u32(TD_ROW_BLOCK, j->n_rows - row), n = td_min_u32(j->cols, j->w->n_out - col);
    for (uint32_t i = 0; i < m; i++) {
        scratch->a[i] = j->x + (size_t)(row + i) * j->w->n_in;
        scratch->c[i] = j->y + (size_t)(row + i) * j->w->n_out + col;
    }
    struct td_gemm g = {.a = scratch->a,
                        .c = scratch->c,
                        .w = td_cpu_panels(j->w, col),
                        .m = m,
                        .n_cols = n,
                        .k = j->w->n_in,
                        .pieces = j->pieces};
    j->s->micro->gemm_bf16(&g);
}

void td_cpu_matmul(struct td_cpu_stream *s, const float *x, const struct td_weight *w, const struct td_pieces *pieces,
                   float *y, uint32_t n_rows)
{
    struct job j = {.s = s,
                    .x = x,
                    .w = w,
                    .pieces = pieces,
                    .y = y,
                    .n_rows = n_rows,
                    .n_row_blocks = td_ceil_div(n_rows, TD_ROW_BLOCK),
                    .cols = 4 * TD_LANES};
    td_pool_run(s->pool, task, &j, j.n_row_blocks * td_ceil_div(w->n_out, j.cols));
}
