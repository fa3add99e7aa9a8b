/* CUDA operators of the decoder, the retriever and the store: launchers that plain C calls.
 *
 * Conventions. Shapes are [token][head][dim]; strides are in elements unless a name says bytes. Pointers
 * are device pointers (or mapped host memory where said); structs are read by the launcher and copied into
 * the launch, so they may live on the caller's stack. A launcher queues work on `stream` and returns: it
 * never allocates, synchronises or reads the environment, and may be captured into a graph. Grids follow
 * from the struct's maxima; counts, lists, positions and tables are read on the device, so a captured
 * launch serves every step. Kernels are finite, poll nothing, and bring every index that comes out of a
 * table into range, so that a half-written table harms nobody.
 *
 * Return values: 0; -EINVAL when a shape, type or alignment is not served; -EIO when CUDA refused the
 * launch. n == 0 is no work and succeeds.
 *
 * Launches may begin while the launch before them in the stream ends (launch.cuh). Before that they read only
 * what launches do not write but copies and the host do: weights, lists, counts, rows and tables of pages and
 * slots. A launch that writes one of these must not be followed at once by its reader.
 *
 * Order. Every output element is reduced in an order that depends on its own inputs' length alone: never on
 * the batch, the split of a prompt, slot order or the grid. One exception: cuda_matmul, whose
 * library chooses by n.
 *
 * "Floor" is the bytes moved over the copy bandwidth of the device memory (or of the link). */
#ifndef COMPUTE_CUDA_KERNELS_H
#define COMPUTE_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "compute/cuda/products.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum {
    CUDA_ATTN_CHUNK = 256,  /* list entries of one softmax part: part of the order of summation */
    CUDA_GROUP_MAX = 8,     /* query heads that share a KV head */
    CUDA_KEYS_CHUNK = 512,  /* keys of one softmax part of the retriever */
    CUDA_KEYS_GRAIN = 16,   /* int8 keys that are fetched together */
    CUDA_TOPK_MAX = 131072, /* most values of one row */
    CUDA_MIX_VIEWS_MAX = 16,
    CUDA_MIX_TAPS_MAX = 64,
    CUDA_VOCAB_MAX = 262144
};

/* ---- Rows and elements (elementwise.cu) ---- */

/* out [n][cols] (f32 or bf16) = rows of a bf16 table named by ids; an id past the table gives its last row.
 * cols % 8 == 0. Bytes: n * cols * (2 + out). */
struct cuda_embed {
    void *out;
    enum dtype out_type;
    const void *table;
    uint32_t rows, cols;
    const uint32_t *ids;
    uint32_t n;
};
int cuda_embed(const struct cuda_embed *embed, struct CUstream_st *stream);

/* out [n][dim] (f32 or bf16) = x / sqrt(mean(x^2) + eps) * weight; with `add` set, x += add first and x is
 * written back. x, add are f32. weight f32 or bf16 [dim]. dim % 4 == 0. Bytes: n * dim * (4 + out [+ 8 with
 * add]). */
struct cuda_rmsnorm {
    void *out;
    enum dtype out_type;
    float *x;
    const float *add;
    const void *weight;
    enum dtype weight_type;
    uint32_t n, dim;
    float eps;
};
int cuda_rmsnorm(const struct cuda_rmsnorm *norm, struct CUstream_st *stream);

/* What the retriever's products read. Of token t, which is ids[at[t]] with the tokens of its sequence
 * before it in ids: out bf16 [n][views][dim], view v = weight [dim] * sum over lag of taps
 * [views][tap_count] * row_scale of the row * the row of ids[at[t] - lag], for lags below tap_count that
 * positions[t] allows. row_scale [rows]:
 * 1 / sqrt(mean(x^2) + eps) of each row of the table (bf16). An id past the table gives its last row; an `at`
 * past id_count the last id. Reads each row once for all views. views, tap_count as above, dim % 4 == 0.
 * Bytes: n * dim * 2 * (tap_count + views), of neighbouring tokens all but one row a token from the cache. */
struct cuda_mix {
    void *out;
    const void *table;
    const float *row_scale, *taps, *weight;
    const uint32_t *ids, *at, *positions;
    uint32_t id_count;
    uint32_t rows, dim, views, tap_count;
    uint32_t n;
};
int cuda_mix(const struct cuda_mix *mix, struct CUstream_st *stream);

