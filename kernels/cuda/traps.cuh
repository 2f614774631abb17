/* Planted mistakes. TRAP(name), a row of traps.def, is false, a constant, in the plug-in that is shipped. In the one that the
 * tests build with TD_TRAPS (libtandem-cudatraps.so) it is true while that row is switched on: td_cuda_set_trap. The code
 * below exists there only. */
#ifndef TD_KERNELS_CUDA_TRAPS_CUH
#define TD_KERNELS_CUDA_TRAPS_CUH

#ifndef TD_TRAPS
#define TRAP(name) false
#else

#include <cuda_runtime.h>

#include <cstdint>

enum td_trap {
    TD_TRAP_NONE,
#define X(name, check, mistake) TD_TRAP_##name,
#include "kernels/cuda/traps.def"
#undef X
};

/* Device code is linked file by file, so each file has a switch of its own. */
struct td_trap_switch {
    td_trap_switch *next;
    cudaError_t (*set)(uint32_t trap);
};
extern td_trap_switch *td_trap_switches;

static __device__ uint32_t td_trap_now;
static cudaError_t td_trap_set(uint32_t trap) { return cudaMemcpyToSymbol(td_trap_now, &trap, sizeof trap); }
static struct td_trap_here : td_trap_switch {
    td_trap_here() : td_trap_switch{td_trap_switches, td_trap_set} { td_trap_switches = this; }
} td_trap_here_now;

#define TRAP(name) (td_trap_now == TD_TRAP_##name)

#endif
#endif
