/* Finds the safetensors files of a Hugging Face folder. Index and shards must agree both ways: a shard that
 * was not fetched, or that belongs to another release, would otherwise show as noise. One thread. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/json_file.h"
#include "model/weights.h"
#include "model/weights_private.h"

#define INDEX_FILE  "model.safetensors.index.json"
#define SINGLE_FILE "model.safetensors"

static int open_shard(struct weights *w, const char *folder, const char *file, struct err *err)
{
    size_t room = strlen(folder) + strlen(file) + 2;
    uint32_t at = w->shard_count;
    char *path = mem_alloc(room, 1);
    snprintf(path, room, "%s/%s", folder, file);
    struct safetensors *s = NULL;
    int rc = safetensors_open(path, &s, err);
    if (rc < 0) {
        mem_free(&path);
        return rc;
    }
    w->shards = mem_resize(w->shards, (size_t)at + 1, sizeof *w->shards);
    w->paths = mem_resize(w->paths, (size_t)at + 1, sizeof *w->paths);
    w->shards[at] = s;
    w->paths[at] = path;
    w->shard_count++;
    return 0;
}

/* A name that stays in the folder. */
static bool plain_name(const char *file)
{
    return *file && *file != '.' && !strchr(file, '/') && strlen(file) < 256;
}

/* The place of a shard by its file name, or shard_count. */
static uint32_t find_shard(const struct weights *w, const char *file)
{
    uint32_t i = 0;
    while (i < w->shard_count && strcmp(strrchr(w->paths[i], '/') + 1, file))
        i++;
    return i;
}

static int open_all(struct weights *w, const struct json_doc *index, json_t *map, const char *folder,
                    struct err *err)
{
    const char *tensor;
    json_t *value;
    uint32_t last = 0; /* neighbours in the map mostly share a shard */
    json_object_foreach(map, tensor, value)
    {
        const char *file = json_string_value(value);
        if (!file || !plain_name(file))
            return err_set(err, -EBADMSG, "%.200s: weight_map: %.80s: found %.80s, expected a file name",
                           index->path, tensor, file ? file : json_kind(value));
        if (last < w->shard_count && !strcmp(strrchr(w->paths[last], '/') + 1, file))
            continue;
        last = find_shard(w, file);
        if (last < w->shard_count)
            continue;
        if (w->shard_count == WEIGHTS_FILES_MAX)
            return err_set(err, -EBADMSG, "%.200s: weight_map: found more than %d files, expected fewer",
                           index->path, WEIGHTS_FILES_MAX);
        int rc = open_shard(w, folder, file, err);
        if (rc == -ENOENT)
            return err_set(err, -EBADMSG, "%.200s: weight_map: found shard %.80s, expected it in the folder",
                           index->path, file);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_map(const struct weights *w, const struct json_doc *index, json_t *map, struct err *err)
{
    const char *tensor;
    json_t *value;
    json_object_foreach(map, tensor, value)
    {
        const struct weight *t = weights_find(w, tensor);
        const char *file = json_string_value(value);
        if (!t || strcmp(strrchr(t->path, '/') + 1, file))
            return err_set(err, -EBADMSG, "%.200s: weight_map: %.80s: found shard %.80s, expected %.80s",
                           index->path, tensor, file, t ? strrchr(t->path, '/') + 1 : "one that holds it");
    }
    for (uint32_t i = 0; i < w->count; i++) {
        struct name n = w->items[i].name;
        if (!json_object_getn(map, n.text, n.bytes))
            return err_set(err, -EBADMSG, "%.200s: tensor %.*s: found it in the shard, expected it in %s too",
                           w->items[i].path, (int)(n.bytes < 80 ? n.bytes : 80), n.text, INDEX_FILE);
    }
    return 0;
}

static int open_index(struct weights *w, const char *folder, struct err *err)
{
    struct json_doc index;
    int rc = json_doc_open(&index, folder, INDEX_FILE, err);
    if (!rc) {
        json_t *map = json_object_get(index.root, "weight_map");
        if (!json_is_object(map) || json_object_size(map) == 0)
            rc = err_set(err, -EBADMSG, "%.200s: weight_map: found %s, expected an object with tensors",
                         index.path, json_is_object(map) ? "an empty one" : json_kind(map));
        if (!rc)
            rc = open_all(w, &index, map, folder, err);
        if (!rc)
            rc = weights_add_shards(w, err);
        if (!rc)
            rc = check_map(w, &index, map, err);
    }
    json_doc_free(&index);
    return rc;
}

int weights_open_folder(struct weights *weights, const char *folder, struct err *err)
{
    int rc = open_shard(weights, folder, SINGLE_FILE, err);
    if (!rc)
        return weights_add_shards(weights, err);
    if (rc != -ENOENT)
        return rc;
    rc = open_index(weights, folder, err);
    if (rc == -ENOENT)
        err_set(err, rc, "%.200s: found neither %s nor %s, expected one of them", folder, SINGLE_FILE,
                INDEX_FILE);
    return rc;
}
