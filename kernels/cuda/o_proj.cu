/* This rank's heads back to the residual width, f32 out: ranks' sums are added in f32. */
#include "kernels/cuda/product.cuh"

enum td_status td_cuda_o_proj(struct td_stream *base, const struct td_o_proj_args *a)
{
    store_f32 store = {a->y, nullptr, a->w.n_out};
    return dense(td_cuda_stream_of(base), a->x, &a->w, 0, a->w.n_out, a->n_rows, store, "o_proj");
}

enum td_status td_cuda_lm_head(struct td_stream *base, const struct td_lm_head_args *a)
{
    store_f32 store = {a->logits, nullptr, a->w.n_out};
    return dense(td_cuda_stream_of(base), a->x, &a->w, 0, a->w.n_out, a->n_rows, store, "lm_head");
}
