/* Products in integers, a lane for each row: part of avx2.c and of avx512.c, as float_lanes.h is.
 *
 * LANES rows are read a block of 32 at a time and transposed, so that register g holds elements 4g .. 4g + 3
 * of every row; one multiply-add of 8-bit numbers then serves four elements of LANES rows, and sums of rows
 * need no adding across. The same code serves one token, straight from the file's blocks, and many, from a
 * panel; so the order is the same.
 *
 * The includer defines LANES, vi and vf (vectors of LANES uint32_t, float) and
 *   vi lanes_join(__m256i a, __m256i b)     a of row r, b of row r + 8 (ignored with 8 lanes)
 *   __m256i lanes_small(type, p)            a small block: quants in dwords 4..7, before them high bits where
 *                                           there are any, before these d (in the upper half) or d, m
 *   void lanes_halves(v, w, lo, hi)         the 128-bit halves of each 256 bits: lo = v0 w0, hi = v1 w1
 *   vf lanes_f16(vi)                        the lower half of each dword
 *   vi lanes_dot(vi sum, vi u, vi x, wide)  sum + 4 products of uint8 and int8; wide: u may exceed 127
 *   vi lanes_lookup(vi)                     IQ4_NL's values + 128 for codes 0..15
 *   vf lanes_float(vi)                      of int32
 *   Q8_TILE_TOKENS                          tokens that keep their sums in registers together */

#if LANES == 16
#define UNPACK_LOW32(a, b)  ((vi)_mm512_unpacklo_epi32((__m512i)(a), (__m512i)(b)))
#define UNPACK_HIGH32(a, b) ((vi)_mm512_unpackhi_epi32((__m512i)(a), (__m512i)(b)))
#define UNPACK_LOW64(a, b)  ((vi)_mm512_unpacklo_epi64((__m512i)(a), (__m512i)(b)))
#define UNPACK_HIGH64(a, b) ((vi)_mm512_unpackhi_epi64((__m512i)(a), (__m512i)(b)))
#else
#define UNPACK_LOW32(a, b)  ((vi)_mm256_unpacklo_epi32((__m256i)(a), (__m256i)(b)))
#define UNPACK_HIGH32(a, b) ((vi)_mm256_unpackhi_epi32((__m256i)(a), (__m256i)(b)))
#define UNPACK_LOW64(a, b)  ((vi)_mm256_unpacklo_epi64((__m256i)(a), (__m256i)(b)))
#define UNPACK_HIGH64(a, b) ((vi)_mm256_unpackhi_epi64((__m256i)(a), (__m256i)(b)))
#endif

#define NIBBLES 0x0f0f0f0fu

/* One block of LANES rows: value = d * (u - offset) + m. Where the type has halves, d is of the first and m
 * of the second; `min` is what either adds, where both have one. */
struct lanes_block {
    vi u[8];
    vf d, m, min[2];
};

