/* The routed MLP with weights in FP8 or MXFP4: router, top k, slots sorted into tiles, activations to E4M3 by groups of 128,
 * two grouped products. All counts stay on the device, so a graph holds for any routing. NOTES.md tells how it came about. */
#include "kernels/cuda/moe_few.cuh"
#include "kernels/cuda/moe_sort.cuh"
#include "kernels/cuda/product.cuh"

#define MAX_LIMIT       200.0f /* |u| is at most limit * (limit + 1), and has to stay within f16 */

/* ---- scratch ---- */

static struct moe_scratch lay_out(char *base, const struct td_cuda_device *d, uint32_t n_rows, uint32_t top_k,
                                  uint32_t n_experts, uint32_t hidden, uint32_t intermediate)
{
    if (d->has_bf16_activations)
        return moe_lay_out_bf16(base, d->is_batch_invariant, n_rows, top_k, n_experts, hidden, intermediate);
    if (d->is_batch_invariant)
        return moe_lay_out_tiles(base, MOE_FIXED_TILE, n_rows, top_k, n_experts, hidden, intermediate);
    return moe_lay_out(base, n_rows, top_k, n_experts, hidden, intermediate);
}

/* The largest over all batches up to the largest: a smaller one may have tiles that are emptier. */
size_t td_cuda_moe_fp8_scratch_bytes(const struct td_cuda_device *d, const struct td_scratch_shape *s)
{
    size_t most = 0;
    for (uint32_t n = 1; n <= s->n_rows; n = n < 1024 || n == s->n_rows ? n + 1 : td_min_u32(n + n / 64, s->n_rows)) {
        size_t bytes = lay_out(NULL, d, n, s->top_k, s->n_experts, s->hidden, s->intermediate).bytes;
        if (bytes > most) most = bytes;
    }
    /* Between the steps of the loop above. */
    return most + most / 16;
}

/* ---- activations to E4M3 ---- */

static __device__ __forceinline__ float4 load_four(const td_bf16 *p)
{
    uint2 v = *(const uint2 *)p;
    float2 a = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&v.x)),
           b = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&v.y));
    return make_float4(a.x, a.y, b.x, b.y);
}
static __device__ __forceinline__ float4 load_four(const __half *p)
{
    uint2 v = *(const uint2 *)p;
    float2 a = __half22float2(*reinterpret_cast<__half2 *>(&v.x)), b = __half22float2(*reinterpret_cast<__half2 *>(&v.y));
    return make_float4(a.x, a.y, b.x, b.y);
}

#define QUANT_THREADS 256

/* A warp's 128 values, four a lane, as row r of a tile of tile_rows rows. */
static __device__ __forceinline__ void write_group(float4 v, uint32_t r, uint32_t tile_rows, uint8_t *codes, float *scales)
{
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    const float scale = TRAP(FP8_ONE_SCALE) ? 4 / 448.0f : fmaxf(most, 1e-4f) / 448.0f, inv = 1.0f / scale;
    const uint32_t lane = threadIdx.x % 32;
    *(uint32_t *)(codes + td_expert_fp8_at(r, lane * 4)) =
        two_codes(v.x * inv, v.y * inv) | two_codes(v.z * inv, v.w * inv) << 16;
    if (lane == 0) scales[r] = scale;
}

/* Block (padded row, some groups), a warp a group of 128. With top_k 0 rows are taken as they lie, else as their slots say.
 * flags: become zero. */
template <class From>
static __global__ void __launch_bounds__(QUANT_THREADS)
    quantise(const From *from, const struct sorted sorted, uint32_t top_k, uint32_t tile_rows, uint32_t width,
             uint32_t k_tiles, uint8_t *codes, float *scales, uint32_t *flags, uint32_t n_flags)
{
    before();
    let_next();
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (uint32_t i = threadIdx.x; i < n_flags; i += QUANT_THREADS) flags[i] = 0;
    const uint32_t tile = blockIdx.x / tile_rows, r = blockIdx.x % tile_rows;
    if (tile >= *sorted.n_tiles || r >= sorted.tiles[tile].n) return;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = top_k == 0 ? blockIdx.x : sorted.slot_of[blockIdx.x] / top_k;
#pragma unroll 3
    for (uint32_t k = blockIdx.y * (QUANT_THREADS / 32) + warp; k < k_tiles; k += gridDim.y * (QUANT_THREADS / 32)) {
        const uint32_t col = k * TD_XT + lane * 4;
        float4 v = col < width ? load_four(from + (size_t)row * width + col) : make_float4(0, 0, 0, 0);
        const size_t to = ((size_t)tile * k_tiles + k) * tile_rows;
        write_group(v, r, tile_rows, codes + to * TD_XT, scales + to);
    }
}

