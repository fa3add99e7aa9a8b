/* See memory_gpu.h. No state, any thread. */
#include "proto/memory_gpu.h"

#include "proto/control.h"
#include "proto/features.h"

enum {
    ATTENTION_PART = 256, /* list entries of one part of attention's work */
    SCORES_PART = 512,    /* keys of one part of the retriever's */
    INDEX_SHARE = 16,     /* of the work: selected positions of a slice; changes between two waits */
    SET_WORD = 32,        /* positions that a word of a set tells of */
    MASSES = 2,           /* of a list */
    KEYS_GRAIN = 16       /* int8 keys that are fetched together */
};

static uint64_t parts(uint64_t count, uint64_t size)
{
    return (count + size - 1) / size;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

void memory_gpu_retriever(const struct memory_gpu_head *h, uint32_t context, uint32_t sequences,
                          uint64_t work, struct memory_gpu_retriever *ret)
{
    uint64_t stride = parts(context, SCORES_PART) * SCORES_PART, hidden = h->hidden;
    uint64_t heads = (uint64_t)h->q_heads + h->kv_heads;
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * h->kv_heads, kv_row = (uint64_t)h->kv_heads * h->head_dim;
    /* Scores, and two numbers for every part of them. */
    uint64_t scores = h->q_heads * (stride + stride / SCORES_PART * 2) * 4, pooled = h->kv_heads * stride * 4;
    uint64_t views = larger(h->views, 1), taps = larger(h->taps, 1), inputs = views * hidden;
    uint64_t fit = work / (scores + 2 * pooled);
    *ret = (struct memory_gpu_retriever){
        .key_tokens = h->keys_int8 ? (uint32_t)parts(context, KEYS_GRAIN) * KEYS_GRAIN : context};
    ret->row_bytes = ret->key_tokens * memory_gpu_key_bytes(h) * h->kv_heads;
    ret->weights = h->vocab * (2 * hidden + 4) +
                   h->groups * (2 * heads * h->head_dim * inputs + 4 * hidden + 4 * views * taps) +
                   2 * (uint64_t)h->rope_dims + 4 * (uint64_t)h->head_norms * h->head_dim;
    uint64_t features_row = 0;
    if (h->features) { /* fc and norms, the projections' second halves; rows, their sums, what was normed */
        ret->weights += hidden * (2 * h->features + 4) + h->groups * 2 * heads * h->head_dim * hidden;
        features_row = 2 * h->features + 6 * hidden;
    }
    if (h->features && h->feature_input_norm) {
        ret->weights += 4 * h->features;
        features_row += 4 * h->features;
    }
    ret->group_bytes = sequences * ret->row_bytes;
    ret->keys = h->groups * ret->group_bytes + 8 * (uint64_t)sequences;
    ret->slice = (uint32_t)(fit < 1 ? 1 : fit < sequences ? fit : sequences);
    ret->scores = ret->slice * scores;
    ret->pooled = ret->slice * pooled;
    ret->index = larger(pooled, work / INDEX_SHARE);
    /* One query's lists may lose all that they had, and get as much. */
    ret->changes = larger(2 * h->groups * pooled, work / INDEX_SHARE) / 16 * 16;
    ret->sets = sequences * (uint64_t)h->groups * h->kv_heads * 2 * parts(context, SET_WORD) * 4;
    uint64_t of_a_token = 2 * inputs + 4 * kv_row + 4 * (uint64_t)h->rope_dims + features_row;
    uint64_t numbers = 5 * LIMIT_STEP_TOKENS + (MEMORY_GPU_TAPS - 1) * LIMIT_SEQUENCES +
                       (MEMORY_GPU_TAPS + 8) * LIMIT_SEQUENCES + 1;
    ret->workspace = ret->scores + 2 * ret->pooled + 2 * ret->index + ret->sets + ret->changes +
                     MEMORY_GPU_CHUNK * of_a_token +
                     4 * (uint64_t)h->groups * LIMIT_SEQUENCES * h->q_heads * h->head_dim +
                     4 * lists * (2 + 2 * (MASSES + UINT64_C(2)) * h->groups) + 4 * numbers;
}

uint64_t memory_gpu_tables(const struct kv_layout *layout, const struct memory_gpu_load *load)
{
    struct control_header h;
    struct control_params params = {.sequences_max = load->sequences,
                                    .list_max = control_list_max(load->budget, layout->context_max),
                                    .slots = load->slots};
    control_header_init(&h, layout, &params);
    return h.table_bytes;
}

static uint64_t attention_work(uint64_t queries, const struct memory_gpu_model *m, uint32_t list)
{
    return queries * parts(list, ATTENTION_PART) * m->q_heads * (m->head_dim + UINT64_C(4)) * 4;
}

void memory_gpu_decoder(const struct memory_gpu_model *m, const struct kv_layout *layout,
                        const struct memory_gpu_load *load, struct memory_gpu_decoder *ret)
{
    enum { ALIGNMENT = 256, VECTORS = 8, LOADING = 16 << 20, INPUTS = 1 << 20 };
    enum { JOINED = 32 }; /* tokens whose norms are parts of products: CUDA_PRODUCT_TOKENS */
    uint64_t q = (uint64_t)m->q_heads * m->head_dim, kv = (uint64_t)m->kv_heads * m->head_dim;
    uint64_t hidden = m->hidden, qkv = q + 2 * kv, prompt = MEMORY_GPU_PROMPT;
    uint64_t tokens = larger(load->context < prompt ? load->context : prompt, load->sequences);
    uint64_t layer = hidden * (qkv + q + 3 * (uint64_t)m->ffn) * 2;
    uint64_t vectors = 4 * (2 * hidden + qkv + 2 * (uint64_t)m->head_dim) + VECTORS * ALIGNMENT;
    uint64_t widest = larger(larger(q, hidden), m->ffn);
    *ret = (struct memory_gpu_decoder){.tables = memory_gpu_tables(layout, load)};
    ret->weights = m->layers * (layer + vectors) + (m->tied ? 1 : 2) * 2 * m->vocab * hidden + LOADING;
    ret->activations =
        tokens * (4 * hidden + 2 * widest + 4 * qkv + 8 * (uint64_t)m->ffn + 4 * (uint64_t)m->rope_dims) +
        load->sequences * 4 * (hidden + m->vocab) + JOINED * (2 * hidden + 4 * (2 * hidden / 64 + 2)) +
        INPUTS;
    if (load->feature_layers)
        ret->features = features_bytes((uint32_t)(load->context < prompt ? load->context : prompt),
                                       load->feature_layers, load->feature_hidden, DTYPE_BF16);
    ret->workspace =
        larger(attention_work(load->sequences, m, load->budget), attention_work(1, m, load->context));
}
