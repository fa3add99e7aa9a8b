/* The double's retrieval, Top-K and sampling. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "model/sampler.h"
#include "tests/fakegpu/fakegpu.h"

static uint64_t key_offset(const struct cuda_key_view *keys, const uint64_t *at, uint32_t head,
                           uint32_t position, uint32_t key_bytes, bool *ret_valid)
{
    uint32_t chunk = position / keys->chunk_tokens, inside = position % keys->chunk_tokens;
    *ret_valid = chunk < keys->at_count;
    chunk = *ret_valid ? chunk : keys->at_count - 1;
    uint64_t offset =
        (at[chunk] & ~UINT64_C(15)) + ((uint64_t)head * keys->chunk_tokens + inside) * key_bytes;
    uint64_t last = (keys->device_bytes - key_bytes) & ~UINT64_C(15);
    *ret_valid = *ret_valid && offset <= last;
    return offset <= last ? offset : last;
}

/* Of the scale of an int8 key. */
static uint64_t scale_offset(const struct cuda_key_view *keys, const uint64_t *at, uint32_t kv_heads,
                             uint32_t head, uint32_t position, uint32_t dim, bool *ret_valid)
{
    uint32_t chunk = position / keys->chunk_tokens, inside = position % keys->chunk_tokens;
    *ret_valid = chunk < keys->at_count;
    chunk = *ret_valid ? chunk : keys->at_count - 1;
    uint64_t offset = (at[chunk] & ~UINT64_C(15)) + (uint64_t)kv_heads * keys->chunk_tokens * dim +
                      ((uint64_t)head * keys->chunk_tokens + inside) * sizeof(uint16_t);
    uint64_t last = (keys->device_bytes - sizeof(uint16_t)) & ~UINT64_C(1);
    *ret_valid = *ret_valid && offset <= last;
    return offset <= last ? offset : last;
}

static bool keys_are_valid(const struct cuda_key_view *keys, uint32_t head_dim)
{
    if (!keys->chunk_tokens || !keys->at_count || !fakegpu_aligned(keys->base, 16))
        return false;
    if (keys->type == DTYPE_I8)
        return (head_dim == 64 || head_dim == 128) && keys->chunk_tokens % CUDA_KEYS_GRAIN == 0 &&
               keys->device_bytes >= CUDA_KEYS_GRAIN * (uint64_t)head_dim;
    return fakegpu_is_16bit(keys->type) && keys->device_bytes >= 2 * (uint64_t)head_dim;
}

static void append_key(const struct cuda_keys_append *a, uint32_t t, uint32_t row, uint32_t h)
{
    bool valid, scale_valid = true;
    const uint64_t *at = a->keys.at + row * a->keys.row_stride;
    const float *k = a->k + t * a->stride + (uint64_t)h * a->head_dim;
    bool int8 = a->keys.type == DTYPE_I8;
    uint8_t *key =
        a->keys.base + key_offset(&a->keys, at, h, a->positions[t], a->head_dim * (int8 ? 1 : 2), &valid);
    if (int8) {
        uint64_t scale_at =
            scale_offset(&a->keys, at, a->kv_heads, h, a->positions[t], a->head_dim, &scale_valid);
        int8_t q[128];
        uint16_t scale = compute_key_quantize(q, k, (int)a->head_dim);
        if (!valid || !scale_valid)
            return;
        memcpy(key, q, a->head_dim);
        memcpy(a->keys.base + scale_at, &scale, sizeof scale);
    } else if (valid)
        fakegpu_store(key, a->keys.type, 0, k, a->head_dim);
}

static void run_keys_append(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_keys_append *a = argument;
    (void)worker;
    for (uint32_t t = 0; t < a->n; t++) {
        uint32_t row = a->rows ? a->rows[t] : t;
        for (uint32_t h = 0; h < a->kv_heads && row < a->row_count; h++)
            append_key(a, t, row, h);
    }
}

int fakegpu_keys_append(const struct cuda_keys_append *a, struct CUstream_st *stream)
{
    if (!keys_are_valid(&a->keys, a->head_dim) || a->kv_heads == 0 || a->head_dim == 0 || a->head_dim % 8 ||
        a->stride % 4 || !fakegpu_aligned(a->k, 16))
        return -EINVAL;
    return a->n ? FAKEGPU_LAUNCH(stream, run_keys_append, a, a->keys.base, a->keys.at, a->k, a->rows,
                                 a->positions)
                : 0;
}

