/* Draws that a short list of the likeliest ids decides. The runs' maxima give a logit that at least as many ids reach
 * as are wanted; only runs that reach it are read again, by one thread block a row. */
#include "kernels/cuda/sample_list.cuh"

#define AT_ONCE 7    /* 128 logits each: a run of gpt-oss' vocabulary */
#define GUESS   128u /* runs that are read for a top-p or min-p without a top-k */

struct short_smem : list_smem {
    float maxima[TD_SAMPLE_PARTS];
    uint32_t chosen[TD_SAMPLE_PARTS]; /* runs */
    uint32_t n_chosen;
    float least;
    double sums[WARPS], raws[WARPS], heavy[WARPS];
};

static __device__ double add_up(double v, double *shared)
{
#pragma unroll
    for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    double sum = 0;
    for (uint32_t i = 0; i < WARPS; i++) sum += shared[i];
    return sum;
}

/* All ids from sm.least up into the list. */
static __device__ void list_chosen(short_smem &sm, const float *x, uint32_t n_ids, bool is_aligned)
{
    const uint32_t n = run_length(n_ids);
    for (uint32_t i = threadIdx.x / 32; i < sm.n_chosen; i += 2 * WARPS) { /* two runs at a time are under way */
        const bool is_two = i + WARPS < sm.n_chosen;
        const uint32_t first[2] = {sm.chosen[i] * n, is_two ? sm.chosen[i + WARPS] * n : n_ids};
        for (uint32_t base = 0; base < n; base += 128 * AT_ONCE) {
            float v[2][4 * AT_ONCE];
#pragma unroll
            for (int r = 0; r < 2; r++)
                load_run<AT_ONCE>(v[r], x, first[r] + base, min(first[r] + n, n_ids), is_aligned);
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int j = 0; j < 4 * AT_ONCE; j++) {
                    const float y = tame(v[r][j]);
                    if (y >= sm.least) push(sm, entry_of(key_of(y), id_of(first[r] + base, j)));
                }
        }
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, 1) shorten(const td_sample_args a)
{
    __shared__ short_smem sm;
    let_next();
    before();
    const uint32_t row = a.filtered[blockIdx.x];
    const td_sample_row r = a.rows[row];
    sample_scratch &scratch = scratch_of(a, row);
    const float *x = a.logits + (size_t)row * a.vocab;
    if (threadIdx.x == 0) {
        scratch.status = ROW_OPEN;
        sm.n_list = sm.n_chosen = 0;
    }
    if (is_edited(r)) return;

    const bool is_run = threadIdx.x < TD_SAMPLE_PARTS;
    part p = {-INFINITY, 0, 0, 0};
    if (is_run) {
        p = scratch.parts[threadIdx.x];
        sm.maxima[threadIdx.x] = p.max;
    }
    __syncthreads();
    scaled c = {-INFINITY, fminf(1.44269504f * inverse(r.temperature), FLT_MAX)};
    uint32_t rank = 0; /* of this thread's run */
    for (uint32_t i = 0; i < TD_SAMPLE_PARTS; i += 4) {
        const float4 m = *(const float4 *)&sm.maxima[i];
        c.max = fmaxf(fmaxf(c.max, fmaxf(m.x, m.y)), fmaxf(m.z, m.w));
        rank += (m.x > p.max || (m.x == p.max && i < threadIdx.x)) +
                (m.y > p.max || (m.y == p.max && i + 1 < threadIdx.x)) +
                (m.z > p.max || (m.z == p.max && i + 2 < threadIdx.x)) +
                (m.w > p.max || (m.w == p.max && i + 3 < threadIdx.x));
    }
    if (c.max == -INFINITY) return;
    const double inv = inverse(r.temperature);
    const bool is_empty = p.max == -INFINITY;
    const double mass = is_empty ? 0 : p.sum * exp(((double)p.max - c.max) * inv);
    const double total = add_up(mass, sm.sums);
    const double log_sum = (double)c.max + log(add_up(is_empty ? 0 : p.sum_raw * exp((double)p.max - c.max), sm.raws));

    /* Cuts without a top-k: is the guess likely to do? */
    const bool is_all = is_whole(r), is_open = !is_all && r.top_k == 0;
    bool is_flat = false;
    if (is_open && r.top_p < 1) is_flat = add_up(rank < GUESS ? mass : 0, sm.heavy) < (double)r.top_p * total;
    uint32_t want = r.n_top;
    if (!is_all && !is_flat) want = max(want, r.top_k != 0 ? r.top_k : GUESS);
    uint32_t token = TOO_SHORT;
    if (want != 0) {
        if (want > TD_SAMPLE_PARTS) return;
        if (is_run && rank == want - 1) sm.least = p.max;
        __syncthreads();
        if (sm.least == -INFINITY) return;
        if (is_run && p.max >= sm.least) sm.chosen[atomicAdd(&sm.n_chosen, 1)] = threadIdx.x;
        __syncthreads();
        list_chosen(sm, x, a.n_ids, a.vocab % 4 == 0);
        const uint32_t n = sm.n_list;
        if (n > LIST) return;
        td_sample_top *top = a.top + (size_t)row * TD_SAMPLE_TOPS;
        if (is_all || is_flat) {
            sort_falling(sm, n);
            if (threadIdx.x < r.n_top)
                top[threadIdx.x] = {entry_value(sm.list[threadIdx.x]), entry_id(sm.list[threadIdx.x])};
        } else {
            const wish w = {r.top_k, r.n_top, r.top_p, r.min_p, r.u};
            const bool is_cut = r.top_k != 0 || r.top_p < 1 || weight_of(c, sm.least) < r.min_p;
            if (!is_cut) return;
            token = draw_from_list(sm, c, w, n, (uint64_t)(total * 4294967296.0), top);
            is_flat = token == TOO_SHORT;
        }
    }
    if (is_flat) /* for the kernels that follow */
        for (uint32_t i = threadIdx.x; i < FLAT_BINS; i += THREADS) scratch.masses[i] = 0;
    if (threadIdx.x != 0) return;
    scratch.status = is_flat ? ROW_FLAT : ROW_DONE;
    scratch.n_list = 0;
    scratch.max = c.max;
    scratch.log_sum = log_sum;
    if (!is_all && !is_flat) a.out[row] = {log_sum, tame(x[token]), token};
}

enum td_status td_cuda_sample_short(cudaStream_t s, const struct td_sample_args *a)
{
    return td_cuda_status(launch(shorten, a->n_filtered, THREADS, 0, s, *a), "sample");
}
