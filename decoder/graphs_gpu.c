/* Graphs of decode steps; see graphs_gpu.h. */
#include "decoder/graphs_gpu.h"

#include <string.h>

#include "base/alloc.h"

struct cached {
    struct graphs_gpu_shape shape;
    struct gpu_graph *graph; /* NULL: free */
    uint64_t used;
};

struct graphs_gpu {
    const struct gpu_api *api;
    struct cached kept[GRAPHS_GPU_KEPT];
    uint64_t clock;
};

struct graphs_gpu *graphs_gpu_create(const struct gpu_api *api)
{
    struct graphs_gpu *g = mem_alloc(1, sizeof *g);
    g->api = api;
    return g;
}

void graphs_gpu_drop(struct graphs_gpu *g)
{
    for (uint32_t i = 0; i < GRAPHS_GPU_KEPT; i++)
        if (g->kept[i].graph)
            g->api->graph_free(&g->kept[i].graph);
}

void graphs_gpu_free(struct graphs_gpu **graphs)
{
    if (*graphs)
        graphs_gpu_drop(*graphs);
    mem_free(graphs);
}

struct gpu_graph *graphs_gpu_find(struct graphs_gpu *g, const struct graphs_gpu_shape *shape)
{
    for (uint32_t i = 0; i < GRAPHS_GPU_KEPT; i++) {
        struct cached *c = &g->kept[i];
        if (c->graph && !memcmp(&c->shape, shape, sizeof *shape)) {
            c->used = ++g->clock;
            return c->graph;
        }
    }
    return NULL;
}

void graphs_gpu_keep(struct graphs_gpu *g, const struct graphs_gpu_shape *shape, struct gpu_graph *graph)
{
    struct cached *oldest = &g->kept[0];
    for (uint32_t i = 0; i < GRAPHS_GPU_KEPT; i++) {
        struct cached *c = &g->kept[i];
        if (!c->graph || (oldest->graph && c->used < oldest->used))
            oldest = c;
    }
    if (oldest->graph)
        g->api->graph_free(&oldest->graph);
    *oldest = (struct cached){*shape, graph, ++g->clock};
}
