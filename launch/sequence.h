/* What one prompt has become so far: ids, text, times, the decoder's last word. */
#ifndef LAUNCH_SEQUENCE_H
#define LAUNCH_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "model/detok.h"
#include "model/tokenizer.h"
#include "proto/msg.h"

struct sequence {
    const struct token_buf *prompt; /* borrowed */
    struct token_buf generated;
    struct text_buf text; /* valid UTF-8 */
    struct detokenizer detok;
    int64_t sent_ns, first_ns;  /* 0: not yet */
    uint32_t prefilled, cached; /* as PROGRESS told */
    bool sent, finished;
    struct msg_done done; /* valid when finished */
};

void sequence_begin(struct sequence *sequence, const struct token_buf *prompt);
void sequence_free(struct sequence *sequence); /* accepts a zeroed one, leaves it zeroed */

/* Takes new ids; the text that they add stands at the end of sequence->text. */
void sequence_push(struct sequence *sequence, const struct tokenizer *tokenizer, const struct msg_u32s *ids);

/* Takes the last word; the text is complete afterwards. */
void sequence_finish(struct sequence *sequence, const struct msg_done *done);

double sequence_ttft_ms(const struct sequence *sequence); /* NAN before the first token */
double
sequence_prefill_rate(const struct sequence *sequence); /* computed prompt tokens a second; NAN unknown */
double
sequence_decode_rate(const struct sequence *sequence); /* tokens a second after the first; NAN unknown */

/* Means of the store's counters; NAN where nothing was counted. */
double sequence_attended(const struct kv_counters *counters);
double sequence_overlap(const struct kv_counters *counters);
double sequence_mass(const struct kv_counters *counters);
double sequence_mass_base(const struct kv_counters *counters);

#endif
