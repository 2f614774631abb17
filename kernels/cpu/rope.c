/* cos and sin of position * frequency, times YaRN's factor. The angle is an f32 product, as in the references (off by
 * up to 0.005 rad at position 131071, which they accept); cos and sin of it are computed in double, with full range
 * reduction. */
#include <math.h>

#include "kernels/cpu/cpu_int.h"

enum td_status td_cpu_rope(struct td_stream *s, const struct td_rope_args *a)
{
    (void)s;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        float p = (float)a->positions[t];
        float *c = a->cos + (size_t)t * a->half, *n = a->sin + (size_t)t * a->half;
        for (uint32_t j = 0; j < a->half; j++) {
            float angle = p * a->freqs[j];
            c[j] = (float)(cos((double)angle) * (double)a->factor);
            n[j] = (float)(sin((double)angle) * (double)a->factor);
        }
    }
    return TD_OK;
}
