/* What modes and slices change in the experts in FP8 and MXFP4. Results go into experts_tally. */
#ifndef TESTS_KERNELS_EXPERTS_MODES_H
#define TESTS_KERNELS_EXPERTS_MODES_H

#include <stdbool.h>

/* bf16 activations: against float64, and both forms against each other. is_few: one small shape, for a sanitizer. */
void check_bf16_activations(bool is_few);
/* Slices of 2, 4 and 8 ranks: their sum against float64. */
void check_slices(void);
/* With is_batch_invariant: a row alone against the same row in company, bit for bit. */
void check_company(void);

#endif
