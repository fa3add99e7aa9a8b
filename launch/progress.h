/* What a person sees on a terminal while waiting: one line that is overwritten, gone before text appears.
 * Writes nothing at all when `to` is no terminal. */
#ifndef LAUNCH_PROGRESS_H
#define LAUNCH_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    int fd;
    bool shown;   /* a line stands on the terminal */
    bool enabled; /* fd is a terminal */
    int64_t last_ns;
};

void progress_init(struct progress *progress, int fd);

/* "loading: <part>: <text>" */
void progress_loading(struct progress *progress, const char *part, const char *text);

/* A bar of `done` of `total` prompt tokens. */
void progress_prefill(struct progress *progress, uint64_t done, uint64_t total);

/* Takes the line away; call before anything else is printed. */
void progress_clear(struct progress *progress);

#endif
