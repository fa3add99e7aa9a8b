/* The kernels with AVX2, FMA and F16C. Built with these flags whatever the rest is built for; called only
 * where the processor has them.
 *
 * Stateless; any thread. Every kernel keeps the order of kernels.h. Here is what has one width; the rest is
 * written once for both widths, in the headers that are included below. */
#if defined(__x86_64__)
#include <math.h>

#include "compute/cpu/lanes_avx2.h"
#include "compute/cpu/simd.h"

#include "compute/cpu/float_lanes.h"

#include "compute/cpu/tile_lanes.h"

#include "compute/cpu/attention_lanes.h"

#include "compute/cpu/q8_lanes.h"

/* 8 numbers of x * factor, in [-127, 127], 0 for NaN. */
INLINE __m256i quantize8(const float *x, __m256 factor)
{
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), factor);
    v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
    v = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), v));
    return _mm256_cvtps_epi32(v);
}

static int32_t sum_of(__m128i v)
{
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

/* As the reference: the largest magnitude passes over NaN, which then spoils the scale. */
INLINE void quantize_block(struct act_block *out, const float *x)
{
    __m256 most = _mm256_setzero_ps(), nan = _mm256_setzero_ps();
    for (int i = 0; i < Q8_BLOCK; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), most);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    float largest = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    __m256 factor = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0);
    __m256i a = _mm256_packs_epi32(quantize8(x, factor), quantize8(x + 8, factor));
    __m256i b = _mm256_packs_epi32(quantize8(x + 16, factor), quantize8(x + 24, factor));
    __m256i q =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((void *)out->q, q);
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    out->total[0] = sum_of(_mm256_castsi256_si128(sums));
    out->total[1] = sum_of(_mm256_extracti128_si256(sums, 1));
    out->scale = largest * (1.0f / 127) + (_mm256_movemask_ps(nan) ? NAN : 0.0f);
    out->sum = out->scale * (float)(out->total[0] + out->total[1]);
}

void avx2_quantize(struct act_block *out, const float *x, uint32_t cols)
{
    for (uint32_t i = 0; i < cols; i += Q8_BLOCK)
        quantize_block(out++, x + i);
}

void avx2_rmsnorm(float *out, const float *x, const float *weight, int dim, float eps)
{
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
        __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i)), b = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
    }
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
    double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (; i < dim; i++)
        sum += (double)x[i] * (double)x[i];
    float factor = (float)(1.0 / sqrt(sum / dim + (double)eps));
    for (i = 0; i < dim; i++)
        out[i] = x[i] * factor * weight[i];
}

void avx2_narrow(uint8_t *out, enum dtype type, const float *x, int count)
{
    int i = 0;
    for (; type == DTYPE_F16 && i + 8 <= count; i += 8)
        _mm_storeu_si128((void *)(out + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; i++) {
        uint16_t v = type == DTYPE_BF16 ? dtype_f32_to_bf16(x[i]) : dtype_f32_to_f16(x[i]);
        memcpy(out + 2 * i, &v, sizeof v);
    }
}

/* max with NaN of either side kept. */
INLINE __m256 sticky_max(__m256 fresh, __m256 old)
{
    return _mm256_or_ps(_mm256_max_ps(fresh, old), _mm256_cmp_ps(fresh, fresh, _CMP_UNORD_Q));
}

void avx2_pool_weights(float *out, const float *e, float factor, int count, enum pool_kind pool, int first)
{
    __m256 scale = _mm256_set1_ps(factor);
    for (int i = 0; i < count; i += 8) {
        __m256i mask = lane_mask(count - i);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(e + i, mask), scale);
        if (!first) {
            __m256 old = _mm256_maskload_ps(out + i, mask);
            v = pool == POOL_MEAN ? _mm256_add_ps(old, v) : sticky_max(v, old);
        }
        _mm256_maskstore_ps(out + i, mask, v);
    }
}

const struct kernels kernels_avx2 = {
    .name = "avx2",
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
    .head_dim_multiple = 8,
};
#endif
