/* Paged attention with a sink: single rows go to the kernel that splits keys over blocks, the others to the one that
 * shares keys among rows. Both leave the other's sequences alone. */
#include "kernels/cuda/cuda_int.h"

enum td_status td_cuda_attention(struct td_stream *base, const struct td_attention_args *a)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    const struct td_kv_group_layout *l = &a->kv.layout;
    if (a->head_dim != 64 || l->dtype != TD_BF16 || a->n_kv_heads == 0 || a->n_heads % a->n_kv_heads != 0)
        return TD_E_UNSUPPORTED;
    uint32_t group = a->n_heads / a->n_kv_heads;
    if (group > 8 || 64 % group != 0 || l->page_tokens % 16 != 0 || l->n_heads != a->n_kv_heads)
        return TD_E_UNSUPPORTED;
    if (a->n_seqs == 0 || a->n_rows == 0) return TD_OK;
    enum td_status st = TD_OK;
    if (a->n_single > 0) st = td_cuda_attn_decode(s, a);
    if (st == TD_OK && a->n_single < a->n_seqs) st = td_cuda_attn_prefill(s, a);
    return st;
}
