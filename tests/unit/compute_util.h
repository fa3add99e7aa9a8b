/* What the tests of the operators share: random data, naive products in double, weights of every type with a
 * dequantization of their own. */
#ifndef TESTS_UNIT_COMPUTE_UTIL_H
#define TESTS_UNIT_COMPUTE_UTIL_H

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "compute/compute.h"
#include "compute/cpu/kernels.h"

/* All paths and several numbers of threads. */
struct variant {
    enum compute_isa isa;
    int threads;
    enum compute_activations activations;
};
static const struct variant variants[] = {
    {COMPUTE_ISA_REFERENCE, 1, COMPUTE_ACTIVATIONS_F32}, {COMPUTE_ISA_REFERENCE, 2, COMPUTE_ACTIVATIONS_F32},
    {COMPUTE_ISA_AVX2, 1, COMPUTE_ACTIVATIONS_F32},      {COMPUTE_ISA_AVX2, 2, COMPUTE_ACTIVATIONS_F32},
    {COMPUTE_ISA_AVX2, 3, COMPUTE_ACTIVATIONS_F32},      {COMPUTE_ISA_AVX512, 1, COMPUTE_ACTIVATIONS_F32},
    {COMPUTE_ISA_AVX512, 3, COMPUTE_ACTIVATIONS_F32},    {COMPUTE_ISA_REFERENCE, 2, COMPUTE_ACTIVATIONS_Q8},
    {COMPUTE_ISA_AVX2, 3, COMPUTE_ACTIVATIONS_Q8},       {COMPUTE_ISA_AVX512, 1, COMPUTE_ACTIVATIONS_Q8},
    {COMPUTE_ISA_AVX512, 3, COMPUTE_ACTIVATIONS_Q8},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* The first of the variants that must give the same bits, which differ in threads alone. */
static inline int first_of_path(size_t v)
{
    return v == 0 || variants[v].isa != variants[v - 1].isa ||
           variants[v].activations != variants[v - 1].activations;
}

/* NULL where the processor lacks the instructions. */
static inline struct compute *make_compute(const struct variant *v)
{
    struct compute *c = NULL;
    struct err err;
    struct compute_options options = {"cpu", v->threads, v->isa, v->activations};
    int rc = compute_create_with(&options, &c, &err);
    if (rc < 0) {
        assert_int_equal(rc, -ENODEV);
        assert_true(v->isa == COMPUTE_ISA_AVX2 || v->isa == COMPUTE_ISA_AVX512);
    }
    return c;
}

static inline uint32_t rng_next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* Roughly normal, with a rare large value. */
static inline float rng_float(uint64_t *state)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)(rng_next(state) >> 8) / (float)(1 << 24) - 0.5f;
    return rng_next(state) % 97 == 0 ? sum * 10 : sum;
}

