/* The kernels of one weight type (W_TYPE, W_LOAD) and the loop that covers a matrix with them. Included by
 * micro_body_int.h. */
#define KERNEL_WIDE_(R, P) KERNEL(R, P)
#define KERNEL_WIDE(R)     KERNEL_WIDE_(R, WIDE_##R)

KERNEL(1, 1)
KERNEL(2, 1)
KERNEL(3, 1)
KERNEL_WIDE_(1, 4)
#if defined(TD_LANES_AVX512)
KERNEL(2, 4)
KERNEL(3, 4)
KERNEL(4, 1)
KERNEL(5, 1)
KERNEL(6, 1)
KERNEL(4, 4)
KERNEL(5, 4)
KERNEL(6, 4)
#else
KERNEL(2, 3)
KERNEL(3, 2)
KERNEL(4, 1)
KERNEL(5, 1)
KERNEL(6, 1)
#endif

typedef void NAME(kernel_fn)(const struct td_gemm *g, uint32_t row, const W_TYPE *w, float *const *to);

static void NAME(gemm)(const struct td_gemm *g)
{
    static NAME(kernel_fn) *const narrow[] = {NULL,
                                              NAME(kernel_1x1),
                                              NAME(kernel_2x1),
                                              NAME(kernel_3x1),
                                              NAME(kernel_4x1),
                                              NAME(kernel_5x1),
                                              NAME(kernel_6x1)};
#if defined(TD_LANES_AVX512)
    static NAME(kernel_fn) *const wide[] = {NULL,
                                            NAME(kernel_1x4),
                                            NAME(kernel_2x4),
                                            NAME(kernel_3x4),
                                            NAME(kernel_4x4),
                                            NAME(kernel_5x4),
                                            NAME(kernel_6x4)};
#else
    static NAME(kernel_fn) *const wide[] = {NULL,
                                            NAME(kernel_1x4),
                                            NAME(kernel_2x3),
                                            NAME(kernel_3x2),
                                            NAME(kernel_4x1),
                                            NAME(kernel_5x1),
                                            NAME(kernel_6x1)};
#endif
    static const uint32_t width[] = {0, WIDE_1, WIDE_2, WIDE_3, WIDE_4, WIDE_5, WIDE_6};
    size_t panel = (size_t)g->k * TD_LANES;
    uint32_t full = g->n_cols / TD_LANES, rest = g->n_cols % TD_LANES, step;
    /* 7 rows are 4 + 3 rather than 6 + 1, 8 are 4 + 4: few rows use the registers badly. */
    for (uint32_t row = 0; row < g->m; row += step) {
        uint32_t left = g->m - row;
        step = left == 7 || left == 8 ? 4 : left < 6 ? left : 6;
        float *to[6];
        for (uint32_t p = 0, n; p < full; p += n) {
            n = full - p >= width[step] ? width[step] : 1;
            for (uint32_t i = 0; i < step; i++) to[i] = g->c[row + i] + (size_t)p * TD_LANES;
            (n == 1 ? narrow : wide)[step](g, row, (const W_TYPE *)g->w + p * panel, to);
        }
        if (rest == 0) continue;
        float edge[6][TD_LANES] = {0};
        for (uint32_t i = 0; i < step; i++) {
            to[i] = edge[i];
            if (g->accumulate) memcpy(edge[i], g->c[row + i] + (size_t)full * TD_LANES, rest * sizeof(float));
        }
        narrow[step](g, row, (const W_TYPE *)g->w + full * panel, to);
        for (uint32_t i = 0; i < step; i++)
            memcpy(g->c[row + i] + (size_t)full * TD_LANES, edge[i], rest * sizeof(float));
    }
}
