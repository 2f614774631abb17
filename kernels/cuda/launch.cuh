/* Launches that overlap: a kernel's blocks may come up while the one before it in the stream still runs. Until before() they
 * touch nothing that an earlier kernel of the pass wrote: weights, page tables and sequence lists only. */
#ifndef TD_KERNELS_CUDA_LAUNCH_CUH
#define TD_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* Everything earlier in the stream is done and seen. Every thread that reads or writes such memory calls it. */
static __device__ __forceinline__ void before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/* The next kernel may come up. */
static __device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/* For kernels that call before(). */
template <class... P, class... A>
static cudaError_t launch(void (*kernel)(P...), dim3 grid, uint32_t threads, size_t smem, cudaStream_t s, A &&...args)
{
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = smem;
    c.stream = s;
    c.attrs = &overlap;
    c.numAttrs = 1;
    return cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#endif
