/* The runtime directory; see runtime.h. No state, any thread. It must never remove a name that the project
 * does not make, nor trust a directory that another user can write to. */
#include "link/runtime.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The longest name below it; a directory is refused early if that would not fit. */
#define LONGEST_NAME "retriever.sock"

int runtime_path(const char *dir, const char *name, char ret_path[RUNTIME_PATH_MAX], struct err *err)
{
    int length = snprintf(ret_path, RUNTIME_PATH_MAX, "%s/%s", dir, name);
    if (length >= 0 && length < RUNTIME_PATH_MAX)
        return 0;
    return err_set(err, -ENAMETOOLONG, "%s/%s: length: found %d, expected at most %d", dir, name, length,
                   RUNTIME_PATH_MAX - 1);
}

int runtime_prepare(const char *dir, struct err *err)
{
    char path[RUNTIME_PATH_MAX];
    int r = runtime_path(dir, LONGEST_NAME, path, err);
    if (r < 0)
        return r;
    if (mkdir(dir, 0700) < 0 && errno != EEXIST)
        return err_set(err, -errno, "%s: mkdir: %s", dir, strerror(errno));
    int fd = open(dir, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, -errno, "%s: expected a directory: %s", dir, strerror(errno));
    struct stat st;
    r = fstat(fd, &st) < 0 ? -errno : 0;
    close(fd);
    if (r < 0)
        return err_set(err, r, "%s: stat: %s", dir, strerror(-r));
    if (st.st_uid != geteuid())
        return err_set(err, -EPERM, "%s: owner: found uid %u, expected %u", dir, st.st_uid, geteuid());
    if (st.st_mode & (S_IWGRP | S_IWOTH))
        return err_set(err, -EPERM, "%s: mode: found %03o, expected nobody else to write", dir,
                       st.st_mode & 0777);
    return 0;
}

int runtime_make_private(char ret_dir[RUNTIME_PATH_MAX], struct err *err)
{
    const char *bases[] = {getenv("XDG_RUNTIME_DIR"), getenv("TMPDIR"), "/tmp"};
    int r = -ENOENT;
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++) {
        char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
        if (!bases[i] || bases[i][0] != '/')
            continue;
        r = runtime_path(bases[i], "specontext-XXXXXX", dir, err);
        if (r == 0)
            r = runtime_path(dir, LONGEST_NAME, path, err);
        if (r < 0)
            continue;
        if (mkdtemp(dir)) {
            memcpy(ret_dir, dir, sizeof dir);
            return 0;
        }
        r = err_set(err, -errno, "%s: mkdtemp: %s", dir, strerror(errno));
    }
    return r;
}

static bool is_ours(int dir_fd, const char *name)
{
    const char *dot = strrchr(name, '.');
    struct stat st;
    return dot && dot != name && (strcmp(dot, ".sock") == 0 || strcmp(dot, ".fd") == 0) &&
           fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISSOCK(st.st_mode) &&
           st.st_uid == geteuid();
}

void runtime_remove(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (!entries) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(entries));)
        if (is_ours(fd, entry->d_name))
            unlinkat(fd, entry->d_name, 0);
    closedir(entries);
    rmdir(dir);
}

int runtime_lifeline(int ret_fds[2])
{
    return pipe2(ret_fds, O_CLOEXEC) < 0 ? -errno : 0;
}
