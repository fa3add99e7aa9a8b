/* What card.c (life, projection) and card_rank.c (selection) share. */
#ifndef RETRIEVER_CARD_PRIVATE_H
#define RETRIEVER_CARD_PRIVATE_H

#include <stdbool.h>

#include "proto/limits.h"
#include "proto/memory_gpu.h"
#include "retriever/card.h"
#include "retriever/reach.h"

enum {
    CARD_TILE = MEMORY_GPU_CHUNK, /* tokens that go through the projections together */
    CARD_MASSES = 4               /* of a list: selected, sinks, tail, all */
};

/* Numbers of the queries of a step, one entry each, written by the host and copied as a whole. `id` has each
 * stretch of tokens behind those of its sequence that the head's taps reach; `at` says where in it. */
struct card_queries {
    uint32_t id[LIMIT_SEQUENCES * HEAD_TAPS_MAX];
    uint32_t at[LIMIT_SEQUENCES], position[LIMIT_SEQUENCES];
    uint32_t place[LIMIT_SEQUENCES];
    uint32_t count[LIMIT_SEQUENCES];   /* keys, the query's own included */
    uint32_t feature[LIMIT_SEQUENCES]; /* row of the position before */
};

/* Top-K picks from [sinks, limit). */
struct card_ranges {
    uint32_t sinks[LIMIT_SEQUENCES], limit[LIMIT_SEQUENCES];
};

/* The same for the tokens of a step. */
struct card_tokens {
    uint32_t id[LIMIT_STEP_TOKENS + LIMIT_SEQUENCES * (HEAD_TAPS_MAX - 1)];
    uint32_t at[LIMIT_STEP_TOKENS], position[LIMIT_STEP_TOKENS], place[LIMIT_STEP_TOKENS];
    uint32_t feature[LIMIT_STEP_TOKENS]; /* row of the position before */
};

/* Neighbouring queries of one group that are scored and picked from together. */
struct card_slice {
    uint32_t group, first, count; /* queries */
    uint32_t k;                   /* for all of them; less where a range is shorter */
    uint32_t keys_max;
    bool by_mass;                    /* lists end by the weights: the host picks */
    uint64_t index_at, index_stride; /* where their positions lie, in elements */
};

struct card_group {
    void *norm;                    /* f32 [hidden] */
    void *q_norm, *k_norm;         /* f32 [head_dim], or NULL */
    void *q, *k;                   /* bf16 [heads * head_dim][inputs] */
    void *taps;                    /* f32 [views][taps] */
    void *q_features, *k_features; /* bf16 [heads * head_dim][hidden], what features are multiplied by */
};

/* With features of the model; zeros without. */
struct card_features {
    uint64_t inputs;  /* elements of a row */
    const void *rows; /* bf16 [row_count][inputs], the decoder's; NULL: none came */
    uint32_t row_count;
    void *fc;         /* bf16 [hidden][inputs] */
    void *norm;       /* f32 [hidden] */
    void *input_norm; /* f32 [inputs], or NULL */
    float *wide;      /* [tile][inputs], with an input norm */
    void *x, *normed; /* bf16 [tile][inputs], [tile][hidden] */
    float *g;         /* [tile][hidden] */
};

struct card {
    struct compute *compute; /* borrowed: its pool collects what comes back */
    const struct gpu_api *api;
    struct gpu *gpu;
    struct CUstream_st *stream;
    const struct head_config *config;
    struct projection_rotation rotation;
    struct memory_gpu_retriever sizes;
    struct card_bytes bytes;
    uint32_t context, sequences;
    uint32_t views, taps, inputs; /* 1, 1 for a head without context; views * hidden */
    int mean;

    /* device */
    void *table;      /* bf16 [vocab][hidden] */
    float *row_scale; /* [vocab] of the table's rows: what an RMS norm multiplies by */
    struct card_group group[HEAD_GROUPS_MAX];
    struct card_features features;
    float *inv_freq;
    uint8_t *keys;     /* f16 [group][sequence][kv_head][context][head_dim] */
    uint64_t *key_at;  /* [sequences] offsets inside a group */
    float *k;          /* [tile][kv_heads * head_dim] */
    void *mixed;       /* bf16 [tile][inputs] */
    float *angles;     /* [tile][dims / 2][2] */
    float *q;          /* [groups][LIMIT_SEQUENCES][q_heads * head_dim] */
    float *work;       /* of one slice, as the kernel wants it */
    float *weights;    /* [slice][kv_heads][stride] */
    uint32_t *ignored; /* positions of lists whose mass alone is wanted; as many as weights */
    uint32_t *index;   /* selected positions of the slices in flight */
    uint32_t *counts;  /* [LIMIT_SEQUENCES * kv_heads] for each mass */
    float *masses;     /* [groups][CARD_MASSES][LIMIT_SEQUENCES * kv_heads] */
    struct card_tokens *tokens;
    struct card_queries *queries;
    struct card_ranges *ranges;

    /* pinned */
    struct card_tokens *host_tokens;
    struct card_queries *host_queries;
    struct card_ranges *host_ranges;
    uint32_t *host_index;
    float *host_masses;
    float *host_weights; /* as `weights`, for lists by mass */

    /* host */
    struct reach_scratch scratch;

    struct card_slice *slices; /* in flight, see card_rank.c: [groups * LIMIT_SEQUENCES] */
    uint32_t query_count;
    void *owned[8 * HEAD_GROUPS_MAX + 40];
    int owned_count;
    void *pinned[8];
    int pinned_count;
};

/* Ends the process when `rc` is an error. */
void card_must(struct card *card, int rc, const char *what);

/* Tokens that a product is made for: few shapes, so few plans. Rows past the real ones hold anything; nobody
 * reads what they give. */
uint32_t card_padded(uint32_t n);

struct cuda_key_view card_keys(const struct card *card, uint32_t group);

#endif
