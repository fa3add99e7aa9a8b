/* Memory files for fuzzers. One file for the whole process, which has one thread. */
#include "tests/lib/fuzzfile.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"

const char *fuzzfile_put(const uint8_t *data, size_t bytes)
{
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
    return path;
}

void fuzzfile_seed(int argc, char **argv, const char *name, const void *data, size_t bytes)
{
    int folder = 1;
    while (folder < argc && argv[folder][0] == '-')
        folder++;
    if (folder >= argc)
        return;
    char path[512];
    snprintf(path, sizeof path, "%s/%s", argv[folder], name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    CHECK(write(fd, data, bytes) == (ssize_t)bytes);
    close(fd);
}
