/* Opens retrieval heads. struct head owns the mapped file and copies of tensors that lie unaligned in it;
 * it is built by one thread, then read only. Nothing here computes: the weights are handed out where they
 * are mapped. */
#include "model/head.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/head_private.h"

enum { ALIGNMENT = 8 };
#define COUNT(array) (sizeof(array) / sizeof *(array))

struct head {
    char *path;
    struct safetensors *file;
    struct head_config config;
    struct head_shared shared;
    struct head_group groups[HEAD_GROUPS_MAX];
    struct model_tensor norm, freqs;
    struct head_tensor tensors[HEAD_TENSORS_MAX]; /* all that it may have */
    uint32_t tensor_count;
    void *copies[HEAD_TENSORS_MAX]; /* of unaligned tensors */
    unsigned copy_count;
    struct hash128 fingerprint;
};

static int check_hash(const struct head *h, const char *key, struct hash128 found, struct hash128 expected,
                      struct err *err)
{
    if (hash_equal(found, expected))
        return 0;
    return head_refuse(h->path, err, -EXDEV,
                       "%s: found fingerprint %016" PRIx64 "%016" PRIx64 ", expected %016" PRIx64
                       "%016" PRIx64 " (the head was made for another %s)",
                       key, found.hi, found.lo, expected.hi, expected.lo, key);
}

static int read_identity(struct head *h, const struct model *model, struct err *err)
{
    struct head_config *c = &h->config;
    int rc;
    if ((rc = head_fields_hash(h->file, h->path, "model", &c->model, err)) < 0 ||
        (rc = head_fields_hash(h->file, h->path, "tokenizer", &c->tokenizer, err)) < 0)
        return rc;
    if (!model)
        return 0;
    if ((rc = check_hash(h, "model", c->model, model_fingerprint(model), err)) < 0)
        return rc;
    return check_hash(h, "tokenizer", c->tokenizer, model_tokenizer_fingerprint(model), err);
}

static int check_model(const struct head *h, const struct model *model, struct err *err)
{
    const struct head_config *c = &h->config;
    const struct model_config *m = model_config(model);
    bool own = c->embedding == HEAD_EMBEDDING_OWN;
    const struct {
        const char *key;
        uint32_t found, expected;
    } same[] = {
        {"vocab", c->vocab, model_token_embedding(model)->rows},
        {"hidden", own ? 0 : c->hidden, own ? 0 : m->hidden},
        {"kv_heads", c->kv_heads, m->kv_heads},
        {"layers", c->layers, m->layers},
        {"feature_hidden", c->feature_hidden, c->features == HEAD_FEATURES_TARGET ? m->hidden : 0},
    };
    for (unsigned i = 0; i < COUNT(same); i++)
        if (same[i].found != same[i].expected)
            return head_refuse(h->path, err, -EXDEV,
                               "%s: found %" PRIu32 ", expected %" PRIu32 " as the model has", same[i].key,
                               same[i].found, same[i].expected);
    return 0;
}

/* Elements before the first that is no number: all its bits for the exponent are set. */
static uint64_t count_finite(const struct model_tensor *t)
{
    uint64_t count = (uint64_t)t->rows * t->cols, i = 0;
    if (t->type == DTYPE_F32) {
        const uint32_t *at = t->data;
        while (i < count && (at[i] & 0x7f800000u) != 0x7f800000u)
            i++;
    } else {
        const uint16_t *at = t->data, bits = t->type == DTYPE_F16 ? 0x7c00 : 0x7f80;
        while (i < count && (at[i] & bits) != bits)
            i++;
    }
    return i;
}

