/* Memory in use on a card as the driver's management library accounts it, which can be asked before a
 * context is there. The library is optional: where it is missing, figures that need it are 0. */
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

#include "compute/cuda/gpu_cuda.h"

struct memory { /* nvmlMemory_t */
    unsigned long long total, free, used;
};

int gpu_nvml_used(const char *uuid, uint64_t *ret_bytes)
{
    static void *library;
    static int (*init)(void), (*by_uuid)(const char *, void **), (*memory)(void *, struct memory *);
    if (!library) {
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library)
            return -ENOENT;
        *(void **)&init = dlsym(library, "nvmlInit_v2");
        *(void **)&by_uuid = dlsym(library, "nvmlDeviceGetHandleByUUID");
        *(void **)&memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
        if (!init || !by_uuid || !memory || init() != 0)
            init = NULL;
    }
    void *device = NULL;
    struct memory m;
    if (!init || by_uuid(uuid, &device) || memory(device, &m))
        return -ENODEV;
    *ret_bytes = m.used;
    return 0;
}
