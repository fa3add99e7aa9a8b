/* Writes the tables of a step into the control segment: SHARED-MEMORY.md section 3.
 *
 * One owner: the planner; tables_lists of different sequences may run at once. The header used for
 * addresses is a private copy, so nothing that a peer writes into the segment leads the store astray. Page
 * and slab entries are written once per parity and sequence, and again only after they have changed. */
#ifndef KVSTORE_TABLES_H
#define KVSTORE_TABLES_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/sequence.h"
#include "proto/control.h"

struct tables {
    struct control_header header; /* private copy */
    struct table_view view[2];    /* per parity */
    uint32_t resident[2];         /* layers on the device, per parity */
};

/* `control` is mapped read-write and holds an initialised header. */
void tables_init(struct tables *tables, struct control_header *control);

/* Begins the tables of a step: version and which layers, [0, resident), are on the device. */
void tables_begin(struct tables *tables, uint32_t step, uint32_t version, uint32_t resident);

/* Own pages of layers [layer, end) up to `pages`. */
void tables_pages(struct tables *tables, uint32_t step, struct sequence *sequence, uint32_t pages,
                  const uint32_t layer_end[2]);

/* Staging pages in place of own ones, for one layer of a dense step. */
void tables_staging(struct tables *tables, uint32_t step, struct sequence *sequence, uint32_t layer,
                    const uint64_t *pages, uint32_t count);

void tables_slabs(struct tables *tables, uint32_t step, struct sequence *sequence, uint32_t layer);

/* Lists of one phase from the set in use: sinks, selection, [limit, position]; and the slots to write to. The
 * late phase (1) is the one that counts as attended: of a set that is short, everything in layers on the
 * device. */
void tables_lists(struct tables *tables, uint32_t step, uint32_t phase, struct sequence *sequence,
                  uint32_t position);

/* The part of a phase's lists for `position` that is known before the step, from the set that will be in use
 * then - the next one if there is one, staged: all of those of groups without slots; of the others sinks,
 * selection, and what of the window is pinned already, and the step's own position too if the set is in use
 * and it is known which slot that will get. tables_lists adds the rest if everything is as it was.
 * Calls for different sequences may run at once. */
void tables_draft(struct tables *tables, uint32_t step, uint32_t phase, struct sequence *sequence,
                  uint32_t position);

/* Whether tables_lists will find nothing to add: all is drafted, from the set in use. What the step reads may
 * then be pinned behind it. */
bool tables_are_drafted(const struct sequence *sequence, uint32_t step, uint32_t phase, uint32_t position);

void tables_entry(struct tables *tables, uint32_t step, uint32_t phase, uint32_t index, int32_t status,
                  uint32_t loaded);

/* Behind tables_entry: layers on the device attend all positions in this phase. */
void tables_attend_all(struct tables *tables, uint32_t step, uint32_t phase, uint32_t index);

#endif