size_t fakegpu_retrieval_work_bytes(uint32_t n, uint32_t q_heads, uint32_t count_max)
{
    uint64_t stride = ((uint64_t)count_max + CUDA_KEYS_CHUNK - 1) / CUDA_KEYS_CHUNK * CUDA_KEYS_CHUNK;
    return (size_t)((uint64_t)n * q_heads * (stride + stride / CUDA_KEYS_CHUNK * 2) * sizeof(float));
}

/* Pooled softmax weights of one KV head with bf16 keys; others are the CPU operator's own. */
static void bf16_weights(struct fakegpu_worker *worker, float *out, const float *q, const uint16_t *keys,
                         const struct cuda_retrieval *r, uint32_t count)
{
    uint32_t group = r->q_heads / r->kv_heads;
    float *scores = fakegpu_scratch(worker, 2, count * sizeof *scores), key[128];
    for (uint32_t g = 0; g < group; g++) {
        float best = -INFINITY;
        double total = 0;
        for (uint32_t i = 0; i < count; i++) {
            float sum = 0;
            fakegpu_load(key, keys, DTYPE_BF16, (uint64_t)i * r->head_dim, r->head_dim);
            for (uint32_t d = 0; d < r->head_dim; d++)
                sum += q[(size_t)g * r->head_dim + d] * key[d];
            scores[i] = sum * r->scale;
            best = scores[i] > best ? scores[i] : best;
        }
        for (uint32_t i = 0; i < count; i++)
            total += (double)(scores[i] = expf(scores[i] - best));
        float factor = (float)(1.0 / (r->mean ? total * group : total));
        for (uint32_t i = 0; i < count; i++) {
            float w = scores[i] * factor;
            out[i] = g == 0 ? w : r->mean ? out[i] + w : out[i] > w || isnan(out[i]) ? out[i] : w;
        }
    }
}

/* Key `position` of a list, 16 bits an element. */
static void take_key(const struct cuda_retrieval *r, const uint64_t *at, uint32_t head, uint32_t position,
                     uint16_t *ret)
{
    bool valid, int8 = r->keys.type == DTYPE_I8;
    const uint8_t *key =
        r->keys.base + key_offset(&r->keys, at, head, position, r->head_dim * (int8 ? 1 : 2), &valid);
    if (!int8) {
        memcpy(ret, key, r->head_dim * sizeof *ret);
        return;
    }
    uint16_t scale;
    uint64_t scale_at = scale_offset(&r->keys, at, r->kv_heads, head, position, r->head_dim, &valid);
    memcpy(&scale, r->keys.base + scale_at, sizeof scale);
    for (uint32_t d = 0; d < r->head_dim; d++)
        ret[d] = compute_key_element((int8_t)key[d], scale);
}

static void weigh(struct fakegpu_worker *worker, const struct cuda_retrieval *r, uint32_t t)
{
    uint32_t row = r->rows ? r->rows[t] : t, group = r->q_heads / r->kv_heads;
    uint32_t count = row < r->row_count ? r->counts[t] : 0;
    count = count < r->count_max ? count : r->count_max;
    if (!count)
        return;
    uint16_t *keys = fakegpu_scratch(worker, 0, (size_t)count * r->head_dim * 2);
    for (uint32_t h = 0; h < r->kv_heads; h++) {
        const float *q = r->q + t * r->q_stride + (uint64_t)h * group * r->head_dim;
        float *out = r->weights + ((uint64_t)t * r->kv_heads + h) * r->weight_stride;
        for (uint32_t i = 0; i < count; i++)
            take_key(r, r->keys.at + row * r->keys.row_stride, h, i, keys + (size_t)i * r->head_dim);
        struct key_view view = {(const uint16_t *const[]){keys}, count, count};
        if (r->keys.type != DTYPE_BF16)
            compute_retrieval_weights(worker->compute, out, r->weight_stride, q, &view, (int)group, 1,
                                      (int)r->head_dim, r->scale, r->mean ? POOL_MEAN : POOL_MAX);
        else
            bf16_weights(worker, out, q, keys, r, count);
    }
}

static void run_retrieval(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_retrieval *r = argument;
    for (uint32_t t = 0; t < r->n; t++)
        weigh(worker, r, t);
}

