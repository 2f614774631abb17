/* The routed MLP with bf16 weights: router, top k, rows sorted by expert, two grouped products with the activation in the
 * first one's epilogue. All counts stay on the device, so a graph holds for any routing. */
#include "kernels/cuda/moe_route.cuh"
#include "kernels/cuda/product.cuh"

/* ---- scratch ---- */

struct scratch {
    float *logits;      /* [T, E] */
    uint32_t *order;    /* [T k] slots, sorted by expert */
    uint32_t *begin;    /* [E + 1] */
    uint32_t *active;   /* [E + 1] */
    gemm_tile *tiles;   /* [T k / 128 + E] */
    td_bf16 *x, *u;     /* [T k, H] and [T k, I], sorted */
    size_t bytes;
};

static void *take(char *base, size_t *at, size_t bytes)
{
    void *p = base + *at;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

static uint32_t n_tiles_max(uint32_t slots, uint32_t n_experts) { return slots / GEMM_BM + n_experts; }

static struct scratch lay_out(char *base, uint32_t n_rows, uint32_t top_k, uint32_t n_experts, uint32_t hidden,
                              uint32_t intermediate)
{
    struct scratch z;
    size_t at = 0, slots = (size_t)n_rows * top_k;
    z.logits = (float *)take(base, &at, (size_t)n_rows * n_experts * sizeof(float));
    z.order = (uint32_t *)take(base, &at, slots * sizeof(uint32_t));
    z.begin = (uint32_t *)take(base, &at, (n_experts + 1) * sizeof(uint32_t));
    z.active = (uint32_t *)take(base, &at, (n_experts + 1) * sizeof(uint32_t));
    z.tiles = (gemm_tile *)take(base, &at, n_tiles_max((uint32_t)slots, n_experts) * sizeof(gemm_tile));
    z.x = (td_bf16 *)take(base, &at, slots * hidden * sizeof(td_bf16));
    z.u = (td_bf16 *)take(base, &at, slots * intermediate * sizeof(td_bf16));
    z.bytes = at;
    return z;
}

size_t td_cuda_moe_scratch_bytes(const struct td_scratch_shape *s)
{
    return lay_out(NULL, s->n_rows, s->top_k, s->n_experts, s->hidden, s->intermediate).bytes;
}

/* ---- routing ---- */

/* Block e writes what concerns expert e: where its rows begin, its slots in rising order, its tiles. Every block counts all
 * slots itself: cheaper than another launch. Experts count from e_begin, this rank's first; others' slots are left out. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_slots(const uint32_t *ids, uint32_t n_slots, uint32_t e_begin, uint32_t n_experts, uint32_t *order, uint32_t *begin,
               uint32_t *active, gemm_tile *tiles, uint32_t n_tiles)
{
    __shared__ uint32_t count[MAX_EXPERTS], warp_count[SORT_THREADS / 32];
    const uint32_t e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next();
    before();
    for (uint32_t i = threadIdx.x; i < n_experts; i += SORT_THREADS) count[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n_slots; i += SORT_THREADS) {
        uint32_t id = ids[i] - e_begin;
        if (id < n_experts) atomicAdd(&count[id], 1);
    }
    __syncthreads();
    uint32_t first = 0, tile = 0, n_before = 0;
    for (uint32_t i = 0; i < e; i++) {
        first += count[i];
        tile += (count[i] + GEMM_BM - 1) / GEMM_BM;
        n_before += count[i] != 0;
    }
    const uint32_t n = count[e];
    if (threadIdx.x == 0) {
        begin[e] = first;
        if (n != 0) active[n_before] = e;
        for (uint32_t i = 0; i < n; i += GEMM_BM) tiles[tile++] = {e, first + i, min(n - i, (uint32_t)GEMM_BM)};
        if (e + 1 == n_experts) {
            begin[n_experts] = first + n;
            n_before += n != 0;
            for (uint32_t i = n_before; i < n_experts + 1; i++) active[i] = n_experts;
            for (; tile < n_tiles; tile++) tiles[tile] = {0, 0, 0};
        }
    }
    if (n == 0) return;
    for (uint32_t base = 0; base < n_slots; base += SORT_THREADS) {
        uint32_t i = base + threadIdx.x;
        bool is_mine = i < n_slots && ids[i] - e_begin == e;
        uint32_t votes = __ballot_sync(~0u, is_mine);
        if (lane == 0) warp_count[warp] = __popc(votes);
        __syncthreads();
        uint32_t before = 0, all = 0;
        for (uint32_t j = 0; j < SORT_THREADS / 32; j++) {
            if (j < warp) before += warp_count[j];
            all += warp_count[j];
        }
        if (is_mine) order[first + before + __popc(votes & ((1u << lane) - 1))] = i;
        first += all;
        __syncthreads();
    }
}

static __global__ void permute(const td_bf16 *x, const uint32_t *order, const uint32_t *n, td_bf16 *to, uint32_t top_k,
                               uint32_t n_words)
{
    let_next();
    before();
    if (blockIdx.x >= *n) return;
    const uint4 *from = (const uint4 *)x + (size_t)(order[blockIdx.x] / top_k) * n_words;
    uint4 *row = (uint4 *)to + (size_t)blockIdx.x * n_words;
    for (uint32_t i = threadIdx.x; i < n_words; i += blockDim.x) row[i] = from[i];
}

/* ---- the op ---- */

/* This rank's experts: [begin, begin + n). Their matrices, and the biases of those, must lie one after another. */
struct experts {
    uint32_t begin, n;
};

static bool find_experts(const struct td_weight *w, uint32_t n_experts, struct experts *out)
{
    uint32_t b = 0, e;
    while (b < n_experts && w[b].data == NULL) b++;
    for (e = b; e < n_experts && w[e].data != NULL; e++) {
        size_t step = (size_t)(e - b) * w[b].n_out;
        if ((const td_bf16 *)w[e].data != (const td_bf16 *)w[b].data + step * w[b].n_in) return false;
        if (w[b].bias != NULL && w[e].bias != w[b].bias + step) return false;
    }
    *out = {b, e - b};
    for (; e < n_experts; e++)
        if (w[e].data != NULL) return false;
    return true;
}

static bool is_skinny(const struct td_cuda_stream *s, const struct td_moe_args *a)
{
    return td_product_is_skinny(a->n_rows, true, 2, s->is_batch_invariant);
}

template <class Epilogue>
static enum td_status grouped(const struct td_cuda_stream *s, const struct td_moe_args *a, const struct scratch *z,
                              const td_bf16 *x, const struct td_weight *first, uint32_t n_experts,
                              const Epilogue &store, bool is_up, const char *what)
{
    uint32_t slots = a->n_rows * a->top_k;
    if (is_skinny(s, a)) {
        skinny_shape g = {};
        g.x = is_up ? (const td_bf16 *)a->x : x;
        g.w = (const td_bf16 *)first->data;
        g.k = first->n_in;
        g.n_cols = g.w_rows = first->n_out;
        g.begin = z->begin;
        g.active = z->active;
        g.n_experts = n_experts;
        if (is_up) g.from = z->order;
        g.from_div = a->top_k;
        return skinny_run(s, g, min(slots, n_experts), store, what);
    }
    gemm_shape g = {};
    g.n_rows = slots;
    g.k = first->n_in;
    g.n_cols = g.w_rows = first->n_out;
    g.tiles = z->tiles;
    g.n_row_tiles = n_tiles_max(slots, n_experts);
    return gemm_run(s, x, slots, first->data, (uint64_t)n_experts * first->n_out, g, store, what);
}

enum td_status td_cuda_moe(struct td_stream *base, const struct td_moe_args *a)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    enum td_expert_form form = td_cuda_device_of(base->device)->experts;
    if (form != TD_EXPERTS_BF16) return td_cuda_moe_fp8(s, form, a);
    uint32_t slots = a->n_rows * a->top_k;
    struct experts mine, downs;
    if (a->n_experts > MAX_EXPERTS || a->top_k > TD_MAX_TOKEN_EXPERTS || a->top_k > a->n_experts || a->hidden % 8 != 0 ||
        a->intermediate % 8 != 0)
        return TD_E_UNSUPPORTED;
    if (!find_experts(a->gate_up, a->n_experts, &mine) || !find_experts(a->down, a->n_experts, &downs) ||
        mine.begin != downs.begin || mine.n != downs.n)
        return TD_E_UNSUPPORTED;
    if (a->n_rows == 0) return TD_OK;
    struct scratch z = lay_out((char *)a->scratch, a->n_rows, a->top_k, a->n_experts, a->hidden, a->intermediate);

    store_f32 logits = {z.logits, nullptr, a->n_experts};
    enum td_status st = product(s, a->x, &a->router, 0, a->n_experts, a->n_rows, logits, "router");
    if (st != TD_OK) return st;
    cudaError_t e = launch_route(s->s, z.logits, a->router.bias, a->n_rows, a->n_experts, a->top_k, a->ids, a->weights);
    if (e == cudaSuccess && mine.n < a->n_experts)
        e = launch(fill_absent, slots, 128, 0, s->s, a->ids, a->y, a->hidden, mine.begin, mine.n);
    if (e != cudaSuccess || mine.n == 0) return td_cuda_status(e, "routing");
    e = launch(sort_slots, mine.n, SORT_THREADS, 0, s->s, a->ids, slots, mine.begin, mine.n, z.order, z.begin, z.active,
               z.tiles, n_tiles_max(slots, mine.n));
    if (e == cudaSuccess && !is_skinny(s, a))
        e = launch(permute, slots, 128, 0, s->s, (const td_bf16 *)a->x, z.order, z.begin + mine.n, z.x, a->top_k,
                   a->hidden / 8);
    if (e != cudaSuccess || a->is_routing_only) return td_cuda_status(e, "routing");

    const struct td_weight *up = &a->gate_up[mine.begin], *down = &a->down[mine.begin];
    store_swiglu act = {z.u, up->bias, 2 * a->intermediate, a->alpha, a->limit};
    st = grouped(s, a, &z, z.x, up, mine.n, act, true, "gate_up");
    if (st != TD_OK) return st;
    store_f32 out = {a->y, z.order, a->hidden};
    return grouped(s, a, &z, z.u, down, mine.n, out, false, "down");
}