static int read_tensor(struct head *h, const struct head_tensor *w, struct err *err)
{
    const struct safetensors_tensor *t = safetensors_find(h->file, w->name);
    bool vector = w->rows == 0;
    uint32_t rows = vector ? 1 : w->rows;
    enum dtype type = DTYPE_F32;
    if (!t && w->optional)
        return 0;
    if (!t)
        return head_refuse(h->path, err, -EBADMSG, "tensor %s: found no such tensor, expected it", w->name);
    if (t->dims != (vector ? 1 : 2) || t->shape[t->dims - 1] != w->cols || (!vector && t->shape[0] != rows))
        return head_refuse(h->path, err, -EBADMSG,
                           "tensor %s: shape: found %" PRIu64 " x %" PRIu64 " (%" PRIu32
                           " dimensions), expected %" PRIu32 " x %" PRIu32,
                           w->name, t->dims > 1 ? t->shape[0] : 1, t->dims ? t->shape[t->dims > 1] : 1,
                           t->dims, rows, w->cols);
    if (head_type_from(t->type, vector, &type) < 0)
        return head_refuse(h->path, err, -ENOTSUP, "tensor %s: type: found %s, expected %s", w->name,
                           safetensors_type_name(t->type), vector ? "F32" : "F32, F16 or BF16");
    *w->to = (struct model_tensor){type, rows, w->cols, t->data, t->bytes};
    if ((uintptr_t)t->data % ALIGNMENT) {
        void *copy = mem_alloc_aligned(t->bytes, 1);
        memcpy(copy, t->data, t->bytes);
        w->to->data = h->copies[h->copy_count++] = copy;
    }
    /* One such weight, and no position has a score. */
    uint64_t finite = count_finite(w->to);
    if (finite < (uint64_t)rows * w->cols)
        return head_refuse(h->path, err, -EBADMSG,
                           "tensor %s: found a value that is not finite at %" PRIu64 ", expected numbers",
                           w->name, finite);
    return 0;
}

/* A weight that nobody would use makes it a head of another kind: selecting without it would be wrong. */
static int check_unknown(const struct head *h, struct err *err)
{
    for (uint32_t i = 0; i < safetensors_count(h->file); i++) {
        struct name name = safetensors_at(h->file, i)->name;
        uint32_t t = 0;
        while (t < h->tensor_count && !name_is(name, h->tensors[t].name))
            t++;
        if (t == h->tensor_count)
            return head_refuse(h->path, err, -ENOTSUP,
                               "tensor %.*s: found, expected no such tensor in a head of %" PRIu32
                               " groups with features %s",
                               (int)(name.bytes < 80 ? name.bytes : 80), name.text, h->config.groups,
                               head_features_name(h->config.features));
    }
    return 0;
}

/* The divisors are part of the rotation, which must give frequencies. */
static int check_rope(struct head *h, struct err *err)
{
    float inv_freq[MODEL_HEAD_DIM_MAX / 2], scale;
    h->config.rope.freq_factors = h->freqs.data;
    if (model_rope_frequencies(&h->config.rope, inv_freq, &scale) < 0)
        return head_refuse(h->path, err, -EBADMSG,
                           "rope: found values that give no frequencies, expected positive ones");
    return 0;
}

static int read_tensors(struct head *h, struct err *err)
{
    int rc = 0;
    h->tensor_count = head_tensors(&h->config, &h->norm, &h->shared, h->groups, &h->freqs, h->tensors);
    for (uint32_t i = 0; i < h->tensor_count && rc == 0; i++)
        rc = read_tensor(h, &h->tensors[i], err);
    if (rc == 0)
        rc = check_rope(h, err);
    if (rc == 0)
        rc = check_unknown(h, err);
    for (uint32_t g = 0; g < h->config.groups && rc == 0; g++) {
        struct head_group *group = &h->groups[g];
        if (!group->norm.data)
            group->norm = h->norm;
        if (group->taps.data && group->taps.type != DTYPE_F32)
            return head_refuse(h->path, err, -ENOTSUP,
                               "tensor groups.%" PRIu32 ".taps.weight: type: expected F32", g);
        if (!group->q_norm.data != !group->k_norm.data)
            rc = head_refuse(h->path, err, -EBADMSG,
                             "tensor groups.%" PRIu32
                             ".%s_norm.weight: found it alone, expected one for queries "
                             "and one for keys",
                             g, group->q_norm.data ? "q" : "k");
    }
    return rc;
}

