/* The inner loops in plain C, for processors without the instructions the others use. */
#define TD_LANES_SCALAR
#define MICRO_TABLE td_micro_scalar
#define MICRO_NAME  "scalar"
#include "kernels/cpu/micro_body_int.h"
