/* Top-p over logits so flat that thousands of ids are kept. Three kernels, each reading a row at most once with many
 * thread blocks:
 *
 *   weigh    a histogram of the weights, 64 bins an octave from the maximum down
 *   collect  the bin in which the kept share passes top_p; its ids into a list, and each run's weights before the bin
 *   finish   one block: the cut inside the bin, the run in which the draw falls, and the id in that run
 *
 * An id's weight counts in multiples of 2^-14 of its bin's upper edge, a thirty-two-bit word a bin: sums do not depend
 * on their order. What lies 32 octaves down counts as nothing. */
#include "kernels/cuda/sample_list.cuh"

#define CHUNKS         8u /* thread blocks a row */
#define AT_ONCE        7  /* 128 logits each: a run of gpt-oss' vocabulary */
#define BINS_OCTAVE    64
#define UNIT           16384.0f /* of a weight at its bin's edge */
#define BINS_OF_THREAD (FLAT_BINS / THREADS)
static_assert(TD_SAMPLE_PARTS % CHUNKS == 0 && FLAT_BINS == 32 * BINS_OCTAVE && FLAT_LIST == LIST);

struct flat_row {
    td_sample_row r;
    sample_scratch &scratch;
    const float *x;
    scaled c;
    uint32_t row;
};

static __device__ __forceinline__ flat_row flat_row_of(const td_sample_args &a, uint32_t i)
{
    const uint32_t row = a.filtered[i];
    sample_scratch &s = scratch_of(a, row);
    const td_sample_row r = a.rows[row];
    return {r, s, a.logits + (size_t)row * a.vocab, {s.max, fminf(1.44269504f * inverse(r.temperature), FLT_MAX)}, row};
}

/* How many 64ths of an octave below the maximum: the bin, FLAT_BINS and more: none. -inf: none. */
static __device__ __forceinline__ float depth_of(const scaled &c, float x)
{
    return (c.max - tame(x)) * c.scale * BINS_OCTAVE;
}
static __device__ __forceinline__ uint32_t mass_of(float depth, uint32_t bin)
{
    return __float2uint_rn(exp2_fast(((float)bin - depth) * (1.0f / BINS_OCTAVE)) * UNIT);
}

static __device__ void weigh_row(const td_sample_args &a, const flat_row &f, uint32_t *bins)
{
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < FLAT_BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const uint32_t n = run_length(a.n_ids) * (TD_SAMPLE_PARTS / CHUNKS), first = min(blockIdx.x * n, a.n_ids),
                   n_here = min(n, a.n_ids - first);
    const float *x = f.x + first;
    auto add = [&](float v) {
        const float d = depth_of(f.c, v);
        if (!(d < (float)FLAT_BINS)) return;
        const uint32_t b = (uint32_t)d;
        atomicAdd(&bins[b], mass_of(d, b));
    };
    const uint32_t n4 = a.vocab % 4 == 0 && n % 4 == 0 ? n_here / 4 : 0;
    for (uint32_t i = threadIdx.x; i < n4; i += 4 * THREADS) {
        float4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = i + j * THREADS < n4 ? ((const float4 *)x)[i + j * THREADS]
                                        : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
#pragma unroll
        for (int j = 0; j < 4; j++) add(v[j].x), add(v[j].y), add(v[j].z), add(v[j].w);
    }
    for (uint32_t i = n4 * 4 + threadIdx.x; i < n_here; i += THREADS) add(x[i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < FLAT_BINS; i += THREADS)
        if (bins[i] != 0) atomicAdd(&f.scratch.masses[i], bins[i]);
}

static __global__ void __launch_bounds__(THREADS, 3) weigh(const td_sample_args a)
{
    __shared__ uint32_t bins[FLAT_BINS];
    let_next();
    before();
    const flat_row f = flat_row_of(a, blockIdx.y);
    if (f.scratch.status == ROW_FLAT) weigh_row(a, f, bins);
}

struct flat_cut {
    uint32_t bin;
    double left; /* mass it needs of the bin, in its units */
};

/* The same in every block of a row. */
static __device__ flat_cut cut_of(list_smem &sm, const flat_row &f)
{
    __shared__ flat_cut cut;
    const uint32_t first = threadIdx.x * BINS_OF_THREAD;
    double mass[BINS_OF_THREAD], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < BINS_OF_THREAD; i++) {
        mass[i] = (double)__ldcg(&f.scratch.masses[first + i]) * exp2f(-(float)(first + i) / BINS_OCTAVE);
        sum += mass[i];
    }
    uint64_t total_bits;
    double at =
        __longlong_as_double((long long)scan_block<dsum_of>(sm, (uint64_t)__double_as_longlong(sum), total_bits));
    const double total = __longlong_as_double((long long)total_bits), want = (double)f.r.top_p * total;
    if (threadIdx.x == 0) sm.n_found = 0xffffffffu;
    __syncthreads();
    uint32_t mine = 0xffffffffu;
    double before_mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < BINS_OF_THREAD; i++) {
        if (mine == 0xffffffffu && mass[i] > 0 && at + mass[i] >= want) {
            mine = first + i;
            before_mine = at;
        }
        at += mass[i];
    }
    if (mine != 0xffffffffu) atomicMin(&sm.n_found, mine);
    __syncthreads();
    if (mine == sm.n_found && mine != 0xffffffffu)
        cut = {mine, (want - before_mine) * exp2f((float)mine / BINS_OCTAVE)};
    if (sm.n_found == 0xffffffffu && threadIdx.x == 0) cut = {FLAT_BINS, 0}; /* rounding: all are kept */
    __syncthreads();
    return cut;
}

