/* What the tests of the CUDA operators share: a table of tests, device memory that is freed after each,
 * random inputs, and comparison with the CPU's results. One thread. */
#ifndef TESTS_GPU_GPU_TEST_H
#define TESTS_GPU_GPU_TEST_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/compute.h"
#include "compute/cuda/kernels.h"

struct gpu_test {
    const char *name;
    void (*run)(void);
};

/* Each ends with an entry without a name. */
extern const struct gpu_test tests_rows[], tests_moves[], tests_attention[], tests_select[];

extern bool gpu_small;              /* sizes for a memory checker */
extern struct compute *gpu_compute; /* the reference */

/* Device memory filled with 0xff bytes (NaN), or with a copy of `data`. */
void *gpu_alloc(size_t bytes);
void *gpu_upload(const void *data, size_t bytes);
/* Host memory, freed after the test. */
void *gpu_host(size_t bytes);
/* Pinned host memory that the device maps at *ret_device. */
void *gpu_mapped(size_t bytes, void **ret_device);
/* Waits for the device; a copy of `bytes`, freed after the test. */
void *gpu_download(const void *device, size_t bytes);

uint32_t gpu_random(void);
float gpu_normal(void);
float *gpu_normals(size_t count, float scale);
uint16_t *gpu_bf16(const float *x, size_t count);
float *gpu_from_bf16(const uint16_t *x, size_t count);

/* Records ||out - ref|| / ||ref|| for the report, and fails above `most`, or where one is NaN and one is
 * not. */
void gpu_compare(const char *what, const float *out, const float *ref, size_t count, double most);
void gpu_equal(const char *what, const void *a, const void *b, size_t bytes);
void gpu_expect(bool holds, const char *file, int line, const char *what);

#define EXPECT(holds) gpu_expect((holds), __FILE__, __LINE__, #holds)
#define COUNT_OF(a)   ((int)(sizeof(a) / sizeof *(a)))

#endif
