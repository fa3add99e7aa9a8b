/* Tables over the tensors of model files. struct weights belongs to its model; built by one thread. It must
 * never read tensor data but for the samples of the fingerprint. */
#include "model/weights.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/weights_private.h"

static int refuse_twice(const struct weight *a, const struct weight *b, struct err *err)
{
    return err_set(err, -EBADMSG, "%.180s: tensor %.*s: found it in %.180s too, expected it once", b->path,
                   (int)(a->name.bytes < 80 ? a->name.bytes : 80), a->name.text, a->path);
}

static int add(struct weights *w, struct weight weight, struct err *err)
{
    uint32_t place = w->count;
    w->items[place] = weight;
    w->names[place] = weight.name;
    if (!names_add(&w->index, place))
        return refuse_twice(&w->items[names_find(&w->index, weight.name)], &w->items[place], err);
    w->count++;
    return 0;
}

static void make_room(struct weights *w, uint32_t count)
{
    w->items = mem_alloc(count, sizeof *w->items);
    w->names = mem_alloc(count, sizeof *w->names);
    names_init(&w->index, w->names, count);
}

static int add_gguf(struct weights *w, const struct gguf *g, struct err *err)
{
    int rc = 0;
    for (uint32_t i = 0; i < gguf_tensors(g) && !rc; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        struct weight weight = {.name = t->name,
                                .type_name = dtype_info((unsigned)t->type)->name,
                                .type = t->type,
                                .dims = t->dims,
                                .rows = t->shape[1] * t->shape[2] * t->shape[3], /* fits: within the file */
                                .cols = t->shape[0],
                                .data = t->data,
                                .bytes = t->bytes,
                                .path = gguf_path(g)};
        rc = add(w, weight, err);
    }
    return rc;
}

static enum dtype dtype_of(enum safetensors_type type)
{
    switch (type) {
    case SAFETENSORS_F32:
        return DTYPE_F32;
    case SAFETENSORS_F16:
        return DTYPE_F16;
    case SAFETENSORS_BF16:
        return DTYPE_BF16;
    default:
        return DTYPE_MAX;
    }
}

static int add_tensor(struct weights *w, const struct safetensors_tensor *t, const char *path,
                      struct err *err)
{
    struct weight weight = {.name = t->name,
                            .type_name = safetensors_type_name(t->type),
                            .type = dtype_of(t->type),
                            .dims = t->dims,
                            .rows = 1,
                            .cols = t->dims ? t->shape[t->dims - 1] : 1,
                            .data = t->data,
                            .bytes = t->bytes,
                            .path = path};
    for (uint32_t d = 0; d + 1 < t->dims; d++)
        if (__builtin_mul_overflow(weight.rows, t->shape[d], &weight.rows)) /* beside a dimension of 0 */
            weight.rows = UINT64_MAX;
    return add(w, weight, err);
}

static int add_shard(struct weights *w, uint32_t shard, struct err *err)
{
    const struct safetensors *s = w->shards[shard];
    int rc = 0;
    for (uint32_t i = 0; i < safetensors_count(s) && !rc; i++)
        rc = add_tensor(w, safetensors_at(s, i), w->paths[shard], err);
    return rc;
}

int weights_open_torch(struct weights *weights, const char *path, struct err *err)
{
    struct weights *w = weights;
    int rc = torch_open(path, &w->torch, err);
    if (rc < 0)
        return rc;
    w->torch_path = mem_strdup(path);
    make_room(w, torch_count(w->torch));
    for (uint32_t i = 0; i < torch_count(w->torch) && !rc; i++)
        rc = add_tensor(w, torch_at(w->torch, i), w->torch_path, err);
    return rc;
}

