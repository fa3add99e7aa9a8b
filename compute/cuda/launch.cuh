/* Launches that begin while the launch before them ends (programmatic dependent launch).
 *
 * Such a kernel calls launch_next() at its start, so that the one after it may begin, and launch_wait()
 * before it reads anything that an earlier launch wrote, and before it writes anything at all. What may be
 * read before launch_wait(): what no launch writes (weights), and what a copy or a host wrote before
 * (tables): a launch after a copy, by an engine or by cuda_copy_mapped, begins only when it has ended. All
 * threads of a kernel launched so must come to launch_wait(), as the launches after it rely on it. Before
 * Hopper both are nothing and launches follow each other. */
#ifndef COMPUTE_CUDA_LAUNCH_CUH
#define COMPUTE_CUDA_LAUNCH_CUH

#include "compute/cuda/common.cuh"

__device__ __forceinline__ void launch_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_next(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct launch_form {
    cudaLaunchConfig_t config; /* attrs points into the form: it must not be copied */
    cudaLaunchAttribute attributes[2];
};

static inline void launch_form(struct launch_form *form, dim3 grid, unsigned threads, size_t shared_bytes,
                               cudaStream_t stream)
{
    *form = {};
    form->attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    form->attributes[0].val.programmaticStreamSerializationAllowed = 1;
    form->config.gridDim = grid;
    form->config.blockDim = dim3(threads);
    form->config.dynamicSmemBytes = shared_bytes;
    form->config.stream = stream;
    form->config.attrs = form->attributes;
    form->config.numAttrs = 1;
}

static inline void launch_form_cluster(struct launch_form *form, unsigned blocks)
{
    if (blocks <= 1)
        return;
    form->attributes[1].id = cudaLaunchAttributeClusterDimension;
    form->attributes[1].val.clusterDim.x = blocks;
    form->attributes[1].val.clusterDim.y = form->attributes[1].val.clusterDim.z = 1;
    form->config.numAttrs = 2;
}

/* A launch with one argument and no shared memory of its own size. */
template <class KERNEL, class ARGUMENT>
static inline int launch_early(KERNEL kernel, dim3 grid, unsigned threads, cudaStream_t stream,
                               const ARGUMENT &argument)
{
    struct launch_form form;
    launch_form(&form, grid, threads, 0, stream);
    cudaLaunchKernelEx(&form.config, kernel, argument);
    return launch_status();
}

#endif
