/* Steps: the decoder's end of the control segment. Posts records, waits for the store's flags, runs the
 * forward pass over what its tables name, and tells what was written and consumed. SHARED-MEMORY.md section
 * 3.
 *
 * One step at a time: stepper_post, then stepper_run for DENSE and SPARSE; RECORD steps end with
 * stepper_post. Device thread only; any thread may abort the flags, which ends a wait with -ECANCELED. */
#ifndef DECODER_STEPPER_H
#define DECODER_STEPPER_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/awake.h"
#include "base/err.h"
#include "decoder/export.h"
#include "decoder/pass.h"
#include "decoder/waits.h"
#include "model/sampler.h"
#include "proto/control.h"

#define STEPPER_WAIT_S 30 /* the longest wait for one flag */
#define STEPPER_MOVES  16 /* changes of residency that are remembered */

struct stepper_part { /* what one sequence adds to a step */
    uint64_t id;
    uint32_t index;    /* of the sequence in the tables, from GRANT */
    uint32_t position; /* of the first token */
    uint32_t count;
    const uint32_t *history;               /* [position + count] the sequence's tokens, each < vocab */
    const struct sampler_params *sampling; /* how the token after these is chosen; NULL: none is */
    uint32_t
        features; /* row of the first token's hidden states (export.h), the others' follow; EXPORT_NONE */
};

struct stepper_spec {
    enum step_kind kind;
    enum selection_mode selection; /* SPARSE */
    int prompt;                    /* DENSE: tokens of prompts, not of answers */
    const struct stepper_part *parts;
    uint32_t count; /* <= sequences_max of the segment */
};

struct stepper_verdict {
    int status;      /* 0, or the negative errno for which the part was dropped */
    const char *why; /* static text */
    int32_t token;   /* the one chosen; -1: the logits are not finite */
};

struct stepper_times { /* nanoseconds, summed */
    int64_t wait_tables, wait_rows, sampling;
    uint64_t dense, sparse, record; /* steps */
    uint64_t dropped;               /* parts */
    uint64_t waits_broken;          /* by abort or deadline */
    /* Of each step but those of prompts; rows: on the CPU. While a GPU computes the early layers of `mixed`
     * nothing waits. */
    struct waits tables, rows;
    struct {
        uint64_t sparse;    /* steps, that one included if it is one */
        uint32_t offloaded; /* layers, from that step on */
    } moves[STEPPER_MOVES]; /* the last changes; the oldest is overwritten */
    uint64_t move_count;    /* so far; change i is at i % STEPPER_MOVES */
};

/* Sequences that the retriever refused, as one thread hears of them. The i-th stands at i mod
 * STEPPER_REFUSALS. */
#define STEPPER_REFUSALS 256 /* many more than parts: messages of a turn are refused before one is heard of */
struct stepper_refusals {
    atomic_uint count; /* raised behind the id */
    _Atomic uint64_t id[STEPPER_REFUSALS];
};
void stepper_refused(struct stepper_refusals *refusals, uint64_t id);

struct stepper_attachment { /* what the store handed over */
    struct kv_layout layout;
    struct control_header *control; /* passed control_header_check */
    uint8_t *device;                /* device_bytes; NULL: on a GPU, the control segment says where */
    int store_bell;                 /* doorbell */
    uint32_t early_layers;          /* mixed selection: layers that use the set before */
    const atomic_uint *losses;      /* times that the retriever was lost, counted by any thread; NULL: none */
    const unsigned *losses_heard; /* of them, by this thread: a sparse step that waits tells of the others */
    const struct stepper_refusals *refusals; /* NULL: none */
    struct awake *awake;                     /* hears of each step; NULL: none */
};

struct stepper;

struct pass_gpu;
struct step_gpu_figures;

/* Segments, the doorbell and the pass are borrowed. On a GPU: opens the store's device memory there; -EPROTO
 * when it is not on this GPU. */
struct stepper *stepper_create(const struct stepper_attachment *attachment, struct pass *pass);
int stepper_create_gpu(const struct stepper_attachment *attachment, struct pass_gpu *pass,
                       struct stepper **ret_stepper, struct err *err);
void stepper_free(struct stepper **stepper);

/* Where hidden states go from now on, between steps; NULL: nowhere. Borrowed. */
void stepper_export(struct stepper *s, struct export *export);

/* Who is told, once or more, of a sequence that the retriever refused while a sparse step of it waits. The
 * step goes on without it once the store has heard its CLOSE. */
void stepper_on_refused(struct stepper *s, void (*refused)(void *arg, uint64_t id), void *arg);

/* Who is told, once in a step, that the retriever was lost while a sparse step of it waits, or a step for it
 * to have read rows that the step writes. The step goes on without those that are closed then. */
void stepper_on_lost(struct stepper *s, void (*lost)(void *arg), void *arg);

/* Who is called once in each stepper_run, to do what nobody waits for: as soon as the step is computed, or
 * its tables are late, and nothing is wanted of this thread; at the latest before stepper_run returns, also
 * if it fails. */
void stepper_on_meanwhile(struct stepper *s, void (*meanwhile)(void *arg), void *arg);

/* Takes over the resident set that the store proposes, if it is another: call between steps only. */
void stepper_adopt_residents(struct stepper *s);

uint32_t stepper_next(const struct stepper *s); /* the step that the next stepper_post posts */

/* Positions that a dense step may touch, all parts together, each rounded up to whole pages; UINT32_MAX: as
 * many as there are. `sure`: only if layers are offloaded for certain, not when a resident set that no step
 * has used yet may offload some. */
uint32_t stepper_dense_limit(const struct stepper *s, int sure);

/* Writes the record and tells the store. From here on the store has the ids. */
void stepper_post(struct stepper *s, const struct stepper_spec *spec);

/* Computes the step posted last and chooses tokens; ret_verdicts [spec->count]. -ETIMEDOUT,
 * -ECANCELED (aborted) or -EPROTO: the step was dropped whole, no further one can be posted. */
int stepper_run(struct stepper *s, const struct stepper_spec *spec, struct stepper_verdict *ret_verdicts,
                struct err *err);

/* One of attachment.refusals has been dealt with; of those that have not a sparse step that waits tells. */
void stepper_retriever_refused(struct stepper *s);

const struct stepper_times *stepper_times(const struct stepper *s);

void stepper_gpu_figures(const struct stepper *s, struct step_gpu_figures *ret); /* zeros on the CPU */

#endif
