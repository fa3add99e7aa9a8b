/* Memory of the double: memfds, their handles, and the ranges that a kernel could reach. A card's memory is
 * counted over processes by the names of the memfds that they hold, so that a dead process holds none. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/parse.h"
#include "tests/fakegpu/fakegpu.h"

#define HANDLE_MAGIC UINT64_C(0x555047454b414631)
#define MEMORY_NAME  "fakegpu.%s.%d.%llu"
enum { POISON_BYTES = 1 << 20, PAGE = 4096 };

struct handle {
    uint64_t magic, bytes;
    int32_t pid, fd, card, pad;
};
_Static_assert(sizeof(struct handle) <= GPU_IPC_BYTES, "handle");

static const char *card_name(void)
{
    const char *name = getenv("SPECONTEXT_FAKEGPU_CARD");
    return name && name[0] ? name : NULL;
}

int fakegpu_note(struct gpu *gpu, const struct fakegpu_range *range)
{
    pthread_mutex_lock(&gpu->mutex);
    if (gpu->range_count == gpu->range_capacity) {
        gpu->range_capacity = gpu->range_capacity ? 2 * gpu->range_capacity : 64;
        gpu->ranges = mem_resize(gpu->ranges, gpu->range_capacity, sizeof *gpu->ranges);
    }
    gpu->ranges[gpu->range_count++] = *range;
    pthread_mutex_unlock(&gpu->mutex);
    return 0;
}

/* Takes the range that begins at `at` out of the list. */
static bool forget(struct gpu *gpu, const void *at, enum fakegpu_kind kind, struct fakegpu_range *ret)
{
    bool found = false;
    pthread_mutex_lock(&gpu->mutex);
    for (size_t i = 0; i < gpu->range_count && !found; i++)
        if (gpu->ranges[i].at == at && gpu->ranges[i].kind == kind) {
            *ret = gpu->ranges[i];
            gpu->ranges[i] = gpu->ranges[--gpu->range_count];
            found = true;
        }
    if (found && kind == FAKEGPU_DEVICE)
        gpu->bytes -= ret->bytes;
    pthread_mutex_unlock(&gpu->mutex);
    if (!found)
        fakegpu_break(gpu, "free: %p is no memory of this kind", at);
    return found;
}

bool fakegpu_reaches(struct gpu *gpu, const void *at)
{
    bool found = false;
    pthread_mutex_lock(&gpu->mutex);
    for (size_t i = 0; i < gpu->range_count && !found; i++)
        found = (const uint8_t *)at >= gpu->ranges[i].at &&
                (const uint8_t *)at < gpu->ranges[i].at + gpu->ranges[i].bytes;
    pthread_mutex_unlock(&gpu->mutex);
    return found;
}

/* Bytes that one process holds of a card, by the names of its descriptors. */
static uint64_t held_by(const char *pid, const char *card, int number)
{
    char path[300], target[300], name[64];
    uint64_t held = 0;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *dir = opendir(path);
    struct dirent *e;
    while (dir && (e = readdir(dir))) {
        unsigned long long bytes;
        int of;
        ssize_t n = readlinkat(dirfd(dir), e->d_name, target, sizeof target - 1);
        if (n <= 0)
            continue;
        target[n] = 0;
        if (sscanf(target, "/memfd:fakegpu.%63[^.].%d.%llu", name, &of, &bytes) == 3 && of == number &&
            !strcmp(name, card))
            held += bytes;
    }
    if (dir)
        closedir(dir);
    return held;
}

uint64_t fakegpu_used(struct gpu *gpu)
{
    const char *card = card_name();
    if (!card)
        return gpu->bytes + gpu->context_bytes;
    uint64_t used = 0;
    DIR *proc = opendir("/proc");
    struct dirent *e;
    while (proc && (e = readdir(proc)))
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9')
            used += held_by(e->d_name, card, gpu->card);
    if (proc)
        closedir(proc);
    return used;
}

int fakegpu_take(struct gpu *gpu, uint64_t bytes, int *ret_fd, struct err *err)
{
    char name[128];
    uint64_t used = fakegpu_used(gpu), total = gpu->info.bytes_total;
    if (bytes > total || used > total - bytes)
        return err_set(err, -ENOMEM, "cuda:%d: %llu bytes wanted, %llu of %llu are free", gpu->info.ordinal,
                       (unsigned long long)bytes, (unsigned long long)(total > used ? total - used : 0),
                       (unsigned long long)total);
    snprintf(name, sizeof name, MEMORY_NAME, card_name() ? card_name() : "own", gpu->card,
             (unsigned long long)bytes);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        int r = -errno;
        if (fd >= 0)
            close(fd);
        return err_set(err, r, "memfd of %llu bytes: %s", (unsigned long long)bytes, strerror(-r));
    }
    *ret_fd = fd;
    return 0;
}