/* Normalises every head of [n][stride]: heads [0, heads) of `dim` each, in place, f32 (q and k norms). Bytes:
 * n * heads * dim * 8. */
struct cuda_headnorm {
    float *x;
    uint64_t stride;
    const void *weight;
    enum dtype weight_type;
    uint32_t n, heads, dim;
    float eps;
};
int cuda_headnorm(const struct cuda_headnorm *norm, struct CUstream_st *stream);

/* out [n][dim] (f32 or bf16) = silu(gate) * up. Row t of gate and up begins at t * stride (f32), so that one
 * product can make both. dim % 4 == 0. Bytes: n * dim * (8 + out). */
struct cuda_swiglu {
    void *out;
    enum dtype out_type;
    const float *gate, *up;
    uint64_t stride;
    uint32_t n, dim;
};
int cuda_swiglu(const struct cuda_swiglu *op, struct CUstream_st *stream);

/* out [count] = x [count] with out_type bf16 or f16, nearest even. Bytes: 6 * count. */
int cuda_narrow(void *out, enum dtype out_type, const float *x, uint64_t count, struct CUstream_st *stream);

/* Rows of a bf16 table by number: row rows[t] of out takes x [n][dim] f32, nearest even, from its element 0
 * on; `stride` elements from row to row. A row past row_count is left out. No two t name the same row. dim,
 * stride % 4 == 0; out may be mapped host memory. Bytes: 6 * n * dim. */
struct cuda_put_rows {
    void *out;
    uint64_t stride;
    const float *x;
    const uint32_t *rows;
    uint32_t row_count, n, dim;
};
int cuda_put_rows(const struct cuda_put_rows *put, struct CUstream_st *stream);

/* table [n][dims / 2][cos, sin] * scale for the n tokens of a step: angles in double, as the CPU takes
 * them. Once a step; every layer then uses cuda_rope. inv_freq f32 [dims / 2]. Bytes: 4 * n * dims; bound
 * by sincos. */
struct cuda_rope_angles {
    float *table;
    const uint32_t *positions;
    const float *inv_freq;
    uint32_t n, dims;
    float scale;
};
int cuda_rope_angles(const struct cuda_rope_angles *angles, struct CUstream_st *stream);

/* Rotates heads [0, heads) of x [n][stride] (f32 or bf16) in place by the table's row of the token.
 * `adjacent`: pairs (2j, 2j+1), else (j, j + dims / 2). Bytes: n * heads * dims * 2 * element. */
struct cuda_rope {
    void *x;
    enum dtype type;
    uint64_t stride;
    const float *table;
    uint32_t n, heads, head_dim, dims;
    int adjacent;
};
int cuda_rope(const struct cuda_rope *rope, struct CUstream_st *stream);

/* ---- KV pieces (kv.cu) ---- */

/* Pieces of one layer, or of neighbouring layers, of all sequences: compute.h's kv_view with table rows.
 *   offsets of (row, layer) = at + row * row_stride + layer * layer_stride, `at_count` of them
 *   paged:   piece of (head, position) = base + offset[position / page_tokens]
 *                                        + (head * page_tokens + position % page_tokens) * piece_bytes
 *   slotted: unit = head * slots + slot; piece = base + offset[unit / units_per_slab]
 *                                        + (unit % units_per_slab) * piece_bytes
 *
 * A piece is K then V, head_dim elements each. piece_bytes and every offset are multiples of 16. Reads: an
 * entry past at_count or an offset past device_bytes is brought to the last that is in range. Writes there
 * are left out. */
struct cuda_kv_view {
    uint8_t *base;
    uint64_t device_bytes;
    const uint64_t *at;
    uint64_t row_stride, layer_stride; /* entries */
    uint32_t at_count;
    int slotted;
    uint32_t page_tokens;    /* paged */
    uint32_t slots;          /* slotted: slots of one head */
    uint32_t units_per_slab; /* slotted */
    uint32_t piece_bytes;
    enum dtype type; /* DTYPE_F16 or DTYPE_BF16 */
};

