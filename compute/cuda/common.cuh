/* What the kernels share: 16-bit conversions, reductions in a fixed order, addresses of pieces, tensor core
 * instructions. Device code only; no state. */
#ifndef COMPUTE_CUDA_COMMON_CUH
#define COMPUTE_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <errno.h>

#include "compute/cuda/kernels.h"

#define FULL_WARP 0xffffffffu

static inline int launch_status(void)
{
    return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

static inline bool is_16bit(enum dtype type)
{
    return type == DTYPE_F16 || type == DTYPE_BF16;
}

static inline bool is_aligned(const void *p, uintptr_t bytes)
{
    return ((uintptr_t)p & (bytes - 1)) == 0;
}

static inline unsigned ceil_div(uint64_t a, uint64_t b)
{
    return (unsigned)((a + b - 1) / b);
}

/* Two floats as 16-bit halves, the first in the low half. */
template <bool BF16> __device__ __forceinline__ uint32_t pack(float a, float b)
{
    if (BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        return *(uint32_t *)&v;
    }
    __half2 v = __floats2half2_rn(a, b);
    return *(uint32_t *)&v;
}

template <bool BF16> __device__ __forceinline__ float2 unpack(uint32_t v)
{
    if (BF16)
        return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    return __half22float2(*(__half2 *)&v);
}

/* a and b as a sum of two 16-bit numbers each. */
template <bool BF16>
__device__ __forceinline__ void split(float a, float b, uint32_t *ret_hi, uint32_t *ret_lo)
{
    *ret_hi = pack<BF16>(a, b);
    float2 hi = unpack<BF16>(*ret_hi);
    *ret_lo = pack<BF16>(a - hi.x, b - hi.y);
}

/* c += a (16 x 16, row) * b (16 x 8, column). */
template <bool BF16>
__device__ __forceinline__ void mma_16x8x16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float silu_times(float gate, float up)
{
    return gate / (1.0f + expf(-gate)) * up;
}

/* Read once: does not displace what the caches are good for. */
__device__ __forceinline__ uint4 load_stream(const uint8_t *p)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

__device__ __forceinline__ float warp_sum(float v)
{
    for (int step = 16; step; step >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v)
{
    for (int step = 16; step; step >>= 1)
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, step));
    return v;
}

/* Sum over the block in the order of warps; every thread gets it. `shared`: 32 floats, free again after a
 * barrier of the caller. */
__device__ __forceinline__ float block_sum(float v, float *shared)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (unsigned w = 0; w < (blockDim.x + 31) / 32; w++)
        sum += shared[w];
    return sum;
}

/* A 64-bit division costs several times a 32-bit one, and the numbers are hardly ever that large. */
__device__ __forceinline__ uint64_t quotient(uint64_t a, uint32_t b)
{
    return a >> 32 ? a / b : (uint32_t)a / b;
}

/* Byte offset of a piece from the view's base, and whether nothing had to be brought into range. */
__device__ __forceinline__ uint64_t piece_offset(const struct cuda_kv_view &kv, const uint64_t *at,
                                                 uint32_t head, uint32_t item, bool *ret_valid)
{
    uint32_t entry, inside;
    if (kv.slotted) {
        uint64_t unit = (uint64_t)head * kv.slots + item;
        uint64_t slab = quotient(unit, kv.units_per_slab);
        *ret_valid = item < kv.slots && slab < kv.at_count;
        entry = slab < kv.at_count ? (uint32_t)slab : kv.at_count - 1;
        inside = (uint32_t)(unit - slab * kv.units_per_slab);
    } else {
        uint32_t page = item / kv.page_tokens;
        *ret_valid = page < kv.at_count;
        entry = page < kv.at_count ? page : kv.at_count - 1;
        inside = head * kv.page_tokens + (item - page * kv.page_tokens);
    }
    uint64_t offset = (at[entry] & ~15ull) + (uint64_t)inside * kv.piece_bytes;
    uint64_t last = (kv.device_bytes - kv.piece_bytes) & ~15ull;
    /* An offset near 2^64 could wrap into range: harmless too, it is in range then. */
    *ret_valid = *ret_valid && offset <= last;
    return offset <= last ? offset : last;
}

static inline bool view_is_valid(const struct cuda_kv_view *kv)
{
    if (!is_16bit(kv->type) || kv->piece_bytes == 0 || kv->piece_bytes % 16 || kv->at_count == 0 ||
        kv->device_bytes < kv->piece_bytes || !is_aligned(kv->base, 16))
        return false;
    return kv->slotted ? kv->slots && kv->units_per_slab : kv->page_tokens != 0;
}

#endif
