/* Many rows an expert: activations to E4M3, then both products (moe_many.cuh). */
#include "kernels/cuda/moe_many.cuh"

#define QUANT_THREADS 256

/* A block a token, a warp a group of 128: quantised once, and written wherever a slot of the token's is in the sorted
 * order. */
static __global__ void __launch_bounds__(QUANT_THREADS)
    quantise_tokens(const td_bf16 *x, const uint32_t *ids, const uint32_t *padded_of, uint32_t top_k, uint32_t e_begin,
                    uint32_t n_mine, uint32_t width, uint32_t k_tiles, uint8_t *codes, float *scales)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t slot = (size_t)blockIdx.x * top_k + lane;
    before();
    let_next();
    const uint32_t place = lane < top_k && ids[slot] - e_begin < n_mine ? padded_of[slot] : UINT32_MAX;
#pragma unroll 3
    for (uint32_t k = warp; k < k_tiles; k += QUANT_THREADS / 32) {
        const uint32_t col = k * TD_XT + lane * 4;
        float2 a = make_float2(0, 0), b = a;
        if (col < width) {
            uint2 v = *(const uint2 *)(x + (size_t)blockIdx.x * width + col);
            a = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&v.x));
            b = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&v.y));
        }
        float most = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
#pragma unroll
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        const float scale = group_scale(most), inv = 1.0f / scale;
        const uint32_t four = two_e4m3(a.x * inv, a.y * inv) | two_e4m3(b.x * inv, b.y * inv) << 16;
        for (uint32_t j = 0; j < top_k; j++) {
            const uint32_t p = __shfl_sync(~0u, place, j), r = p % MANY_TOKENS;
            if (p == UINT32_MAX) continue;
            const size_t to = ((size_t)(p / MANY_TOKENS) * k_tiles + k) * MANY_TOKENS;
            *(uint32_t *)(codes + to * TD_XT + td_expert_fp8_at(r, lane * 4)) = four;
            if (lane == 0) scales[to + r] = scale;
        }
    }
}

enum td_status td_cuda_moe_many_quantise(const struct td_cuda_stream *s, const struct td_moe_args *a,
                                         const struct moe_scratch *z, uint32_t begin, uint32_t n)
{
    return td_cuda_status(launch(quantise_tokens, a->n_rows, QUANT_THREADS, 0, s->s, (const td_bf16 *)a->x, a->ids,
                                 z->sorted.padded_of, a->top_k, begin, n, a->hidden, td_ceil_div(a->hidden, TD_XT),
                                 z->x, z->sx),
                          "quantise");
}

template <td_expert_form FORM, class Out>
static cudaError_t many_start(const struct td_cuda_stream *s, const many_gemm &g, uint32_t n_tiles, const Out &out)
{
    auto kernel = experts_many<FORM, Out>;
    const int bytes = (int)many_ring<FORM, Out>::bytes;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    const uint32_t n_items = n_tiles * td_ceil_div(g.row_tiles, 2);
    return launch(kernel, td_min_u32(n_items, (uint32_t)s->n_sms), MANY_THREADS, bytes, s->s, g, out);
}

template <class Out>
static cudaError_t many_product(const struct td_cuda_stream *s, const struct moe_scratch *z,
                                const struct td_expert_layout *l, const struct td_weight *first, const float *bias,
                                const uint8_t *x, const float *sx, uint32_t k, const Out &out)
{
    many_gemm g = {};
    g.w = (const uint8_t *)first->data;
    g.w_bytes = l->bytes;
    g.scales_at = l->scales_at;
    g.bias = bias;
    g.n_rows = l->n_rows;
    g.row_tiles = l->row_tiles;
    g.k_tiles = l->k_tiles;
    g.last_steps = td_ceil_div(k - (l->k_tiles - 1) * TD_XT, 32);
    g.x = x;
    g.sx = sx;
    g.tiles = z->sorted.tiles;
    g.n_tiles = z->sorted.n_tiles;
    return l->form == TD_EXPERTS_FP8 ? many_start<TD_EXPERTS_FP8>(s, g, z->n_tiles, out)
                                     : many_start<TD_EXPERTS_MXFP4>(s, g, z->n_tiles, out);
}

enum td_status td_cuda_moe_many(const struct td_cuda_stream *s, const struct td_moe_args *a,
                                const struct moe_scratch *z, const struct td_expert_layout *up,
                                const struct td_expert_layout *down, uint32_t begin)
{
    const many_up act = {z->u_codes, z->su, a->intermediate, down->k_tiles, a->alpha, a->limit};
    const struct td_weight *first = &a->gate_up[begin];
    cudaError_t e = many_product(s, z, up, first, first->bias, z->x, z->sx, a->hidden, act);
    if (e != cudaSuccess) return td_cuda_status(e, "gate_up");
    const many_down sums = {a->y, z->sorted.slot_of, a->hidden};
    e = many_product(s, z, down, &a->down[begin], nullptr, z->u_codes, z->su, a->intermediate, sums);
    return td_cuda_status(e, "down");
}
