/* What card.c (life), card_project.c (keys and queries) and card_rank.c (selection) share. */
#ifndef RETRIEVER_CARD_PRIVATE_H
#define RETRIEVER_CARD_PRIVATE_H

#include <stdbool.h>

#include "proto/limits.h"
#include "proto/memory_gpu.h"
#include "retriever/card.h"
#include "retriever/reach.h"

enum {
    CARD_GRAPHS = 8,
    CARD_HALVED = 16,             /* queries that come back in two halves */
    CARD_KEYS_STEP = 1024,        /* key counts are rounded up to it, so that a launch serves many steps */
    CARD_TILE = MEMORY_GPU_CHUNK, /* tokens that go through the projections together */
    CARD_MASSES = 2               /* of a list: of what is attended, of all */
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

/* Top-K picks from [sinks, limit); `how` as struct cuda_sets has it. */
struct card_ranges {
    uint32_t sinks[LIMIT_SEQUENCES], limit[LIMIT_SEQUENCES], how[LIMIT_SEQUENCES];
};

/* The same for the tokens of a step. */
struct card_tokens {
    uint32_t id[LIMIT_STEP_TOKENS + LIMIT_SEQUENCES * (HEAD_TAPS_MAX - 1)];
    uint32_t at[LIMIT_STEP_TOKENS], position[LIMIT_STEP_TOKENS], place[LIMIT_STEP_TOKENS];
    uint32_t feature[LIMIT_STEP_TOKENS]; /* row of the position before */
};

/* A step of one token and one query for each of `n` sequences, all lists in one slice a group: what a graph
 * of it depends on. No padding: compared as bytes. */
struct card_shape {
    uint32_t n, k, flights, keys_max[2];
};

struct card_graph {
    struct card_shape shape;
    struct gpu_graph *graph; /* NULL: free */
    uint64_t used;
};

/* Neighbouring queries of one group that are scored and picked from together. */
struct card_slice {
    uint32_t group, first, count; /* queries */
    uint32_t k;                   /* for all of them; less where a range is shorter */
    uint32_t keys_max;
    bool by_mass;          /* lists end by the weights: the host picks */
    uint64_t index_stride; /* of their positions */
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
    struct {          /* of each sequence, by place: the token whose row is none of those; host memory */
        uint32_t position;
        const void *row; /* bf16 [inputs], until the next card_project; NULL: zeros */
    } first[LIMIT_SEQUENCES];
};

struct card {
    struct compute *compute; /* borrowed: its pool collects what comes back */
    const struct gpu_api *api;
    struct gpu *gpu;
    struct CUstream_st *stream;  /* projections and scores */
    struct CUstream_st *lane[2]; /* what is made of a slice's weights, while the next one's are scored */
    struct CUstream_st *out;     /* what goes to the host */
    bool lane_used[2];           /* since the streams came together */
    uint32_t next_lane;
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
    bool keys_int8;
    /* f16 [group][sequence][kv_head][context][head_dim]; of 8 bits as struct cuda_key_view says, a chunk of
     * sizes.key_tokens a sequence */
    uint8_t *keys;
    uint64_t *key_at;   /* [sequences] offsets inside a group */
    float *k;           /* [tile][kv_heads * head_dim] */
    void *mixed;        /* bf16 [tile][inputs] */
    float *angles;      /* [tile][dims / 2][2] */
    float *q;           /* [groups][LIMIT_SEQUENCES][q_heads * head_dim] */
    float *work;        /* of one slice, as the kernel wants it */
    float *weights[2];  /* of a lane: [slice][kv_heads][stride]; with pooling by max there is one lane, and */
    uint32_t *ignored;  /* the other's holds positions of lists whose mass alone is wanted */
    uint32_t *index[2]; /* selected positions of a slice */
    uint32_t *counts[2]; /* [LIMIT_SEQUENCES * kv_heads] of a slice's lists, or of a mass's */
    uint32_t *sets;    /* as struct cuda_sets has them: place = sequence, list = group * kv_heads + kv_head */
    uint32_t *changes; /* on their way to the host */
    uint32_t *total;   /* of them */
    /* [groups][CARD_MASSES][LIMIT_SEQUENCES * kv_heads] f32, then [LIMIT_SEQUENCES][lists][2] counts of
     * changes: one copy brings both */
    float *masses[2]; /* of a flight each: one comes back while the other is made */
    bool second;      /* the flight that is queued is the second */
    struct card_tokens *tokens;
    struct card_queries *queries;
    struct card_ranges *ranges;

    /* pinned; with an address of its own for kernels where a decode step copies it (cuda_copy_mapped) */
    struct card_tokens *host_tokens;
    struct card_queries *host_queries;
    struct card_ranges *host_ranges;
    void *host_queries_device, *host_ranges_device;
    uint32_t *host_changes;
    void *host_changes_device;
    uint32_t *host_sets;   /* of one sequence: [lists][2][words] */
    float *host_masses[2]; /* and counts, as on the card; with two flights one each */
    void *host_masses_device[2];
    _Atomic uint32_t *landed;
    void *landed_device; /* ticket of the last results that are on the host */
    float *host_weights; /* as `weights`, for lists by mass */

    /* host */
    struct reach_scratch scratch;

    float *results; /* one of host_masses */
    uint32_t ticket, query_count;
    bool waiting; /* it is a decode step, a token and a query each, that nothing is queued of yet */
    struct card_graph graphs[CARD_GRAPHS];
    struct card_shape seen; /* of the last step: a shape that comes twice is captured */
    uint64_t graph_clock, graph_steps;
    bool capturing, no_graphs; /* no_graphs: a capture failed */
    int capture_rc;            /* of the capture that goes on, the first error */
    void *owned[8 * HEAD_GROUPS_MAX + 40];
    int owned_count;
    void *pinned[10];
    int pinned_count;
};

/* Ends the process when `rc` is an error. */
void card_must(struct card *card, int rc, const char *what);

/* Queues a copy between device and mapped memory, past the copy engines (cuda_copy_mapped). */
void card_copy(struct card *card, void *to, const void *from, uint64_t bytes, struct CUstream_st *stream);

/* Device memory of a kind (of card->bytes); the first failure stays in *rc. */
void *card_take(struct card *card, uint64_t bytes, uint64_t *kind, int *rc, struct err *err);

/* A matrix of any type to bf16 on the card. ret_scale [rows]: what an RMS norm multiplies a row by, or
 * NULL. */
int card_upload_matrix(struct card *card, struct compute *compute, void *to, const struct model_tensor *t,
                       float *ret_scale);

/* Tokens that a product is made for: few shapes, so few plans. Rows past the real ones hold anything; nobody
 * reads what they give. */
uint32_t card_padded(uint32_t n);
/* Queues what card_project left: keys and queries of a decode step. */
void card_queue_waiting(struct card *card);
/* Plans for n tokens, before a capture. */
void card_prepare_products(struct card *card, uint32_t n);

struct cuda_key_view card_keys(const struct card *card, uint32_t group);

uint64_t card_results_bytes(const struct card *card);

/* Lists of one sequence. */
static inline uint32_t card_lists(const struct card *card)
{
    return card->config->groups * card->config->kv_heads;
}

#endif
