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
