/* What the CPU's ops share: the stream (threads, inner loops, scratch), and the shapes work is cut into. */
#ifndef TD_KERNELS_CPU_CPU_INT_H
#define TD_KERNELS_CPU_CPU_INT_H

#include "common/base/check.h"
#include "kernels/cpu/micro.h"
#include "kernels/cpu/pool.h"
#include "kernels/device.h"

/* Rows of one task: enough to use a panel of weights many times while it is in the first-level cache. */
#define TD_ROW_BLOCK 48u
/* Query rows (positions times heads that share keys) of one attention task: keys are unpacked once for all of them. */
#define TD_ATTN_ROWS 192u

struct td_cpu_scratch { /* of one thread */
    const float *a[TD_ATTN_ROWS];
    float *c[TD_ATTN_ROWS];
    uint32_t lo[TD_ATTN_ROWS], hi[TD_ATTN_ROWS];
    float max[TD_ATTN_ROWS], sum[TD_ATTN_ROWS];
    _Alignas(64) float s[TD_ROW_BLOCK * TD_KEYS];
    _Alignas(64) float o[TD_ATTN_ROWS * TD_HEAD_MAX];
    _Alignas(64) float k[TD_KEYS * TD_HEAD_MAX];
    _Alignas(64) float v[TD_KEYS * TD_HEAD_MAX];
};

struct td_cpu_stream {
    struct td_stream base;
    const struct td_micro *micro;
    struct td_pool *pool;
    struct td_cpu_scratch *scratch; /* one a thread */
    uint64_t *marks;                /* [TD_STREAM_MARKS] times, 0: not passed; NULL until the first */
};

static inline struct td_cpu_stream *td_cpu_stream(struct td_stream *s) { return (struct td_cpu_stream *)(void *)s; }
static inline uint32_t td_ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
static inline uint32_t td_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Panels start where they should: `cols` columns in, of a matrix with n_in inputs. cols is a multiple of TD_LANES. */
static inline const uint16_t *td_cpu_panels(const struct td_weight *w, uint32_t cols)
{
    return (const uint16_t *)w->data + (size_t)cols * w->n_in;
}

/* Panels of gate_up come in pairs of 16 units' gates and ups. A last pair of 8 units or fewer lies in one panel, gates
 * in its lower half: a rank's slice of the width pads nothing then. n_units: from that pair's first unit on. */
static inline bool td_cpu_is_half_pair(uint32_t n_units) { return n_units > 0 && n_units <= TD_LANES / 2; }
static inline uint32_t td_cpu_gate_up_cols(uint32_t n_units)
{
    uint32_t rest = n_units % TD_LANES;
    return n_units / TD_LANES * 2 * TD_LANES + (rest == 0 ? 0 : td_cpu_is_half_pair(rest) ? TD_LANES : 2 * TD_LANES);
}

/* y[row][0..n_out) = w x[row], w's rows cut into tasks; bias is not added. */
void td_cpu_matmul(struct td_cpu_stream *s, const float *x, const struct td_weight *w, const struct td_pieces *pieces,
                   float *y, uint32_t n_rows);

uint64_t td_cpu_n_saturated(void);

size_t td_cpu_moe_scratch_bytes(uint32_t n_rows, uint32_t top_k, uint32_t n_experts, uint32_t intermediate);

#define X(op, meaning) enum td_status td_cpu_##op(struct td_stream *s, const struct td_##op##_args *a);
#include "kernels/ops.def"
#undef X

#endif