/* Few rows: a warp has one group. */
static dim3 quant_grid(uint32_t rows, uint32_t k_tiles)
{
    return dim3(rows, rows > 2048 ? 1 : td_ceil_div(k_tiles, QUANT_THREADS / 32));
}

/* ---- the products ---- */

template <int N, td_expert_form FORM, class Epilogue>
static cudaError_t experts_start(const struct td_cuda_stream *s, const expert_gemm &g, uint32_t n_items,
                                 const Epilogue &store)
{
    auto kernel = experts<N, FORM, Epilogue>;
    const int bytes = (int)expert_ring<N, FORM>::bytes;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    return launch(kernel, td_min_u32(n_items, (uint32_t)s->n_sms), EXPERT_THREADS, bytes, s->s, g, store);
}

static expert_gemm shape_of(const struct moe_scratch *z, const struct td_expert_layout *l, const struct td_weight *first,
                            bool is_up)
{
    expert_gemm g = {};
    g.w = (const uint8_t *)first->data;
    g.w_bytes = l->bytes;
    g.scales_at = l->scales_at;
    g.bias = is_up ? first->bias : nullptr;
    g.n_rows = l->n_rows;
    g.row_tiles = l->row_tiles;
    g.k_tiles = l->k_tiles;
    g.x = is_up ? z->x : z->u_codes;
    g.sx = is_up ? z->sx : z->su;
    g.tiles = z->sorted.tiles;
    g.n_tiles = z->sorted.n_tiles;
    g.pieces = 1;
    return g;
}

template <class Epilogue>
static enum td_status product_of(const struct td_cuda_stream *s, const struct moe_scratch *z,
                                 const struct td_expert_layout *l, const struct td_weight *first, bool is_up,
                                 const Epilogue &store, const char *what)
{
    const expert_gemm g = shape_of(z, l, first, is_up);
    const uint32_t n = z->n_tiles * l->row_tiles;
    return td_cuda_status(l->form == TD_EXPERTS_FP8 ? experts_start<MOE_FIXED_TILE, TD_EXPERTS_FP8>(s, g, n, store)
                                                    : experts_start<MOE_FIXED_TILE, TD_EXPERTS_MXFP4>(s, g, n, store),
                          what);
}

static few_product few_product_of(const struct td_expert_layout *l, const struct td_weight *first, const float *bias,
                                  const uint8_t *x, const float *sx)
{
    few_product p = {};
    p.w = (const uint8_t *)first->data;
    p.w_bytes = l->bytes;
    p.scales_at = l->scales_at;
    p.bias = bias;
    p.n_rows = l->n_rows;
    p.k_tiles = l->k_tiles;
    p.n_items = td_ceil_div(l->n_rows, FEW_ROWS);
    p.x = x;
    p.sx = sx;
    return p;
}

template <int N, td_expert_form FORM> static cudaError_t few_start(const struct td_cuda_stream *s, const few_experts &g)
{
    auto kernel = few_experts_kernel<N, FORM>;
    const int bytes = (int)few_ring<N, FORM>::bytes;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    return launch(kernel, td_min_u32((uint32_t)s->n_sms, MOE_FEW_BLOCKS), FEW_THREADS, bytes, s->s, g);
}

template <td_expert_form FORM>
static cudaError_t few_of(const struct td_cuda_stream *s, const few_experts &g, uint32_t tile_rows)
{
    switch (tile_rows) {
    case 8: return few_start<8, FORM>(s, g);
    case 16: return few_start<16, FORM>(s, g);
    default: return few_start<32, FORM>(s, g);
    }
}

