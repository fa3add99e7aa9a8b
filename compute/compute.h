/* Operators of the decoder and the retriever: one header, a backend chosen once at start.
 *
 * Conventions. Shapes are written [token][head][dim]; all activations are float32 and contiguous. Weights
 * stay in their file's type (base/dtype.h). `n` counts tokens. Inputs are const and outputs come first. No
 * operator allocates, and none lets a result depend on how many tokens were given together, on the number of
 * threads, or on where a KV piece lies: each output element is computed by the same sequence of operations
 * whatever stands beside it (design section "Exactness"). The CPU has a plain reference, an AVX2 and an
 * AVX-512 path; within one process the path never changes.
 *
 * A `struct compute` belongs to one thread; operators return when their work is done. */
#ifndef COMPUTE_COMPUTE_H
#define COMPUTE_COMPUTE_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"

struct compute;

/* AUTO is the best that the processor has. */
enum compute_isa { COMPUTE_ISA_AUTO, COMPUTE_ISA_REFERENCE, COMPUTE_ISA_AVX2, COMPUTE_ISA_AVX512 };
#define COMPUTE_ISA_CHOICES "auto|reference|avx2|avx512" /* in that order */

/* What products with quantized weights are computed from. F32: activations as they are. Q8: activations
 * rounded to int8 with one scale for 32 of them, and integer products; several times as fast, off by about
 * 0.4 % of a block's largest activation. Types without integer products (F32, F16, BF16, Q2_K, Q3_K) use
 * float32 in both modes. */
enum compute_activations { COMPUTE_ACTIVATIONS_F32, COMPUTE_ACTIVATIONS_Q8 };
#define COMPUTE_ACTIVATIONS_CHOICES "f32|q8" /* in that order */

struct compute_options {
    const char *device; /* "cpu" */
    int threads;        /* >= 1 */
    enum compute_isa isa;
    enum compute_activations activations;
};

/* -ENODEV with the reason when the device or the instruction set is not there, -EINVAL for a number of
 * threads out of range. */
int compute_create_with(const struct compute_options *options, struct compute **ret_compute, struct err *err);

/* compute_create_with, activations float32. `device`: "cpu". `threads` >= 1. `isa` other than AUTO forces a
 * path (tests, bench). */
int compute_create(const char *device, int threads, enum compute_isa isa, struct compute **ret_compute,
                   struct err *err);
void compute_free(struct compute **compute);

/* "cpu reference", "cpu avx2", "cpu avx512", with " q8" after it for such activations: for logs, reports. */
const char *compute_name(const struct compute *compute);

/* A weight matrix where the model file maps it: rows x cols, row-major, rows of dtype_row_bytes(type,
 * cols). */
struct matrix {
    enum dtype type; /* any that base/dtype.h names */
    uint32_t rows, cols;
    const void *data;
};

/* out [n][cols] = rows of `table` named by ids. Every id must be < table->rows. */
void compute_embed(struct compute *c, float *out, const struct matrix *table, const uint32_t *ids, int n);

/* out [n][dim] = x / sqrt(mean(x^2) + eps) * weight (float32 [dim]). In place allowed. */
void compute_rmsnorm(struct compute *c, float *out, const float *x, const float *weight, int n, int dim,
                     float eps);

/* out [n][w->rows] = x [n][w->cols] times w transposed. Bytes moved: the matrix once for every tile of
 * tokens. Must be the same for a token whatever n is. `bias` (float32 [rows]) may be NULL. */
void compute_matmul(struct compute *c, float *out, const struct matrix *w, const float *x, const float *bias,
                    int n);

/* One of several products of the same activations. */
struct product {
    float *out;             /* [n][w->rows] */
    const struct matrix *w; /* all of the same cols */
    const float *bias;      /* [rows] or NULL */
};

/* `count` (1 .. 8) products of x [n][cols] in one parallel loop: what compute_matmul gives for each, without
 * the cost of starting one loop for each (q, k, v; gate, up). */
void compute_matmul_many(struct compute *c, const struct product *products, int count, const float *x, int n);

/* out [n][dim] = silu(gate) * up. In place over gate allowed. */
void compute_swiglu(struct compute *c, float *out, const float *gate, const float *up, int n, int dim);

/* x [count] += y [count] */
void compute_add(struct compute *c, float *x, const float *y, size_t count);

enum rope_pairs { ROPE_PAIRS_ADJACENT, ROPE_PAIRS_HALVES }; /* (2j, 2j+1), or (j, j + dims/2) */

/* Angle of pair j at position p: p * inv_freq[j]; cos and sin are both multiplied by `scale` (YaRN's m). */
struct rope {
    enum rope_pairs pairs;
    int dims;              /* rotated dimensions, even, <= head_dim; the rest passes unchanged */
    const float *inv_freq; /* [dims / 2] */
    float scale;
};

/* Rotates x [n][heads][head_dim] in place; positions [n]. Angles in double before cos and sin. */
void compute_rope(struct compute *c, float *x, const struct rope *rope, const uint32_t *positions, int n,
                  int heads, int head_dim);

/* Where the KV pieces of one (sequence, layer) lie in device memory. A piece is K then V, head_dim f16 (or
 * bf16) each. Offsets are in bytes from `base` and are clamped by nobody on the CPU: the caller checked them.
 *   paged:   piece of (head, position) = base + at[position / page_tokens]
 *                                        + (head * page_tokens + position % page_tokens) * piece_bytes
 *   slotted: unit = head * slots + slot; piece = base + at[unit / units_per_slab]
 *                                        + (unit % units_per_slab) * piece_bytes */
