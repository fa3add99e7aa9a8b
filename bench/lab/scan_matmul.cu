/* Times every algorithm that cuBLASLt's heuristics name for the products of a decode step at 8B shape: which
 * is best, and how far from what it names first. Weights rotate so that none is in the cache. */
#include "bench/lab/lab.cuh"

#include <cublasLt.h>
#include <stdio.h>

enum { ALGOS = 16, SETS = 8, LAUNCHES = 8 };

static cublasLtHandle_t handle;
static void *workspace;
static const size_t workspace_bytes = 32 << 20;

struct product {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w, x, out;
    uint16_t *weights;
    uint64_t stride;
    void *in, *to;
    float beta;
    int sets;
};

struct timed {
    const struct product *product;
    const cublasLtMatmulAlgo_t *algo;
};

static cublasStatus_t launch(const struct product *p, const cublasLtMatmulAlgo_t *algo, int set)
{
    const float one = 1;
    return cublasLtMatmul(handle, p->product, &one, p->weights + p->stride * (uint64_t)(set % p->sets), p->w,
                          p->in, p->x, &p->beta, p->to, p->out, p->to, p->out, algo, workspace,
                          workspace_bytes, lab_stream);
}

static int launch_timed(void *arg, int index)
{
    const struct timed *t = (const struct timed *)arg;
    return launch(t->product, t->algo, index);
}

/* Microseconds; -1: the library does not take it. */
static double time_algo(const struct product *p, const cublasLtMatmulAlgo_t *algo)
{
    struct timed t = {p, algo};
    return launch(p, algo, 0) == CUBLAS_STATUS_SUCCESS ? lab_seconds(launch_timed, &t, LAUNCHES) * 1e6 : -1;
}

static int setting(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name)
{
    uint64_t value = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, name, &value, sizeof value, &written);
    return written <= 2 ? (int)(uint16_t)value : (int)(uint32_t)value;
}

static int setting32(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name)
{
    int32_t value = -1;
    size_t written;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, name, &value, sizeof value, &written) !=
        CUBLAS_STATUS_SUCCESS)
        return -1;
    return value;
}

static void scan(uint32_t rows, uint32_t cols, uint32_t n, uint16_t *weights, int sets, void *x, void *to)
{
    struct product p = {};
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t results[ALGOS];
    int found = 0, transposed = CUBLAS_OP_T;
    p.weights = weights, p.stride = (uint64_t)rows * cols, p.in = x, p.to = to, p.sets = sets;
    p.beta = rows == 4096;
    OK(cublasLtMatmulDescCreate(&p.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    OK(cublasLtMatmulDescSetAttribute(p.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                      sizeof transposed));
    OK(cublasLtMatrixLayoutCreate(&p.w, CUDA_R_16BF, cols, rows, cols));
    OK(cublasLtMatrixLayoutCreate(&p.x, CUDA_R_16BF, cols, n, cols));
    OK(cublasLtMatrixLayoutCreate(&p.out, CUDA_R_32F, rows, n, rows));
    OK(cublasLtMatmulPreferenceCreate(&preference));
    OK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                            &workspace_bytes, sizeof workspace_bytes));
    OK(cublasLtMatmulAlgoGetHeuristic(handle, p.product, p.w, p.x, p.out, p.out, preference, ALGOS, results,
                                      &found));
    double first = 0, best = 1e9;
    int best_at = -1;
    for (int i = 0; i < found; i++) {
        const cublasLtMatmulAlgo_t *algo = &results[i].algo;
        double us = time_algo(&p, algo);
        if (i == 0)
            first = us;
        if (us > 0 && us < best) {
            best = us;
            best_at = i;
        }
        printf("algo %6u x %5u, %2u tokens, %2d: %7.2f us  id %d tile %d stages %d splitk %d reduction %d "
               "swizzle %d "
               "custom %d inner %d cluster %d workspace %zu waves %.2f\n",
               rows, cols, n, i, us, setting(algo, CUBLASLT_ALGO_CONFIG_ID),
               setting32(algo, CUBLASLT_ALGO_CONFIG_TILE_ID), setting32(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
               setting32(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
               setting32(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
               setting32(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
               setting32(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
               setting(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
               setting(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID), results[i].workspaceSize,
               results[i].wavesCount);
    }
    printf("best %6u x %5u, %2u tokens: first %7.2f us, best %7.2f us (%d of %d), read %5.2f TB/s\n", rows,
           cols, n, first, best, best_at, found, (double)p.stride * 2e-6 / best);
    fflush(stdout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(p.product);
    cublasLtMatrixLayoutDestroy(p.w);
    cublasLtMatrixLayoutDestroy(p.x);
    cublasLtMatrixLayoutDestroy(p.out);
}

int main(void)
{
    static const uint32_t shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
    lab_begin();
    OK(cublasLtCreate(&handle));
    workspace = lab_device(workspace_bytes);
    void *x = lab_bf16(32 * 14336), *to = lab_device(32ull * 128256 * 4);
    for (int i = 0; i < 5; i++) {
        uint64_t weights = (uint64_t)shapes[i][0] * shapes[i][1];
        int sets = weights * 2 > (400u << 20) ? 2 : (int)SETS;
        uint16_t *w = (uint16_t *)lab_bf16(weights * (uint64_t)sets);
        for (uint32_t n = 32; n >= 1; n /= 2)
            scan(shapes[i][0], shapes[i][1], n, w, sets, x, to);
        cudaFree(w);
    }
    return 0;
}
