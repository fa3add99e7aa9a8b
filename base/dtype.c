/* The table behind dtype.h. */
#include "base/dtype.h"

static const struct dtype_info infos[DTYPE_MAX] = {
    [DTYPE_F32] = {"F32", 1, 4},       [DTYPE_F16] = {"F16", 1, 2},         [DTYPE_BF16] = {"BF16", 1, 2},
    [DTYPE_Q4_0] = {"Q4_0", 32, 18},   [DTYPE_Q4_1] = {"Q4_1", 32, 20},     [DTYPE_Q5_0] = {"Q5_0", 32, 22},
    [DTYPE_Q5_1] = {"Q5_1", 32, 24},   [DTYPE_Q8_0] = {"Q8_0", 32, 34},     [DTYPE_Q2_K] = {"Q2_K", 256, 84},
    [DTYPE_Q3_K] = {"Q3_K", 256, 110}, [DTYPE_Q4_K] = {"Q4_K", 256, 144},   [DTYPE_Q5_K] = {"Q5_K", 256, 176},
    [DTYPE_Q6_K] = {"Q6_K", 256, 210}, [DTYPE_IQ4_NL] = {"IQ4_NL", 32, 18},
};

const struct dtype_info *dtype_info(unsigned type)
{
    return type < DTYPE_MAX ? &infos[type] : NULL;
}

size_t dtype_row_bytes(enum dtype type, uint64_t cols)
{
    const struct dtype_info *info = dtype_info(type);
    if (!info || !info->name || cols % info->block_len)
        return 0;
    size_t bytes;
    if (__builtin_mul_overflow(cols / info->block_len, info->block_bytes, &bytes))
        return 0;
    return bytes;
}
