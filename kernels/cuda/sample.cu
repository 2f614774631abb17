/* Plain draws from rows of logits: greedy, or by temperature (others: sample_filtered.cu). A row is cut into
 * TD_SAMPLE_PARTS runs of ids, a warp each, which leave their maximum, where it is, and the sums of e^((x - max) /
 * temperature) and e^(x - max); a second kernel adds them up in order, finds the run in which the running sum passes u
 * times the total, and walks that run again. One pass over the logits, and the draw depends on the row alone. */
#include "kernels/cuda/cuda_int.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sample.cuh"

#define WARPS     8
#define IN_FLIGHT 32 /* logits a lane loads at once */

static __device__ __forceinline__ void better(float &max, uint32_t &arg, float x, uint32_t id)
{
    if (x > max || (x == max && id < arg)) {
        max = x;
        arg = id;
    }
}

static __global__ void __launch_bounds__(WARPS * 32) reduce(const td_sample_args a, bool is_listed)
{
    let_next();
    before();
    const uint32_t lane = threadIdx.x % 32, run = blockIdx.x * WARPS + threadIdx.x / 32, n = run_length(a.n_ids);
    const uint32_t first = run * n, end = min(first + n, a.n_ids);
    const uint32_t row = is_listed ? a.filtered[blockIdx.y] : blockIdx.y;
    const float *x = a.logits + (size_t)row * a.vocab;
    if (is_listed ? is_edited(a.rows[row]) : a.rows[row].is_filtered != 0) return;
    const float inv = inverse(a.rows[row].temperature);
    float max = -INFINITY;
    uint32_t arg = 0xffffffffu;
    float sum = 0, raw = 0;
    for (uint32_t base = first; base < end; base += 32 * IN_FLIGHT) { /* once, for vocabularies below 262,144 */
        float v[IN_FLIGHT], old = max;
        load_run<IN_FLIGHT / 4>(v, x, base, end, a.vocab % 4 == 0);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            v[i] = tame(v[i]);
            if (v[i] > max) {
                max = v[i];
                arg = id_of(base, i);
            }
        }
#pragma unroll
        for (int j = 16; j > 0; j /= 2) better(max, arg, __shfl_xor_sync(~0u, max, j), __shfl_xor_sync(~0u, arg, j));
        if (max == -INFINITY) continue;
        if (old != -INFINITY) { /* what an earlier turn summed */
            raw *= exp2_fast((old - max) * 1.44269504f);
            sum *= exp2_fast((old - max) * 1.44269504f * inv);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            float d = (v[i] - max) * 1.44269504f;
            raw += exp2_fast(d);
            sum += exp2_fast(d * inv);
        }
    }
#pragma unroll
    for (int j = 16; j > 0; j /= 2) {
        sum += __shfl_xor_sync(~0u, sum, j);
        raw += __shfl_xor_sync(~0u, raw, j);
    }
    if (lane == 0) scratch_of(a, row).parts[run] = {max, arg, sum, raw};
}

