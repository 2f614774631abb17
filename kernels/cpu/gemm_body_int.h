/* The kernels of one weight type (W_TYPE, W_LOAD) and the loop that covers a matrix with them. Included by
 * micro_body_int.h. */
/* Shapes: as many accumulators as hide the latency of a multiply-add (8 or more) and fit the registers. */
KERNEL(1, 1)
#if !defined(TD_LANES_SCALAR)
KERNEL(2, 1)
KERNEL(3, 1)
KERNEL(4, 1)
KERNEL(5, 1)
KERNEL(6, 1)
KERNEL(1, 2)
KERNEL(1, 4)
KERNEL(2, 2)
KERNEL(3, 2)
#endif
#if defined(TD_LANES_AVX2)
KERNEL(2, 3)
#elif defined(TD_LANES_AVX512)
KERNEL(4, 2)
KERNEL(5, 2)
KERNEL(6, 2)
KERNEL(2, 4)
KERNEL(3, 4)
KERNEL(4, 4)
KERNEL(5, 4)
KERNEL(6, 4)
#endif

typedef void NAME(kernel_fn)(const struct td_gemm *g, uint32_t row, const W_TYPE *w, float *const *to);

static void NAME(gemm)(const struct td_gemm *g)
{
    /* [rows][panels left], up to the widest; more left: the last. */
    enum { WIDEST = 4 };
#define K(R, P)                                                                                                        \
    {                                                                                                                  \
        NAME(kernel_##R##x##P), P                                                                                      \
    }
    static const struct {
        NAME(kernel_fn) * run;
        uint32_t width;
    } kernels[][WIDEST + 1] = {
        {{NULL, 0}},
#if defined(TD_LANES_AVX512)
        {{NULL, 0}, K(1, 1), K(1, 2), K(1, 2), K(1, 4)},
        {{NULL, 0}, K(2, 1), K(2, 2), K(2, 2), K(2, 4)},
        {{NULL, 0}, K(3, 1), K(3, 2), K(3, 2), K(3, 4)},
        {{NULL, 0}, K(4, 1), K(4, 2), K(4, 2), K(4, 4)},
        {{NULL, 0}, K(5, 1), K(5, 2), K(5, 2), K(5, 4)},
        {{NULL, 0}, K(6, 1), K(6, 2), K(6, 2), K(6, 4)},
#elif defined(TD_LANES_AVX2)
        {{NULL, 0}, K(1, 1), K(1, 2), K(1, 2), K(1, 4)},
        {{NULL, 0}, K(2, 1), K(2, 2), K(2, 3), K(2, 2)}, /* 4 panels are 2 + 2, not 3 + 1 */
        {{NULL, 0}, K(3, 1), K(3, 2), K(3, 2), K(3, 2)},
        {{NULL, 0}, K(4, 1), K(4, 1), K(4, 1), K(4, 1)},
        {{NULL, 0}, K(5, 1), K(5, 1), K(5, 1), K(5, 1)},
        {{NULL, 0}, K(6, 1), K(6, 1), K(6, 1), K(6, 1)},
#else
        {{NULL, 0}, K(1, 1), K(1, 1), K(1, 1), K(1, 1)},
#endif
    };
#undef K
    enum { MAX_ROWS = sizeof kernels / sizeof kernels[0] - 1 };
    size_t panel = (size_t)(g->panel_k != 0 ? g->panel_k : g->k) * TD_LANES;
    uint32_t full = g->n_cols / TD_LANES, rest = g->n_cols % TD_LANES, step;
    /* 7 rows are 4 + 3 rather than 6 + 1, 8 are 4 + 4: few rows use the registers badly. */
    for (uint32_t row = 0; row < g->m; row += step) {
        uint32_t left = g->m - row;
        step = MAX_ROWS > 1 && (left == 7 || left == 8) ? 4 : left < MAX_ROWS ? left : MAX_ROWS;
        float *to[MAX_ROWS];
        for (uint32_t p = 0, n; p < full; p += n) {
            uint32_t some = full - p < WIDEST ? full - p : WIDEST;
            n = kernels[step][some].width;
            for (uint32_t i = 0; i < step; i++) to[i] = g->c[row + i] + (size_t)p * TD_LANES;
            kernels[step][some].run(g, row, (const W_TYPE *)g->w + p * panel, to);
        }
        if (rest == 0) continue;
        float edge[MAX_ROWS][TD_LANES] = {0};
        for (uint32_t i = 0; i < step; i++) {
            to[i] = edge[i];
            if (g->accumulate) memcpy(edge[i], g->c[row + i] + (size_t)full * TD_LANES, rest * sizeof(float));
        }
        kernels[step][1].run(g, row, (const W_TYPE *)g->w + full * panel, to);
        for (uint32_t i = 0; i < step; i++)
            memcpy(g->c[row + i] + (size_t)full * TD_LANES, edge[i], rest * sizeof(float));
    }
}
