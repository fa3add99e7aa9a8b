/* Memory in use on a card as the driver's management library accounts it, which can be asked before a
 * context is there, and for one process alone. The library is optional: where it is missing, figures that
 * need it are 0. */
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <unistd.h>

#include "compute/cuda/gpu_cuda.h"

enum { PROCESSES = 256 };

struct memory { /* nvmlMemory_t */
    unsigned long long total, free, used;
};

struct process { /* nvmlProcessInfo_t of the _v3 calls */
    unsigned pid;
    unsigned long long used; /* all ones: not known */
    unsigned gpu_instance, compute_instance;
};

typedef int list_function(void *device, unsigned *count, struct process *ret);

static struct {
    void *library;
    int (*init)(void);
    int (*by_uuid)(const char *uuid, void **ret_device);
    int (*memory)(void *device, struct memory *ret);
    list_function *lists[2]; /* of processes; under MPS they are in another one. NULL: an old driver */
} nvml;

static int find(const char *uuid, void **ret_device)
{
    if (!nvml.library) {
        nvml.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!nvml.library)
            return -ENOENT;
        *(void **)&nvml.init = dlsym(nvml.library, "nvmlInit_v2");
        *(void **)&nvml.by_uuid = dlsym(nvml.library, "nvmlDeviceGetHandleByUUID");
        *(void **)&nvml.memory = dlsym(nvml.library, "nvmlDeviceGetMemoryInfo");
        *(void **)&nvml.lists[0] = dlsym(nvml.library, "nvmlDeviceGetComputeRunningProcesses_v3");
        *(void **)&nvml.lists[1] = dlsym(nvml.library, "nvmlDeviceGetMPSComputeRunningProcesses_v3");
        if (!nvml.init || !nvml.by_uuid || !nvml.memory || nvml.init() != 0)
            nvml.init = NULL;
    }
    return nvml.init && nvml.by_uuid(uuid, ret_device) == 0 ? 0 : -ENODEV;
}

int gpu_nvml_used(const char *uuid, uint64_t *ret_bytes)
{
    void *device = NULL;
    struct memory m;
    int r = find(uuid, &device);
    if (r == 0 && nvml.memory(device, &m) != 0)
        r = -ENODEV;
    if (r == 0)
        *ret_bytes = m.used;
    return r;
}

int gpu_nvml_own(const char *uuid, uint64_t *ret_bytes)
{
    static struct process all[PROCESSES];
    void *device = NULL;
    unsigned pid = (unsigned)getpid();
    int r = find(uuid, &device);
    for (int l = 0; r == 0 && l < 2; l++) {
        unsigned count = PROCESSES;
        if (!nvml.lists[l] || nvml.lists[l](device, &count, all) != 0)
            continue;
        for (unsigned i = 0; i < count && i < PROCESSES; i++)
            if (all[i].pid == pid && all[i].used != ~0ull) {
                *ret_bytes = all[i].used;
                return 0;
            }
    }
    return r < 0 ? r : -ESRCH;
}
