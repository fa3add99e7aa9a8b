/* What selector.c (sequences, steps, sets) and selector_features.c (hidden states of the model, and keys that
 * are kept because of them) share. */
#ifndef RETRIEVER_SELECTOR_PRIVATE_H
#define RETRIEVER_SELECTOR_PRIVATE_H

#include "retriever/card.h"
#include "retriever/kept.h"
#include "retriever/keys.h"
#include "retriever/positions.h"
#include "retriever/projection.h"
#include "retriever/rank.h"
#include "retriever/rows.h"
#include "retriever/selector.h"

struct sequence {
    uint64_t id; /* 0: the place is free */
    uint32_t capacity, budget, sinks, window;
    struct reach_rule rule; /* with budget 0: none */
    struct keys keys;
    struct kept_chain chain; /* blocks of keys that prompts have in common, where the head reads features */
    bool begun;              /* a step named it */
    uint64_t call;           /* the last selector_step that named it */
    bool has_set;            /* `sent` and `entry` hold the last set */
    bool whole;              /* the next one is to be sent whole */
    struct msg_topk_entry entry;
    bool on_card;                      /* its sets are kept there: */
    bool second;                       /* the last one sent is the second of the two; else in */
    struct positions *sent, *next;     /* [groups * heads]: last set sent, and the one in the making */
    struct positions *added, *removed; /* [groups * heads] */
};

/* An entry of the step in work. */
struct work {
    struct sequence *sequence;
    const struct msg_step_entry *entry;
    bool differs;         /* answered by a difference */
    const uint32_t *from; /* on the card's side: its positions, until they are copied to `at` of the result */
    size_t at, count;
};

struct selector {
    struct selector_options options;
    const struct head_config *head;
    uint32_t lists; /* groups * heads */
    struct compute *compute;
    struct projection *projection; /* on the CPU these two, */
    struct rank *rank;
    struct card *card;          /* on a GPU this */
    struct rows *rows;          /* features of the decoder that is attached; NULL: none came */
    struct kept *kept;          /* NULL: no keys are kept */
    uint64_t kept_row_bytes;    /* of a row of features beside a block's keys, */
    enum dtype kept_type;       /* and what it is made of */
    struct sequence *sequences; /* [options.sequences] */
    uint64_t call;
    struct selector_stats stats;
    struct projection_part parts[LIMIT_SEQUENCES];
    struct work work[LIMIT_SEQUENCES]; /* entries that want a selection */
    uint32_t work_count, taken;        /* and those that are in the result but for their positions, */
    uint32_t landed;                   /* and with them */
    uint32_t how[LIMIT_SEQUENCES];     /* as struct card_sink says */
    struct selector_result *result;
    selector_part part;
    void *part_arg;
    struct rank_item *items;    /* [LIMIT_SEQUENCES * groups] */
    struct reach_result *found; /* [LIMIT_SEQUENCES * lists] */
};

static inline uint32_t selector_place(const struct selector *s, const struct sequence *q)
{
    return (uint32_t)(q - s->sequences);
}

/* Rows that entry i names, where the head reads any; `q`: its sequence. */
int selector_check_features(const struct selector *s, const struct sequence *q, const struct msg_step *msg,
                            uint32_t i, struct err *err);

/* Where the part's rows are; they were checked. */
void selector_aim_features(const struct selector *s, uint32_t row, struct projection_part *part);

/* Of a sequence that nothing was kept for yet: takes what there is, as OPEN asks. */
void selector_open_kept(struct selector *s, struct sequence *q, const struct msg_open *open);

/* The first step of a sequence begins at `position`: gives it the keys before it, and `part` the row of the
 * position before. */
void selector_begin_kept(struct selector *s, struct sequence *q, uint32_t position,
                         struct projection_part *part);

/* Keeps what the parts of a step made of prompts. Before the rows that they name are given back. */
void selector_keep(struct selector *s, uint32_t parts);

#endif
