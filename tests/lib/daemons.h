/* The three daemons without a supervisor, and a client of theirs, in a test: parts are killed and started
 * again while requests run. In the temporary world of runcase.h, with its model. */
#ifndef TESTS_LIB_DAEMONS_H
#define TESTS_LIB_DAEMONS_H

#include <stdbool.h>
#include <stdint.h>

#include "link/bus.h"
#include "link/runtime.h"
#include "tests/lib/proc.h"
#include "tests/lib/runcase.h"

#define DAEMONS_WAIT_S 240 /* the longest that anything is waited for, on a busy machine */

enum { DAEMONS_REQUESTS = 16, DAEMONS_TOKENS = 256, DAEMONS_PROMPT = 1024 };

struct daemons_request {
    uint32_t prompt, seed; /* tokens, and what they are made of */
    struct msg_generate ask;
    uint32_t tokens[DAEMONS_TOKENS], count, progress;
    struct msg_done done;
    bool ended;
};

struct daemons {
    char dir[RUNTIME_PATH_MAX];
    const char *head, *device, *chunk; /* chunk: tokens of a prompt in a step */
    bool lacks_layers;                 /* a store that is started keeps no host rows of some layers */
    const char *key_type;              /* "auto" unless the test says otherwise */
    struct proc parts[RUNCASE_PARTS];
    struct loop *loop;
    struct bus *bus;
    struct bus_client *client;
    struct daemons_request requests[DAEMONS_REQUESTS];
    uint32_t count;    /* of them asked */
    uint64_t first_id; /* of requests[0] */
    json_t *status;    /* the decoder's last report; NULL: none came */
    bool lost;         /* the decoder, in which the test fails */
    /* Of each TOKEN and PROGRESS; NULL: nobody. */
    void (*heard)(struct daemons *d, uint32_t request);
    bool (*until)(struct daemons *d); /* ends daemons_run */
    int64_t deadline_ns;
    uint32_t step; /* the test's own */
};

/* Nobody is started yet. */
void daemons_init(struct daemons *d, const char *head, const char *device, const char *chunk);
/* The client, of a decoder that is there or comes. */
void daemons_connect(struct daemons *d);
void daemons_disconnect(struct daemons *d);

/* All of it, until the decoder is ready. */
void daemons_open(struct daemons *d, const char *head, const char *device, const char *chunk);
void daemons_close(struct daemons *d); /* accepts one that is closed */

void daemons_start(struct daemons *d, enum runcase_part part);
void daemons_kill(struct daemons *d, enum runcase_part part); /* SIGKILL, until it is gone */

void daemons_restart(struct daemons *d, enum runcase_part part);

/* Forgets what was asked. */
void daemons_clear(struct daemons *d);

/* Asks for `tokens` more tokens: of an even seed the likeliest, of an odd one sampled; with a penalty. */
void daemons_ask(struct daemons *d, uint32_t prompt, uint32_t seed, uint32_t tokens, uint32_t selection,
                 uint32_t flags);

/* Until `until` says so; NULL: until all requests have ended. Fails the test when that takes too long, or the
 * decoder ends. */
void daemons_run(struct daemons *d, bool (*until)(struct daemons *d));

/* Whether the state in the decoder's last report begins so; ready it is with a retriever only. */
bool daemons_state_begins(const struct daemons *d, const char *text);
bool daemons_ready(struct daemons *d);

/* Until all have ended, undisturbed: what they got is remembered, also when the daemons are closed. */
void daemons_learn(struct daemons *d);
const struct daemons_request *daemons_learned(uint32_t request);

/* Fails unless a request, or each, has got what was learned of it. */
void daemons_expect(const struct daemons *d, uint32_t request);
void daemons_expect_learned(const struct daemons *d);

/* Whether a part has told of `text` by now, and since daemons_forget_said. */
bool daemons_said(struct daemons *d, enum runcase_part part, const char *text);
void daemons_forget_said(struct daemons *d, enum runcase_part part);

#endif
