/* Limits of everything that crosses between processes. Reaching one is a counted refusal, never a crash.
 * PROTOCOL.md and SHARED-MEMORY.md name them; the asserts below state how they hang together. */
#ifndef PROTO_LIMITS_H
#define PROTO_LIMITS_H

#define LIMIT_LAYERS          256u     /* transformer layers */
#define LIMIT_GROUPS          16u      /* layer groups: selections a step */
#define LIMIT_RUNS            64u      /* runs of layers, each with a flag of its own */
#define LIMIT_ROW_HEADS       128u     /* KV heads of the cache */
#define LIMIT_SELECTION_HEADS 128u     /* heads that Top-K picks for */
#define LIMIT_SEQUENCES       64u      /* live sequences of one store, and entries of one step */
#define LIMIT_CONTEXT         1048576u /* positions of one sequence */
#define LIMIT_STEP_TOKENS     4096u    /* tokens of one step record */
#define LIMIT_MESSAGE_BYTES   (64u << 20)
#define LIMIT_MESSAGE_DEPTH   4u    /* nesting of msgpack containers */
#define LIMIT_MESSAGE_OBJECTS 4096u /* msgpack objects in one message: bulk data travels as bin */
#define LIMIT_TEXT_BYTES      1024u /* names, reasons */
#define LIMIT_STATUS_BYTES    (1u << 20)
#define LIMIT_STOP_IDS        16u
#define LIMIT_FEATURE_LAYERS  8u     /* of a head: layers whose inputs it reads */
#define LIMIT_FEATURE_HIDDEN  65536u /* width of each */
#define LIMIT_SLOTS           65534u /* of one (group, row head): the store counts them in 16 bits */

#define BLOCK_TOKENS   64u          /* a block = a page: unit of host allocation / of device pages */
#define SLAB_BYTES_MIN (256u << 10) /* pages and slots are cut from slabs; larger only if a page is */
#define RUN_LAYERS     4u           /* layers of a run; the last run of a model takes the remainder too */
#define STEP_RING      4u           /* step records in flight; a power of two */

/* A run of 4 layers at least, so 64 runs cover every model. */
_Static_assert(LIMIT_LAYERS / RUN_LAYERS <= LIMIT_RUNS, "a run for each 4 layers");
/* A decode step of every sequence fits one record. */
_Static_assert(LIMIT_SEQUENCES <= LIMIT_STEP_TOKENS, "decode steps fit the record");
_Static_assert((STEP_RING & (STEP_RING - 1)) == 0, "ring index by mask");

#endif
