/* Graphs of decode steps, each for one shape, those used last. Device thread only. */
#ifndef DECODER_GRAPHS_GPU_H
#define DECODER_GRAPHS_GPU_H

#include <stdint.h>

#include "compute/gpu.h"

enum { GRAPHS_GPU_KEPT = 16 };

/* What a graph's launches depend on. No padding: compared as bytes. */
struct graphs_gpu_shape {
    uint32_t entries, parity, rows, resident, early_layers, penalized, exported;
    uint32_t joined_runs; /* one wait for the rows of all runs */
};

struct graphs_gpu;

struct graphs_gpu *graphs_gpu_create(const struct gpu_api *api);
void graphs_gpu_free(struct graphs_gpu **graphs); /* none of them runs */
void graphs_gpu_drop(struct graphs_gpu *graphs);  /* all that are kept: addresses have changed */

/* NULL: there is none. It stays until as many others were kept as there is room for. */
struct gpu_graph *graphs_gpu_find(struct graphs_gpu *graphs, const struct graphs_gpu_shape *shape);
/* Takes the graph over, in place of the one that was used longest ago. */
void graphs_gpu_keep(struct graphs_gpu *graphs, const struct graphs_gpu_shape *shape,
                     struct gpu_graph *graph);

#endif
