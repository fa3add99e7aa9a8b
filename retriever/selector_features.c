/* Hidden states of the model, which some heads read: the segment that they come by, the rows that steps name,
 * and the keys of prompts that are kept, since they cannot be made again of a cached prefix. Owner: as
 * selector.c.
 *
 * Behind the keys of a block that is kept lies the row of its last position: the key of the position behind
 * it is made of that. */
#include "retriever/selector_private.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

bool selector_reads_features(const struct selector *s)
{
    return s->head->features == HEAD_FEATURES_TARGET;
}

/* Of one block, all groups. */
static uint64_t block_key_bytes(const struct selector *s)
{
    uint64_t one = s->card ? card_key_bytes(s->card) : s->lists * s->head->head_dim * sizeof(uint16_t);
    return BLOCK_TOKENS * one;
}

/* Keys beside rows of another type are of no use. */
static void renew_kept(struct selector *s)
{
    uint64_t row_bytes = rows_row_bytes(s->rows);
    enum dtype type = rows_type(s->rows);
    if (!s->options.kept_bytes || (s->kept && s->kept_row_bytes == row_bytes && s->kept_type == type))
        return;
    for (uint32_t i = 0; i < s->options.sequences; i++)
        kept_close(&s->sequences[i].chain);
    kept_free(&s->kept);
    s->kept = kept_create(block_key_bytes(s) + row_bytes, s->options.kept_bytes);
    s->kept_row_bytes = row_bytes;
    s->kept_type = type;
}

int selector_take_features(struct selector *s, int fd, const struct selector_peers *peers, struct err *err)
{
    struct rows_wanted wanted = {.decoder_epoch = peers->decoder_epoch,
                                 .retriever_epoch = peers->retriever_epoch,
                                 .head = s->head,
                                 .api = s->card ? card_api(s->card) : NULL,
                                 .gpu = s->card ? card_gpu(s->card) : NULL};
    selector_drop_features(s);
    int rc = rows_open(fd, &wanted, &s->rows, err);
    if (rc < 0)
        return rc;
    if (s->card)
        card_set_features(s->card, rows_at(s->rows), rows_count(s->rows));
    renew_kept(s);
    return 0;
}

void selector_drop_features(struct selector *s)
{
    if (s->card)
        card_set_features(s->card, NULL, 0);
    rows_close(&s->rows);
}

int selector_check_features(const struct selector *s, const struct sequence *q, const struct msg_step *msg,
                            uint32_t i, struct err *err)
{
    const struct msg_step_entry *e = &msg->entries[i];
    uint32_t needed = e->count - !q->begun;
    if (!selector_reads_features(s))
        return 0;
    if (!s->rows || msg->features.count != msg->entry_count)
        return err_set(err, -ENOTCONN,
                       "sequence %" PRIu64
                       ": found %s, expected hidden states of the model, which the head reads",
                       e->sequence, s->rows ? "no rows" : "no feature segment");
    uint32_t first = msg->features.at[i], rows = rows_count(s->rows);
    if (needed && (first >= rows || needed > rows - first))
        return err_set(err, -EINVAL,
                       "sequence %" PRIu64 ": features: found %" PRIu32 " rows from %" PRIu32
                       " on, expected at most %" PRIu32 " rows in all",
                       e->sequence, needed, first, rows);
    return 0;
}

void selector_aim_features(const struct selector *s, uint32_t row, struct projection_part *part)
{
    if (!s->rows)
        return;
    part->features_type = rows_type(s->rows);
    if (row >= rows_count(s->rows))
        return; /* it needs none */
    part->feature_row = row;
    part->features = rows_at(s->rows) + row * rows_row_bytes(s->rows);
}

/* ---- keys that are kept ---- */

void selector_open_kept(struct selector *s, struct sequence *q, const struct msg_open *open)
{
    if (s->kept && (open->flags & OPEN_REUSE))
        kept_open(s->kept, &q->chain, open->salt, open->tokens.at, open->tokens.count);
}

uint32_t selector_kept(const struct selector *s, uint64_t sequence)
{
    for (uint32_t i = 0; sequence && i < s->options.sequences; i++)
        if (s->sequences[i].id == sequence)
            return s->sequences[i].chain.blocks * BLOCK_TOKENS;
    return 0;
}

void selector_begin_kept(struct selector *s, struct sequence *q, uint32_t position,
                         struct projection_part *part)
{
    uint32_t blocks = position / BLOCK_TOKENS;
    q->begun = true;
    if (!q->chain.tokens)
        return;
    kept_cut(&q->chain, blocks);
    if (blocks == 0)
        return;
    const uint8_t **data = mem_alloc(blocks, sizeof *data);
    kept_list(&q->chain, data);
    if (!s->card)
        keys_reserve(&q->keys, position);
    for (uint32_t i = 0; i < blocks; i++)
        if (s->card)
            card_write_block(s->card, selector_place(s, q), i * BLOCK_TOKENS, data[i]);
        else
            keys_write_block(&q->keys, i * BLOCK_TOKENS, data[i]);
    if (s->card)
        card_sync(s->card);
    keys_advance(&q->keys, q->chain.tokens, position);
    s->stats.kept_tokens += position;
    part->before = data[blocks - 1] + block_key_bytes(s);
    mem_free(&data);
}

/* Block `number` of the sequence, and the row of its last position, which the step has named. */
static void fill(struct selector *s, const struct sequence *q, uint32_t number,
                 const struct projection_part *part, uint8_t *to)
{
    uint32_t position = number * BLOCK_TOKENS, first = q->keys.count - part->count; /* of the part */
    uint32_t behind = position + BLOCK_TOKENS - first;                              /* token of the part */
    bool begins = first == 0 || part->before;
    CHECK(behind < part->count && behind >= begins);
    uint32_t row = part->feature_row + behind - begins;
    if (s->card) {
        card_read_block(s->card, part->place, position, to);
        card_read_row(s->card, row, to + block_key_bytes(s));
        card_sync(s->card);
        return;
    }
    keys_read_block(&q->keys, position, to);
    memcpy(to + block_key_bytes(s), rows_at(s->rows) + row * s->kept_row_bytes, s->kept_row_bytes);
}

void selector_keep(struct selector *s, uint32_t parts)
{
    for (uint32_t i = 0; s->kept && i < parts; i++) {
        const struct projection_part *part = &s->parts[i];
        struct sequence *q = &s->sequences[part->place];
        struct kept_chain *c = &q->chain;
        while (c->tokens && !c->ended) {
            uint32_t number = c->blocks, end = (number + 1) * BLOCK_TOKENS;
            if (end > c->count || end >= q->keys.count)
                break; /* or the row of its last position is to come */
            uint8_t *to = kept_add(s->kept, c);
            if (to)
                fill(s, q, number, part, to);
        }
    }
}
