/* The identity of model and head; see identity.h. Pure. */
#include "decoder/identity.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int identity_init(struct identity *id, const struct model *model, uint32_t context, struct err *err)
{
    const struct model_config *c = model_config(model);
    uint32_t longest = c->context_max < LIMIT_CONTEXT ? c->context_max : LIMIT_CONTEXT;
    if (context > longest)
        return err_set(err, -EINVAL, "--context: found %u, expected at most %u as the model was made for",
                       context, longest);
    memset(id, 0, sizeof *id);
    id->tokenizer = model_tokenizer_fingerprint(model);
    id->hidden = c->hidden;
    snprintf(id->device, sizeof id->device, "cpu");
    struct kv_layout *l = &id->layout;
    l->model = model_fingerprint(model);
    l->layers = c->layers;
    l->row_heads = l->selection_heads = c->kv_heads;
    l->piece_bytes = 2 * c->head_dim * (uint32_t)sizeof(uint16_t);
    l->dtype = DTYPE_F16;
    l->context_max = context ? context : longest;
    struct kv_layout trial = *l;
    layout_set_groups(&trial, 1);
    return layout_check(&trial, err);
}

void identity_hello(const struct identity *id, struct msg_hello *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->role = ROLE_DECODER;
    ret->version_min = MSG_VERSION_MIN;
    ret->pid = (uint32_t)getpid();
    snprintf(ret->build, sizeof ret->build, "%s", SPECONTEXT_VERSION);
    snprintf(ret->device, sizeof ret->device, "%s", id->device);
    ret->has_layout = id->layout.groups > 0;
    if (ret->has_layout)
        ret->layout = id->layout;
    ret->tokenizer = id->tokenizer;
}

static int differ(const char *field, uint64_t found, uint64_t expected, struct err *err)
{
    return err_set(err, -EPROTO, "retriever: %s: found %" PRIu64 ", expected %" PRIu64, field, found,
                   expected);
}

static int differ_hash(const char *field, struct hash128 found, struct hash128 expected, struct err *err)
{
    return err_set(err, -EPROTO,
                   "retriever: %s: found %016" PRIx64 "%016" PRIx64 ", expected %016" PRIx64 "%016" PRIx64,
                   field, found.hi, found.lo, expected.hi, expected.lo);
}

static int compare_model(const struct identity *id, const struct msg_hello *hello, struct err *err)
{
    static const struct hash128 none = {0, 0};
    const struct kv_layout *own = &id->layout, *other = &hello->layout;
    if (!hello->has_layout)
        return err_set(err, -EPROTO, "retriever: its greeting has no layout");
    if (!hash_equal(other->model, own->model))
        return differ_hash("model", other->model, own->model, err);
    if (other->layers != own->layers)
        return differ("layers", other->layers, own->layers, err);
    if (other->row_heads != own->row_heads)
        return differ("row heads", other->row_heads, own->row_heads, err);
    if (other->selection_heads != own->selection_heads)
        return differ("selection heads", other->selection_heads, own->selection_heads, err);
    if (other->context_max < own->context_max)
        return err_set(err, -EPROTO, "retriever: context: found %u, expected at least %u", other->context_max,
                       own->context_max);
    if (!hash_equal(hello->tokenizer, none) && !hash_equal(id->tokenizer, none) &&
        !hash_equal(hello->tokenizer, id->tokenizer))
        return differ_hash("tokenizer", hello->tokenizer, id->tokenizer, err);
    return 0;
}

/* Whether the model has the hidden states that the head reads. */
static int check_features(const struct identity *id, const struct msg_hello *hello, struct err *err)
{
    const struct layout_features *f = &hello->features;
    if (!hello->has_features)
        return 0;
    if (f->hidden != id->hidden)
        return differ("features: hidden", f->hidden, id->hidden, err);
    uint32_t last = f->layer[f->layers - 1]; /* they ascend */
    if (last > id->layout.layers)
        return err_set(err, -EPROTO,
                       "retriever: features: layer: found %" PRIu32 ", expected at most %" PRIu32, last,
                       id->layout.layers);
    return 0;
}

int identity_join(struct identity *id, const struct msg_hello *hello, struct err *err)
{
    int r = compare_model(id, hello, err);
    if (r < 0)
        return r;
    struct kv_layout joined = id->layout;
    joined.groups = hello->layout.groups;
    memcpy(joined.group_first_layer, hello->layout.group_first_layer, sizeof joined.group_first_layer);
    r = layout_check(&joined, err);
    if (r < 0)
        return err_prefix(err, r, "retriever");
    for (uint32_t g = joined.groups + 1; g <= LIMIT_GROUPS; g++)
        joined.group_first_layer[g] = 0;
    id->layout = joined;
    r = check_features(id, hello, err);
    if (r < 0)
        return r;
    id->head = hello->head;
    if (hello->has_features)
        id->features = hello->features;
    return 0;
}

int identity_compare(const struct identity *id, const struct msg_hello *hello, struct err *err)
{
    int r = compare_model(id, hello, err);
    if (r < 0)
        return r;
    if (hello->head != id->head)
        return err_set(err, -EPROTO,
                       "retriever: head, or its --key-type: found %016" PRIx64 ", expected %016" PRIx64,
                       hello->head, id->head);
    struct layout_features features = hello->has_features ? hello->features : (struct layout_features){0};
    if (memcmp(&features, &id->features, sizeof features))
        return err_set(err, -EPROTO, "retriever: features: found other layers than the first one's");
    if (hello->layout.groups != id->layout.groups)
        return differ("groups", hello->layout.groups, id->layout.groups, err);
    return 0;
}