int fakegpu_alloc(struct gpu *gpu, uint64_t bytes, void **ret_at, struct err *err)
{
    struct fakegpu_range range = {.kind = FAKEGPU_DEVICE, .bytes = (bytes + !bytes + PAGE - 1) / PAGE * PAGE};
    int r = fakegpu_take(gpu, range.bytes, &range.fd, err);
    if (r < 0)
        return r;
    range.at = mmap(NULL, range.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, range.fd, 0);
    if (range.at == MAP_FAILED) {
        close(range.fd);
        return err_set(err, -ENOMEM, "mmap of %llu bytes: %s", (unsigned long long)range.bytes,
                       strerror(errno));
    }
    memset(range.at, 0xff, range.bytes < POISON_BYTES ? range.bytes : POISON_BYTES);
    pthread_mutex_lock(&gpu->mutex);
    gpu->bytes += range.bytes;
    pthread_mutex_unlock(&gpu->mutex);
    *ret_at = range.at;
    return fakegpu_note(gpu, &range);
}

void fakegpu_free(struct gpu *gpu, void *at)
{
    struct fakegpu_range range;
    if (!at || !forget(gpu, at, FAKEGPU_DEVICE, &range))
        return;
    munmap(range.at, range.bytes);
    close(range.fd);
}

int fakegpu_alloc_host(struct gpu *gpu, uint64_t bytes, void **ret_host, void **ret_device, struct err *err)
{
    struct fakegpu_range range = {
        .kind = FAKEGPU_PINNED, .fd = -1, .bytes = (bytes + !bytes + PAGE - 1) / PAGE * PAGE};
    range.at = mmap(NULL, range.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range.at == MAP_FAILED)
        return err_set(err, -ENOMEM, "pinned memory: %llu bytes: %s", (unsigned long long)bytes,
                       strerror(errno));
    *ret_host = range.at;
    if (ret_device)
        *ret_device = range.at;
    return fakegpu_note(gpu, &range);
}

void fakegpu_free_host(struct gpu *gpu, void *host)
{
    struct fakegpu_range range;
    if (host && forget(gpu, host, FAKEGPU_PINNED, &range))
        munmap(range.at, range.bytes);
}

int fakegpu_host_register(struct gpu *gpu, void *at, uint64_t bytes, void **ret_device, struct err *err)
{
    struct fakegpu_range range = {.kind = FAKEGPU_REGISTERED, .fd = -1, .at = at, .bytes = bytes};
    if (!bytes || (uintptr_t)at % PAGE || bytes % PAGE)
        return err_set(err, -EINVAL, "host_register: %p, %llu bytes: not whole pages", at,
                       (unsigned long long)bytes);
    if (fakegpu_reaches(gpu, at) || fakegpu_reaches(gpu, (uint8_t *)at + bytes - 1))
        return err_set(err, -EEXIST, "host_register: %p is registered already", at);
    if (ret_device)
        *ret_device = at;
    return fakegpu_note(gpu, &range);
}

void fakegpu_host_unregister(struct gpu *gpu, void *at)
{
    struct fakegpu_range range;
    if (at)
        forget(gpu, at, FAKEGPU_REGISTERED, &range);
}

int fakegpu_ipc_export(struct gpu *gpu, void *at, uint8_t *handle, struct err *err)
{
    struct handle h = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = -1, .card = gpu->card};
    pthread_mutex_lock(&gpu->mutex);
    for (size_t i = 0; i < gpu->range_count; i++)
        if (gpu->ranges[i].at == at && gpu->ranges[i].kind == FAKEGPU_DEVICE) {
            h.fd = gpu->ranges[i].fd;
            h.bytes = gpu->ranges[i].bytes;
        }
    pthread_mutex_unlock(&gpu->mutex);
    if (h.fd < 0)
        return err_set(err, -EINVAL, "ipc_export: %p is no memory of this device", at);
    memset(handle, 0, GPU_IPC_BYTES);
    memcpy(handle, &h, sizeof h);
    return 0;
}

/* On a GPU a process cannot open its own handle; here it may, so that both ends fit into one test. */
int fakegpu_ipc_open(struct gpu *gpu, const uint8_t *handle, void **ret_at, struct err *err)
{
    struct handle h;
    struct stat st;
    char path[64];
    memcpy(&h, handle, sizeof h);
    if (h.magic != HANDLE_MAGIC)
        return err_set(err, -EINVAL, "ipc_open: no handle of device memory");
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0 || (uint64_t)st.st_size != h.bytes) {
        int r = fd < 0 ? -errno : -ESTALE;
        if (fd >= 0)
            close(fd);
        return err_set(err, r, "ipc_open: %s: %s", path, strerror(-r));
    }
    struct fakegpu_range range = {.kind = FAKEGPU_IMPORTED, .fd = -1, .bytes = h.bytes};
    range.at = mmap(NULL, h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (range.at == MAP_FAILED)
        return err_set(err, -ENOMEM, "ipc_open: %llu bytes: %s", (unsigned long long)h.bytes,
                       strerror(errno));
    *ret_at = range.at;
    return fakegpu_note(gpu, &range);
}

void fakegpu_ipc_close(struct gpu *gpu, void *at)
{
    struct fakegpu_range range;
    if (at && forget(gpu, at, FAKEGPU_IMPORTED, &range))
        munmap(range.at, range.bytes);
}