/* Writes K||V of token t, head h, from k and v (f32, row t at t * stride, head h at h * head_dim) to table
 * row rows[t] (NULL: t), item items[rows[t] * item_stride + h] (head_items 0: items[t] for all heads, a
 * position for each token). head_dim % 8 == 0. Bytes: n * kv_heads * head_dim * 12. */
struct cuda_kv_write {
    struct cuda_kv_view kv;
    const float *k, *v;
    uint64_t stride;
    const uint32_t *rows;
    const uint32_t *items;
    uint64_t item_stride;
    int head_items;
    uint32_t row_count; /* rows of the tables: larger numbers write nothing */
    uint32_t n, kv_heads, head_dim;
};
int cuda_kv_write(const struct cuda_kv_write *write, struct CUstream_st *stream);

/* cuda_rope, then cuda_kv_write of the keys that it rotated: write->k lies in rope->x, its heads are the last
 * of rope->heads. One launch where all of a head is rotated; whether the keys in x are rotated then is left
 * open. Bytes: n * (q_heads * 8 + kv_heads * 12) * head_dim. */
int cuda_rope_write(const struct cuda_rope *rope, const struct cuda_kv_write *write,
                    struct CUstream_st *stream);

/* One row of a run of layers between host memory and the pieces of its layers. host: byte offset of the run's
 * first piece from host_base. item: slot or position. */
struct cuda_move {
    uint64_t host;
    uint32_t item;
    uint16_t head;
    uint16_t row; /* table row (sequence) */
};
/* Gather: mapped host memory -> pieces of layers [first_layer, first_layer + layers); scatter: the other
 * way. `count` moves; a move with any number out of range is left out. `blocks` 1 .. 64 of 512 threads (0:
 * 8, which fill the link; 16 carry no more, and hold up the reads of everybody else). piece_bytes, host
 * offsets: multiples of 16. Bytes: count * layers * piece_bytes over the link; floor: that over the link
 * rate, for runs of >= 2 KiB. */
struct cuda_moves {
    struct cuda_kv_view kv;
    uint8_t *host_base; /* device address of mapped host memory */
    uint64_t host_bytes;
    const struct cuda_move *moves; /* device or mapped host memory */
    uint32_t count;
    uint32_t first_layer, layers;
    uint32_t row_count, heads;
    uint32_t blocks;
};
int cuda_gather(const struct cuda_moves *moves, struct CUstream_st *stream);
int cuda_scatter(const struct cuda_moves *moves, struct CUstream_st *stream);

/* Pieces of a run of layers from one view to another on the device: what a layer's pages hold goes into its
 * slots when the layer is offloaded. from, to: items (positions or slots) of either view. */
struct cuda_copy {
    uint32_t from, to;
    uint16_t head, row;
};
/* `count` copies of layers [first_layer, first_layer + layers); one with any number out of range is left out.
 * Each piece looks its place up in both views' tables: in host memory these cost three times the rest.
 * Both views: pieces of the same size. No piece may be both read and written by one launch. Bytes: 2 * count
 * * layers * piece_bytes. */
struct cuda_copies {
    struct cuda_kv_view from, to;
    const struct cuda_copy *copies; /* device or mapped host memory */
    uint32_t count;
    uint32_t first_layer, layers;
    uint32_t row_count, heads;
};
int cuda_copy_pieces(const struct cuda_copies *copies, struct CUstream_st *stream);

/* `rows` rows of `bytes` each, `stride` bytes apart at both ends (one row: any), between device memory and
 * mapped host memory, or within either; all on 4 bytes, best on 16. At most 4 GiB. */
struct cuda_mapped_copy {
    void *to;
    const void *from;
    uint64_t bytes, stride;
    uint32_t rows;
};
enum { CUDA_MAPPED_COPIES = 6 };
/* Up to CUDA_MAPPED_COPIES of them by one kernel: for what a step cannot wait for. A copy engine takes copies
 * in order, of all processes that share it: behind one whose stream waits for a flag, or behind 13 MB of
 * tables, a copy of 18 KB took 0.5 to 1.7 ms; and each begins some us after the one before. A launch that
 * follows may read what was copied before launch_wait() (launch.cuh). Bytes: over the link once; floor: that
 * over the link's rate, and a journey of some 2 us. */
int cuda_copy_mapped(const struct cuda_mapped_copy *copies, uint32_t count, struct CUstream_st *stream);

