/* Maps model files. The mapping belongs to whoever opened it; nothing ever writes to it. No other state, any
 * thread. */
#include "model/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"

static const char lfs_head[] = "version https://git-lfs.github.com/spec/";

static int map(struct mapping *mapping, int fd, const char *path, struct err *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_set(err, -errno, "%s: stat: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(err, -EINVAL, "%s: file type: found %s, expected a regular file", path,
                       S_ISDIR(st.st_mode) ? "a directory" : "a special file");
    void *data = NULL;
    if (st.st_size > 0) {
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED)
            return err_set(err, -errno, "%s: mmap of %lld bytes: %s", path, (long long)st.st_size,
                           strerror(errno));
    }
    mapping->data = data;
    mapping->bytes = (uint64_t)st.st_size;
    return 0;
}

int mapping_open(struct mapping *mapping, const char *path, struct err *err)
{
    memset(mapping, 0, sizeof *mapping);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* NONBLOCK: a FIFO must not hold us up */
    if (fd < 0)
        return err_set(err, -errno, "%s: open: %s", path, strerror(errno));
    int rc = map(mapping, fd, path, err);
    close(fd);
    if (rc < 0)
        return rc;
    mapping->path = mem_strdup(path);
    if (mapping->bytes >= sizeof lfs_head - 1 && !memcmp(mapping->data, lfs_head, sizeof lfs_head - 1)) {
        mapping_close(mapping);
        return err_set(err, -EBADMSG,
                       "%s: content: found a Git-LFS pointer, expected the file itself "
                       "(fetch it with `git lfs pull`)",
                       path);
    }
    return 0;
}

void mapping_close(struct mapping *mapping)
{
    if (mapping->data)
        munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    mapping->data = NULL;
    mapping->bytes = 0;
    mem_free(&mapping->path);
}
