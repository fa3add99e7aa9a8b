/* Products of a bf16 matrix with any number of tokens, by cuBLASLt.
 *
 * A plan holds what the library wants described and the algorithm that it chose for one shape. The library
 * may choose another algorithm for another number of tokens, so a token's last bits can depend on its
 * company here. Few tokens go through product.cu on Hopper. Plans are made and freed on the owner's thread; a
 * plan is only read by launches. */
#include <cublasLt.h>
#include <errno.h>

#include "base/alloc.h"
#include "compute/cuda/kernels.h"

struct cuda_matmul_plan {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w, x, out;
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
    float beta;
    int has_bias;
};

static int status_errno(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return 0;
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return -ENOTSUP;
    case CUBLAS_STATUS_INVALID_VALUE:
        return -EINVAL;
    case CUBLAS_STATUS_ALLOC_FAILED:
        return -ENOMEM;
    default:
        return -EIO;
    }
}

static cublasStatus_t set_attribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t name,
                                    int value)
{
    return cublasLtMatmulDescSetAttribute(product, name, &value, sizeof value);
}

/* Row-major [a][b] is the library's column-major [b][a]: w is transposed, the tokens are columns. */
static cublasStatus_t describe(struct cuda_matmul_plan *p, const struct cuda_matmul_shape *s)
{
    cudaDataType_t out = s->out_type == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasStatus_t status = cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = set_attribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (!status && s->has_bias)
        status = set_attribute(p->product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    if (!status && s->has_bias)
        status = set_attribute(p->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int)out);
    if (!status)
        status = cublasLtMatrixLayoutCreate(&p->w, CUDA_R_16BF, s->cols, s->rows, (int64_t)s->cols);
    if (!status)
        status = cublasLtMatrixLayoutCreate(&p->x, CUDA_R_16BF, s->cols, s->n, (int64_t)s->cols);
    if (!status)
        status = cublasLtMatrixLayoutCreate(&p->out, out, s->rows, s->n, (int64_t)s->rows);
    return status;
}

static cublasStatus_t choose(cublasLtHandle_t handle, struct cuda_matmul_plan *p)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (!status)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &p->workspace_bytes, sizeof p->workspace_bytes);
    if (!status)
        status = cublasLtMatmulAlgoGetHeuristic(handle, p->product, p->w, p->x, p->out, p->out, preference, 1,
                                                &result, &found);
    if (!status && found < 1)
        status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (!status)
        p->algo = result.algo;
    if (preference)
        cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

int cuda_matmul_plan(struct cublasLtContext *handle, const struct cuda_matmul_shape *shape,
                     struct cuda_matmul_plan **ret_plan)
{
    *ret_plan = NULL;
    if (shape->rows == 0 || shape->cols == 0 || shape->n == 0 ||
        (shape->out_type != DTYPE_F32 && shape->out_type != DTYPE_BF16))
        return -EINVAL;
    struct cuda_matmul_plan *p = mem_alloc(1, sizeof *p);
    p->workspace_bytes = shape->workspace_bytes;
    p->beta = shape->accumulate ? 1.0f : 0.0f;
    p->has_bias = shape->has_bias;
    cublasStatus_t status = describe(p, shape);
    if (!status)
        status = choose(handle, p);
    if (status) {
        cuda_matmul_plan_free(&p);
        return status_errno(status);
    }
    *ret_plan = p;
    return 0;
}

void cuda_matmul_plan_free(struct cuda_matmul_plan **plan)
{
    struct cuda_matmul_plan *p = *plan;
    if (!p)
        return;
    if (p->product)
        cublasLtMatmulDescDestroy(p->product);
    if (p->w)
        cublasLtMatrixLayoutDestroy(p->w);
    if (p->x)
        cublasLtMatrixLayoutDestroy(p->x);
    if (p->out)
        cublasLtMatrixLayoutDestroy(p->out);
    mem_free(plan);
}

int cuda_matmul(struct cublasLtContext *handle, const struct cuda_matmul_plan *plan,
                const struct cuda_matmul *matmul, struct CUstream_st *stream)
{
    const float one = 1.0f;
    if (plan->has_bias != (matmul->bias != NULL) || (plan->workspace_bytes && !matmul->workspace))
        return -EINVAL;
    /* The bias' address is part of the library's description; the descriptor is the plan's own. */
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (plan->has_bias)
        status = cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &matmul->bias, sizeof matmul->bias);
    if (!status)
        status = cublasLtMatmul(handle, plan->product, &one, matmul->w, plan->w, matmul->x, plan->x,
                                &plan->beta, matmul->out, plan->out, matmul->out, plan->out, &plan->algo,
                                matmul->workspace, plan->workspace_bytes, stream);
    return status_errno(status);
}
