/* Writes safetensors. Holds nothing between calls; the caller owns the data, which is read once, in order. A
 * file is seen by others either whole under its name or not at all. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yajl/yajl_gen.h>

#include "base/alloc.h"
#include "model/safetensors_private.h"

#define WRITE_MAX (UINT64_C(1) << 30) /* bytes of one write(2) */

static int by_size(const void *a, const void *b)
{
    const struct safetensors_entry *x = *(const struct safetensors_entry *const *)a;
    const struct safetensors_entry *y = *(const struct safetensors_entry *const *)b;
    unsigned p = safetensors_type_bytes(x->type), q = safetensors_type_bytes(y->type);
    return p != q ? (p > q ? -1 : 1) : strcmp(x->name, y->name);
}

static int put_text(yajl_gen gen, const char *text)
{
    return yajl_gen_string(gen, (const unsigned char *)text, strlen(text)) != yajl_gen_status_ok;
}

static int put_number(yajl_gen gen, uint64_t value)
{
    char text[24];
    int bytes = snprintf(text, sizeof text, "%" PRIu64, value);
    return yajl_gen_number(gen, text, (size_t)bytes) != yajl_gen_status_ok;
}

static int put_metadata(yajl_gen gen, const struct safetensors_content *content)
{
    if (!content->metadata_count)
        return 0;
    int bad = put_text(gen, "__metadata__");
    yajl_gen_map_open(gen);
    for (uint32_t i = 0; i < content->metadata_count; i++)
        bad |= put_text(gen, content->metadata[i].key) | put_text(gen, content->metadata[i].value);
    yajl_gen_map_close(gen);
    return bad;
}

static int put_tensor(yajl_gen gen, const struct safetensors_entry *t, uint64_t begin, uint64_t end)
{
    int bad = put_text(gen, t->name);
    yajl_gen_map_open(gen);
    bad |= put_text(gen, "dtype") | put_text(gen, safetensors_type_name(t->type)) | put_text(gen, "shape");
    yajl_gen_array_open(gen);
    for (uint32_t d = 0; d < t->dims; d++)
        bad |= put_number(gen, t->shape[d]);
    yajl_gen_array_close(gen);
    bad |= put_text(gen, "data_offsets");
    yajl_gen_array_open(gen);
    bad |= put_number(gen, begin) | put_number(gen, end);
    yajl_gen_array_close(gen);
    yajl_gen_map_close(gen);
    return bad;
}

static int check_entries(const struct safetensors_entry **order, uint32_t count, const char *path,
                         struct err *err)
{
    struct name *items = mem_alloc(count, sizeof *items);
    struct names seen;
    names_init(&seen, items, count);
    int rc = 0;
    for (uint32_t i = 0; i < count && !rc; i++) {
        const struct safetensors_entry *t = order[i];
        uint64_t bytes;
        items[i] = name_of(t->name);
        if (items[i].bytes == 0 || name_is(items[i], "__metadata__") || !names_add(&seen, i))
            rc = err_set(err, -EINVAL, "%s: tensor name \"%.80s\": found it empty, reserved or twice", path,
                         t->name);
        else if (t->dims > SAFETENSORS_DIMS_MAX || safetensors_size(t->type, t->shape, t->dims, &bytes) < 0)
            rc = err_set(err, -EINVAL, "%s: tensor %.80s: found a shape too large", path, t->name);
    }
    names_free(&seen);
    mem_free(&items);
    return rc;
}

static int check_pairs(const struct safetensors_content *content, const char *path, struct err *err)
{
    struct name *items = mem_alloc(content->metadata_count, sizeof *items);
    struct names seen;
    names_init(&seen, items, content->metadata_count);
    int rc = 0;
    for (uint32_t i = 0; i < content->metadata_count && !rc; i++) {
        items[i] = name_of(content->metadata[i].key);
        if (!names_add(&seen, i))
            rc = err_set(err, -EINVAL, "%s: __metadata__ %.80s: found it twice, expected once", path,
                         items[i].text);
    }
    names_free(&seen);
    mem_free(&items);
    return rc;
}

