/* The socket retriever.fd, by which a decoder hands over its feature segment. Loop thread. */
#ifndef RETRIEVER_INTAKE_H
#define RETRIEVER_INTAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/loop.h"

struct intake;

/* Listens in `runtime`. `take` gets each segment's descriptor, which is its own from then on, and the epoch
 * of the decoder that says it sent it; false ends the connection. One connection at a time: a newer one takes
 * the place of the last. */
int intake_create(struct loop *loop, const char *runtime,
                  bool (*take)(void *arg, int fd, uint64_t decoder_epoch), void *arg,
                  struct intake **ret_intake, struct err *err);
void intake_free(struct intake **intake); /* accepts NULL inside */

/* Answers the segment taken last: it is used. `epoch`: ours. */
void intake_answer(struct intake *intake, uint64_t epoch);

#endif