/* ---- Attention (attention.cu, prefill.cu) ---- */

/* out [n][q_heads][head_dim] (f32 or bf16) of queries q (f32, row t at t * q_stride). Query t belongs to
 * table row rows[t] (NULL: t).
 *   items set: KV head h walks items[rows[t] * item_stride + h * list_max + i], i < counts[rows[t] *
 *   count_stride
 *   + h]; with shared_list all heads use h = 0. Items are positions (paged) or slots (slotted).
 *   items NULL: identity over positions 0 .. counts[t] - 1 (paged only), one count a query.
 *
 * Counts are cut to list_max; a list_max far above the counts costs next to nothing. head_dim 64 or 128, 1 to
 * 8 query heads a KV head. An empty list gives zeros. Products run on tensor cores with q and the weights
 * split into two 16-bit halves: the error against f32 is below 2^-15. |q| < 65504 where pieces are f16.
 * `work`: cuda_attn_work_bytes, on 16 bytes. Bytes: the listed pieces once, + 1.6 % for parts; floor n *
 * kv_heads * count * piece_bytes / copy rate. */
struct cuda_attn {
    struct cuda_kv_view kv;
    void *out;
    enum dtype out_type;
    const float *q;
    uint64_t q_stride;
    const uint32_t *rows;
    const uint32_t *counts;
    uint64_t count_stride;
    const uint32_t *items;
    uint64_t item_stride;
    int shared_list;
    uint32_t row_count;
    uint32_t list_max;
    uint32_t n, q_heads, kv_heads, head_dim;
    float scale;
    float *work;
    /* 1: of each list all but the last entry was written before the launch before this one began: it may be
     * read while that launch ends. */
    int settled;
};
size_t cuda_attn_work_bytes(uint32_t n, uint32_t q_heads, uint32_t head_dim, uint32_t list_max);
int cuda_attn(const struct cuda_attn *attn, struct CUstream_st *stream);

/* A sequence's tokens of a dense step: q rows [first, first + count) are positions position, position + 1,
 * ... */
struct cuda_span {
    uint32_t row; /* table row */
    uint32_t first, count, position;
};
/* Causal attention of prompts over pages that already hold their own KV. spans: device memory; `span_max`
 * bounds the count of each. q f32. page_tokens % 64 == 0. q and the weights are rounded to the pieces'
 * type, as the model's own 16-bit forms do: use cuda_attn with identity lists where prompts must equal
 * decoding. The result of a token does not depend on how a prompt was cut. Floor: 4 * head_dim * q_heads *
 * (pairs) FLOP over the matrix rate. */
struct cuda_prefill {
    struct cuda_kv_view kv;
    void *out;
    enum dtype out_type;
    const float *q;
    uint64_t q_stride;
    const struct cuda_span *spans;
    uint32_t span_count, span_max;
    uint32_t row_count;
    uint32_t q_heads, kv_heads, head_dim;
    float scale;
    int hopper; /* cuda_prefill_hopper() of the device: chosen once, as the forms differ in the last bits */
};
/* 1 where the form for Hopper runs, else 0. */
int cuda_prefill_hopper(int device);
int cuda_prefill(const struct cuda_prefill *prefill, struct CUstream_st *stream);

/* ---- Retrieval (retrieval.cu, topk.cu) ---- */

/* K cache of all sequences: chunks of chunk_tokens keys [kv_head][token][dim], f16, bf16 or int8, at
 * base + at[row * row_stride + position / chunk_tokens], a multiple of 16. Behind the numbers of an int8
 * chunk lie its scales [kv_head][token], f16; head_dim is 64 or 128 then, and chunk_tokens % CUDA_KEYS_GRAIN
 * == 0. What they stand for: compute_key_quantize; keys that are appended are those bit for bit, and scored
 * are the f16 numbers of compute_key_element. */
struct cuda_key_view {
    uint8_t *base;
    uint64_t device_bytes;
    const uint64_t *at;
    uint64_t row_stride;
    uint32_t at_count;
    uint32_t chunk_tokens;
    enum dtype type; /* DTYPE_F16, DTYPE_BF16 or DTYPE_I8 */
};

/* Writes keys k (f32, row t at t * stride) of token t to table row rows[t] at positions[t]. Bytes: n *
 * kv_heads * head_dim * 6, with int8 keys 5, and 2 for each scale. */
