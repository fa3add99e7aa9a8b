/* See trace.h. State: the mapped file, for the life of the process. The file: "SPTRACE1", the number of
 * stamps taken (u64, counts on past the last place), then stamps. All of it has its room on the disk from the
 * beginning: a stamp into a hole of a full disk would end the process (SIGBUS). */
#include "base/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"

enum { STAMPS = 1 << 20, SPAN_LEAST_NS = 10 * 1000 };

struct stamp {
    int64_t ns;
    uint32_t step, event;
};

struct file {
    char magic[8];
    atomic_uint_fast64_t count;
    struct stamp stamp[STAMPS];
};

_Static_assert(sizeof(struct file) == 16 + 16ull * STAMPS, "no padding: the file is read elsewhere");

bool trace_is_on;
_Thread_local uint32_t trace_step;
static struct file *file;

void trace_open(const char *part)
{
    const char *folder = getenv("SPECONTEXT_TRACE");
    char path[4096];
    if (!folder || !folder[0] || file)
        return;
    snprintf(path, sizeof path, "%s/%s-%d.trace", folder, part, (int)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int code = fd < 0 ? errno : posix_fallocate(fd, 0, sizeof *file);
    if (!code) {
        void *at = mmap(NULL, sizeof *file, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        code = at == MAP_FAILED ? errno : 0;
        file = code ? NULL : at;
    }
    if (code)
        log_error("%s: no trace: %s", path, strerror(code)); /* bench shows errors alone */
    if (fd >= 0)
        close(fd);
    if (fd >= 0 && code)
        unlink(path);
    if (code)
        return;
    memcpy(file->magic, "SPTRACE1", sizeof file->magic);
    trace_is_on = true;
}

static void put(struct stamp stamp)
{
    uint64_t at = atomic_fetch_add_explicit(&file->count, 1, memory_order_relaxed);
    if (at < STAMPS)
        file->stamp[at] = stamp;
}

void trace_stamp(enum trace_event event, uint32_t step)
{
    put((struct stamp){clock_now_ns(), step, event});
}

void trace_stamp_span(enum trace_span span, int64_t begin_ns)
{
    int64_t ns = clock_now_ns() - begin_ns;
    if (ns >= SPAN_LEAST_NS)
        put((struct stamp){begin_ns, ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX, span});
}
