/* Becomes the program that measures: it uses code of the daemons, which this one must not. */
#include "launch/eval.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/program.h"

int eval_command_main(int argc, char **argv)
{
    char folder[PATH_MAX], path[PATH_MAX + 20];
    struct err err = {0};
    (void)argc;
    if (program_folder(folder, &err) == 0) { /* beside this program, as the daemons are */
        snprintf(path, sizeof path, "%s/specontext-eval", folder);
        execv(path, argv);
        err_set(&err, -errno, "%s: %s", path, strerror(errno));
    }
    fprintf(stderr, "specontext eval: %s\n", err.text);
    return 1;
}
