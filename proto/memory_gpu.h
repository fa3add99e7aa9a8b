/* What the daemons take on a GPU besides the KV cache, as arithmetic: launch plans by it, the retriever
 * sizes its own buffers by it. Bytes; what CUDA and its libraries take is an allowance for each process. */
#ifndef PROTO_MEMORY_GPU_H
#define PROTO_MEMORY_GPU_H

#include <stdint.h>

#include "proto/layout.h"

#define MEMORY_GPU_CONTEXT (UINT64_C(600) << 20) /* of a process, where it was not measured */
#define MEMORY_GPU_LIBRARIES \
    (UINT64_C(36) << 20)                         /* of a process that multiplies: workspace, plans, kernels */
#define MEMORY_GPU_ROUNDING (UINT64_C(8) << 20)  /* of a process: allocations end on large pages */
#define MEMORY_GPU_MPS      (UINT64_C(80) << 20) /* of the MPS server, where there is one */
#define MEMORY_GPU_MAPPING  512u                 /* bytes of host memory for one of the card's tables */
#define MEMORY_GPU_WORK     (UINT64_C(256) << 20) /* scores and weights that the retriever makes at a time */
#define MEMORY_GPU_CHUNK    256u  /* tokens that go through the retriever's products together */
#define MEMORY_GPU_TAPS     64u   /* most tokens of such a sum */
#define MEMORY_GPU_PROMPT   2048u /* prompt tokens of one step of the decoder, unless it is told otherwise */

struct memory_gpu_model {
    uint32_t layers, hidden, ffn, vocab, q_heads, kv_heads, head_dim, rope_dims;
    int tied; /* the output matrix is the embedding */
};

struct memory_gpu_head {
    uint32_t vocab, hidden, q_heads, kv_heads, head_dim, groups, rope_dims;
    uint32_t head_norms;  /* of queries and of keys, all groups */
    uint32_t views, taps; /* sums of embeddings that a product reads; tokens of each; 0: as 1 */
    uint64_t features;    /* elements of hidden states that a token brings; 0: none */
    int feature_input_norm;
    int keys_int8; /* keys of 8 bits with a scale each; 0: of 16 bits */
};

/* Bytes of one key, its scale included. */
static inline uint64_t memory_gpu_key_bytes(const struct memory_gpu_head *head)
{
    return head->keys_int8 ? head->head_dim + UINT64_C(2) : 2 * (uint64_t)head->head_dim;
}

struct memory_gpu_load {
    uint32_t context, sequences;
    uint32_t budget; /* positions of the longest list */
    uint32_t slots;  /* of one (sequence, group, row head) */
    /* Hidden states of a token that a retriever on the same card reads, and their width; 0: none. */
    uint32_t feature_layers, feature_hidden;
};

/* The retriever's buffers. */
struct memory_gpu_retriever {
    uint64_t weights;               /* embedding, projections, norms, taps */
    uint32_t key_tokens;            /* positions that a sequence has room for: the context, rounded up */
    uint64_t row_bytes;             /* keys of one sequence and group */
    uint64_t group_bytes;           /* of all sequences */
    uint64_t keys;                  /* of all groups */
    uint32_t slice;                 /* queries whose scores fit at full context */
    uint64_t scores, pooled, index; /* bytes of these buffers; there are two of the last two */
    uint64_t sets;                  /* bits of the last two selections of every sequence */
    uint64_t changes;               /* positions that go to the host between two waits */
    uint64_t workspace;             /* these and all activations */
};

/* `work`: MEMORY_GPU_WORK, or another bound of one slice. One query always fits. */
void memory_gpu_retriever(const struct memory_gpu_head *head, uint32_t context, uint32_t sequences,
                          uint64_t work, struct memory_gpu_retriever *ret);

struct memory_gpu_decoder {
    uint64_t weights, activations, workspace, tables, features;
};
void memory_gpu_decoder(const struct memory_gpu_model *model, const struct kv_layout *layout,
                        const struct memory_gpu_load *load, struct memory_gpu_decoder *ret);

/* Bytes of the tables that one step reads, which store and decoder each keep on the card. */
uint64_t memory_gpu_tables(const struct kv_layout *layout, const struct memory_gpu_load *load);

#endif
