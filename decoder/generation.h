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
    GENERATION_DECODE,  /* done < count: the token at `done` is to be computed, mostly the last */
    GENERATION_CLOSING, /* CLOSE was sent */
};

/* Times that one is begun again without a new token in between: where it is the request that ends each
 * retriever. */
#define GENERATION_VAIN_MAX 4

/* Bits of a sequence's name that are the request's number; those above say how often it was begun again. */
#define GENERATION_ID_BITS 48
#define GENERATION_ID      ((UINT64_C(1) << GENERATION_ID_BITS) - 1)

struct generation {
    uint64_t id;       /* the request's number in this process */
    uint64_t sequence; /* its name to the store and the retriever: another one each time it is begun */
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
    uint32_t shown;    /* of the prompt, by the last PROGRESS */
    uint32_t told;     /* positions that the retriever has */
    /* Where its hidden states of the step last computed go: row and position of the first. */
    uint32_t feature_row, feature_position;
    uint32_t kept;               /* positions that the retriever has keys of: its GRANT */
    uint32_t index, cached;      /* GRANT */
    uint32_t reused;             /* `cached` of the first one: later ones are of its own blocks, too */
    uint32_t finish;             /* enum finish_reason, 0 while it goes on */
    struct err failure;          /* FINISH_ERROR */
    bool again;                  /* its keys are lost: when it is closed, it is begun again */
    uint32_t begun, vain;        /* times that it was begun again; those since its last new token */
    struct kv_counters counters; /* of the times before */
    int64_t asked_ns;            /* when OPEN or CLOSE was sent */
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

/* From `again` and closed, with the store's last counters (may be NULL), back to QUEUED. The tokens that went
 * to the client are known from then on: they are computed, and not sampled, a second time. -EHOSTUNREACH: it
 * was so too often, and has failed. */
int generation_begin_again(struct generation *q, const struct kv_counters *counters);

/* Takes the token that was sampled for position `count` at `now_ns`; `eos` [vocab] says which end it. */
void generation_take(struct generation *q, uint32_t id, const uint8_t *eos, int64_t now_ns);

/* Messages. Their memory, if any, is the message's (mem_free). `prefix`: the retriever is asked for keys that
 * it kept of the prompt. */
void generation_open_store(const struct generation *q, uint64_t head, struct msg *ret);
void generation_open_retriever(const struct generation *q, bool prefix, struct msg *ret);
void generation_close(const struct generation *q, struct msg *ret);
void generation_progress(struct generation *q, struct msg *ret);
void generation_tokens(struct generation *q,
                       struct msg *ret); /* those recorded and not sent; counts them as sent */
void generation_done(struct generation *q, const struct kv_counters *counters, struct msg *ret);

#endif
