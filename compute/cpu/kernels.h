/* Inside of the CPU backend: the table of kernels that a process chose, scratch memory, and the compute
 * object.
 *
 * Drivers (matmul.c, attention.c, ...) cut work into items for the pool and own every decision about
 * tiles; kernels (reference.c, avx2.c, avx512.c) do arithmetic on one item. For every output element a kernel
 * performs one sequence of operations that depends on the element's own inputs alone, so tiles may fall
 * anywhere.
 *
 * The order of a dot product of float32: lane j of 8 takes elements j, j + 8, j + 16, ... in this order;
 * then ((0+1)+(2+3)) + ((4+5)+(6+7)). A tail shorter than 8 goes to the lanes from 0. AVX-512 has 16 lanes,
 * folded to 8 (j with j + 8) before this sum.
 *
 * The order with activations in int8: integer sums I of a block of 32 are exact; the float32 sum takes the
 * blocks in their order, each as (d * scale) * I, plus m * sum where the type has a minimum, all rounded one
 * by one (no fused operation). A type with a scale for every 16 adds the two halves first; minima of halves
 * count as (m * scale) * total, added likewise. So every path gives the same bits. */
#ifndef COMPUTE_CPU_KERNELS_H
#define COMPUTE_CPU_KERNELS_H

#include "compute/compute.h"

enum {
    MATMUL_PANEL = 16,  /* rows of weights expanded at once: with 576 columns they stay in the L1 cache */
    MATMUL_COLS = 1024, /* columns of a panel; a multiple of every type's block */
    MATMUL_TOKENS = 96, /* tokens that one expanded panel serves; a multiple of the kernels' 3 */
    ATTN_CHUNK = 256,   /* positions of one softmax part; fixed, since it is part of the order of summation */
    ATTN_ROWS = 48,     /* query rows that a chunk serves at once */
    HEAD_DIM_MAX = 1024, /* bound of per-thread scratch */
    Q8_BLOCK = 32,       /* elements that share a scale in quantized activations */
    Q8_ROWS = 16,        /* most rows of an int8 panel; 16 x 1536 columns stay in the L1 cache */
    Q8_BLOCKS = 64,      /* most blocks of an int8 panel: 2048 columns, whole superblocks */
    Q8_TOKENS = 128,     /* tokens that one int8 panel serves */
    ROPE_TABLE = 1 << 17 /* floats of the rope cache: 1024 positions of 128 rotated dimensions */
};

/* One panel of expanded weights times some tokens. The lanes of unfinished sums rest in `acc` between the
 * column blocks of a wide matrix. */
struct matmul_tile {
    float *out; /* [tokens][out_stride], at the panel's first row */
    size_t out_stride;
    const float *panel; /* [MATMUL_PANEL][MATMUL_COLS], zero from `cols` to the next multiple of 16 */
    int rows;           /* valid rows, 1 .. MATMUL_PANEL */
    const float *x;     /* [tokens][x_stride], at the block's first column */
    size_t x_stride;
    int tokens; /* 1 .. MATMUL_TOKENS */
    uint32_t cols;
    float *acc;        /* [MATMUL_TOKENS][MATMUL_PANEL][16] */
    int first, last;   /* first and last column block */
    const float *bias; /* [rows] or NULL */
};

/* 32 activations: x = scale * q. */
struct act_block {
    int8_t q[Q8_BLOCK];
    float scale, sum; /* sum = scale * (total[0] + total[1]) */
    int32_t total[2]; /* sums of q, of each half */
};

/* One panel of weights in integers times some tokens. */
struct q8_tile {
    float *out; /* [tokens][out_stride], at the panel's first row */
    size_t out_stride;
    const void *panel; /* as the same table's q8_panel left it */
    enum dtype type;
    int rows, blocks;
    const struct act_block *x; /* [tokens][x_stride], at the panel's first block */
    size_t x_stride;
    int tokens; /* 1 .. Q8_TOKENS */
    int first, last;
    float *acc;        /* [Q8_TOKENS][Q8_ROWS] */
    const float *bias; /* [rows] or NULL */
};

/* Query rows that all attend the same pieces. */
struct attn_tile {
    const uint8_t *const *piece; /* [count]: K, then V head_dim elements on */
    int count;                   /* 1 .. ATTN_CHUNK */
    int piece_bytes;             /* to prefetch: K and V, or K alone */
    enum dtype type;             /* F16 or BF16 */
    int head_dim;
    const float *const *q; /* [rows] */
    int rows;              /* 1 .. ATTN_ROWS */
    size_t stride;         /* of scores, floats */
    float scale;
};

