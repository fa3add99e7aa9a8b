/* What a benchmark sends: which rows it measures, how long sequences become, and their tokens. Pure. */
#ifndef LAUNCH_BENCH_PLAN_H
#define LAUNCH_BENCH_PLAN_H

#include <stdint.h>

#include "base/err.h"
#include "launch/bench_options.h"
#include "launch/bench_report.h"
#include "model/model.h"

/* Tokens of a decode before its time begins: the prefill's, and one of a first sparse step, for which the
 * retriever may have to catch up with a prompt that prefix reuse spared the decoder. */
#define BENCH_LEAD 2u

/* Steps that a sequence may be ahead for each one that begins after it, at least: as long as that one's KV is
 * filled in on the device, those before it decode. Who is ahead is cancelled when the time is over. */
#define BENCH_AHEAD 32u

/* Rounds of a row before those that count: the depth alone, so that later rounds find it in the prefix
 * cache, and a repeat that is thrown away. */
enum { BENCH_ROUND_BUILD = -2, BENCH_ROUND_WARM = -1 };

/* What each sequence of a round is asked for. */
struct bench_request {
    uint32_t prompt, generate; /* tokens */
    uint32_t shared;           /* first tokens of the prompt that are the same in all rounds */
    uint64_t beginning;        /* whose: 0: all sequences', i + 1: sequence i's */
};

/* Rows in order of depths, prefill before decode; free each with bench_row_free and the list with
 * mem_free. */
struct bench_row *bench_plan_rows(const struct bench_options *options, uint32_t *ret_count);

struct bench_request bench_plan_request(const struct bench_options *options, const struct bench_row *row,
                                        int round, uint32_t sequence);

/* Sequences of a round: one where the depth that all share is built. */
uint32_t bench_plan_sequences(const struct bench_options *options, int round);

/* Steps that one of `depth` may be ahead for each that begins after it. Where no prefix can be used again,
 * since the KV cache's host memory may lack layers, one for each part of that one's prompt. */
uint32_t bench_plan_ahead(const struct bench_options *options, uint32_t depth);

/* Whether a row has a round that builds its depth: one that some block of the prefix cache can hold. */
bool bench_plan_builds(const struct bench_options *options, uint32_t depth);

/* Of `count` sequences, with the tokens that each has received: how many run while the others wait in vain:
 * those that have begun would not have got so far ahead, memory holds no more. 0: no sign of that. */
uint32_t bench_plan_stuck(const uint32_t *received, uint32_t count, uint32_t ahead);

/* Positions that the longest request needs. 0, or -E2BIG when the model has fewer. */
int bench_plan_context(const struct bench_options *options, uint32_t most, uint32_t *ret_context,
                       struct err *err);

/* Host memory for all sequences and the cached beginning of one, bytes. Small, so that what is measured of
 * memory is not the cache's leftovers of earlier repeats. */
uint64_t bench_plan_host_memory(const struct bench_options *options, const struct model_config *config,
                                uint32_t context);

/* Fills the ids of a prompt: `shared` tokens of a beginning, the rest of stream `stream`, which no two rounds
 * or sequences have in common. The same on every machine. */
void bench_plan_tokens(const struct bench_request *request, uint64_t stream, uint32_t vocab, uint32_t *ids);

#endif
