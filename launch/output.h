/* Standard output for the loop's thread: text waits here while the reader of a pipe or a stopped terminal
 * takes its time, so that the loop goes on answering the daemons. */
#ifndef LAUNCH_OUTPUT_H
#define LAUNCH_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/loop.h"

struct output;

/* `fd` stays the caller's. `moved(arg, error)` is called when the queue became empty (error 0), or once when
 * writing failed (negative errno); later text is dropped. */
struct output *output_create(struct loop *loop, int fd, void (*moved)(void *arg, int error), void *arg);
void output_free(struct output **output);

void output_write(struct output *output, const void *text, size_t bytes);
bool output_empty(const struct output *output);

#endif
