/* Experts in FP8 or MXFP4 multiplied by bf16 activations: exact in the weights, and in the activations but for their bf16. The
 * accuracy that FP8 activations are measured by; right first, fast second.
 *
 * Y^T = W X^T as in moe_experts.cuh: 128 rows of W by N tokens of one expert, a producer thread that streams contiguous tiles
 * through a ring of stages of 128 of k, two warpgroups with 64 rows each. W comes as E4M3, from shared memory or widened from
 * MXFP4, and becomes bf16 in registers, exactly: the byte's exponent and mantissa moved to a bf16's are the value times 2^-120.
 * The sum over a stage times the tile's scale is added in f32 to what began as the bias.
 *
 * A lane has four neighbouring bytes of W's row where the tensor core wants two and two that lie 8 further, so X lies permuted
 * inside every 16 of k: bf16_at. */
#include "kernels/cuda/moe_experts.cuh"

#define WIDE_CONSUMERS 256
#define WIDE_THREADS   (WIDE_CONSUMERS + 32)
#define WIDE_STAGE_MAX (200 * 1024)
#define WIDE_GROUP     8u /* token tiles that share row tiles */

struct wide_gemm {
    const uint8_t *w; /* of the first expert; expert e's lies e * w_bytes further */
    size_t w_bytes, scales_at;
    const float *bias; /* [E][n_rows] in packed order; NULL: none */
    uint32_t n_rows, row_tiles, k_tiles;
    const uint8_t *x; /* [tile][2 k_tiles][N][64] bf16, as bf16_at */
    struct sorted sorted;
    /* What becomes of the sums: the activation, as x of the next product; or y. */
    uint8_t *u;
    uint32_t n_units, u_k_tiles;
    float alpha, limit;
    float *y; /* [slot][n_cols] */
    uint32_t n_cols;
};

/* A byte of a tile's 64 columns: rows of 128 bytes, their pieces of 16 swizzled; in every 16 columns 4 t + j is at
 * 2 t + j % 2 + (j / 2) * 8. Columns 2 i and 2 i + 1 stay neighbours. */
static __device__ __forceinline__ uint32_t bf16_at(uint32_t r, uint32_t col)
{
    const uint32_t j = col % 4, at = (col / 16 * 16 + col % 16 / 4 * 2 + j % 2 + j / 2 * 8) * 2;
    return r * 128 + ((at / 16) ^ (r % 8)) * 16 + at % 16;
}

/* Two E4M3, bytes 2 h and 2 h + 1 of a word, to bf16. */
static __device__ __forceinline__ uint32_t widen_two(uint32_t word, int h)
{
    /* Byte b's bits to 15 (sign) and 10 .. 4. */
    const uint32_t v = permute_bytes(word, 0, h == 0 ? 0x1404 : 0x3424);
    const uint32_t bits = (v & 0x80008000u) | (v & 0x7f007f00u) >> 4;
    const __nv_bfloat162 up = __floats2bfloat162_rn(0x1p120f, 0x1p120f);
    const __nv_bfloat162 out = __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), up);
    return *reinterpret_cast<const uint32_t *>(&out);
}

static __device__ __forceinline__ void bf16_rs(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool zero)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.eq.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}"
                 ", {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)zero));
}

static __device__ __forceinline__ void bf16_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool zero)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.eq.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19,"
                 " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
                   "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                   "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
                   "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)zero));
}

/* ---- rows in the order of their experts ---- */

/* Block: a padded row. Beyond the row's width, zeros; u's columns beyond its own become zero here, too. */
static __global__ void __launch_bounds__(256)
    gather_rows(const td_bf16 *x, const struct sorted sorted, uint32_t top_k, uint32_t tile_rows, uint32_t width,
                uint32_t k_tiles, uint8_t *to, uint32_t n_units, uint32_t u_k_tiles, uint8_t *u)
{
    before();
    let_next();
    const uint32_t tile = blockIdx.x / tile_rows, r = blockIdx.x % tile_rows;
    if (tile >= *sorted.n_tiles || r >= sorted.tiles[tile].n) return;
    const uint32_t *from = (const uint32_t *)(x + (size_t)(sorted.slot_of[blockIdx.x] / top_k) * width);
    const size_t first = (size_t)tile * 2 * tile_rows * 128;
    for (uint32_t i = threadIdx.x; i < k_tiles * 64; i += blockDim.x) {
        uint8_t *chunk = to + first * k_tiles + (size_t)(i / 32) * tile_rows * 128;
        *(uint32_t *)(chunk + bf16_at(r, i % 32 * 2)) = 2 * i < width ? from[i] : 0;
    }
    for (uint32_t i = n_units / 2 + threadIdx.x; i < u_k_tiles * 64; i += blockDim.x)
        *(uint32_t *)(u + first * u_k_tiles + (size_t)(i / 32) * tile_rows * 128 + bf16_at(r, i % 32 * 2)) = 0;
}

