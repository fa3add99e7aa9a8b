/* Products of a bf16 matrix with tokens (gemv.cu, matmul.c). Conventions: kernels.h. */
#ifndef COMPUTE_CUDA_PRODUCTS_H
#define COMPUTE_CUDA_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { CUDA_GEMV_TOKENS = 4 };

/* out [n][rows] f32 = w [rows][cols] bf16 times x [n][cols] bf16, + bias f32 [rows] if not NULL, + out
 * where `accumulate`. 1 <= n <= 4, cols % 8 == 0, 16-byte aligned. The result of a token does not depend on
 * n. Bytes: 2 * rows * cols, the matrix once. Against cuBLASLt on an H200, with matrices of
 * an 8B model: 4 to 13 % faster for one token, 3 % slower to 10 % faster for two, slower for four. */
struct cuda_gemv {
    float *out;
    const void *w, *x;
    const float *bias;
    uint32_t rows, cols, n;
    int accumulate;
};
int cuda_gemv(const struct cuda_gemv *gemv, struct CUstream_st *stream);

/* The same product for 1 <= n <= 32 on Hopper (gpu_info.hopper), with what surrounds it in a layer, so that
 * neither needs a launch of its own. 16-byte aligned, cols % 64 == 0. A token's result does not depend on n.
 *   out f32 [n][rows], + bias, + out where `accumulate`, as above.
 *   squares, if not NULL: x holds v * weight of a norm whose factors 1 / sqrt(mean(v^2) + eps) are still to
 *     come; squares [square_blocks][32] f32 add up to each token's sum of v^2 over cols.
 *   gated, if not NULL: bf16 [n][rows / 2] = silu(first half of the rows) * second half, in place of out;
 *     rows % 16 == 0, no bias, no accumulate, no next.
 *   next, if not NULL: bf16 [n][rows] = out * next_weight [rows], and next_squares
 *     [cuda_product_blocks(rows)][32] f32, squares of the product after. Not where x or squares lie.
 * Bytes: 2 * rows * cols, the matrix once; the tokens once for each 64 rows, from the cache. */
enum { CUDA_PRODUCT_TOKENS = 32, CUDA_PRODUCT_COLUMNS = 64 };
struct cuda_product {
    float *out;
    const void *w, *x;
    const float *bias;
    uint32_t rows, cols, n;
    int accumulate;
    const float *squares;
    uint32_t square_blocks;
    float eps;
    void *gated;
    void *next;
    const float *next_weight;
    float *next_squares;
};
int cuda_product(const struct cuda_product *product, struct CUstream_st *stream);
/* Before the first product of a process on its device: code that is loaded by a launch would wait for all
 * streams (compute/gpu.h). 0, -EIO, -ENOTSUP: the driver is too old. */
int cuda_product_load(void);
uint32_t cuda_product_blocks(uint32_t rows);

/* The same product for any n through cuBLASLt. The handle and the workspace are the caller's; a plan keeps
 * the library's descriptors and the algorithm it chose for (rows, cols, n). cuda_matmul_plan runs on the
 * host, once a shape; cuda_matmul only launches. out f32 or bf16; bias only with out f32 (f32) or bf16
 * (bf16). */
struct cublasLtContext;
struct cuda_matmul_plan;
struct cuda_matmul_shape {
    uint32_t rows, cols, n;
    enum dtype out_type;
    int has_bias, accumulate;
    size_t workspace_bytes;
};
/* 0, -EINVAL for a shape that cannot be, -ENOTSUP when the library has no algorithm, -ENOMEM. */
int cuda_matmul_plan(struct cublasLtContext *handle, const struct cuda_matmul_shape *shape,
                     struct cuda_matmul_plan **ret_plan);
void cuda_matmul_plan_free(struct cuda_matmul_plan **plan);
struct cuda_matmul {
    void *out;
    const void *w, *x, *bias;
    void *workspace;
};
int cuda_matmul(struct cublasLtContext *handle, const struct cuda_matmul_plan *plan,
                const struct cuda_matmul *matmul, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