/* This rank's experts: [begin, begin + n), one after another as the loader lays them out. */
static bool find_experts(const struct td_weight *w, uint32_t n_experts, size_t bytes, uint32_t bias_rows, uint32_t *begin,
                         uint32_t *n)
{
    uint32_t b = 0, e;
    while (b < n_experts && w[b].data == NULL) b++;
    for (e = b; e < n_experts && w[e].data != NULL; e++) {
        if ((const char *)w[e].data != (const char *)w[b].data + (e - b) * bytes) return false;
        if (w[b].bias != NULL && w[e].bias != w[b].bias + (size_t)(e - b) * bias_rows) return false;
    }
    *begin = b;
    *n = e - b;
    for (; e < n_experts; e++)
        if (w[e].data != NULL) return false;
    return true;
}

template <int PER>
static cudaError_t launch_small(cudaStream_t s, const struct td_moe_args *a, const struct moe_scratch *z, uint32_t begin,
                                uint32_t n)
{
    if (a->n_rows > SORT_THREADS / 32) { /* more than a row a warp: routed by several blocks */
        cudaError_t e = launch(route<PER>, td_ceil_div(a->n_rows, 4), 128, 0, s, z->logits, MOE_ROUTER_SLICES,
                               (size_t)a->n_rows * a->n_experts, a->router.bias, a->n_rows, a->n_experts, a->top_k, a->ids,
                               a->weights);
        if (e != cudaSuccess) return e;
        return launch(sort_few<PER>, 1, SORT_THREADS, 0, s, a->ids, a->n_rows * a->top_k, begin, n, z->tile_rows, z->sorted);
    }
    return launch(route_and_sort<PER>, 1, SORT_THREADS, 0, s, z->logits, a->router.bias, a->n_rows, a->n_experts, a->top_k,
                  a->ids, a->weights, begin, n, z->tile_rows, z->sorted);
}

static enum td_status route_rows(const struct td_cuda_stream *s, const struct td_moe_args *a, const struct moe_scratch *z,
                                 uint32_t begin, uint32_t n)
{
    uint32_t slots = a->n_rows * a->top_k;
    cudaError_t e;
    if (!s->is_batch_invariant && a->n_rows <= MOE_FEW_ROWS && slots <= MOE_FEW_SLOTS && a->n_experts <= 128) {
        e = launch(router_slices, dim3(td_ceil_div(a->n_rows, 16), MOE_ROUTER_SLICES),
                   td_ceil_div(a->n_experts, 8) * 32, 0, s->s, (const td_bf16 *)a->x,
                   (const td_bf16 *)a->router.data, a->n_rows, a->n_experts, a->hidden, z->logits);
        if (e == cudaSuccess)
            e = a->n_experts <= 32 ? launch_small<1>(s->s, a, z, begin, n) : launch_small<4>(s->s, a, z, begin, n);
    } else {
        store_f32 logits = {z->logits, nullptr, a->n_experts};
        enum td_status st = product(s, a->x, &a->router, 0, a->n_experts, a->n_rows, logits, "router");
        if (st != TD_OK) return st;
        e = launch_route(s->s, z->logits, a->router.bias, a->n_rows, a->n_experts, a->top_k, a->ids, a->weights);
        if (e == cudaSuccess && n != 0)
            e = launch(sort_tiles, n, SORT_THREADS, 0, s->s, a->ids, slots, begin, n, z->tile_rows, z->sorted);
    }
    if (e == cudaSuccess && n < a->n_experts)
        e = launch(fill_absent, slots, 128, 0, s->s, a->ids, a->y, a->hidden, begin, n);
    return td_cuda_status(e, "routing");
}

