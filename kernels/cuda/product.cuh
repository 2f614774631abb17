/* One matrix, any number of rows: the kernel that suits them. */
#ifndef TD_KERNELS_CUDA_PRODUCT_CUH
#define TD_KERNELS_CUDA_PRODUCT_CUH

#include "kernels/cuda/gemm_split.cuh"
#include "kernels/cuda/skinny.cuh"

/* Columns of Y are the n_cols rows of w from w_begin on. */
template <class Epilogue>
static enum td_status product(const struct td_cuda_stream *s, const void *x, const struct td_weight *w, uint32_t w_begin,
                              uint32_t n_cols, uint32_t n_rows, const Epilogue &store, const char *what)
{
    if (n_rows == 0) return TD_OK;
    if (td_product_is_skinny(n_rows, false, n_cols, s->is_batch_invariant)) {
        skinny_shape g = {};
        g.x = (const td_bf16 *)x;
        g.w = (const td_bf16 *)w->data;
        g.n_rows = n_rows;
        g.k = w->n_in;
        g.w_begin = w_begin;
        g.n_cols = n_cols;
        g.w_rows = w->n_out;
        return skinny_run(s, g, 1, store, what);
    }
    gemm_shape g = {};
    g.n_rows = n_rows;
    g.k = w->n_in;
    g.w_begin = w_begin;
    g.n_cols = n_cols;
    g.w_rows = w->n_out;
    switch (td_product_split(n_rows, n_cols, w->n_in, (uint32_t)s->n_sms, s->is_batch_invariant)) {
    case 6: return gemm_split_start<6>(s, x, w->data, w->n_out, g, store, what);
    case 3: return gemm_split_start<3>(s, x, w->data, w->n_out, g, store, what);
    case 2: return gemm_split_start<2>(s, x, w->data, w->n_out, g, store, what);
    default: break;
    }
    return gemm_run(s, x, n_rows, w->data, w->n_out, g, store, what);
}

#endif
