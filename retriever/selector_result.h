/* What a step of the selector gives: entries and positions as TOPK has them, and refusals. */
#ifndef RETRIEVER_SELECTOR_RESULT_H
#define RETRIEVER_SELECTOR_RESULT_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "model/head.h"
#include "proto/msg.h"
#include "retriever/positions.h"

struct selector_refusal {
    uint64_t sequence;
    int code;
    char text[ERR_TEXT_MAX];
};

/* What a step gives. Reused from call to call; release with selector_result_free. */
struct selector_result {
    uint32_t step, groups, heads;
    struct msg_topk_entry *entries;
    uint32_t entry_count, entry_room;
    uint32_t *counts; /* as struct msg_topk says */
    uint32_t *positions;
    size_t *first; /* [entry_count + 1]: where an entry's positions begin */
    size_t count_room, position_room;
    struct selector_refusal *refusals; /* entries of the step that nothing was done for */
    uint32_t refusal_count, refusal_room;
};

void selector_result_begin(struct selector_result *result, uint32_t step, const struct head_config *head);
void selector_result_refuse(struct selector_result *result, uint64_t sequence, const struct err *err);

/* Room for so many of each in all; what is inside stays. */
void selector_result_reserve(struct selector_result *result, uint32_t entries, size_t counts,
                             size_t positions);

/* Appends one entry: `added` of each list and, if not NULL, `removed`. */
void selector_result_put(struct selector_result *result, const struct msg_topk_entry *entry,
                         const struct positions *added, const struct positions *removed);

/* Appends one entry but for its positions, `counts` as struct msg_topk says; returns where in
 * result->positions these go. */
size_t selector_result_begin_entry(struct selector_result *result, const struct msg_topk_entry *entry,
                                   const uint32_t *counts, size_t positions);

/* Fills `topk` with entries from `first` on, as many as `bytes` of positions and counts hold (at least one);
 * returns the entry to go on with. Pointers lead into the result. */
uint32_t selector_result_part(const struct selector_result *result, uint32_t first, size_t bytes,
                              struct msg_topk *topk);
void selector_result_free(struct selector_result *result);

#endif
