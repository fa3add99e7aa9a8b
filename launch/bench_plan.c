/* Sizes and tokens of a benchmark's requests. No state, no I/O; any thread. */
#include "launch/bench_plan.h"

#include <errno.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "compute/gpu.h"
#include "proto/layout.h"
#include "proto/memory.h"

enum {
    PROMPT_CPU = 256, /* prompt tokens of one step of a decoder on the CPU, as MEMORY_GPU_PROMPT on a GPU */
    PATIENCE = 4,     /* times what others may be ahead, until one that has not begun is given up */
};

#define SEED       20250101u
#define BEGINNINGS UINT64_C(1000000) /* more than there are of them */

struct bench_row *bench_plan_rows(const struct bench_options *o, uint32_t *ret_count)
{
    struct bench_row *rows = mem_alloc((size_t)o->depth_count * 2, sizeof *rows);
    uint32_t count = 0;
    for (uint32_t i = 0; i < o->depth_count; i++) {
        if (o->prompt)
            bench_row_init(&rows[count++], BENCH_PREFILL, o->depths[i], o);
        if (o->decode)
            bench_row_init(&rows[count++], BENCH_DECODE, o->depths[i], o);
    }
    *ret_count = count;
    return rows;
}

/* A depth is built with a decode step behind it: a retriever that keeps keys has the last block's then. A
 * decode's last lead token is sampled with one position more than the prompt in the cache. Its prompts
 * share what the prefix cache can give them; the rest, which is computed anyway, makes each sequence another,
 * so that they select differently. */
struct bench_request bench_plan_request(const struct bench_options *o, const struct bench_row *row, int round,
                                        uint32_t sequence)
{
    uint64_t beginning = o->distinct ? sequence + UINT64_C(1) : 0;
    if (round == BENCH_ROUND_BUILD)
        return (struct bench_request){row->depth, 2, row->depth, beginning};
    if (row->kind == BENCH_PREFILL)
        return (struct bench_request){row->depth + o->prompt, 1, row->depth, beginning};
    uint32_t prompt = row->depth > 1 ? row->depth - 1 : 1, whole = (prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    return (struct bench_request){
        prompt, BENCH_LEAD + o->decode + bench_plan_ahead(o, row->depth) * (o->parallel - 1), whole,
        beginning};
}

uint32_t bench_plan_sequences(const struct bench_options *o, int round)
{
    return round == BENCH_ROUND_BUILD && !o->distinct ? 1 : o->parallel;
}

uint32_t bench_plan_ahead(const struct bench_options *o, uint32_t depth)
{
    uint32_t tokens = gpu_named(o->run.device) ? MEMORY_GPU_PROMPT : PROMPT_CPU, steps = depth / tokens + 2;
    return o->run.write_through == WRITE_THROUGH_ALL || steps < BENCH_AHEAD ? BENCH_AHEAD : steps;
}

bool bench_plan_builds(const struct bench_options *o, uint32_t depth)
{
    return depth >= BLOCK_TOKENS && o->run.write_through == WRITE_THROUGH_ALL;
}

uint32_t bench_plan_stuck(const uint32_t *received, uint32_t count, uint32_t ahead)
{
    uint32_t begun = 0, least = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++)
        if (received[i]) {
            begun++;
            least = received[i] < least ? received[i] : least;
        }
    return begun && begun < count && least > BENCH_LEAD + PATIENCE * ahead ? begun : 0;
}

int bench_plan_context(const struct bench_options *o, uint32_t most, uint32_t *ret_context, struct err *err)
{
    uint64_t tokens = o->prompt + UINT64_C(1), longest = 0;
    for (uint32_t i = 0; i < o->depth_count; i++)
        longest = o->depths[i] > longest ? o->depths[i] : longest;
    uint64_t ahead = bench_plan_ahead(o, (uint32_t)longest) * (o->parallel - UINT64_C(1)),
             decode = o->decode ? BENCH_LEAD + o->decode + ahead : 0;
    tokens = tokens > decode ? tokens : decode;
    longest += tokens + 1;
    if (longest > most)
        return err_set(
            err, -E2BIG,
            "--depth, --prompt, --generate: found sequences of %llu tokens, but the model was made for %u",
            (unsigned long long)longest, most);
    longest = (longest + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    *ret_context = longest < most ? (uint32_t)longest : most;
    return 0;
}

uint64_t bench_plan_host_memory(const struct bench_options *o, const struct model_config *c, uint32_t context)
{
    uint64_t token = (uint64_t)c->layers * c->kv_heads * c->head_dim * 4; /* K and V, 16 bits an element */
    uint64_t sequence = (context + 2 * (uint64_t)BLOCK_TOKENS) * token;
    return sequence * (o->parallel + 1) + (UINT64_C(32) << 20);
}

void bench_plan_tokens(const struct bench_request *request, uint64_t stream, uint32_t vocab, uint32_t *ids)
{
    for (uint32_t i = 0; i < request->prompt; i++) {
        bool shared = i < request->shared;
        uint64_t key[2] = {shared ? request->beginning : BEGINNINGS + stream, i};
        ids[i] = (uint32_t)(hash_bytes(SEED, key, sizeof key).lo % vocab);
    }
}
