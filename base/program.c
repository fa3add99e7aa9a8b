/* See program.h. No state, any thread. */
#include "base/program.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

int program_folder(char ret_folder[PATH_MAX], struct err *err)
{
    ssize_t n = readlink("/proc/self/exe", ret_folder, PATH_MAX - 1);
    if (n < 0)
        return err_set(err, -errno, "/proc/self/exe: %s", strerror(errno));
    ret_folder[n] = 0;
    char *slash = strrchr(ret_folder, '/');
    if (n == PATH_MAX - 1 || !slash)
        return err_set(err, -ENAMETOOLONG, "/proc/self/exe: found %zd bytes, expected a path of at most %d",
                       n, PATH_MAX - 2);
    *slash = 0;
    return 0;
}
