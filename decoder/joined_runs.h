/* Whether the graph of a step waits once for the rows of all runs of layers, where the first offloaded layer
 * asks for its own, or run by run. Each wait costs some microseconds, and where loads are done long before
 * nothing is lost; where they are not, layers are computed while the next ones' rows travel. Goes by the
 * steps before: rows of single steps come late now and then, and what is chosen anew is captured anew. Pure;
 * times in ns. */
#ifndef DECODER_JOINED_RUNS_H
#define DECODER_JOINED_RUNS_H

#include <stdint.h>

enum { JOINED_RUNS_LATE = 4, JOINED_RUNS_SOON = 16 }; /* steps in a row until it changes its mind */

struct joined_runs {
    int joined;                   /* graphs are made by it */
    int wanted;                   /* what the steps speak for: `joined` once such graphs are there */
    uint32_t against;             /* steps in a row that speak against `joined` */
    int64_t launched_ns, rows_ns; /* of this step: the graph was launched, all rows were there; 0: not yet */
};

void joined_runs_init(struct joined_runs *runs); /* joined */
void joined_runs_begin(struct joined_runs *runs);
void joined_runs_launched(struct joined_runs *runs, int64_t now);
void joined_runs_ready(struct joined_runs *runs, int64_t now); /* the rows of all runs are there */
/* The step has ended, whose first `resident` of `layers` layers had all rows on the device: says what is
 * wanted. A step without a graph says nothing, nor one with nothing to load. */
void joined_runs_end(struct joined_runs *runs, uint32_t resident, uint32_t layers, int64_t now);

#endif
