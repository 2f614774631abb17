/* cos and sin of position * frequency, times YaRN's factor. The angle is an f32 product, as in the references (off by
 * up to 0.005 rad at position 131071, which they accept); cos and sin of it are computed in double, with full range
 * reduction. */
#include <math.h>

#include "kernels/cpu/cpu_int.h"

static void rows(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct td_rope_args *a = ctx;
    uint32_t end = td_min_u32((index + 1) * TD_ROW_BLOCK, a->n_rows);
    for (uint32_t t = index * TD_ROW_BLOCK; t < end; t++) {
        float p = (float)a->positions[t];
        float *c = a->cos + (size_t)t * a->half, *n = a->sin + (size_t)t * a->half;
        for (uint32_t j = 0; j < a->half; j++) {
            float angle = p * a->freqs[j];
            c[j] = (float)(cos((double)angle) * (double)a->factor);
            n[j] = (float)(sin((double)angle) * (double)a->factor);
        }
    }
}

enum td_status td_cpu_rope(struct td_stream *s, const struct td_rope_args *a)
{
    td_pool_run(td_cpu_stream(s)->pool, rows, (void *)(uintptr_t)a, td_ceil_div(a->n_rows, TD_ROW_BLOCK));
    return TD_OK;
}
