/* Temporary directories of tests. No state but temp_list's buffer; single-threaded tests only. */
#include "tests/lib/temp.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

void temp_make(char ret_path[PATH_MAX])
{
    snprintf(ret_path, PATH_MAX, "/tmp/scx-test-XXXXXX");
    CHECK(mkdtemp(ret_path));
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

void temp_remove(const char *path)
{
    if (!strncmp(path, "/tmp/scx-test-", 14)) /* nothing else, whatever a test passes */
        nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int visible(const struct dirent *entry)
{
    return strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
}

const char *temp_list(const char *path)
{
    static char names[4096];
    struct dirent **list;
    names[0] = 0;
    int n = scandir(path, &list, visible, alphasort);
    if (n < 0)
        return names;
    size_t used = 0;
    for (int i = 0; i < n; i++) {
        int more = snprintf(names + used, sizeof names - used, "%s%s", i ? " " : "", list[i]->d_name);
        if (more > 0 && used + (size_t)more < sizeof names)
            used += (size_t)more;
        free(list[i]);
    }
    free(list);
    return names;
}

void temp_write(const char *path, const char *text)
{
    FILE *to = fopen(path, "we");
    CHECK(to);
    CHECK(fputs(text, to) >= 0);
    CHECK(!fclose(to));
}
