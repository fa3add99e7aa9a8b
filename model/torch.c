/* Opens PyTorch's files. The object owns the mapping and the archive's directory; built by one thread,
 * then read only. */
#include "model/torch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/torch_private.h"

struct torch {
    struct mapping file;
    struct torch_zip zip;
    struct torch_list tensors;
};

/* The folder in the archive that all members lie in: what stands before "/data.pkl". */
static int find_prefix(const struct torch *t, char *ret, size_t room, const struct torch_member **pickle,
                       struct err *err)
{
    static const char tail[] = "/data.pkl";
    const size_t tail_bytes = sizeof tail - 1;
    for (uint32_t i = 0; i < t->zip.count; i++) {
        struct name n = t->zip.names[i];
        if (n.bytes <= tail_bytes || n.bytes - tail_bytes >= room || memchr(n.text, 0, n.bytes) ||
            memcmp(n.text + n.bytes - tail_bytes, tail, tail_bytes))
            continue;
        snprintf(ret, room, "%.*s", (int)(n.bytes - tail_bytes), n.text);
        *pickle = &t->zip.members[i];
        return 0;
    }
    return err_set(err, -EBADMSG, "%.200s: zip: found no member NAME/data.pkl, expected a file of torch.save",
                   t->file.path);
}

/* Written since PyTorch 2.1; before, the archive says nothing and was little endian in all practice. */
static int check_order(const struct torch *t, const char *prefix, struct err *err)
{
    char name[288];
    snprintf(name, sizeof name, "%s/byteorder", prefix);
    const struct torch_member *order = torch_zip_find(&t->zip, name);
    if (!order || (order->bytes == 6 && !memcmp(order->data, "little", 6)))
        return 0;
    return err_set(err, -ENOTSUP, "%.200s: %.100s: found %.*s, expected little", t->file.path, name,
                   (int)(order->bytes < 16 ? order->bytes : 16), (const char *)order->data);
}

static int load(struct torch *t, struct err *err)
{
    char prefix[256] = "";
    const struct torch_member *pickle = NULL;
    int rc;
    if ((rc = torch_zip_open(&t->zip, &t->file, err)) < 0 ||
        (rc = find_prefix(t, prefix, sizeof prefix, &pickle, err)) < 0 ||
        (rc = check_order(t, prefix, err)) < 0)
        return rc;
    return torch_pickle_read(&t->zip, prefix, pickle, t->file.path, &t->tensors, err);
}

int torch_open(const char *path, struct torch **ret, struct err *err)
{
    struct torch *t = mem_alloc(1, sizeof *t);
    int rc = mapping_open(&t->file, path, err);
    if (rc == 0)
        rc = load(t, err);
    if (rc < 0)
        torch_free(&t);
    else
        *ret = t;
    return rc;
}

void torch_free(struct torch **torch)
{
    struct torch *t = *torch;
    if (!t)
        return;
    torch_zip_close(&t->zip);
    mem_free(&t->tensors.items);
    mapping_close(&t->file);
    mem_free(torch);
}

uint32_t torch_count(const struct torch *torch)
{
    return torch->tensors.count;
}

const struct safetensors_tensor *torch_at(const struct torch *torch, uint32_t place)
{
    return &torch->tensors.items[place];
}
