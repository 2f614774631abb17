/* The switch of the planted mistakes; empty in the plug-in that is shipped. */
#include "kernels/cuda/traps.cuh"

#ifdef TD_TRAPS
td_trap_switch *td_trap_switches; /* zero before any constructor runs */

extern "C" int td_cuda_set_trap(uint32_t trap)
{
    cudaError_t e = cudaDeviceSynchronize();
    for (td_trap_switch *s = td_trap_switches; e == cudaSuccess && s != nullptr; s = s->next) e = s->set(trap);
    return (int)e;
}
#endif
