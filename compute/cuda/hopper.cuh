/* Hopper's matrix instructions (wgmma, sm_90a): one warpgroup of 128 threads multiplies 64 rows.
 *
 * Operands in shared memory are panels of 64 16-bit columns: rows of 128 bytes, 16-byte unit u of row r at
 * u ^ (r % 8) (the 128-byte swizzle), each panel on 1024 bytes. Accumulator d[4 t + e] of a thread is that
 * of m16n8 tiles: row 16 * warp + lane / 4 + 8 * (e / 2), column 8 t + 2 * (lane % 4) + e % 2. Device code
 * only.
 *
 * The macros spell out the instruction's register list, which C has no other way to write. */
#ifndef COMPUTE_CUDA_HOPPER_CUH
#define COMPUTE_CUDA_HOPPER_CUH

#include "compute/cuda/common.cuh"

/* Rows are those of the operand, columns run along the sum. */
__device__ __forceinline__ uint64_t panel_by_row(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

/* Rows run along the sum; neighbouring panels lie panel_bytes apart. */
__device__ __forceinline__ uint64_t panel_by_column(uint32_t address, uint32_t panel_bytes)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

/* Registers and shared memory are as the thread left them before the next wgmma reads them. */
__device__ __forceinline__ void wgmma_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most `LEFT` groups are under way. */
template <int LEFT> __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void wgmma_end(void)
{
    wgmma_commit();
    wgmma_wait<0>();
}

/* What ordinary stores and cp.async wrote to shared memory becomes visible to wgmma. */
__device__ __forceinline__ void wgmma_publish(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define WGMMA_SHARED_64(TYPE)                                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                          \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "       \
                 "%32, %33, p, 1, 1, 0, 0;\n}"                                                             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
                   "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
                   "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])            \
                 : "l"(a), "l"(b), "r"(add))

#define WGMMA_REGISTERS_64(TYPE)                                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                          \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "       \
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
                   "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
                   "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
                   "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

#define WGMMA_REGISTERS_128(TYPE)                                                                         \
    asm volatile(                                                                                         \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                      \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"                                 \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "               \
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                                       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),      \
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),      \
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),      \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),      \
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* d (64 x 64) = a (rows in shared memory) * b (rows), + d where `add`. */
template <bool BF16> __device__ __forceinline__ void wgmma_scores(float *d, uint64_t a, uint64_t b, int add)
{
    if (BF16)
        WGMMA_SHARED_64("bf16");
    else
        WGMMA_SHARED_64("f16");
}

/* d (64 x DIM) += a (registers) * b (by column). */
template <bool BF16, int DIM>
__device__ __forceinline__ void wgmma_values(float *d, const uint32_t *a, uint64_t b)
{
    const int add = 1;
    if (DIM == 128 && BF16)
        WGMMA_REGISTERS_128("bf16");
    else if (DIM == 128)
        WGMMA_REGISTERS_128("f16");
    else if (BF16)
        WGMMA_REGISTERS_64("bf16");
    else
        WGMMA_REGISTERS_64("f16");
}

#define WGMMA_TOKENS_8                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"             \
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" \
                 "%0, %1, %2, %3}, "                                     \
                 "%4, %5, p, 1, 1, 0, 0;\n}"                             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])        \
                 : "l"(a), "l"(b), "r"(add))

#define WGMMA_TOKENS_16                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                  \
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"      \
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "                           \
                 "%8, %9, p, 1, 1, 0, 0;\n}"                                   \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), \
                   "+f"(d[5]), "+f"(d[6]), "+f"(d[7])                          \
                 : "l"(a), "l"(b), "r"(add))

#define WGMMA_TOKENS_32                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"                  \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
                 "%16, %17, p, 1, 1, 0, 0;\n}"                                             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),             \
                   "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),             \
                   "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                   "+f"(d[15])                                                             \
                 : "l"(a), "l"(b), "r"(add))

/* d (64 x TOKENS) = a (rows of a matrix in shared memory) * b (tokens there), + d where `add`; bf16. */
template <int TOKENS>
__device__ __forceinline__ void wgmma_tokens(float *d, uint64_t a, uint64_t b, int add)
{
    if (TOKENS == 32)
        WGMMA_TOKENS_32;
    else if (TOKENS == 16)
        WGMMA_TOKENS_16;
    else
        WGMMA_TOKENS_8;
}

#endif
