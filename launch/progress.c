/* The one line of progress on a terminal. State in struct progress, owned by the loop's thread. */
#include "launch/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define WIDTH      40
#define REPAINT_NS (50 * CLOCK_MS) /* a terminal need not see more */

void progress_init(struct progress *p, int fd)
{
    *p = (struct progress){.fd = fd, .enabled = isatty(fd)};
}

static void show(struct progress *p, const char *line)
{
    char text[160];
    int n = snprintf(text, sizeof text, "\r\033[K%.120s", line);
    ssize_t written = write(p->fd, text, (size_t)n);
    (void)written; /* a bar that cannot be drawn is no failure */
    p->shown = true;
    p->last_ns = clock_now_ns();
}

void progress_loading(struct progress *p, const char *part, const char *text)
{
    if (!p->enabled)
        return;
    char line[160];
    snprintf(line, sizeof line, "loading: %s: %s", part, text);
    show(p, line);
}

void progress_prefill(struct progress *p, uint64_t done, uint64_t total)
{
    if (!p->enabled || !total || (done < total && clock_now_ns() - p->last_ns < REPAINT_NS))
        return;
    unsigned filled = (unsigned)(done >= total ? WIDTH : done * WIDTH / total);
    char bar[WIDTH + 1], line[160];
    memset(bar, '.', WIDTH);
    memset(bar, '#', filled);
    bar[WIDTH] = 0;
    snprintf(line, sizeof line, "prompt [%s] %llu of %llu tokens", bar, (unsigned long long)done,
             (unsigned long long)total);
    show(p, line);
}

void progress_clear(struct progress *p)
{
    if (!p->shown)
        return;
    ssize_t written = write(p->fd, "\r\033[K", 4);
    (void)written;
    p->shown = false;
}
