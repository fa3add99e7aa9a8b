/* Element types of tensors in files and in memory, with GGUF's numbers, and 16-bit conversions.
 *
 * A quantized type stores blocks: `block_len` consecutive elements of a row in `block_bytes` bytes (GGUF,
 * ggml's public block layouts). Plain types have blocks of one element. */
#ifndef BASE_DTYPE_H
#define BASE_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype {
    DTYPE_F32 = 0,
    DTYPE_F16 = 1,
    DTYPE_Q4_0 = 2, /* f16 d, 16 bytes of nibbles: w = d (q - 8); low nibbles are elements 0..15 */
    DTYPE_Q4_1 = 3, /* f16 d, f16 m, nibbles: w = d q + m */
    DTYPE_Q5_0 = 6, /* f16 d, u32 high bits, nibbles: w = d (q - 16) */
    DTYPE_Q5_1 = 7, /* f16 d, f16 m, u32 high bits, nibbles: w = d q + m */
    DTYPE_Q8_0 = 8, /* f16 d, 32 int8: w = d q */
    DTYPE_Q2_K = 10,
    DTYPE_Q3_K = 11,
    DTYPE_Q4_K = 12,
    DTYPE_Q5_K = 13,
    DTYPE_Q6_K = 14,
    DTYPE_IQ4_NL = 20,
    DTYPE_I8 = 24, /* a retriever's keys on a GPU; of no tensor, so dtype_info does not know it */
    DTYPE_BF16 = 30,
    DTYPE_MAX = 64
};

struct dtype_info {
    const char *name;     /* "Q4_1"; NULL for a number that is no type we know */
    unsigned block_len;   /* elements */
    unsigned block_bytes; /* bytes */
};

/* For any value below DTYPE_MAX; name is NULL where unknown. Others: NULL. */
const struct dtype_info *dtype_info(unsigned type);

/* Bytes of one row of `cols` elements; 0 when cols is not a whole number of blocks or the type is unknown. */
size_t dtype_row_bytes(enum dtype type, uint64_t cols);

static inline float dtype_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023, bits;
    if (exp == 31)
        bits = sign | 0x7f800000u | (man << 13);
    else if (exp)
        bits = sign | ((exp + 112) << 23) | (man << 13);
    else if (!man)
        bits = sign;
    else {
        unsigned shift = (unsigned)__builtin_clz(man) - 21;
        bits = sign | ((113 - shift) << 23) | ((man << (shift + 13)) & 0x7fffff);
    }
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Round to nearest, ties to even, as the hardware does. */
static inline uint16_t dtype_f32_to_f16(float f)
{
    uint32_t x;
    memcpy(&x, &f, sizeof x);
    uint32_t sign = (x >> 16) & 0x8000, a = x & 0x7fffffff;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff));
    if (a >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) { /* subnormal: add a power of two that leaves the result in the low bits */
        float v, magic = 0.5f;
        memcpy(&v, &a, sizeof v);
        v += magic;
        uint32_t r, m;
        memcpy(&r, &v, sizeof r);
        memcpy(&m, &magic, sizeof m);
        return (uint16_t)(sign | (r - m));
    }
    uint32_t odd = (a >> 13) & 1;
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfff + odd) >> 13));
}

static inline float dtype_bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t dtype_f32_to_bf16(float f)
{
    uint32_t x;
    memcpy(&x, &f, sizeof x);
    if ((x & 0x7fffffff) > 0x7f800000u)
        return (uint16_t)((x >> 16) | 0x40);
    return (uint16_t)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}

#endif
