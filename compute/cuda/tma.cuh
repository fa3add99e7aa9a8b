/* Boxes of a matrix on their way into shared memory (the tensor memory accelerator, sm_90), the barriers
 * that count their bytes, and clusters of blocks. Shared memory is named by address; maps lie in kernel
 * parameters. Device code only. */
#ifndef COMPUTE_CUDA_TMA_CUH
#define COMPUTE_CUDA_TMA_CUH

#include "compute/cuda/common.cuh"

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* What barrier_init did is seen by the copies that the thread starts from here on, and by the cluster. */
__device__ __forceinline__ void barrier_publish(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* One arrival, and bytes that copies will bring. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Until the phase of this parity is over. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* What is read by many blocks stays in the L2 cache beside what streams through it. */
__device__ __forceinline__ uint64_t keep_policy(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Rows from `row` on, panels from `panel` on. */
__device__ __forceinline__ void load_box(uint32_t to, const void *map, uint32_t row, uint32_t panel,
                                         uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(panel), "r"(barrier), "l"(policy)
                 : "memory");
}

/* Of a map whose rows are groups of `group` rows of each half. */
__device__ __forceinline__ void load_box_paired(uint32_t to, const void *map, uint32_t group, uint32_t panel,
                                                uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(0), "r"(group), "r"(panel), "r"(barrier), "l"(policy)
                 : "memory");
}

/* All threads of the cluster; what they wrote to shared memory is visible to all. */
__device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* A float at this address of the shared memory of block `rank` of the cluster. */
__device__ __forceinline__ float cluster_load(uint32_t address, uint32_t rank)
{
    uint32_t remote;
    float v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote) : "memory");
    return v;
}

#endif