static __device__ void collect_row(const td_sample_args &a, const flat_row &f, list_smem &sm)
{
    __shared__ uint32_t place;
    __syncthreads();
    if (threadIdx.x == 0) sm.n_list = 0;
    const flat_cut cut = cut_of(sm, f);
    const uint32_t lane = threadIdx.x % 32, n = run_length(a.n_ids), runs = TD_SAMPLE_PARTS / CHUNKS;
    for (uint32_t run = blockIdx.x * runs + threadIdx.x / 32; run < (blockIdx.x + 1) * runs; run += WARPS) {
        const uint32_t begin = min(run * n, a.n_ids), end = min(begin + n, a.n_ids);
        float sum = 0;
        for (uint32_t base = begin; base < end; base += 128 * AT_ONCE) {
            float v[4 * AT_ONCE];
            load_run<AT_ONCE>(v, f.x, base, end, a.vocab % 4 == 0);
#pragma unroll
            for (int j = 0; j < 4 * AT_ONCE; j++) {
                const float d = depth_of(f.c, v[j]);
                if (!(d < (float)FLAT_BINS)) continue;
                const uint32_t b = (uint32_t)d;
                const float w = weight_of(f.c, tame(v[j]));
                if (b < cut.bin && w >= f.r.min_p) sum += w;
                if (b == cut.bin) push(sm, entry_of(key_of(tame(v[j])), id_of(base, j)));
            }
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (lane == 0) f.scratch.sums[run] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        place = atomicAdd(&f.scratch.n_list, sm.n_list);
        if (blockIdx.x == 0) f.scratch.bin = cut.bin, f.scratch.left = cut.left;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < min(sm.n_list, LIST) && place + i < FLAT_LIST; i += THREADS)
        f.scratch.list[place + i] = sm.list[i];
}

static __global__ void __launch_bounds__(THREADS, 2) collect(const td_sample_args a)
{
    __shared__ list_smem sm;
    let_next();
    before();
    const flat_row f = flat_row_of(a, blockIdx.y);
    if (f.scratch.status == ROW_FLAT) collect_row(a, f, sm);
}

static __global__ void __launch_bounds__(THREADS, 1) finish(const td_sample_args a)
{
    __shared__ list_smem sm;
    __shared__ unsigned long long added[TD_SAMPLE_PARTS]; /* weights of the list's kept ids, by run, times 2^32 */
    __shared__ uint32_t run_of_draw, last_of_draw;
    __shared__ double target_in;
    let_next();
    before();
    const flat_row f = flat_row_of(a, blockIdx.x);
    if (f.scratch.status != ROW_FLAT) return;
    const uint32_t n = f.scratch.n_list, bin = f.scratch.bin, length = run_length(a.n_ids);
    const double left = f.scratch.left;
    if (n > FLAT_LIST) { /* ties without end: for the kernel that takes any row */
        if (threadIdx.x == 0) f.scratch.status = ROW_OPEN;
        return;
    }
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) sm.list[i] = f.scratch.list[i];
    if (threadIdx.x < TD_SAMPLE_PARTS) added[threadIdx.x] = 0;
    if (threadIdx.x == 0) sm.n_in = n, run_of_draw = 0xffffffffu, last_of_draw = 0;
    __syncthreads();
    sort_falling(sm, n);

    /* The cut. */
    uint32_t masses[2];
    for (int j = 0; j < 2; j++) {
        const uint32_t i = threadIdx.x * 2 + j;
        masses[j] = i < n ? mass_of(depth_of(f.c, entry_value(sm.list[i])), bin) : 0;
    }
    uint64_t total_bits, before_mine = scan_block<sum_of>(sm, (uint64_t)masses[0] + masses[1], total_bits);
    for (int j = 0; j < 2; before_mine += masses[j], j++)
        if (threadIdx.x * 2 + j < n && (double)(before_mine + masses[j]) >= left)
            atomicMin(&sm.n_in, threadIdx.x * 2 + j + 1);
    __syncthreads();
    const uint32_t kept = sm.n_in;
    const uint64_t cut = kept == 0 ? 0xffffffffffffffffull : sm.list[kept - 1];
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS) {
        const float w = weight_of(f.c, entry_value(sm.list[i]));
        if (w >= f.r.min_p)
            atomicAdd(&added[entry_id(sm.list[i]) / length],
                      (unsigned long long)units_of(f.c, entry_value(sm.list[i])));
    }
    __syncthreads();

    /* The run. */
    double mine = 0;
    if (threadIdx.x < TD_SAMPLE_PARTS)
        mine = (double)f.scratch.sums[threadIdx.x] + (double)added[threadIdx.x] / 4294967296.0;
    const double ahead =
        __longlong_as_double((long long)scan_block<dsum_of>(sm, (uint64_t)__double_as_longlong(mine), total_bits));
    const double target = f.r.u * __longlong_as_double((long long)total_bits);
    if (mine > 0) {
        if (ahead + mine > target) atomicMin(&run_of_draw, threadIdx.x);
        atomicMax(&last_of_draw, threadIdx.x);
    }
    __syncthreads();
    const uint32_t run = run_of_draw != 0xffffffffu ? run_of_draw : last_of_draw;
    if (threadIdx.x == run) target_in = target - ahead;
    if (threadIdx.x == 0) sm.n_in = 0xffffffffu, sm.n_found = 0;
    __syncthreads();

    /* The id: in rising order from thread to thread. */
    const uint32_t end = min((run + 1) * length, a.n_ids);
    double so_far = 0;
    for (uint32_t base = run * length; base < end; base += 2 * THREADS) {
        double w[2];
        const uint32_t id = base + threadIdx.x * 2;
        for (int j = 0; j < 2; j++) {
            w[j] = 0;
            if (id + j >= end) continue;
            const float x = tame(f.x[id + j]), d = depth_of(f.c, x), v = weight_of(f.c, x);
            if (!(d < (float)FLAT_BINS) || v < f.r.min_p) continue;
            const uint32_t b = (uint32_t)d;
            if (b < bin || (b == bin && entry_of(key_of(x), id + j) >= cut)) w[j] = v;
        }
        double at = so_far + __longlong_as_double((long long)scan_block<dsum_of>(
                                 sm, (uint64_t)__double_as_longlong(w[0] + w[1]), total_bits));
        for (int j = 0; j < 2; j++) {
            at += w[j];
            if (!(w[j] > 0)) continue;
            if (at > target_in) atomicMin(&sm.n_in, id + j);
            atomicMax(&sm.n_found, id + j);
        }
        so_far += __longlong_as_double((long long)total_bits);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const uint32_t token = sm.n_in != 0xffffffffu ? sm.n_in : sm.n_found;
    a.out[f.row] = {f.scratch.log_sum, tame(f.x[token]), token};
    f.scratch.status = ROW_DONE;
}

enum td_status td_cuda_sample_flat(cudaStream_t s, const struct td_sample_args *a)
{
    cudaError_t e = launch(weigh, dim3(CHUNKS, a->n_filtered), THREADS, 0, s, *a);
    if (e == cudaSuccess) e = launch(collect, dim3(CHUNKS, a->n_filtered), THREADS, 0, s, *a);
    if (e == cudaSuccess) e = launch(finish, a->n_filtered, THREADS, 0, s, *a);
    return td_cuda_status(e, "sample");
}