struct cuda_keys_append {
    struct cuda_key_view keys;
    const float *k;
    uint64_t stride;
    const uint32_t *rows, *positions;
    uint32_t row_count;
    uint32_t n, kv_heads, head_dim;
};
int cuda_keys_append(const struct cuda_keys_append *append, struct CUstream_st *stream);

/* weights [n][kv_heads][weight_stride]: for each query head softmax(scale * q.k) over the positions [0,
 * counts[t]), pooled over the query heads of its KV head. work: cuda_retrieval_work_bytes; memory is
 * bounded by calling for fewer queries at a time. weight_stride >= count_max, % 4 == 0. Bytes: keys once (n
 * * kv_heads * count * head_dim * 2, int8: * (head_dim + 2)), scores written and read (n * q_heads * count *
 * 8), weights; floor by the first alone. */
struct cuda_retrieval {
    struct cuda_key_view keys;
    float *weights;
    uint64_t weight_stride;
    const float *q; /* row t at t * q_stride */
    uint64_t q_stride;
    const uint32_t *rows, *counts; /* rows NULL: t; counts [n] */
    uint32_t row_count, count_max;
    uint32_t n, q_heads, kv_heads, head_dim;
    float scale;
    int mean; /* 0: max */
    float *work;
};
size_t cuda_retrieval_work_bytes(uint32_t n, uint32_t q_heads, uint32_t count_max);
int cuda_retrieval(const struct cuda_retrieval *retrieval, struct CUstream_st *stream);

/* For each of `rows` rows of values [rows][stride]: the min(k, end - first) positions of the largest values
 * in [first, end), ascending, to index [rows][index_stride]; their number to ret_count, the sum of their
 * values, and of those in [0, first) and [end, outer), to ret_mass (NULL: not wanted). first, end and outer
 * have one entry for `heads` neighbouring rows. Ties go to the lower position, NaN counts as -infinity. end
 * <= end_max <= CUDA_TOPK_MAX, end_max <= stride, stride % 4 == 0. Bytes: 4 * values, read up to five times,
 * all but the first from the cache. */
struct cuda_topk {
    uint32_t *index;
    uint64_t index_stride;
    uint32_t *ret_count;
    float *ret_mass;
    const float *values;
    uint64_t stride;
    const uint32_t *first, *end, *outer; /* [rows / heads]; first NULL: 0; outer NULL: nothing outside */
    uint32_t rows, heads, k, end_max;
};
int cuda_topk(const struct cuda_topk *topk, struct CUstream_st *stream);

/* ---- Sampling (sample.cu) ---- */

/* Parameters of one row: as struct sampler_params and sampler_input, penalties applied before. */
struct cuda_sample_params {
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed, sequence;
    uint32_t position;
    uint32_t pad;
};
/* ids [n]: the token that model/sampler.c chooses for the same logits, or -1 where a logit is NaN or
 * +infinity or all are -infinity. Probabilities are summed in units of 2^-42 of the best one's, so a choice
 * that lies closer to the edge of an interval than vocab * 2^-42 may fall to the neighbour. Ties: the lower
 * id. logits f32 [n][stride], vocab <= CUDA_VOCAB_MAX. Bytes: 4 * n * vocab for greedy, up to ten times
 * that from the cache otherwise. */
struct cuda_sample {
    int32_t *ids; /* device or mapped host memory */
    const float *logits;
    uint64_t stride;
    const struct cuda_sample_params *params; /* [n] */
    uint32_t n, vocab;
};
int cuda_sample(const struct cuda_sample *sample, struct CUstream_st *stream);

/* Applies repeat, presence and frequency penalties to logits [vocab] of row t for the ids of its window:
 * entries [begin[t], begin[t + 1]) of {id, occurrences}, each id once. */
struct cuda_penalty_entry {
    uint32_t id, count;
};
struct cuda_penalties {
    float *logits;
    uint64_t stride;
    const struct cuda_penalty_entry *entries;
    const uint32_t *begin; /* [n + 1] */
    const float *params;   /* [n][repeat, presence, frequency] */
    uint32_t n, vocab;
};
int cuda_penalties(const struct cuda_penalties *penalties, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
