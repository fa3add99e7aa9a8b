/* Compares every CUDA operator with its CPU reference. `test_cuda [--small] [name ...]`;
 * `test_cuda --list`: the names.
 *
 * Without a GPU every test is reported as skipped, by name and count, and the exit status is 77. */
#include <cuda_runtime_api.h>

#include "base/check.h"
#include "tests/gpu/gpu_test.h"

bool gpu_small;
struct compute *gpu_compute;

enum { KEPT_MAX = 4096, EXIT_SKIPPED = 77 };

enum kept_kind { KEPT_DEVICE, KEPT_HOST, KEPT_MAPPED };

static struct {
    void *memory;
    enum kept_kind kind;
} kept[KEPT_MAX];
static int kept_count, failures;
static double worst;
static uint64_t random_state = 88172645463325252u;

static void keep(void *memory, enum kept_kind kind)
{
    CHECK(memory && kept_count < KEPT_MAX);
    kept[kept_count].memory = memory;
    kept[kept_count++].kind = kind;
}

static void free_kept(void)
{
    while (kept_count > 0) {
        void *memory = kept[--kept_count].memory;
        if (kept[kept_count].kind == KEPT_DEVICE)
            cudaFree(memory);
        else if (kept[kept_count].kind == KEPT_MAPPED)
            cudaFreeHost(memory);
        else
            free(memory);
    }
}

void *gpu_alloc(size_t bytes)
{
    void *memory = NULL;
    CHECK(cudaMalloc(&memory, bytes ? bytes : 16) == cudaSuccess);
    keep(memory, KEPT_DEVICE);
    CHECK(cudaMemset(memory, 0xff, bytes ? bytes : 16) == cudaSuccess);
    return memory;
}

void *gpu_upload(const void *data, size_t bytes)
{
    void *memory = gpu_alloc(bytes);
    CHECK(cudaMemcpy(memory, data, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    return memory;
}

void *gpu_host(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    keep(memory, KEPT_HOST);
    return memory;
}

void *gpu_mapped(size_t bytes, void **ret_device)
{
    void *memory = NULL;
    CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess);
    keep(memory, KEPT_MAPPED);
    CHECK(cudaHostGetDevicePointer(ret_device, memory, 0) == cudaSuccess);
    return memory;
}

void *gpu_download(const void *device, size_t bytes)
{
    void *memory = gpu_host(bytes);
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess)
        error = cudaMemcpy(memory, device, bytes, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) {
        printf("    device: %s\n", cudaGetErrorString(error));
        exit(1); /* the context is lost: nothing that follows would mean anything */
    }
    return memory;
}

uint32_t gpu_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* Sum of uniforms, with a heavy tail now and then: outliers are what loses precision. */
float gpu_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)gpu_random() * 0x1p-32f - 0.5f;
    return sum * (gpu_random() % 512 == 0 ? 12.0f : 1.7f);
}

float *gpu_normals(size_t count, float scale)
{
    float *x = gpu_host(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = gpu_normal() * scale;
    return x;
}

uint16_t *gpu_bf16(const float *x, size_t count)
{
    uint16_t *out = gpu_host(count * sizeof *out);
    for (size_t i = 0; i < count; i++)
        out[i] = dtype_f32_to_bf16(x[i]);
    return out;
}

float *gpu_from_bf16(const uint16_t *x, size_t count)
{
    float *out = gpu_host(count * sizeof *out);
    for (size_t i = 0; i < count; i++)
        out[i] = dtype_bf16_to_f32(x[i]);
    return out;
}

static void fail(const char *what, const char *why)
{
    failures++;
    printf("    FAILED %s: %s\n", what, why);
}

void gpu_compare(const char *what, const float *out, const float *ref, size_t count, double most)
{
    double difference = 0, norm = 0;
    char why[128];
    for (size_t i = 0; i < count; i++) {
        if (isnan(out[i]) && isnan(ref[i]))
            continue;
        if (isnan(out[i]) || isnan(ref[i]) || (isinf(ref[i]) && out[i] != ref[i])) {
            snprintf(why, sizeof why, "element %zu: found %g, expected %g", i, (double)out[i],
                     (double)ref[i]);
            fail(what, why);
            return;
        }
        if (isinf(ref[i]))
            continue;
        difference += ((double)out[i] - (double)ref[i]) * ((double)out[i] - (double)ref[i]);
        norm += (double)ref[i] * (double)ref[i];
    }
    double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    worst = error > worst ? error : worst;
    if (error <= most)
        return;
    snprintf(why, sizeof why, "error %.3g, expected at most %.3g", error, most);
    fail(what, why);
}

void gpu_equal(const char *what, const void *a, const void *b, size_t bytes)
{
    char why[128];
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)a)[i] != ((const uint8_t *)b)[i]) {
            snprintf(why, sizeof why, "byte %zu of %zu: found %02x, expected %02x", i, bytes,
                     ((const uint8_t *)a)[i], ((const uint8_t *)b)[i]);
            fail(what, why);
            return;
        }
}

void gpu_expect(bool holds, const char *file, int line, const char *what)
{
    char where[256];
    if (holds)
        return;
    snprintf(where, sizeof where, "%s:%d", file, line);
    fail(where, what);
}

static bool is_wanted(const char *name, int argc, char **argv)
{
    bool named = false;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-')
            continue;
        named = true;
        if (strcmp(argv[i], name) == 0)
            return true;
    }
    return !named;
}

int main(int argc, char **argv)
{
    const struct gpu_test *tables[] = {tests_rows, tests_moves, tests_attention, tests_select};
    int devices = 0, run = 0, failed = 0, skipped = 0;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (int t = 0; t < COUNT_OF(tables); t++)
            for (const struct gpu_test *test = tables[t]; test->name; test++)
                puts(test->name);
        return 0;
    }
    for (int i = 1; i < argc; i++)
        gpu_small |= strcmp(argv[i], "--small") == 0;
    bool has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    if (has_gpu && compute_create("cpu", 8, COMPUTE_ISA_AUTO, &gpu_compute, NULL) < 0)
        return 1;
    for (int t = 0; t < COUNT_OF(tables); t++)
        for (const struct gpu_test *test = tables[t]; test->name; test++) {
            if (!is_wanted(test->name, argc, argv))
                continue;
            if (!has_gpu) {
                printf("skipped: no GPU: %s\n", test->name);
                skipped++;
                continue;
            }
            failures = 0;
            worst = 0;
            test->run();
            EXPECT(cudaDeviceSynchronize() == cudaSuccess);
            printf("%-6s %-28s largest error %.2e\n", failures ? "FAILED" : "ok", test->name, worst);
            fflush(stdout);
            free_kept();
            failed += failures != 0;
            run++;
        }
    compute_free(&gpu_compute);
    printf("%d run, %d failed, %d skipped%s\n", run, failed, skipped, has_gpu ? "" : ": no GPU");
    return failed ? 1 : skipped ? EXIT_SKIPPED : 0;
}
