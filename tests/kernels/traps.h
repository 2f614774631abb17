/* The known mistakes of gpt-oss implementations, each made once on purpose: the checks must see it. Where a kernel's
 * arguments can make the mistake, the GPU makes it; else the float64 reference here does, and must disagree with the GPU. */
#ifndef TESTS_KERNELS_TRAPS_H
#define TESTS_KERNELS_TRAPS_H

#include "tests/kernels/pair.h"

void check_expert_traps(struct pair *p);   /* activation, routing, rows of gate_up; against float64 */
void check_rotation_traps(struct pair *p); /* YaRN's frequencies, its factor, which halves turn */
void check_pack(struct pair *p);           /* MXFP4 and transposed sources, exactly; nibbles and axis swapped */
void check_residual_traps(struct pair *p); /* values beyond f16 */

#endif