/* ---- the products ---- */

template <int N, td_expert_form FORM> struct wide_ring {
    static constexpr int w_bytes = FORM == TD_EXPERTS_FP8 ? TD_XT * TD_XT_FP8 : TD_XT / 16 * TD_XT_MXFP4;
    static constexpr int x_bytes = N * 256, stages = WIDE_STAGE_MAX / (w_bytes + x_bytes);
    static constexpr size_t w_at = (size_t)stages * x_bytes, bars_at = w_at + (size_t)stages * w_bytes,
                            tables_at = bars_at + 16 * stages, bytes = tables_at + 32 * 8 + 1024;
};

template <int N, td_expert_form FORM>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) wide_experts(const wide_gemm g)
{
    using ring = wide_ring<N, FORM>;
    constexpr int STAGES = ring::stages, R = N / 2;
    extern __shared__ uint8_t raw[];
    uint8_t *base = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~(uintptr_t)1023);
    uint64_t *full = reinterpret_cast<uint64_t *>(base + ring::bars_at), *empty = full + STAGES;
    uint2 *tables = reinterpret_cast<uint2 *>(base + ring::tables_at);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], WIDE_CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    if (FORM == TD_EXPERTS_MXFP4 && threadIdx.x < 32) {
        uint64_t t = threadIdx.x < TD_X_TABLES ? td_expert_table_bytes(threadIdx.x) : 0;
        tables[threadIdx.x] = make_uint2((uint32_t)t, (uint32_t)(t >> 32));
    }
    __syncthreads();
    before();
    let_next();

    const uint32_t n_tiles = *g.sorted.n_tiles, n_items = n_tiles * g.row_tiles;
    uint32_t tile, row_tile;
    auto open = [&](uint32_t item) {
        const uint32_t first = item / (WIDE_GROUP * g.row_tiles) * WIDE_GROUP, n = min(n_tiles - first, WIDE_GROUP);
        item -= first * g.row_tiles;
        tile = first + item % n;
        row_tile = item / n;
    };
    if (threadIdx.x >= WIDE_CONSUMERS) {
        if (threadIdx.x != WIDE_CONSUMERS) return;
        uint32_t n = 0;
        for (uint32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
            open(item);
            const uint32_t bytes = (uint32_t)td_expert_rows_bytes(FORM, min(g.n_rows - row_tile * TD_XT, TD_XT));
            const uint8_t *w = g.w + g.sorted.tiles[tile].expert * g.w_bytes + (size_t)row_tile * g.k_tiles * ring::w_bytes,
                          *x = g.x + (size_t)tile * g.k_tiles * ring::x_bytes;
            for (uint32_t k = 0; k < g.k_tiles; k++, n++) {
                const uint32_t st = n % STAGES;
                barrier_wait(&empty[st], (n / STAGES & 1) ^ 1);
                barrier_expect(&full[st], bytes + ring::x_bytes);
                copy_bytes(base + ring::w_at + (size_t)st * ring::w_bytes, w + (size_t)k * bytes, bytes, &full[st]);
                copy_bytes(base + (size_t)st * ring::x_bytes, x + (size_t)k * ring::x_bytes, ring::x_bytes, &full[st]);
            }
        }
        return;
    }

    const uint32_t wg = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gr = lane / 4, t = lane % 4;
    uint32_t n = 0;
    for (uint32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
        open(item);
        const struct slot_tile slots = g.sorted.tiles[tile];
        const uint32_t w_row = row_tile * TD_XT + warp * 16 + gr; /* and + 8 */
        const bool is_idle = row_tile * TD_XT + wg * 64 >= g.n_rows;
        const float *scales =
            reinterpret_cast<const float *>(g.w + slots.expert * g.w_bytes + g.scales_at) + (size_t)row_tile * g.k_tiles;
        float acc[R], part[R], lo = 0, hi = 0;
        if (g.bias != nullptr && w_row < g.n_rows) {
            lo = g.bias[(size_t)slots.expert * g.n_rows + w_row];
            hi = g.bias[(size_t)slots.expert * g.n_rows + w_row + 8];
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            acc[i] = i % 4 < 2 ? lo : hi;
            part[i] = 0;
        }
        for (uint32_t k = 0; k < g.k_tiles; k++, n++) {
            const uint32_t st = n % STAGES;
            barrier_wait(&full[st], n / STAGES & 1);
            if (!is_idle) {
                const uint32_t w = smem_addr(base + ring::w_at) + st * ring::w_bytes;
                uint32_t a[4][2][4]; /* of a step of 32: both halves */
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint32_t codes[2][2]; /* row g, g + 8; columns 4 t, 16 + 4 t */
                    if constexpr (FORM == TD_EXPERTS_FP8) {
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            codes[i / 2][i % 2] =
                                load_word(w + td_expert_fp8_at(warp * 16 + gr + i / 2 * 8, 32 * s + i % 2 * 16 + t * 4));
                    } else {
                        const uint32_t rows = w + warp * TD_XT_MXFP4;
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const uint32_t word = load_word(rows + i * 512 + lane * 16 + s * 4),
                                           which = load_word(rows + 1024 + (gr + 8 * i) * 4) >> 8 * s & 31;
                            widen_word(word, tables[which], &codes[i][0], &codes[i][1]);
                        }
                    }
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int i = 0; i < 4; i++) a[s][h][i] = widen_two(codes[i % 2][h], i / 2);
                }
                const uint64_t x = tile_desc(base + (size_t)st * ring::x_bytes);
                keep(part);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        bf16_rs(part, a[s][h], x + s / 2 * (N * 128 >> 4) + s % 2 * 4 + h * 2, s == 0 && h == 0);
                wgmma_commit();
                wgmma_wait<0>();
                keep(part);
                const float scale = scales[k];
