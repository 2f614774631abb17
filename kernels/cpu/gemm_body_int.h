/* The kernels of one weight type (W_TYPE, W_LOAD) and the loop that covers a matrix with them. Included by
 * micro_body_int.h. */
/* Shapes: as many accumulators as hide the latency of a multiply-add and fit the registers. */
KERNEL(1, 1)
#if !defined(TD_LANES_SCALAR)
KERNEL(2, 1)
KERNEL(3, 1)
KERNEL(4, 1)
KERNEL(5, 1)
KERNEL(6, 1)
KERNEL(1, 4)
#endif
#if defined(TD_LANES_AVX2)
KERNEL(2, 3)
KERNEL(3, 2)
#elif defined(TD_LANES_AVX512)
KERNEL(2, 4)
KERNEL(3, 4)
KERNEL(4, 4)
KERNEL(5, 4)
KERNEL(6, 4)
#endif

typedef void NAME(kernel_fn)(const struct td_gemm *g, uint32_t row, const W_TYPE *w, float *const *to);

static void NAME(gemm)(const struct td_gemm *g)
{
#define K(R, P) NAME(kernel_##R##x##P)
#if defined(TD_LANES_AVX512)
    enum { MAX_ROWS = 6 };
    static NAME(kernel_fn) *const narrow[] = {NULL, K(1, 1), K(2, 1), K(3, 1), K(4, 1), K(5, 1), K(6, 1)};
    static NAME(kernel_fn) *const wide[] = {NULL, K(1, 4), K(2, 4), K(3, 4), K(4, 4), K(5, 4), K(6, 4)};
    static const uint32_t width[] = {0, 4, 4, 4, 4, 4, 4};
#elif defined(TD_LANES_AVX2)
    enum { MAX_ROWS = 6 };
    static NAME(kernel_fn) *const narrow[] = {NULL, K(1, 1), K(2, 1), K(3, 1), K(4, 1), K(5, 1), K(6, 1)};
    static NAME(kernel_fn) *const wide[] = {NULL, K(1, 4), K(2, 3), K(3, 2), K(4, 1), K(5, 1), K(6, 1)};
    static const uint32_t width[] = {0, 4, 3, 2, 1, 1, 1};
#else
    enum { MAX_ROWS = 1 };
    static NAME(kernel_fn) *const narrow[] = {NULL, K(1, 1)};
    static NAME(kernel_fn) *const wide[] = {NULL, K(1, 1)};
    static const uint32_t width[] = {0, 1};
#endif
#undef K
    size_t panel = (size_t)g->k * TD_LANES;
    uint32_t full = g->n_cols / TD_LANES, rest = g->n_cols % TD_LANES, step;
    /* 7 rows are 4 + 3 rather than 6 + 1, 8 are 4 + 4: few rows use the registers badly. */
    for (uint32_t row = 0; row < g->m; row += step) {
        uint32_t left = g->m - row;
        step = MAX_ROWS > 1 && (left == 7 || left == 8) ? 4 : left < MAX_ROWS ? left : MAX_ROWS;
        float *to[MAX_ROWS];
        for (uint32_t p = 0, n; p < full; p += n) {
            n = full - p >= width[step] ? width[step] : 1;
            for (uint32_t i = 0; i < step; i++) to[i] = g->c[row + i] + (size_t)p * TD_LANES;
            (n == 1 ? narrow : wide)[step](g, row, (const W_TYPE *)g->w + p * panel, to);
        }
        if (rest == 0) continue;
        float edge[MAX_ROWS][TD_LANES] = {0};
        for (uint32_t i = 0; i < step; i++) {
            to[i] = edge[i];
            if (g->accumulate) memcpy(edge[i], g->c[row + i] + (size_t)full * TD_LANES, rest * sizeof(float));
        }
        narrow[step](g, row, (const W_TYPE *)g->w + full * panel, to);
        for (uint32_t i = 0; i < step; i++)
            memcpy(g->c[row + i] + (size_t)full * TD_LANES, edge[i], rest * sizeof(float));
    }
}