/* t[i] is row i (and i + 8); becomes dword i of all rows. */
INLINE void lanes_transpose(vi t[8])
{
    vi u[8], v[4], w[4];
    for (int i = 0; i < 8; i += 2) {
        u[i] = UNPACK_LOW32(t[i], t[i + 1]);
        u[i + 1] = UNPACK_HIGH32(t[i], t[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        v[2 * i] = UNPACK_LOW64(u[i], u[i + 2]);
        v[2 * i + 1] = UNPACK_HIGH64(u[i], u[i + 2]);
        w[2 * i] = UNPACK_LOW64(u[i + 4], u[i + 6]);
        w[2 * i + 1] = UNPACK_HIGH64(u[i + 4], u[i + 6]);
    }
    for (int i = 0; i < 4; i++)
        lanes_halves(v[i], w[i], &t[i], &t[i + 4]);
}

/* 32 bytes of each row. */
INLINE void lanes_load32(vi t[8], const uint8_t *const row[LANES], size_t at)
{
    for (int i = 0; i < 8; i++)
        t[i] = lanes_join(_mm256_loadu_si256((const void *)(row[i] + at)),
                          _mm256_loadu_si256((const void *)(row[i + LANES - 8] + at)));
    lanes_transpose(t);
}

/* 16 bytes of each row: dwords 0..3. */
INLINE void lanes_load16(vi t[8], const uint8_t *const row[LANES], size_t at)
{
    for (int i = 0; i < 8; i++)
        t[i] = lanes_join(_mm256_castsi128_si256(_mm_loadu_si128((const void *)(row[i] + at))),
                          _mm256_castsi128_si256(_mm_loadu_si128((const void *)(row[i + LANES - 8] + at))));
    lanes_transpose(t);
}

INLINE vi lanes_u16(const uint8_t *const row[LANES], size_t at)
{
    uint32_t h[LANES];
    for (int i = 0; i < LANES; i++) {
        uint16_t v;
        memcpy(&v, row[i] + at, sizeof v);
        h[i] = v;
    }
    vi ret;
    memcpy(&ret, h, sizeof ret);
    return ret;
}

INLINE void lanes_nibbles(vi u[8], const vi t[4])
{
    for (int g = 0; g < 4; g++) {
        u[g] = t[g] & NIBBLES;
        u[g + 4] = (t[g] >> 4) & NIBBLES;
    }
}

/* Types of blocks of 32 with nibbles. Bit 4g + j of `high` goes to bit 4 of byte j: the product moves bit j
 * to 8j + 4, and no two of its terms meet. */
INLINE void lanes_small_block(enum dtype type, struct lanes_block *b, const uint8_t *const row[LANES],
                              size_t at)
{
    int five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
    vi t[8];
    for (int i = 0; i < 8; i++)
        t[i] = lanes_join(lanes_small(type, row[i] + at), lanes_small(type, row[i + LANES - 8] + at));
    lanes_transpose(t);
    lanes_nibbles(b->u, t + 4);
    vi head = five ? t[2] : t[3];
    for (int g = 0; five && g < 8; g++)
        b->u[g] |= (((t[3] >> (4 * g)) & 15) * 0x02040810u) & 0x10101010u;
    for (int g = 0; type == DTYPE_IQ4_NL && g < 8; g++)
        b->u[g] = lanes_lookup(b->u[g]);
    if (q8_has_min(type)) {
        b->d = lanes_f16(head);
        b->m = lanes_f16(head >> 16);
    } else {
        b->d = lanes_f16(head >> 16);
    }
}

/* Q4_K, Q5_K: d, dmin, 12 bytes of 6-bit scales and minima, (32 bytes of fifth bits,) quants. Scales and
 * minima of the last four sub-blocks have their upper two bits in the bytes of the first four. */
INLINE void lanes_super_block(enum dtype type, struct lanes_block *b, const uint8_t *const row[LANES],
                              size_t at, uint32_t sub)
{
    vi h[8], t[8], scale, min;
    lanes_load16(h, row, at);
    uint32_t shift = 8 * (sub % 4);
    if (sub < 4) {
        scale = (h[1] >> shift) & 63;
        min = (h[2] >> shift) & 63;
    } else {
        scale = ((h[3] >> shift) & 15) | (((h[1] >> shift) >> 2) & 0x30);
        min = ((h[3] >> shift >> 4) & 15) | (((h[2] >> shift) >> 2) & 0x30);
    }
    b->d = lanes_f16(h[0]) * lanes_float(scale);
    b->m = -(lanes_f16(h[0] >> 16) * lanes_float(min));
    lanes_load32(t, row, at + (type == DTYPE_Q5_K ? 48 : 16) + 32 * (sub / 2));
    for (int g = 0; g < 8; g++)
        b->u[g] = (t[g] >> (4 * (sub % 2))) & NIBBLES;
    if (type != DTYPE_Q5_K)
        return;
    lanes_load32(t, row, at + 16);
    for (int g = 0; g < 8; g++)
        b->u[g] |= ((t[g] >> sub) & 0x01010101u) << 4;
}

/* Q6_K: 128 bytes of low nibbles, 64 of upper bit pairs, 16 int8 scales, d. */
INLINE void lanes_q6_block(struct lanes_block *b, const uint8_t *const row[LANES], size_t at, uint32_t sub)
{
    vi low[8], high[8];
    uint32_t half = sub / 4, quarter = sub % 4;
    lanes_load32(low, row, at + 64 * half + 32 * (quarter % 2));
    lanes_load32(high, row, at + 128 + 32 * half);
    for (int g = 0; g < 8; g++)
        b->u[g] =
            ((low[g] >> (4 * (quarter / 2))) & NIBBLES) | (((high[g] >> (2 * quarter)) & 0x03030303u) << 4);
    vi scales = lanes_u16(row, at + 192 + 2 * (size_t)sub);
    vf d = lanes_f16(lanes_u16(row, at + 208));
    b->d = d * lanes_float((vi)((vs)(scales << 24) >> 24));
    b->m = d * lanes_float((vi)((vs)(scales << 16) >> 24));
}

INLINE vi lanes_byte(vi v, int index)
{
    return (v >> (uint32_t)(8 * index)) & 255;
}

/* Q2_K: 16 bytes of scale and minimum (a nibble each), 64 of bit pairs, d, dmin. */
INLINE void lanes_q2_block(struct lanes_block *b, const uint8_t *const row[LANES], size_t at, uint32_t sub)
{
    lanes_load32(b->u, row, at + 16 + 32 * (size_t)(sub / 4));
    for (int g = 0; g < 8; g++)
        b->u[g] = (b->u[g] >> (2 * (sub % 4))) & 0x03030303u;
    vi scales = lanes_u16(row, at + 2 * (size_t)sub);
    vf d = lanes_f16(lanes_u16(row, at + 80)), dmin = -lanes_f16(lanes_u16(row, at + 82));
    b->d = d * lanes_float(scales & 15);
    b->m = d * lanes_float((scales >> 8) & 15);
    b->min[0] = dmin * lanes_float((scales >> 4) & 15);
    b->min[1] = dmin * lanes_float(scales >> 12);
}

/* Q3_K: 32 bytes of third bits, 64 of bit pairs, 12 of 6-bit scales less 32 (lower nibbles of the first
 * eight and of the last eight in 8 bytes, upper bit pairs of every fourth in one), d. */
INLINE void lanes_q3_block(struct lanes_block *b, const uint8_t *const row[LANES], size_t at, uint32_t sub)
{
    vi third[8];
    lanes_load32(third, row, at);
    lanes_load32(b->u, row, at + 32 + 32 * (size_t)(sub / 4));
    for (int g = 0; g < 8; g++)
        b->u[g] = ((b->u[g] >> (2 * (sub % 4))) & 0x03030303u) | (((third[g] >> sub) & 0x01010101u) << 2);
    vi low = lanes_u16(row, at + 96 + 2 * (size_t)(sub % 4)) >> (sub / 4 * 4);
    vi high = lanes_u16(row, at + 104 + 2 * (size_t)(sub % 2)) >> (sub / 2 * 2);
    vi scales = (low & 0x0f0f) | ((high & 0x0303) << 4);
    vf d = lanes_f16(lanes_u16(row, at + 108));
    b->d = d * lanes_float(lanes_byte(scales, 0) - 32);
    b->m = d * lanes_float(lanes_byte(scales, 1) - 32);
}

INLINE void lanes_read(enum dtype type, struct lanes_block *b, const uint8_t *const row[LANES],
                       uint32_t block)
{
    if (type == DTYPE_Q4_K || type == DTYPE_Q5_K) {
        lanes_super_block(type, b, row, (size_t)(block / 8) * (type == DTYPE_Q5_K ? 176 : 144), block % 8);
    } else if (type == DTYPE_Q2_K) {
        lanes_q2_block(b, row, (size_t)(block / 8) * 84, block % 8);
    } else if (type == DTYPE_Q3_K) {
        lanes_q3_block(b, row, (size_t)(block / 8) * 110, block % 8);
    } else if (type == DTYPE_Q6_K) {
        lanes_q6_block(b, row, (size_t)(block / 8) * 210, block % 8);
    } else if (type == DTYPE_Q8_0) {
        lanes_load32(b->u, row, (size_t)block * 34 + 2);
        for (int g = 0; g < 8; g++)
            b->u[g] ^= 0x80808080u;
        b->d = lanes_f16(lanes_u16(row, (size_t)block * 34));
    } else {
        lanes_small_block(type, b, row, (size_t)block * block32_bytes(type));
    }
}

INLINE vi lanes_activations(const struct act_block *x, int g)
{
    uint32_t four;
    memcpy(&four, x->q + 4 * g, sizeof four);
    return (vi){0} + four;
}

INLINE vi lanes_sum(enum dtype type, const vi u[8], const struct act_block *x, int first, int end)
{
    vi sum = {0};
    if (q8_offset(type)) {
        int32_t total = q8_has_halves(type) ? x->total[first / 4] : x->total[0] + x->total[1];
        sum = sum + (uint32_t)(-q8_offset(type) * total);
    }
    for (int g = first; g < end; g++)
        sum = lanes_dot(sum, u[g], lanes_activations(x, g), q8_offset(type) == 128);
    return sum;
}

/* acc + this block's part, each operation rounded. */
INLINE vf lanes_step(enum dtype type, vf acc, const struct lanes_block *b, const struct act_block *x)
{
    if (!q8_has_halves(type)) {
        vf part = (b->d * x->scale) * lanes_float(lanes_sum(type, b->u, x, 0, 8));
        return acc + (q8_has_min(type) ? part + b->m * x->sum : part);
    }
    vf part = (b->d * x->scale) * lanes_float(lanes_sum(type, b->u, x, 0, 4)) +
              (b->m * x->scale) * lanes_float(lanes_sum(type, b->u, x, 4, 8));
    if (q8_has_half_mins(type))
        part = part +
               ((b->min[0] * x->scale) * (float)x->total[0] + (b->min[1] * x->scale) * (float)x->total[1]);
    return acc + part;
}

/* Pointers to LANES rows; past the end the last row stands in, and its result is not stored. */
INLINE void lanes_rows(const uint8_t *ret_row[LANES], const struct matrix *w, uint32_t first, uint32_t rows)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    for (uint32_t i = 0; i < LANES; i++)
        ret_row[i] = (const uint8_t *)w->data + (size_t)(first + (i < rows ? i : rows - 1)) * row_bytes;
}

INLINE void q8_dot_rows_as(enum dtype type, float *out, const struct matrix *w, uint32_t first, uint32_t rows,
                           const struct act_block *x)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    for (uint32_t r = 0; r < rows; r += LANES) {
        const uint8_t *row[LANES];
        uint32_t left = rows - r < LANES ? rows - r : LANES, blocks = w->cols / Q8_BLOCK;
        lanes_rows(row, w, first + r, left);
        /* The next rows, a LANES-th of them with every block; only prefetched, so it may pass the end. */
        uintptr_t ahead = (uintptr_t)row[0] + LANES * row_bytes;
        size_t ahead_step = LANES * row_bytes / blocks;
        vf acc = {0};
        for (uint32_t i = 0; i < blocks; i++) {
            struct lanes_block b;
            for (size_t at = 0; at < ahead_step; at += 64)
                _mm_prefetch((const char *)(ahead + i * ahead_step + at), _MM_HINT_T0);
            lanes_read(type, &b, row, i);
            acc = lanes_step(type, acc, &b, x + i);
        }
        memcpy(out + r, &acc, left * sizeof *out);
    }
}