/* NAME-00001-of-0000N.gguf: the length of NAME, or -1 when the name is not of this form. */
static ptrdiff_t split_name(const char *path, uint32_t *ret_part, uint32_t *ret_parts)
{
    const size_t tail = strlen("-00001-of-00001.gguf");
    size_t bytes = strlen(path);
    int used = 0;
    if (bytes <= tail)
        return -1;
    const char *at = path + bytes - tail;
    if (sscanf(at, "-%5" SCNu32 "-of-%5" SCNu32 ".gguf%n", ret_part, ret_parts, &used) != 2 ||
        used != (int)tail || at[1] == ' ' || at[1] == '+')
        return -1;
    return (ptrdiff_t)(bytes - tail);
}

/* 0 parts: the file does not say that it is split. */
static int read_split(const struct gguf *g, uint32_t *ret_part, uint32_t *ret_parts, struct err *err)
{
    int rc = 0;
    *ret_part = *ret_parts = 0;
    if (gguf_has(g, "split.count"))
        rc = gguf_u32(g, "split.count", ret_parts, err);
    if (!rc && gguf_has(g, "split.no"))
        rc = gguf_u32(g, "split.no", ret_part, err);
    return rc;
}

static int open_part(struct weights *w, const char *first, ptrdiff_t stem, uint32_t part, uint32_t parts,
                     struct err *err)
{
    char *path = mem_alloc((size_t)stem + 32, 1);
    uint32_t found_part = 0, found_parts = 0;
    snprintf(path, (size_t)stem + 32, "%.*s-%05" PRIu32 "-of-%05" PRIu32 ".gguf", (int)stem, first, part + 1,
             parts);
    int rc = gguf_open(path, &w->ggufs[part], err);
    if (rc == -ENOENT)
        rc = err_set(err, -EBADMSG, "%.200s: found no such file, expected it as part %" PRIu32 " of %" PRIu32,
                     path, part + 1, parts);
    mem_free(&path);
    if (rc < 0)
        return rc;
    w->gguf_count = part + 1;
    if ((rc = read_split(w->ggufs[part], &found_part, &found_parts, err)) < 0)
        return rc;
    if (found_part != part || found_parts != parts)
        return err_set(err, -EBADMSG,
                       "%.200s: split.no, split.count: found %" PRIu32 ", %" PRIu32 ", expected %" PRIu32
                       ", %" PRIu32,
                       gguf_path(w->ggufs[part]), found_part, found_parts, part, parts);
    return 0;
}

