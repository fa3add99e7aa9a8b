/* See outfile.h. No state. Any thread. */
#include "base/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"

static int write_all(int fd, const char *text, size_t bytes)
{
    while (bytes) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        text += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* A device, a pipe, a socket: not to be replaced by a file. */
static bool is_special(const char *path)
{
    struct stat st;
    return !stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

static char *temporary_name(const char *path)
{
    size_t room = strlen(path) + 16;
    char *name = mem_alloc(room, 1);
    snprintf(name, room, "%s.%d", path, (int)getpid());
    return name;
}

int outfile_try(const char *path)
{
    struct stat st;
    if (is_special(path))
        return access(path, W_OK) ? -errno : 0;
    if (!stat(path, &st) && S_ISDIR(st.st_mode))
        return -EISDIR;
    char *temporary = temporary_name(path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int r = fd < 0 ? -errno : 0;
    if (fd >= 0) {
        close(fd);
        unlink(temporary);
    }
    mem_free(&temporary);
    return r;
}

int outfile_write(const char *path, const void *data, size_t bytes)
{
    bool special = is_special(path);
    char *temporary = temporary_name(path);
    const char *to = special ? path : temporary;
    int flags = special ? O_NONBLOCK : O_CREAT | O_TRUNC; /* nobody may be at a pipe's other end */
    int r = 0, fd = open(to, O_WRONLY | O_CLOEXEC | flags, 0666);
    if (fd < 0) {
        r = -errno;
    } else {
        r = write_all(fd, data, bytes);
        if (close(fd) && !r)
            r = -errno;
        if (!r && !special && rename(temporary, path))
            r = -errno;
        if (r && !special)
            unlink(temporary);
    }
    mem_free(&temporary);
    return r;
}