INLINE void q8_panel_as(enum dtype type, void *panel, const uint8_t *const row[LANES], uint32_t block,
                        int blocks)
{
    struct lanes_block *b = panel;
    for (int i = 0; i < blocks; i++, b++) { /* by way of registers; what the type lacks is not written */
        struct lanes_block fresh;
        lanes_read(type, &fresh, row, block + (uint32_t)i);
        memcpy(b->u, fresh.u, sizeof b->u);
        b->d = fresh.d;
        if (q8_has_min(type) || q8_has_halves(type))
            b->m = fresh.m;
        if (q8_has_half_mins(type))
            memcpy(b->min, fresh.min, sizeof b->min);
    }
}

INLINE void q8_store(const struct q8_tile *t, int token, vf acc)
{
    if (!t->last) {
        memcpy(t->acc + token * Q8_ROWS, &acc, sizeof acc);
        return;
    }
    if (t->bias) {
        vf bias = {0};
        memcpy(&bias, t->bias, (size_t)t->rows * sizeof(float));
        acc = acc + bias;
    }
    memcpy(t->out + (size_t)token * t->out_stride, &acc, (size_t)t->rows * sizeof(float));
}

INLINE void q8_tile_tokens(enum dtype type, const struct q8_tile *t, int token, int tokens)
{
    const struct lanes_block *b = t->panel;
    const struct act_block *x = t->x + (size_t)token * t->x_stride;
    vf acc[Q8_TILE_TOKENS] = {0};
    for (int i = 0; i < tokens && !t->first; i++)
        memcpy(&acc[i], t->acc + (token + i) * Q8_ROWS, sizeof acc[i]);
    for (int k = 0; k < t->blocks; k++, b++, x++)
        for (int i = 0; i < tokens; i++)
            acc[i] = lanes_step(type, acc[i], b, x + (size_t)i * t->x_stride);
    for (int i = 0; i < tokens; i++)
        q8_store(t, token + i, acc[i]);
}

