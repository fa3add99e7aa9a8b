/* Products of an expanded panel with some tokens: part of avx2.c and of avx512.c, which include it once each
 * after float_lanes.h, whose primitives it uses. */

INLINE void store_quad(const struct matmul_tile *m, int row, int token, __m128 sums)
{
    int left = m->rows - row < 4 ? m->rows - row : 4;
    if (m->bias) {
        float bias[4] = {0};
        memcpy(bias, m->bias + row, (size_t)left * sizeof *bias);
        sums = _mm_add_ps(sums, _mm_loadu_ps(bias));
    }
    store_some(m->out + (size_t)token * m->out_stride + row, sums, left);
}

/* Four rows of the panel times 1..TILE_TOKENS tokens: sums, activations and 1 weight fill the registers. */
INLINE void tile_quad(const struct matmul_tile *m, int row, int token, int tokens)
{
    const float *w = m->panel + row * MATMUL_COLS;
    const float *x[TILE_TOKENS];
    float *rest = m->acc + (token * MATMUL_PANEL + row) * 16;
    vf acc[TILE_TOKENS][4], v[TILE_TOKENS];
    for (int t = 0; t < tokens; t++) {
        x[t] = m->x + (size_t)(token + t) * m->x_stride;
        for (int r = 0; r < 4; r++)
            acc[t][r] = m->first ? v_set(0) : v_load(rest + (t * MATMUL_PANEL + r) * 16);
    }
    uint32_t c = 0;
    for (; c + LANES <= m->cols; c += LANES) {
        for (int t = 0; t < tokens; t++)
            v[t] = v_load(x[t] + c);
        for (int r = 0; r < 4; r++) {
            vf weight = v_load(w + r * MATMUL_COLS + c);
            for (int t = 0; t < tokens; t++)
                acc[t][r] = v_fma(weight, v[t], acc[t][r]);
        }
    }
    for (int t = 0; c < m->cols && t < tokens; t++) {
        vf last = v_load_some(x[t] + c, (int)(m->cols - c));
        for (int r = 0; r < 4; r++)
            acc[t][r] = v_fma(v_load(w + r * MATMUL_COLS + c), last, acc[t][r]);
    }
    if (!m->last) {
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < 4; r++)
                v_store(rest + (t * MATMUL_PANEL + r) * 16, acc[t][r]);
        return;
    }
    __m128 sums[TILE_TOKENS]; /* a loop of its own: short enough that compilers unroll it */
    for (int t = 0; t < tokens; t++)
        sums[t] = quad_sum_of(acc[t]);
    for (int t = 0; t < tokens; t++)
        store_quad(m, row, token + t, sums[t]);
}

/* How many to take at once when `left` are left, and no single one at the end of four. */
INLINE int take_of(int left)
{
    if (left == 4)
        return 2;
    return left >= TILE_TOKENS ? TILE_TOKENS : left < 3 ? left : 3;
}

/* call(arguments, take) with a literal number. */
#define WITH_TAKE(take, call, ...)           \
    do {                                     \
        if (TILE_TOKENS == 6 && (take) == 6) \
            call(__VA_ARGS__, TILE_TOKENS);  \
        else if ((take) == 3)                \
            call(__VA_ARGS__, 3);            \
        else if ((take) == 2)                \
            call(__VA_ARGS__, 2);            \
        else                                 \
            call(__VA_ARGS__, 1);            \
    } while (0)

static void matmul_tile(const struct matmul_tile *m)
{
    for (int t = 0, take; t < m->tokens; t += take) {
        take = take_of(m->tokens - t);
        for (int r = 0; r < m->rows; r += 4)
            WITH_TAKE(take, tile_quad, m, r, t);
    }
}
