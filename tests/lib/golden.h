/* llama.cpp's logits of a text and what lies between them and ours; tests/vectors/golden_smollm2_q4_1.md
 * describes the format. */
#ifndef TESTS_LIB_GOLDEN_H
#define TESTS_LIB_GOLDEN_H

#include <stdint.h>

struct golden {
    uint8_t *file;
    uint32_t positions, top_k, vocab;
    const double *lse;       /* [positions] log of the sum of exponentials */
    const uint32_t *ids;     /* [positions + 1] */
    const float *next;       /* [positions] logit of the id that follows */
    const uint32_t *top_ids; /* [positions][top_k] */
    const float *top;        /* [positions][top_k], falling */
};

struct golden_figures {
    double loss, loss_ref, kl; /* sums over positions */
    uint32_t positions, agree;
    double gap_max; /* of disagreements: by how much the reference prefers its own choice */
};

/* A file that cannot be read or makes no sense aborts. */
void golden_open(struct golden *golden, const char *path);
void golden_close(struct golden *golden);

/* Adds position p, of which `row` [vocab] are the logits. The KL divergence is taken over the top ids and one
 * bucket for all others: a lower bound of the whole. */
void golden_compare(struct golden_figures *to, const struct golden *golden, uint32_t p, const float *row);

/* One line of figures on standard output. */
void golden_print(const struct golden_figures *figures);

#endif