INLINE void q8_tile_as(enum dtype type, const struct q8_tile *t)
{
    int token = 0;
    for (; token + Q8_TILE_TOKENS <= t->tokens; token += Q8_TILE_TOKENS)
        q8_tile_tokens(type, t, token, Q8_TILE_TOKENS);
    for (; token < t->tokens; token++)
        q8_tile_tokens(type, t, token, 1);
}

#define FOR_EACH_Q8_TYPE(call)    \
    TYPE_CASE(call, DTYPE_Q4_0)   \
    TYPE_CASE(call, DTYPE_Q4_1)   \
    TYPE_CASE(call, DTYPE_Q5_0)   \
    TYPE_CASE(call, DTYPE_Q5_1)   \
    TYPE_CASE(call, DTYPE_Q8_0)   \
    TYPE_CASE(call, DTYPE_IQ4_NL) \
    TYPE_CASE(call, DTYPE_Q2_K)   \
    TYPE_CASE(call, DTYPE_Q3_K)   \
    TYPE_CASE(call, DTYPE_Q4_K)   \
    TYPE_CASE(call, DTYPE_Q5_K)   \
    TYPE_CASE(call, DTYPE_Q6_K)   \
    default:                      \
        CHECK(!"a weight type without integer products")

static void q8_dot_rows(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows,
                        const struct act_block *x)
{
#define Q8_DOT_ROWS(t) q8_dot_rows_as(t, out, w, first_row, rows, x)
    switch (w->type) {
        FOR_EACH_Q8_TYPE(Q8_DOT_ROWS);
    }
#undef Q8_DOT_ROWS
}

static void q8_panel(void *panel, const struct matrix *w, uint32_t first, int rows, uint32_t block,
                     int blocks)
{
    const uint8_t *row[LANES];
    lanes_rows(row, w, first, (uint32_t)rows);
#define PANEL(t) q8_panel_as(t, panel, row, block, blocks)
    switch (w->type) {
        FOR_EACH_Q8_TYPE(PANEL);
    }
#undef PANEL
}

static void q8_tile(const struct q8_tile *tile)
{
#define TILE(t) q8_tile_as(t, tile)
    switch (tile->type) {
        FOR_EACH_Q8_TYPE(TILE);
    }
#undef TILE
}