/* Both products, once the rows are routed and quantised. */
static enum td_status few_rows(const struct td_cuda_stream *s, const struct td_moe_args *a, const struct moe_scratch *z,
                               const struct td_expert_layout *up, const struct td_expert_layout *down, uint32_t begin)
{
    few_experts g = {};
    g.up = few_product_of(up, &a->gate_up[begin], a->gate_up[begin].bias, z->x, z->sx);
    g.down = few_product_of(down, &a->down[begin], nullptr, z->u_codes, z->su);
    g.tiles = z->sorted.tiles;
    g.n_tiles = z->sorted.n_tiles;
    g.slot_of = z->sorted.slot_of;
    g.u_codes = z->u_codes;
    g.su = z->su;
    g.n_units = a->intermediate;
    g.alpha = a->alpha;
    g.limit = a->limit;
    g.y = a->y;
    g.n_cols = a->hidden;
    g.carries = z->carries;
    g.flags = z->flags;
    return td_cuda_status(up->form == TD_EXPERTS_FP8 ? few_of<TD_EXPERTS_FP8>(s, g, z->tile_rows)
                                                     : few_of<TD_EXPERTS_MXFP4>(s, g, z->tile_rows),
                          "experts");
}

enum td_status td_cuda_moe_fp8(struct td_cuda_stream *s, enum td_expert_form form, const struct td_moe_args *a)
{
    uint32_t begin, n, begin_down, n_down;
    if (a->n_experts > MAX_EXPERTS || a->top_k > TD_MAX_TOKEN_EXPERTS || a->top_k > a->n_experts || a->hidden % 8 != 0 ||
        a->intermediate % 8 != 0 || a->hidden > TD_X_MAX_K || a->intermediate > TD_X_MAX_K || !(a->limit <= MAX_LIMIT))
        return TD_E_UNSUPPORTED;
    const struct td_expert_layout up = td_expert_layout(form, 2 * a->intermediate, a->hidden),
                                  down = td_expert_layout(form, a->hidden, a->intermediate);
    if (!find_experts(a->gate_up, a->n_experts, up.bytes, up.n_rows, &begin, &n) ||
        !find_experts(a->down, a->n_experts, down.bytes, down.n_rows, &begin_down, &n_down) || begin != begin_down ||
        n != n_down)
        return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    const struct td_cuda_device *d = td_cuda_device_of(s->base.device);
    struct moe_scratch z = lay_out((char *)a->scratch, d, a->n_rows, a->top_k, a->n_experts, a->hidden, a->intermediate);
    enum td_status st = route_rows(s, a, &z, begin, n);
    if (st != TD_OK || n == 0) return st;
    if (d->has_bf16_activations) return td_cuda_moe_bf16_products(s, a, &z, &up, &down, begin);

    if (z.tile_rows == MOE_MANY_TILE) {
        st = td_cuda_moe_many_quantise(s, a, &z, begin, n);
        return st != TD_OK || a->is_routing_only ? st : td_cuda_moe_many(s, a, &z, &up, &down, begin);
    }
    const uint32_t rows = z.n_tiles * z.tile_rows;
    cudaError_t e = launch(quantise<td_bf16>, quant_grid(rows, up.k_tiles), QUANT_THREADS, 0, s->s, (const td_bf16 *)a->x, z.sorted, a->top_k,
                           z.tile_rows, a->hidden, up.k_tiles, z.x, z.sx, z.flags, MOE_FEW_FLAGS);
    if (e != cudaSuccess) return td_cuda_status(e, "quantise");
    if (a->is_routing_only) return TD_OK;
    if (z.tile_rows <= MOE_FEW_TILE) return few_rows(s, a, &z, &up, &down, begin);
    expert_up act = {(__half *)z.u, a->intermediate, a->alpha, a->limit};
    st = product_of(s, &z, &up, &a->gate_up[begin], true, act, "gate_up");
    if (st != TD_OK) return st;
    e = launch(quantise<__half>, quant_grid(rows, down.k_tiles), QUANT_THREADS, 0, s->s, (const __half *)z.u, z.sorted, 0u, z.tile_rows,
               a->intermediate, down.k_tiles, z.u_codes, z.su, z.flags, 0u);
    if (e != cudaSuccess) return td_cuda_status(e, "quantise");
    expert_down out = {a->y, z.sorted.slot_of, a->hidden};
    return product_of(s, &z, &down, &a->down[begin], false, out, "down");
}
