/* Attention, softmax and SwiGLU: part of avx2.c and of avx512.c, which include it once each after
 * float_lanes.h, whose primitives it uses. More of them:
 *   v_min, v_max(a, b)                 b where one of them is NaN
 *   v_round(v)                         to the nearest integer
 *   v_scale2(v, n)                     v * 2^n
 *   v_zero_where_less(v, x, limit)     0 where x < limit
 *   v_keep(v, count)                   0 from lane count on */

/* exp: 2^n times a Taylor polynomial of degree 7 on [-ln2/2, ln2/2], where its error is below 6e-9. Below
 * -86.5 the result is 0, above 88.7 infinity, of NaN it is NaN (operand order of min and max matters). */
INLINE vf v_exp(vf given)
{
    vf x = v_max(v_set(-87.0f), v_min(v_set(89.0f), given));
    vf n = v_round(x * v_set(0x1.715476p+0f));
    vf r = v_fma(-n, v_set(0x1.62e4p-1f), x);
    r = v_fma(-n, v_set(0x1.7f7d1cp-20f), r);
    vf p = v_fma(v_set(1.0f / 5040), r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return v_zero_where_less(v_scale2(p, n), given, -86.5f);
}

static void swiglu(float *out, const float *gate, const float *up, int dim)
{
    for (int i = 0; i < dim; i += LANES) {
        vf g = v_load_some(gate + i, dim - i), u = v_load_some(up + i, dim - i);
        v_store_some(out + i, g / (v_set(1.0f) + v_exp(-g)) * u, dim - i);
    }
}

/* Scores of four pieces for some query rows. */
INLINE void score_quad(enum dtype type, const uint8_t *const piece[4], const float *const *q, int rows,
                       int head_dim, __m128 ret_sums[TILE_TOKENS])
{
    vf acc[TILE_TOKENS][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = v_set(0);
    for (int d = 0; d < head_dim; d += LANES) {
        vf v[TILE_TOKENS];
        for (int r = 0; r < rows; r++)
            v[r] = v_load(q[r] + d);
        for (int i = 0; i < 4; i++) {
            vf k = v_plain(type, piece[i] + 2 * d);
            for (int r = 0; r < rows; r++)
                acc[r][i] = v_fma(k, v[r], acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        ret_sums[r] = quad_sum_of(acc[r]);
}

INLINE void score_rows(enum dtype type, float *scores, const struct attn_tile *t, int row, int rows)
{
    __m128 scale = _mm_set1_ps(t->scale), sums[TILE_TOKENS];
    if (row == 0)
        prefetch_pieces(t, 0, PREFETCH_PIECES);
    for (int i = 0; i < t->count; i += 4) {
        int left = t->count - i < 4 ? t->count - i : 4;
        const uint8_t *piece[4];
        for (int j = 0; j < 4; j++) /* past the end the last piece stands in; its score is not stored */
            piece[j] = t->piece[i + (j < left ? j : left - 1)];
        if (row == 0)
            prefetch_pieces(t, i + PREFETCH_PIECES, i + PREFETCH_PIECES + 4);
        score_quad(type, piece, t->q + row, rows, t->head_dim, sums);
        for (int r = 0; r < rows; r++)
            store_some(scores + (size_t)(row + r) * t->stride + i, _mm_mul_ps(sums[r], scale), left);
    }
}

/* Weighted sum of V for some rows and LANES * `width` dimensions; positions ascending, one chain each. */
INLINE void value_block(enum dtype type, float *acc, const float *scores, const struct attn_tile *t,
                        const struct span *s, int width)
{
    vf sum[TILE_TOKENS][8];
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            sum[r][j] = v_set(0);
    size_t at = 2 * ((size_t)t->head_dim + (size_t)s->d);
    for (int i = 0; i < t->count; i++) {
        vf p[TILE_TOKENS];
        for (int r = 0; r < s->rows; r++)
            p[r] = v_set(scores[(size_t)(s->row + r) * t->stride + (size_t)i]);
        for (int j = 0; j < width; j++) {
            vf v = v_plain(type, t->piece[i] + at + 2 * LANES * j);
            for (int r = 0; r < s->rows; r++)
                sum[r][j] = v_fma(p[r], v, sum[r][j]);
        }
    }
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            v_store(acc + (s->row + r) * t->head_dim + s->d + LANES * j, sum[r][j]);
}

INLINE void value_rows(enum dtype type, float *acc, const float *scores, const struct attn_tile *t, int row,
                       int rows)
{
    struct span s = {row, rows, 0};
    if (rows == 1)
        for (; s.d + 8 * LANES <= t->head_dim; s.d += 8 * LANES)
            value_block(type, acc, scores, t, &s, 8);
    for (; s.d + 4 * LANES <= t->head_dim; s.d += 4 * LANES)
        value_block(type, acc, scores, t, &s, 4);
    for (; s.d < t->head_dim; s.d += LANES)
        value_block(type, acc, scores, t, &s, 1);
}

static void attn_scores(float *scores, const struct attn_tile *t)
{
    for (int row = 0, take; row < t->rows; row += take) {
        take = take_of(t->rows - row);
        if (t->type == DTYPE_BF16)
            WITH_TAKE(take, score_rows, DTYPE_BF16, scores, t, row);
        else
            WITH_TAKE(take, score_rows, DTYPE_F16, scores, t, row);
    }
}

static void attn_values(float *acc, const float *scores, const struct attn_tile *t)
{
    for (int row = 0, take; row < t->rows; row += take) {
        take = take_of(t->rows - row);
        if (t->type == DTYPE_BF16)
            WITH_TAKE(take, value_rows, DTYPE_BF16, acc, scores, t, row);
        else
            WITH_TAKE(take, value_rows, DTYPE_F16, acc, scores, t, row);
    }
}

static float max_of(const float *x, int count)
{
    vf most = v_set(-INFINITY);
    int i = 0;
    for (; i + LANES <= count; i += LANES) /* with a NaN the second operand is taken, so NaN is passed over */
        most = v_max(v_load(x + i), most);
    float lanes[LANES], max = -INFINITY;
    v_store(lanes, most);
    for (int j = 0; j < LANES; j++)
        max = lanes[j] > max ? lanes[j] : max;
    for (; i < count; i++)
        max = x[i] > max ? x[i] : max;
    return max;
}

static float softmax_part(float *x, int count, float *ret_max)
{
    float max = max_of(x, count), lanes[8];
    vf most = v_set(max), sum = v_set(0);
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf e = v_exp(v_load(x + i) - most);
        v_store(x + i, e);
        sum = sum + e;
    }
    if (i < count) {
        vf e = v_exp(v_load_some(x + i, count - i) - most);
        v_store_some(x + i, e, count - i);
        sum = sum + v_keep(e, count - i);
    }
    _mm256_storeu_ps(lanes, v_fold(sum));
    *ret_max = max;
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}
