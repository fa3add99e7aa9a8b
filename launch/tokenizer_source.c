/* Opens tokenizers and reads texts for the commands around them. State belongs to the caller. */
#include "launch/tokenizer_source.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/mapping.h"
#include "model/vocab_folder.h"

static int open_json(struct tokenizer_source *s, const char *path, struct err *err)
{
    struct mapping m;
    int rc = mapping_open(&m, path, err);
    if (!rc)
        rc = vocab_from_json((struct name){m.data ? (const char *)m.data : "", m.bytes}, path, 0, &s->vocab,
                             err);
    mapping_close(&m);
    return rc ? rc : tokenizer_create_from(s->vocab, &s->tokenizer, err);
}

int tokenizer_source_open(struct tokenizer_source *source, const char *path, struct err *err)
{
    size_t bytes = strlen(path);
    memset(source, 0, sizeof *source);
    if (bytes > 5 && !strcmp(path + bytes - 5, ".json"))
        return open_json(source, path, err);
    int rc = model_open(path, &source->model, err);
    return rc ? rc : tokenizer_create(source->model, &source->tokenizer, err);
}

void tokenizer_source_close(struct tokenizer_source *source)
{
    tokenizer_free(&source->tokenizer);
    vocab_free(&source->vocab);
    model_free(&source->model);
}

static int read_all(FILE *file, const char *name, size_t most, char **ret, size_t *ret_bytes, struct err *err)
{
    size_t bytes = 0, room = 1 << 16;
    char *text = mem_alloc(room, 1);
    int rc = 0;
    while (!rc && !feof(file)) {
        if (bytes == room)
            text = mem_resize(text, room *= 2, 1);
        bytes += fread(text + bytes, 1, room - bytes, file);
        if (ferror(file))
            rc = err_set(err, -errno, "%s: read: %s", name, strerror(errno));
        else if (bytes > most)
            rc = err_set(err, -E2BIG, "%s: found more than %zu bytes, expected less", name, most);
    }
    if (rc < 0)
        mem_free(&text);
    *ret = text;
    *ret_bytes = bytes;
    return rc;
}

int tokenizer_source_text(const char *path, size_t most, char **ret, size_t *ret_bytes, struct err *err)
{
    *ret = NULL;
    if (!strcmp(path, "-"))
        return read_all(stdin, "standard input", most, ret, ret_bytes, err);
    FILE *file = fopen(path, "re");
    if (!file)
        return err_set(err, -errno, "%s: open: %s", path, strerror(errno));
    int rc = read_all(file, path, most, ret, ret_bytes, err);
    fclose(file);
    return rc;
}