static int open_parts(struct weights *w, const char *path, uint32_t parts, struct err *err)
{
    uint32_t name_part = 0, name_parts = 0;
    ptrdiff_t stem = split_name(path, &name_part, &name_parts);
    if (stem < 0 || name_part != 1 || name_parts != parts || parts > WEIGHTS_FILES_MAX)
        return err_set(err, -EBADMSG,
                       "%.200s: file name: found a part of a model split in %" PRIu32
                       ", expected its first part, NAME-00001-of-%05" PRIu32 ".gguf",
                       path, parts, parts);
    w->ggufs = mem_resize(w->ggufs, parts, sizeof *w->ggufs);
    for (uint32_t i = 1; i < parts; i++) {
        w->ggufs[i] = NULL;
        int rc = open_part(w, path, stem, i, parts, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_total(const struct weights *w, uint64_t total, struct err *err)
{
    const struct gguf *g = w->ggufs[0];
    uint64_t said = total;
    int rc = gguf_has(g, "split.tensors.count") ? gguf_u64(g, "split.tensors.count", &said, err) : 0;
    if (!rc && said != total)
        rc = err_set(err, -EBADMSG,
                     "%.200s: split.tensors.count: found %" PRIu64 ", expected %" PRIu64
                     " as there are in the parts",
                     gguf_path(g), said, total);
    return rc;
}

int weights_open_gguf(struct weights *weights, const char *path, struct err *err)
{
    struct weights *w = weights;
    uint32_t part = 0, parts = 0;
    w->ggufs = mem_alloc(1, sizeof *w->ggufs);
    int rc = gguf_open(path, &w->ggufs[0], err);
    if (rc < 0)
        return rc;
    w->gguf_count = 1;
    if ((rc = read_split(w->ggufs[0], &part, &parts, err)) < 0)
        return rc;
    if (parts > 1 && (rc = open_parts(w, path, parts, err)) < 0)
        return rc;
    uint64_t total = 0;
    for (uint32_t i = 0; i < w->gguf_count; i++)
        total += gguf_tensors(w->ggufs[i]);
    if (total > 1u << 20)
        return err_set(err, -EBADMSG, "%.200s: tensors: found %" PRIu64 ", expected at most %u", path, total,
                       1u << 20);
    make_room(w, (uint32_t)total);
    for (uint32_t i = 0; i < w->gguf_count && !rc; i++)
        rc = add_gguf(w, w->ggufs[i], err);
    return rc ? rc : check_total(w, total, err);
}

int weights_add_shards(struct weights *w, struct err *err)
{
    uint64_t total = 0;
    int rc = 0;
    for (uint32_t i = 0; i < w->shard_count; i++)
        total += safetensors_count(w->shards[i]);
    if (total > 1u << 20)
        return err_set(err, -EBADMSG, "%.200s: tensors: found %" PRIu64 ", expected at most %u", w->paths[0],
                       total, 1u << 20);
    make_room(w, (uint32_t)total);
    for (uint32_t i = 0; i < w->shard_count && !rc; i++)
        rc = add_shard(w, i, err);
    return rc;
}

void weights_free(struct weights *weights)
{
    for (uint32_t i = 0; i < weights->gguf_count; i++)
        gguf_free(&weights->ggufs[i]);
    for (uint32_t i = 0; i < weights->shard_count; i++) {
        safetensors_free(&weights->shards[i]);
        mem_free(&weights->paths[i]);
    }
    torch_free(&weights->torch);
    mem_free(&weights->torch_path);
    names_free(&weights->index);
    mem_free(&weights->ggufs);
    mem_free(&weights->shards);
    mem_free(&weights->paths);
    mem_free(&weights->items);
    mem_free(&weights->names);
}

const struct weight *weights_find(const struct weights *weights, const char *name)
{
    uint32_t place = names_find(&weights->index, name_of(name));
    return place == NAMES_NONE ? NULL : &weights->items[place];
}

const struct weight *weights_use(struct weights *weights, const char *name)
{
    uint32_t place = names_find(&weights->index, name_of(name));
    if (place == NAMES_NONE)
        return NULL;
    weights->items[place].used = true;
    return &weights->items[place];
}

const struct weight *weights_unused(const struct weights *weights)
{
    for (uint32_t i = 0; i < weights->count; i++)
        if (!weights->items[i].used)
            return &weights->items[i];
    return NULL;
}

uint64_t weights_bytes(const struct weights *weights)
{
    uint64_t bytes = 0; /* cannot overflow: tensors of a file do not overlap */
    for (uint32_t i = 0; i < weights->count; i++)
        bytes += weights->items[i].bytes;
    return bytes;
}

struct hash128 weights_fingerprint(const struct weights *weights, struct hash128 from)
{
    const uint64_t sample = 4096;
    struct hash128 h = from;
    for (uint32_t i = 0; i < weights->gguf_count; i++) {
        uint64_t file_bytes;
        const uint8_t *file = gguf_file(weights->ggufs[i], &file_bytes);
        h = hash_chain(h, file, gguf_head_bytes(weights->ggufs[i]));
    }
    for (uint32_t i = 0; i < weights->count; i++) {
        const struct weight *t = &weights->items[i];
        const uint8_t *data = t->data;
        if (weights->shard_count) {
            uint64_t head[] = {(uint64_t)t->type, t->dims, t->rows, t->cols, t->name.bytes};
            h = hash_chain(h, head, sizeof head);
            h = hash_chain(h, t->name.text, t->name.bytes);
        }
        if (t->bytes <= 3 * sample) {
            h = hash_chain(h, data, t->bytes);
            continue;
        }
        h = hash_chain(h, data, sample);
        h = hash_chain(h, data + t->bytes / 2, sample);
        h = hash_chain(h, data + t->bytes - sample, sample);
    }
    return h;
}
