/* How a dense matrix lies in a GPU's memory in FP8 (--dense-weights fp8): rows of E4M3, padded to 16 bytes with zeros,
 * each followed by 16 bytes that begin with its scale, a float: the row's largest magnitude over 448. Rows of matrices
 * that are stacked may be packed one matrix at a time. Plain C, shared by the kernels, the packing and the tests. */
#ifndef TD_KERNELS_DENSE_FORMAT_H
#define TD_KERNELS_DENSE_FORMAT_H

#include "kernels/e4m3.h"

#define TD_DENSE_FP8_PAD  16u
#define TD_DENSE_FP8_MOST 448.0f

TD_BOTH_SIDES uint32_t td_dense_fp8_scale_at(uint32_t n_in)
{
    return (n_in + TD_DENSE_FP8_PAD - 1) / TD_DENSE_FP8_PAD * TD_DENSE_FP8_PAD;
}
TD_BOTH_SIDES uint32_t td_dense_fp8_row_bytes(uint32_t n_in) { return td_dense_fp8_scale_at(n_in) + TD_DENSE_FP8_PAD; }

#endif
