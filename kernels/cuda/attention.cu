/* Paged attention with a sink: single rows go to the kernel that splits keys over blocks, or to the one for short windows;
 * the others to the one that shares keys among rows. Each leaves the others' sequences alone. Where rows must not depend on
 * their company, all go to the last: the first cuts keys where the batch makes it. */
#include "kernels/cuda/cuda_int.h"

/* Single rows read FP8 pages themselves; for a sequence of many rows they are widened first, one sequence at a time. */
static enum td_status attention_fp8(struct td_cuda_stream *s, const struct td_attention_args *a)
{
    const uint32_t least = s->is_batch_invariant ? 1 : 2;
    enum td_status st = TD_OK;
    if (a->n_single > 0 && least > 1) st = td_cuda_attn_decode(s, a);
    if (least > 1 && a->n_single == a->n_seqs) return st;
    for (uint32_t i = 0; i < a->n_seqs && st == TD_OK; i++) {
        if (a->seqs_host[i].n_rows < least) continue;
        struct td_attention_args one = *a;
        one.seqs = a->seqs + i;
        one.n_seqs = 1;
        one.n_single = a->seqs_host[i].n_rows == 1;
        one.kv.pool = a->scratch;
        one.kv.layer = 0;
        one.kv.layout.dtype = TD_BF16;
        one.kv.layout.n_layers = 1;
        one.kv.layout.n_pages =
            (a->seqs_host[i].start + a->seqs_host[i].n_rows - 1) / a->kv.layout.page_tokens + 1 - a->seqs_host[i].first_block;
        one.pages = NULL; /* in order */
        st = td_cuda_widen_kv(s, a, i);
        if (st == TD_OK) st = td_cuda_attn_prefill(s, &one);
    }
    return st;
}

enum td_status td_cuda_attention(struct td_stream *base, const struct td_attention_args *a)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    const struct td_kv_group_layout *l = &a->kv.layout;
    if (a->head_dim != 64 || (l->dtype != TD_BF16 && l->dtype != TD_E4M3) || a->n_kv_heads == 0 || a->n_heads % a->n_kv_heads != 0)
        return TD_E_UNSUPPORTED;
    uint32_t group = a->n_heads / a->n_kv_heads;
    if (group > 8 || 64 % group != 0 || l->page_tokens % 16 != 0 || l->n_heads != a->n_kv_heads)
        return TD_E_UNSUPPORTED;
    if (a->n_seqs == 0 || a->n_rows == 0) return TD_OK;
    enum td_status st = TD_OK;
    if (l->dtype == TD_E4M3) return attention_fp8(s, a);
    if (s->is_batch_invariant) return td_cuda_attn_prefill(s, a);
    if (a->n_single > 0) st = td_cuda_window_fits(a->window) ? td_cuda_attn_window(s, a) : td_cuda_attn_decode(s, a);
    if (st == TD_OK && a->n_single < a->n_seqs) st = td_cuda_attn_prefill(s, a);
    return st;
}
