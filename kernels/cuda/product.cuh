/* One matrix, any number of rows: the kernel that suits them. */
#ifndef TD_KERNELS_CUDA_PRODUCT_CUH
#define TD_KERNELS_CUDA_PRODUCT_CUH

#include "kernels/cuda/few.cuh"
#include "kernels/cuda/gemm_fp8w.cuh"
#include "kernels/cuda/gemm_pairs.cuh"
#include "kernels/cuda/gemm_split.cuh"

/* Columns of Y are the n_cols rows of w from w_begin on. */
template <class Epilogue>
static enum td_status product(const struct td_cuda_stream *s, const void *x, const struct td_weight *w,
                              uint32_t w_begin, uint32_t n_cols, uint32_t n_rows, const Epilogue &store,
                              const char *what)
{
    if (n_rows == 0) return TD_OK;
    skinny_shape thin = {};
    thin.x = (const td_bf16 *)x;
    thin.w = (const td_bf16 *)w->data;
    thin.n_rows = n_rows;
    thin.k = w->n_in;
    thin.w_begin = w_begin;
    thin.n_cols = n_cols;
    thin.w_rows = w->n_out;
    switch (td_product_few(n_rows, n_cols, w->n_in, (uint32_t)s->n_sms, s->is_batch_invariant)) {
    case 8: return few_start<1, 16, 16>(s, thin, store, what);
    case 24: return few_start<3, 16, 16>(s, thin, store, what);
    case 40: return few_start<5, 12, 11>(s, thin, store, what);
    default: break;
    }
    if (td_product_is_skinny(n_rows, false, n_cols, s->is_batch_invariant)) return skinny_run(s, thin, 1, store, what);
    gemm_shape g = {};
    g.n_rows = n_rows;
    g.k = w->n_in;
    g.w_begin = w_begin;
    g.n_cols = n_cols;
    g.w_rows = w->n_out;
    if (td_product_is_paired(n_rows, n_cols)) return pairs_start(s, x, w->data, w->n_out, g, store, what);
    switch (td_product_split(n_rows, n_cols, w->n_in, (uint32_t)s->n_sms, s->is_batch_invariant)) {
    case 6: return gemm_split_start<6>(s, x, w->data, w->n_out, g, store, what);
    case 3: return gemm_split_start<3>(s, x, w->data, w->n_out, g, store, what);
    case 2: return gemm_split_start<2>(s, x, w->data, w->n_out, g, store, what);
    default: break;
    }
    return gemm_run(s, x, n_rows, w->data, w->n_out, g, store, what);
}

/* The same of a matrix that --dense-weights may hold in FP8. */
template <class Epilogue>
static enum td_status dense(const struct td_cuda_stream *s, const void *x, const struct td_weight *w, uint32_t w_begin,
                            uint32_t n_cols, uint32_t n_rows, const Epilogue &store, const char *what)
{
    if (!s->is_dense_fp8) return product(s, x, w, w_begin, n_cols, n_rows, store, what);
    if (n_rows == 0) return TD_OK;
    if (w->n_in % 16 != 0) return TD_E_UNSUPPORTED;
    skinny_shape thin = {};
    thin.x = (const td_bf16 *)x;
    thin.w = (const td_bf16 *)w->data;
    thin.n_rows = n_rows;
    thin.k = w->n_in;
    thin.w_begin = w_begin;
    thin.n_cols = n_cols;
    gemm_shape g = {};
    g.n_rows = n_rows;
    g.k = w->n_in;
    g.w_begin = w_begin;
    g.n_cols = n_cols;
    switch (td_product_fp8(n_rows, n_cols, w->n_in, (uint32_t)s->n_sms, s->is_batch_invariant)) {
    case TD_FP8_FEW_24: return few_start<3, 8, 8, true>(s, thin, store, what);
    case TD_FP8_FEW_40: return few_start<5, 6, 5, true>(s, thin, store, what);
    case TD_FP8_64x32: return fp8w_start<64, 32, 6>(s, x, w, g, store, what);
    case TD_FP8_64x128: return fp8w_start<64, 128, 3>(s, x, w, g, store, what);
    case TD_FP8_128x128: return fp8w_start<128, 128, 5>(s, x, w, g, store, what);
    }
    return TD_E_UNSUPPORTED;
}

#endif