static int write_all(int fd, const void *data, uint64_t bytes)
{
    const uint8_t *p = data;
    while (bytes) {
        ssize_t done = write(fd, p, bytes < WRITE_MAX ? bytes : WRITE_MAX);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -errno;
        p += done;
        bytes -= (uint64_t)done;
    }
    return 0;
}

/* Length, header padded with spaces to a multiple of 8, data in the same order. */
static int write_content(int fd, yajl_gen gen, const struct safetensors_entry **order, uint32_t count)
{
    const unsigned char *json;
    size_t json_bytes;
    if (yajl_gen_get_buf(gen, &json, &json_bytes) != yajl_gen_status_ok)
        return -EINVAL;
    uint64_t padded = (json_bytes + 7) & ~UINT64_C(7), bytes = 0;
    if (padded > SAFETENSORS_HEADER_MAX)
        return -EFBIG;
    int rc = write_all(fd, &padded, sizeof padded);
    if (!rc)
        rc = write_all(fd, json, json_bytes);
    if (!rc)
        rc = write_all(fd, "       ", padded - json_bytes);
    for (uint32_t i = 0; i < count && !rc; i++) {
        safetensors_size(order[i]->type, order[i]->shape, order[i]->dims, &bytes);
        rc = write_all(fd, order[i]->data, bytes);
    }
    return rc;
}

static int sync_folder(const char *path)
{
    char *folder = mem_strdup(path), *slash = strrchr(folder, '/');
    if (slash)
        slash[slash == folder] = '\0'; /* "/name" lies in "/" */
    int rc = 0, fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        rc = -errno;
    if (fd >= 0)
        close(fd);
    mem_free(&folder);
    return rc;
}

static int write_file(const char *path, yajl_gen gen, const struct safetensors_entry **order, uint32_t count)
{
    struct stat st; /* renaming would put a file in the place of a device or a FIFO */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
    size_t room = strlen(path) + 32;
    char *temporary = mem_alloc(room, 1);
    snprintf(temporary, room, "%s.%ld.tmp", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    int rc = fd < 0 ? -errno : write_content(fd, gen, order, count);
    if (!rc && fsync(fd) < 0)
        rc = -errno;
    if (fd >= 0 && close(fd) < 0 && !rc)
        rc = -errno;
    if (!rc && rename(temporary, path) < 0)
        rc = -errno;
    if (rc < 0 && fd >= 0)
        unlink(temporary);
    mem_free(&temporary);
    return rc < 0 ? rc : sync_folder(path);
}

static int write_checked(const char *path, const struct safetensors_content *content,
                         const struct safetensors_entry **order, struct err *err)
{
    yajl_gen gen = yajl_gen_alloc(NULL);
    if (!gen)
        return err_set(err, -ENOMEM, "%s: no memory for the header", path);
    yajl_gen_config(gen, yajl_gen_validate_utf8, 1);
    yajl_gen_map_open(gen);
    int bad = put_metadata(gen, content), rc = 0;
    uint64_t at = 0, bytes = 0, end;
    for (uint32_t i = 0; i < content->tensor_count; i++) {
        safetensors_size(order[i]->type, order[i]->shape, order[i]->dims, &bytes);
        if (__builtin_add_overflow(at, bytes, &end))
            rc = -EFBIG;
        bad |= put_tensor(gen, order[i], at, end);
        at = end;
    }
    yajl_gen_map_close(gen);
    if (bad)
        rc = err_set(err, -EINVAL, "%s: header: found a name or value that is not UTF-8", path);
    else if (rc || (rc = write_file(path, gen, order, content->tensor_count)) < 0)
        err_set(err, rc, "%s: write: %s", path, strerror(-rc));
    yajl_gen_free(gen);
    return rc;
}

int safetensors_write(const char *path, const struct safetensors_content *content, struct err *err)
{
    const struct safetensors_entry **order = mem_alloc(content->tensor_count, sizeof *order);
    for (uint32_t i = 0; i < content->tensor_count; i++)
        order[i] = &content->tensors[i];
    int rc = check_entries(order, content->tensor_count, path, err);
    if (!rc)
        rc = check_pairs(content, path, err);
    if (!rc) {
        qsort(order, content->tensor_count, sizeof *order, by_size);
        rc = write_checked(path, content, order, err);
    }
    mem_free(&order);
    return rc;
}
