/* Which tensors a head's file has, and writing them. Stateless. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/head_private.h"

static const struct {
    enum safetensors_type file;
    enum dtype type;
} types[] = {{SAFETENSORS_F32, DTYPE_F32}, {SAFETENSORS_F16, DTYPE_F16}, {SAFETENSORS_BF16, DTYPE_BF16}};
#define TYPES (sizeof types / sizeof *types)

/* The file's element type for one of ours; vectors have the first only. 0 or -ENOTSUP. */
static int type_of(enum dtype type, bool vector, enum safetensors_type *ret)
{
    for (unsigned i = 0; i < (vector ? 1 : TYPES); i++)
        if (types[i].type == type) {
            *ret = types[i].file;
            return 0;
        }
    return -ENOTSUP;
}

int head_type_from(enum safetensors_type type, bool vector, enum dtype *ret)
{
    for (unsigned i = 0; i < (vector ? 1 : TYPES); i++)
        if (types[i].file == type) {
            *ret = types[i].type;
            return 0;
        }
    return -ENOTSUP;
}

static void name_part(char *name, uint32_t group, const char *part)
{
    snprintf(name, HEAD_NAME_BYTES, "groups.%" PRIu32 ".%.8s.weight", group, part);
}

uint32_t head_tensors(const struct head_config *c, struct model_tensor *norm, struct head_shared *shared,
                      struct head_group *groups, struct model_tensor *freqs,
                      struct head_tensor ret[HEAD_TENSORS_MAX])
{
    bool target = c->features == HEAD_FEATURES_TARGET;
    bool context = c->features == HEAD_FEATURES_CONTEXT;
    uint32_t count = 0,
             inputs = c->hidden * (target    ? 2
                                   : context ? c->views
                                             : 1),
             taps = c->feature_layer_count * c->feature_hidden;
    ret[count++] = (struct head_tensor){"norm.weight", 0, c->hidden, false, norm};
    for (uint32_t g = 0; g < c->groups; g++) {
        struct head_group *group = &groups[g];
        const struct head_tensor parts[HEAD_GROUP_TENSORS] = {
            {"norm", 0, c->hidden, true, &group->norm},
            {"q", c->q_heads * c->head_dim, inputs, false, &group->q},
            {"k", c->kv_heads * c->head_dim, inputs, false, &group->k},
            {"q_norm", 0, c->head_dim, true, &group->q_norm},
            {"k_norm", 0, c->head_dim, true, &group->k_norm},
            {"taps", c->views, c->taps, false, &group->taps},
        };
        for (unsigned i = 0; i < (context ? HEAD_GROUP_TENSORS : HEAD_GROUP_TENSORS - 1u); i++) {
            ret[count] = parts[i];
            name_part(ret[count++].name, g, parts[i].name);
        }
    }
    ret[count++] = (struct head_tensor){"rope_freqs.weight", 0, c->rope.dims / 2, true, freqs};
    if (c->embedding == HEAD_EMBEDDING_OWN)
        ret[count++] =
            (struct head_tensor){"embedding.weight", c->vocab, c->hidden, false, &shared->embedding};
    if (target) {
        ret[count++] = (struct head_tensor){"features.fc.weight", c->hidden, taps, false, &shared->fc};
        ret[count++] =
            (struct head_tensor){"features.norm.weight", 0, c->hidden, false, &shared->feature_norm};
        ret[count++] =
            (struct head_tensor){"features.input_norm.weight", 0, taps, true, &shared->feature_input_norm};
    }
    return count;
}

static int put_tensor(struct safetensors_entry *e, const char *path, const struct head_tensor *w,
                      struct err *err)
{
    const struct model_tensor *t = w->to;
    bool vector = w->rows == 0;
    uint32_t rows = vector ? 1 : w->rows;
    enum safetensors_type type;
    if (t->rows != rows || t->cols != w->cols)
        return head_refuse(path, err, -EBADMSG,
                           "tensor %s: shape: found %" PRIu32 " x %" PRIu32 ", expected %" PRIu32
                           " x %" PRIu32,
                           w->name, t->rows, t->cols, rows, w->cols);
    if (type_of(t->type, vector, &type) < 0)
        return head_refuse(path, err, -ENOTSUP, "tensor %s: type: found number %d, expected %s", w->name,
                           (int)t->type, vector ? "F32" : "F32, F16 or BF16");
    *e = (struct safetensors_entry){.name = w->name,
                                    .type = type,
                                    .dims = vector ? 1 : 2,
                                    .shape = {vector ? w->cols : rows, w->cols},
                                    .data = t->data};
    return 0;
}

/* All that a file is made of, while it is put together. */
struct content {
    struct head_metadata metadata;
    struct head_shared shared;
    struct head_group groups[HEAD_GROUPS_MAX];
    struct model_tensor norm, freqs;
    struct head_tensor tensors[HEAD_TENSORS_MAX];
    struct safetensors_entry entries[HEAD_TENSORS_MAX];
    uint32_t entry_count;
};

static int put_tensors(struct content *w, const char *path, const struct head_config *c, struct err *err)
{
    uint32_t count = head_tensors(c, &w->norm, &w->shared, w->groups, &w->freqs, w->tensors);
    int rc = 0;
    w->norm = w->groups[0].norm;
    for (uint32_t g = c->groups; g-- > 0;) { /* those that norm.weight stands for */
        struct model_tensor *own = &w->groups[g].norm;
        bool comparable = own->data && w->norm.data && own->cols == w->norm.cols;
        if (g == 0 || (comparable && memcmp(own->data, w->norm.data, own->cols * sizeof(float)) == 0))
            own->data = NULL;
    }
    for (uint32_t i = 0; i < count && rc == 0; i++)
        if (!w->tensors[i].optional || w->tensors[i].to->data)
            rc = put_tensor(&w->entries[w->entry_count++], path, &w->tensors[i], err);
    return rc;
}

int head_write(const char *path, const struct head_config *config, const struct head_shared *shared,
               const struct head_group *groups, struct err *err)
{
    int rc = head_fields_check(path, config, err);
    if (rc < 0)
        return rc;
    struct content *w = mem_alloc(1, sizeof *w);
    memcpy(w->groups, groups, config->groups * sizeof *groups);
    if (shared)
        w->shared = *shared;
    w->freqs = (struct model_tensor){DTYPE_F32, 1, config->rope.dims / 2, config->rope.freq_factors, 0};
    head_fields_put(&w->metadata, config);
    rc = put_tensors(w, path, config, err);
    struct safetensors_content content = {w->entries, w->entry_count, w->metadata.pairs,
                                          w->metadata.pair_count};
    if (rc == 0)
        rc = safetensors_write(path, &content, err);
    mem_free(&w);
    return rc;
}
