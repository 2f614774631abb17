/* What the CUDA ops share on the host: the device, the stream and its scratch, tensor maps. */
#ifndef TD_KERNELS_CUDA_CUDA_INT_H
#define TD_KERNELS_CUDA_CUDA_INT_H

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/error.h"
#include "kernels/device.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>

#include "kernels/cuda/launch.cuh"
typedef __nv_bfloat16 td_bf16;
extern "C" {
#endif
#define TD_BF16_BYTES 2u

/* Attention over single rows keeps partial results of sequences that several blocks share. */
#define TD_CUDA_PART_FLOATS (4u * (8u * 16u + 16u))
#define TD_CUDA_PART_BLOCKS 3          /* thread blocks a multiprocessor that leave parts */
#define TD_CUDA_MAX_UNITS   (1u << 16) /* sequences x KV heads of a batch */

struct td_cuda_device {
    struct td_device base;
    int index, n_sms;
    enum td_expert_form experts;
    bool is_batch_invariant, has_bf16_activations, is_dense_fp8;
    cudaStream_t copies;             /* of td_device_upload and download */
    unsigned long long *n_saturated; /* in host memory that kernels reach */
};

/* What packing finds out about values. */
struct td_cuda_found {
    unsigned long long n_inexact;
    uint32_t is_bad;
};

struct td_cuda_stream {
    struct td_stream base;
    cudaStream_t s;
    cudaEvent_t event;  /* where another stream has come, for follow */
    float *parts;       /* [2 * max blocks][TD_CUDA_PART_FLOATS] */
    uint32_t *counters; /* [TD_CUDA_MAX_UNITS], zero between launches */
    int n_sms;
    /* One kernel for any number of rows: the wide products, and attention that walks absolute blocks of keys. */
    bool is_batch_invariant;
    bool is_dense_fp8;
    unsigned long long *n_saturated; /* the device's */
    struct td_cuda_found *found; /* on the device; NULL until something is packed */
    uint8_t *staging;            /* of what is packed, as stored; on the device */
    size_t staging_bytes;
    cudaEvent_t *marks;              /* [TD_STREAM_MARKS], NULL: not passed; NULL until the first */
};

static inline struct td_cuda_stream *td_cuda_stream_of(struct td_stream *s)
{
    return (struct td_cuda_stream *)(void *)s;
}
static inline struct td_cuda_device *td_cuda_device_of(struct td_device *d)
{
    return (struct td_cuda_device *)(void *)d;
}

static inline uint32_t td_ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
static inline uint32_t td_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* A bf16 matrix [rows][cols] whose rows lie ld elements apart, read in boxes of box_rows x 64 columns, swizzled by 128
 * bytes; what lies outside reads as zero. base on 16 bytes, ld a multiple of 8. */
enum td_status td_cuda_map_rows(CUtensorMap *out, const void *base, uint64_t rows, uint32_t cols, uint64_t ld,
                                uint32_t box_rows);
/* Rows of 64 bytes that lie next to each other, in boxes of box_rows, swizzled by 64 bytes. base on 16 bytes. */
enum td_status td_cuda_map_bytes(CUtensorMap *out, const void *base, uint64_t rows, uint32_t box_rows);
/* FP8 codes [rows][cols], rows ld bytes apart, in boxes of box_rows x 64, swizzled by 64 bytes. base and ld on 16 bytes. */
enum td_status td_cuda_map_codes(CUtensorMap *out, const void *base, uint64_t rows, uint32_t cols, uint64_t ld,
                                 uint32_t box_rows);
/* Query rows [tokens][heads][64] in boxes of box_tokens x box_heads heads. */
enum td_status td_cuda_map_heads(CUtensorMap *out, const void *base, uint32_t tokens, uint32_t heads,
                                 uint32_t box_heads, uint32_t box_tokens);

enum td_status td_cuda_attn_prefill(struct td_cuda_stream *s, const struct td_attention_args *a);
/* Sequence seq's FP8 pages into a->scratch as bf16, block first_block first. UNSUPPORTED: the scratch is too small. */
enum td_status td_cuda_widen_kv(struct td_cuda_stream *s, const struct td_attention_args *a, uint32_t seq);
/* Single rows over a window of bf16 pages, if it is one that fits; the others go to attn_decode. */
bool td_cuda_window_fits(uint32_t window);
enum td_status td_cuda_attn_window(struct td_cuda_stream *s, const struct td_attention_args *a);
enum td_status td_cuda_attn_decode(struct td_cuda_stream *s, const struct td_attention_args *a);

enum td_status td_cuda_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n);

void td_cuda_explain(const struct td_device *d, const struct td_explain_shape *s,
                     void (*line)(void *user, const char *text), void *user);

enum td_status td_cuda_sample(struct td_stream *s, const struct td_sample_args *a);
enum td_status td_cuda_sample_short(cudaStream_t s, const struct td_sample_args *a);
enum td_status td_cuda_sample_flat(cudaStream_t s, const struct td_sample_args *a);
enum td_status td_cuda_sample_filtered(cudaStream_t s, const struct td_sample_args *a);

/* Scratch of moe. */
size_t td_cuda_moe_scratch_bytes(const struct td_scratch_shape *s);
size_t td_cuda_moe_fp8_scratch_bytes(const struct td_cuda_device *d, const struct td_scratch_shape *s);
/* Device memory for a matrix as stored, and found; what the stream did with them before comes first. */
cudaError_t td_cuda_pack_begin(struct td_cuda_stream *s, size_t staging_bytes);
/* The call's end: at once if a->may_defer, else waits and says what was found. */
enum td_status td_cuda_pack_end(struct td_cuda_stream *s, cudaError_t e, const struct td_pack_weight_args *a);
enum td_status td_cuda_packed(struct td_stream *s, uint64_t *n_inexact_out);
/* moe and pack_weight for experts in FP8 or MXFP4. */
enum td_status td_cuda_moe_fp8(struct td_cuda_stream *s, enum td_expert_form form, const struct td_moe_args *a);
/* The products with bf16 activations, once slots are sorted. begin: this rank's first expert. */
struct moe_scratch;
struct td_expert_layout;
enum td_status td_cuda_moe_bf16_products(const struct td_cuda_stream *s, const struct td_moe_args *a,
                                         const struct moe_scratch *z, const struct td_expert_layout *up,
                                         const struct td_expert_layout *down, uint32_t begin);
/* What follows routing where experts have many rows each. */
enum td_status td_cuda_moe_many_quantise(const struct td_cuda_stream *s, const struct td_moe_args *a,
                                         const struct moe_scratch *z, uint32_t begin, uint32_t n);
enum td_status td_cuda_moe_many(const struct td_cuda_stream *s, const struct td_moe_args *a, const struct moe_scratch *z,
                                const struct td_expert_layout *up, const struct td_expert_layout *down, uint32_t begin);
enum td_status td_cuda_pack_expert(struct td_stream *s, enum td_expert_form form, const struct td_pack_weight_args *a);

#define X(op, meaning) enum td_status td_cuda_##op(struct td_stream *s, const struct td_##op##_args *a);
#include "kernels/ops.def"
#undef X

#ifdef __CUDACC__
}
#endif
#endif
