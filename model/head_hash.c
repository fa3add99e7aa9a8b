/* The fingerprint of a head: what is used of its metadata, and its weights. Pure. */
#include <string.h>

#include "model/head_private.h"

static uint64_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* What is named as a recommendation or a remark (pool, source) is no part of it. */
struct hash128 head_hash(const struct head_config *config, const struct head_group *groups)
{
    const struct head_config *c = config;
    const struct model_rope *r = &c->rope;
    uint64_t words[] = {1,
                        c->model.lo,
                        c->model.hi,
                        c->tokenizer.lo,
                        c->tokenizer.hi,
                        c->vocab,
                        c->hidden,
                        c->q_heads,
                        c->kv_heads,
                        c->head_dim,
                        c->layers,
                        c->groups,
                        bits_of(c->rms_eps),
                        bits_of(r->base),
                        r->dims,
                        r->halves,
                        r->scaling,
                        bits_of(r->factor),
                        r->original_context,
                        bits_of(r->beta_fast),
                        bits_of(r->beta_slow),
                        bits_of(r->attn_factor),
                        c->trained_context};
    struct hash128 hash = hash_bytes(0, words, sizeof words);
    hash = hash_chain(hash, c->group_first_layer, (c->groups + 1) * sizeof *c->group_first_layer);
    if (head_has_context(c)) {
        const uint32_t shape[] = {c->views, c->taps};
        hash = hash_chain(hash, shape, sizeof shape);
    }
    for (uint32_t g = 0; g < c->groups; g++) {
        const struct model_tensor *tensors[] = {&groups[g].norm, &groups[g].q, &groups[g].k, &groups[g].taps};
        for (unsigned i = 0; i < sizeof tensors / sizeof *tensors && tensors[i]->data; i++) {
            uint32_t type = tensors[i]->type;
            hash = hash_chain(hash, &type, sizeof type);
            hash = hash_chain(hash, tensors[i]->data, tensors[i]->bytes);
        }
    }
    if (c->calibration.count) /* it decides how long lists are where that goes by mass */
        hash = hash_chain(hash, &c->calibration, sizeof c->calibration);
    return r->freq_factors ? hash_chain(hash, r->freq_factors, r->dims / 2 * sizeof *r->freq_factors) : hash;
}
