/* Tensor maps: how the copy engine walks a matrix. The driver's encoder is found at run time, so that the plug-in needs
 * no libcuda to load. */
#include <string.h>

#include "kernels/cuda/cuda_int.h"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn find_encoder(void)
{
    static encode_fn found; /* every thread finds the same */
    encode_fn f = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (f != NULL) return f;
    void *p = NULL;
    enum cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
        return NULL;
    memcpy(&f, &p, sizeof f); /* ISO C has no cast from object to function pointer */
    __atomic_store_n(&found, f, __ATOMIC_RELEASE);
    return f;
}

static enum td_status encode_as(CUtensorMap *out, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                                const void *base, cuuint32_t rank, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box)
{
    const cuuint32_t steps[3] = {1, 1, 1};
    encode_fn f = find_encoder();
    if (f == NULL) return td_cuda_status(cudaErrorNotSupported, "cuTensorMapEncodeTiled");
    CUresult r = f(out, type, rank, (void *)(uintptr_t)base, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? TD_OK : td_cuda_status(cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
}

static enum td_status encode(CUtensorMap *out, const void *base, cuuint32_t rank, const cuuint64_t *dims,
                             const cuuint64_t *strides, const cuuint32_t *box)
{
    return encode_as(out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, base, rank, dims, strides, box);
}

enum td_status td_cuda_map_bytes(CUtensorMap *out, const void *base, uint64_t rows, uint32_t box_rows)
{
    const cuuint64_t dims[2] = {64, rows}, strides[1] = {64};
    const cuuint32_t box[2] = {64, box_rows};
    return encode_as(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B, base, 2, dims, strides, box);
}

enum td_status td_cuda_map_codes(CUtensorMap *out, const void *base, uint64_t rows, uint32_t cols, uint64_t ld,
                                 uint32_t box_rows)
{
    const cuuint64_t dims[2] = {cols, rows}, strides[1] = {ld};
    const cuuint32_t box[2] = {64, box_rows};
    return encode_as(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B, base, 2, dims, strides, box);
}

enum td_status td_cuda_map_rows(CUtensorMap *out, const void *base, uint64_t rows, uint32_t cols, uint64_t ld,
                                uint32_t box_rows)
{
    const cuuint64_t dims[2] = {cols, rows}, strides[1] = {ld * TD_BF16_BYTES};
    const cuuint32_t box[2] = {64, box_rows};
    return encode(out, base, 2, dims, strides, box);
}

enum td_status td_cuda_map_heads(CUtensorMap *out, const void *base, uint32_t tokens, uint32_t heads,
                                 uint32_t box_heads, uint32_t box_tokens)
{
    const cuuint64_t dims[3] = {64, heads, tokens};
    const cuuint64_t strides[2] = {64 * TD_BF16_BYTES, (cuuint64_t)heads * 64 * TD_BF16_BYTES};
    const cuuint32_t box[3] = {64, box_heads, box_tokens};
    return encode(out, base, 3, dims, strides, box);
}
