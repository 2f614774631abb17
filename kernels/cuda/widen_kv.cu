/* K and V of a sequence from FP8 pages to bf16 ones, exactly, for the kernel that shares keys among many rows: beside what
 * that computes with them, the copy is nothing. Block b of the sequence becomes page b - first_block of `to`. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/e4m3.cuh"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    widen_kv(const td_seq_rows *seq, const uint32_t *pages, const uint8_t *pool, uint4 *to, uint32_t bytes, uint32_t page_tokens)
{
    let_next();
    before();
    const td_seq_rows q = *seq;
    const uint32_t n_blocks = (q.start + q.n_rows - 1) / page_tokens + 1 - q.first_block;
    if (blockIdx.x >= n_blocks) return;
    const uint4 *from = (const uint4 *)(pool + (size_t)pages[q.pages + blockIdx.x] * bytes);
    for (uint32_t i = blockIdx.y * THREADS + threadIdx.x; i < bytes / 16; i += gridDim.y * THREADS) {
        const uint4 v = from[i];
        const uint2 a = widen_e4m3(v.x), b = widen_e4m3(v.y), c = widen_e4m3(v.z), d = widen_e4m3(v.w);
        uint4 *out = to + ((size_t)blockIdx.x * (bytes / 16) + i) * 2;
        out[0] = make_uint4(a.x, a.y, b.x, b.y);
        out[1] = make_uint4(c.x, c.y, d.x, d.y);
    }
}

enum td_status td_cuda_widen_kv(struct td_cuda_stream *s, const struct td_attention_args *a, uint32_t seq)
{
    const struct td_kv_group_layout *l = &a->kv.layout;
    const struct td_seq_rows *q = &a->seqs_host[seq];
    const uint32_t n_blocks = (q->start + q->n_rows - 1) / l->page_tokens + 1 - q->first_block;
    const uint8_t *layer = (const uint8_t *)a->kv.pool + td_kv_offset(l, a->kv.layer, 0, 0, false, 0);
    if (n_blocks * td_kv_page_bytes(l) * 2 > a->scratch_bytes) return TD_E_UNSUPPORTED;
    return td_cuda_status(launch(widen_kv, dim3(n_blocks, 4), THREADS, 0, s->s, a->seqs + seq, a->pages, layer,
                                 (uint4 *)a->scratch, (uint32_t)td_kv_page_bytes(l), l->page_tokens),
                          "widen_kv");
}
