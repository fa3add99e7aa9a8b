/* Who asked for what: from the decoder's numbers of requests to clients and their ids. Loop thread only. */
#ifndef DECODER_REQUESTS_H
#define DECODER_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "link/bus.h"

#define REQUESTS_MAX 2048u /* more than the scheduler takes, so that it is the one who refuses */

struct request {
    uint64_t id;          /* ours; 0: unused */
    uint64_t asked_id;    /* the client's */
    struct bus_peer peer; /* a copy: the bus may forget the original */
    bool gone;            /* the client hears nothing more */
};

struct requests {
    struct request *at; /* [REQUESTS_MAX] */
    uint32_t used;      /* entries [0, used) may be in use */
    uint32_t count;
    uint64_t last; /* number given last */
};

void requests_init(struct requests *r);
void requests_free(struct requests *r);

/* NULL when there are too many. */
struct request *requests_add(struct requests *r, const struct bus_peer *peer, uint64_t asked_id);
struct request *requests_find(const struct requests *r, uint64_t id);
struct request *requests_asked(const struct requests *r, const struct bus_peer *peer, uint64_t asked_id);
void requests_remove(struct requests *r, struct request *request);

bool requests_of(const struct request *request, const struct bus_peer *peer);

#endif