struct kernels {
    const char *name;
    /* Elements [0, count) of a row that starts at `row`, to float32. count is whole blocks. */
    void (*expand)(float *out, enum dtype type, const uint8_t *row, uint32_t count);
    /* out[r] = dot(row r, x): the product for one token, straight from the file's blocks. */
    void (*dot_rows)(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows, const float *x);
    void (*matmul_tile)(const struct matmul_tile *tile);
    /* One row of activations to int8, nearest even; cols is a multiple of 32. A NaN makes its block NaN. */
    void (*quantize)(struct act_block *out, const float *x, uint32_t cols);
    /* out[r] = dot(row r, x) for a type that q8_type accepts. */
    void (*q8_dot_rows)(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows,
                        const struct act_block *x);
    /* Rows row .. row + rows - 1 (at most q8_rows), blocks of 32 block .. block + blocks - 1. */
    void (*q8_panel)(void *panel, const struct matrix *w, uint32_t row, int rows, uint32_t block, int blocks);
    void (*q8_tile)(const struct q8_tile *tile);
    int q8_rows; /* rows of a panel: the lanes of a register */
    void (*rmsnorm)(float *out, const float *x, const float *weight, int dim, float eps);
    void (*swiglu)(float *out, const float *gate, const float *up, int dim);
    /* To DTYPE_F16 or DTYPE_BF16, nearest even. `out` need not be aligned. */
    void (*narrow)(uint8_t *out, enum dtype type, const float *x, int count);
    /* scores[row][i] = scale * dot(q[row], K of piece i) */
    void (*attn_scores)(float *scores, const struct attn_tile *tile);
    /* acc[row][head_dim] = sum over i, ascending, of scores[row][i] * V of piece i */
    void (*attn_values)(float *acc, const float *scores, const struct attn_tile *tile);
    /* x[i] = exp(x[i] - max of x); returns the sum. count >= 1. A NaN among x makes the sum NaN. */
    float (*softmax_part)(float *x, int count, float *ret_max);
    /* out = e * factor for the first query head of a group, then max(out, e * factor), or out + e * factor;
     * NaN stays. */
    void (*pool_weights)(float *out, const float *e, float factor, int count, enum pool_kind pool, int first);
    int head_dim_multiple; /* the attention kernels want whole multiples; others go to the reference */
};

extern const struct kernels kernels_reference;
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;

/* The reference's expand, for tests. */
void reference_expand(float *out, enum dtype type, const uint8_t *row, uint32_t count);

/* Types whose products run in integers when activations are quantized. */
static inline int q8_type(enum dtype type)
{
    switch (type) {
    case DTYPE_Q4_0:
    case DTYPE_Q4_1:
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
    case DTYPE_Q8_0:
    case DTYPE_IQ4_NL:
    case DTYPE_Q2_K:
    case DTYPE_Q3_K:
    case DTYPE_Q4_K:
    case DTYPE_Q5_K:
    case DTYPE_Q6_K:
        return 1;
    default:
        return 0;
    }
}

/* What is taken off the unsigned number that stands for an element in an int8 panel. */
static inline int q8_offset(enum dtype type)
{
    switch (type) {
    case DTYPE_Q3_K:
        return 4;
    case DTYPE_Q4_0:
        return 8;
    case DTYPE_Q5_0:
        return 16;
    case DTYPE_Q6_K:
        return 32;
    case DTYPE_Q8_0:
    case DTYPE_IQ4_NL:
        return 128;
    default:
        return 0;
    }
}

static inline int q8_has_min(enum dtype type)
{
    return type == DTYPE_Q4_1 || type == DTYPE_Q5_1 || type == DTYPE_Q4_K || type == DTYPE_Q5_K;
}

/* Has a scale for every 16 elements. */
static inline int q8_has_halves(enum dtype type)
{
    return type == DTYPE_Q2_K || type == DTYPE_Q3_K || type == DTYPE_Q6_K;
}

/* Has a minimum too for every 16 elements. */
static inline int q8_has_half_mins(enum dtype type)
{
    return type == DTYPE_Q2_K;
}

/* One block of 32 of LANES rows: 4 elements of every row side by side, and up to four float32. */
enum { Q8_PANEL_BLOCK = Q8_ROWS * (Q8_BLOCK + 4 * 4) };

/* Values of IQ4_NL's 16 codes (ggml's public table). */
#define IQ4_NL_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113

/* What one thread of the pool writes to while it works on an item. */
struct scratch {
    _Alignas(64) float panel[MATMUL_PANEL * MATMUL_COLS];
    _Alignas(64) float acc[MATMUL_TOKENS * MATMUL_PANEL * 16];
    _Alignas(64) uint8_t q8_panel[Q8_BLOCKS * Q8_PANEL_BLOCK];
    _Alignas(64) float q8_acc[Q8_TOKENS * Q8_ROWS];
    _Alignas(64) float scores[ATTN_ROWS * ATTN_CHUNK];
    _Alignas(64) float part[ATTN_ROWS * HEAD_DIM_MAX];
    const uint8_t *piece[ATTN_CHUNK];
    float max[ATTN_ROWS], sum[ATTN_ROWS], part_max[ATTN_ROWS], part_sum[ATTN_ROWS];
};

/* cos and sin of recent positions: the same tokens come by once for every layer, for q and for k. */
struct rope_cache {
    int dims;
    float scale;
    float inv_freq[HEAD_DIM_MAX / 2];
    uint32_t slots;
    uint64_t tag[ROPE_TABLE / 2];   /* position + 1; 0 where empty */
    uint64_t stamp[ROPE_TABLE / 2]; /* run that used the slot last */
    uint64_t run;
    float table[ROPE_TABLE]; /* [slots][dims / 2][cos, sin] */
};

struct compute {
    struct pool *pool;
    int threads;
    const struct kernels *kernels;
    enum compute_activations activations;
    char name[48];
    struct scratch *scratch; /* [threads] */
    struct rope_cache *rope;
    float *shared; /* [SHARED_FLOATS]: partial results between the loops of one operator */
};

/* 32 MiB of address space; only what an operator touches becomes memory. */
enum { SHARED_FLOATS = 8 << 20 };

/* The attention kernels that fit head_dim. */
static inline const struct kernels *kernels_for_head(const struct compute *c, int head_dim)
{
    return head_dim % c->kernels->head_dim_multiple ? &kernels_reference : c->kernels;
}

#endif
