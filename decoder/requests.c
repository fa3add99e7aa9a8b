/* The table of requests; see requests.h. Owner: the loop thread. */
#include "decoder/requests.h"

#include <string.h>

#include "base/alloc.h"

void requests_init(struct requests *r)
{
    memset(r, 0, sizeof *r);
    r->at = mem_alloc(REQUESTS_MAX, sizeof *r->at);
}

void requests_free(struct requests *r)
{
    mem_free(&r->at);
}

struct request *requests_add(struct requests *r, const struct bus_peer *peer, uint64_t asked_id)
{
    uint32_t i = 0;
    while (i < r->used && r->at[i].id)
        i++;
    if (i == REQUESTS_MAX)
        return NULL;
    r->used = i == r->used ? i + 1 : r->used;
    r->count++;
    r->at[i] = (struct request){.id = ++r->last, .asked_id = asked_id, .peer = *peer};
    return &r->at[i];
}

struct request *requests_find(const struct requests *r, uint64_t id)
{
    for (uint32_t i = 0; id && i < r->used; i++)
        if (r->at[i].id == id)
            return &r->at[i];
    return NULL;
}

struct request *requests_asked(const struct requests *r, const struct bus_peer *peer, uint64_t asked_id)
{
    for (uint32_t i = 0; i < r->used; i++)
        if (r->at[i].id && r->at[i].asked_id == asked_id && requests_of(&r->at[i], peer))
            return &r->at[i];
    return NULL;
}

void requests_remove(struct requests *r, struct request *request)
{
    request->id = 0;
    r->count--;
    while (r->used && !r->at[r->used - 1].id)
        r->used--;
}

bool requests_of(const struct request *request, const struct bus_peer *peer)
{
    return request->peer.epoch == peer->epoch && request->peer.routing_bytes == peer->routing_bytes &&
           !memcmp(request->peer.routing, peer->routing, peer->routing_bytes);
}
