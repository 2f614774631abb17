/* What all kinds of draws share: the order of their kernels is
 *
 *   reduce    rows without edits, in runs of ids: maxima and sums                              sample.cu
 *   pick      rows that draw from all ids, or the likeliest alone                             sample.cu
 *   shorten   rows whose draw a short list decides: top-k, top-p and min-p of peaked logits   sample_short.cu
 *   weigh, collect, finish   top-p of flat logits                                             sample_flat.cu
 *   sample_filtered          everything else: edits, large top-k, ties without end            sample_filtered.cu
 *
 * Each does the rows that those before it have left, as the row's scratch says. */
#ifndef TD_KERNELS_CUDA_SAMPLE_CUH
#define TD_KERNELS_CUDA_SAMPLE_CUH

#include <cfloat>

#include "kernels/args.h"

#define FLAT_BINS 2048u
#define FLAT_LIST 1024u

struct part { /* of a run of ids */
    float max;
    uint32_t arg;
    float sum, sum_raw; /* e^((x - max) / temperature), e^(x - max) */
};

enum { ROW_OPEN, ROW_DONE, ROW_FLAT };

struct sample_scratch {
    part parts[TD_SAMPLE_PARTS];
    float sums[TD_SAMPLE_PARTS]; /* flat rows: of a run's weights before the bin of the cut */
    uint32_t masses[FLAT_BINS];  /* their histogram */
    uint64_t list[FLAT_LIST];    /* ids in the bin */
    uint32_t status, n_list, bin;
    float max;
    double log_sum, left; /* of the raw logits; mass that the cut still needs from its bin */
};
static_assert(sizeof(sample_scratch) <= TD_SAMPLE_SCRATCH, "args.h says so");

static __device__ __forceinline__ sample_scratch &scratch_of(const td_sample_args &a, uint32_t row)
{
    return *(sample_scratch *)((uint8_t *)a.parts + (size_t)row * TD_SAMPLE_SCRATCH);
}
/* A multiple of 4. */
static __device__ __forceinline__ uint32_t run_length(uint32_t n_ids)
{
    return (n_ids + TD_SAMPLE_PARTS * 4 - 1) / (TD_SAMPLE_PARTS * 4) * 4;
}

/* N x 128 logits of a warp, from base on, a multiple of 4: four neighbours a lane at a time, -inf from end on.
 * is_aligned: the row is, to 16 bytes. */
template <int N>
static __device__ __forceinline__ void load_run(float (&v)[4 * N], const float *x, uint32_t base, uint32_t end,
                                                bool is_aligned)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t id = base + i * 128 + lane * 4;
        if (is_aligned && id + 3 < end) {
            const float4 f = *(const float4 *)(x + id);
            v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
        } else
            for (int j = 0; j < 4; j++) v[4 * i + j] = id + j < end ? x[id + j] : -INFINITY;
    }
}
/* The id of v[i]. */
static __device__ __forceinline__ uint32_t id_of(uint32_t base, int i)
{
    return base + i / 4 * 128 + threadIdx.x % 32 * 4 + i % 4;
}

static __device__ __forceinline__ bool is_edited(const td_sample_row &r)
{
    return r.mask != TD_SAMPLE_NO_MASK || r.n_edits != 0;
}
/* Nothing is cut off. */
static __device__ __forceinline__ bool is_whole(const td_sample_row &r)
{
    return r.temperature == 0 || (r.top_k == 0 && r.top_p >= 1 && r.min_p == 0);
}

/* As the definition has it: NaN is -inf, and no infinity above. */
static __device__ __forceinline__ float tame(float x)
{
    return !(x > -INFINITY) ? -INFINITY : fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

/* 1 / temperature, finite: 0 times it is 0. */
static __device__ __forceinline__ float inverse(float temperature)
{
    return temperature == 0 ? 0 : fminf(1 / temperature, FLT_MAX);
}

#endif