struct kv_view {
    uint8_t *base;
    const uint64_t *at; /* page or slab offsets */
    int slotted;
    uint32_t page_tokens;    /* paged */
    uint32_t slots;          /* slotted: slots of one head */
    uint32_t units_per_slab; /* slotted */
    uint32_t piece_bytes;
    enum dtype type; /* DTYPE_F16 or DTYPE_BF16 */
};

/* Positions that one query token attends, per KV head. */
struct attn_list {
    uint32_t count;       /* number of attended positions */
    const uint32_t *item; /* paged: ascending positions; slotted: slots, in ascending order of position.
                             NULL: identity, positions 0 .. count-1 (paged only) */
};

struct attn_query {
    const struct kv_view *kv;
    const struct attn_list *lists; /* [kv_heads]; with `shared_list` set, [1] for all heads */
    int shared_list;
};

/* out, q: [n][q_heads][head_dim]; q heads of a group (q_heads / kv_heads) follow each other. softmax over the
 * listed positions in the list's order, scale applied to q.k. A list of count 0 gives zeros. Bytes moved:
 * each listed piece once per query (the CPU may share it among neighbouring queries of the same view). */
void compute_attention(struct compute *c, float *out, const float *q, const struct attn_query *queries, int n,
                       int q_heads, int kv_heads, int head_dim, float scale);

/* weights [q_heads][stride]: the softmax weights that compute_attention gives one query token's list, in the
 * list's order; q [q_heads][head_dim]. stride >= every list's count; a list of count 0 gives nothing. For
 * measurements: plain, one query head an item. */
void compute_attention_weights(struct compute *c, float *weights, size_t stride, const float *q,
                               const struct attn_query *query, int q_heads, int kv_heads, int head_dim,
                               float scale);

/* Destination of one token's pieces: view and, per KV head, the item (position if paged, slot if slotted). */
struct kv_place {
    const struct kv_view *kv;
    const uint32_t *item; /* [kv_heads]; with shared_item set, [1] */
    int shared_item;
};

/* Writes K||V pieces from k, v [n][kv_heads][head_dim], rounding to the view's type. */
void compute_kv_write(struct compute *c, const struct kv_place *places, const float *k, const float *v, int n,
                      int kv_heads, int head_dim);

enum pool_kind { POOL_MAX, POOL_MEAN };

/* The retriever's K cache of one sequence: chunks of `chunk_tokens` keys, each [kv_head][token][dim] f16. */
struct key_view {
    const uint16_t *const *chunks;
    uint32_t chunk_tokens;
    uint32_t count; /* keys */
};

/* Appends n keys k [n][kv_heads][head_dim] (float32, rotated) at view->count..; chunks must be there. Does
 * not change view->count. */
void compute_keys_append(struct compute *c, const struct key_view *view, const float *k, int n, int kv_heads,
                         int head_dim);

/* Keys of 8 bits: an f16 scale and int8 numbers q. What is scored is f16(q * scale), the same bits wherever
 * keys are made and however they lie. */
enum compute_keys { COMPUTE_KEYS_AUTO, COMPUTE_KEYS_F16, COMPUTE_KEYS_INT8 };
#define COMPUTE_KEYS_CHOICES "auto|f16|int8" /* in that order; auto: int8 on a GPU, else f16 (gpu.h) */

/* Of one key k [dim]: returns the scale, f16 max |k| / 127, and q = k / scale, both to the nearest, ties to
 * even; q is kept in [-127, 127], and 0 where the scale is. Where the scale is no finite number (k has NaN,
 * infinity or more than 127 * 65504) it is NaN, and so are all elements of the key. Elements past 65504 come
 * out as infinity, as in f16; where the scale is subnormal (|k| < 2^-7 all over) it is coarse. */
uint16_t compute_key_quantize(int8_t *q, const float *k, int dim);

static inline uint16_t compute_key_element(int8_t q, uint16_t scale)
{
    return dtype_f32_to_f16((float)q * dtype_f16_to_f32(scale));
}

/* Brings keys k [n][dim] to that grid, in place: where keys lie as f16, before they are appended. */
void compute_keys_round(struct compute *c, float *k, int n, int dim);

/* weights [kv_heads][stride]: for each query head softmax(scale * q.k) over positions [0, view->count),
 * pooled over the query heads of its KV head. stride >= view->count, which is at most 8 million (a sequence
 * has at most 1 million positions). Source: paper section on the retrieval head; algorithm.md section 1. */
void compute_retrieval_weights(struct compute *c, float *weights, size_t stride, const float *q,
                               const struct key_view *view, int q_heads, int kv_heads, int head_dim,
                               float scale, enum pool_kind pool);

/* The min(k, n) positions of the largest values[0..n), written ascending to ret_index; returns their number.
 * Ties go to the lower position, NaN counts as -infinity. ret_mass (may be NULL): sum of the chosen values.
 * `scratch` holds n uint32_t. */
uint32_t compute_topk(uint32_t *ret_index, double *ret_mass, const float *values, uint32_t n, uint32_t k,
                      uint32_t *scratch);

/* For callers that loop over sequences themselves: the pool behind the operators. */
struct pool;
struct pool *compute_pool(struct compute *c);

#endif
