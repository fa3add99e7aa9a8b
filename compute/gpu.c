/* Finds and loads the library behind compute/gpu.h. State: the table of this process, set once. */
#include "compute/gpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/program.h"

#define LIBRARY "libspecontext-cuda.so"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const struct gpu_api *loaded;

int gpu_named(const char *device)
{
    if (!device)
        return 0;
    if (!strncmp(device, "GPU-", 4))
        return device[4] != 0;
    if (strncmp(device, "cuda", 4) != 0)
        return 0;
    const char *at = device + 4;
    size_t digits = *at == ':' ? strspn(at + 1, "0123456789") : 0;
    return !*at || (digits > 0 && digits <= 4 && !at[1 + digits]);
}

static int library_path(char ret[PATH_MAX], struct err *err)
{
    const char *named = getenv("SPECONTEXT_GPU_LIBRARY");
    if (named && named[0]) {
        if (snprintf(ret, PATH_MAX, "%s", named) >= PATH_MAX)
            return err_set(err, -ENAMETOOLONG, "SPECONTEXT_GPU_LIBRARY: name too long");
        return 0;
    }
    char folder[PATH_MAX];
    int r = program_folder(folder, err);
    if (r == 0 && snprintf(ret, PATH_MAX, "%s/" LIBRARY, folder) >= PATH_MAX)
        r = err_set(err, -ENAMETOOLONG, "%s: name too long", folder);
    return r;
}

static int load(struct err *err)
{
    char path[PATH_MAX];
    int r = library_path(path, err);
    if (r < 0)
        return r;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never closed: the table points into it */
    if (!library)
        return err_set(err, -ENOENT, "GPU library: %s (made by `make cuda`)", dlerror());
    const struct gpu_api *(*get)(void) = NULL;
    void *symbol = dlsym(library, GPU_API_SYMBOL);
    memcpy(&get, &symbol, sizeof get);
    const struct gpu_api *api = get ? get() : NULL;
    if (!api || api->version != GPU_API_VERSION)
        return err_set(err, -EPROTO, "%s: found version %u of the GPU interface, expected %u", path,
                       api ? api->version : 0, GPU_API_VERSION);
    loaded = api;
    return 0;
}

int gpu_load(const struct gpu_api **ret_api, struct err *err)
{
    pthread_mutex_lock(&mutex);
    int r = loaded ? 0 : load(err);
    *ret_api = loaded;
    pthread_mutex_unlock(&mutex);
    return r;
}
