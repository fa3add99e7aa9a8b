/* One request and the sequence that it becomes: what it asked for, how far it is, and the messages that tell
 * others of it. No decisions: those are the scheduler's. Device thread only. */
#ifndef DECODER_GENERATION_H
#define DECODER_GENERATION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "model/model.h"
#include "model/sampler.h"
#include "proto/control.h"
#include "proto/msg.h"

enum generation_state {
    GENERATION_QUEUED,  /* waits for a place */
    GENERATION_ASKING,  /* OPEN was sent to the retriever, which says how much of the prompt it has keys of */
    GENERATION_OPENING, /* OPEN was sent to the store */
    GENERATION_PREFILL, /* granted; positions [done, prompt) are to be computed */
    GENERATION_DECODE,  /* done + 1 == count: the last token is to be computed */
    GENERATION_CLOSING, /* CLOSE was sent */
};

struct generation {
    uint64_t id; /* the request's number in this process, and the store's name of the sequence */
    enum generation_state state;
    struct msg ask; /* GENERATE; owns its memory */
    struct sampler_params sampling;
    bool sparse;
    uint32_t prompt;   /* tokens of it */
    uint32_t capacity; /* positions: prompt and what may be generated */
    uint32_t *tokens;  /* [capacity], from OPENING on */
    uint32_t count;    /* of them known */
    uint32_t recorded; /* of them in a posted record, or cached */
    uint32_t sent;     /* generated tokens that went to the client */
    uint32_t done;     /* positions whose KV is made */
    uint32_t told;     /* positions that the retriever has */
    /* Where its hidden states of the step last computed go: row and position of the first. */
    uint32_t feature_row, feature_position;
    uint32_t kept;          /* positions that the retriever has keys of: its GRANT */
    uint32_t index, cached; /* GRANT */
    uint32_t finish;        /* enum finish_reason, 0 while it goes on */
    struct err failure;     /* FINISH_ERROR */
    int64_t asked_ns;       /* when OPEN or CLOSE was sent */
    int64_t queued_at_ns, granted_at_ns, first_at_ns, last_at_ns; /* 0: not yet */
};

struct generation_limits {
    uint32_t vocab, context;
    uint32_t list_max; /* the largest budget */
};

/* Takes msg's memory, whatever it returns. Never fails: a request that asks for what cannot be comes back
 * with `finish` set (errors name the field, what was found, what was expected). */
struct generation *generation_create(uint64_t id, struct msg *generate,
                                     const struct generation_limits *limits);
void generation_free(struct generation **sequence);

/* Makes room for the tokens; from QUEUED to `state`, ASKING or OPENING. */
void generation_admit(struct generation *q, enum generation_state state);

/* Ends it, unless it ended before. `code` and text only for FINISH_ERROR. A token that was sampled and not
 * recorded is forgotten, but for FINISH_LENGTH, which it made. */
void generation_end(struct generation *q, uint32_t reason);
int generation_fail(struct generation *q, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Takes the token that was sampled for position `count` at `now_ns`; `eos` [vocab] says which end it. */
void generation_take(struct generation *q, uint32_t id, const uint8_t *eos, int64_t now_ns);

/* Messages. Their memory, if any, is the message's (mem_free). `prefix`: the retriever is asked for keys that
 * it kept of the prompt. */
void generation_open_store(const struct generation *q, uint64_t head, struct msg *ret);
void generation_open_retriever(const struct generation *q, bool prefix, struct msg *ret);
void generation_close(const struct generation *q, struct msg *ret);
void generation_progress(const struct generation *q, struct msg *ret);
void generation_tokens(struct generation *q,
                       struct msg *ret); /* those recorded and not sent; counts them as sent */
void generation_done(const struct generation *q, const struct kv_counters *counters, struct msg *ret);

#endif