int fakegpu_retrieval(const struct cuda_retrieval *r, struct CUstream_st *stream)
{
    if (!keys_are_valid(&r->keys, r->head_dim) || r->kv_heads == 0 || r->q_heads == 0 ||
        r->q_heads % r->kv_heads || r->q_heads / r->kv_heads > CUDA_GROUP_MAX ||
        (r->head_dim != 64 && r->head_dim != 128) || r->count_max == 0 || r->weight_stride % 4 ||
        r->weight_stride < r->count_max || r->q_stride % 4 || !fakegpu_aligned(r->q, 16) ||
        !fakegpu_aligned(r->weights, 16) || !fakegpu_aligned(r->work, 16) || !r->work || r->n > 65535 ||
        r->kv_heads > 65535)
        return -EINVAL;
    return r->n ? FAKEGPU_LAUNCH(stream, run_retrieval, r, r->keys.base, r->keys.at, r->weights, r->q,
                                 r->rows, r->counts, r->work)
                : 0;
}

static void run_topk(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_topk *t = argument;
    uint32_t *scratch = fakegpu_scratch(worker, 0, t->end_max * sizeof *scratch);
    for (uint32_t r = 0; r < t->rows; r++) {
        uint32_t end = t->end[r / t->heads], first = t->first ? t->first[r / t->heads] : 0;
        uint32_t *index = t->index + r * t->index_stride;
        double mass = 0;
        end = end < t->end_max ? end : t->end_max;
        first = first < end ? first : end;
        uint32_t count =
            compute_topk(index, &mass, t->values + r * t->stride + first, end - first, t->k, scratch);
        for (uint32_t i = 0; i < count; i++)
            index[i] += first;
        t->ret_count[r] = count;
        for (uint32_t i = 0; t->outer && i < t->outer[r / t->heads] && i < t->end_max; i++)
            mass += i < first || i >= end ? (double)t->values[r * t->stride + i] : 0;
        if (t->ret_mass)
            t->ret_mass[r] = (float)mass;
    }
}

int fakegpu_topk(const struct cuda_topk *t, struct CUstream_st *stream)
{
    if (t->heads == 0 || t->end_max == 0 || t->end_max > CUDA_TOPK_MAX || t->stride % 4 ||
        t->stride < t->end_max || t->index_stride < (t->k < t->end_max ? t->k : t->end_max) ||
        !fakegpu_aligned(t->values, 16) || !t->end)
        return -EINVAL;
    return t->rows ? FAKEGPU_LAUNCH(stream, run_topk, t, t->index, t->ret_count, t->ret_mass, t->values,
                                    t->first, t->end, t->outer)
                   : 0;
}

static void run_sample(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_sample *s = argument;
    float *logits = fakegpu_scratch(worker, 1, s->vocab * sizeof *logits);
    for (uint32_t t = 0; t < s->n; t++) {
        const struct cuda_sample_params *from = &s->params[t];
        struct sampler_params p = sampler_params_default();
        uint32_t id = 0;
        p.temperature = from->temperature;
        p.top_p = from->top_p;
        p.min_p = from->min_p;
        p.top_k = from->top_k;
        p.seed = from->seed;
        memcpy(logits, s->logits + t * s->stride, s->vocab * sizeof *logits);
        struct sampler_input in = {.logits = logits,
                                   .vocab = s->vocab,
                                   .sequence = from->sequence,
                                   .position = from->position,
                                   .scratch = fakegpu_scratch(worker, 0, sampler_scratch_bytes(s->vocab))};
        s->ids[t] = sampler_sample(&p, &in, &id) < 0 ? -1 : (int32_t)id;
    }
}

int fakegpu_sample(const struct cuda_sample *s, struct CUstream_st *stream)
{
    if (s->vocab == 0 || s->vocab > CUDA_VOCAB_MAX || s->stride < s->vocab)
        return -EINVAL;
    return s->n ? FAKEGPU_LAUNCH(stream, run_sample, s, s->ids, s->logits, s->params) : 0;
}

static void run_penalties(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_penalties *p = argument;
    (void)worker;
    for (uint32_t t = 0; t < p->n; t++) {
        float repeat = p->params[3 * t], presence = p->params[3 * t + 1], frequency = p->params[3 * t + 2];
        for (uint32_t i = p->begin[t]; i < p->begin[t + 1]; i++) {
            struct cuda_penalty_entry e = p->entries[i];
            if (e.id >= p->vocab)
                continue;
            float *logit = p->logits + t * p->stride + e.id;
            *logit = *logit > 0 ? *logit / repeat : *logit * repeat;
            *logit -= presence + (float)e.count * frequency;
        }
    }
}

int fakegpu_penalties(const struct cuda_penalties *p, struct CUstream_st *stream)
{
    if (p->vocab == 0 || p->stride < p->vocab)
        return -EINVAL;
    return p->n ? FAKEGPU_LAUNCH(stream, run_penalties, p, p->logits, p->entries, p->begin, p->params) : 0;
}
