/* Finds the head that comes with the program for a model, or finds or makes the cached one. No state besides
 * the files; main's thread, before any daemon is started. It must never change a file outside the cache. */
#include "launch/head_cache.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/program.h"
#include "launch/head.h"
#include "model/head.h"

#define GROUPS 1 /* one selection for all layers */
#define LAYER  0 /* see launch/head.h */

static int make_dir(const char *path, struct err *err)
{
    if (mkdir(path, 0700) && errno != EEXIST)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    return 0;
}

/* Makes every folder of `path` after its first `from` bytes. */
static int make_dirs(char *path, size_t from, struct err *err)
{
    for (char *p = path + from; *p; p++) {
        if (*p != '/' || p == path)
            continue;
        *p = 0;
        int r = make_dir(path, err);
        *p = '/';
        if (r)
            return r;
    }
    return make_dir(path, err);
}

static int cache_dir(char ret[PATH_MAX], struct err *err)
{
    const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;
    if (base && base[0] == '/')
        n = snprintf(ret, PATH_MAX, "%s/specontext/heads", base);
    else if (home && home[0] == '/')
        n = snprintf(ret, PATH_MAX, "%s/.cache/specontext/heads", home);
    else
        return err_set(err, -ENOENT,
                       "no place for a head cut from the model: set HOME or XDG_CACHE_HOME, or give --head");
    if (n >= PATH_MAX - 64)
        return err_set(err, -ENAMETOOLONG, "cache folder: name too long");
    return make_dirs(ret, 1, err);
}

static int fits(const char *path, const struct model *model)
{
    struct head *head = NULL;
    if (head_open(path, model, &head, NULL))
        return 0;
    head_free(&head);
    return 1;
}

/* Where trained heads lie, seen from the folder of the program: an installation's, the source tree's. */
static const char *const shipped[] = {"../share/specontext/heads", "../../heads", "../../../heads"};

static int is_head(const struct dirent *entry)
{
    const char *end = strrchr(entry->d_name, '.');
    return end && !strcmp(end, ".safetensors");
}

/* The first head of the folder, by name, that was made for the model. */
static bool find_in(const char *dir, const struct model *model, char ret_path[PATH_MAX])
{
    struct dirent **entries = NULL;
    int count = scandir(dir, &entries, is_head, alphasort);
    bool found = false;
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof path, "%s/%s", dir, entries[i]->d_name);
        if (!found && n > 0 && n < PATH_MAX && fits(path, model)) {
            memcpy(ret_path, path, (size_t)n + 1);
            found = true;
        }
        free(entries[i]);
    }
    free(entries);
    return found;
}

bool head_cache_shipped(const struct model *model, char ret_path[PATH_MAX])
{
    char self[PATH_MAX];
    if (program_folder(self, NULL) < 0)
        return false;
    for (size_t i = 0; i < sizeof shipped / sizeof *shipped; i++) {
        char dir[PATH_MAX], real[PATH_MAX];
        int length = snprintf(dir, sizeof dir, "%s/%s", self, shipped[i]);
        if (length > 0 && length < PATH_MAX && realpath(dir, real) && find_in(real, model, ret_path))
            return true;
    }
    return false;
}

int head_cache_get(const struct model *model, char ret_path[PATH_MAX], struct err *err)
{
    char dir[PATH_MAX], made[PATH_MAX + 32];
    if (head_cache_shipped(model, ret_path))
        return 0;
    int r = cache_dir(dir, err);
    if (r)
        return r;
    struct hash128 print = model_fingerprint(model);
    int n = snprintf(ret_path, PATH_MAX, "%s/%016" PRIx64 "%016" PRIx64 "-layer%d.safetensors", dir, print.hi,
                     print.lo, LAYER);
    if (n >= PATH_MAX)
        return err_set(err, -ENAMETOOLONG, "%s: name too long", dir);
    if (fits(ret_path, model))
        return 0;
    snprintf(made, sizeof made, "%s.%d", ret_path, (int)getpid());
    r = head_bootstrap(model_path(model), made, LAYER, GROUPS, err);
    if (!r && rename(made, ret_path))
        r = err_set(err, -errno, "%s: %s", ret_path, strerror(errno));
    if (r)
        unlink(made);
    return r;
}
