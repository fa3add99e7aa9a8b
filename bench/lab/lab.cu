/* See lab.cuh. */
#include "bench/lab/lab.cuh"

#include <stdio.h>
#include <stdlib.h>

enum { RUNS = 9 };

cudaStream_t lab_stream;

void lab_check(int status, const char *file, int line)
{
    if (status == 0)
        return;
    fprintf(stderr, "%s:%d: status %d (%s)\n", file, line, status, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

void lab_begin(void)
{
    OK(cudaStreamCreate(&lab_stream));
}

void *lab_device(uint64_t bytes)
{
    void *memory;
    OK(cudaMalloc(&memory, bytes));
    return memory;
}

void *lab_upload(const void *data, uint64_t bytes)
{
    void *memory = lab_device(bytes);
    OK(cudaMemcpy(memory, data, bytes, cudaMemcpyHostToDevice));
    return memory;
}

__global__ void fill_bf16(uint32_t *out, uint64_t words, uint32_t seed)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)(i >> 32) * 0x9E3779B9u ^ (uint32_t)i * 0x85EBCA6Bu ^ seed;
        x ^= x >> 15, x *= 0x2C1B3C6Du, x ^= x >> 12, x *= 0x297A2D39u, x ^= x >> 15;
        out[i] = (x & 0x80ff80ffu) | 0x3e003e00u;
    }
}

void *lab_bf16(uint64_t count)
{
    void *memory = lab_device(count * 2 + 16);
    fill_bf16<<<1024, 256, 0, lab_stream>>>((uint32_t *)memory, count / 2, 12345u + (uint32_t)count);
    OK(cudaGetLastError());
    OK(cudaStreamSynchronize(lab_stream));
    return memory;
}

__global__ void fill_normal(float *out, uint64_t count, uint32_t seed, float scale)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 0x85EBCA6Bu ^ seed;
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            x ^= x >> 15, x *= 0x2C1B3C6Du, x ^= x >> 12, x *= 0x297A2D39u, x ^= x >> 15, x += 0x9E3779B9u;
            sum += (float)x * 0x1p-32f - 0.5f;
        }
        out[i] = sum * 1.73f * scale;
    }
}

void lab_fill_floats(float *out, uint64_t count, uint32_t seed, float scale)
{
    fill_normal<<<1024, 256, 0, lab_stream>>>(out, count, seed, scale);
    OK(cudaGetLastError());
}

float *lab_floats(uint64_t count, float scale)
{
    float *memory = (float *)lab_device(count * 4 + 16);
    lab_fill_floats(memory, count, 777u + (uint32_t)count, scale);
    OK(cudaStreamSynchronize(lab_stream));
    return memory;
}

uint64_t *lab_permuted(uint64_t entries, uint64_t bytes)
{
    uint64_t *at = (uint64_t *)malloc(entries * 8), x = 88172645463325252u;
    if (!at)
        exit(1);
    for (uint64_t i = 0; i < entries; i++)
        at[i] = i * bytes;
    for (uint64_t i = entries; i-- > 1;) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint64_t j = x % (i + 1), swap = at[i];
        at[i] = at[j], at[j] = swap;
    }
    return at;
}

static int by_value(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

double lab_seconds(lab_launch launch, void *arg, int launches)
{
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaEvent_t begin, end;
    float ms[RUNS];
    OK(launch(arg, 0));
    OK(cudaStreamSynchronize(lab_stream));
    OK(cudaStreamBeginCapture(lab_stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < launches; i++)
        OK(launch(arg, i));
    OK(cudaStreamEndCapture(lab_stream, &graph));
    OK(cudaGraphInstantiate(&run, graph, 0));
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    OK(cudaGraphLaunch(run, lab_stream));
    for (int i = 0; i < RUNS; i++) {
        OK(cudaEventRecord(begin, lab_stream));
        OK(cudaGraphLaunch(run, lab_stream));
        OK(cudaEventRecord(end, lab_stream));
        OK(cudaEventSynchronize(end));
        OK(cudaEventElapsedTime(&ms[i], begin, end));
    }
    OK(cudaGraphExecDestroy(run));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(begin));
    OK(cudaEventDestroy(end));
    qsort(ms, RUNS, sizeof *ms, by_value);
    return (double)ms[RUNS / 2] / 1000 / launches;
}

void lab_report(const char *name, const char *shape, double seconds, double floor)
{
    printf("%-16s %-44s %9.1f us  floor %9.1f us  %5.1f %%\n", name, shape, seconds * 1e6, floor * 1e6,
           100 * floor / seconds);
    fflush(stdout);
}
