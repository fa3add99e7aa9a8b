/* memfds, sealed and mapped; see segment.h. No state of its own, any thread; a struct segment has one
 * owner. It must never map a file that its sender could still shorten: an access past the end would be a
 * SIGBUS. */
#include "link/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"

#define HUGE_BYTES (UINT64_C(2) << 20)

/* Address space that begins where a huge page of the file can: what its huge pages are mapped by in one
 * piece. NULL: none is left. */
static uint8_t *aligned_space(uint64_t length)
{
    uint8_t *at =
        mmap(NULL, length + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    uint64_t before = -(uintptr_t)at % HUGE_BYTES;
    if (before > 0)
        munmap(at, before);
    munmap(at + before + length, HUGE_BYTES - before);
    return at + before;
}

/* Maps `reserve` bytes, of which `bytes` lie within the file. Those behind its end cost nothing and come
 * alive as the file grows, so addresses never move. */
static int map_file(int fd, uint64_t bytes, uint64_t reserve, struct segment *ret, struct err *err)
{
    uint64_t page = 4096, length = ((reserve > bytes ? reserve : bytes) + page - 1) / page * page;
    uint8_t *space = reserve >= HUGE_BYTES && length < SIZE_MAX / 2 ? aligned_space(length) : NULL;
    void *at = length > SIZE_MAX / 2 ? MAP_FAILED
                                     : mmap(space, length, PROT_READ | PROT_WRITE,
                                            MAP_SHARED | MAP_NORESERVE | (space ? MAP_FIXED : 0), fd, 0);
    if (at == MAP_FAILED) {
        if (space)
            munmap(space, length);
        return err_set(err, -ENOMEM, "segment: no room in the address space for %llu bytes (ulimit -v)",
                       (unsigned long long)length);
    }
    if (space)
        madvise(at, length, MADV_HUGEPAGE); /* where the system gives such a file any; else nothing changes */
    *ret = (struct segment){.fd = fd, .at = at, .bytes = bytes, .reserve = reserve};
    return 0;
}

static int make_file(const char *name, uint64_t bytes, int *ret_fd, struct err *err)
{
    if (bytes == 0 || bytes > INT64_MAX)
        return err_set(err, -EINVAL, "segment %s: length: found %llu bytes, expected 1 to %lld", name,
                       (unsigned long long)bytes, (long long)INT64_MAX);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return err_set(err, -errno, "segment %s: memfd_create: %s", name, strerror(errno));
    /* SEAL_SEAL, so that nobody who gets the descriptor can forbid growth. */
    if (ftruncate(fd, (off_t)bytes) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) < 0) {
        int code = -errno;
        close(fd);
        return err_set(err, code, "segment %s: %llu bytes: %s", name, (unsigned long long)bytes,
                       strerror(-code));
    }
    *ret_fd = fd;
    return 0;
}

int segment_create_reserved(const char *name, uint64_t bytes, uint64_t reserve, struct segment *ret,
                            struct err *err)
{
    *ret = (struct segment){.fd = -1};
    int fd = -1;
    int r = make_file(name, bytes, &fd, err);
    if (r < 0)
        return r;
    r = map_file(fd, bytes, reserve, ret, err);
    if (r < 0)
        close(fd);
    return r;
}

int segment_create(const char *name, uint64_t bytes, struct segment *ret, struct err *err)
{
    return segment_create_reserved(name, bytes, 0, ret, err);
}

/* The length of a file that may be mapped without fear. */
static int check_file(int fd, uint64_t *ret_bytes, struct err *err)
{
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return err_set(err, -EPERM, "segment: seals: found %d, expected a memfd sealed against shrinking",
                       seals);
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_set(err, -errno, "segment: fstat: %s", strerror(errno));
    if (st.st_size <= 0)
        return err_set(err, -EINVAL, "segment: length: found 0 bytes, expected some");
    *ret_bytes = (uint64_t)st.st_size;
    return 0;
}

int segment_map(int fd, uint64_t bytes, struct segment *ret, struct err *err)
{
    *ret = (struct segment){.fd = -1};
    uint64_t length;
    int r = check_file(fd, &length, err);
    if (r < 0)
        return r;
    if (bytes > length)
        return err_set(err, -EINVAL, "segment: length: found %llu bytes, expected at least %llu",
                       (unsigned long long)length, (unsigned long long)bytes);
    return map_file(fd, bytes ? bytes : length, 0, ret, err);
}

int segment_map_reserved(int fd, uint64_t reserve, struct segment *ret, struct err *err)
{
    *ret = (struct segment){.fd = -1};
    uint64_t length;
    int r = check_file(fd, &length, err);
    if (r < 0)
        return r;
    return map_file(fd, length, reserve, ret, err);
}

int segment_grow(struct segment *segment, uint64_t bytes, struct err *err)
{
    CHECK(segment->at != NULL);
    if (bytes < segment->bytes || bytes > INT64_MAX)
        return err_set(err, -EINVAL, "segment: growth: found %llu bytes, expected at least %llu",
                       (unsigned long long)bytes, (unsigned long long)segment->bytes);
    if (segment->reserve && bytes > segment->reserve)
        return err_set(err, -ENOSPC, "segment: growth: found %llu bytes, expected at most the %llu reserved",
                       (unsigned long long)bytes, (unsigned long long)segment->reserve);
    struct stat st; /* a segment mapped in part may belong to a longer file */
    if (fstat(segment->fd, &st) < 0 ||
        ((uint64_t)st.st_size < bytes && ftruncate(segment->fd, (off_t)bytes) < 0))
        return err_set(err, -errno, "segment: growth to %llu bytes: %s", (unsigned long long)bytes,
                       strerror(errno));
    if (!segment->reserve) {
        void *at = mremap(segment->at, segment->bytes, bytes, MREMAP_MAYMOVE);
        if (at == MAP_FAILED)
            return err_set(err, -ENOMEM, "segment: no room in the address space for %llu bytes (ulimit -v)",
                           (unsigned long long)bytes);
        segment->at = at;
    }
    segment->bytes = bytes;
    return 0;
}

void segment_close(struct segment *segment)
{
    if (segment->at) {
        munmap(segment->at, segment->reserve > segment->bytes ? segment->reserve : segment->bytes);
        close(segment->fd);
    }
    *segment = (struct segment){.fd = -1};
}
