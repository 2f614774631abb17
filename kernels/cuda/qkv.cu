/* Query, key and value: product, bias, rotation, q to its buffer and K, V to their pages, in one kernel. */
#include "kernels/cuda/product.cuh"

enum td_status td_cuda_qkv(struct td_stream *base, const struct td_qkv_args *a)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    if (a->head_dim != 64 || (l->dtype != TD_BF16 && l->dtype != TD_E4M3)) return TD_E_UNSUPPORTED;
    uint32_t first = a->parts & TD_QKV_Q ? 0 : a->n_heads, end = a->n_heads + 2 * a->n_kv_heads;
    if (!(a->parts & TD_QKV_KV)) end = a->n_heads;
    store_qkv store = {};
    store.q = (td_bf16 *)a->q;
    store.pool = (td_bf16 *)((char *)a->kv.pool + td_kv_offset(l, a->kv.layer, 0, 0, false, 0));
    store.bias = a->w.bias + (size_t)first * 64;
    store.cos = a->cos;
    store.sin = a->sin;
    store.positions = a->positions;
    store.row_page = a->row_page;
    store.n_heads = a->n_heads - first; /* columns count from `first` */
    store.n_kv_heads = a->n_kv_heads;
    store.page_tokens = l->page_tokens;
    store.n_saturated = l->dtype == TD_E4M3 ? td_cuda_stream_of(base)->n_saturated : nullptr;
    store.n_cols = (end - first) * 64;
    return dense(td_cuda_stream_of(base), a->x, &a->w, first * 64, store.n_cols, a->n_rows, store, "qkv");
}
