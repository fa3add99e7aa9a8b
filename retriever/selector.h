/* The retriever without its sockets: sequences, their keys and sets, and the answer to a step. PROTOCOL.md
 * section 5 says what a selection is. One thread owns a struct selector. */
#ifndef RETRIEVER_SELECTOR_H
#define RETRIEVER_SELECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "model/head.h"
#include "model/model.h"
#include "proto/msg.h"
#include "retriever/card.h"
#include "retriever/kept.h"
#include "retriever/selector_result.h"

struct selector;

struct selector_options {
    const char *device; /* "cpu" (or NULL), or a GPU: see struct gpu_api. Then one thread works with it. */
    const struct model *model; /* borrowed, as is the head: made for this model */
    const struct head *head;
    enum head_pool pool;
    enum compute_keys keys; /* auto: of 8 bits on a GPU */
    uint32_t context;       /* positions of a sequence, 1 .. LIMIT_CONTEXT */
    uint32_t sequences;     /* open at a time, 1 .. LIMIT_SEQUENCES */
    int threads;
    enum compute_isa isa;
    uint64_t work_bytes; /* on a GPU: scores and weights that are made at a time; 0: MEMORY_GPU_WORK */
    uint64_t kept_bytes; /* for keys of prompts of a head with features of the model (kept.h); 0: none */
};

int selector_create(const struct selector_options *options, struct selector **ret_selector, struct err *err);
void selector_free(struct selector **selector);

const struct model_rope *selector_rope(const struct selector *selector); /* in force, see head_rope */

/* See compute_name; a GPU's name. */
const char *selector_backend(const struct selector *selector);

const struct card *selector_card(const struct selector *selector); /* NULL: on the CPU */

bool selector_keys_int8(const struct selector *selector); /* in force */

/* Names everything that decides what is selected: the head, how it pools, its rotation in force, keys of 8
 * bits. Equal to the head's own fingerprint when it is used as recommended and as trained, with keys of
 * 16. */
struct hash128 selector_fingerprint(const struct selector *selector);

/* A head that reads hidden states of the model gets them by a segment of the decoder's (rows.h). Takes the
 * descriptor; one that was there before is let go. Without one, and after an error, entries of steps are
 * refused. Errors as rows_open. */
struct selector_peers {
    uint64_t decoder_epoch, retriever_epoch;
};
bool selector_reads_features(const struct selector *selector);
int selector_take_features(struct selector *selector, int fd, const struct selector_peers *peers,
                           struct err *err);
void selector_drop_features(struct selector *selector);

/* Opens a sequence (its made is not read; its salt, flags and tokens with features of the model only).
 * -EEXIST, -ENOSPC, -E2BIG (capacity past the context, or sets that no message could carry), -EINVAL with the
 * numbers in err. */
int selector_open(struct selector *selector, const struct msg_open *open, struct err *err);

/* Positions that a sequence has keys of before its first step, which begins at any multiple of BLOCK_TOKENS
 * up to them. 0 for an unknown one. */
uint32_t selector_kept(const struct selector *selector, uint64_t sequence);

int selector_close(struct selector *selector, uint64_t sequence); /* 0 or -ENOENT */
void selector_close_all(struct selector *selector);

/* The next set of every sequence is sent whole (who got the last ones is gone). */
void selector_forget_sent(struct selector *selector);
void selector_forget_sent_of(struct selector *selector, uint64_t sequence); /* an unknown one is no error */

/* Appends keys of all tokens and makes the selections asked for. An entry that does not fit what is known
 * of its sequence (unknown, not the next position, past its capacity, token out of the vocabulary, named
 * twice) is refused by itself and changes nothing; so is a selection whose weights are not finite (its keys
 * stay). */
void selector_step(struct selector *selector, uint32_t step, const struct msg_step *msg,
                   struct selector_result *result);

/* Calls part(arg, result) within a step when some of its entries and refusals are in `result` and more are to
 * come, which go into the result that it returns: so the first can be sent while a GPU works on the rest. */
typedef struct selector_result *(*selector_part)(void *arg, struct selector_result *result);
void selector_on_part(struct selector *selector, selector_part part, void *arg);

/* The last set of the sequence once more, whole, under the step that it was made for. -ENOENT: unknown
 * sequence; -EAGAIN: there is none from `step` on yet: the next one will be whole. */
int selector_repeat(struct selector *selector, uint64_t sequence, uint32_t step,
                    struct selector_result *result);

struct selector_stats {
    uint32_t sequences;
    uint64_t key_bytes;
    uint64_t steps, tokens, selections, refused; /* since the start */
    uint64_t grown, fallbacks;                   /* of the selections: TOPK_ENTRY_GROWN, TOPK_ENTRY_SHORT */
    uint64_t positions_sent;
    uint32_t feature_rows; /* of the segment; 0: none */
    struct kept_stats kept;
    uint64_t kept_tokens; /* whose keys were taken from those kept, since the start */
    struct selector_times {
        int64_t append_ns, score_ns, topk_ns, encode_ns;
    } sum, last;           /* over all steps; of the last one */
    struct card_bytes gpu; /* on a GPU */
    uint64_t graph_steps;  /* launched as a graph there */
};

void selector_stats(const struct selector *selector, struct selector_stats *ret_stats);

#endif
