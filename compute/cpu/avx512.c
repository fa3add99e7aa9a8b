/* The kernels with AVX-512 (F, BW, VL, DQ, VNNI): avx2.c at twice the width; what gains nothing from wider
 * registers is AVX2's. Built with these flags whatever the rest is built for; called only where the processor
 * has them. */
#if defined(__x86_64__)
#include <math.h>

#include "compute/cpu/lanes_avx512.h"
#include "compute/cpu/simd.h"

#include "compute/cpu/float_lanes.h"

#include "compute/cpu/tile_lanes.h"

#include "compute/cpu/attention_lanes.h"

#include "compute/cpu/q8_lanes.h"

const struct kernels kernels_avx512 = {
    .name = "avx512",
    .expand = expand,
    .dot_rows = dot_rows,
    .matmul_tile = matmul_tile,
    .quantize = avx2_quantize,
    .q8_dot_rows = q8_dot_rows,
    .q8_panel = q8_panel,
    .q8_tile = q8_tile,
    .q8_rows = LANES,
    .rmsnorm = avx2_rmsnorm,
    .swiglu = swiglu,
    .narrow = avx2_narrow,
    .attn_scores = attn_scores,
    .attn_values = attn_values,
    .softmax_part = softmax_part,
    .pool_weights = avx2_pool_weights,
    .head_dim_multiple = 16,
};
#endif