#pragma unroll
                for (int i = 0; i < R; i++) acc[i] += part[i] * scale;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&empty[st]);
        }
        if (is_idle) continue;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint32_t col = i * 8 + t * 2 + c;
                const float first = acc[4 * i + c], second = acc[4 * i + 2 + c];
                if (col >= slots.n) continue;
                if (g.u != nullptr) {
                    const uint32_t unit = w_row / 16 * 8 + w_row % 8;
                    uint8_t *to = g.u + ((size_t)tile * 2 * g.u_k_tiles + unit / 64) * N * 128;
                    if (unit < g.n_units)
                        *(td_bf16 *)(to + bf16_at(col, unit % 64)) =
                            __float2bfloat16_rn(activate(first, second, g.alpha, g.limit));
                } else {
                    float *to = g.y + (size_t)g.sorted.slot_of[tile * N + col] * g.n_cols;
                    if (w_row < g.n_cols) to[w_row] = first;
                    if (w_row + 8 < g.n_cols) to[w_row + 8] = second;
                }
            }
    }
}

template <int N, td_expert_form FORM> static cudaError_t wide_start(const struct td_cuda_stream *s, const wide_gemm &g, uint32_t n)
{
    auto kernel = wide_experts<N, FORM>;
    const int bytes = (int)wide_ring<N, FORM>::bytes;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
    return launch(kernel, td_min_u32(n * g.row_tiles, (uint32_t)s->n_sms), WIDE_THREADS, bytes, s->s, g);
}

static enum td_status product_of(const struct td_cuda_stream *s, const struct moe_scratch *z, const struct td_expert_layout *l,
                                 const struct td_weight *first, wide_gemm g, const char *what)
{
    g.w = (const uint8_t *)first->data;
    g.w_bytes = l->bytes;
    g.scales_at = l->scales_at;
    g.bias = first->bias;
    g.n_rows = l->n_rows;
    g.row_tiles = l->row_tiles;
    g.k_tiles = l->k_tiles;
    g.sorted = z->sorted;
    const bool is_fp8 = l->form == TD_EXPERTS_FP8;
    cudaError_t e = z->tile_rows == MOE_BF16_FEW
                        ? (is_fp8 ? wide_start<MOE_BF16_FEW, TD_EXPERTS_FP8> : wide_start<MOE_BF16_FEW, TD_EXPERTS_MXFP4>)(
                              s, g, z->n_tiles)
                        : (is_fp8 ? wide_start<MOE_BF16_MANY, TD_EXPERTS_FP8> : wide_start<MOE_BF16_MANY, TD_EXPERTS_MXFP4>)(
                              s, g, z->n_tiles);
    return td_cuda_status(e, what);
}

enum td_status td_cuda_moe_bf16_products(const struct td_cuda_stream *s, const struct td_moe_args *a, const struct moe_scratch *z,
                                         const struct td_expert_layout *up, const struct td_expert_layout *down,
                                         uint32_t begin)
{
    cudaError_t e = launch(gather_rows, z->n_tiles * z->tile_rows, 256, 0, s->s, (const td_bf16 *)a->x, z->sorted, a->top_k,
                           z->tile_rows, a->hidden, up->k_tiles, z->x, a->intermediate, down->k_tiles, z->u_codes);
    if (e != cudaSuccess || a->is_routing_only) return td_cuda_status(e, "gather");
    wide_gemm g = {};
    g.x = z->x;
    g.u = z->u_codes;
    g.n_units = a->intermediate;
    g.u_k_tiles = down->k_tiles;
    g.alpha = a->alpha;
    g.limit = a->limit;
    enum td_status st = product_of(s, z, up, &a->gate_up[begin], g, "gate_up");
    if (st != TD_OK) return st;
    g.x = z->u_codes;
    g.u = nullptr;
    g.y = a->y;
    g.n_cols = a->hidden;
    struct td_weight first = a->down[begin];
    first.bias = NULL; /* moe_add_norm's */
    return product_of(s, z, down, &first, g, "down");
}
