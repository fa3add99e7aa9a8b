/* Where the program that runs lies: what belongs to it is found from there. */
#ifndef BASE_PROGRAM_H
#define BASE_PROGRAM_H

#include <limits.h>

#include "base/err.h"

/* The folder of the program's file, absolute, links followed, no slash at the end. 0 or -errno. */
int program_folder(char ret_folder[PATH_MAX], struct err *err);

#endif