static inline float *random_floats(uint64_t seed, size_t count)
{
    float *x = mem_alloc(count, sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = rng_float(&seed);
    return x;
}

static inline float half_at(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return dtype_f16_to_f32(v);
}

/* Element i of a row: by the description of the block types in base/dtype.h; the types that it does not
 * describe by the plain reference, which test_compute_quants.c checks against vectors. */
static inline double weight_at(enum dtype type, const uint8_t *row, uint32_t i)
{
    uint16_t u16;
    uint32_t u32;
    float f32;
    switch (type) {
    case DTYPE_F32:
        memcpy(&f32, row + 4 * (size_t)i, sizeof f32);
        return (double)f32;
    case DTYPE_F16:
        return (double)half_at(row + 2 * (size_t)i);
    case DTYPE_BF16:
        memcpy(&u16, row + 2 * (size_t)i, sizeof u16);
        return (double)dtype_bf16_to_f32(u16);
    default:
        break;
    }
    const struct dtype_info *info = dtype_info(type);
    if (type == DTYPE_IQ4_NL || info->block_len == 256) {
        static float buf[256]; /* callers go through a block in order */
        if (i % info->block_len == 0)
            reference_expand(buf, type, row + (size_t)(i / info->block_len) * info->block_bytes,
                             info->block_len);
        return (double)buf[i % info->block_len];
    }
    const uint8_t *b = row + (size_t)(i / 32) * info->block_bytes;
    unsigned j = i % 32;
    double d = (double)half_at(b);
    if (type == DTYPE_Q8_0)
        return d * (double)(int8_t)b[2 + j];
    int with_min = type == DTYPE_Q4_1 || type == DTYPE_Q5_1, five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
    const uint8_t *high = b + (with_min ? 4 : 2), *nibbles = high + (five ? 4 : 0);
    int q = j < 16 ? nibbles[j] & 15 : nibbles[j - 16] >> 4;
    if (five) {
        memcpy(&u32, high, sizeof u32);
        q += (int)(u32 >> j & 1) * 16;
    }
    return with_min ? d * q + (double)half_at(b + 2) : d * (q - (five ? 16 : 8));
}

static const enum dtype matrix_types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0,   DTYPE_Q4_1,
                                          DTYPE_Q5_0, DTYPE_Q5_1, DTYPE_Q8_0, DTYPE_IQ4_NL, DTYPE_Q2_K,
                                          DTYPE_Q3_K, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
enum { MATRIX_TYPES = sizeof matrix_types / sizeof *matrix_types };

static inline void put_half(uint8_t *p, float v)
{
    uint16_t u = dtype_f32_to_f16(v);
    memcpy(p, &u, sizeof u);
}

/* Byte offset of a block's (first) f16 scale. */
static inline size_t scale_at(enum dtype type)
{
    return type == DTYPE_Q2_K ? 80 : type == DTYPE_Q3_K ? 108 : type == DTYPE_Q6_K ? 208 : 0;
}

static inline int has_second_scale(enum dtype type)
{
    return type == DTYPE_Q4_1 || type == DTYPE_Q5_1 || type == DTYPE_Q2_K || type == DTYPE_Q4_K ||
           type == DTYPE_Q5_K;
}

/* `cols` up to whole blocks. */
static inline uint32_t whole_blocks(enum dtype type, uint32_t cols)
{
    uint32_t len = dtype_info(type)->block_len;
    return (cols + len - 1) / len * len;
}

/* Random bytes for the quants, sane scales. Free .data with mem_free. */
static inline struct matrix random_matrix(uint64_t seed, enum dtype type, uint32_t rows, uint32_t cols)
{
    size_t bytes = dtype_row_bytes(type, cols) * rows, block = dtype_info(type)->block_bytes;
    uint8_t *data = mem_alloc(bytes, 1);
    for (size_t i = 0; i < bytes; i += block) {
        for (size_t j = 0; j < block; j++)
            data[i + j] = (uint8_t)rng_next(&seed);
        float v = rng_float(&seed);
        uint16_t bf16 = dtype_f32_to_bf16(v);
        if (type == DTYPE_F32)
            memcpy(data + i, &v, sizeof v);
        else if (type == DTYPE_BF16)
            memcpy(data + i, &bf16, sizeof bf16);
        else
            put_half(data + i + scale_at(type), type == DTYPE_F16 ? v : v * 0.05f);
        if (has_second_scale(type))
            put_half(data + i + scale_at(type) + 2, rng_float(&seed) * 0.5f);
    }
    return (struct matrix){type, rows, cols, data};
}

static inline void free_matrix(struct matrix *m)
{
    void *data = (void *)(uintptr_t)m->data;
    mem_free(&data);
    m->data = NULL;
}

/* |a - expected| <= tolerance * scale, where scale is the sum of the magnitudes that were added up. */
static inline void check_near(float a, double expected, double scale, double tolerance, const char *what,
                              size_t at)
{
    double error = fabs((double)a - expected);
    if (!(error <= tolerance * scale)) {
        print_error("%s: element %zu is %.9g, expected %.9g, error %.3g of %.3g\n", what, at, (double)a,
                    expected, error, tolerance * scale);
        fail();
    }
}

#endif