static __global__ void __launch_bounds__(TD_SAMPLE_PARTS) pick(const td_sample_args a, bool is_listed)
{
    __shared__ float maxima[TD_SAMPLE_PARTS / 32];
    __shared__ uint32_t args[TD_SAMPLE_PARTS / 32], chosen;
    __shared__ double sums[TD_SAMPLE_PARTS / 32], raws[TD_SAMPLE_PARTS / 32], target_in;
    let_next();
    before();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = TD_SAMPLE_PARTS / 32;
    const uint32_t row = is_listed ? a.filtered[blockIdx.x] : blockIdx.x;
    const td_sample_row r = a.rows[row];
    if (is_listed ? is_edited(r) || !is_whole(r) : r.is_filtered != 0) return;
    const part p = scratch_of(a, row).parts[threadIdx.x];
    const float *x = a.logits + (size_t)row * a.vocab;
    td_sampled *out = a.out;
    const uint32_t n_ids = a.n_ids;
    float max = p.max;
    uint32_t arg = p.arg;
#pragma unroll
    for (int j = 16; j > 0; j /= 2) better(max, arg, __shfl_xor_sync(~0u, max, j), __shfl_xor_sync(~0u, arg, j));
    if (lane == 0) {
        maxima[warp] = max;
        args[warp] = arg;
    }
    __syncthreads();
    for (uint32_t i = 0; i < n_warps; i++) better(max, arg, maxima[i], args[i]);
    if (max == -INFINITY) {
        if (threadIdx.x == 0) out[row] = {0, 0, 0xffffffffu};
        return;
    }
    /* Sums in double: this run's, and of all runs up to it. */
    const double scale = inverse(r.temperature);
    bool is_empty = p.max == -INFINITY;
    double mine = is_empty ? 0 : p.sum * exp(((double)p.max - max) * scale);
    double raw = is_empty ? 0 : p.sum_raw * exp((double)p.max - max), up_to = mine;
#pragma unroll
    for (int j = 1; j < 32; j *= 2) {
        double other = __shfl_up_sync(~0u, up_to, j);
        if (lane >= (uint32_t)j) up_to += other;
    }
#pragma unroll
    for (int j = 16; j > 0; j /= 2) raw += __shfl_xor_sync(~0u, raw, j);
    if (lane == 31) sums[warp] = up_to;
    if (lane == 0) raws[warp] = raw;
    if (threadIdx.x == 0) chosen = 0xffffffffu;
    __syncthreads();
    double total = 0, all_raw = 0;
    for (uint32_t i = 0; i < n_warps; i++) {
        if (i < warp) up_to += sums[i];
        total += sums[i];
        all_raw += raws[i];
    }
    const double target = r.u * total;
    if (mine > 0 && up_to > target) atomicMin(&chosen, threadIdx.x);
    __syncthreads();
    const uint32_t run = chosen == 0xffffffffu ? arg / run_length(n_ids) : chosen;
    if (threadIdx.x == run) target_in = target - (up_to - mine); /* what is left to pass within the run */
    __syncthreads();
    if (r.temperature == 0) {
        if (threadIdx.x == 0) out[row] = {(double)max + log(all_raw), tame(x[arg]), arg};
        return;
    }

    /* The run again, TD_SAMPLE_PARTS x 4 ids at a time, in rising order from thread to thread. */
    const uint32_t n = run_length(n_ids), first = run * n, end = min(first + n, n_ids);
    double before_turn = 0;
    uint32_t last = arg;
    if (threadIdx.x == 0) chosen = 0xffffffffu;
    for (uint32_t base = first; base < end; base += 4 * TD_SAMPLE_PARTS) {
        double w[4], seen = 0;
        uint32_t id = base + threadIdx.x * 4, mine_last = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = id + i < end ? exp(((double)tame(x[id + i]) - max) * scale) : 0;
            seen += w[i];
            if (w[i] > 0) mine_last = id + i + 1;
        }
        double through = seen;
#pragma unroll
        for (int j = 1; j < 32; j *= 2) {
            double other = __shfl_up_sync(~0u, through, j);
            if (lane >= (uint32_t)j) through += other;
        }
        mine_last = __reduce_max_sync(~0u, mine_last);
        __syncthreads();
        if (lane == 31) sums[warp] = through;
        if (lane == 0) args[warp] = mine_last;
        __syncthreads();
        double of_turn = 0, at = before_turn + through - seen;
        for (uint32_t i = 0; i < n_warps; i++) {
            if (i < warp) at += sums[i];
            of_turn += sums[i];
            if (args[i] != 0) last = args[i] - 1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            at += w[i];
            if (w[i] > 0 && at > target_in) {
                atomicMin(&chosen, id + i);
                break;
            }
        }
        before_turn += of_turn;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint32_t token = chosen != 0xffffffffu ? chosen : last; /* rounding: the run's own sum was a little less */
    out[row] = {(double)max + log(all_raw), tame(x[token]), token};
}

/* Plain rows, or those that are filtered but draw from all ids. */
static enum td_status draw_whole(cudaStream_t s, const struct td_sample_args *a, bool is_listed)
{
    const uint32_t n = is_listed ? a->n_filtered : a->n_rows;
    cudaError_t e = launch(reduce, dim3(TD_SAMPLE_PARTS / WARPS, n), WARPS * 32, 0, s, *a, is_listed);
    if (e == cudaSuccess) e = launch(pick, n, TD_SAMPLE_PARTS, 0, s, *a, is_listed);
    return td_cuda_status(e, "sample");
}

enum td_status td_cuda_sample(struct td_stream *base, const struct td_sample_args *a)
{
    cudaStream_t s = td_cuda_stream_of(base)->s;
    enum td_status st = TD_OK;
    if (a->n_filtered < a->n_rows) st = draw_whole(s, a, false);
    if (st != TD_OK || a->n_filtered == 0) return st;
    st = draw_whole(s, a, true);
    if (st == TD_OK) st = td_cuda_sample_short(s, a);
    if (st == TD_OK) st = td_cuda_sample_flat(s, a);
    if (st == TD_OK) st = td_cuda_sample_filtered(s, a);
    return st;
}