static uint64_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static struct hash128 chain_tensor(struct hash128 hash, const struct model_tensor *t)
{
    uint32_t type = t->type;
    hash = hash_chain(hash, &type, sizeof type);
    return hash_chain(hash, t->data, t->bytes);
}

/* What is named as a recommendation or a remark (pool, source) is no part of it. */
static struct hash128 make_fingerprint(const struct head *h)
{
    const struct head_config *c = &h->config;
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
    for (uint32_t g = 0; g < c->groups; g++) {
        const struct head_group *group = &h->groups[g];
        hash = chain_tensor(chain_tensor(chain_tensor(hash, &group->norm), &group->q), &group->k);
        if (group->q_norm.data)
            hash = chain_tensor(chain_tensor(hash, &group->q_norm), &group->k_norm);
        if (group->taps.data)
            hash = chain_tensor(hash, &group->taps);
    }
    if (c->calibration.count) /* it decides how long lists are where that goes by mass */
        hash = hash_chain(hash, &c->calibration, sizeof c->calibration);
    if (r->freq_factors)
        hash = hash_chain(hash, r->freq_factors, h->freqs.bytes);
    if (c->embedding == HEAD_EMBEDDING_OWN)
        hash = chain_tensor(hash, &h->shared.embedding);
    if (c->features == HEAD_FEATURES_CONTEXT)
        hash = hash_chain(hash_chain(hash, &c->views, sizeof c->views), &c->taps, sizeof c->taps);
    if (c->features != HEAD_FEATURES_TARGET)
        return hash;
    hash = hash_chain(hash, c->feature_layers, c->feature_layer_count * sizeof *c->feature_layers);
    hash = chain_tensor(chain_tensor(hash, &h->shared.fc), &h->shared.feature_norm);
    return h->shared.feature_input_norm.data ? chain_tensor(hash, &h->shared.feature_input_norm) : hash;
}

int head_open(const char *path, const struct model *model, struct head **ret_head, struct err *err)
{
    struct head *h = mem_alloc(1, sizeof *h);
    h->path = mem_strdup(path);
    int rc = safetensors_open(path, &h->file, err);
    if (rc == 0)
        rc = head_fields_form(h->file, path, err);
    if (rc == 0)
        rc = read_identity(h, model, err);
    if (rc == 0)
        rc = head_fields_read(h->file, path, &h->config, err);
    if (rc == 0 && model)
        rc = check_model(h, model, err);
    if (rc == 0)
        rc = read_tensors(h, err);
    if (rc < 0) {
        head_free(&h);
        return rc;
    }
    h->fingerprint = make_fingerprint(h);
    *ret_head = h;
    return 0;
}

void head_free(struct head **head)
{
    struct head *h = *head;
    if (!h)
        return;
    for (unsigned i = 0; i < h->copy_count; i++)
        mem_free(&h->copies[i]);
    safetensors_free(&h->file);
    mem_free(&h->path);
    mem_free(head);
}

const struct head_config *head_config(const struct head *head)
{
    return &head->config;
}

const struct head_group *head_groups(const struct head *head)
{
    return head->groups;
}

const struct head_shared *head_shared(const struct head *head)
{
    return &head->shared;
}

const char *head_path(const struct head *head)
{
    return head->path;
}

struct hash128 head_fingerprint(const struct head *head)
{
    return head->fingerprint;
}

struct memory_gpu_head head_sizes(const struct head *head)
{
    const struct head_config *h = &head->config;
    struct memory_gpu_head ret = {.vocab = h->vocab,
                                  .hidden = h->hidden,
                                  .q_heads = h->q_heads,
                                  .kv_heads = h->kv_heads,
                                  .head_dim = h->head_dim,
                                  .groups = h->groups,
                                  .rope_dims = h->rope.dims,
                                  .views = h->views,
                                  .taps = h->taps,
                                  .features = (uint64_t)h->feature_layer_count * h->feature_hidden,
                                  .feature_input_norm = head->shared.feature_input_norm.data != NULL};
    for (uint32_t g = 0; g < h->groups; g++)
        ret.head_norms += !!head->groups[g].q_norm.data + !!head->groups[g].k_norm.data;
    return ret;
}
