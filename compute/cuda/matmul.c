/* Products of a bf16 matrix with any number of tokens, by cuBLASLt.
 *
 * A plan holds what the library wants described and the algorithm that it chose for one shape. The library
 * may choose another algorithm for another number of tokens, so a token's last bits can depend on its
 * company here. Where its first choice is not its best on an H200, a table names another of its choices, or
 * a setting that it does not name: a fixed one, since what is measured at a start could differ from process
 * to process. Plans are made and freed on the owner's thread; a plan is only read by launches. */
#include <cublasLt.h>
#include <errno.h>
#include <stdbool.h>

#include "base/alloc.h"
#include "compute/cuda/kernels.h"

enum { CHOICES = 8 };

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

/* What bench/lab/scan_matmul.cu found to be faster than the first choice, by more than 1 %. */
struct better {
    uint32_t rows, cols, least, most; /* tokens */
    int tile, splits, custom;         /* as the library numbers them */
    int made; /* the algorithm that takes these settings though the library does not name them; 0: as named */
};

static const struct better betters[] = {
    {4096, 14336, 17, 32, 13, 1, 1, 66}, /* 36.96 -> 31.33 us, accumulated */
    {4096, 4096, 17, 32, 13, 1, 1, 66},  /* 13.53 -> 11.51 us, accumulated */
    {6144, 4096, 17, 32, 134, 1, 0, 0},  /* 16.32 -> 16.00 us */
    {128256, 4096, 17, 32, 16, 1, 1, 0}, /* 269.5 -> 256.3 us */
    {128256, 4096, 9, 16, 394, 1, 1, 0}, /* 253.5 -> 250.3 us */
    {128256, 4096, 5, 8, 10, 1, 1, 0},   /* 250.6 -> 244.2 us */
};

static const struct better *better_of(const struct cuda_matmul_shape *s)
{
    for (unsigned b = 0; b < sizeof betters / sizeof *betters; b++)
        if (s->rows == betters[b].rows && s->cols == betters[b].cols && s->n >= betters[b].least &&
            s->n <= betters[b].most)
            return &betters[b];
    return NULL;
}

static int setting(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name)
{
    int value = -1;
    size_t written = 0;
    cublasLtMatmulAlgoConfigGetAttribute(algo, name, &value, sizeof value, &written);
    return value;
}

/* Whether the library takes its first choice with the table's settings, in one part. */
static bool make(cublasLtHandle_t handle, const struct cuda_matmul_plan *p, const struct better *better,
                 cublasLtMatmulAlgo_t *algo)
{
    const struct {
        cublasLtMatmulAlgoConfigAttributes_t name;
        int value;
    } settings[] = {{CUBLASLT_ALGO_CONFIG_TILE_ID, better->tile},
                    {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1},
                    {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_REDUCTION_SCHEME_NONE},
                    {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, better->custom}};
    cublasLtMatmulHeuristicResult_t result;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (!better->made || setting(algo, CUBLASLT_ALGO_CONFIG_ID) != better->made)
        return false;
    for (unsigned i = 0; i < sizeof settings / sizeof *settings && !status; i++)
        status = cublasLtMatmulAlgoConfigSetAttribute(algo, settings[i].name, &settings[i].value,
                                                      sizeof settings[i].value);
    if (!status)
        status = cublasLtMatmulAlgoCheck(handle, p->product, p->w, p->x, p->out, p->out, algo, &result);
    return !status && result.workspaceSize <= p->workspace_bytes;
}

/* The table's choice, named by the library or made; where it is neither, the library's first. */
static cublasLtMatmulAlgo_t best_of(cublasLtHandle_t handle, const struct cuda_matmul_plan *p,
                                    const struct cuda_matmul_shape *s,
                                    const cublasLtMatmulHeuristicResult_t *results, int found)
{
    const struct better *better = better_of(s);
    cublasLtMatmulAlgo_t made = results[0].algo;
    for (int i = 0; better && i < found; i++)
        if (setting(&results[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID) == better->tile &&
            setting(&results[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) == better->splits &&
            setting(&results[i].algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION) == better->custom)
            return results[i].algo;
    return better && make(handle, p, better, &made) ? made : results[0].algo;
}

static cublasStatus_t choose(cublasLtHandle_t handle, const struct cuda_matmul_shape *shape,
                             struct cuda_matmul_plan *p)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t results[CHOICES];
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (!status)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &p->workspace_bytes, sizeof p->workspace_bytes);
    if (!status)
        status = cublasLtMatmulAlgoGetHeuristic(handle, p->product, p->w, p->x, p->out, p->out, preference,
                                                CHOICES, results, &found);
    if (!status && found < 1)
        status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (!status)
        p->algo = best_of(handle, p, shape, results, found);
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
        status = choose(handle, shape, p);
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
